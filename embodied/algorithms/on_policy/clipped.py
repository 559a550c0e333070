"""Base of the learners with a clipped ratio: epochs of minibatch steps on decisions and their advantages.

    ratio r = pi(sample | observation) / pi_old(sample | observation);  L = -min(r A, clip(r, 1 - low, 1 + high) A)

A policy defines what its log-probability refers to; a learner only receives log_prob [..., P]. Sources: PPO (arXiv
1707.06347); a wider upper clip, DAPO (arXiv 2503.14476); parts of a log-probability, DPPO (arXiv 2409.00588).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied import seeding
from embodied.algorithms.finite import check_finite, losses
from embodied.algorithms.imitation.one_step import OneStep, OneStepConfig
from embodied.algorithms.micro_batch import rows_within
from embodied.algorithms.minibatches import Minibatches
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.schedule import linear_decay
from embodied.algorithms.small_actor import with_small_actor
from embodied.configuration import Configuration, Fraction, Limit, NonNegativeFloat, PositiveFloat, PositiveInt
from embodied.errors import UserError
from embodied.policy import Evaluation, SteeredPolicy, Steering, TrainablePolicy
from embodied.rollout.memory import RecurrentPolicy
from embodied.world import ALONE, World, of_each

GRADIENTS = ("gradient of the actor", "gradient of the critic")


@dataclass
class ClippedConfig(Configuration):
    """Hyper-parameters of clipped steps; `rollout_length` (T) decisions per environment and iteration.

    The rollout's decisions are used in `epochs` of minibatches of `minibatch` decisions. Learning rates decay
    linearly to their `final_lr_share`. Minibatches are scored in pieces that keep at most `memory_gb` for the backward
    pass; whole if None. A ratio is clipped at 1 - `clip` and 1 + `clip_high` (None: `clip`; DAPO: 0.28 above 0.2).
    Where a log-probability has several parts, denoising steps, each is clipped by itself (DPPO, arXiv 2409.00588): from
    `clip_first` (None: `clip`) to `clip` at the last, with the advantage discounted by `part_discount` for every step
    that follows. An iteration ends once the approximate KL
    divergence from the policy that collected passes `target_kl`. `kl_coefficient` weighs the KL divergence from the
    policy that reinforcement learning started with, as SFT left it (0: not computed), `wasserstein` the mean squared
    distance, in half ranges of the action, of chunks from those that this policy generates from the same noise
    (ReinFlow's regulariser, arXiv 2505.22094; 0: not computed). With `one_step` every step is followed by one of the
    policy's one-step actor, which imitates it and does not act yet.
    """

    rollout_length: PositiveInt = 35
    epochs: PositiveInt = 5
    minibatch: PositiveInt = 1750
    learning_rate: NonNegativeFloat = 1e-4
    clip: PositiveFloat = 0.2
    clip_high: PositiveFloat | None = None
    clip_first: PositiveFloat | None = None
    part_discount: Fraction = 1.0
    entropy_weight: NonNegativeFloat = 0.0
    target_kl: Limit = 0.05
    kl_coefficient: NonNegativeFloat = 0.0
    wasserstein: NonNegativeFloat = 0.0
    max_gradient_norm: Limit = 1.0
    final_lr_share: Fraction = 1.0
    memory_gb: PositiveFloat | None = None
    one_step: bool = False

    @property
    def refers_to_start(self) -> bool:
        """Whether the learner keeps a copy of the policy that reinforcement learning started with."""
        return bool(self.kl_coefficient or self.wasserstein)

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind; 0: each rollout is used before the next one is collected."""
        return 0

    def check(self, option: str, policy: TrainablePolicy) -> None:
        """Check that `policy` can be trained by the learner of `option`, such as algorithm=ppo.

        Raises:
            UserError: for a policy whose samples have no log-probability, or without a one-step actor that is to
                learn, and for `wasserstein` one that does not generate from noise.
        """
        if not policy.scores:
            raise UserError(
                f"expected a policy whose samples have a log-probability for {option};"
                " use policy.sampler=flow_sde, for policy=tokens policy.head=bins, and weights before steering"
            )
        if self.wasserstein and not isinstance(policy, SteeredPolicy):
            raise UserError("algorithm.wasserstein compares chunks generated from noise: use policy=flow, or leave it")
        if self.one_step:
            with_small_actor(policy, Steering.ONE_STEP, f"{option.partition('=')[0]}.one_step=true")


class ClippedUpdate:
    """Metrics of the steps of one update, and the KL divergence of the last one, a mean over processes."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0
        self.kl = torch.zeros(())

    def add(self, metrics: dict[str, float], world: World) -> None:
        """Add the metrics of a step; none if it was not taken."""
        if metrics:
            self.sums = {key: self.sums.get(key, 0.0) + value for key, value in metrics.items()}
            self.count += 1
            # the mean over processes, so that all of them stop at the same minibatch
            self.kl = world.sum(torch.tensor(metrics["kl"])) / world.size

    def means(self) -> dict[str, float]:
        """Mean metrics, and the number of steps."""
        return {key: value / self.count for key, value in self.sums.items()} | {"minibatches": float(self.count)}


class Clipped(Composite):
    """Learner that takes clipped steps with `policy` on batches {observation, sample, log_prob, advantage, own}.

    `rates` are learning rates of the actor's parameters and, if there is a second one, of the critic's. `generator`
    draws minibatches.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        config: ClippedConfig,
        generator: torch.Generator,
        *rates: float,
    ) -> None:
        self.policy = policy
        self.generator = generator
        self.rates = rates
        self.config = config
        self.parameters = (policy.actor_parameters(), policy.critic_parameters())[: len(rates)]
        groups = [{"params": params, "lr": rate} for params, rate in zip(self.parameters, rates, strict=True)]
        self.optimiser = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        self.reference = copied(policy) if config.refers_to_start else None
        self.noise = seeding.child(generator) if config.wasserstein else None
        self.one_step: OneStep | None = None
        if config.one_step:
            assert isinstance(policy, SteeredPolicy)
            self.one_step = OneStep(policy, OneStepConfig(), seeding.child(generator))
        self.progress = 0.0
        self.iterations = 0
        self.gradient_steps = 0
        self.piece: int | None = None  # rows scored together; None: not measured yet

    def _decay(self, progress: float) -> None:
        self.progress = progress
        linear_decay(self.optimiser, progress, self.config.final_lr_share, *self.rates)

    def _epochs(
        self, batch: TensorDict, update: ClippedUpdate, world: World, used: Tensor | None = None
    ) -> Iterator[TensorDict]:
        """Yield minibatches of `batch` [T, N], each for one step, until the `update` has reached the KL limit.

        For a policy without memory minibatches contain only the decisions `used` [T, N].
        """
        total = torch.where(batch["own"], batch["advantage"], 0.0).sum()
        check_finite({"sum of advantages": total}, self.gradient_steps + 1)
        if isinstance(self.policy, RecurrentPolicy):
            used = batch["own"].new_ones(1, batch.shape[1])  # whole environments
        minibatches = Minibatches(torch.ones_like(batch["own"]) if used is None else used, world)
        epochs = chain.from_iterable(self._minibatches(batch, minibatches) for _ in range(self.config.epochs))
        for minibatch in epochs:
            yield minibatch
            if bool(update.kl > self.config.target_kl):
                break
        self.iterations += 1
        self.policy.anneal(self.progress)

    def _minibatches(self, batch: TensorDict, minibatches: Minibatches) -> Iterator[TensorDict]:
        """Yield minibatches of `batch` [T, N] in random order.

        A minibatch has decisions [B]; for a policy with memory, whole environments [T, B]. Each is copied to the
        policy's device when it is used, because the whole rollout may not fit there.
        """
        size = self.config.minibatch
        dim = 0
        if isinstance(self.policy, RecurrentPolicy):
            size = max(1, size // len(batch))
            dim = 1
        else:
            batch = batch.flatten(0, 1)
        for rows, counted in minibatches.draw(size, self.generator):
            minibatch = select(batch, rows, dim)
            if not bool(counted.all()):
                minibatch["own"] = minibatch["own"] & counted.to(minibatch["own"].device)
            yield minibatch.to(self.policy.device)

    def _step(self, batch: TensorDict, world: World = ALONE) -> dict[str, float]:
        """Take one gradient step on decisions [B], or sequences [T, B]; returns losses and ratios, means over `own`.

        Sums are divided by the average number of own decisions per process, so that the average over processes is the
        mean over all decisions. Either every process takes the step, even one without own decisions, or none does;
        then the result is empty.

        Raises:
            DivergedError: before the step, if a loss or a gradient is not finite.
        """
        dim = batch.batch_dims - 1
        count = int(world.sum(batch["own"].sum())) / world.size
        if not count:
            return {}
        if self.piece is None:
            fitting = rows_within(
                self.config.memory_gb, batch.shape[dim], lambda rows: self._losses(batch.narrow(dim, 0, rows), rows)[0]
            )
            self.piece = min(of_each(fitting, world))  # every process makes the same number of passes
        self.optimiser.zero_grad()
        totals: dict[str, Tensor] = {}
        for piece in [batch] if self.piece >= batch.shape[dim] else batch.split(self.piece, dim):
            # Gradients of the pieces add up to the gradient of the minibatch, since each loss is divided by the same
            # count.
            loss, sums = self._losses(cast(TensorDict, piece), count)
            loss.backward()
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
        means = {name: float(value) / count for name, value in totals.items()}
        norms = [nn.utils.clip_grad_norm_(part, self.config.max_gradient_norm) for part in self.parameters]
        check_finite(losses(means) | dict(zip(GRADIENTS, norms, strict=False)), self.gradient_steps + 1)
        self.optimiser.step()
        self.gradient_steps += 1
        if self.one_step is not None:
            means["one_step_distance"] = float(self.one_step.step(batch["observation"], self.progress, world))
        return means

    def _losses(self, batch: TensorDict, count: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Contribution of this piece to the mean loss over `count` decisions, and sums of the metrics."""
        loss, sums = self._policy_loss(batch, self.policy.evaluate(batch["observation"], batch["sample"]))
        return loss / count, sums

    def _policy_loss(self, batch: TensorDict, evaluation: Evaluation) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the actor and its metrics, sums over own decisions."""
        own = batch["own"]
        config = self.config
        decoupled = "proximal" in batch.keys()  # noqa: SIM118 - a TensorDict
        log_ratio = evaluation.log_prob - batch["proximal" if decoupled else "log_prob"]
        # r = exp(log pi - log pi_old), [..., P]; with the decoupled objective pi_prox takes the place of pi_old
        ratio = log_ratio.exp()
        # clip range and weight [P] for each part of the log-probability, such as a denoising step
        low, high, weight = self._of_parts(ratio)
        # [..., 1] * [P]: all parts of a decision share its advantage
        advantage = batch["advantage"].unsqueeze(-1) * weight
        if decoupled:
            advantage = advantage * batch["importance"]
        clipped = ratio.clamp(1.0 - low, 1.0 + high)
        # L = -min(r A, clip(r, 1 - low, 1 + high) A)
        policy_loss = -_total(torch.minimum(ratio * advantage, clipped * advantage), own)
        entropy = _total(evaluation.entropy if config.entropy_weight else evaluation.entropy.detach(), own)
        # L = L_clip - c_H H
        loss = policy_loss - config.entropy_weight * entropy
        with torch.no_grad():
            # KL(pi_old | pi) = E[(r - 1) - log r], of low variance: joschu.net/blog/kl-approx.html
            kl = _total((ratio - 1.0) - log_ratio, own)
            clipped_share = _total(((ratio < 1.0 - low) | (ratio > 1.0 + high)).float(), own)
        sums = {"policy_loss": policy_loss, "entropy": entropy, "kl": kl, "clip_fraction": clipped_share}
        if self.reference is not None and config.kl_coefficient:
            with torch.no_grad():
                start_log_prob = self.reference.evaluate(batch["observation"], batch["sample"]).log_prob
            start_log_ratio = start_log_prob - evaluation.log_prob
            # KL(pi | pi_start) = E[q - 1 - log q] with q = pi_start / pi, whose gradient flows through pi
            sums["reference_kl"] = _total(start_log_ratio.exp() - 1.0 - start_log_ratio, own)
            loss = loss + config.kl_coefficient * sums["reference_kl"]
        if config.wasserstein:
            sums["start_distance"] = torch.where(own, self._start_distance(batch["observation"]), 0.0).sum()
            loss = loss + config.wasserstein * sums["start_distance"]
        return loss, {name: value.detach() for name, value in sums.items()}

    def _start_distance(self, observation: TensorDict) -> Tensor:
        """Mean squared distance [B] of chunks from those of the policy at the start, from the same noise."""
        assert isinstance(self.policy, SteeredPolicy)
        assert isinstance(self.reference, SteeredPolicy)
        assert self.noise is not None
        shape = (len(observation), *self.policy.steering_noise_shape)
        noise = torch.randn(shape, generator=self.noise).to(self.policy.device)
        with torch.no_grad():
            start = self.reference.generate(observation, noise)
        action = self.policy.contract.action
        half_range = (start.new_tensor(action.high) - start.new_tensor(action.low)) / 2.0
        # W2(pi, pi_start)^2 <= E_z |a(o, z) - a_start(o, z)|^2
        return ((self.policy.generate(observation, noise) - start) / half_range).square().mean((1, 2))

    def _of_parts(self, ratio: Tensor) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """Lower and upper clip range, and weight of the advantage, [P] for the parts of `ratio` [..., P].

        clip_p = first + (clip - first) (e^(3 p / (P - 1)) - 1) / (e^3 - 1)
        """
        config = self.config
        count = ratio.shape[-1]
        wider = 1.0 if config.clip_high is None else config.clip_high / config.clip
        if count == 1:
            return config.clip, config.clip * wider, 1.0
        first = config.clip if config.clip_first is None else config.clip_first
        rise = torch.expm1(torch.linspace(0.0, 3.0, count, device=ratio.device)) / math.expm1(3.0)
        following = torch.arange(count - 1, -1, -1, device=ratio.device)
        # rise = (e^(3 p / (P - 1)) - 1) / (e^3 - 1), from 0 to 1
        low = first + (config.clip - first) * rise
        return low, low * wider, config.part_discount**following

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that scoring a piece of a minibatch stores, with chunks, or a step of the one-step actor if more."""
        distilled = 0 if self.one_step is None else self.one_step.largest_pass(passes) or 0
        also = self._start_distance if self.config.wasserstein else None
        return max(distilled, passes.evaluate(self.config.minibatch, self.config.memory_gb, also))

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters, minibatch generator, and the reference policy and one-step actor's if there are any."""
        state = {
            "optimiser": self.optimiser.state_dict(),
            "iterations": self.iterations,
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }
        others = {"reference": self.reference, "one_step": self.one_step}
        if self.noise is not None:
            state["noise"] = self.noise.get_state()
        return state | {name: each.state_dict() for name, each in others.items() if each is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimiser.load_state_dict(state["optimiser"])
        self.iterations = state["iterations"]
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        if self.noise is not None:
            self.noise.set_state(state["noise"])
        if self.one_step is not None:
            self.one_step.load_state_dict(state["one_step"])


def select(batch: TensorDict, rows: Tensor, dim: int) -> TensorDict:
    """Select `rows` of `batch` along `dim`, twice as fast as batch[rows], which copies element by element."""
    size = [*batch.shape[:dim], len(rows), *batch.shape[dim + 1 :]]
    return cast(TensorDict, batch.apply(lambda part: part.index_select(dim, rows.to(part.device)), batch_size=size))


def copied(policy: TrainablePolicy) -> TrainablePolicy:
    """Copy of `policy`."""
    with seeding.undisturbed():
        copy = policy.with_new_weights()
    copy.load_state_dict(policy.state_dict())
    return copy


def _total(parts: Tensor, own: Tensor) -> Tensor:
    """Sum over the decisions `own` [...] of the mean over `parts` [..., P]."""
    return torch.where(own, parts.mean(-1), 0.0).sum()
