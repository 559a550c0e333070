"""Arms that follow velocities of their hand, with a gripper: for policies such as LIBERO's, behind `cartesian_node`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from embodied.contract import Contract, TensorSpec
from real_robot.robots.displacement import AXES, DISPLACEMENTS, GRIPPER, VELOCITIES, Displaced, Response
from real_robot.ros2.messages.body_codecs import QUANTITIES
from real_robot.ros2.messages.codecs import LabelledArrays
from real_robot.ros2.robots.tables import (
    ACTION,
    COMMAND,
    Behaviour,
    Table,
    Topic,
    action_spec,
    camera_topics,
    make_table,
)


def cartesian(
    contract: Contract,
    rate_hz: float,
    cameras: Mapping[str, str] | None = None,
    stops: Sequence[str] = (),
    arrays: Sequence[str] = (),
    stops_after_s: float = 0.3,
) -> Table:
    """An arm that follows velocities of its hand, and a gripper, behind `cartesian_node`.

    Its policies command such velocities, or displacements as LIBERO's policies do. Displacements are converted to the
    velocities with which robosuite's controller would follow them (`displacement`), before all checks, so that limits
    are in m/s. `cameras` are the topics of images by observation, `stops` the std_srvs/Trigger services that an
    emergency calls. `stops_after_s` is one and a half times `command_timeout_s` of cartesian_node, after which the arm
    is at rest.
    """
    action = action_spec(contract, (*AXES, GRIPPER), VELOCITIES, "world")
    specs = {key: spec for key, spec in _hand_specs(contract).items() if key in contract.observation}
    states = [Topic("cartesian_state", LabelledArrays(specs), COMMAND)]
    states += camera_topics(contract, cameras or {})
    translation: dict[str, Any] = {}
    if contract.action.unit == DISPLACEMENTS:
        response = Response(1.0 / rate_hz)
        fastest = (*(1.001 * response.fastest).tolist(), 1.0)  # margin, so that rounding does not exceed the limits
        action = replace(action, low=tuple(-value for value in fastest), high=fastest)
        policy_action = replace(contract.action, unit=DISPLACEMENTS, frame="world", names=action.names)
        translation = {"policy_action": policy_action, "translate": lambda executor: Displaced(executor, response)}
    command = Topic("cartesian_command", LabelledArrays({ACTION: action}), COMMAND)
    at_rest = (0.0,) * 7  # a gripper without a direction keeps its grasp
    emergency = Behaviour(services=tuple(stops))
    return make_table(
        "cartesian",
        contract,
        rate_hz,
        states,
        command,
        arrays,
        stops_after_s,
        emergency=emergency,
        at_rest=at_rest,
        **translation,
    )


def _hand_specs(contract: Contract) -> dict[str, TensorSpec]:
    """Specs of all measurements of cartesian_node; joints have the policy's names and limits."""
    joints = contract.observation.get("joint_position", contract.observation.get("joint_velocity", TensorSpec((0,))))
    moving = TensorSpec(joints.shape, unit="rad/s", names=joints.names)
    return {
        "joint_position": replace(joints, unit="rad"),
        "joint_velocity": moving,
        "end_effector_position": QUANTITIES["position"][0],
        "end_effector_rotation": QUANTITIES["rotation.two_columns"][0],
        "gripper_position": TensorSpec((2,), unit="m", names=("left", "right")),
        "gripper_command": TensorSpec((1,), unit="-1 open, 1 closed", names=("command",)),
    }
