"""Robots by the name in the parameter `robot`: one function each, which makes a `tables.Table` from options.

All functions take the policy's contract, so that a table has only the observations of the policy, and these options:
`rate_hz` of commands; `arrays`, keys of observations that the robot's topics lack and that your own node publishes as
labelled arrays on `observation` (object poses, an instruction). Unknown limits of a robot default to the policy's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.ros2.messages.body_codecs import Image
from real_robot.ros2.messages.codecs import LabelledArrays
from real_robot.ros2.robots.arms import forward_position, fr3, joint_trajectory, ur
from real_robot.ros2.robots.cartesian import cartesian
from real_robot.ros2.robots.quadrotors import px4_actuators, px4_rates
from real_robot.ros2.robots.tables import ACTION, COMMAND, IMAGES, Behaviour, Table, Topic
from real_robot.ros2.robots.vehicles import ackermann, diff_drive


def simulation(contract: Contract) -> Table:
    """A simulator (`sim_node`) or any robot behind labelled arrays: supports every contract.

    Images are sensor_msgs/Image on `observation/<key>`, all other observations are on `observation`, the action is on
    `action`; hold and emergency are the services `hold` and `emergency`.
    """
    specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
    pictures = {key: spec for key, spec in specs.items() if spec.is_picture}
    others = {key: spec for key, spec in specs.items() if key not in pictures}
    states = [Topic("observation", LabelledArrays(others), replace(COMMAND, depth=2))]
    states += [Topic(f"observation/{key}", Image({key: spec}), IMAGES) for key, spec in pictures.items()]
    return Table(
        "simulation",
        tuple(states),
        Topic("action", LabelledArrays({ACTION: contract.action}), COMMAND),
        contract.control_dt_s,
        stops_after_s=None,  # its `hold` stops it
        hold=Behaviour(services=("hold",)),
        emergency=Behaviour(services=("emergency",)),
    )


ROBOTS: dict[str, Callable[..., Table]] = {
    build.__name__: build
    for build in (
        simulation,
        joint_trajectory,
        forward_position,
        ur,
        fr3,
        cartesian,
        px4_actuators,
        px4_rates,
        diff_drive,
        ackermann,
    )
}


def robot_table(robot: str, contract: Contract, options: Mapping[str, Any]) -> Table:
    """The table of `robot` with its `options`, for a policy with this `contract`.

    Raises:
        UserError: for an unknown robot or option; or if the robot cannot serve the policy, with a table of the
            differences.
    """
    if robot not in ROBOTS:
        raise UserError(f"unknown robot {robot!r}; expected one of {', '.join(sorted(ROBOTS))}")
    names = list(inspect.signature(ROBOTS[robot]).parameters)[1:]
    if unknown := set(options) - set(names):
        raise UserError(f"unknown options {sorted(unknown)} of {robot}; expected some of {', '.join(names) or 'none'}")
    for name, value in options.items():
        _check_option(f"option {name} of {robot}", value, inspect.signature(ROBOTS[robot]).parameters[name].annotation)
    contract = contract.delayed(0)  # an action prefix is known where chunks are executed
    table = ROBOTS[robot](contract, **options)
    if rows := contract.differences(table.served):
        hint = "names and units are those of the training; demonstration_names={ROBOT'S:DATA'S} maps those of data sets"
        raise UserError(f"the policy does not fit {robot}:\n  " + "\n  ".join([*rows, hint]))
    return table


MOST = {"lidar_field_deg": 360.0}
"""Largest values of options; all numbers of options are finite and above 0."""


def _check_option(what: str, value: Any, annotation: Any) -> None:  # noqa: ANN401 - an option's value
    """Raise UserError unless a numeric option's `value`, or each number in a mapping, is finite and above 0."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _check_option(f"{what}.{key}", each, annotation)
    elif "float" in str(annotation) and value is not None:
        largest = MOST.get(what.split()[1], math.inf)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0.0 < value < math.inf
            or value > largest
        ):
            upper = f"and at most {largest:g}" if math.isfinite(largest) else "and finite"
            raise UserError(f"{what}: expected a number above 0 {upper}, got {value!r}")
