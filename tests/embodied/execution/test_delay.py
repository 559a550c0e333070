"""Actions of a robot with a slow policy, by hand and compared with its policy."""

import pytest
import torch
from tensordict import TensorDict

from embodied.evaluation.evaluation import evaluate
from embodied.execution.chunking import Execution
from embodied.execution.delay import DelayedPolicy
from embodied.policy import Decision
from embodied.rollout.memory import Memory
from tests.embodied.reach import Reach


class Counter:
    """Numbered actions: action i of chunk n is 10 n + i; n is counted in the memory."""

    def __init__(self, horizon: int = 8, executed: int = 4) -> None:
        self.contract = Reach(1, horizon=horizon, executed=executed).contract

    def initial_memory(self, count: int) -> torch.Tensor:
        return torch.zeros(count, 1)

    def act(self, observation, *, deterministic=False, generator=None):
        number = observation["memory"]
        actions = (10.0 * number + torch.arange(float(self.contract.horizon))).unsqueeze(-1)
        return Decision(actions, TensorDict({"memory": number + 1}, [len(number)]), torch.zeros(len(number), 1, 1))


class Inpainter(Counter):
    """Repeats the frozen part of the running chunk, and nothing else of it."""

    def inpaint(self, observation, running, *, deterministic=False, generator=None):
        decision = self.act(observation)
        decision.actions = torch.where(running.keeps().unsqueeze(-1), running.actions, decision.actions)
        return decision


def executed(policy: DelayedPolicy, decisions: int = 3, restart_at: int | None = None) -> list[float]:
    memory, ran = Memory(policy, 1), []
    for index in range(decisions):
        if index == restart_at:
            memory.restart(None)
        decision = policy.act(memory.with_observation(TensorDict({"position": torch.zeros(1, 1)}, [1])))
        memory.keep([decision])
        ran += decision.actions[0, : policy.contract.executed, 0].tolist()
    return ran


# the dt of Reach is 0.1 s: a delay of two steps
@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        ("inpaint", [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 22, 23]),
        ("blend", [0, 1, 2, 3, 4, 5, 6 + 6 / 3, 7 + 12 / 3, 14, 15, 16 + 6 / 3, 17 + 12 / 3]),
        ("naive", [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 20, 21]),
        ("synchronous", [0, 1, 2, 3, 0, 0, 10, 11, 0, 0, 20, 21]),
    ],
)
def test_what_runs_with_a_delay_of_two_steps(execution, expected):
    assert executed(DelayedPolicy(Inpainter(), 0.2, Execution(execution))) == pytest.approx(expected)


UNDELAYED = [execution for execution in Execution if execution is not Execution.DELAYED]
"""Executions of policies that were trained without a delay."""


@pytest.mark.parametrize("execution", UNDELAYED)
def test_an_episode_begins_with_its_own_first_chunk(execution):
    ran = executed(DelayedPolicy(Inpainter(), 0.2, execution), 3, restart_at=2)
    assert ran[8:] == [0, 1, 2, 3]


def test_observing_more_often_covers_longer_delays():
    assert executed(DelayedPolicy(Inpainter(), 0.2, Execution.INPAINT, executed=2)) == [0, 1, 2, 3, 12, 13]
    assert executed(DelayedPolicy(Inpainter(5, 3), 0.2, Execution.INPAINT)) == [0, 1, 2, 3, 4, 12, 13, 14, 22]
    with pytest.raises(ValueError, match=r"delay_s from 0 to 0.1, got 0.2: .* horizon=5 executed=4"):
        DelayedPolicy(Inpainter(5, 4), 0.2, Execution.INPAINT)
    with pytest.raises(ValueError, match="Counter cannot inpaint"):
        DelayedPolicy(Counter(), 0.2, Execution.INPAINT)
    with pytest.raises(ValueError, match="got -1"):
        DelayedPolicy(Counter(), -1.0, Execution.NAIVE)


@pytest.mark.parametrize("execution", ["blend", "naive", "synchronous"])
def test_without_delay_nothing_changes_but_what_blending_adds(execution):
    expected = [0, 1, 2, 3, 10, 11, 12, 13]
    if execution == "blend":
        expected[4:] = [4 + 6 / 5, 5 + 12 / 5, 6 + 18 / 5, 7 + 24 / 5]
    assert executed(DelayedPolicy(Counter(), 0.0, Execution(execution)), 2) == pytest.approx(expected)


class Left:
    """Moves by the remaining distance to the origin within the chunk, as observed at its beginning."""

    def __init__(self, env: Reach) -> None:
        self.contract = env.contract

    def act(self, observation, *, deterministic=False, generator=None):
        step = (-observation["position"] / self.contract.horizon).clamp(-0.25, 0.25)
        actions = step.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        return Decision(actions, TensorDict({}, [len(step)]), torch.zeros(len(step), 1, 1))


@pytest.mark.parametrize("execution", ["blend", "naive", "synchronous"])
def test_an_evaluation_with_delay_does_not_depend_on_the_number_of_environments(execution):
    def measured(num_envs: int, delay_s: float):
        env = Reach(num_envs, executed=2, horizon=4, step_limit=40)
        return evaluate(env, DelayedPolicy(Left(env), delay_s, Execution(execution)), starts_per_task=12)

    first, second, prompt = measured(2, 0.1), measured(11, 0.1), measured(11, 0.0)
    assert torch.equal(first.steps, second.steps)
    assert first.success.all()
    assert not torch.equal(first.steps, prompt.steps)
