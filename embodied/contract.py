"""Contracts: names, units, frames, limits, rates and chunk sizes of a policy's observations and actions.

Every environment, policy, checkpoint and dataset has one; it is checked wherever two of them are combined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from embodied.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


DIMENSIONLESS = "1"
"""Unit of plain numbers; earlier contracts left it out."""
ACTION_PREFIX = "action_prefix"
"""Key of the observation [d, A] of the actions that run between an observation and the chunk decided from it."""
UTF8 = "utf-8"
"""Unit of text: uint8 whose last axis has its bytes, padded with zeros (`embodied.text`)."""


@dataclass(frozen=True)
class TensorSpec:
    """Tensor of an observation or action, without its batch axis.

    `shape` may contain -1 for an axis whose length varies between environments (such as a number of objects). `names`
    orders the elements of the last axis. `unit` is "1" for dimensionless numbers, which also match an empty unit.
    `low` and `high` bound them in `unit`; an empty tuple means unbounded. `privileged` marks observations that only a
    simulator has: critics may read them, actors never do.

    Images are uint8 [height, width, 3]: the first row is the top, channels are red, green, blue. `camera` names the
    camera, `frame` the body it is fixed to.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    unit: str = ""
    frame: str = ""
    names: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    privileged: bool = False
    camera: str = ""

    def __post_init__(self) -> None:
        """Raise UserError if names or limits do not fit the last axis, or if text or images have another type."""
        if self.is_text and (self.dtype != "uint8" or not self.shape or self.shape[-1] < 1):
            raise UserError(f"expected text (unit {UTF8!r}) as uint8 [..., bytes], got {self.dtype} {self.shape}")
        if self.camera and not self.is_picture:
            raise UserError(f"camera {self.camera!r}: expected pictures, uint8 (height, width, 3), got {self.shape}")
        for field in ("names", "low", "high"):
            count = len(getattr(self, field))
            if count and (not self.shape or count != self.shape[-1]):
                raise UserError(
                    f"TensorSpec of shape {self.shape} has {count} {field}; expected one per last-axis element"
                )

    @property
    def is_text(self) -> bool:
        """Whether the last axis has UTF-8 bytes."""
        return self.unit == UTF8

    @property
    def is_picture(self) -> bool:
        """Whether these are RGB images."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[-1] == 3 and not self.is_text

    def differences(self, other: TensorSpec) -> list[str]:
        """Differences that prevent `other` from replacing this spec (element order may differ if there are names)."""
        differences = [
            f"{field}: expected {getattr(self, field)!r}, got {getattr(other, field)!r}"
            for field in ("dtype", "unit", "frame", "camera")
            if getattr(self, field) != getattr(other, field)
            and {getattr(self, field), getattr(other, field)} != {"", DIMENSIONLESS}
        ]
        lead, other_lead = (self.shape[:-1], other.shape[:-1]) if self.names else (self.shape, other.shape)
        if len(lead) != len(other_lead) or any(
            a != b and -1 not in (a, b) for a, b in zip(lead, other_lead, strict=True)
        ):
            differences.append(f"shape: expected {self.shape}, got {other.shape}")
        missing = [name for name in self.names if name not in other.names]
        if missing:
            differences.append(f"elements: missing {missing}")
        return differences


@dataclass(frozen=True)
class Binding:
    """Indices that reorder one side's tensors into the other's element order (None: unchanged)."""

    observation: dict[str, Tensor | None]
    action: Tensor | None


@dataclass(frozen=True)
class Contract:
    """Observation and action of a control task.

    `control_dt_s` is the time between actions, `horizon` (H) the number of actions predicted in a chunk and `executed`
    (K <= H) the number executed before the next decision. A chunk begins `delay` control steps after its observation.
    """

    observation: dict[str, TensorSpec]
    action: TensorSpec
    control_dt_s: float
    horizon: int = 1
    executed: int = 1

    def __post_init__(self) -> None:
        """Raise UserError for impossible time steps or chunk sizes."""
        if not 0 < self.control_dt_s < math.inf:
            raise UserError(f"control_dt_s={self.control_dt_s}: expected a finite number above 0")
        if not 1 <= self.executed <= self.horizon:
            raise UserError(f"need 1 <= executed <= horizon, got executed={self.executed}, horizon={self.horizon}")

    @property
    def delay(self) -> int:
        """Number of control steps d from an observation to the first action of the chunk decided from it."""
        prefix = self.observation.get(ACTION_PREFIX)
        return prefix.shape[0] if prefix else 0

    def delayed(self, steps: int) -> Contract:
        """The same contract with a delay of `steps`: its policies read the actions until then, `ACTION_PREFIX`."""
        observation = {key: spec for key, spec in self.observation.items() if key != ACTION_PREFIX}
        if steps:
            observation[ACTION_PREFIX] = replace(self.action, shape=(steps, *self.action.shape))
        return replace(self, observation=observation)

    def bind(self, provider: Contract) -> Binding:
        """Compute indices with which `provider` (an environment, dataset or robot) serves this contract (of a policy).

        Extra observations of the provider are ignored. Observations are gathered from the provider's element order,
        actions are scattered into it.

        Raises:
            UserError: if the contracts differ, with one row per difference.
        """
        if rows := self.differences(provider):
            raise UserError("contracts differ:\n  " + "\n  ".join(rows))
        shared = [key for key in self.observation if key in provider.observation]
        observation = {key: _order(self.observation[key], provider.observation[key]) for key in shared}
        return Binding(observation, _order(provider.action, self.action))

    def check(self, provider: Contract) -> None:
        """Raise UserError unless tensors of `provider` can be used unchanged, also in their order.

        For simulators and datasets, whose tensors are not reordered by `bind`.
        """
        if rows := self.mismatches(provider):
            raise UserError(
                f"the policy's contract differs from the environment's ({'; '.join(rows)}); "
                "use a policy that was built for it"
            )

    def mismatches(self, provider: Contract) -> list[str]:
        """Lines of `differences`, and of elements in another order or with others between them."""
        pairs = {
            f"observation {key!r}": (spec, provider.observation.get(key)) for key, spec in self.observation.items()
        }
        pairs["action"] = self.action, provider.action
        return self.differences(provider) + [
            f"{key} order: expected {own.names}, got {other.names}"
            for key, (own, other) in pairs.items()
            if own.names and other is not None and own.names != other.names and set(own.names) <= set(other.names)
        ]

    def differences(self, provider: Contract) -> list[str]:
        """Reasons why `provider` cannot serve this contract, one line each; empty if it can.

        Extra observations and missing privileged ones are not differences.
        """
        specs = self.delayed(0).observation
        needed = [key for key, spec in specs.items() if not spec.privileged]
        rows = [f"observation {key!r}: missing" for key in needed if key not in provider.observation]
        if self.delay not in (0, provider.delay):
            rows.append(f"delay: expected {self.delay} control steps, got {provider.delay}")
        for key, spec in specs.items():
            if key in provider.observation:
                rows += [f"observation {key!r} {row}" for row in spec.differences(provider.observation[key])]
        rows += [f"action {row}" for row in self.action.differences(provider.action)]
        return rows + self._action_differences(provider)

    def _action_differences(self, provider: Contract) -> list[str]:
        rows = []
        if set(self.action.names) != set(provider.action.names):
            rows.append(f"action elements: policy commands {self.action.names}, provider takes {provider.action.names}")
        for field in ("low", "high"):
            own, other = (_by_name(spec, field) for spec in (self.action, provider.action))
            if own != other:
                rows.append(f"action {field}: expected {own}, got {other}")
        if abs(self.control_dt_s - provider.control_dt_s) > 1e-9:
            rows.append(f"control_dt_s: expected {self.control_dt_s}, got {provider.control_dt_s}")
        if self.horizon < provider.executed:
            rows.append(f"chunk: provider executes {provider.executed} actions, policy predicts {self.horizon}")
        return rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, which `from_dict` reads."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Contract:
        """Read `to_dict`'s form.

        Raises:
            UserError: if a field is missing, unknown or malformed.
        """
        try:
            fields = dict(data)
            fields["observation"] = {key: _spec(value) for key, value in fields["observation"].items()}
            fields["action"] = _spec(fields["action"])
            return Contract(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"not a contract ({error}); expected the fields of Contract.to_dict()") from error

    def to_json(self) -> str:
        """Text form for files."""
        return json.dumps(self.to_dict(), indent=2)


def with_privileged(specs: Mapping[str, TensorSpec], names: Collection[str]) -> dict[str, TensorSpec]:
    """Copy the observations `specs` with those of `names` privileged.

    Raises:
        UserError: for unknown names.
    """
    if unknown := [name for name in names if name not in specs]:
        raise UserError(f"unknown observation {unknown[0]!r} in task.privileged; expected some of {', '.join(specs)}")
    return {name: replace(spec, privileged=spec.privileged or name in names) for name, spec in specs.items()}


def _spec(data: dict[str, Any]) -> TensorSpec:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    if not isinstance(fields["shape"], tuple):
        raise TypeError(f"shape {fields['shape']!r}")
    return TensorSpec(**fields)


def _by_name(spec: TensorSpec, field: str) -> dict[str, float]:
    values = getattr(spec, field)
    names = spec.names or tuple(str(index) for index in range(len(values)))
    return dict(zip(names, values, strict=True)) if values else {}


def _order(expected: TensorSpec, offered: TensorSpec) -> Tensor | None:
    if not expected.names or expected.names == offered.names:
        return None
    import torch  # only here: the safety filter's programs need a contract and start faster without torch

    return torch.tensor([offered.names.index(name) for name in expected.names])
