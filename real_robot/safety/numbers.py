"""Checks of the numbers of dataclasses that are read from files."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from embodied.errors import UserError


def check_numbers(record: Any, unlimited: Collection[str] = ()) -> None:  # noqa: ANN401 - a dataclass
    """Check that every number in the dataclass `record` is finite; its fields `unlimited` may be infinite.

    Lists are checked number by number, at any depth. Dataclasses within it check themselves.

    Raises:
        UserError: naming the field.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        for number in _numbers(value):
            if math.isnan(number) or (math.isinf(number) and field.name not in unlimited):
                raise UserError(f"{type(record).__name__}.{field.name}: expected a finite number, got {number}")


def _numbers(value: Any) -> list[float]:  # noqa: ANN401 - a field's value
    if isinstance(value, float | int):
        return [float(value)]
    return [number for each in value for number in _numbers(each)] if isinstance(value, list | tuple) else []
