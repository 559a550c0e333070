"""Differences between real flights of one drone and its data sheet, drawn for every episode."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from embodied.errors import UserError
from sims.quadrotor.physics.airframes import GRAVITY, PARAMETERS, Airframe
from sims.quadrotor.physics.dynamics import DT_S

Range = tuple[float, float]
LEAST_THRUST_TO_WEIGHT = 1.25
"""Lower bound of the drawn thrust-to-weight ratio: below it a falling drone can hardly recover."""


@dataclass(frozen=True)
class Variation:
    """Ranges of the quantities that an episode draws, each [lowest, highest]; by default nothing differs.

    Attributes:
        mass, thrust, inertia, lag: factors of the airframe's mass, thrust curve, inertia and both rotor lags.
        sag: share of the thrust that the battery lacks when all rotors run at full speed.
        drag_per_s: linear drag per mass and axis, N s/m per kg.
        action_delay_s, observation_delay_s: latency from command to rotor, and from motion to measurement.
        other: another airframe; every episode's parameters lie between it and the first one.
    """

    mass: Range = (1.0, 1.0)
    thrust: Range = (1.0, 1.0)
    inertia: Range = (1.0, 1.0)
    lag: Range = (1.0, 1.0)
    sag: Range = (0.0, 0.0)
    drag_per_s: Range = (0.0, 0.0)
    action_delay_s: Range = (0.0, 0.0)
    observation_delay_s: Range = (0.0, 0.0)
    other: Airframe | None = None

    def __post_init__(self) -> None:
        """Raise UserError unless 0 <= lowest <= highest in each range."""
        for name in RANGES:
            low, high = getattr(self, name)
            if not 0.0 <= low <= high:
                raise UserError(f"expected {name} as [lowest, highest] of at least 0, got {[low, high]}")

    def airframes(self, airframe: Airframe, draws: Tensor) -> Tensor:
        """Parameters [P, M] of the drones of M episodes, from `draws` [DRAWS, M] in (0, 1)."""
        u = dict(zip(RANGES, draws, strict=False))
        variation = {name: low + (high - low) * u[name] for name in RANGES for low, high in [getattr(self, name)]}
        values = zip(PARAMETERS, airframe.values(), strict=True)
        parameters = {name: torch.full_like(draws[0], value) for name, value in values}
        if self.other is not None:
            others = zip(PARAMETERS, self.other.values(), strict=True)
            parameters = {name: parameters[name] + (value - parameters[name]) * draws[-1] for name, value in others}
        mass = parameters["mass_kg"] = parameters["mass_kg"] * variation["mass"]
        # Thrust, inertia and lags have factors; drag is per mass, and delays are absolute.
        factors = {f"inertia_{axis}": variation["inertia"] for axis in "xyz"}
        factors |= dict.fromkeys(THRUST, self._thrust(parameters, variation))
        factors |= dict.fromkeys(("lag_rise_s", "lag_fall_s"), variation["lag"])
        parameters |= {name: parameters[name] * factor for name, factor in factors.items()}
        parameters |= {f"drag_{axis}": parameters[f"drag_{axis}"] + variation["drag_per_s"] * mass for axis in "xyz"}
        parameters |= {"delay_s": variation["action_delay_s"], "observation_delay_s": variation["observation_delay_s"]}
        return torch.stack([{**parameters, "sag": variation["sag"]}[name] for name in PARAMETERS])

    def _thrust(self, parameters: dict[str, Tensor], variation: dict[str, Tensor]) -> Tensor:
        """Factor of the thrust curve; if it is drawn, thrust-to-weight is at least `LEAST_THRUST_TO_WEIGHT`."""
        if self.thrust[0] == self.thrust[1]:
            return variation["thrust"]
        highest = sum((parameters[name] for name in THRUST), start=torch.zeros(())) * (1.0 - variation["sag"])
        return torch.maximum(
            variation["thrust"], LEAST_THRUST_TO_WEIGHT * GRAVITY / 4.0 * parameters["mass_kg"] / highest
        )


RANGES = tuple(field.name for field in fields(Variation) if field.name != "other")
DRAWS = len(RANGES) + 1
"""Number of draws of one episode."""
THRUST = tuple(f"thrust_{power}_n" for power in range(3))
TRAINED = Variation(
    mass=(0.8, 1.2),
    thrust=(0.8, 1.05),
    inertia=(0.8, 1.25),
    lag=(0.8, 1.25),
    sag=(0.0, 0.12),
    drag_per_s=(0.1, 0.4),
    action_delay_s=(0.0, 0.025),
    observation_delay_s=(0.0, DT_S),
)
"""Variation of training: a battery from full to nearly empty, a payload or none, latencies of 0 to 35 ms in all."""
