"""Task that learns from recorded episodes alone, without a simulator: task=dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from embodied.configuration import Configuration, Pixels, PositiveInt, Range
from embodied.contract import Contract
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.task import Task
from real_robot.recording.data_sets.contract import Units, data_contract
from real_robot.recording.demonstrations import DemonstrationOptions, located, sources

CHUNK_S = 1.0
LONGEST = 50
"""Duration of a chunk, s, unless `horizon` is set, and its largest number of actions then."""


@dataclass
class RecordedTask(Configuration, Task):
    """The task is to act as in the recorded episodes of `demonstrations`, from which the contract is derived.

    The policy predicts `horizon` actions, null: those of a second, at most 50, of which the first `executed` are
    executed, null: half of them. It reads the `instruction`, null: if there are several. Pictures are reduced to at
    most `image_size` pixels by averaging. A share `held_out_share` of the episodes is not trained on: the policy's
    actions are compared with those recorded there.
    """

    name: str = "dataset"
    horizon: PositiveInt | None = None
    executed: PositiveInt | None = None
    instruction: bool | None = None
    image_size: Pixels = 128
    held_out_share: Annotated[float, Range(above=0, below=1)] = 0.1

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range."""
        super().__post_init__()
        self._options = DemonstrationOptions()
        self._contract: Contract | None = None

    @property
    def distributions(self) -> tuple[str, ...]:
        """The recorded episodes."""
        return ("recorded",)

    def read_from(self, options: DemonstrationOptions) -> None:
        """Derive the contract from the data set that `options` name."""
        self._options = options

    def contract(self, distribution: str) -> Contract:
        """Contract of the first data set.

        Raises:
            UserError: if there is none, or it lacks what a contract needs.
        """
        if self._contract is None:
            self._contract = self._derived()
        return self._contract

    def _derived(self) -> Contract:
        options = self._options
        if not (paths := sources(options.demonstrations, options.demonstration_weights)):
            raise UserError(f"expected demonstrations=DIR, as task={self.name} learns from recorded episodes alone")
        added = units(options.demonstration_units)
        contract = data_contract(located(paths[0]), options.matching, added, self.image_size, self.instruction)
        horizon = self.horizon or min(LONGEST, max(1, round(CHUNK_S / contract.control_dt_s)))
        return replace(contract, horizon=horizon, executed=self.executed or -(-horizon // 2))

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """Raise UserError: there is no simulator."""
        raise UserError(f"task={self.name} has no simulator: use neither latency.* nor a program that simulates")


def units(option: Any) -> Units | None:  # noqa: ANN401 - as typed
    """Units from `option`, the value of demonstration_units=.

    Raises:
        UserError: for anything but a unit, or a mapping of names to units.
    """
    each = list(option.values()) if isinstance(option, Mapping) else [option]
    if option is None:
        return None
    if not each or not all(unit == 1 or (isinstance(unit, str) and unit) for unit in each):
        raise UserError(f"expected demonstration_units=UNIT or 'demonstration_units={{NAME:UNIT}}', got {option!r}")
    return {str(name): str(unit) for name, unit in option.items()} if isinstance(option, Mapping) else str(option)


def join(config: Any) -> None:  # noqa: ANN401 - a dataclass of options
    """Let the task of `config` derive its contract from the demonstrations of `config`, if it does so.

    Raises:
        UserError: for units of demonstrations of another task, whose contract has its own.
    """
    if isinstance(config.task, RecordedTask):
        config.task.read_from(config)
    elif config.demonstration_units is not None:
        raise UserError("demonstration_units are for task=dataset: other tasks have units, which the data must have")
