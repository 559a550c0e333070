"""Conditions of training, evaluation and measurement of hover: settings of environments by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embodied.errors import UserError
from embodied.export.conditions import Conditions
from embodied.task import Sweep
from sims.quadrotor.physics.airframes import AIRFRAMES, CRAZYFLIE_21, Airframe
from sims.quadrotor.physics.dynamics import Options
from sims.quadrotor.physics.variation import TRAINED, Variation
from sims.quadrotor.tasks.robust import DISTURBED, OPTIONS, RobustHover

HISTORY = 12
"""Past actions that a policy observes, 0.12 s: longer than the delays and most of the rotors' lag."""
DRAG_PER_S = 0.25
"""Drag per mass in the sweep of the wind: a Crazyflie's, on which 1 m/s of wind exerts 2.5% of its weight."""


@dataclass(frozen=True)
class Flight:
    """Settings of an environment."""

    mdp: RobustHover
    airframe: Airframe
    variation: Variation
    options: Options = OPTIONS


def named_flights(name: str, airframe: Airframe) -> dict[str, Flight]:
    """Flights for training ("robust") and for evaluation: departures from L2F's MDP, by distribution."""
    crazyflie = name == "crazyflie"
    trained = replace(TRAINED, other=CRAZYFLIE_21) if crazyflie else TRAINED
    departures = {
        "late_10_ms": Variation(action_delay_s=(0.01, 0.01)),
        "late_20_ms": Variation(action_delay_s=(0.02, 0.02)),
        "measured_late_10_ms": Variation(observation_delay_s=(0.01, 0.01)),
        "late_30_ms_in_all": Variation(action_delay_s=(0.02, 0.02), observation_delay_s=(0.01, 0.01)),
        "mass_120_percent": Variation(mass=(1.2, 1.2)),
        "thrust_85_percent": Variation(thrust=(0.85, 0.85)),
        "mass_120_thrust_85_percent": Variation(mass=(1.2, 1.2), thrust=(0.85, 0.85)),
    }
    flights = {"robust": Flight(RobustHover(), airframe, trained)}
    flights |= {key: Flight(DISTURBED, airframe, variation) for key, variation in departures.items()}
    if crazyflie:
        flights["crazyflie_21"] = Flight(DISTURBED, CRAZYFLIE_21, Variation())
        take_off = Flight(replace(RobustHover(), take_off_share=1.0), CRAZYFLIE_21, Variation())
        flights["crazyflie_21_take_off"] = take_off
    flights["take_off"] = Flight(replace(RobustHover(), take_off_share=1.0), airframe, trained)
    return flights


MEANINGS = {
    "robust": "Drones and conditions as in training: late commands, wind, biased measurements, varied parameters.",
    "disturbed": "The nominal drone of arXiv 2311.13081, with constant random forces and torques.",
    "late_10_ms": "The same drone; commands reach the rotors 10 ms late.",
    "late_20_ms": "The same drone; commands reach the rotors 20 ms late.",
    "measured_late_10_ms": "The same drone; measurements are 10 ms old.",
    "late_30_ms_in_all": "The same drone; commands are 20 ms late, and measurements 10 ms old.",
    "mass_120_percent": "The same drone with 1.2 times the mass.",
    "thrust_85_percent": "The same drone with 0.85 times the thrust.",
    "mass_120_thrust_85_percent": "The same drone with 1.2 times the mass and 0.85 times the thrust.",
    "crazyflie_21": "Another Crazyflie, of arXiv 2509.11481, without varied parameters.",
    "crazyflie_21_take_off": "That other Crazyflie, which begins on the ground.",
    "take_off": "Drones and conditions as in training; every episode begins on the ground.",
}
"""Meanings of the distributions of hover, in the order of `named_flights`."""

SWEEPS = {
    "latency": Sweep("s", "commands later", (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)),
    "mass": Sweep("1", "times the mass", (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)),
    "thrust": Sweep("1", "times the thrust", (0.7, 0.75, 0.8, 0.85, 0.9, 1.0, 1.1, 1.2)),
    "wind": Sweep("m/s", "deviation of the wind along each axis, gusts besides", (0.0, 1.0, 2.0, 3.0, 4.0, 6.0)),
    "velocity_bias": Sweep("m/s", "deviation of the measured velocity's error", (0.0, 0.05, 0.1, 0.2, 0.3)),
    "attitude_bias": Sweep("rad", "deviation of the measured attitude's error", (0.0, 0.02, 0.05, 0.1, 0.15)),
}
"""Margins: one departure from L2F's MDP at a time; a point is the distribution "mass=1.2"."""
LONG_DELAYS = replace(OPTIONS, delay_steps=5)


def swept(airframe: Airframe, distribution: str) -> Flight:
    """Flight of one point of a sweep, such as "mass=1.2".

    Raises:
        UserError: for an unknown quantity or no number.
    """
    name, _, text = distribution.partition("=")
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"expected a number in distribution {distribution!r}, such as mass=1.2") from None
    ends = (value, value)
    no_variation = Variation()
    flights = {
        "latency": lambda: Flight(DISTURBED, airframe, Variation(action_delay_s=ends), LONG_DELAYS),
        "mass": lambda: Flight(DISTURBED, airframe, Variation(mass=ends)),
        "thrust": lambda: Flight(DISTURBED, airframe, Variation(thrust=ends)),
        "wind": lambda: Flight(
            replace(DISTURBED, wind_m_s=value), airframe, Variation(drag_per_s=(DRAG_PER_S, DRAG_PER_S))
        ),
        "velocity_bias": lambda: Flight(replace(DISTURBED, bias_velocity_m_s=value), airframe, no_variation),
        "attitude_bias": lambda: Flight(replace(DISTURBED, bias_attitude_rad=value), airframe, no_variation),
    }
    if name not in flights:
        raise UserError(f"unknown quantity {name!r} in distribution {distribution!r}; expected {', '.join(flights)}")
    return flights[name]()


def nominal(name: str) -> Conditions:
    """Conditions of training with the airframe `name` in L2F's MDP."""
    return Conditions(
        trained_for=(f"the MDP of arXiv 2311.13081: one airframe ({name}), constant random forces and torques",),
        missing=("latency", "randomisation"),
        first_action=0.0,
        measurable=True,
    )


def prepared(name: str, flight: Flight) -> Conditions:
    """Conditions, in words, that a policy trained in `flight` with the airframe `name` is prepared for."""
    varied = flight.variation
    mdp = flight.mdp
    (late, later), (old, older) = varied.action_delay_s, varied.observation_delay_s
    names = [name, *(other for other, each in AIRFRAMES.items() if each == varied.other)]
    return Conditions(
        trained_for=(
            f"airframes: {' and whatever lies between it and '.join(names)}",
            f"commands {1e3 * late:g} to {1e3 * later:g} ms late, measurements {1e3 * old:g} to {1e3 * older:g} ms",
            f"mass {_percent(varied.mass)}, thrust {_percent(varied.thrust)}, inertia {_percent(varied.inertia)}, "
            f"rotor lag {_percent(varied.lag)} of the airframe's",
            f"up to {100 * varied.sag[1]:g}% less thrust at full load (battery)",
            f"wind of {mdp.wind_m_s:g} m/s along each axis (standard deviation) with gusts",
            f"errors of {mdp.bias_velocity_m_s:g} m/s in velocity and {mdp.bias_attitude_rad:g} rad in attitude "
            "(standard deviations)",
            f"take-off from {mdp.ground_m:g} m below the goal, and taking over in flight",
        ),
        missing=(),
        first_action=-1.0,
        measurable=True,
    )


def _percent(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:g} to {100 * ends[1]:g}%"
