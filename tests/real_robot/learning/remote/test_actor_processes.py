"""The learner and the robot's computer as a user runs them: two programs, each of which is killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import actor
import train
from embodied.errors import UserError
from embodied.saving import checkpoint
from real_robot.learning.remote.journal import FOLDER, Journal
from tests.programs import ROOT, run_program

STEPS = 1200
PATIENCE_S = 300.0
TASK = ["task=quadrotor_hover", "robot=simulation", "robot.person=nobody", "policy=squashed", "algorithm=sac"]
SIZES = ["algorithm.updates=0.1", f"env_steps={STEPS}", "evaluation_starts=2", "checkpoint_every=4", "video=false"]


class Program:
    """A program of the repository in a process of its own, with its output."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        self.file = log.open("ab")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=self.file, stderr=subprocess.STDOUT, env=environment
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.file.close()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait_until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.02)


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["learner=127.0.0.1:1"], "expected token_file="),
        (["learner=127.0.0.1:1", "token_file=nowhere"], "copy actor_token from the run's folder"),
        (["learner=somewhere", "token_file=pyproject.toml"], "other users can read|expected HOST:PORT"),
    ],
)
def test_an_actor_without_what_it_needs_ends_with_one_line(options: list[str], message: str) -> None:
    answer = run_program("actor.py", *options)
    assert answer.returncode == 1
    assert re.search(message, answer.stderr)
    assert len(answer.stderr.strip().splitlines()) == 1


def test_options_of_the_robot_are_those_of_the_actor_alone(tmp_path: Path) -> None:
    task = ["task=quadrotor_hover", "policy=squashed", "algorithm=sac"]
    learner, record = train.composed([*task, "robot=fr3", "robot.listen=0.0.0.0:1", "robot.max_staleness=2"])
    assert learner.robot.limits is None  # of no use there
    greeting = {"config": {name: record[name] for name in ("choices", "values")}}
    with pytest.raises(UserError, match="expected robot=ROW"):
        actor.trained(greeting, [])
    with pytest.raises(UserError, match=r"robot\.limits=FILE"):
        actor.trained(greeting, ["robot=fr3"])
    for option in ("robot.listen=0.0.0.0:1", "robot.max_staleness=9", "seed=3", "algorithm.updates=2", "delay=1"):
        with pytest.raises(UserError, match=f"{option.partition('=')[0]} would have no effect: the learner decides"):
            actor.trained(greeting, ["robot=simulation", option])
    config = actor.trained(greeting, ["robot=simulation", "robot.home=[[0.1,0.2,0.3,0.4]]"])
    assert (config.robot.row, config.robot.listen, config.robot.home) == ("simulation", None, [[0.1, 0.2, 0.3, 0.4]])
    assert (config.task, config.policy) == (learner.task, learner.policy)
    with pytest.raises(UserError, match="did not send its configuration"):
        actor.trained({}, ["robot=simulation"])


@pytest.mark.parametrize("options", [["robot.limits=a.yaml", "robot.home=[[0.1]]"], ["robot.options.arm=left"]])
def test_options_that_only_the_actor_reads_are_refused_by_the_learner(options: list[str]) -> None:
    learner = ["task=quadrotor_hover", "policy=squashed", "algorithm=sac", "robot=fr3", "robot.listen=0.0.0.0:1"]
    train.composed(learner)
    with pytest.raises(UserError, match="would have no effect") as refused:
        train.composed([*learner, *options])
    assert all(each.partition("=")[0] in str(refused.value) for each in options)


def test_learner_and_actor_are_killed_and_go_on(tmp_path: Path, programs: ExitStack) -> None:
    run = tmp_path / "run"
    stored = lambda: Journal(run / FOLDER).total  # noqa: E731

    def learner(*options: str) -> Program:
        return programs.enter_context(Program(tmp_path / "learner.log", "train.py", *options))

    def robot_computer(name: str) -> Program:
        options = [f"learner=127.0.0.1:{port}", f"token_file={run / 'actor_token'}", *TASK[1:3], "robot.step_limit=40"]
        return programs.enter_context(Program(tmp_path / name, "actor.py", *options))

    first = learner(*TASK[:2], *TASK[3:], *SIZES, "robot.listen=127.0.0.1:0", "threads=1", f"output={run}")
    first.wait_until(lambda: "waiting for the robot's computer" in first.output)
    found = re.search(r"at 127\.0\.0\.1:(\d+)", first.output)
    assert found
    port = found[1]
    robot = robot_computer("actor.log")
    robot.wait_until(lambda: stored() > 15)
    first.kill()
    robot.wait_until(lambda: "waiting for robot and person: no learner at" in robot.output)  # it holds
    at_kill = Journal(run / FOLDER).total
    assert checkpoint.load(run).counters["stage"] == "rl"
    second = learner(f"resume={run}", f"robot.listen=127.0.0.1:{port}")
    robot.wait_until(lambda: "the learner is back" in robot.output and stored() > at_kill + 15)
    robot.kill()
    second.wait_until(lambda: "is gone" in second.output)
    again = robot_computer("again.log")
    again.wait_until(lambda: second.process.poll() is not None)
    assert second.process.returncode == 0, second.output
    report = json.loads((run / "report.json").read_text())
    assert report["env_steps"] >= STEPS
    assert [row["episodes"] for row in report["evaluations"] if row["stage"] == "rl"] == [2]
    # each of both actors' rollouts was stored once, in order; those that no checkpoint needs are deleted
    names = sorted(path.stem.split("-") for path in (run / FOLDER).glob("*.msgpack"))
    journal = Journal(run / FOLDER)
    needed = checkpoint.load_counters(run)[0]["iteration"]
    assert [int(number) for number, _, _ in names if int(number) >= needed] == list(range(needed, journal.total))
    assert len(names) < journal.total / 2
    sessions = {session for _, session, _ in names}
    assert len(sessions) == 2
    assert sum(map(journal.stored, sessions)) == journal.total
    again.process.send_signal(signal.SIGINT)
    assert again.process.wait(PATIENCE_S) == 0, again.output
    assert "Traceback" not in first.output + robot.output + again.output
