"""record.py as a person uses it: keys typed into a terminal drive a robot, and what was recorded trains."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import record
from embodied.command_line.config import compose
from embodied.data.episodes import SUCCEEDED
from real_robot.recording import driven
from real_robot.recording.data_sets import data_set_reading
from real_robot.recording.recording import Recording, Tick
from real_robot.safety.safety import State, Verdict
from tests.programs import run_program
from train import GROUPS, TrainConfig

ROOT = Path(__file__).parent.parent
WAIT_S = 120


class Program:
    """A program of the repository in a terminal of its own."""

    def __init__(self, *arguments: str, name: str = "record.py") -> None:
        self.keys, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, name, *arguments],
            cwd=ROOT,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        self.before = termios.tcgetattr(theirs)
        self.terminal = theirs
        self.said = ""

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def wait(self, pattern: str) -> None:
        """Read what it says until `pattern` is there."""
        watchdog = threading.Timer(WAIT_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        begin = len(self.said)
        while not re.search(pattern, self.said[begin:]):
            line = self.process.stdout.readline()
            assert line, f"{pattern!r} was not said: {self.said}"
            self.said += line
        watchdog.cancel()

    def end(self) -> int:
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        return self.process.wait(WAIT_S)


@contextmanager
def program(*arguments: str, name: str = "record.py") -> Iterator[Program]:
    running = Program(*arguments, name=name)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()
        running.process.stdout.close()
        os.close(running.keys)
        os.close(running.terminal)


class Typist:
    """Holds keys down, as a terminal repeats them, until it has released them."""

    def __init__(self, typed: Program, keys: str) -> None:
        self._typed, self._keys, self._release = typed, keys, threading.Event()
        self._thread = threading.Thread(target=self._repeat)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._release.wait(0.05):
            self._typed.type(self._keys)


def ticks(path: Path) -> list[Tick]:
    return [item for item in Recording(path) if isinstance(item, Tick)]


def recorded(path: Path, count: int) -> bool:
    """Whether `count` more periods are in the file that is being written."""
    return path.exists() and sum(isinstance(item, Tick) for item in Recording(path)) >= count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drives of a vehicle, of which the first failed, then one that was stopped."""
    folder = tmp_path_factory.mktemp("recorded") / "drives"
    with program("task=vehicle_navigate", f"output={folder}", "speed=0.4", "pictures=image") as running:
        for number, (keys, end) in enumerate((("wj", "\x7f"), ("wl", "\n"), ("w", "\x1b"))):
            running.wait(f"episode {number}: success or go begins it")
            running.type("\n")
            with Typist(running, keys):
                drive(running, folder / "recording.mcap", 15 * (number + 1))
            running.type(end)
            running.wait(rf"episode {number}: .* periods")
        running.wait("episode 3: success or go")
        running.type("\x1b")
        assert running.end() == 0, running.said
        assert termios.tcgetattr(running.terminal) == running.before
        assert "episode 0: failure; " in running.said
        assert "episode 1: success; " in running.said
        assert "episode 2: ended: stopped by a person; " in running.said
        assert f"recorded 3 episodes, 1 of them successes: {folder / 'recording.mcap'}" in running.said
    return folder


def test_the_robot_is_an_option_here_and_a_group_of_train() -> None:
    (config, _), values = record.composed(["task=vehicle_navigate", "robot=diff_drive", "options.rate_hz=10"])
    assert (config.robot, values["values"]["robot"]) == ("diff_drive", "diff_drive")


def drive(driven: Program, path: Path, count: int) -> None:
    """Wait until `count` periods are on the disk."""
    pause = threading.Event()
    for _ in range(10 * WAIT_S):
        if recorded(path, count):
            return
        pause.wait(0.1)
    driven.process.kill()
    raise AssertionError(f"{path} did not reach {count} periods: {driven.said}{driven.process.stdout.read()}")


def test_keys_drive_and_all_of_it_is_recorded(folder: Path):
    recording = Recording(folder / "recording.mcap")
    assert recording.origin == {"robot": "simulation", "device": "keyboard", "checkpoint": None}
    assert recording.outcomes() == {0: False, 1: True, 2: False}
    found = ticks(folder / "recording.mcap")
    assert recording.contract.action.names == ("speed", "yaw_rate")
    assert all(tick.intervention for tick in found)  # without a policy every action is the person's
    asked = {tuple(tick.proposed_action.round(3)) for tick in found}
    assert {(0.4, 0.6), (0.4, -0.6), (0.4, 0.0)} <= asked
    assert asked <= {(speed, turn) for speed in (0.0, 0.4) for turn in (0.6, 0.0, -0.6)}
    assert found[-1].verdict == Verdict(State.STOPPED, None, "stopped by a person")
    *pairs, (last_task, last) = driven.episodes(Recording(folder / "recording.mcap"))
    assert {task for task, _ in pairs} == {last_task} == {"vehicle_navigate"}
    (episode,) = (episode for _, episode in pairs if episode.success.item() == SUCCEEDED)
    assert last.failed.item()
    velocity = episode.observation["velocity"]
    assert velocity[:, 0].max() > 0.2  # it moved
    assert velocity[:, 1].min() < -0.3  # and turned to the right


def test_the_dataset_is_what_the_recording_is(folder: Path):
    config, _ = compose(TrainConfig, "train", ["task=vehicle_navigate"], GROUPS)
    contract = config.task.contract(config.task.distributions[0])
    recorded_episodes = [episode for _, episode in driven.episodes(Recording(folder / "recording.mcap"))]
    for written, episode in zip(data_set_reading.read(folder / "lerobot", contract), recorded_episodes, strict=True):
        assert torch.equal(written.actions, episode.actions)
        assert torch.equal(written.success, episode.success)
        for key, values in written.observation.items():
            assert torch.equal(values, episode.observation[key])
        assert written.human.all()


@pytest.mark.parametrize("source", ["recording.mcap", "lerobot"])
def test_it_trains(folder: Path, tmp_path: Path, source: str):
    options = ["task=vehicle_navigate", "stages=[sft]", "sft.steps=400", "sft.batch=16", "evaluation_starts=2"]
    options += ["evaluation_envs=2", "num_envs=2", "task.step_limit=10", "policy.hidden=[16]", "threads=1"]
    options += ["video=false", f"demonstrations={folder / source}", f"output={tmp_path / 'run'}"]
    done = run_program("train.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["sft/loss"] for row in logged if "sft/loss" in row]
    assert losses[-1] < 0.02  # of half action ranges squared: two things were done


def test_it_ends_by_a_signal_and_keeps_what_there_is(tmp_path: Path):
    with program("task=vehicle_navigate", f"output={tmp_path / 'drive'}") as running:
        running.wait("success or go begins it")
        running.type("\n")
        drive(running, tmp_path / "drive/recording.mcap", 5)
        running.process.terminate()
        assert running.end() == 0, running.said
    recording = Recording(tmp_path / "drive/recording.mcap")
    assert len([item for item in recording if isinstance(item, Tick)]) >= 5
    assert recording.complete
    assert recording.outcomes() == {0: False}
    assert not (tmp_path / "drive/lerobot").exists()


def test_a_terminal_that_is_gone_stops_the_robot(tmp_path: Path):
    running = Program("task=vehicle_navigate", f"output={tmp_path / 'drive'}")
    os.close(running.terminal)
    running.wait("success or go begins it")
    running.type("\nw")
    drive(running, tmp_path / "drive/recording.mcap", 5)
    os.close(running.keys)
    assert running.end() == 1
    assert "error: the person's controls are gone: [Errno 5]" in running.said
    assert "Traceback" not in running.said
    verdict = ticks(tmp_path / "drive/recording.mcap")[-1].verdict
    assert (verdict.state, verdict.action) == (State.STOPPED, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["task=vehicle_navigate"], "expected a terminal to read keys from"),
        (["task=vehicle_navigate", "device=leader"], "device=leader needs ROS 2; give the follower's row"),
        (["task=vehicle_navigate", "speed=2"], "speed=2: expected a number above 0 and of at most 1"),
        (["task=vehicle_navigate", "device=mouse"], "device: .*mouse.*keyboard, gamepad, spacemouse, leader|mouse"),
        (["tusk=vehicle_navigate"], "unknown option 'tusk'"),
    ],
)
def test_what_cannot_be_driven_is_one_line(options: list[str], message: str, tmp_path: Path):
    done = run_program("record.py", *options, f"output={tmp_path / 'new'}")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert re.search(message, line)
    assert not (tmp_path / "new").exists()
