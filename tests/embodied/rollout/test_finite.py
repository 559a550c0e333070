"""Numbers that are not finite end a run where they enter, by name, before anything is learned from them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.off_policy.sac import SACConfig
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.rollout.differentiable import DifferentiableCollector
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Rollout
from embodied.training.loop import build, iterations
from policies.mlp import MLPConfig
from tests.embodied.smooth_reach import SmoothReach

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
LEARNERS = {
    "ppo": PPOConfig(rollout_length=4, minibatch=8, critic_warmup=0),
    "grpo": GRPOConfig(rollout_length=7, minibatch=8, group=2),
    "td3": TD3Config(rollout_length=4, warmup=1, gradient_steps=2, lookahead=1),
    "sac": SACConfig(rollout_length=4, warmup=1, updates=0.1, hidden=[8]),
    "bptt": BPTTConfig(rollout_length=4),
}


class Faulty(SmoothReach):
    """In environment 1, an observation or the reward is `value` from the step `first` on."""

    def __init__(self, fault: str, value: float = math.nan, first: int = 0) -> None:
        super().__init__(4)
        spec = replace(self.contract.observation["position"], names=("x",))
        self.contract = replace(self.contract, observation=self.contract.observation | {"position": spec})
        self.fault, self.value, self.first, self.count = fault, value, first, 0
        self.unrolling = False

    def step(self, actions: torch.Tensor) -> Transition:
        transition = super().step(actions.nan_to_num() if self.unrolling else actions)
        self.count += 1
        if self.fault == "reward" and self.count > self.first:
            wrong = torch.arange(4).unsqueeze(1) == 1
            return replace(transition, reward=torch.where(wrong, self.value, transition.reward))
        return transition

    def unroll(self, layers: Layers, decisions: int, max_action_gradient: float = math.inf) -> Rollout:
        self.unrolling = True  # such simulators check no actions
        return super().unroll(layers, decisions, max_action_gradient)

    def _observation(self) -> TensorDict:
        seen = super()._observation()
        if self.fault != "reward" and self.count >= self.first:
            key, rows = self.fault, torch.arange(4).unsqueeze(1) == 1
            seen[key] = torch.where(rows, self.value, seen[key])
        return seen


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reward", r"the reward became (nan|inf) in environment 1 \(task 1\)"),
        ("position", r"element x of observation 'position' became (nan|inf) in environment 1 \(task 1\)"),
        ("task", r"element \[0\] of observation 'task' became (nan|inf) in environment 1"),
    ],
)
@pytest.mark.parametrize("name", [*LEARNERS, "bptt by steps"])
def test_no_learner_learns_from_what_is_not_finite(name: str, fault: str, message: str, value: float):
    torch.manual_seed(0)
    env, config = Faulty(fault, value, first=6), LEARNERS[name.split()[0]]
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(SmoothReach(4).reset(), torch.zeros(1, 1))
    learner, collector = build(env, policy, config, None, 0)
    if isinstance(collector, DifferentiableCollector) and "steps" in name:
        env.unroll = None
    loop = iterations(learner, collector, config.rollout_length, 1000)
    weights: dict[str, torch.Tensor] = {}

    def train() -> None:
        for _ in range(5):
            weights.update({name: part.clone() for name, part in policy.state_dict().items()})
            next(loop)

    with pytest.raises(UserError, match=message):
        train()
    for part, values in policy.state_dict().items():
        assert torch.equal(values, weights[part]), part


def test_statistics_are_not_computed_from_random_play_that_is_not_finite():
    with pytest.raises(UserError, match="element x of observation 'position' became nan in environment 1"):
        first_decisions(Faulty("position", first=3), torch.Generator())


@pytest.mark.parametrize("first", [0, 2])
def test_an_evaluation_names_what_is_not_finite(first: int):
    env = Faulty("position", first=first)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(SmoothReach(4).reset(), torch.zeros(1, 1))
    with pytest.raises(UserError, match="observation 'position' became nan in environment 1"):
        evaluate(env, policy, starts_per_task=2)
