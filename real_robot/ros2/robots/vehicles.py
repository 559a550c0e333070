"""Tables of ground vehicles: differential drives and Nav2 bases, Ackermann steering."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from real_robot.robots.control_loop import Executor
from real_robot.ros2.messages.body_codecs import IMU, Fields, Imu, LaserScan, Odometry, Pose, quantities_of
from real_robot.ros2.messages.codecs import Arrays, JointState
from real_robot.ros2.robots.tables import (
    ACTION,
    COMMAND,
    STATE,
    Derived,
    Table,
    Topic,
    action_spec,
    make_table,
)


def diff_drive(
    contract: Contract,
    rate_hz: float,
    stamped: bool = True,
    topic: str = "cmd_vel",
    lidar_field_deg: float = 360.0,
    lidar_range_m: float = 6.0,
    frame_id: str = "odom",
    lidar_frame_id: str = "laser",
    imu_frame_id: str = "imu_link",
    guard: Mapping[str, float] | None = None,
    arrays: Sequence[str] = (),
    stops_after_s: float = 0.5,
) -> Table:
    """Differential drives and Nav2 bases: `cmd_vel` as TwistStamped (Jazzy and newer), or Twist with stamped: false.

    `stops_after_s` is the controller's time-out of commands (diff_drive_controller: `cmd_vel_timeout`).

    Observations come from `odom`, `scan`, `imu` and, for policies with a goal, `goal_pose`; odometry and goal are in
    `frame_id`. Lidar and inertial unit must have the base's axes. Waypoints are computed from a map that is built here
    for each goal. `guard` describes the vehicle (`DRIVE`); the guard replaces commands after which the vehicle could
    not stop, see `Guard`.
    """
    message = "geometry_msgs/msg/TwistStamped" if stamped else "geometry_msgs/msg/Twist"
    start = "twist." if stamped else ""
    paths = {"speed": f"{start}linear.x", "yaw_rate": f"{start}angular.z"}
    codec = Fields({ACTION: action_spec(contract, ("speed", "yaw_rate"), "m/s, rad/s", "base")}, message, paths)
    states = _state_topics(contract, lidar_field_deg, lidar_range_m, (frame_id, lidar_frame_id, imu_frame_id))
    own_keys = set(contract.observation) - set(arrays)
    guide = _guide(contract, own_keys, rate_hz, lidar_field_deg, lidar_range_m) if WAYPOINTS & own_keys else None
    command = Topic(topic, codec, COMMAND)
    table = _vehicle("diff_drive", contract, rate_hz, command, states, frame_id, arrays, stops_after_s, guide)
    table = replace(table, stamped=stamped)
    if guard is None:
        return replace(table, advice=UNGUARDED) if guide else table
    return replace(table, translate=_guarding(contract, guard, lidar_field_deg, lidar_range_m))


def ackermann(
    contract: Contract,
    rate_hz: float,
    topic: str = "drive",
    steering_joint: str = "",
    lidar_field_deg: float = 270.0,
    lidar_range_m: float = 10.0,
    frame_id: str = "odom",
    lidar_frame_id: str = "laser",
    imu_frame_id: str = "imu_link",
    arrays: Sequence[str] = (),
    stops_after_s: float = 0.5,
) -> Table:
    """F1TENTH and other Ackermann vehicles: `drive` as AckermannDriveStamped; for `stops_after_s`, see `diff_drive`.

    `steering_joint` is the joint in `joint_states` whose position is the observation `steering`.
    """
    paths = {name: f"drive.{name}" for name in ("steering_angle", "speed")}
    spec = action_spec(contract, tuple(paths), "rad, m/s", "base")
    codec = Fields({ACTION: spec}, "ackermann_msgs/msg/AckermannDriveStamped", paths)
    states = _state_topics(contract, lidar_field_deg, lidar_range_m, (frame_id, lidar_frame_id, imu_frame_id))
    if steering_joint:
        steering = JointState({"steering": TensorSpec((1,), unit="rad")}, (steering_joint,), {"steering": "position"})
        states.append(Topic("joint_states", steering, STATE))
    return _vehicle(
        "ackermann", contract, rate_hz, Topic(topic, codec, COMMAND), states, frame_id, arrays, stops_after_s
    )


def _state_topics(contract: Contract, field_deg: float, range_m: float, frames: tuple[str, str, str]) -> list[Topic]:
    """Topics of a vehicle's measurements; `frames` are the frames of odometry, lidar and inertial unit."""
    frame_id, lidar_frame_id, imu_frame_id = frames
    states = [Topic("odom", Odometry(_of_vehicle(contract), frame_id), STATE)]
    if imu := {key: spec for key, spec in IMU.items() if key in contract.observation}:
        states.append(Topic("imu", Imu(imu, imu_frame_id), STATE))
    if "lidar" in contract.observation:
        angles = _beams(contract, field_deg)
        spec = TensorSpec((len(angles),), unit="m", frame="lidar")
        states.append(Topic("scan", LaserScan({"lidar": spec}, angles, range_m, lidar_frame_id), STATE))
    return states


def _beams(contract: Contract, field_deg: float) -> np.ndarray:
    """Angles of the observed beams, rad."""
    beams = contract.observation["lidar"].shape[0]
    # over a full turn the last beam is one spacing before the first, otherwise both ends of the field have a beam
    spacing = np.deg2rad(field_deg) / (beams if field_deg >= 360.0 else beams - 1)
    return spacing * np.arange(beams) - 0.5 * np.deg2rad(field_deg)


GOAL = {
    "goal_distance": TensorSpec((1,), unit="m"),
    "goal_direction": TensorSpec((2,), unit="1", frame="base", names=("x", "y")),
}

WAYPOINTS = {"waypoints", "path_cost", "remembered"}
"""Observations of a `LocalMap`."""
ANOTHER_M = 0.3
LOST_M = 2.0
"""Largest distance between a goal and the position predicted from the last goal. Beyond the first distance a changed
goal is another goal; beyond the second, odometry has jumped. In both cases a new map begins.
"""


UNGUARDED = (
    "options.guard is not set: no command is checked, and policies of vehicle_navigate were trained behind a guard; "
    "describe the vehicle there, see launch/config/vehicle.yaml"
)
DRIVE = (
    "length_m",
    "width_m",
    "acceleration_m_s2",
    "deceleration_m_s2",
    "yaw_acceleration_rad_s2",
    "lag_s",
)
"""Properties of the vehicle that a guard needs, see `dynamic_window.Drive`."""


def _guarding(
    contract: Contract, drive: Mapping[str, float], field_deg: float, range_m: float
) -> Callable[[Executor], Executor]:
    """Return a function that puts a guard for the vehicle `drive` behind a policy's executor."""
    if set(drive) != set(DRIVE):
        raise UserError(f"expected {', '.join(DRIVE)} in options.guard; got {dict(drive)}")

    def put(executor: Executor) -> Executor:
        from embodied.navigation.dynamic_window import Drive  # imported here, because other tables need no PyTorch
        from embodied.navigation.guard import Guard
        from real_robot.robots.guarding import Guarding

        angles = tuple(_beams(contract, field_deg).tolist()) if "lidar" in contract.observation else ()
        try:
            guard = Guard(contract, Drive(**drive, angles=angles, range_m=range_m))
        except UserError as error:
            raise UserError(f"{error}; leave out options.guard") from error
        return Guarding(executor, guard)

    return put


def _of_vehicle(contract: Contract) -> dict[str, str]:
    """Quantities to read from odometry: the requested ones, and the pose if the goal is computed from it."""
    pose = {"position": "position", "rotation": "rotation"} if set(GOAL) & set(contract.observation) else {}
    return pose | quantities_of({key: spec for key, spec in contract.observation.items() if key not in IMU})


def _vehicle(
    name: str,
    contract: Contract,
    rate_hz: float,
    command: Topic,
    states: list[Topic],
    frame_id: str,
    arrays: Sequence[str],
    stops_after_s: float,
    guide: Callable[[Arrays], dict[str, np.ndarray]] | None = None,
) -> Table:
    """Make a vehicle's table; `guide` computes the observations of the goal and of `WAYPOINTS` from all arrays."""
    derived = None
    compute = guide or _to_goal
    goal_specs = GOAL | {key: spec for key, spec in contract.observation.items() if guide and key in WAYPOINTS}
    if goal := {key: spec for key, spec in goal_specs.items() if key in contract.observation and key not in arrays}:
        states.append(Topic("goal_pose", Pose({"goal": "position"}, frame_id), COMMAND, lasting=True))
        used_arrays = ("goal", *(key for key in ("position", "rotation") if key not in contract.observation))
        derived = Derived(goal, used_arrays, lambda observed: _only(goal, compute(observed)), _from_goal)
    at_rest = tuple(math.nan if element == "steering_angle" else 0.0 for element in command.codec.specs[ACTION].names)
    return make_table(name, contract, rate_hz, states, command, arrays, stops_after_s, at_rest=at_rest, derived=derived)


def _only(specs: Mapping[str, TensorSpec], arrays: Arrays) -> dict[str, np.ndarray]:
    return {key: arrays[key] for key in specs}


def _to_goal(observed: Arrays) -> dict[str, np.ndarray]:
    """Distance and direction of the goal from the vehicle's position and yaw."""
    rotation = observed["rotation"].reshape(3, 3)
    offset = (observed["goal"] - observed["position"])[:2]
    # bearing in the base frame: atan2(offset) - yaw
    angle = np.arctan2(offset[1], offset[0]) - np.arctan2(rotation[1, 0], rotation[0, 0])
    direction = np.array([np.cos(angle), np.sin(angle)], np.float32)
    return {"goal_distance": np.array([np.hypot(*offset)], np.float32), "goal_direction": direction}


def _guide(
    contract: Contract, own_keys: set[str], rate_hz: float, field_deg: float, range_m: float
) -> Callable[[Arrays], dict[str, np.ndarray]]:
    """Return a function that maps the lidar's measurements, and computes waypoints to the goal and the goal's position.

    A measurement that is not finite has no waypoints (NaN), and does not change the map.
    """
    import torch  # imported here, because other tables need no PyTorch

    from embodied.navigation.compiled_map import CompiledMap

    if missing := [key for key in ("lidar", "velocity", *GOAL) if key not in own_keys]:
        raise UserError(f"waypoints are found on a map that needs {', '.join(missing)} of the robot's own topics")
    chart = CompiledMap(tuple(_beams(contract, field_deg).tolist()), range_m, 1.0 / rate_hz)
    memory = torch.zeros(1, chart.size)
    goal = np.full(3, np.nan)
    chart.observe(memory)  # compiles the map now, so that the first measurement does not wait

    def compute(observed: Arrays) -> dict[str, np.ndarray]:
        nonlocal memory, goal
        observation = _to_goal(observed)
        goal_position = torch.from_numpy(observation["goal_distance"] * observation["goal_direction"]).unsqueeze(0)
        lidar, velocity = (torch.from_numpy(np.float32(observed[key])).unsqueeze(0) for key in ("lidar", "velocity"))
        if not all(part.isfinite().all() for part in (lidar, velocity, goal_position)):  # a NaN would stay on the map
            return observation | {key: np.full(spec.shape, np.nan, np.float32) for key, spec in chart.specs.items()}
        deviation_m = float((chart.expected(memory, velocity) - goal_position).norm())
        changed = not np.array_equal(goal, observed["goal"])  # always true if odometry restarts in every period
        if deviation_m > LOST_M or (changed and deviation_m > ANOTHER_M):
            memory = chart.begin(lidar, velocity, goal_position)
        else:
            chart.update(memory, lidar, velocity, goal_position)
        goal = np.array(observed["goal"])
        return observation | {key: value[0].numpy() for key, value in chart.observe(memory).items()}

    return compute


def _from_goal(observation: Arrays) -> dict[str, np.ndarray]:
    """Position, rotation and goal of a simulated vehicle, whose odometry restarts with every measurement."""
    arrays = {"position": np.zeros(3), "rotation": np.eye(3).reshape(9)} | dict(observation)
    rotation = np.asarray(arrays["rotation"], np.float64).reshape(3, 3)
    yaw = np.arctan2(rotation[1, 0], rotation[0, 0])
    (distance,), (x, y) = observation.get("goal_distance", np.ones(1)), observation.get("goal_direction", (1.0, 0.0))
    bearing = yaw + np.arctan2(y, x)
    offset = float(distance) * np.array([np.cos(bearing), np.sin(bearing), 0.0])
    return {"position": arrays["position"], "rotation": arrays["rotation"], "goal": arrays["position"] + offset}
