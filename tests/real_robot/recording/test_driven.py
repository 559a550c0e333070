"""Recordings as episodes for a contract: measured values bit for bit, elements in the contract's order."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mcap.writer import Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from embodied.contract import TensorSpec
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes
from embodied.errors import UserError
from real_robot.recording import cdr, driven, lerobot_dataset
from real_robot.recording.data_sets.matching import MatchOptions
from real_robot.recording.demonstrations import demonstrations
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict
from tests.real_robot.recording.test_lerobot_dataset import CONTRACT, DT_S, LENGTHS, STEPS, drive, recording, seen

__all__ = ["recording"]
TURNED = replace(
    CONTRACT,
    observation={
        "joint_position": TensorSpec((2,), unit="rad", names=("wrist", "shoulder")),
        "objects": TensorSpec((-1, 2), unit="m", frame="world", names=("y", "x")),
        "force": TensorSpec((1,), privileged=True),
    },
    action=TensorSpec((2,), unit="rad/s", names=("elbow", "shoulder"), low=(-1.0, -1.0), high=(1.0, 1.0)),
)


def test_episodes_are_what_was_driven_without_a_break(recording: Recording):
    found = list(driven.episodes(recording))
    assert [task for task, _ in found] == ["pick", "place", "place", "place", "place"]
    assert [len(episode) for _, episode in found] == LENGTHS
    for steps, (_, episode) in zip(STEPS, found, strict=True):
        assert episode.human.tolist() == [step == 1 for step in steps]
        assert (episode.success == UNKNOWN).all()
        for row, step in enumerate(steps):
            assert torch.equal(episode.actions[row], torch.tensor([step / 10, -step / 10]))
            for key, value in seen(step).items():
                assert torch.equal(episode.observation[key][row], torch.from_numpy(value))


def test_a_hold_of_safety_marks_the_step_before_it_and_a_missing_command_does_not(tmp_path: Path):
    path = tmp_path / "held.mcap"
    with Recorder(path, CONTRACT) as recorder:
        recorder.begin_episode("pick")
        drive(recorder, range(3))
        recorder.write(3 * DT_S, Reading(seen(3), 3 * DT_S, 3), None, Verdict(State.HOLDING, None, "stale"))
        drive(recorder, range(4, 6))
        recorder.write(6 * DT_S, Reading(seen(6), 6 * DT_S, 6), None, Verdict(State.HOLDING, None, "no command"))
        drive(recorder, range(7, 9))
        recorder.end_episode(success=True)
    options = MatchOptions(columns={"hold": driven.VERDICT})
    found = demonstrations(path, CONTRACT, tmp_path / "run", options=options)
    assert found.signals["hold"].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert found.ends.tolist() == [3, 5, 7]
    assert next(iter(driven.episodes(Recording(path))))[1].signals is None


def test_they_serve_a_contract_with_other_orders(recording: Recording, tmp_path: Path):
    found = demonstrations(recording.path, TURNED, tmp_path / "run")
    assert set(found.observation.keys()) == {"joint_position", "objects"}
    assert found.ends.tolist() == np.cumsum(LENGTHS).tolist()
    for row, step in enumerate(step for steps in STEPS for step in steps):
        assert torch.equal(found.observation["joint_position"][row], torch.tensor(seen(step)["joint_position"][[2, 0]]))
        assert torch.equal(found.observation["objects"][row], torch.tensor(seen(step)["objects"][:, [1, 0]]))
        assert torch.equal(found.actions[row], torch.tensor([-step / 10, step / 10]))


def test_three_actions_are_put_back_into_the_policys_order(tmp_path: Path):
    named = TensorSpec((3,), names=("a", "b", "c"))
    contract = replace(CONTRACT, observation={"x": TensorSpec((1,))}, action=named)
    with Recorder(tmp_path / "a.mcap", contract) as recorder:
        reading = Reading({"x": np.zeros(1, np.float32)}, 0.0, 0)
        recorder.write(0.0, reading, None, Verdict(State.ACTIVE, np.array([1.0, 2.0, 3.0])))
    wanted = replace(contract, action=replace(named, names=("c", "a", "b")))
    lerobot_dataset.write([Recording(tmp_path / "a.mcap")], tmp_path / "data")
    for source in ("a.mcap", "data"):
        found = demonstrations(tmp_path / source, wanted, tmp_path / f"run of {source}")
        assert found.actions.tolist() == [[3.0, 1.0, 2.0]]


def test_a_folder_of_recordings_is_read_in_order_and_once(tmp_path: Path):
    for name, steps in (("b.mcap", range(2)), ("a.mcap", range(3, 6))):
        with Recorder(tmp_path / name, CONTRACT) as recorder:
            recorder.begin_episode("pick")
            drive(recorder, steps)
    for _ in range(2):
        found = demonstrations(tmp_path, CONTRACT, tmp_path / "run")
        assert found.ends.tolist() == [3, 5]
    with pytest.raises(
        UserError, match=r"made for something else \(source: expected .*a\.mcap, got .*; choose another output"
    ):
        demonstrations(tmp_path / "a.mcap", CONTRACT, tmp_path / "run")
    (tmp_path / "b.mcap").unlink()
    with pytest.raises(UserError, match=r"has changed since .*run began; restore it, or begin another run"):
        demonstrations(tmp_path, CONTRACT, tmp_path / "run")


def test_what_cannot_be_read_is_one_line(recording: Recording, tmp_path: Path):
    wrong = replace(CONTRACT, observation={"joint_position": TensorSpec((3,), unit="deg")}, control_dt_s=0.05)
    with Recorder(tmp_path / "held.mcap", CONTRACT) as recorder:
        recorder.write(DT_S, Reading(seen(0), 0.0, 0), None, Verdict(State.HOLDING, None, "no command"))
    for source, contract, message in (
        (
            recording.path,
            wrong,
            r"a\.mcap does not serve the contract: .*unit: expected 'deg', got 'rad'.*control_dt_s",
        ),
        (tmp_path / "held.mcap", CONTRACT, "these recordings have no tick with both"),
        (tmp_path / "none.mcap", CONTRACT, "cannot read .*none"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            demonstrations(source, contract, tmp_path / "run")
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "run").exists()


def test_failures_are_kept_and_not_imitated(tmp_path: Path):
    with Recorder(tmp_path / "a.mcap", CONTRACT) as recorder:
        for task, success in (("first", True), ("second", False), ("third", None), ("fourth", True)):
            recorder.begin_episode(task)
            drive(recorder, range(3))
            stop = Verdict(State.HOLDING, np.zeros(2), "held")  # a step of it
            recorder.write(9.0, Reading(seen(4), 9.0, 4), None, stop)
            drive(recorder, range(6, 8))
            if success is not None:
                recorder.end_episode(success=success)
    recording = Recording(tmp_path / "a.mcap")
    assert recording.outcomes() == {0: True, 1: False, 3: True}
    found = [(task, len(episode), episode.success.item()) for task, episode in driven.episodes(recording)]
    outcomes = [UNKNOWN, SUCCEEDED, FAILED, FAILED, UNKNOWN, UNKNOWN, UNKNOWN, SUCCEEDED]
    names = ("first", "second", "third", "fourth")
    lengths = [(name, length) for name in names for length in (3, 2)]
    assert found == [(*each, outcome) for each, outcome in zip(lengths, outcomes, strict=True)]
    lerobot_dataset.write([recording], tmp_path / "data")
    for source in ("data", "a.mcap"):
        kept = demonstrations(tmp_path / source, CONTRACT, tmp_path / f"run of {source}")
        assert kept.success.tolist() == outcomes
        assert kept.imitated_rows().tolist() == [*range(5), *range(10, 20)]
        assert len(kept.by_weight()[1]) == 15


def test_recordings_of_failures_alone_are_read_and_not_imitated(tmp_path: Path):
    with Recorder(tmp_path / "a.mcap", CONTRACT) as recorder:
        for _ in range(2):
            recorder.begin_episode("pick")
            drive(recorder, range(3))
            recorder.end_episode(success=False)
    lerobot_dataset.write([Recording(tmp_path / "a.mcap")], tmp_path / "data")
    for source in ("data", "a.mcap"):
        failures = demonstrations(tmp_path / source, CONTRACT, tmp_path / f"run of {source}")
        assert len(failures.by_weight()[1]) == 6
        with pytest.raises(UserError, match=f"all 2 episodes of .*{source} failed; imitation needs others"):
            failures.check_imitable()


def judged(path: Path) -> Path:
    """Two episodes of three steps, and a bag of scores, efforts as JSON, a mark of failure, and one of the end."""
    now_s = 0.0
    with Recorder(path, CONTRACT, clock=lambda: now_s) as recorder:
        for now_s in (0.0, 1.0):
            recorder.begin_episode("pick")
            drive(recorder, range(3), first_s=now_s)
    bag = path.with_name(f"{path.stem}_bag") / "bag_0.mcap"
    bag.parent.mkdir()
    messages = [(time_s, "/judge", SCORE, score) for time_s, score in ((0, 1.0), (0.05, 2.0), (0.5, -1.0), (1.1, 8.0))]
    messages += [(0.9, "/good", BOOL, False), (1.1, "/good", BOOL, True), (1.1, "/over", BOOL, True)]
    efforts = zip((0.0, 0.1, 0.2, 1.0, 1.1, 1.2), range(6), strict=True)
    messages += [(time_s, "/effort", None, effort) for time_s, effort in efforts]
    with bag.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="test")
        schemas = {
            SCORE: writer.register_schema(SCORE, "ros2msg", b"float64 points"),
            BOOL: writer.register_schema(BOOL, "ros2msg", b"bool data"),
            None: writer.register_schema("effort", "jsonschema", b"{}"),
        }
        channels = {
            topic: writer.register_channel(topic, "cdr" if kind else "json", schemas[kind])
            for topic, kind in {topic: kind for _, topic, kind, _ in messages}.items()
        }
        for time_s, topic, kind, value in messages:
            data = bytes(cdr._encode(kind, value)) if kind else json.dumps({"data": value}).encode()
            writer.add_message(channels[topic], int(time_s * 1e9), data, int(time_s * 1e9))
        writer.finish()
    return path


SCORE, BOOL = "judge/msg/Score", "std_msgs/msg/Bool"


def test_topics_of_others_have_rewards_costs_and_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writing, reading = (get_typestore(Stores.ROS2_JAZZY) for _ in range(2))
    writing.register(get_types_from_msg("float64 points", SCORE))
    monkeypatch.setattr(cdr, "_store", lambda: writing)
    path = judged(tmp_path / "arm.mcap")
    monkeypatch.setattr(cdr, "_store", lambda: reading)

    def read(name: str, **columns: str) -> Episodes:
        return demonstrations(path, CONTRACT, tmp_path / name, options=MatchOptions(columns=columns))

    episodes = read("run", reward="/judge:points", effort="/effort", success="/good", terminated="/over")
    assert episodes.ends.tolist() == [3, 5, 6]  # the second ends with its second step
    assert episodes.terminated.tolist() == [False, True, False]
    assert episodes.success.tolist() == [FAILED, SUCCEEDED, UNKNOWN]
    # the sum of the messages of a step; the one from before the next episode is of the last step
    np.testing.assert_array_equal(episodes.reward, [3.0, np.nan, -1.0, np.nan, 8.0, np.nan])
    assert episodes.signals["effort"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    negated = read("negated", success="~/good", terminated="~/over")  # no step without a message is over
    assert negated.ends.tolist() == [3, 6]
    assert negated.success.tolist() == [SUCCEEDED, FAILED]
    with pytest.raises(UserError, match=r"has no column /score .*, for demonstration_columns=reward; it has none"):
        read("a", reward="/score")
    with pytest.raises(UserError, match=r"topic /judge: a judge/msg/Score has no number in its field data .*:FIELD"):
        read("b", reward="/judge")
