"""Chunks on a clock: the same actions as an evaluation with delay, no gaps, and a reason for every None."""

import math
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.execution.chunking import Execution
from embodied.execution.delay import DelayedPolicy
from embodied.policy import Decision
from embodied.rollout.memory import Memory
from policies.recurrent import RecurrentConfig
from real_robot.robots.robot import Reading
from real_robot.serving.chunk_executor import ChunkExecutor

DT_S = 0.05
UNDELAYED = [each for each in Execution if each is not Execution.DELAYED]
"""Executions of policies that were trained without a delay."""


class Counter:
    """Numbered actions: action i of chunk n is (100 n + i, -(100 n + i)); repeats frozen actions."""

    def __init__(self, horizon: int = 8, executed: int = 4) -> None:
        action = TensorSpec((2,), names=("up", "down"), low=(-1e6,) * 2, high=(1e6,) * 2)
        seen = TensorSpec((2,), names=("a", "b"))
        self.contract = Contract({"x": seen}, action, DT_S, horizon, executed)
        self.seen: list[list[float]] = []

    def initial_memory(self, count: int) -> torch.Tensor:
        return torch.zeros(count, 1)

    def act(self, observation, *, deterministic=False, generator=None):
        number = observation["memory"]
        self.seen.append(observation["x"][0].tolist())
        up = 100.0 * number + torch.arange(float(self.contract.horizon))
        actions = torch.stack((up, -up), -1)
        return Decision(actions, TensorDict({"memory": number + 1}, [len(number)]), torch.zeros(len(number), 1, 1))

    def inpaint(self, observation, running, *, deterministic=False, generator=None):
        decision = self.act(observation)
        decision.actions = torch.where(running.keeps().unsqueeze(-1), running.actions, decision.actions)
        return decision


class Robot:
    """A clock that is moved by hand, and readings at any time."""

    def __init__(self) -> None:
        self.now_s, self.sequence = 0.0, 0

    def clock(self) -> float:
        return self.now_s

    def reading(self, age_s: float = 0.0) -> Reading:
        self.sequence += 1
        return Reading({"x": np.array([self.sequence, -self.sequence], np.float32)}, self.now_s - age_s, self.sequence)


def executor(policy, robot: Robot, execution: Execution = Execution.INPAINT, **options) -> ChunkExecutor:
    options = {"asynchronous": False, **options}
    return ChunkExecutor(policy, policy.contract, execution=execution, clock=robot.clock, **options)


def ticks(found: ChunkExecutor, robot: Robot, count: int, late_s=lambda tick: 0.0) -> list[float | None]:
    """First elements of the commands of `count` control periods."""
    commands = []
    begin = round(robot.now_s / DT_S)
    for tick in range(begin, begin + count):
        robot.now_s = tick * DT_S + late_s(tick)
        found.observe(robot.reading())
        action = found.action(robot.now_s)
        commands.append(None if action is None else float(action[0]))
    robot.now_s = (begin + count) * DT_S
    return commands


def test_the_latency_that_is_planned_with_is_nearly_the_greatest_of_late():
    found = executor(Counter(), Robot(), latency_s=0.3)
    assert found.latency_s == 0.3
    found._latencies.extend([9.0] * 5 + [0.01 * number for number in range(1, 51)])
    assert found.latency_s == pytest.approx(0.48)  # 95% of the last fifty


@pytest.mark.parametrize("execution", UNDELAYED)
@pytest.mark.parametrize(("delay", "executed"), [(0, 4), (1, 4), (2, 4), (3, 4), (2, 2), (2, 3)])
def test_it_runs_what_an_evaluation_with_delay_measures(execution: Execution, delay: int, executed: int):
    if execution is Execution.SYNCHRONOUS and delay >= executed:
        pytest.skip("it would never move")
    policy = DelayedPolicy(Counter(), delay * DT_S, execution, executed=executed)
    memory, expected = Memory(policy, 1), []
    for _ in range(8):
        decision = policy.act(memory.with_observation(TensorDict({"x": torch.zeros(1, 2)}, [1])))
        memory.keep([decision])
        expected += decision.actions[0, :executed, 0].tolist()
    robot = Robot()
    found = executor(Counter(), robot, execution, latency_s=delay * DT_S, executed=executed)
    ran = ticks(found, robot, 8 * executed)
    assert ran[:delay] == [None] * delay  # a robot waits for its first chunk; an episode begins with it
    settled = 5 * executed  # by now what began differently has passed
    assert [0.0 if value is None else value for value in ran[settled:]] == pytest.approx(expected[settled:])
    assert (None in ran[settled:]) == (execution is Execution.SYNCHRONOUS and delay > 0)


@given(
    horizon=st.integers(2, 12),
    executed=st.integers(1, 6),
    delay=st.floats(0.0, 6.0),
    late=st.lists(st.floats(0.0, 0.2)),
    execution=st.sampled_from([Execution.INPAINT, Execution.BLEND, Execution.NAIVE]),
)
def test_commands_never_pause_while_chunks_last_however_late_ticks_are(horizon, executed, delay, late, execution):
    executed = min(executed, horizon)
    robot = Robot()
    found = executor(Counter(horizon, executed), robot, execution, latency_s=delay * DT_S)
    lateness = [*late, 0.0]
    ran = ticks(found, robot, 40, lambda tick: DT_S * lateness[tick % len(lateness)])
    moving = ran[next(index for index, value in enumerate(ran) if value is not None) :]
    if horizon >= 2 * math.ceil(delay) + 2:  # one inference after the other, each up to a tick late at both ends
        assert None not in moving
    if execution is Execution.INPAINT:
        for before, now in pairwise(moving):
            if before is not None and now is not None and before // 100 == now // 100:
                assert now - before == 1  # no action runs twice, none is left out


def broken(reading: Reading, value: float) -> Reading:
    return replace(reading, observation={"x": np.array([0.0, value], np.float32)})


def remembering(horizon: int, executed: int):
    torch.manual_seed(0)
    policy = RecurrentConfig(memory=4).build(Counter(horizon, executed).contract)
    policy.fit(TensorDict({"x": torch.randn(50, 2)}, [50]), torch.zeros(50, 2))
    return policy


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reading_that_is_not_finite_is_reported_and_not_remembered(value: float):
    robot = Robot()
    found = executor(remembering(1, 1), robot, Execution.SYNCHRONOUS)
    found.observe(broken(robot.reading(), value))
    assert found.action(robot.now_s) is None
    assert found.reason == "x is not finite"
    assert None not in ticks(found, robot, 3)
    for _ in range(3):
        robot.now_s += DT_S
        found.observe(broken(robot.reading(), value))
    assert found.action(robot.now_s) is None
    assert found.reason == "the chunk has ended: x is not finite"
    robot.now_s += DT_S
    after = [found for found in ticks(found, robot, 5) if found is not None and math.isfinite(found)]
    assert len(after) == 5


def test_a_chunk_goes_on_while_readings_are_not_finite():
    robot = Robot()
    found = executor(Counter(), robot)
    ran = ticks(found, robot, 4)
    for _ in range(2):
        found.observe(broken(robot.reading(), math.nan))
        ran.append(float(found.action(robot.now_s)[0]))
        robot.now_s += DT_S
    assert ran == [0, 1, 2, 3, 4, 5]
    assert ticks(found, robot, 1) == [100]


def test_actions_that_are_not_finite_are_not_given_out():
    robot, policy = Robot(), remembering(1, 1)
    policy.actor[0].bias.data.fill_(math.nan)
    found = executor(policy, robot, Execution.SYNCHRONOUS)
    assert ticks(found, robot, 3) == [None] * 3
    assert "the policy's actions are not finite" in found.reason


def test_actions_run_at_the_time_they_are_for():
    robot = Robot()
    found = executor(Counter(), robot, latency_s=0.1)
    assert ticks(found, robot, 4) == [None, None, 0, 1]
    robot.now_s = 0.2  # the second observation; its chunk arrives at 0.3
    found.observe(robot.reading(age_s=0.0))
    times = {0.2: 2, 0.24: 3, 0.25: 3, 0.299: 4, 0.3: 102, 0.35: 103, 0.449: 105, 0.45: 105, 0.55: 107}
    for now_s, expected in times.items():
        assert found.action(now_s)[0] == expected
    assert found.action(0.6) is None
    assert "the chunk has ended: none is computed" in found.reason


def test_the_robot_and_the_policy_may_order_elements_differently():
    policy, robot = Counter(), Robot()
    given_action = TensorSpec((2,), names=("down", "up"), low=(-1e6,) * 2, high=(1e6,) * 2)
    contract = Contract({"x": TensorSpec((2,), names=("b", "a"))}, given_action, DT_S)
    found = ChunkExecutor(policy, contract, execution=Execution.BLEND, clock=robot.clock, asynchronous=False)
    ticks(found, robot, 1)
    assert found.action(DT_S).tolist() == [-1.0, 1.0]
    assert policy.seen == [[-1.0, 1.0]]
    blind = Contract({}, given_action, DT_S)
    with pytest.raises(ValueError, match="contracts differ"):
        ChunkExecutor(policy, blind, execution=Execution.BLEND, clock=robot.clock, asynchronous=False)


def test_single_actions_follow_every_reading_and_survive_one_that_is_missed():
    policy, robot = Counter(1, 1), Robot()
    found = executor(policy, robot, Execution.BLEND)
    assert ticks(found, robot, 3) == [0, 100, 200]
    assert found.action(3 * DT_S)[0] == 200
    assert found.action(4 * DT_S) is None
    robot.now_s = 4 * DT_S
    found.observe(robot.reading(age_s=0.9 * DT_S))  # old, yet the newest there is
    assert found.action(robot.now_s)[0] == 300


def test_old_and_reordered_readings_start_nothing():
    policy, robot = Counter(1, 1), Robot()
    found = executor(policy, robot, Execution.NAIVE)
    robot.now_s = 1.0
    first, second = robot.reading(), robot.reading(age_s=0.2)
    found.observe(first)
    robot.now_s = 1.1
    for reading in (first, second, Reading(first.observation, 1.1, 1)):
        found.observe(reading)
    assert policy.seen == [[1.0, -1.0]]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("horizon", "executed"), [(1, 1), (8, 4)])
def test_a_clock_that_is_set_back_ends_the_chunk_and_begins_another(horizon, executed, asynchronous):
    policy, robot = Counter(horizon, executed), Robot()
    found = executor(policy, robot, Execution.NAIVE, asynchronous=asynchronous)
    robot.now_s = 100.0

    def period() -> float | None:
        count = len(policy.seen)
        found.observe(robot.reading())
        if asynchronous and found._pending:
            wait_for(lambda: len(policy.seen) > count and found._pending.finished_s < math.inf)
        action = found.action(robot.now_s)
        robot.now_s += DT_S
        return None if action is None else float(action[0])

    began = [period() for _ in range(3)]
    assert began[0] == 0
    robot.now_s -= 50.0
    count = len(policy.seen)
    assert period() == 100 * count  # the first action of a new chunk, not one of before for fifty seconds
    assert len(policy.seen) == count + 1
    found.close()


@pytest.mark.parametrize(("horizon", "executed"), [(1, 1), (8, 4)])
def test_a_reading_from_the_future_does_not_hide_those_that_follow(horizon, executed):
    policy, robot = Counter(horizon, executed), Robot()
    found = executor(policy, robot, Execution.NAIVE)
    ticks(found, robot, 4)
    found.observe(robot.reading(age_s=-1000.0))
    count = len(policy.seen)
    robot.now_s += DT_S
    assert None not in ticks(found, robot, 2 * horizon)
    assert len(policy.seen) >= count + 2


def test_a_new_episode_forgets_chunk_memory_and_what_is_being_computed():
    robot = Robot()
    found = executor(Counter(), robot, latency_s=0.1)
    ticks(found, robot, 5)  # the second inference is under way
    found.reset()
    assert found.action(robot.now_s) is None
    assert found.reason == "no chunk yet"
    assert ticks(found, robot, 4) == [None, None, 0, 1]


class Broken(Counter):
    """Fails from its second chunk on."""

    def act(self, observation, *, deterministic=False, generator=None):
        if self.seen:
            raise RuntimeError("out of memory")
        return super().act(observation)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_stops_at_once_and_says_why_until_reset(asynchronous: bool):
    robot = Robot()
    found = executor(Broken(), robot, Execution.BLEND, asynchronous=asynchronous)
    for tick in range(5):
        robot.now_s = tick * DT_S
        found.observe(robot.reading())
        wait_for(lambda: found._pending is None or found._pending.finished_s < np.inf)
        action = found.action(robot.now_s)
        assert (action is None) == (tick == 4)
    assert found.reason == "inference failed: RuntimeError: out of memory"
    assert found.action(robot.now_s) is None
    found.reset()
    found.observe(robot.reading())
    wait_for(lambda: found._pending is None or found._pending.finished_s < np.inf)
    assert found.action(robot.now_s) is None
    assert "out of memory" in found.reason
    found.close()


class Unreachable(Counter):
    """A policy whose server cannot be reached while `down`; the time of every call is noted."""

    def __init__(self, robot: Robot, horizon: int = 8, executed: int = 4) -> None:
        super().__init__(horizon, executed)
        self.robot, self.down, self.calls = robot, False, []

    def act(self, observation, *, deterministic=False, generator=None):
        self.calls.append(self.robot.now_s)
        if self.down:
            raise TimeoutError("no answer within 1.0 s")
        return super().act(observation)


@pytest.mark.parametrize("execution", UNDELAYED)
def test_after_a_connection_error_it_holds_and_goes_on_from_a_reading_after_the_pause(execution: Execution):
    robot = Robot()
    policy = Unreachable(robot)
    running = executor(policy, robot, execution)
    before = ticks(running, robot, 4)
    policy.down = True
    failing = len(policy.calls)
    outage = ticks(running, robot, 400)  # 20 s
    assert outage == [None] * 400  # not one action of the chunk that ran
    assert running.reason == "inference failed: TimeoutError: no answer within 1.0 s"
    pauses = np.diff(policy.calls[failing:])
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6], abs=DT_S + 1e-6)
    assert max(pauses) <= 5.0 + DT_S
    policy.down = False
    observed = len(policy.seen)
    after = ticks(running, robot, 200)
    assert policy.seen[observed][0] == policy.seen[observed - 1][0] + round(
        (policy.calls[-(len(policy.seen) - observed)] - policy.calls[failing - 1]) / DT_S
    )  # the reading of that very period
    first = next(index for index, value in enumerate(after) if value is not None)
    assert first * DT_S <= 5.0
    assert None not in after[first:]
    assert after[first] == 100 * observed  # the first action of a new chunk
    assert None not in before
    policy.down = True
    failing = len(policy.calls)
    ticks(running, robot, 20)
    assert np.diff(policy.calls[failing:])[0] == pytest.approx(0.1, abs=DT_S + 1e-6)  # short again after a success


def test_readings_from_before_an_interruption_start_nothing():
    robot = Robot()
    policy = Unreachable(robot)
    running = executor(policy, robot, Execution.NAIVE)
    policy.down = True
    ticks(running, robot, 1)
    policy.down = False
    robot.now_s = 10.0
    running.observe(robot.reading(age_s=9.95))
    assert len(policy.calls) == 1
    running.observe(robot.reading(age_s=0.0))
    assert len(policy.calls) == 2
    assert running.action(robot.now_s)[0] == 0


def test_an_interruption_ends_where_the_clock_goes_back():
    robot = Robot()
    robot.now_s = 100.0
    policy = Unreachable(robot)
    running = executor(policy, robot, Execution.NAIVE)
    policy.down = True
    ticks(running, robot, 3)
    policy.down, robot.now_s = False, 0.0
    assert ticks(running, robot, 1) == [0]


def test_a_chunk_of_another_shape_is_an_error():
    policy, robot = Counter(), Robot()
    policy.contract = Contract(policy.contract.observation, policy.contract.action, DT_S, 8, 4)
    found = executor(policy, robot, Execution.NAIVE)
    act = policy.act
    policy.act = lambda *a, **b: Decision(act(*a, **b).actions[:, :3], TensorDict({}, [1]), torch.zeros(1, 1, 1))
    found.observe(robot.reading())
    assert found.action(0.0) is None
    assert "expected actions of shape (1, 8, 2), got (1, 3, 2)" in found.reason


def test_a_thread_that_is_gone_is_noticed():
    robot = Robot()
    found = executor(Counter(), robot, asynchronous=True)
    found.close()
    wait_for(lambda: not found._worker.alive)
    found.observe(robot.reading())
    assert found.action(0.0) is None
    assert found.reason == "the inference thread has died"


class Slow(Counter):
    """Takes its time, in another thread than the one that commands."""

    threads: set[str] = set()  # noqa: RUF012 - of one test

    def act(self, observation, *, deterministic=False, generator=None):
        time.sleep(1.5 * DT_S)
        self.threads.add(threading.current_thread().name)
        return super().act(observation)


def test_a_thread_computes_while_commands_go_on():
    robot, began = Robot(), time.monotonic()
    robot.clock = lambda: time.monotonic() - began
    found = executor(Slow(horizon=30), robot, asynchronous=True)
    commands = []
    while len(commands) < 60:
        robot.now_s = robot.clock()
        found.observe(robot.reading())
        if (action := found.action(robot.clock())) is not None or commands:
            commands.append(action)
        time.sleep(DT_S / 4)
    found.close()
    assert all(command is not None for command in commands)
    assert Slow.threads == {"inference"}
    assert commands[-1][0] >= 200
    assert found.latency_s >= 1.5 * DT_S


def wait_for(condition) -> None:
    end = time.monotonic() + 20.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="latency_s of at least 0, got -1"):
        executor(Counter(), Robot(), latency_s=-1.0)
