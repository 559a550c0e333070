"""Who and what stands around a robot that learns: a scripted person, a leader arm, disturbed measurements, options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.contract import TensorSpec
from embodied.errors import UserError
from real_robot.learning.disturbances import DisturbanceConfig, DisturbedRobot
from real_robot.learning.scripted import HelpConfig, ScriptedPerson
from real_robot.learning.task import Helper, RobotConfig, RobotTask
from real_robot.robots.devices import Device
from real_robot.robots.intervention import Engaging
from real_robot.robots.robot import SimulatedRobot
from tests.embodied.reach import Reach
from tests.programs import run_program
from tests.real_robot.learning.test_environment import Script


class Stalled:
    """An expert who acts by 1, and measures the progress of a list."""

    def __init__(self, progress: list[float]) -> None:
        self.values = progress
        self.episodes = 0

    def reset(self) -> None:
        self.episodes += 1

    def action(self) -> np.ndarray:
        return np.ones(1)

    def progress(self) -> float:
        return self.values.pop(0) if self.values else 0.0


def helps(person: ScriptedPerson, steps: int) -> str:
    return "".join("." if person.action(np.zeros(1)) is None else "h" for _ in range(steps))


def test_a_scripted_person_helps_after_steps_without_progress_and_hands_back() -> None:
    config = HelpConfig(patience=3, lasting=2, budget=10, per_episode=5)
    person = ScriptedPerson(Stalled([]), config)
    assert helps(person, 11) == "...hh...hh."
    person = ScriptedPerson(Stalled([0.1 * step for step in range(5)]), config)
    assert helps(person, 9) == ".......hh"  # progress until the fifth step
    person = ScriptedPerson(Stalled([1e-4 * step for step in range(20)]), config)
    assert helps(person, 5) == "...hh"  # too little of it


def test_their_budget_falls_and_evaluations_are_left_alone() -> None:
    config = HelpConfig(patience=1, lasting=1, budget=4, per_episode=2)
    expert = Stalled([])
    person = ScriptedPerson(expert, config)
    counts = [helps(person, 9).count("h")]
    for _ in range(3):
        person.begin(True)
        counts.append(helps(person, 9).count("h"))
    assert counts == [2, 1, 1, 0]
    assert (person.takeovers, expert.episodes) == (4, 4)
    person = ScriptedPerson(expert, config)
    person.begin(False)
    assert helps(person, 9) == "." * 9


def test_a_leader_arm_drives_between_two_presses() -> None:
    leader = Script(0.1, 0.2, 0.3, 0.4, 0.5)
    action = leader.action
    presses = iter([(), ("gripper",), (), ("engage",), ()])

    def pressing(proposed):
        command = action(proposed)
        leader.pressed = frozenset(next(presses))
        return command

    leader.action = pressing
    person = Engaging(leader)
    commands = [person.action(None) for _ in range(5)]
    assert [None if command is None else float(command[0]) for command in commands] == [None, 0.2, 0.3, None, None]


def test_a_leader_arm_that_falls_silent_while_it_drives_does_not_hand_over_to_the_policy() -> None:
    leader = Script(None, None, 0.3, None)
    person = Engaging(leader)
    assert person.action(None) is None  # nobody drives
    person._drives = True
    with pytest.raises(OSError, match="silent"):
        person.action(None)
    assert person.action(None) is not None
    person.wait_for("go", sleep=lambda seconds: None)
    assert person.action(None) is None


def disturbed(**options) -> tuple[SimulatedRobot, DisturbedRobot]:
    robot = SimulatedRobot(Reach(1, executed=1, horizon=1, tasks=1, step_limit=999), lambda _: np.zeros(1))
    robot.reset(starts=torch.tensor([0]))
    return robot, DisturbedRobot(robot, robot.clock, DisturbanceConfig(**options), 0)


def test_measurements_arrive_late_by_whole_periods() -> None:
    robot, late = disturbed(latency_s=0.2)
    stamps = [late.read().stamp_s]
    for _ in range(5):
        late.write(np.array([0.01]))
        stamps.append(late.read().stamp_s)
    assert stamps == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.2, 0.3])
    assert late.read().observation["position"][0] == pytest.approx(0.33)
    late.restart()
    assert late.read().stamp_s == pytest.approx(robot.clock())


def test_measurements_are_lost_and_noisy() -> None:
    _, lossy = disturbed(lost=0.5)
    sequences = []
    for _ in range(400):
        lossy.write(np.array([0.0]))
        sequences.append(lossy.read().sequence)
    assert len(set(sequences)) == pytest.approx(200, abs=40)
    assert sequences == sorted(sequences)
    robot, noisy = disturbed(noise=0.1)
    errors = []
    for _ in range(400):
        noisy.write(np.array([0.0]))
        errors.append(float(noisy.read().observation["position"][0] - robot.read().observation["position"][0]))
        assert noisy.read() is noisy.read()  # one measurement has one noise
    assert np.std(errors) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": Device.LEADER}, "needs ROS 2"),
        ({"row": "fr3", "person": Helper.NOBODY, "limits": "a.yaml"}, "somebody has to stop it"),
        ({"row": "fr3", "disturbances": DisturbanceConfig(lost=0.1), "limits": "a.yaml"}, "simulated robot"),
        ({"row": "fr3"}, "robot.limits=FILE"),
    ],
)
def test_options_that_would_be_dangerous_or_meaningless_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RobotConfig(**options)


class ReachTask:
    """The toy as a task of one or two tasks."""

    name, distributions, meanings, held_out_share, published_distribution = "reach", ("all", "other"), {}, None, None

    def __init__(self, tasks: int = 1, executed: int = 1) -> None:
        self.tasks, self.executed = tasks, executed
        self.closed = False

    def contract(self, distribution):
        return self._env().contract

    def _env(self):
        return Reach(1, executed=self.executed, horizon=self.executed, tasks=self.tasks)

    def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
        env = self._env()
        env.close = lambda: setattr(self, "closed", True)
        return env

    def expert(self, env):
        return None


def test_a_task_runs_on_a_simulated_robot_in_chunks_and_releases_it() -> None:
    single = ReachTask()
    task = RobotTask(ReachTask(executed=2), single, RobotConfig(person=Helper.NOBODY, waits=False))
    assert (task.distributions, task.variants, task.baselines()) == (("all",), (), {})
    env = task.environment(1, "all", "train")
    env.reset()
    transition = env.step(torch.full((1, 2, 1), 0.05))
    assert transition.executed.tolist() == [[True, True]]
    assert transition.observation["position"].item() == pytest.approx(0.3 + 2 * 0.05)
    with pytest.raises(UserError, match="num_envs=1"):
        task.environment(1, "all", "eval")
    task.close()
    assert single.closed


@pytest.mark.parametrize(
    ("tasks", "num_envs", "person", "message"),
    [
        (2, 1, Helper.NOBODY, "learns one task"),
        (1, 2, Helper.NOBODY, "num_envs=1"),
        (1, 1, Helper.SCRIPTED, "no scripted expert"),
    ],
)
def test_a_task_that_no_robot_can_learn_is_refused(tasks: int, num_envs: int, person: Helper, message: str) -> None:
    single = ReachTask(tasks)
    task = RobotTask(single, single, RobotConfig(person=person))
    with pytest.raises(UserError, match=message):
        task.environment(num_envs, "all", "train")
    assert single.closed == (num_envs == 1)


def test_a_robot_of_other_observations_is_refused_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    class SeeingTask(ReachTask):
        def contract(self, distribution):
            own = super().contract(distribution)
            return replace(own, observation=own.observation | {"force": TensorSpec((1,), unit="N")})

    opened = []
    monkeypatch.setattr(RobotTask, "_person", lambda *_: opened.append(True))
    single = ReachTask()
    with pytest.raises(UserError, match="force"):
        RobotTask(SeeingTask(), single, RobotConfig()).environment(1, "all", "train")
    assert single.closed
    assert not opened


def test_a_run_on_a_simulated_robot_is_trained_resumed_and_evaluated_in_its_simulator(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    options = ["task=quadrotor_hover", "robot=simulation", "robot.person=nobody", "robot.step_limit=40"]
    options += ["robot.disturbances.noise=0.01", "robot.disturbances.lost=0.1", "policy=squashed", "algorithm=sac"]
    options += ["algorithm.updates=0.1", "env_steps=64", "evaluation_starts=2", "threads=1"]
    answer = run_program("train.py", *options, f"output={run}")
    assert answer.returncode == 0, answer.stderr
    answer = run_program("train.py", f"resume={run}", "env_steps=96")
    assert answer.returncode == 0, answer.stderr
    assert "64 environment steps" not in (tmp_path / "run" / "report.md").read_text()
    answer = run_program("evaluate.py", f"checkpoint={run}", "episodes=2", "num_envs=2", "distributions=[robust]")
    assert answer.returncode == 0, answer.stderr
    answer = run_program("train.py", *options, "num_envs=2")
    assert answer.returncode != 0
    assert "num_envs=1" in answer.stderr + answer.stdout
