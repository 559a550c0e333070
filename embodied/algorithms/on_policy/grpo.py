"""Group relative policy optimisation (arXiv 2402.03300) over action chunks: no critic.

Several episodes begin in one initial state. The advantage of a decision is its episode's outcome compared with those of
its group; steps are clipped as in PPO (`clipped.py`). What SimpleVLA-RL (arXiv 2509.09674) takes from DAPO
(arXiv 2503.14476) is in the defaults: a wider upper clip, groups that almost always or hardly ever succeed are left
out, every decision weighs the same however long its episode is, no KL divergence from the policy at the start.

Differs from the papers:
    - a decision is compared with those episodes of its group that had not ended before as many decisions, itself among
    them (`of_running`), not with all. Successes end early, so that failures have most of the decisions: compared with
    all of the group, the advantage has a negative mean, and actions taken once only failures continue are blamed as
    much as those that caused the failure;
    - groups that are left out are not collected again: an iteration has fewer decisions then, and metrics count them.
    With `min_groups` an update waits, as in the dynamic sampling of DAPO and SimpleVLA-RL, until so many groups have
    been collected that are used, all by the same policy; what is above that number is used, too;
    - all groups of an iteration are whole and collected by the same policy; with a number of environments that groups
    do not divide, the last group of a task is smaller. With `partial` episodes go on across updates instead, as in
    Kimi k1.5 (arXiv 2501.12599), so that no environment waits for the longest episode; a group is used once all of its
    episodes have ended. The ratio of each decision is to the policy that took it;
    - with `leave_one_out` an episode is compared with the others of its group, as in RIPT-VLA (arXiv 2505.17016),
    which does not divide by a deviation.

With `outcome=PROGRESS` failures are ranked by how near they came to successes (SRPO, `progress_reward.py`), in
observations or in what the policy has learned to see in them (`progress_features`); groups without any success are
used, too. With `outcome=PROCESS` a failure is worth the progress at its end along the
milestones of demonstrations (VLA-RL, `process_reward.py`), up to as much as SRPO's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.on_policy.clipped import Clipped, ClippedConfig, ClippedUpdate, select
from embodied.algorithms.rewards.process_reward import LearnedProgress
from embodied.algorithms.rewards.progress_reward import ProgressReward, learned
from embodied.configuration import Fraction, NonNegativeInt, PositiveFloat, Range
from embodied.data.episodes import Episodes
from embodied.environment import Environment, NumberedStarts, group_size
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.groups import GroupStarts, WholeEpisodes, WholeRollout
from embodied.rollout.open_groups import OpenGroups
from embodied.rollout.patience import Patience
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World, of_each

log = logging.getLogger(__name__)
LONG = 20
"""Iterations without an update before each warning."""
VAIN = 100
"""Iterations without any group that is used, from the first one on, after which a run ends."""


class Outcome(Enum):
    """Measure by which the episodes of a group are compared.

    SUCCESS is the success flag, RETURN the sum of rewards. PROGRESS compares failures with the batch's successes,
    PROCESS with the milestones of demonstrations.
    """

    SUCCESS = "success"
    RETURN = "return"
    PROGRESS = "progress"
    PROCESS = "process"


FAILED = 0.6
"""Outcome of a failure with full progress; the outcome of a success is 1."""


@dataclass
class GRPOConfig(ClippedConfig):
    """Hyper-parameters of GRPO: groups of `group` episodes from one initial state are compared by their `outcome`.

    `rollout_length` is rounded down to whole episodes of the longest kind, at least one. A group is left out if all its
    outcomes are the same, and with outcome=SUCCESS if their mean is below `lowest` or above `highest`. Each decision is
    compared with the episodes of its group that run that long, if `of_running`, else with all of them, itself among
    them unless `leave_one_out`. Advantages are divided by the standard deviation of the group's outcomes if
    `by_deviation`. With `progress_features` episodes are compared by the features of the policy that reinforcement
    learning started with, instead of by observations; a critic's encoder that is unlike the actor's has random ones.

    An update waits until at least `min_groups` used groups have been collected (0: it uses what there is). With
    `partial` episodes go on across updates; iterations then have `rollout_length` decisions. Episodes are ended early,
    as failures, once they take `patience` times as many decisions as the longest of the recent successes of their task
    (`rollout/patience.py`; None: never).
    """

    clip_high: PositiveFloat | None = 0.28
    group: Annotated[int, Range(at_least=2)] = 8
    outcome: Outcome = Outcome.SUCCESS
    progress_features: bool = False
    lowest: Fraction = 0.1
    highest: Fraction = 0.9
    of_running: bool = True
    by_deviation: bool = True
    leave_one_out: bool = False
    min_groups: NonNegativeInt = 0
    partial: bool = False
    patience: Annotated[float, Range(at_least=1)] | None = None

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.lowest > self.highest:
            raise UserError(f"expected lowest <= highest, got {self.lowest} and {self.highest}")
        if self.progress_features and self.outcome is not Outcome.PROGRESS:
            raise UserError("algorithm.progress_features is for algorithm.outcome=progress: set both")

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: for the process reward."""
        return self.outcome is Outcome.PROCESS

    @property
    def refers_to_start(self) -> bool:
        """Whether the learner keeps a copy of the policy that reinforcement learning started with."""
        return super().refers_to_start or self.progress_features

    def remote_starts(self, env: Environment, generator: torch.Generator) -> GroupStarts:
        """Group starts of a remote collector's environments `env`.

        Raises:
            UserError: for a simulator that cannot repeat initial states, and for options whose state is the learner's.
        """
        for option in ("partial", "patience"):
            if getattr(self, option):
                raise UserError(f"algorithm.{option} needs environments in the learner's process: leave it out")
        return self._starts(env, generator)

    def _starts(self, env: Environment, generator: torch.Generator) -> GroupStarts:
        if not isinstance(env, NumberedStarts):
            raise UserError(
                "algorithm=grpo repeats initial states, which this simulator does not number; use algorithm=ppo"
            )
        if group_size(env) > 1:
            raise UserError("algorithm=grpo needs a world for each environment, and these share one; use algorithm=ppo")
        return GroupStarts(env.task_index, self.group, generator, env.num_starts, continuous=self.partial)

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> GRPO:
        """Build the learner of `policy` in `env`; `generator` draws initial states and minibatches.

        Raises:
            UserError: for a policy whose samples have no log-probability, a simulator that cannot repeat initial
                states, or if demonstrations are missing.
        """
        self.check("algorithm=grpo", policy)
        starts = self._starts(env, generator)
        process = None
        if self.outcome is Outcome.PROCESS:
            process = LearnedProgress(policy, demonstrations, generator, "algorithm.outcome=process")
        return GRPO(policy, self, starts, generator, process)


class GRPO(Clipped):
    """Learner that updates a policy from groups of whole episodes."""

    config: GRPOConfig

    def __init__(
        self,
        policy: TrainablePolicy,
        config: GRPOConfig,
        starts: GroupStarts,
        generator: torch.Generator,
        process: LearnedProgress | None = None,
    ) -> None:
        super().__init__(policy, config, generator, config.learning_rate)
        self.starts = starts
        self.progress_reward = ProgressReward()
        if config.progress_features:
            assert self.reference is not None
            self.progress_reward = ProgressReward(learned(self.reference))
        self.process = process
        self.collector: Callable[..., Collector] = Collector if config.partial else WholeEpisodes
        if config.patience is not None:
            self.collector = partial(self.collector, patience=Patience(starts.task_index, config.patience))
        self.open = OpenGroups(config.group)
        self.waiting: TensorDict | None = None  # decisions [T, N] of used groups, for the next update
        self.waiting_groups = 0
        self.waited = 0  # iterations since the last update

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Run one iteration; returns mean losses, clip fraction and KL, and shares of the groups.

        No step is taken if no group is used, or fewer than `min_groups` so far.

        Raises:
            UserError: if no group was used in the first `VAIN` iterations.
        """
        self._decay(progress)
        batch, metrics = self._prepare(rollout, world)
        if self.config.min_groups:
            groups = round(metrics["groups"] * metrics["kept_groups"])
            batch = self._with_waiting(used_only(batch, world), groups)
            metrics["waiting_groups"] = float(self.waiting_groups)
        if batch is None or not int(world.sum(batch["own"].sum())):
            if metrics["groups"]:  # else the episodes of partial rollouts go on
                self._wait(world)
            return metrics
        self.waited = 0
        if self.config.partial or self.config.patience:
            batch = lengthened(batch, max(of_each(len(batch), world)))  # in every process the same
        update = ClippedUpdate()
        for minibatch in self._epochs(batch, update, world, batch["own"]):
            update.add(self._step(minibatch, world), world)
        return update.means() | metrics

    def _wait(self, world: World) -> None:
        """Count an iteration without an update; warn after every `LONG` of them.

        Raises:
            UserError: if there was no group to use from the beginning on.
        """
        self.waited += 1
        if self.waited >= VAIN and self.waiting is None and not self.gradient_steps:
            raise UserError(
                f"none of the groups of {self.waited} iterations has successes and failures to compare: train sft"
                " longer if all episodes fail, lower algorithm.lowest, or use algorithm.outcome=progress"
            )
        if not self.waited % LONG and not world.rank:
            advice = f", of algorithm.min_groups={self.config.min_groups}; lower it" if self.config.min_groups else ""
            log.warning(
                f"no update for {self.waited} iterations: {self.waiting_groups} groups with successes and failures"
                f"{advice}; train sft longer if all episodes fail"
            )

    def _with_waiting(self, batch: TensorDict, groups: int) -> TensorDict | None:
        """Concatenate `batch` [T, N], which has so many used groups, and those that wait; None: too few wait on."""
        if groups:  # others take no memory
            if self.waiting is not None:
                batches = self.waiting.to(batch["own"].device), batch
                length = max(map(len, batches))
                batch = cast(TensorDict, TensorDict.cat([lengthened(each, length) for each in batches], 1))
            self.waiting = batch
            self.waiting_groups += groups
        if self.waiting_groups < self.config.min_groups:
            return None
        complete, self.waiting, self.waiting_groups = self.waiting, None, 0
        return complete

    def _prepare(self, rollout: Rollout, world: World) -> tuple[TensorDict, dict[str, float]]:
        """Training batch [T, N], whose `own` decisions are those of used groups; and shares of the groups."""
        if self.config.partial:
            rollout = self.open.continued(rollout, self.starts.fresh)
        episodes = WholeRollout.of(rollout)
        is_new = torch.ones(len(episodes), dtype=torch.bool, device=episodes.last.device)
        if self.config.partial:
            is_new = self.open.take(rollout, episodes)
        outcome = self._outcome(rollout, episodes, world)
        # An episode whose simulation diverged counts as the worst of the batch.
        outcome = torch.where(episodes.at_end(rollout.simulated), outcome, outcome.amin() if len(outcome) else 0.0)
        by_success = rollout.has_success and self.config.outcome is Outcome.SUCCESS
        config = self.config
        comparison = compared(outcome, episodes, config.of_running, config.by_deviation, config.leave_one_out)
        is_used = is_new & comparison.varied
        if by_success:
            is_used = is_used & (comparison.mean >= config.lowest) & (comparison.mean <= config.highest)
        own = rollout.own & (episodes.episode >= 0) & episodes.spread(is_used)
        batch = TensorDict(
            {
                "observation": rollout.observation,
                "sample": rollout.sample,
                "log_prob": rollout.log_prob,
                "advantage": comparison.advantage,
                "own": own,
            },
            batch_size=list(own.shape),
        )
        return batch, _shares(episodes.group, comparison, is_new, is_used, world)

    def _outcome(self, rollout: Rollout, episodes: WholeRollout, world: World) -> Tensor:
        if rollout.has_success and self.config.outcome is Outcome.SUCCESS:
            # R = success
            return episodes.at_end(rollout.success).float()
        if rollout.has_success and self.config.outcome is Outcome.PROGRESS:
            return self.progress_reward(rollout.observation, episodes, episodes.at_end(rollout.success))
        if rollout.has_success and self.process is not None:
            _, after = self.process(rollout, world)
            # R = 1 for a success, else 0.6 * progress at the end
            return torch.where(episodes.at_end(rollout.success), 1.0, FAILED * episodes.at_end(after))
        assert rollout.episode_return is not None
        return episodes.at_end(rollout.episode_return)

    def state_dict(self) -> dict[str, Any]:
        """State of the clipped learner, of the process reward, and of groups that wait for others or are incomplete."""
        state = super().state_dict()
        if self.process is not None:
            state["process"] = self.process.state_dict()
        return state | self.own_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        if self.process is not None:
            self.process.load_state_dict(state["process"])
        self.load_own_state_dict(state)

    def own_state_dict(self) -> dict[str, Any]:
        """Decisions of this process that wait for others, or whose group is incomplete."""
        state = {"open": self.open.state_dict()} if self.config.partial else {}
        waiting = {"waiting": self.waiting, "waiting_groups": self.waiting_groups}
        return state | (waiting if self.config.min_groups else {})

    def load_own_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `own_state_dict`; None: without decisions that wait."""
        self.open = OpenGroups(self.config.group)
        self.waiting, self.waiting_groups = None, 0
        if state and self.config.partial:
            self.open.load_state_dict(state["open"])
        if state and self.config.min_groups:
            self.waiting, self.waiting_groups = state["waiting"], state["waiting_groups"]


def used_only(batch: TensorDict, world: World = ALONE) -> TensorDict:
    """Environments of `batch` [T, N] with `own` decisions, and so many others that every process has as many."""
    has_own = batch["own"].any(0)
    order = has_own.long().argsort(descending=True, stable=True)
    return select(batch, order[: max(1, *of_each(int(has_own.sum()), world))].sort().values, 1)


def lengthened(batch: TensorDict, length: int) -> TensorDict:
    """Copy of `batch` [T, N] with at least `length` decisions; those that are added are zero, and not `own`."""
    missing = length - len(batch)
    if missing <= 0:
        return batch
    return cast(TensorDict, TensorDict.cat((batch, torch.zeros_like(batch[:1]).expand(missing, -1).clone())))


@dataclass(frozen=True)
class Compared:
    """Advantages of decisions, and statistics of each episode's group."""

    advantage: Tensor  # [T, N], zero outside of episodes
    mean: Tensor  # [E], mean outcome of the group
    varied: Tensor  # [E] bool: the group's outcomes differ


def compared(
    outcome: Tensor, episodes: WholeRollout, of_running: bool, by_deviation: bool, leave_one_out: bool = False
) -> Compared:
    """Compare each decision with its group: A = R - mean(R), or (R - mean(R)) / std(R).

    R is the `outcome` [E] of the decision's episode. The mean is taken over the group's episodes, with `of_running`
    over those with at least this many decisions, and with `leave_one_out` over the others among them.
    """
    group = episodes.group
    size = torch.bincount(group).to(outcome.dtype)
    # Statistics per group, gathered back to episodes [E]; the deviation divides by n - 1.
    mean = (torch.bincount(group, outcome).to(outcome.dtype) / size)[group]
    squares = torch.bincount(group, (outcome - mean).square()).to(outcome.dtype)
    std = (squares / (size - 1.0).clamp_min(1.0)).sqrt()[group]
    varied = std > 1e-6
    result = episodes.spread(outcome)
    baseline = episodes.spread(mean)
    members = episodes.spread(size[group])
    within = episodes.episode >= 0
    if of_running:
        # one cell for each pair (group, number of the decision), so that the mean covers episodes that still run then
        cell = (episodes.spread(group) * len(within) + episodes.decision)[within]
        counts = torch.bincount(cell)
        means = torch.bincount(cell, result[within]) / counts.clamp_min(1)
        baseline[within] = means[cell].to(baseline.dtype)
        members[within] = counts[cell].to(members.dtype)
    # A = R - baseline, [T, N]
    advantage = result - baseline
    if leave_one_out:
        # R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean(R)) n / (n - 1); 0 without others
        advantage = advantage * members / (members - 1.0).clamp_min(1.0)
    if by_deviation:
        # A / std(R); 0 in groups with equal outcomes
        advantage = torch.where(episodes.spread(varied), advantage / episodes.spread(std).clamp_min(1e-6), 0.0)
    return Compared(advantage, mean, varied)


def _shares(group: Tensor, comparison: Compared, new: Tensor, used: Tensor, world: World) -> dict[str, float]:
    """Number of `new` groups of all processes, and the shares that were used, had equal outcomes, or were filtered."""
    # count each group once, by its first episode
    is_first = torch.zeros(len(group), dtype=torch.bool).scatter(0, _firsts(group).cpu(), True)
    selections = [new, used, new & ~used & ~comparison.varied, new & ~used & comparison.varied]
    counts = world.sum(torch.stack([(flag.cpu() & is_first).sum() for flag in selections])).tolist()
    names = ("kept_groups", "uniform_groups", "filtered_groups")
    return {"groups": float(counts[0])} | {
        name: n / max(1, counts[0]) for name, n in zip(names, counts[1:], strict=True)
    }


def _firsts(group: Tensor) -> Tensor:
    """Index of the first episode of each group."""
    firsts = torch.full((int(group.max()) + 1 if len(group) else 0,), len(group), device=group.device)
    return firsts.scatter_reduce(0, group, torch.arange(len(group), device=group.device), "amin")
