"""Recordings: lossless, readable by other tools; a killed or starved recorder loses little and reports it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.rollout.memory import RecurrentPolicy
from policies.recurrent import RecurrentConfig
from real_robot.recording import driven
from real_robot.recording import recorder as recorder_module
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Decided, Episode, Gap, Recording, Tick
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict

CONTRACT = Contract(
    {
        "position": TensorSpec((3,), unit="m", frame="world", names=("x", "y", "z")),
        "camera": TensorSpec((8, 6, 3), "uint8", frame="wrist"),
        "instruction": TensorSpec((4,), "int64"),
        "objects": TensorSpec((-1, 2)),
        "secret": TensorSpec((1,), privileged=True),
    },
    TensorSpec((2,), unit="rad/s", names=("left", "right"), low=(-1.0, -1.0), high=(1.0, 1.0)),
    control_dt_s=0.02,
)


def reading(index: int) -> Reading:
    rng = np.random.default_rng(index)
    observation = {
        "position": rng.normal(size=3).astype(np.float32),
        "camera": rng.integers(0, 256, (8, 6, 3), dtype=np.uint8),
        "instruction": rng.integers(-5, 1 << 40, 4),
        "objects": rng.normal(size=(index % 3, 2)).astype(np.float32),
    }
    return Reading(observation, 100.0 + index / 3, index, {"position": "map"})


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def record(path: Path, ticks: int) -> None:
    with Recorder(path, CONTRACT, origin={"checkpoint": "runs/7"}, clock=lambda: 99.5) as recorder:
        recorder.begin_episode("stack the cups")
        for index in range(ticks):
            asked = np.array([0.1 * index, np.nan], np.float32)
            recorder.write(100.0 + index / 3, reading(index), asked, Verdict(State.ACTIVE, np.array([0.5, -1 / 3])))
        recorder.write(200.0, None, None, Verdict(State.STOPPED, None, "pressed", limited=True), intervention=True)


def test_everything_comes_back(tmp_path: Path):
    record(tmp_path / "a.mcap", 5)
    recording = Recording(tmp_path / "a.mcap")
    episode, *ticks, last = recording
    assert recording.complete
    assert (recording.contract, recording.origin) == (CONTRACT, {"checkpoint": "runs/7"})
    assert episode == Episode(99.5, "stack the cups")
    for index, tick in enumerate(ticks):
        expected = reading(index)
        assert isinstance(tick, Tick)
        assert tick.reading is not None
        assert (tick.now_s, tick.reading.stamp_s, tick.reading.sequence) == (100.0 + index / 3, expected.stamp_s, index)
        assert tick.reading.frames == {"position": "map"}
        assert tick.reading.observation.keys() == expected.observation.keys()
        assert all(same(tick.reading.observation[key], value) for key, value in expected.observation.items())
        assert same(tick.proposed_action, np.array([0.1 * index, np.nan], np.float32))
        assert same(tick.verdict.action, np.array([0.5, -1 / 3]))
    assert len(ticks) == 5
    assert last == Tick(200.0, None, None, Verdict(State.STOPPED, None, "pressed", limited=True), intervention=True)


def test_other_readers_of_ros_bags_agree(tmp_path: Path):
    from mcap.reader import make_reader
    from mcap_ros2.decoder import DecoderFactory
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_typestore

    path = tmp_path / "a.mcap"
    record(path, 4)
    found: dict[str, list] = {}
    with AnyReader([path], default_typestore=get_typestore(Stores.ROS2_JAZZY)) as reader:
        for connection, _, data in reader.messages():
            found.setdefault(connection.topic, []).append(reader.deserialize(data, connection.msgtype))
    with path.open("rb") as file:
        decoded: dict[str, list] = {}
        for _, channel, message, value in make_reader(
            file, decoder_factories=[DecoderFactory()]
        ).iter_decoded_messages():
            decoded.setdefault(channel.topic, []).append((message.log_time, value))
            if channel.topic == "/embodied/observation/position":
                assert channel.metadata == {"dtype": "float32", "unit": "m", "frame": "world", "names": "x,y,z"}
    for index in range(4):
        expected = reading(index)
        position, image = (found[f"/embodied/observation/{key}"][index] for key in ("position", "camera"))
        assert same(position.data, expected.observation["position"])
        assert (image.encoding, image.height, image.width, image.step) == ("rgb8", 8, 6, 18)
        assert image.header.frame_id == "wrist"
        assert image.header.stamp.sec + image.header.stamp.nanosec / 1e9 == pytest.approx(expected.stamp_s, abs=1e-8)
        assert same(image.data.reshape(8, 6, 3), expected.observation["camera"])
        log_time, value = decoded["/embodied/observation/instruction"][index]
        assert log_time == round(expected.stamp_s * 1e9)
        assert list(value.data) == expected.observation["instruction"].tolist()


KILLED = """
import sys, time
import numpy as np
from tests.real_robot.recording.test_recording import CONTRACT, reading
from real_robot.recording.recorder import Recorder
from real_robot.safety.safety import State, Verdict
recorder = Recorder(sys.argv[1], CONTRACT)
recorder.begin_episode()
for index in range(10**6):
    recorder.write(time.monotonic(), reading(index), np.zeros(2, np.float32), Verdict(State.ACTIVE, np.zeros(2)))
    print(index, flush=True)
    time.sleep(0.002)
"""


def test_a_killed_recorder_leaves_all_but_the_last_chunk(tmp_path: Path):
    path = tmp_path / "killed.mcap"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    written = 0
    for line in process.stdout:
        written = int(line) + 1
        if written == 600:
            process.kill()
            break
    process.wait()
    recording = Recording(path)
    ticks = [item for item in recording if isinstance(item, Tick)]
    assert process.returncode == -signal.SIGKILL
    assert not recording.complete
    assert recording.contract == CONTRACT
    second = round(1.0 / CONTRACT.control_dt_s)
    assert len(ticks) >= written - 4 * second
    assert all(
        same(tick.reading.observation["camera"], reading(i).observation["camera"]) for i, tick in enumerate(ticks)
    )


@pytest.mark.parametrize("cut", [9, 1000, -1, -20])
def test_a_cut_file_ends_with_its_last_whole_chunk(tmp_path: Path, cut: int):
    record(tmp_path / "a.mcap", 200)
    data = (tmp_path / "a.mcap").read_bytes()
    (tmp_path / "cut.mcap").write_bytes(data[:cut])
    if cut in (9, 1000):
        with pytest.raises(ValueError, match="expected a recording"):
            Recording(tmp_path / "cut.mcap")
        return
    cut_off = Recording(tmp_path / "cut.mcap")
    assert len(list(cut_off)) == 202
    assert cut_off.damage == ""  # the end of the data is whole


def test_what_the_disk_cannot_follow_is_dropped_counted_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    contract = Contract({"camera": TensorSpec((512, 512, 3), "uint8")}, TensorSpec((1,)), 0.1)
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    with Recorder(tmp_path / "a.mcap", contract, capacity_bytes=3 << 20) as recorder:
        started = time.monotonic()
        for index in range(100):
            verdict = Verdict(State.ACTIVE, np.zeros(1))
            recorder.write(index / 10, Reading({"camera": noise}, index / 10, index), np.zeros(1), verdict)
        took = time.monotonic() - started
        while recorder._waiting_bytes:
            time.sleep(0.01)
        recorder.begin_episode("after")
    items = list(Recording(tmp_path / "a.mcap"))
    ticks = [item for item in items if isinstance(item, Tick)]
    assert recorder.dropped > 0
    gaps = [item for item in items if isinstance(item, Gap)]
    assert sum(item.dropped for item in gaps) == recorder.dropped
    assert all(0.0 < gap.stamp_s <= 9.9 for gap in gaps)
    assert len(ticks) + recorder.dropped == 100
    assert isinstance(items[-1], Episode)
    assert "drops items" in caplog.text
    assert f"{recorder.dropped} items were dropped" in caplog.text
    assert took < 5.0  # a loop that waited for the disk would take as long as 79 MB of noise take to compress


def keep(recorder: Recorder, now_s: float, size: int) -> None:
    """Record a period in which so many bytes were measured."""
    measured = Reading({"camera": np.zeros(size, np.uint8)}, now_s, 0)
    recorder.write(now_s, measured, None, Verdict(State.ACTIVE, None))


def logged(path: Path) -> dict[str, list[float]]:
    """Log times in s by topic, as other tools see them."""
    from mcap.reader import make_reader

    found: dict[str, list[float]] = {}
    with path.open("rb") as file:
        for _, channel, message in make_reader(file).iter_messages():
            found.setdefault(channel.topic, []).append(message.log_time / 1e9)
    return found


def test_what_waits_is_bounded_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()  # the disk stands still until then
    write = recorder_module._File.write
    monkeypatch.setattr(recorder_module._File, "write", lambda file, item: (go.wait(60), write(file, item)))
    with Recorder(tmp_path / "a.mcap", CONTRACT, capacity_bytes=1 << 20) as recorder:
        for index in range(50):
            keep(recorder, 7.0 + index, 200_000)
        assert recorder.dropped == 45
        assert recorder._waiting_bytes < 1 << 20
        go.set()
    *ticks, gap = Recording(tmp_path / "a.mcap")
    assert len(ticks) == 5
    assert gap == Gap(45, 56.0)  # although nothing came after it
    assert logged(tmp_path / "a.mcap")["/embodied/gap"] == [56.0]


@pytest.mark.parametrize("ticks", [2, 100])  # before the first episode ends
def test_no_outcome_is_dropped_where_the_disk_cannot_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticks: int
):
    go = threading.Event()
    write = recorder_module._File.write
    monkeypatch.setattr(recorder_module._File, "write", lambda file, item: (go.wait(60), write(file, item)))
    contract = Contract({"speed": TensorSpec((1,))}, TensorSpec((1,)), 0.02)

    def drive(first: int, count: int) -> None:
        for index in range(first, first + count):
            measured = Reading({"speed": np.zeros(1, np.float32)}, 0.02 * index, index)
            recorder.write(0.02 * index, measured, None, Verdict(State.ACTIVE, np.zeros(1)))

    with Recorder(tmp_path / "a.mcap", contract, capacity_bytes=64 << 10) as recorder:
        recorder.begin_episode("failed")
        drive(0, ticks)
        recorder.end_episode(success=False)
        drive(100, 100)
        recorder.begin_episode("done")
        go.set()
        while recorder._waiting_bytes:
            time.sleep(0.01)
        drive(200, 2)
        recorder.end_episode(success=True)
    recording = Recording(tmp_path / "a.mcap")
    assert recorder.dropped > 30
    assert recording.outcomes() == {0: False, 1: True}
    *before, (task, episode) = driven.episodes(recording)
    assert all(earlier.failed.all() for _, earlier in before)
    assert (task, len(episode), bool(episode.success.all())) == ("done", 2, True)


def test_small_items_are_not_dropped_as_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()
    write = recorder_module._File.write
    monkeypatch.setattr(recorder_module._File, "write", lambda file, item: (go.wait(60), write(file, item)))
    with Recorder(tmp_path / "a.mcap", CONTRACT) as recorder:
        for index in range(20_000):  # 20 s at 1 kHz
            keep(recorder, index / 1000, 20)
        go.set()
    assert recorder.dropped == 0


def test_an_item_that_is_larger_than_all_memory_for_what_waits_is_written(tmp_path: Path):
    with Recorder(tmp_path / "a.mcap", CONTRACT, capacity_bytes=10) as recorder:
        keep(recorder, 1.0, 200_000)
    assert recorder.dropped == 0


FULL = """
import resource, sys
import numpy as np
from tests.real_robot.recording.test_recording import CONTRACT, reading
from real_robot.recording.recorder import Recorder
from real_robot.safety.safety import State, Verdict
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
recorder = Recorder(sys.argv[1], CONTRACT)
for index in range(1000):
    recorder.write(index * 0.02, reading(index), np.zeros(2, np.float32), Verdict(State.ACTIVE, np.zeros(2)))
try:
    recorder.close()
except OSError as error:
    print("failed:", error)
"""


def test_a_full_disk_never_stops_the_loop_and_is_reported(tmp_path: Path):
    path = tmp_path / "full.mcap"
    # -B: bytecode of what the child imports would be truncated by the limit, and break every later program.
    run = subprocess.run(
        [sys.executable, "-B", "-c", FULL, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "failed: [Errno 27]" in run.stdout
    ticks = [item for item in Recording(path) if isinstance(item, Tick)]
    assert 0 < len(ticks) < 1000


def test_what_cannot_be_written_is_reported_and_never_stops_the_loop(tmp_path: Path):
    recorder = Recorder(tmp_path / "bag.mcap", CONTRACT)
    for index in range(50):
        strange = Reading({"position": np.zeros(3, np.complex64)}, 0.0, index)
        recorder.write(0.0, strange, None, Verdict(State.ACTIVE, None))
        time.sleep(0.002)
    assert recorder.dropped > 0
    with pytest.raises(ValueError, match="complex64"):
        recorder.close()


def test_what_cannot_be_recorded_is_refused(tmp_path: Path):
    (tmp_path / "there.mcap").write_bytes(b"")
    with pytest.raises(ValueError, match="never overwritten"):
        Recorder(tmp_path / "there.mcap", CONTRACT)
    odd = Contract({"depth": TensorSpec((4, 4), "float16")}, TensorSpec((1,)), 0.1)
    with pytest.raises(ValueError, match="depth: cannot record arrays of float16"):
        Recorder(tmp_path / "odd.mcap", odd)
    with pytest.raises(ValueError, match=r"nothing\.mcap"):
        Recording(tmp_path / "nothing.mcap")
    (tmp_path / "text.mcap").write_text("no recording at all")
    with pytest.raises(ValueError, match=r"text\.mcap"):
        Recording(tmp_path / "text.mcap")


def test_a_watched_policy_is_the_policy(tmp_path: Path):
    contract = Contract({"x": TensorSpec((2,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), 0.1, 3, 2)
    policy = RecurrentConfig(memory=4).build(contract)
    policy.fit(TensorDict({"x": torch.randn(50, 2)}, batch_size=[50]), torch.zeros(50, 1))
    with Recorder(tmp_path / "a.mcap", contract) as recorder:
        watched = recorder.watch(policy)
        assert isinstance(watched, RecurrentPolicy)
        observation = TensorDict({"x": torch.randn(1, 2), "memory": policy.initial_memory(1)}, batch_size=[1])
        decision = watched.act(observation, deterministic=True)
        assert torch.equal(decision.actions, policy.act(observation, deterministic=True).actions)
        assert torch.equal(watched.act(observation).actions, decision.actions)
        with pytest.raises(ValueError, match="batch of 2"):
            watched.act(torch.cat([observation, observation]))
    item, again = Recording(tmp_path / "a.mcap")
    assert isinstance(item, Decided)
    assert isinstance(again, Decided)
    assert again.deterministic
    assert same(item.actions, decision.actions[0].numpy())
    assert same(item.observation["x"], observation["x"][0].numpy())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_an_unwritable_folder_is_reported(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="denied"):
        Recorder(tmp_path / "a.mcap", CONTRACT)
