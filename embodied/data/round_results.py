"""Results of rounds of offline learning, as a run's report stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def collected_total(rounds: Iterable[Mapping[str, Any]], quantity: str) -> int:
    """Sum over the results of `rounds` of a `quantity` of the episodes that they collected: episodes or env_steps."""
    return sum(each.get("collected", {}).get(quantity, 0) for each in rounds)
