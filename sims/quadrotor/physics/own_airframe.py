"""Airframes of users: YAML files with one parameter a line, and the options with which tasks choose an airframe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from embodied.command_line.suggestion import did_you_mean
from embodied.configuration import Configuration, FiniteFloat
from embodied.errors import UserError
from embodied.saving.files import complete_or_absent
from sims.quadrotor.physics.airframes import AIRFRAMES, PARAMETERS, Airframe

SUFFIXES = (".yaml", ".yml")
UNITS = {
    "mass_kg": "kg, all-up mass",
    "inertia_x": "kg m^2, principal moments of inertia",
    "inertia_y": "kg m^2",
    "inertia_z": "kg m^2",
    "arm_x_m": "m, distance of the rotors from the centre of mass, forward",
    "arm_y_m": "m, sideways",
    "thrust_0_n": "N, thrust of a rotor at speed u (0 to 1) is thrust_0_n + thrust_1_n u + thrust_2_n u^2",
    "thrust_1_n": "N",
    "thrust_2_n": "N",
    "torque_per_thrust_m": "N m of yaw torque per N of a rotor's thrust",
    "lag_rise_s": "s, time constant of a rotor that speeds up",
    "lag_fall_s": "s, of a rotor that slows down",
    "speed_max_rpm": "1/min, the highest rotor speed",
    "rotor_radius_m": "m, radius of a propeller",
    "drag_x": "N s/m, linear drag along body axes",
    "drag_y": "N s/m",
    "drag_z": "N s/m",
    "delay_s": "s, from command to rotor",
    "observation_delay_s": "s, from motion to measurement",
    "sag": "1, share of the thrust that the battery lacks at full speed",
    "rotors": "number of rotors; with 6 or 8, the thrust curve is a quarter of the drone's thrust",
}
"""Unit and meaning of each parameter, as written into files."""
REQUIRED = tuple(each.name for each in fields(Airframe) if each.default is MISSING)


@dataclass
class AirframeOptions(Configuration):
    """Choice of an airframe.

    `airframe` is the name of a known airframe or of one of `airframes`, or a YAML file of parameters, whose name and
    values the run records. `airframes` has parameters of airframes by name.
    """

    airframe: str = "crazyflie"
    airframes: dict[str, dict[str, FiniteFloat]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file that `airframe` names; raise UserError for numbers out of range and an unknown airframe."""
        super().__post_init__()
        if self.airframe.endswith(SUFFIXES):
            path = Path(self.airframe)
            if path.stem in AIRFRAMES:
                raise UserError(f"{path.name} has the name of a known airframe; rename the file")
            self.airframes = {path.stem: asdict(read_airframe(path))}
            self.airframe = path.stem
        chosen_airframe(self.airframe, self.airframes)

    def recorded(self) -> dict[str, Any]:
        """Record the file's name and values in place of its path, because the file may move or change."""
        return super().recorded() | {"airframe": self.airframe, "airframes": self.airframes}


def chosen_airframe(name: str, own: Mapping[str, Mapping[str, float]] | None = None) -> Airframe:
    """The airframe `name` of `AIRFRAMES` or of the parameters `own`, by name, or in the YAML file `name`.

    Raises:
        UserError: for an unknown name, and parameters that are missing, unknown or could not fly.
    """
    if own and name in own:
        return _airframe(name, own[name])
    if name.endswith(SUFFIXES):
        return read_airframe(Path(name))
    if name not in AIRFRAMES:
        names = ", ".join((*AIRFRAMES, *(own or {})))
        raise UserError(f"unknown airframe {name!r}; expected one of {names}, or a YAML file, such as my_drone.yaml")
    return AIRFRAMES[name]


def read_airframe(path: Path) -> Airframe:
    """Read an airframe from the YAML file `path`.

    Raises:
        UserError: if there is no such file, it is not YAML, or its parameters are missing, unknown or could not fly.
    """
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"no airframe file {path}; identify.py writes one")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path} is not YAML ({' '.join(str(error).split())}); write one 'name: number' a line"
        ) from error
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected one 'name: number' a line, such as mass_kg: 0.035")
    return _airframe(str(path), values)


def write_airframe(path: Path, airframe: Airframe, heading: str, notes: Mapping[str, str]) -> None:
    """Write `airframe` to the YAML file `path`, with units, the comment `heading`, and `notes` on some parameters."""
    lines = [f"# {heading}"]
    for name in PARAMETERS:
        note = f"; {notes[name]}" if name in notes else ""
        lines.append(f"{name}: {getattr(airframe, name):.9g}  # {UNITS[name]}{note}")
    with complete_or_absent(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _airframe(source: str, values: Mapping[Any, Any]) -> Airframe:
    """Airframe of the parameters `values`; messages name their `source`."""
    for name, value in values.items():
        if name not in PARAMETERS:
            raise UserError(f"{source}: unknown parameter {name!r}{did_you_mean(str(name), PARAMETERS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{source}: {name} is {value!r}; expected a number ({UNITS[name]})")
    if missing := [f"{name} ({UNITS[name]})" for name in REQUIRED if name not in values]:
        raise UserError(f"{source} lacks {'; '.join(missing)}")
    try:
        return Airframe(**{str(name): float(value) for name, value in values.items()})
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
