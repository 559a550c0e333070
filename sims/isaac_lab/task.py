"""Isaac Lab's environments as a task for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from embodied.configuration import PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.environments.engine import Unnumbered
from embodied.errors import UserError
from embodied.task import Task
from sims.remote.options import ProcessOptions

if TYPE_CHECKING:
    from sims.isaac_lab.environment import IsaacLabEngine

ASSETS = ("stock", "own")


@dataclass
class IsaacLabTask(Task, ProcessOptions):
    """One environment of Isaac Lab.

    `id` is its registered name. `assets` are stock, from NVIDIA's server, or own: a cartpole without a ground plane.
    `overrides` are Isaac Lab's own settings, in the form ["key=value"] of its programs. Chunks have `executed` actions.
    An episode is truncated after `step_limit` steps, the environment's own limit if None. `action_limit` bounds
    elements of an action without limits in the environment. With `survival` an episode that lasts until its time limit
    succeeds, and evaluations report mean returns in addition to the success rate; otherwise success is not defined,
    because Isaac Lab's environments only have rewards.
    """

    name: str = "isaac_lab"
    id: str = "Isaac-Cartpole-Direct"
    assets: str = "stock"
    overrides: list[str] = field(default_factory=list)
    executed: PositiveInt = 1
    step_limit: PositiveInt | None = None
    action_limit: PositiveFloat | None = None
    survival: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range and unknown assets."""
        super().__post_init__()
        if self.assets not in ASSETS:
            raise UserError(f"unknown task.assets {self.assets!r}; expected one of {', '.join(ASSETS)}")
        self._contract: Contract | None = None

    @property
    def distributions(self) -> tuple[str, ...]:
        """The environment's own distribution of initial states, under its id."""
        return (self.id,)

    @property
    def asset_kind(self) -> str | None:
        """Kind of the assets: "stand-in" for our own, None for Isaac Lab's."""
        return "stand-in" if self.assets == "own" else None

    def contract(self, distribution: str) -> Contract:
        """Contract derived from the environment's spaces; the first call makes an environment of one world.

        Raises:
            UserError: for an unknown distribution, or an environment that cannot be used.
        """
        if self._contract is None:
            engine = self._engine(1, distribution, "train", 0, "cpu")
            self._contract = engine.contract
            engine.close()
        return self._contract

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Unnumbered:
        """Make environments on `device`; the splits "train" and "eval" have different random numbers.

        Raises:
            UserError: for an unknown distribution, or an environment that cannot be used.
        """
        return Unnumbered(self._engine(num_envs, distribution, split, seed, device))

    def _engine(self, num_envs: int, distribution: str, split: str, seed: int, device: str) -> IsaacLabEngine:
        from sims.isaac_lab.environment import IsaacLabEngine
        from sims.isaac_lab.worlds import Options

        if distribution != self.id:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {self.id}")
        options = Options(
            self.id,
            self.assets,
            tuple(self.overrides),
            self.executed,
            self.step_limit,
            self.action_limit,
            self.survival,
        )
        return IsaacLabEngine(num_envs, options=options, seed=seed, split=split, device=device)
