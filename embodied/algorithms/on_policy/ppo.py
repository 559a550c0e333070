"""Proximal policy optimisation (arXiv 1707.06347) over action chunks.

The policy defines what its log-probability refers to; PPO only receives log_prob [N, P]. With a flow policy sampling by
Flow-SDE this is the algorithm of pi_RL (arXiv 2510.25889). The clipped steps are those of `clipped.py`.

Differs from the papers:
    - one discount per control step, gamma^k for a chunk that executed k actions; the time limit is bootstrapped from
      the value of the true final observation;
    - an iteration stops early once the approximate KL divergence passes `target_kl`;
    - the critic's returns may use another lambda: a small one gives advantages less noise, a large one gives the
    critic less bias;
    - the critic's loss is a plain squared error, or the cross-entropy of categorical `policy.values` (Stop Regressing,
    arXiv 2403.03950), and only the critic is trained during the first `critic_warmup` iterations;
    - rewards are divided by the running standard deviation of their returns (`reward_scale.py`), and the gradients of
    actor and critic are clipped separately: neither the reward's scale nor large initial errors of the critic slow the
    actor down;
    - a policy with memory is trained through time: minibatches are environments, each from its memory at the beginning
    of the rollout;
    - rollouts of older policies may be used with the decoupled objective (arXiv 2110.00641, and AReaL, arXiv
    2505.24298): w min(r A, clip(r) A) with r = pi / pi_prox and w = min(pi_prox / pi_old, limit), where pi_prox is the
    policy before the update, from which `target_kl` is measured, and pi_old the one that collected;
    - a person who takes over truncates the policy's sequence like a time limit: a person's decisions are not trained on
    and do not enter the advantages of earlier ones.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.advantage import clamped_targets, explained_variance, gae, moments, next_values, normalise
from embodied.algorithms.on_policy.clipped import Clipped, ClippedConfig, ClippedUpdate
from embodied.algorithms.rewards.process_reward import LearnedProgress, shaped
from embodied.algorithms.rewards.reward_scale import RewardScale
from embodied.configuration import INF, Fraction, NonNegativeFloat, NonNegativeInt, Range
from embodied.data.episodes import Episodes
from embodied.environment import Environment, NumberedStarts, group_size
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.curriculum import CurriculumStarts, Favours
from embodied.rollout.memory import RecurrentPolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World

log = logging.getLogger(__name__)
FIRST_ROWS = 64
"""Decisions scored together before the number that fits has been measured."""


@dataclass
class PPOConfig(ClippedConfig):
    """Hyper-parameters of PPO: GAE's `discount` per control step and `gae_lambda`, and the critic's.

    The critic's returns may look further ahead than advantages, by `value_gae_lambda` (None: `gae_lambda`). In the
    first `critic_warmup` iterations only the critic is trained, with `value_learning_rate`. A share `curriculum` of
    episodes begins in initial states that the policy has tried, by what `curriculum_favours`: how near it solves half
    of its attempts, or how often it fails (`rollout/curriculum.py`; 0: none). `process_reward` weighs progress along
    the milestones of demonstrations (VLA-RL, `process_reward.py`; 0: not computed). `importance_limit` truncates how
    much more likely the policy before the update finds what an older one sampled, in the decoupled objective (null: not
    decoupled, ratios are to the policy that collected).
    """

    value_learning_rate: NonNegativeFloat = 1e-3
    discount: Fraction = 0.99
    gae_lambda: Fraction = 0.95
    value_gae_lambda: Fraction | None = None
    critic_warmup: NonNegativeInt = 3
    curriculum: Fraction = 0.0
    curriculum_favours: Favours = Favours.HALF
    process_reward: NonNegativeFloat = 0.0
    importance_limit: Annotated[float, Range(at_least=1, at_most=INF)] | None = None

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and a choice among initial states that are not repeated."""
        super().__post_init__()
        if self.curriculum_favours is not Favours.HALF and not self.curriculum:
            raise UserError(
                "algorithm.curriculum_favours chooses among repeated initial states, and algorithm.curriculum=0 repeats"
                " none; set algorithm.curriculum=0.5, too"
            )

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: 4, or 8 with the decoupled objective.

        AReaL (arXiv 2505.24298) reports results as good as synchronous PPO's up to 8.
        """
        return 4 if self.importance_limit is None else 8

    def remote_starts(self, env: Environment, generator: torch.Generator) -> None:
        """No initial states are chosen remotely.

        Raises:
            UserError: with a curriculum, whose records are the learner's.
        """
        if self.curriculum:
            raise UserError("algorithm.curriculum needs environments in the learner's process; use curriculum=0")

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: for the process reward."""
        return bool(self.process_reward)

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> PPO:
        """Build the learner of `policy`; `generator` shuffles minibatches.

        Raises:
            UserError: for a policy whose samples have no log-probability, a curriculum where initial states are not
                numbered, or if demonstrations are missing.
        """
        self.check("algorithm=ppo", policy)
        starts = None
        if self.curriculum:
            if not isinstance(env, NumberedStarts) or group_size(env) > 1:
                raise UserError(
                    "algorithm.curriculum repeats initial states of single environments, which this simulator does not"
                    " number; use curriculum=0"
                )
            starts = CurriculumStarts(
                env.task_index,
                repeated=self.curriculum,
                generator=generator,
                num_starts=env.num_starts,
                favours=self.curriculum_favours,
            )
        process = None
        if self.process_reward:
            process = LearnedProgress(policy, demonstrations, generator, "algorithm.process_reward")
        return PPO(policy, self, generator, starts, process)


class PPO(Clipped):
    """Learner that updates a policy from its rollouts."""

    collector = Collector
    config: PPOConfig

    def __init__(
        self,
        policy: TrainablePolicy,
        config: PPOConfig,
        generator: torch.Generator,
        starts: CurriculumStarts | None = None,
        process: LearnedProgress | None = None,
    ) -> None:
        super().__init__(policy, config, generator, config.learning_rate, config.value_learning_rate)
        self.starts = starts
        self.process = process
        self.reward_scale = RewardScale(config.discount)

    @property
    def warm(self) -> bool:
        """Whether only the critic is trained yet."""
        return self.iterations < self.config.critic_warmup

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Run one iteration; returns mean losses, clip fraction, KL and explained variance.

        Raises:
            UserError: for a curriculum in a task that does not define success.
        """
        self._decay(progress)
        # progress after the first iteration is one over the number of all
        if not self.iterations and not world.rank and self.config.critic_warmup * progress >= 1.0:
            log.warning(
                f"about {round(1.0 / progress)} iterations do not outlast algorithm.critic_warmup="
                f"{self.config.critic_warmup}: the policy is not trained; set a smaller algorithm.rollout_length or"
                " critic_warmup, or more env_steps"
            )
        if self.starts and not rollout.has_success:
            raise UserError("algorithm.curriculum goes by success, which this task does not define; use curriculum=0")
        metrics: dict[str, float] = {}
        if self.process is not None:
            before, after = self.process(rollout, world)
            rollout = shaped(rollout, before, after, self.config.process_reward, self.config.discount)
            metrics["process_progress"] = float(before.mean())
        self.reward_scale.add(rollout, world)
        if int(world.sum(rollout.own.sum())) < 2 * world.size:  # a person gave almost all actions
            return metrics
        batch, scales = self._prepare(rollout, world)
        update = ClippedUpdate()
        for minibatch in self._epochs(batch, update, world):
            update.add(self._step(minibatch, world), world)
        return update.means() | scales | metrics

    def _prepare(self, rollout: Rollout, world: World) -> tuple[TensorDict, dict[str, float]]:
        """Training batch [T, N], and metrics: scales of advantages and rewards, and the explained variance."""
        assert rollout.value is not None, "PPO needs policies that return values with their decisions"
        own = rollout.own
        value = rollout.value
        advantage, returns = self._gae(rollout, value, next_values(self.policy, rollout, value, world))
        batch = TensorDict(
            {
                "observation": rollout.observation,
                "sample": rollout.sample,
                "log_prob": rollout.log_prob,
                "advantage": normalise(advantage, own, world),
                "return": returns,
                "own": own,
            },
            batch_size=list(value.shape),
        )
        return batch, self._decouple(batch, world) | {
            "advantage_std": float(moments(advantage[own], world)[1]),
            "explained_variance": explained_variance(value, returns, world),
            "reward_scale": self.reward_scale(),
            **clamped_targets(self.policy.value_head, returns[own], world),
        }

    def _gae(self, rollout: Rollout, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and the critic's returns, [T, N] each."""
        reward = self.reward_scale() * rollout.reward
        discount = self.config.discount
        lam = self.config.gae_lambda
        transitions = (reward, rollout.executed, rollout.terminated, rollout.cut, value, next_value)
        # A_t = sum_l (gamma lambda)^l delta_{t+l} with rewards r / std(returns); G_t = A_t + V(s_t)
        advantage, returns = gae(*transitions, discount=discount, gae_lambda=lam)
        if self.config.value_gae_lambda is not None:
            # the critic's own lambda: G_t again, with less bias
            _, returns = gae(*transitions, discount=discount, gae_lambda=self.config.value_gae_lambda)
        return advantage, returns

    @torch.no_grad()
    def _decouple(self, batch: TensorDict, world: World) -> dict[str, float]:
        """Add log pi_prox and w, [T, N, P], to `batch` [T, N] if the objective is decoupled; returns their metrics."""
        limit = self.config.importance_limit
        behaviour = batch["log_prob"]
        if limit is None:
            return {}
        rows = min(self.config.minibatch, self.piece or FIRST_ROWS)
        inputs = batch.select("observation", "sample")
        if isinstance(self.policy, RecurrentPolicy):  # whole environments, through time
            pieces = inputs.split(max(1, rows // len(inputs)), 1)
        else:
            pieces = inputs.flatten(0, 1).split(rows)
        log_probs: list[Tensor] = []
        for piece in pieces:
            on_device = piece.to(self.policy.device)
            log_probs.append(self.policy.evaluate(on_device["observation"], on_device["sample"]).log_prob.to(behaviour))
        # pieces are joined along environments [T, n, P], or along flattened decisions [n, P]
        proximal = torch.cat(log_probs, log_probs[0].ndim - 2).view(behaviour.shape)
        # w = min(pi_prox / pi_old, limit)
        ratio = (proximal - behaviour).exp()
        batch["proximal"], batch["importance"] = proximal, ratio.clamp_max(limit)
        terms = {"importance": batch["importance"], "importance_truncated": (ratio > limit).float()}
        return {name: float(moments(value[batch["own"]].mean(-1), world)[0]) for name, value in terms.items()}

    def _losses(self, batch: TensorDict, count: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean losses of actor and critic over `count` decisions, and sums of the metrics."""
        evaluation = self.policy.evaluate(batch["observation"], batch["sample"])
        policy_loss, sums = self._policy_loss(batch, evaluation)
        head = self.policy.value_head
        outputs = evaluation.value.unsqueeze(-1) if evaluation.value_outputs is None else evaluation.value_outputs
        # L_V = (V(s) - G)^2, or the cross-entropy of categorical values; during warm-up the actor's loss is left out
        value_loss = torch.where(batch["own"], head.errors(outputs, batch["return"]), 0.0).sum()
        loss = value_loss if self.warm else value_loss + policy_loss
        return loss / count, sums | {"value_loss": value_loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters, reward scale, minibatch generator, and the state of the process reward."""
        process = {} if self.process is None else {"process": self.process.state_dict()}
        return super().state_dict() | {"reward_scale": self.reward_scale.state_dict()} | process

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.reward_scale.load_state_dict(state["reward_scale"])
        if self.process is not None:
            self.process.load_state_dict(state["process"])
