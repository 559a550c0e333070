"""A Panda in LIBERO's scene as hardware under ros2_control: joint trajectories and finger positions in, joints out.

The scene (objects, fixtures, physics of contact) is that of sims/libero; its operational-space controller is not used.
The arm is driven as joint_trajectory_controller drives one: every trajectory is followed from where the last one was,
by cubic splines through its points, and its joints are held to it by torques as a manufacturer's position controller
computes them. All times are simulated.
"""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs from a clone that is not installed

import mujoco
import numpy as np
import rclpy
import torch
from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseStamped
from numpy.typing import NDArray
from rclpy.clock import Clock as RosClock
from rclpy.clock import ClockType
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from scipy.spatial.transform import Rotation
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from tensordict import TensorDict
from trajectory_msgs.msg import JointTrajectory

from real_robot.firmware.record import read_contract
from real_robot.ros2.messages.body_codecs import read_pose
from real_robot.ros2.messages.codecs import LabelledArrays, installed
from real_robot.ros2.robots.registry import robot_table
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.scene import mjcf
from sims.libero.scene.arena import workspace_of
from sims.libero.scene.robot import panda
from sims.libero.scene.scene import BASE
from sims.libero.suite import load_tasks

types = cache(installed)

Array = NDArray[np.float64]
Point = tuple[float, Array, Array]
"""Time from now in s, joint positions rad, joint velocities rad/s."""
JOINTS = tuple(f"panda_joint{number}" for number in range(1, 8))
FINGERS = ("panda_finger_joint1", "panda_finger_joint2")
OPEN_M, FINGER_SPEED = 0.04, 0.1
"""Widest position of a finger, and its speed in m/s, as LIBERO's gripper."""
BANDWIDTH = 40.0
"""Natural frequency of the joints' critically damped position control, rad/s."""
IMPEDANCE = np.array([400.0] * 3 + [30.0] * 3)
"""Stiffness of a Cartesian impedance controller, N/m and N m/rad; critically damped at the hand's inertia."""
PATIENCE_S = 10.0
SITE, MODEL_JOINTS = "gripper0_grip_site", tuple(f"robot0_joint{number}" for number in range(1, 8))
"""Names in the model of `write_arm_model`."""


class Hardware:
    """One task's scene with the arm; `environment` sets numbered starts and judges success."""

    def __init__(self, task: int | str, distribution: str, assets: str | None = None) -> None:
        tasks = load_tasks("libero_object", [task])
        self.environment = LiberoEnvironment(
            tasks,
            1,
            distribution=distribution,
            split="eval",
            horizon=1,
            executed=1,
            assets=find_assets(assets),
            threads=1,
        )
        self.scene = self.environment.scenes[0]
        self.time_s = 0.0

    @property
    def model(self) -> mujoco.MjModel:
        """Model of this episode, in which fixtures have their own places."""
        return self.environment.simulation.models[0]

    @property
    def data(self) -> mujoco.MjData:
        """State of the simulation."""
        return self.environment.simulation.data[0]

    def reset(self, start: int) -> None:
        """Begin at initial state `start`, after LIBERO's own warm-up; the arm holds its position, the hand is open."""
        self.environment.reset(starts=torch.tensor([start]))
        mujoco.mj_forward(self.model, self.data)
        self._inertia = np.zeros((self.model.nv, self.model.nv))
        self._knots: list[tuple[float, Array, Array]] = [(self.time_s, self.joints()[0].copy(), np.zeros(7))]
        self._goal: tuple[Array, Array] | None = None
        self._finger = self._finger_goal = float(self.data.ctrl[self.scene.gripper_actuator[0]])

    def joints(self) -> tuple[Array, Array]:
        """Positions rad and velocities rad/s of the arm."""
        return self.data.qpos[self.scene.arm_qposadr], self.data.qvel[self.scene.arm_dofadr]

    def hand(self) -> tuple[Array, Array]:
        """Position [3] m and rotation [3, 3] of the point between the fingers, in the world."""
        mujoco.mj_kinematics(self.model, self.data)
        site = self.scene.grip_site
        return self.data.site_xpos[site].copy(), self.data.site_xmat[site].reshape(3, 3).copy()

    def fingers(self) -> Array:
        """Positions [2] m of the fingers, as their driver counts them: both positive."""
        return np.abs(self.data.qpos[self.scene.gripper_qposadr])

    def seen(self) -> TensorDict:
        """Observations of objects as from cameras: LIBERO's observation of one environment."""
        return self.environment.observe()

    def succeeded(self) -> bool:
        """Whether the task's goal holds."""
        return self.environment.simulation.satisfied(0)

    def follow(self, points: Sequence[Point]) -> None:
        """Follow a new trajectory from the current point of the last one."""
        position, velocity, _ = self._wanted(self.time_s)
        start = [(self.time_s, position, velocity)]
        self._knots = start + [(self.time_s + after_s, q, v) for after_s, q, v in points]

    def reach(self, position: Array, rotation: Array) -> None:
        """Set the target pose of the Cartesian impedance controller."""
        self._goal = position, rotation

    def grip(self, finger_m: float) -> None:
        """Move both fingers to `finger_m` at the gripper's speed; they keep pushing against an object between them."""
        self._finger_goal = float(np.clip(finger_m, 0.0, OPEN_M))

    def step(self, duration_s: float) -> None:
        """Advance the physics."""
        for _ in range(round(duration_s / self.model.opt.timestep)):
            self._drive()
            mujoco.mj_step(self.model, self.data)
            self.time_s += self.model.opt.timestep

    def _drive(self) -> None:
        model, data, scene = self.model, self.data, self.scene
        mujoco.mj_fwdPosition(model, data)
        mujoco.mj_fwdVelocity(model, data)
        mujoco.mj_fullM(model, data, self._inertia)
        inertia = self._inertia[np.ix_(scene.arm_dofadr, scene.arm_dofadr)]
        torque = self._held_joints(inertia) if self._goal is None else self._pulled_hand(inertia)
        low, high = model.actuator_ctrlrange[scene.arm_actuator].T
        data.ctrl[scene.arm_actuator] = np.clip(torque + data.qfrc_bias[scene.arm_dofadr], low, high)
        step = FINGER_SPEED * model.opt.timestep
        self._finger += float(np.clip(self._finger_goal - self._finger, -step, step))
        data.ctrl[scene.gripper_actuator] = self._finger, -self._finger

    def _held_joints(self, inertia: Array) -> Array:
        """Torques of a joint position controller."""
        q, v, a = self._wanted(self.time_s)
        now, rate = self.joints()
        return inertia @ (a + BANDWIDTH**2 * (q - now) + 2.0 * BANDWIDTH * (v - rate))

    def _pulled_hand(self, inertia: Array) -> Array:
        """Torques of a Cartesian impedance controller: J'(K e - D v), and a posture torque in the null space."""
        assert self._goal is not None
        jacobian = np.zeros((6, self.model.nv))
        mujoco.mj_jacSite(self.model, self.data, jacobian[:3], jacobian[3:], self.scene.grip_site)
        jacobian = jacobian[:, self.scene.arm_dofadr]
        site = self.scene.grip_site
        turn = Rotation.from_matrix(self._goal[1] @ self.data.site_xmat[site].reshape(3, 3).T).as_rotvec()
        error = np.append(self._goal[0] - self.data.site_xpos[site], turn)
        now, rate = self.joints()
        mass = np.diag(np.linalg.pinv(jacobian @ np.linalg.solve(inertia, jacobian.T)))
        force = IMPEDANCE * error - 2.0 * np.sqrt(IMPEDANCE * mass) * (jacobian @ rate)
        posture = inertia @ (10.0 * (self.scene.initial_arm - now) - 6.3 * rate)
        null_space = np.eye(7) - jacobian.T @ np.linalg.pinv(jacobian.T)
        return jacobian.T @ force + null_space @ posture

    def _wanted(self, now_s: float) -> tuple[Array, Array, Array]:
        """Positions, velocities and accelerations of the trajectory at `now_s`; it rests after its end."""
        while len(self._knots) > 1 and now_s >= self._knots[1][0]:
            del self._knots[0]
        (t0, q0, v0), *rest = self._knots
        if not rest:
            return q0, np.zeros(7), np.zeros(7)
        t1, q1, v1 = rest[0]
        span, s = t1 - t0, (now_s - t0) / (t1 - t0)
        c2 = 3.0 * (q1 - q0) - span * (2.0 * v0 + v1)
        c3 = -2.0 * (q1 - q0) + span * (v0 + v1)
        position = q0 + span * v0 * s + c2 * s**2 + c3 * s**3
        velocity = v0 + (2.0 * c2 * s + 3.0 * c3 * s**2) / span
        return position, velocity, (2.0 * c2 + 6.0 * c3 * s) / span**2


def write_arm_model(path: Path) -> None:
    """Write the model of the arm alone, as a robot's computer has it, with its base as in the scenes."""
    workspace = workspace_of(load_tasks("libero_object", [0])[0].problem)
    root = ET.fromstring(BASE)
    mjcf.merge(root, panda(workspace.base, workspace.pedestal))
    mjcf.drop_visuals(root)
    path.write_text(ET.tostring(root, encoding="unicode"))


class ArmNode(Node):
    """The hardware's driver and controllers: joint_states out, trajectories in, in lock-step with its commands.

    Parameters `task` and `start` select the episode of `~/reset`; `~/episode` publishes each outcome as JSON. Every
    period waits for its command, at most `PATIENCE_S`; then the arm continues by itself, which is counted. A command
    arrives `delay_s` after its measurement, in simulated time. Observations of objects are published as labelled
    arrays.
    """

    def __init__(self) -> None:
        super().__init__("arm")
        defaults = {"distribution": "official", "task": 0, "start": 0, "checkpoint": "", "delay_s": 0.0, "assets": ""}
        for name, default in defaults.items():
            self.declare_parameter(name, default)
        self._hardware: dict[int, Hardware] = {}
        self._running = False
        self._period_s = 0.05
        self._time_s = 0.0
        contract = read_contract(self._value("checkpoint"))
        object_specs = {
            key: spec for key, spec in contract.observation.items() if key.startswith(("object_", "instruction"))
        }
        self._objects = LabelledArrays(object_specs)
        row = {"rate_hz": 1.0 / contract.control_dt_s, "arrays": list(object_specs)}
        command = robot_table("cartesian", contract, row).command.codec
        reliable = QoSProfile(depth=10)
        self._told_time = self.create_publisher(Clock, "/clock", reliable)
        self._seen = self.create_publisher(Float64MultiArray, "observation", reliable)
        self._joints = self.create_publisher(JointState, "joint_states", reliable)
        self._episode = self.create_publisher(String, "~/episode", reliable)
        fingers = "gripper_controller/joint_trajectory"
        self.create_subscription(JointTrajectory, fingers, self._grip, reliable)
        self.create_subscription(
            Float64MultiArray, "cartesian_command", lambda message: self._note(command.decode(message)), reliable
        )
        self.create_subscription(
            JointTrajectory, "joint_trajectory_controller/joint_trajectory", self._follow, reliable
        )
        self.create_subscription(PoseStamped, "target_pose", self._reach, reliable)
        self.create_service(Trigger, "~/reset", self._reset)
        self.create_timer(0.2, self._watch, clock=RosClock(clock_type=ClockType.STEADY_TIME))

    def _value(self, name: str) -> Any:  # noqa: ANN401 - ROS's
        return self.get_parameter(name).value

    def _reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        listeners = {"joint_states": 1, "observation": 2, "cartesian_state": 2, "cartesian_command": 2}
        if missing := [topic for topic, nodes in listeners.items() if self.count_subscribers(topic) < nodes]:
            response.message = f"not everybody listens to {', '.join(missing)} yet"
            return response
        task = self._value("task")
        if task not in self._hardware:
            self._hardware[task] = Hardware(task, self._value("distribution"), self._value("assets") or None)
        self._arm = self._hardware[task]
        self._arm.reset(self._value("start"))
        self._steps = self._held = 0
        self._command: Array | None = None
        self._trace: list[tuple[Array, Array, Array]] = []
        self._running = True
        self._time_s += 1.0  # later than all stamps of the last episode
        self._measure()
        response.success = True
        return response

    def _measure(self) -> None:
        stamp = Time(sec=int(self._time_s), nanosec=round(1e9 * (self._time_s % 1.0)) % 10**9)
        self._hand = self._arm.hand()
        observation = self._arm.seen()
        arrays = {key: observation[key][0].numpy() for key in self._objects.specs}
        self._seen.publish(self._objects.encode(arrays, types, self._time_s))
        positions, rates = self._arm.joints()
        message = JointState(name=[*JOINTS, *FINGERS])
        message.header.stamp = stamp
        message.position = [*positions.tolist(), *self._arm.fingers().tolist()]
        message.velocity = [*rates.tolist(), 0.0, 0.0]
        self._joints.publish(message)
        self._told_time.publish(Clock(clock=stamp))
        self._measured = time.monotonic()

    def _grip(self, message: JointTrajectory) -> None:
        if self._running:
            self._arm.grip(message.points[-1].positions[0])

    def _note(self, arrays: dict[str, Array]) -> None:
        self._command = arrays["action"]

    def _follow(self, message: JointTrajectory) -> None:
        points = [
            (p.time_from_start.sec + 1e-9 * p.time_from_start.nanosec, np.array(p.positions), np.array(p.velocities))
            for p in message.points
        ]
        self._obey(lambda: self._arm.follow(points))

    def _reach(self, message: PoseStamped) -> None:
        self._obey(lambda: self._arm.reach(*read_pose(message.pose)))

    def _obey(self, take_up: Callable[[], None]) -> None:
        if not self._running:
            return
        delay_s = self._value("delay_s")
        self._arm.step(delay_s)
        take_up()
        self._advance(self._period_s - delay_s)

    def _watch(self) -> None:
        if self._running and time.monotonic() - self._measured > PATIENCE_S:
            self._held += 1
            self.get_logger().warning("no command: the arm goes on by itself")
            self._advance(self._period_s)

    def _advance(self, duration_s: float) -> None:
        hand_before = self._hand
        self._arm.step(duration_s)
        self._time_s = round(self._time_s + self._period_s, 6)
        self._steps += 1
        position, rotation = self._arm.hand()
        if self._command is not None:
            turn = (Rotation.from_matrix(rotation) * Rotation.from_matrix(hand_before[1]).inv()).as_rotvec()
            self._trace.append(
                (self._command[:6] * self._period_s, np.append(position - hand_before[0], turn), position)
            )
        success = self._arm.succeeded()
        if success or self._steps >= self._arm.environment.step_limit:
            self._running = False
            trace = [{"commanded": c.tolist(), "moved": m.tolist()} for c, m, _ in self._trace]
            outcome = {"success": success, "steps": self._steps, "held": self._held, "trace": trace}
            self._episode.publish(String(data=json.dumps(outcome)))
        else:
            self._measure()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rclpy.init()
    rclpy.spin(ArmNode())
