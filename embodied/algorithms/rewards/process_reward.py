"""VLA-RL's process reward (arXiv 2505.18719): progress along the milestones of demonstrations, as a potential.

A demonstration's milestones are the steps at which its gripper opens or closes, and its end; between them progress is
the share of time. The critic of a copy of the policy learns to predict progress from an observation, from the
same inputs as the policy. A decision that executes k actions then earns, in addition to the task's reward,

    F = weight (discount^k Phi(s') - Phi(s)),  Phi = 0 after a termination,

which changes no policy's rank (Ng, Harada and Russell, 1999): standing still near a milestone earns nothing.

Differs from the paper: there a vision-language model classifies every frame as completing a subtask or not, and its
output is the reward; milestones also need the hand to rest. The model is trained on successes only: its output for
failures that resemble none is a guess, which the potential makes harmless, not useful.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from embodied import seeding
from embodied.algorithms.advantage import next_values, values
from embodied.algorithms.finite import check_finite
from embodied.algorithms.parts import Composite
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.memory import RecurrentPolicy
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World

STEPS = 500
BATCH = 256
LEARNING_RATE = 1e-3
"""Training of the model: gradient steps, observations of each, and learning rate of Adam."""


class LearnedProgress(Composite):
    """Predictor of progress that learns from `demonstrations`, at first use, with the critic of a copy of `policy`.

    Raises:
        UserError: without demonstrations or an action element named gripper, and for a policy with memory.
    """

    def __init__(
        self, policy: TrainablePolicy, demonstrations: Episodes | None, generator: torch.Generator, option: str
    ) -> None:
        if demonstrations is None:
            raise UserError(f"{option} learns progress from demonstrations, but this task has none")
        if isinstance(policy, RecurrentPolicy):
            raise UserError(f"{option} tells progress from one observation: use a policy without memory")
        if policy.value_head.categorical and policy.value_head.outside(torch.tensor([0.0, 1.0])).any():
            raise UserError(f"{option} learns progress from 0 to 1: let policy.values cover value_low=0 value_high=1")
        self.grippers = grippers(policy.contract, option)
        self.policy = policy
        self.demonstrations = demonstrations
        self.generator = generator
        with seeding.undisturbed():
            self.model = policy.with_new_weights()
        self.optimiser: torch.optim.Adam | None = None  # while the model is fitted
        self.fitted = False

    def __call__(self, rollout: Rollout, world: World = ALONE) -> tuple[Tensor, Tensor]:
        """Progress before and after each decision, [T, N] each."""
        if not self.fitted:
            self._fit()
        predicted = values(self.model, rollout.observation)
        return predicted.clamp(0.0, 1.0), next_values(self.model, rollout, predicted, world).clamp(0.0, 1.0)

    def _fit(self) -> None:
        """Copy the policy's weights, so that its encoder is reused, then fit the critic to progress."""
        self.model.load_state_dict(self.policy.state_dict())
        self.model.start_critic()
        rows, label = progress(self.demonstrations, self.grippers)
        parameters = self.model.critic_parameters()
        self.optimiser = optimiser = torch.optim.Adam(parameters, LEARNING_RATE)
        for step in range(STEPS):
            minibatch = torch.randint(len(rows), (BATCH,), generator=self.generator)
            # L = mean (V(o) - progress)^2, or of the cross-entropy of categorical values
            outputs = self._predicted(rows[minibatch])
            loss = self.model.value_head.errors(outputs, label[minibatch].to(self.policy.device)).mean()
            optimiser.zero_grad()
            loss.backward()
            check_finite({"loss of the process reward": loss.detach()}, step + 1)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
        self.optimiser = None
        self.fitted = True

    def _predicted(self, rows: Tensor) -> Tensor:
        """Outputs [B, O] of the critic for the observations `rows` of demonstrations."""
        observation = self.demonstrations.chunks(rows, 1)["observation"].to(self.policy.device)
        try:
            return self.model.value_outputs(observation)
        except KeyError as error:
            missing = ", ".join(key for key in self.policy.contract.observation if key not in observation)
            if not missing:
                raise
            raise UserError(f"the critic tells progress from {missing}, which the demonstrations lack") from error

    def state_dict(self) -> dict[str, Any]:
        """Weights of the model, and whether it is fitted."""
        return {"model": dict(self.model.state_dict()), "fitted": self.fitted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.fitted = state["fitted"]


def shaped(rollout: Rollout, before: Tensor, after: Tensor, weight: float, discount: float) -> Rollout:
    """Copy of `rollout` with the shaping reward F, from progress [T, N], added to the first action of each decision."""
    decay = discount ** rollout.executed.sum(-1).to(before.dtype)
    # F = weight (gamma^k Phi(s') - Phi(s)), Phi(s') = 0 after a termination
    shaping = weight * (decay * after * ~rollout.terminated - before)
    reward = rollout.reward.clone()
    reward[..., 0] += shaping.to(reward.dtype)
    return replace(rollout, reward=reward)


def grippers(contract: Contract, option: str) -> list[int]:
    """Indices of the action's elements whose names contain "gripper".

    Raises:
        UserError: if there are none.
    """
    indices = [number for number, name in enumerate(contract.action.names) if "gripper" in name]
    if not indices:
        raise UserError(f"{option} finds milestones by action elements named gripper, which this task lacks")
    return indices


def progress(demonstrations: Episodes, grippers: list[int]) -> tuple[Tensor, Tensor]:
    """Rows [R] of the observations of episodes that did not fail, and the progress of each in [0, 1), [R].

    M milestones divide an episode into phases: after m of them and a share s of the present phase it is (m + s) / M.
    """
    episode = demonstrations.episode
    commands = demonstrations.actions[:, grippers]
    middle = (commands.amin(0) + commands.amax(0)) / 2.0
    closed = commands > middle
    label = torch.zeros(len(demonstrations))
    begin = 0
    for number, end in enumerate(demonstrations.ends.tolist()):
        # milestones: steps at which a gripper changes between the halves of its range
        milestones = (closed[begin + 1 : end] != closed[begin : end - 1]).any(-1).nonzero().squeeze(1) + begin + 1
        bounds = torch.cat((torch.tensor([begin]), milestones, torch.tensor([end])))
        rows = (episode == number).nonzero().squeeze(1)
        step = demonstrations.first[rows]
        phase = torch.searchsorted(bounds, step, right=True) - 1
        share = (step - bounds[phase]) / (bounds[phase + 1] - bounds[phase])
        # (m + s) / M
        label[rows] = (phase + share) / (len(bounds) - 1)
        begin = end
    rows = demonstrations.imitated_rows()
    return rows, label[rows]
