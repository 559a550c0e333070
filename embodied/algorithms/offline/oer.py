"""Offline experience replay (OER, arXiv 2305.13804): tasks are learned one after the other from recorded episodes.

A specialist mu_n learns task n alone, by implicit Q-learning. The policy pi, which acts, imitates mu_n in the episodes
of task n, and the actions that were kept of earlier tasks (dual behaviour cloning): so imitation does not disturb the
learning of values, and pi does not forget. Of each task a share of the observations is kept, those nearest to rollouts
of mu_n in a learned model of the dynamics (model-based experience selection), or random ones.

A run learns one task, and begins with the weights and the kept observations of the run of the tasks before.

Differs from the paper:
    - mu_n learns by implicit Q-learning, which any policy can do, in place of TD3+BC;
    - kept observations have the actions of mu_n, as those of task n, in place of the recorded ones: these may be of
      another behaviour;
    - each task has the same share of a minibatch;
    - the distance of observations is in deviations of each element;
    - observations and actions are normalised by the statistics of the first task.

Letters: S starts, T decisions, M imagined observations, R recorded ones, D elements of one, H actions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.imitation.sft import SFT, with_drawn_weights
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.offline.dynamics import Dynamics, DynamicsConfig
from embodied.algorithms.offline.iql import IQL, IQLConfig
from embodied.algorithms.offline.off_policy_evaluation import initial_rows
from embodied.algorithms.passes import Passes
from embodied.configuration import PositiveInt, Range
from embodied.data.episodes import UNKNOWN, Episodes, columns, from_columns
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.world import ALONE, World

PIECE = 1024
COMPARED = 1 << 16
"""Imagined observations that are compared together, and recorded ones: 256 MiB of distances."""
FAR = 1e4
"""Distance from the recorded mean, in deviations of an element, at which a rollout of the model ends."""


class Selection(Enum):
    """Choice of the observations to keep: those nearest to rollouts in a MODEL, or RANDOM ones."""

    MODEL = "model"
    RANDOM = "random"


@dataclass
class OERConfig(IQLConfig):
    """Hyper-parameters of OER; options of mu_n are those of implicit Q-learning, whose optimiser also trains pi.

    Of the `steps` the first `specialist_share` train mu_n and the next `model_share` the `dynamics`, unless the
    `selection` is random; in the others pi imitates. A `kept_share` of the observations is kept, with up to `starts`
    rollouts from recorded initial observations.
    """

    steps: PositiveInt = 12_000
    specialist_share: Annotated[float, Range(above=0, below=1)] = 0.4
    model_share: Annotated[float, Range(above=0, below=1)] = 0.2
    kept_share: Annotated[float, Range(above=0, at_most=1)] = 0.1
    selection: Selection = Selection.MODEL
    starts: PositiveInt = 200
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.specialist_share + self.model_share >= 1.0:
            raise UserError(
                f"expected specialist_share + model_share < 1, got {self.specialist_share} and {self.model_share}"
            )

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> OER:
        """Build the learner of `policy`, pi; `generator` draws minibatches, the weights of mu_n, and what is kept.

        Raises:
            UserError: for a policy or options that implicit Q-learning does not take, and for observations that a model
                cannot predict.
        """
        self.check_extraction(policy)
        if self.selection is Selection.MODEL:
            try:
                Dynamics(policy.contract, self.dynamics)
            except UserError as error:
                raise UserError(f"use offline.selection=random, which needs no model: {error}") from error
        return OER(policy, self, generator)


class OER(SFT):
    """Learner of mu_n and a model from episodes of task n, then of a policy that imitates mu_n and what was kept."""

    config: OERConfig

    def __init__(self, policy: TrainablePolicy, config: OERConfig, generator: torch.Generator) -> None:
        super().__init__(policy, config, generator)
        self.specialist_steps = round(config.specialist_share * config.steps)
        self.dynamics: Dynamics | None = None
        self.begins = self.specialist_steps
        if config.selection is Selection.MODEL:
            self.dynamics = Dynamics(policy.contract, config.dynamics, policy.device)
            self.begins += round(config.model_share * config.steps)
        specialist = with_drawn_weights(policy, generator)
        self.specialist = IQL(specialist, replace(config, steps=self.specialist_steps), generator)
        self.transitions: Transitions | None = None
        self.earlier: Episodes | None = None
        """Kept observations of earlier tasks, each with a chunk of actions as an episode; a dataset is a task."""
        self.metrics: dict[str, float] = {}

    def remember(self, earlier: Episodes | None) -> None:
        """Also imitate what was `kept` of the tasks before; None: this is the first task."""
        if earlier is not None:
            assert earlier.dataset_index is not None
            tasks = int(earlier.dataset_index.max()) + 1
            earlier = replace(earlier, weights=torch.ones(tasks))
        self.earlier = earlier

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes` of the present task; returns the last metrics.

        Raises:
            UserError: in several processes, and for episodes with unknown rewards, see `recorded_transitions`.
        """
        if world.size > 1:
            raise UserError("offline=oer learns in one process; leave out torchrun, or use offline=iql")
        transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        self.transitions = self.specialist.transitions = transitions
        for _ in range(steps):
            if self.gradient_steps < self.specialist_steps:
                self.metrics |= self.specialist.fit(episodes, 1)
                self.gradient_steps += 1
            elif self.gradient_steps < self.begins:
                assert self.dynamics is not None
                self.gradient_steps += 1
                is_last = self.gradient_steps == self.begins
                self.metrics |= self.dynamics.learn(transitions, self.generator, is_last=is_last)
            else:
                self._imitate(transitions)
        return dict(self.metrics)

    def _imitate(self, transitions: Transitions) -> None:
        """Take one step of pi: towards mu_n in the episodes of the present task, and towards what was kept."""
        batch = self._batch(transitions)
        progress = (self.gradient_steps - self.begins) / max(1, self.config.steps - self.begins)
        self.losses.append(self.step(batch, min(1.0, progress)))
        self.metrics["loss"] = sum(self.losses) / len(self.losses)

    def _batch(self, transitions: Transitions) -> TensorDict:
        """Minibatch of which each of n tasks has the share 1 / n, the present one the remainder, too."""
        size = self.config.batch
        kept = 0
        if self.earlier is not None:
            assert self.earlier.weights is not None
            tasks = len(self.earlier.weights)
            kept = size * tasks // (tasks + 1)
        rows = transitions.draw(size - kept, self.generator)
        # min |pi(s) - mu_n(s)|, s of task n
        present = self._imitated(transitions.episodes, rows)
        if not kept:
            return present
        assert self.earlier is not None
        # min |pi(s) - a|, (s, a) of the tasks before
        before = self.earlier.sample(kept, self.policy.contract.horizon, self.generator)
        shared = [key for key in present["observation"].keys() if key in before["observation"].keys()]  # noqa: SIM118
        for part in (present, before):
            part["observation"] = part["observation"].select(*shared)
        return cast(TensorDict, torch.cat((cast(Tensor, present), cast(Tensor, before))))

    def _imitated(self, episodes: Episodes, rows: Tensor) -> TensorDict:
        """The observations `rows` of `episodes` with chunks of mu_n, as `Episodes.chunks` returns those of the data."""
        batch = episodes.chunks(rows, self.policy.contract.horizon)
        actions = self.specialist.policy.act(batch["observation"].to(self.policy.device), deterministic=True).actions
        return batch.update({"actions": actions.cpu(), "valid": torch.ones_like(batch["valid"])})

    def kept(self, episodes: Episodes) -> Episodes:
        """Observations to keep of all tasks so far, after the last step on `episodes` of the present one.

        Each begins an episode of one chunk of mu_n; the datasets are the tasks.
        """
        transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        count = max(1, round(self.config.kept_share * len(episodes)))
        generator = self.generator.clone_state()  # the same if it is called again
        rows = torch.randperm(len(episodes), generator=generator)[:count]
        if self.dynamics is not None:
            rows = self._nearest(transitions, self.dynamics, count, generator)
        chosen = cast(
            TensorDict,
            torch.cat([self._imitated(episodes, part) for part in rows.sort().values.split(self.config.batch)]),
        )
        new = _with_chunks(chosen)
        if self.earlier is None:
            return new
        assert new.dataset_index is not None
        assert self.earlier.weights is not None
        new = replace(new, dataset_index=new.dataset_index + len(self.earlier.weights))
        return Episodes.join([self.earlier, new])

    @torch.no_grad()
    def _nearest(self, transitions: Transitions, dynamics: Dynamics, count: int, generator: torch.Generator) -> Tensor:
        """Rows of the `count` recorded observations that are nearest to imagined ones, which are drawn one by one."""
        episodes = transitions.episodes
        imagined, weight = self._imagined(transitions, dynamics, generator)
        pieces = torch.arange(len(episodes)).split(PIECE)
        recorded = torch.cat([dynamics.flat(episodes.chunks(part, 1)["observation"]) for part in pieces])
        scale = dynamics.ensemble.input_std[: dynamics.size].cpu()
        return nearest_rows(imagined / scale, weight, recorded / scale, count, generator)

    def _imagined(
        self, transitions: Transitions, dynamics: Dynamics, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Observations [S * T, D] of rollouts of mu_n in the model, and the probability [S * T] of being reached.

        That is 0 where the model has left what was recorded: from there it may grow without bound.
        """
        episodes = transitions.episodes
        initial = initial_rows(episodes)
        starts = min(self.config.starts, len(initial))
        rows = initial[torch.arange(starts) * len(initial) // starts]
        observation = episodes.chunks(rows, 1)["observation"].to(self.policy.device)
        longest = int(episodes.ends.diff(prepend=episodes.ends.new_zeros(1)).max())
        goes_on = torch.ones(starts, device=self.policy.device)
        scale = dynamics.ensemble.input_std[: dynamics.size]
        imagined, weights = [], []
        for _ in range(-(-longest // self.policy.contract.executed)):
            flat = dynamics.flat(observation)
            distance = ((flat - dynamics.ensemble.input_mean[: dynamics.size]) / scale).abs()
            goes_on = torch.where((distance <= FAR).all(1), goes_on, 0.0)
            imagined.append(flat.cpu())
            weights.append(goes_on.cpu())
            actions = self.specialist.policy.act(observation, deterministic=True).actions
            observation, _, terminated = dynamics.step(observation, actions, generator)
            # S_{t+1} = S_t (1 - P(terminated))
            goes_on = goes_on * (1.0 - terminated)
        return torch.cat(imagined), torch.cat(weights)

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the minibatch of mu_n stores, or of pi if that is more."""
        return self.specialist.largest_pass(passes)

    def state_dict(self) -> dict[str, Any]:
        """State of SFT, mu_n, the model, what was kept of earlier tasks, and the last metrics."""
        return super().state_dict() | {
            "specialist": self.specialist.state_dict(),
            "dynamics": None if self.dynamics is None else self.dynamics.state_dict(),
            "earlier": None if self.earlier is None else columns(self.earlier.expanded()),
            "metrics": dict(self.metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.specialist.load_state_dict(state["specialist"])
        if self.dynamics is not None:
            self.dynamics.load_state_dict(state["dynamics"])
        self.remember(None if state["earlier"] is None else from_columns(state["earlier"]))
        self.metrics = dict(state["metrics"])


def nearest_rows(imagined: Tensor, weight: Tensor, recorded: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows [count] of `recorded` [R, D], each the nearest one left to one of `imagined` [M, D].

    Imagined observations are drawn by their `weight` [M], with replacement.
    """
    left = torch.arange(len(recorded))
    chosen: list[Tensor] = []
    while count:
        drawn = torch.multinomial(weight, min(PIECE, count), replacement=True, generator=generator)
        # i = argmin |s_i - s|, once each
        index = nearest(imagined[drawn].unique(dim=0), recorded[left]).unique()
        chosen.append(left[index])
        left = left[torch.ones(len(left), dtype=torch.bool).index_fill(0, index, False)]
        count -= len(index)
    return torch.cat(chosen)


def nearest(points: Tensor, recorded: Tensor) -> Tensor:
    """Row of `recorded` [R, D] that is nearest to each of `points` [M, D], [M]; distances are of a part at a time."""
    least = points.new_full((len(points),), torch.inf)
    index = torch.zeros(len(points), dtype=torch.int64)
    for number, part in enumerate(recorded.split(COMPARED)):
        distance, row = torch.cdist(points, part).min(1)
        index = torch.where(distance < least, row + number * COMPARED, index)
        least = torch.minimum(distance, least)
    return index


def _with_chunks(chosen: TensorDict) -> Episodes:
    """Episodes of one observation and H actions each, of one dataset."""
    count, horizon = chosen["valid"].shape
    ends = horizon * torch.arange(1, count + 1)
    return Episodes(
        chosen["observation"],
        ends - horizon,
        chosen["actions"].flatten(0, 1),
        reward=torch.full((count * horizon,), torch.nan),
        human=torch.zeros(count * horizon, dtype=torch.bool),
        ends=ends,
        terminated=torch.zeros(count, dtype=torch.bool),
        success=torch.full((count,), UNKNOWN, dtype=torch.int8),
        task_index=chosen["task_index"],
        dataset_index=torch.zeros(count, dtype=torch.int64),
    )
