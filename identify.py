"""Fit a quadrotor's airframe to recorded flights: python identify.py recordings=[FILE,...] [key=value ...].

Recordings are files of `real_robot/recording/`, with position, rotation, velocity and angular velocity. Every fourth
segment is held out: prediction errors on these are reported for the initial and the fitted airframe. Motion only
determines ratios: mass and inertia are relative to the thrust curve of `airframe`. The fitted airframe is also written
to a YAML file, which train.py task=quadrotor_hover task.airframe=FILE.yaml reads. Options are printed by --help.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from omegaconf import MISSING

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.configuration import Configuration, NonNegativeInt, PositiveInt
from embodied.errors import UserError
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.training.compute import prepare
from real_robot.recording import driven
from real_robot.recording.recording import Recording
from real_robot.sim_to_real.identification import Parameter, Segments, cut, identify, prediction_error
from sims.quadrotor.physics.airframes import Airframe
from sims.quadrotor.physics.dynamics import DT_S, Options
from sims.quadrotor.physics.fitting import KEYS, FlightModel
from sims.quadrotor.physics.own_airframe import chosen_airframe, write_airframe

log = logging.getLogger("embodied")
GUESSES = {"drag_x": 0.1, "drag_y": 0.1, "drag_z": 0.1, "delay_s": 0.5 * DT_S}
"""Initial values of parameters that are zero in the airframe: drag per kg of mass, N s/m, and delay, s."""


@dataclass
class IdentifyConfig(Configuration):
    """Options of the program.

    `airframe` is the first guess: the name of a known airframe, or a YAML file. A segment has `steps` steps; delays are
    at most `delay_steps` steps. Estimates and errors are written to the JSON file `output`, and the fitted airframe to
    the .yaml file of the same name.
    """

    recordings: list[str] = MISSING
    airframe: str = "crazyflie"
    parameters: list[str] = field(
        default_factory=lambda: [
            *("mass_kg", "inertia_x", "inertia_y", "inertia_z", "lag_rise_s", "lag_fall_s", "delay_s"),
            *("drag_x", "drag_y", "drag_z"),
        ]
    )
    steps: PositiveInt = 25
    delay_steps: NonNegativeInt = 3
    output: str = "identified.json"
    threads: PositiveInt | None = None


def run(arguments: list[str]) -> None:
    """Fit the airframe, print the estimates, and write `output`."""
    config, _ = compose(IdentifyConfig, "identify", arguments, {})
    prepare("cpu", config.threads)
    yaml = Path(config.output).with_suffix(".yaml")
    if yaml == Path(config.output):
        raise UserError(f"output={config.output} is the file of the airframe; use output={yaml.with_suffix('.json')}")
    airframe = chosen_airframe(config.airframe)
    model = FlightModel(airframe, config.parameters, Options(drag=True, delay_steps=config.delay_steps))
    parameters = [parameter(airframe, name, config.delay_steps) for name in config.parameters]
    episodes = (episode for path in config.recordings for _, episode in driven.episodes(Recording(path)))
    segments = cut(episodes, KEYS, config.steps, model.past)
    if (count := len(segments.measured)) < 4:
        raise UserError(f"expected at least 4 segments of {config.steps} steps, got {count}; record more")
    split = [row for row in range(count) if row % 4 < 3], list(range(3, count, 4))
    fitted, held_out = (Segments(segments.measured[rows], segments.actions[rows]) for rows in split)
    identification = identify(model.simulate, parameters, fitted, model.guess(fitted.measured, fitted.actions))
    errors = {}
    for when, values in (("before", [p.initial for p in parameters]), ("after", identification.values())):
        start = model.guess(held_out.measured, held_out.actions)
        error = prediction_error(model.simulate, values, held_out, start).split((3, 9, 3, 3))
        errors[when] = {key: float(part.square().mean().sqrt()) for key, part in zip(KEYS, error, strict=True)}
    for name, fit in identification.estimates.items():
        log.info(f"{name:12} {fit.value:10.4g}  [{fit.low:.4g}, {fit.high:.4g}]  before {getattr(airframe, name):.4g}")
    for key in KEYS:
        change = f"{errors['before'][key]:.4g} -> {errors['after'][key]:.4g}"
        log.info(f"error of {key} after {config.steps} steps: {change}")
    record = asdict(config) | identification.summary() | {"held_out_errors": errors}
    with complete_or_absent(Path(config.output)) as temporary:
        temporary.write_text(dumps_rows(record), encoding="utf-8")
    values = {name: estimate.value for name, estimate in identification.estimates.items()}
    notes = {name: f"95%: {fit.low:.4g} to {fit.high:.4g}" for name, fit in identification.estimates.items()}
    heading = (
        f"airframe fitted to {count} segments of flight; parameters without an interval are those of {config.airframe}"
    )
    write_airframe(yaml, replace(airframe, **values), heading, notes)
    log.info(f"wrote {config.output} and {yaml}: train.py task=quadrotor_hover task.airframe={yaml}")


def parameter(airframe: Airframe, name: str, delay_steps: int) -> Parameter:
    """A parameter to fit, within a factor of five of the first guess; drag and delay may be zero."""
    if name == "delay_s":
        return Parameter(name, airframe.delay_s or GUESSES[name], 0.0, delay_steps * DT_S)
    initial = getattr(airframe, name) or GUESSES.get(name, 0.0) * airframe.mass_kg
    return Parameter(name, initial, 0.0 if name in GUESSES else initial / 5, 5 * initial)


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, IdentifyConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], lambda given: compose(IdentifyConfig, "identify", given, {})))
