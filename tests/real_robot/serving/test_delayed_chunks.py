"""Policies that were trained with a delay execute on a clock what they executed in training."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied.contract import ACTION_PREFIX
from embodied.errors import UserError
from embodied.execution.chunking import Execution
from embodied.execution.delay import DelayedPolicy, delayed
from real_robot.serving.chunk_executor import ChunkExecutor
from tests.real_robot.serving.test_chunk_executor import DT_S, Counter, Robot, executor, ticks


class Waiting(Counter):
    """Numbered actions 100 n + i of a policy with a delay, which notes the prefixes that it reads."""

    def __init__(self, horizon: int = 8, executed: int = 4, delay: int = 2) -> None:
        super().__init__(horizon, executed)
        self.contract = self.contract.delayed(delay)
        self.prefixes: list[list[float]] = []

    def act(self, observation, *, deterministic=False, generator=None):
        self.prefixes.append(observation[ACTION_PREFIX][0, :, 0].tolist())
        return super().act(observation)


@pytest.mark.parametrize("latency", [0, 1, 2])
def test_a_chunk_begins_with_its_delay_however_fast_it_is(latency: int) -> None:
    policy, robot = Waiting(), Robot()
    found = executor(policy, robot, Execution.DELAYED, latency_s=latency * DT_S)
    ran = ticks(found, robot, 14)
    # as in `environments.delay`, but for holding in place of commands of zero
    assert ran == [None, None, 0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert policy.prefixes == [[0, 0], [2, 3], [102, 103], [202, 203]]
    assert found.reason == ""


def test_the_robot_holds_until_its_first_chunk_begins() -> None:
    robot = Robot()
    found = executor(Waiting(), robot, Execution.DELAYED)
    found.observe(robot.reading())
    assert found.action(robot.now_s) is None
    assert found.reason == "holding until the chunk begins"


@given(
    horizon=st.integers(1, 8),
    executed=st.integers(1, 8),
    delay=st.integers(1, 6),
    latency=st.floats(0.0, 6.0),
    late=st.lists(st.floats(0.0, 0.2), max_size=5),
)
def test_the_prefix_is_what_runs(horizon: int, executed: int, delay: int, latency: float, late: list[float]) -> None:
    policy, robot = Waiting(horizon, min(executed, horizon), delay), Robot()
    found = executor(policy, robot, Execution.DELAYED, latency_s=min(latency, delay) * DT_S)
    lateness, ran, begins = [*late, 0.0], [], []
    for tick in range(40):
        robot.now_s = DT_S * (tick + lateness[tick % len(lateness)])
        count = len(policy.prefixes)
        found.observe(robot.reading())
        begins += [tick] * (len(policy.prefixes) - count)
        action = found.action(robot.now_s)
        ran.append(0.0 if action is None else float(action[0]))
    for tick, prefix in zip(begins, policy.prefixes, strict=True):
        assert ran[tick : tick + delay] == prefix[: 40 - tick]


def test_an_inference_that_is_too_slow_is_logged_once_and_refused_where_it_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy, robot = Waiting(), Robot()
    with pytest.raises(UserError, match=r"0\.15 s, more than the delay=2 of training \(0\.1 s\); train with delay=3"):
        executor(policy, robot, Execution.DELAYED, latency_s=0.15)
    act = policy.act

    def slow(observation, **options):
        robot.now_s += 3 * DT_S if len(policy.prefixes) < 3 else 0.0
        return act(observation, **options)

    policy.act = slow
    found = executor(policy, robot, Execution.DELAYED)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            found.observe(robot.reading())
            found.action(robot.now_s)
            robot.now_s += DT_S
    assert [record.message for record in caplog.records] == [
        "inference takes 0.15 s, more than the delay=2 of training (0.1 s); train with delay=3"
    ]


def test_a_late_chunk_goes_on_at_its_own_time() -> None:
    robot, policy = Robot(), Waiting(horizon=8, executed=4, delay=2)
    release, act = threading.Event(), policy.act

    def slow(observation, **options):
        decision = act(observation, **options)
        if len(policy.prefixes) > 1:
            release.wait(5.0)
        return decision

    policy.act = slow
    found = executor(policy, robot, Execution.DELAYED, asynchronous=True)
    ran: list[float | None] = []
    for tick in range(12):
        robot.now_s = tick * DT_S
        if tick == 8:  # the second chunk should have begun at 6
            release.set()
            while found._pending and found._pending.finished_s > 10.0:
                time.sleep(0.001)
        found.observe(robot.reading())
        while tick not in range(4, 8) and found._pending and found._pending.finished_s > 10.0:
            time.sleep(0.001)
        action = found.action(robot.now_s)
        ran.append(None if action is None else float(action[0]))
    found.close()
    # the first chunk goes on with its own actions, until action 2 of the second one is in time
    assert ran == [None, None, 0, 1, 2, 3, 4, 5, 102, 103, 200, 201]


def test_after_a_drop_the_robot_holds_and_begins_again() -> None:
    policy, robot = Waiting(), Robot()
    found = executor(policy, robot, Execution.DELAYED)
    ticks(found, robot, 4)
    found.drop("somebody was there")
    assert ticks(found, robot, 4) == [None, None, 100, 101]
    assert policy.prefixes[-1] == [0, 0]


def test_weights_that_change_in_the_middle_of_a_chunk_change_the_next_one_alone() -> None:
    class Learned(Waiting):
        weight = 0.0

        def act(self, observation, *, deterministic=False, generator=None):
            decision = super().act(observation)
            decision.actions = decision.actions + self.weight
            return decision

    policy, robot = Learned(), Robot()
    found = executor(policy, robot, Execution.DELAYED, latency_s=DT_S)
    ran = ticks(found, robot, 5)
    policy.weight = 0.5  # one step after the second inference, whose chunk has not begun
    ran += ticks(found, robot, 8)
    assert ran == [None, None, 0, 1, 2, 3, 100, 101, 102, 103, 200.5, 201.5, 202.5]
    assert policy.prefixes == [[0, 0], [2, 3], [102, 103], [202.5, 203.5]]


def test_another_execution_is_refused() -> None:
    robot = Robot()
    for execution in set(Execution) - {Execution.DELAYED}:
        with pytest.raises(UserError, match="trained with delay=2; use execution=delayed"):
            executor(Waiting(), robot, execution)
    with pytest.raises(UserError, match="policies that were trained with delay=D"):
        executor(Counter(), robot, Execution.DELAYED)
    with pytest.raises(UserError, match="has the delay=2 of its training; leave out delay_s"):
        DelayedPolicy(Waiting(), 0.1, Execution.BLEND)
    with pytest.raises(UserError, match="policies that were trained with delay=D"):
        delayed(Counter(), 0.0, "delayed", executed=None, device="cpu")


def test_elements_are_in_the_order_of_the_policy() -> None:
    policy, robot = Waiting(), Robot()
    plain = policy.contract.delayed(0)
    turned = replace(plain, action=replace(plain.action, names=("down", "up")))
    found = ChunkExecutor(policy, turned, execution=Execution.DELAYED, clock=robot.clock, asynchronous=False)
    assert ticks(found, robot, 5) == [None, None, 0, -1, -2]
    assert policy.prefixes[-1] == [2, 3]
    assert torch.equal(torch.tensor(policy.prefixes[0]), torch.zeros(2))
