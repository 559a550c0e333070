"""Model-based return-conditioned supervised learning (MBRCSL, arXiv 2310.19308): stitches parts of different episodes.

A model of the dynamics and a behaviour policy, which imitates all episodes, are rolled out together from the recorded
initial observations. Rollouts may join the beginning of one episode and the end of another, and the policy imitates
those with large predicted returns. No value is bootstrapped.

Differs from the paper:
    - of the rollouts from one initial observation the one of largest return is kept, if that is above the mean of the
      task's recorded returns; the paper keeps those above the largest recorded return, whatever their beginning;
    - the policy imitates what was kept without a condition on the return, and goes on from the behaviour policy;
    - rollouts have the mean predictions of the model and are weighed by the probability that they go on;
    - a step of the model is a decision of K actions (`dynamics.py`).

Letters: B rollouts, T decisions, K executed actions, A action dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.offline.dynamics import Dynamics, DynamicsConfig
from embodied.algorithms.offline.off_policy_evaluation import initial_rows
from embodied.configuration import Fraction, PositiveInt, Range
from embodied.data.episodes import Episodes, columns, from_columns
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import SteeredPolicy, TrainablePolicy
from embodied.world import ALONE, World


@dataclass
class MBRCSLConfig(SFTConfig):
    """Hyper-parameters of MBRCSL; options of the policy's optimiser are those of SFT.

    Of the `steps` the first `model_share` train the `dynamics` and the next `behaviour_share` the behaviour policy.
    Then `rollouts` from each of up to `starts` recorded initial observations are compared.
    """

    model_share: Annotated[float, Range(above=0, below=1)] = 0.3
    behaviour_share: Annotated[float, Range(above=0, below=1)] = 0.4
    starts: PositiveInt = 200
    rollouts: PositiveInt = 32
    discount: Fraction = 0.99
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.model_share + self.behaviour_share >= 1.0:
            raise UserError(
                f"expected model_share + behaviour_share < 1, got {self.model_share} and {self.behaviour_share}"
            )

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> MBRCSL:
        """Build the learner of `policy`; `generator` draws minibatches and rollouts.

        Raises:
            UserError: for a policy that does not generate chunks from noise, and observations without a model.
        """
        if not isinstance(policy, SteeredPolicy):
            raise UserError(
                "offline=mbrcsl needs a policy that generates chunks from noise; use policy=flow or diffusion"
            )
        return MBRCSL(policy, self, generator)


class MBRCSL(SFT):
    """Learner of a model and a behaviour policy from stored episodes, then of a policy from their best rollouts."""

    config: MBRCSLConfig
    policy: SteeredPolicy

    def __init__(self, policy: SteeredPolicy, config: MBRCSLConfig, generator: torch.Generator) -> None:
        super().__init__(policy, config, generator)
        self.dynamics = Dynamics(policy.contract, config.dynamics, policy.device)
        self.begins = self.model_steps = round(config.model_share * config.steps)
        self.behaviour_steps = round(config.behaviour_share * config.steps)
        self.transitions: Transitions | None = None
        self.kept: Episodes | None = None
        self.metrics: dict[str, float] = {}

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`; returns the last metrics.

        Raises:
            UserError: in several processes, for episodes with unknown rewards (see `recorded_transitions`), and if no
                rollout is better than the mean recorded episode.
        """
        if world.size > 1:
            raise UserError("offline=mbrcsl learns in one process; leave out torchrun, or use offline=iql")
        self.transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        for _ in range(steps):
            if self.gradient_steps < self.model_steps:
                self._learn_model(self.transitions)
            else:
                self._learn_policy(self.transitions)
        return dict(self.metrics)

    def _learn_model(self, transitions: Transitions) -> None:
        """Take one step of the model, and choose its elites after the last one."""
        self.gradient_steps += 1
        is_last = self.gradient_steps == self.model_steps
        self.metrics |= self.dynamics.learn(transitions, self.generator, is_last=is_last)

    def _learn_policy(self, transitions: Transitions) -> None:
        """Take one step of imitation: of all episodes first, then of the best rollouts."""
        config = self.config
        horizon = self.policy.contract.horizon
        progress = (self.gradient_steps - self.model_steps) / max(1, config.steps - self.model_steps)
        if self.gradient_steps < self.model_steps + self.behaviour_steps:
            rows = transitions.draw(config.batch, self.generator)
            batch = transitions.episodes.chunks(rows, horizon)
        else:
            if self.kept is None:
                self.kept = self._best_rollouts(transitions)
            batch = self.kept.sample(config.batch, horizon, self.generator)
        self.losses.append(self.step(batch, min(1.0, progress)))
        self.metrics["actor_loss"] = sum(self.losses) / len(self.losses)

    @torch.no_grad()
    def _best_rollouts(self, transitions: Transitions) -> Episodes:
        """Rollout of largest predicted return from each initial observation, if it is above the task's mean."""
        episodes = transitions.episodes
        # rows of initial observations, evenly spaced over the episodes
        count = min(self.config.starts, len(episodes.ends))
        chosen = torch.arange(count) * len(episodes.ends) // count
        initial = initial_rows(episodes)
        first = episodes.chunks(initial[chosen], 1)["observation"]
        lengths = episodes.ends.diff(prepend=episodes.ends.new_zeros(1))
        decisions = -(-int(lengths.max()) // self.policy.contract.executed)
        rows = torch.arange(count).repeat_interleave(self.config.rollouts)
        observations, actions, rewards, survival = self._rollouts(cast(TensorDict, first[rows]), decisions)
        # R = sum_t gamma^(K t) S_t r_t
        powers = self.config.discount ** (self.policy.contract.executed * torch.arange(decisions).float())
        returns = (powers * survival * rewards).sum(1).view(count, -1)
        predicted, best = returns.max(1)
        tasks = episodes.task_index
        mean = torch.zeros(int(tasks.max()) + 1).scatter_reduce(
            0, tasks, transitions.returns[initial], "mean", include_self=False
        )
        is_kept = predicted > mean[tasks[chosen]]
        if not is_kept.any():
            raise UserError(
                "no rollout of the model is better than the mean episode; use more offline.steps or rollouts"
            )
        self.metrics |= {
            "kept_share": float(is_kept.float().mean()),
            "kept_return": float(predicted[is_kept].mean()) * transitions.scale,
            "recorded_return": float(transitions.returns[initial].mean()) * transitions.scale,
        }
        kept = (torch.arange(count) * self.config.rollouts + best)[is_kept].tolist()
        return Episodes.join([_episode(observations[each], actions[each], survival[each]) for each in kept])

    def _rollouts(self, observation: TensorDict, decisions: int) -> tuple[TensorDict, Tensor, Tensor, Tensor]:
        """Observations [B, T], actions [B, T, K, A], rewards [B, T] and probability S of each decision [B, T].

        They are on the CPU; rollouts start at `observation` [B]. The model predicts means: the best of several rollouts
        is not the luckiest.
        """
        policy = self.policy
        noise_shape = (len(observation), policy.generated, policy.contract.action.shape[-1])
        observation = observation.to(policy.device)
        steps = []
        survival = torch.ones(len(observation))
        for _ in range(decisions):
            noise = torch.randn(noise_shape, generator=self.generator).to(policy.device)
            actions = policy.generate(observation, noise)[:, : policy.contract.executed]
            following, reward, terminated = self.dynamics.step(observation, actions)
            steps.append((observation.cpu(), actions.cpu(), reward.cpu(), survival))
            # S_{t+1} = S_t (1 - P(terminated))
            survival = survival * (1.0 - terminated.cpu())
            observation = following
        observations, *others = zip(*steps, strict=True)
        actions, rewards, survivals = (torch.stack(each, 1) for each in others)
        return cast(TensorDict, torch.stack(observations, 1)), actions, rewards, survivals

    def state_dict(self) -> dict[str, Any]:
        """State of SFT, the model, the kept rollouts and the last metrics."""
        kept = {} if self.kept is None else columns(self.kept)
        own = {"dynamics": self.dynamics.state_dict(), "kept": kept, "metrics": dict(self.metrics)}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.dynamics.load_state_dict(state["dynamics"])
        self.kept = from_columns(state["kept"]) if state["kept"] else None
        self.metrics = dict(state["metrics"])


def _episode(observations: TensorDict, actions: Tensor, survival: Tensor) -> Episodes:
    """Episode of those decisions of a rollout with `actions` [T, K, A] that it probably takes, by `survival` [T]."""
    count = int((survival > 0.5).sum())
    taken = actions[:count]
    first = torch.arange(count) * taken.shape[1]
    return Episodes.of(cast(TensorDict, observations[:count]), taken.flatten(0, 1), success=None, first=first)
