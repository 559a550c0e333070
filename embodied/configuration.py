"""Base class of configurations, whose number types declare the range of every option."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from embodied.errors import UserError

INF = math.inf
R = TypeVar("R", bound=Any)


@dataclass(frozen=True)
class Range:
    """Range of an option, annotated to its type: `Annotated[float, Range(above=0, at_most=1)]`.

    Infinity is accepted only where it is a bound itself (`at_most=INF`), NaN never.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        """Whether the range contains `number`."""
        return (
            (abs(number) < INF or number in (self.at_least, self.at_most))
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        """Bounds in words, such as "above 0 and of at most 1"."""
        words = {"of at least": self.at_least, "above": self.above, "of at most": self.at_most, "below": self.below}
        bounds = [f"{word} {bound:.12g}" for word, bound in words.items() if bound is not None and abs(bound) < INF]
        return " and ".join(bounds) + (", or inf" if self.at_most == INF else "")


# pydantic's names
PositiveInt = Annotated[int, Range(at_least=1)]
NonNegativeInt = Annotated[int, Range(at_least=0)]
FiniteFloat = Annotated[float, Range()]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]
Limit = Annotated[float, Range(above=0, at_most=INF)]
"""Upper bound; inf does not limit."""
Bound = Annotated[float, Range(at_least=-INF, at_most=INF)]
"""Lower or upper bound of any sign; -inf and inf do not limit."""
Port = Annotated[int, Range(at_least=0, at_most=65535)]
Seed = Annotated[int, Range(at_least=0, below=2**63)]
"""Seed in the range of PyTorch's generators."""
Pixels = Annotated[int, Range(at_least=1, at_most=4096)]
"""Side of a picture; larger numbers are typing errors."""


class Configuration:
    """Base class of dataclasses of options: numbers outside the ranges of their types raise UserError."""

    def __post_init__(self) -> None:
        """Raise UserError for the first number outside its range."""
        for field in fields(self):  # type: ignore[arg-type] - subclasses are dataclasses
            check_numbers(field.name, getattr(self, field.name), type_hints(type(self))[field.name])

    def recorded(self) -> dict[str, Any]:
        """Options that a run records with other values than those typed, such as absolute paths, by name."""
        return {}


def common_options(config: object, kind: type) -> dict[str, Any]:
    """Options of the dataclass `config` by name, without those that the dataclass `kind` lacks."""
    names = {field.name for field in fields(kind)}
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name in names}  # type: ignore[arg-type]


@cache
def type_hints(kind: type) -> dict[str, Any]:
    """Types of the fields of a dataclass by name, with their ranges."""
    return get_type_hints(kind, include_extras=True)


def check_ranges(config: Any, prefix: str = "") -> None:  # noqa: ANN401 - OmegaConf's
    """Check every number of the composed `config` of a dataclass against the range of its option.

    Raises:
        UserError: with the name of the option as typed, after `prefix`.
    """
    from omegaconf import OmegaConf  # importing takes 0.1 s, which contracts need not wait for

    hints = type_hints(OmegaConf.get_type(config))
    for name in config:
        option = f"{prefix}{name}"
        value: Any = None if OmegaConf.is_missing(config, name) else config[name]
        if OmegaConf.is_dict(value) and is_dataclass(OmegaConf.get_type(value)):
            check_ranges(value, f"{option}.")
        elif OmegaConf.is_dict(value) and get_origin(hints[name]) is dict and is_dataclass(get_args(hints[name])[1]):
            for key in value:
                check_ranges(value[key], f"{option}.{key}.")
        else:
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            check_numbers(option, plain, hints[name])


def check_numbers(option: str, value: Any, hint: Any) -> None:  # noqa: ANN401 - a field of any type
    """Check every number in the `value` of an `option` against the range in its type `hint`.

    Raises:
        UserError: with the option, its value and the range.
    """
    for name, number, accepted in _numbers(option, value, hint):
        if number not in accepted:
            expected = f"a {'number' if abs(number) < INF else 'finite number'} {accepted}".replace(" ,", ",").rstrip()
            if name == option and isinstance(value, list | tuple):
                raise UserError(f"{name}={_written(value)}: expected {expected} in place of {_written(number)}")
            raise UserError(f"{name}={_written(number)}: expected {expected}")


def with_numbers(record: R, numbers: Mapping[str, float], option: str, allowed: Collection[str] | None = None) -> R:
    """Copy the dataclass `record` with other `numbers`, by field; `allowed` fields can be set, by default all.

    Raises:
        UserError: with `option`, for an unknown name, a fraction instead of an integer, or a number out of range.
    """
    hints = type_hints(type(record))
    values = {}
    allowed = [field.name for field in fields(record)] if allowed is None else allowed
    for name, number in numbers.items():
        if name not in allowed:
            raise UserError(f"unknown number {name!r} in {option}; expected one of {', '.join(allowed)}")
        check_numbers(f"{option}.{name}", number, Annotated[hints[name], Range()])
        kind = type(getattr(record, name))
        if kind is int and number % 1:
            raise UserError(f"{option}.{name}={number}: expected a whole number")
        values[name] = kind(number)
    return replace(record, **values)


def _numbers(option: str, value: Any, hint: Any) -> Iterator[tuple[str, float, Range]]:  # noqa: ANN401 - as above
    """Numbers in `value` that have a range: name of the option, number, range."""
    kind = get_origin(hint)
    arguments = get_args(hint)
    if kind is Annotated and isinstance(value, int | float):
        yield from ((option, value, each) for each in arguments[1:] if isinstance(each, Range))
    elif kind in (Union, UnionType):
        for arm in arguments:
            yield from _numbers(option, value, arm)
    elif kind is list and isinstance(value, list | tuple):
        for element in value:
            yield from _numbers(option, element, arguments[0])
    elif kind is dict and isinstance(value, Mapping):
        for key, element in value.items():
            yield from _numbers(f"{option}.{key}", element, arguments[1])


def _written(value: Any) -> str:  # noqa: ANN401 - as above
    """Value as typed on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else f"{value}"
