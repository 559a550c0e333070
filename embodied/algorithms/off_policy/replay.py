"""Replay of a learner's own decisions, and of demonstrations, a fixed share of every batch (RLPD, arXiv 2302.02948)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.parts import Composite
from embodied.data.episodes import FAILED, Episodes
from embodied.data.rewards import check_rewards
from embodied.data.store import EpisodeStore
from embodied.data.transitions import Transitions
from embodied.environment import Environment, in_real_time
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Rollout


class MixedReplay(Composite):
    """Store of the last `capacity` decisions of `policy`, and one of demonstrations, a `share` of each batch.

    With `keep_interventions` the decisions in which a person acted also count as demonstrations, as in HIL-SERL (arXiv
    2410.21845): the demonstrated part of a batch is drawn from both, uniformly; while there are neither, batches have
    the learner's decisions alone. Rows of a batch are those of each store. Batches are on the policy's device, and have
    the observations that both stores have, as `encode` returns them, which leaves alone what it has returned. Learners
    that read no `rewards` need none in demonstrations. Errors suggest the option `without` to learn without
    demonstrations.

    Raises:
        UserError: for a share of demonstrations that are missing, or lack rewards or observations that critics read.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        capacity: int,
        share: float = 0.0,
        demonstrations: Episodes | None = None,
        without: str = "algorithm.demonstration_share=0",
        *,
        keep_interventions: bool = False,
        rewards: bool = True,
        encode: Callable[[TensorDict], TensorDict] | None = None,
    ) -> None:
        self.policy = policy
        self._encode = encode
        self.share = share
        self.keep_interventions = keep_interventions
        self.own = EpisodeStore(capacity)
        self.demonstrations = EpisodeStore(1)
        self.imitable = torch.zeros(0, dtype=torch.int64)
        """Rows of the demonstrations that did not fail, which an actor may imitate."""
        if share:
            self._add_demonstrations(demonstrations, without, rewards)

    @property
    def written(self) -> int:
        """Number of decisions of the learner added so far."""
        return self.own.written

    def stored(self, observation: TensorDict) -> TensorDict:
        """The `observation` [N] of decisions as it is stored."""
        return observation if self._encode is None else self._encode(observation)

    def __len__(self) -> int:
        """Number of stored decisions of the learner."""
        return len(self.own)

    def add(self, rollout: Rollout, **values: Tensor) -> None:
        """See `EpisodeStore.add`."""
        self.own.add(rollout if self._encode is None else rollout.encoded(self._encode), **values)

    def own_imitable(self) -> Tensor:
        """Rows of the learner's store that a person made, or of episodes that succeeded; the same until `add`."""
        own = self.interventions
        return torch.cat((own, self.own.succeeded())).unique() if self.own.written else own

    def draw_imitable(self, count: int, generator: torch.Generator, own: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of `count` decisions, among `own` of the learner's store and demonstrations that did not fail.

        There are none if there is nothing to draw from. The outcome of demonstrations may be unknown.
        """
        total = len(self.imitable) + len(own)
        number = torch.randint(max(1, total), (count if total else 0,), generator=generator)
        recorded = number[number < len(self.imitable)]
        others = number[number >= len(self.imitable)] - len(self.imitable)
        return own[others.to(own.device)], self.imitable[recorded.to(self.imitable.device)]

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of `count` decisions in all: of the learner and of the demonstrations."""
        interventions = self.interventions
        total = len(self.demonstrations) + len(interventions)
        demonstrated = round(count * self.share) if total else 0
        own = self.own.draw(count - demonstrated, generator)
        recorded = demonstrated
        if demonstrated and len(interventions):
            number = torch.randint(total, (demonstrated,), generator=generator)
            kept = number[number >= len(self.demonstrations)] - len(self.demonstrations)
            own = torch.cat((own, interventions[kept.to(interventions.device)]))
            recorded -= len(kept)
        return own, self.demonstrations.draw(recorded, generator) if recorded else torch.zeros(0)

    @property
    def interventions(self) -> Tensor:
        """Rows of the learner's store that also count as demonstrations, because a person acted."""
        return self.own.intervened() if self.keep_interventions else torch.zeros(0, dtype=torch.int64)

    def transitions(self, rows: tuple[Tensor, Tensor], steps: int, discount: float) -> TensorDict:
        """See `EpisodeStore.transitions`: R = discounted rewards of `steps` decisions, carry = gamma^k or 0, and s'."""
        return self._joined([store.transitions(part, steps, discount) for store, part in self._parts_of(rows)])

    def observations(self, rows: tuple[Tensor, Tensor]) -> TensorDict:
        """Observations [B] of the decisions `rows`."""
        return self._joined([store.decisions(part, "observation") for store, part in self._parts_of(rows)])[
            "observation"
        ]

    def chunks(self, rows: tuple[Tensor, Tensor], horizon: int) -> TensorDict:
        """See `EpisodeStore.chunks`."""
        return self._joined([store.chunks(part, horizon) for store, part in self._parts_of(rows)])

    def imitated_chunks(self, rows: tuple[Tensor, Tensor], horizon: int) -> TensorDict:
        """Chunks from `rows` on for a supervised loss.

        In a decision in which a person took over or handed back, their actions alone are `valid`: they corrected the
        policy's.
        """
        chunks = self.chunks(rows, horizon)
        human = chunks["human"]
        intervened = human[:, : self.policy.contract.executed].any(-1, keepdim=True)
        chunks["valid"] &= human | ~intervened
        return chunks

    def state_dict(self) -> dict[str, Any]:
        """State of the learner's decisions; demonstrations are read from their file."""
        return self.own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, of which earlier releases did not encode the observations."""
        if state["written"]:
            decisions = state["decisions"].copy()
            decisions["observation"] = self._in_parts(decisions["observation"])
            state = state | {"decisions": decisions, "finals": self._in_parts(state["finals"])}
        self.own.load_state_dict(state)

    def _in_parts(self, observation: TensorDict) -> TensorDict:
        """The `observation` [N] as it is stored; the same if it was."""
        first = observation[:1]
        if not len(first) or self.stored(first) is first:
            return observation
        return cast(TensorDict, torch.cat([cast(Tensor, self.stored(part)) for part in observation.split(256)]))

    def _parts_of(self, rows: tuple[Tensor, Tensor]) -> list[tuple[EpisodeStore, Tensor]]:
        return [(store, part) for store, part in zip((self.own, self.demonstrations), rows, strict=True) if len(part)]

    def _joined(self, parts: list[TensorDict]) -> TensorDict:
        device = self.policy.device
        parts = [part.to(device) for part in parts]
        names = [name for name in ("observation", "next_observation") if name in parts[0]]
        if self._encode is not None:
            for part in parts:
                part.update({name: self._encode(part[name]) for name in names})
        if len(parts) == 1:
            return parts[0]
        for name in names:
            shared = [key for key in parts[0][name].keys() if all(key in part[name].keys() for part in parts)]  # noqa: SIM118
            for part in parts:
                part[name] = part[name].select(*shared)
        return cast(TensorDict, torch.cat([cast(Tensor, part) for part in parts]))

    def _add_demonstrations(self, episodes: Episodes | None, without: str, rewards: bool) -> None:
        if episodes is None:
            raise UserError(
                f"expected demonstrations, but this task has none; add demonstrations=DIR, or use {without}"
            )
        if rewards:
            check_rewards(episodes, without)
        if not len(episodes):  # of a plan
            return
        self.demonstrations = EpisodeStore(len(episodes), self.policy.device)
        self.demonstrations.add_episodes(episodes, self.policy.contract.executed)
        outcome = self.demonstrations.decisions(torch.arange(self.demonstrations.written), "success")["success"]
        self.imitable = (outcome != FAILED).nonzero().squeeze(1)
        observation = self.demonstrations.decisions(torch.zeros(1, dtype=torch.int64), "observation")["observation"]
        try:
            with suppress(RuntimeError):  # a policy without statistics, which is not fitted yet
                self.policy.features(observation)
        except KeyError as error:
            absent = [key for key in self.policy.contract.observation if key not in observation.keys()]  # noqa: SIM118
            raise UserError(
                f"critics read {', '.join(absent)}, which the demonstrations lack; use {without}"
            ) from error


def demonstrations_or_none_yet(
    demonstrations: Episodes | None, policy: TrainablePolicy, env: Environment, *, keep_interventions: bool
) -> Episodes | None:
    """The `demonstrations`; an empty set if there are none, where a person will demonstrate in `env`."""
    if demonstrations is not None or not (keep_interventions and in_real_time(env)):
        return demonstrations
    return Episodes.of(TensorDict({}, [0]), torch.zeros(0, *policy.contract.action.shape))


def recorded_transitions(
    policy: TrainablePolicy, episodes: Episodes, discount: float, last: Transitions | None = None
) -> Transitions:
    """Transitions of `episodes` over the executed chunks of `policy`, for critics that read its features.

    They are the `last` ones if those are of the same episodes.

    Raises:
        UserError: for episodes that lack observations which the critics read, and see `Transitions`.
    """
    if last is not None and last.episodes is episodes:
        return last
    transitions = Transitions(episodes, policy.contract.executed, discount)
    observation = transitions.take(torch.zeros(1, dtype=torch.int64), 1)["observation"]
    try:
        policy.features(observation.to(policy.device))
    except KeyError as error:
        absent = [key for key in policy.contract.observation if key not in observation.keys()]  # noqa: SIM118
        raise UserError(
            f"critics of offline learning read {', '.join(absent)}, which the episodes lack; use stages=[sft]"
        ) from error
    return transitions
