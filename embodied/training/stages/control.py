"""Control of a run: SFT that never stopped, for the report's comparison."""

from __future__ import annotations

from typing import Any

from embodied import seeding
from embodied.policy import TrainablePolicy
from embodied.saving.tree import copy_tree
from embodied.training.stages.offline import SupervisedStage


class ControlStage(SupervisedStage):
    """SFT of another policy, with its optimiser, average and final learning rate, for as many steps as later stages."""

    name = "sft_control"
    trains = False

    @property
    def policy(self) -> TrainablePolicy:
        """The control's policy."""
        return self._policy

    @property
    def total(self) -> int:
        """Gradient steps of all stages after SFT."""
        return self.run.counters["rl_gradient_steps"] + self.run.counters["offline_gradient_steps"]

    def build(self, resumed: bool) -> dict[str, Any]:
        """Build the learner as SFT left it."""
        run = self.run
        self._policy = run.policy.with_new_weights()  # adapters share the same base weights
        self.learner = run.config.sft.build(self._policy, seeding.generator(run.seed, SupervisedStage.name))
        self.learner.load_state_dict(copy_tree(run.before))
        self.first = self.learner.gradient_steps
        return {"learner": self.learner}

    def finish(self) -> None:
        """Nothing is kept."""
