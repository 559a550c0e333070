"""A robot goes on with its chunk while the next one is computed, whatever the learner, the person or the robot does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from embodied.contract import ACTION_PREFIX
from embodied.policy import Decision
from embodied.runtime.interrupt import STOPPING
from real_robot.learning.environment import RobotEnvironment
from real_robot.learning.remote.actor import ActingCollector
from tests.real_robot.learning.test_environment import Script, chunk, flags, near
from tests.real_robot.learning.worlds import Arm, arm_environment

DELAY = 2


@contextmanager
def driven(*script: float | str | None, **options: object) -> Iterator[tuple[Arm, RobotEnvironment]]:
    """An arm of position commands and its environment, with a delay of two of four steps."""
    arm = Arm()
    with closing(arm_environment(arm, lambda: Script(*script), delay=DELAY, **options)) as env:
        env.reset()
        yield arm, env


def written(arm: Arm) -> list[float]:
    return [float(command[0]) for command in arm.commands if command is not None]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def prefix(observation: TensorDict) -> list[float]:
    return observation[ACTION_PREFIX].flatten().tolist()


def test_the_last_actions_of_a_chunk_run_before_the_next_one_is_decided() -> None:
    with driven() as (arm, env):
        first = env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert prefix(first.observation) == near([0.03, 0.04])
        assert first.observation["position"].item() == near(0.02)
        wait_until(lambda: len(written(arm)) == 6)  # nobody has called step
        assert written(arm) == near([0.0, 0.0, 0.01, 0.02, 0.03, 0.04])
        second = env.step(chunk(0.05, 0.06, 0.07, 0.08))
        assert second.executed.all()
        assert second.observation["position"].item() == near(0.06)
        assert prefix(second.observation) == near([0.07, 0.08])
        # decided actions, of which the last two have yet to be executed
        assert first.actions.flatten().tolist() == near([0.01, 0.02, 0.03, 0.04])
        assert second.actions.flatten().tolist() == near([0.05, 0.06, 0.07, 0.08])
    assert written(arm)[:10] == near([0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08])


def test_a_simulator_whose_time_stands_still_needs_no_thread() -> None:
    with driven(waits=True) as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert written(arm) == near([0.0, 0.0, 0.01, 0.02])
        env.step(chunk(0.05, 0.06, 0.07, 0.08))
        assert written(arm) == near([0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
        assert threading.active_count() == 1 or "ahead" not in {each.name for each in threading.enumerate()}


def test_what_safety_limits_is_stored_where_it_was_decided() -> None:
    with driven() as (_, env):
        first = env.step(chunk(0.5, 0.5, 0.5, 0.5))  # 0.02 m in a period at most
        assert first.actions.flatten().tolist() == near([0.02, 0.04, 0.5, 0.5])
        second = env.step(chunk(0.5, 0.5, 0.5, 0.5))
        assert flags(second, "limited") == [True] * 4
        assert second.observation["position"].item() == near(0.12)


def test_an_episode_begins_without_the_actions_of_the_one_before() -> None:
    with driven() as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert prefix(env.reset()) == [0.0, 0.0]
        count = len(written(arm))
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert written(arm)[count : count + 4] == near([0.02, 0.0, 0.01, 0.02])  # from 0.04, by 0.02 m in a period


def test_between_rollouts_the_next_chunk_is_decided_from_the_same_observation() -> None:
    with driven() as (_, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        observation = env.reset(torch.tensor([False]))
        assert observation["position"].item() == near(0.02)
        assert prefix(observation) == near([0.03, 0.04])


def test_after_a_pause_the_next_chunk_is_decided_from_what_is_measured_then_and_begins_at_once() -> None:
    with driven() as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        wait_until(lambda: len(written(arm)) == 6)
        env.hold("the learner is slow")
        arm.ticks += 100
        observation = env.reset(torch.tensor([False]))
        assert observation["position"].item() == near(0.04)
        assert prefix(observation) == [0.0, 0.0]
        count = len(written(arm))
        second = env.step(chunk(0.05, 0.06, 0.07, 0.08))
        assert second.executed.all()  # two of them before the pause
        assert written(arm)[count : count + 2] == near([0.05, 0.06])
        assert second.actions.flatten().tolist() == near([0.05, 0.06, 0.07, 0.08])
        assert prefix(second.observation) == near([0.07, 0.08])


def test_a_person_replaces_what_runs_meanwhile_and_what_was_decided_is_dropped() -> None:
    with driven(None, None, None, None, 0.01, 0.0) as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        second = env.step(chunk(0.05, 0.06, 0.07, 0.08))
        # in the thread; then they have let go, and nothing that was decided before is executed
        assert flags(second, "human") == [True, True, False, False]
        assert flags(second, "takeovers") == [True, False, False, False]
        assert second.executed[0].tolist() == [True, True, False, False]
        assert prefix(second.observation) == [0.0, 0.0]
        third = env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert third.executed.all()
        assert not any(flags(third, "human"))
    assert written(arm)[4:10] == near([0.01, 0.0, 0.0, 0.0, 0.01, 0.02])


def test_a_person_who_drives_at_the_end_of_a_chunk_leaves_nothing_of_it() -> None:
    with driven(None, None, None, 0.01, 0.02, 0.03, 0.04) as (_, env):
        first = env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert prefix(first.observation) == [0.0, 0.0]
        # decided: executed two steps later; the last one repeated
        assert first.actions.flatten().tolist() == near([0.01, 0.01, 0.01, 0.01])


FAULTS = {"silence": lambda reading: None, "error": None}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_meanwhile_ends_the_episode_and_the_next_one_begins_afresh(fault: str) -> None:
    with driven() as (arm, env):
        write, broken = arm.write, []

        def failing(action: np.ndarray) -> None:
            if action[0] > 0.035 and not broken:
                broken.append(True)
                raise ConnectionError("the cable is out")
            write(action)

        if fault == "error":
            arm.write = failing
        else:
            arm.fault = lambda reading: None if arm.position[0] > 0.025 and arm.ticks < 80 else reading
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        env._ahead.wait()
        assert arm.commands[-1] is None  # held
        count = len(arm.commands)
        transition = env.step(chunk(0.05, 0.06, 0.07, 0.08))
        assert len(arm.commands) == count
        assert transition.executed[0].tolist() == [True, False, False, False]
        assert bool(transition.truncated)
        assert bool(transition.events["fault"])
        arm.fault = lambda reading: reading
        assert prefix(env.reset()) == [0.0, 0.0]
        assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


def test_a_stop_meanwhile_holds_the_robot() -> None:
    with driven(None, None, None, None, None, "stop") as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        wait_until(lambda: arm.commands[-1] is None)
        transition = env.step(chunk(0.05, 0.06, 0.07, 0.08))
        assert transition.executed[0].tolist() == [True, False, False, False]
        assert bool(transition.events["stopped"])


def test_a_stop_of_the_run_meanwhile_holds_the_robot() -> None:
    with driven() as (arm, env):
        arm.fault = lambda reading: (STOPPING.set() if arm.position[0] > 0.025 else None) or reading
        try:
            env.step(chunk(0.01, 0.02, 0.03, 0.04))
            env._ahead.wait()
            assert bool(env.step(chunk(0.05, 0.06, 0.07, 0.08)).truncated)
            assert arm.commands[-1] is None
            assert max(written(arm)) == near(0.03)
        finally:
            STOPPING.clear()


def test_an_error_of_the_program_meanwhile_holds_the_robot_and_is_raised() -> None:
    with driven() as (arm, env):
        judge = env._judge

        def failing() -> bool:
            if arm.position[0] > 0.025:
                raise RuntimeError("a mistake")
            return judge()

        env._judge = failing
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        wait_until(lambda: arm.commands[-1] is None)
        with pytest.raises(RuntimeError, match="a mistake"):
            env.step(chunk(0.05, 0.06, 0.07, 0.08))
        env._judge = judge
        env.reset()
        assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


@pytest.mark.parametrize("interrupt", [lambda env: env.hold("wait"), lambda env: env.switch("hold", "eval")])
def test_who_holds_the_robot_waits_for_what_runs(interrupt: Callable[[RobotEnvironment], None]) -> None:
    with driven() as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        interrupt(env)
        assert written(arm)[:6] == near([0.0, 0.0, 0.01, 0.02, 0.03, 0.04])
        assert arm.commands[-1] is None


class Learned(nn.Module):
    """Policy that moves by its only weight in each step, from the end of the actions that run before its chunk."""

    def __init__(self, env: RobotEnvironment, arm: Arm) -> None:
        super().__init__()
        self.contract, self.arm, self.device = env.contract, arm, torch.device("cpu")
        self.speed = nn.Parameter(torch.tensor(0.01))
        self.prefixes: list[list[float]] = []
        self.ran: list[list[float]] = []

    @torch.no_grad()
    def act(self, observation: TensorDict, *, deterministic=False, generator=None) -> Decision:
        decisions = len(self.prefixes)
        self.prefixes.append(prefix(observation))
        if decisions:  # a slow inference, beside which the robot goes on
            wait_until(lambda: len(written(self.arm)) == 4 * decisions + DELAY)
        self.ran.append(written(self.arm)[-DELAY:])
        actions = observation[ACTION_PREFIX][:, -1:] + self.speed * torch.arange(1.0, 5.0).view(1, 4, 1)
        return Decision(actions, TensorDict({}, [1]), torch.zeros(1, 4, 1))


def test_weights_change_between_two_inferences_and_never_what_runs() -> None:
    with driven() as (arm, env):
        policy = Learned(env, arm)
        # the learner sends opposite weights before every inference, while the last chunk runs
        weights = iter([{"speed": torch.tensor((-1.0) ** number * 0.015)} for number in range(100)])
        outbox = SimpleNamespace(refusal="", superseded=False, take_weights=lambda: next(weights))
        collector = ActingCollector(env, policy, torch.Generator(), outbox)
        rollout = collector.collect(6)
        env._ahead.wait()
        assert rollout.executed.all()
        assert policy.ran[1:] == [near(each) for each in policy.prefixes[1:]]  # each prefix was honoured
        assert policy.prefixes[1] == near([0.045, 0.06])  # of the first weights
        assert policy.prefixes[2] == near([0.015, 0.0])  # of the second ones, which go back
        jumps = np.abs(np.diff(written(arm)))
        assert jumps.max() <= 0.02 + 1e-6  # the limit of safety is 0.02 m in a period
        torch.testing.assert_close(rollout.observation[ACTION_PREFIX][1:, 0], rollout.actions[:-1, 0, -DELAY:])
        assert arm.commands.count(None) == 0  # it never stopped


def test_a_jump_between_two_weights_is_limited_by_safety() -> None:
    with driven() as (arm, env):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
        env.step(chunk(-0.5, -0.5, -0.5, -0.5))  # of other weights
        env._ahead.wait()
        assert np.abs(np.diff(written(arm))).max() <= 0.02 + 1e-9
        assert written(arm)[:6] == near([0.0, 0.0, 0.01, 0.02, 0.03, 0.04])
