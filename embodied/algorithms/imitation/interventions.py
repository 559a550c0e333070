"""Imitation of a person who takes over: HG-DAgger (arXiv 1810.02890), and intervention weighted regression.

The policy acts, a person takes over where it is about to fail, and the supervised loss goes on while it acts. HG-DAgger
imitates demonstrations that did not fail and the person's actions. Intervention weighted regression
(IWR, arXiv 2012.06733, `algorithm=iwr`) also imitates the policy's own decisions, which the person has let pass, and
draws half of each batch from the person's. No reward is read.

Differs from the papers: the policy learns during episodes, not between rounds of them; there is no estimate of doubt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.off_policy.replay import MixedReplay
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import Configuration, Fraction, PositiveFloat, PositiveInt
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class HGDAggerConfig(Configuration):
    """Hyper-parameters: `updates` gradient steps per decision, of batches and with an optimiser as in `sft`.

    A share `intervention_share` of each batch is interventions; None: as large a share as they have among the
    demonstrations. With `own_decisions` the rest contains the policy's own decisions, too.
    """

    rollout_length: PositiveInt = 8
    updates: PositiveFloat = 1.0
    intervention_share: Fraction | None = None
    own_decisions: bool = False
    capacity: PositiveInt = 100_000
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(learning_rate=3e-4))

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: always."""
        return True

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because a person's actions are imitated."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> HGDAgger:
        """Build the learner of `policy`; `generator` draws minibatches.

        Raises:
            UserError: for demonstrations that all failed.
        """
        if demonstrations is not None:
            demonstrations.check_imitable()
        return HGDAgger(policy, self, demonstrations, generator)


@dataclass
class IWRConfig(HGDAggerConfig):
    """HGDAggerConfig with IWR's defaults."""

    intervention_share: Fraction | None = 0.5
    own_decisions: bool = True


class HGDAgger(Composite):
    """Learner that imitates demonstrations, interventions and, if asked to, the policy's own decisions."""

    starts = None
    collector = Collector

    def __init__(
        self,
        policy: TrainablePolicy,
        config: HGDAggerConfig,
        demonstrations: Episodes | None,
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.sft = SFT(policy, config.sft, generator)
        self.replay = MixedReplay(
            policy, config.capacity, float(demonstrations is not None), demonstrations, rewards=False
        )

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken so far."""
        return self.sft.gradient_steps

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns the mean loss and the number of interventions.

        Raises:
            UserError: for a rollout beside which nobody could take over.
        """
        if "human" not in rollout.signals:
            raise UserError("algorithm=hg_dagger and iwr imitate a person beside a robot; add robot=, e.g. simulation")
        before = self.replay.written
        self.replay.add(rollout)
        metrics = {"interventions": float(len(self.replay.own.intervened()))}
        self.sft.follow_statistics(self.policy)
        losses = []
        pools = self._pools()
        # differences of rounded totals: fractions of a step add up over iterations
        for _ in range(int(self.replay.written * self.config.updates) - int(before * self.config.updates)):
            rows = self._draw(*pools)
            if len(rows[0]) + len(rows[1]):
                chunks = self.replay.imitated_chunks(rows, self.policy.contract.horizon)
                losses.append(self.sft.step(chunks, progress))
        return metrics | ({"loss": sum(losses) / len(losses)} if losses else {})

    def _pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in the store of own decisions: interventions, and what the rest of a batch is drawn from.

        They are the same until the next rollout.
        """
        own = self.replay.own
        interventions = own.intervened()
        others = own.passed() if self.config.own_decisions and own.written else interventions[:0]
        has_share = self.config.intervention_share is not None and len(interventions) > 0
        return interventions, others if has_share else torch.cat((interventions, others))

    def _draw(self, interventions: torch.Tensor, remaining: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a batch in the store of own decisions, of these pools, and in that of demonstrations.

        There are none if there is nothing to imitate.
        """
        own, demonstrations = self.replay.own, self.replay.imitable
        share = self.config.intervention_share or 0.0
        fixed = round(self.config.sft.batch * share) if len(interventions) else 0
        chosen = torch.randint(max(1, len(interventions)), (fixed,), generator=self.generator)
        # the rest of the batch, uniformly over all that remains
        total = len(remaining) + len(demonstrations)
        count = self.config.sft.batch - fixed if total else 0
        number = torch.randint(max(1, total), (count,), generator=self.generator)
        kept = number[number < len(remaining)]
        rows = torch.cat((interventions[chosen.to(own.device)], remaining[kept.to(own.device)]))
        recorded = number[number >= len(remaining)] - len(remaining)
        return rows, demonstrations[recorded.to(demonstrations.device)]

    def state_dict(self) -> dict[str, Any]:
        """State of the supervised learner and of the policy's decisions; demonstrations are read from their file."""
        return {"sft": self.sft.state_dict(), "replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.sft.load_state_dict(state["sft"])
        self.replay.load_state_dict(state["replay"])

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the loss of a minibatch stores."""
        return passes.loss(self.config.sft.batch)
