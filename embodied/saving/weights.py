"""Plausibility check of weights, which detects damage from before the checksum was computed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LARGEST = 1e6
"""Upper bound on magnitudes of weights and statistics; those of trained policies are around 1."""


def implausible(weights: Mapping[str, Tensor]) -> str:
    """Reason why `weights` (by name) cannot be a policy's, on one line; "" if they can.

    Values must be finite and at most `LARGEST`, and standard deviations not below 0: "std" of an observation may be 0,
    which is that of a constant one, "..._std" are divisors.
    """
    floats = {name: values for name, values in weights.items() if values.is_floating_point() and values.numel()}
    if broken := [name for name, values in floats.items() if not bool(values.isfinite().all())]:
        return f"infinity or not a number in {', '.join(broken)}"
    for name, values in floats.items():
        if (largest := float(values.abs().max())) > LARGEST:
            return f"{name} reaches {largest:.3g}, expected at most {LARGEST:g}"
        last = name.rpartition(".")[2]
        smallest = float(values.min())
        if last == "std" and smallest < 0.0:
            return f"{name} is a standard deviation of {smallest:.3g}, expected at least 0"
        if last.endswith("_std") and last != "log_std" and smallest <= 0.0:
            return f"{name} is a standard deviation of {smallest:.3g}, expected more than 0"
    return ""
