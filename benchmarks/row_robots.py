"""Robots for every row of the registry, which measure, follow, resist and restart in `safety_faults_rows`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.row_network import Network
from embodied.contract import Contract
from real_robot.ros2.messages.frames import two_columns
from real_robot.ros2.robots.tables import ACTION, Table
from real_robot.safety.limits import Kind, Limits
from tests.real_robot.ros2 import px4
from tests.real_robot.ros2.in_process import interfaces
from tests.real_robot.ros2.messages.definitions import types

LATCHED_EVERY_S = 0.5
STRAIGHT = {"rotation": np.eye(3).reshape(9), "end_effector_rotation": two_columns(np.eye(3)), "goal_direction": [1, 0]}
MODES = {
    "safety_mode": ("mode", 1, 3),
    "robot_program_running": ("data", True, False),
    "robot_state": ("robot_mode", 2, 4),
}
"""Field of a driver's status, its value while the arm moves, and its value while it does not."""


class Robot:
    """A robot that follows commands at once: joints, a hand, a vehicle, or one behind labelled arrays."""

    def __init__(self, graph: Network, table: Table, limits: Limits) -> None:
        self.graph, self.table, self.rng = graph, table, graph.rng
        self.command_codec = table.command.codec
        names = table.contract.action.names
        self.elements = [limits.commands.get(name) for name in names]
        positions = [element is None or element.kind is Kind.POSITION for element in self.elements]
        self.integrates = ~np.array(positions)
        low = [-0.5 if e is None else max(e.low, -0.5) for e in self.elements]
        high = [0.5 if e is None else min(e.high, 0.5) for e in self.elements]
        self._low, self._high = np.array(low), np.maximum(high, low)
        self.position = self.rng.uniform(self._low, self._high)
        self.velocity = np.zeros(len(names))
        self.observation = _rest(table.contract)
        self.measures = ""
        """Observation that shows its position; "" if none does."""
        specs = table.contract.observation
        if "joint_position" in specs and len(names) == specs["joint_position"].shape[0]:
            self.measures = "joint_position"
        elif "end_effector_position" in specs and table.name == "cartesian":
            self.measures = "end_effector_position"
        self.refuses = self.taken = self.silent = False
        self.wrong: np.ndarray | None = None
        """Measurement that replaces the position."""
        self._once = False
        self.down_s = 0.0
        self.commanded_s = self._latched_s = -math.inf
        graph.heard[table.command.name].append(self._hear)

    def step(self, period_s: float) -> None:
        """Simulate one period: move and measure."""
        self.down_s -= period_s
        if self.down_s > 0.0:
            return
        if self.taken:
            self.position = self.position + period_s * self.rng.choice([0.3, 1.0])
        elif not self.refuses and self.graph.now_s - self.commanded_s <= (self.table.stops_after_s or math.inf):
            self.position = self.position + period_s * self.velocity
        self._measure()

    def change_mode(self, back: bool) -> None:
        """Stop following commands, or follow them again."""
        self.refuses = not back
        self._latched_s = -math.inf

    def take_over(self, back: bool) -> None:
        """Let somebody else move the robot, or end that."""
        self.taken = not back

    def misread(self) -> None:
        """Measure a wrong position: once zeros or -pi, or an offset for the duration of the fault."""
        kind = int(self.rng.integers(3))
        shape = self.position.shape
        self.wrong = (np.zeros(shape), np.full(shape, -math.pi), self.rng.uniform(self._low, self._high))[kind]
        self._once = kind < 2

    def restart(self, down_s: float) -> None:
        """End the driver, and restart it after a while, at rest."""
        self.down_s, self.velocity, self._latched_s = down_s, np.zeros(len(self.velocity)), -math.inf

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        if self.down_s > 0.0 or self.refuses or self.taken:
            return
        values = self.command_codec.decode(message)[ACTION].astype(np.float64)
        self.commanded_s = self.graph.now_s
        self.position = np.where(self.integrates, self.position, values)
        self.velocity = np.where(self.integrates, values, 0.0)

    def _measure(self) -> None:
        graph = self.graph
        arrays = self.table.measured(self.observation | self._seen())
        lasting = graph.now_s - self._latched_s >= LATCHED_EVERY_S
        if lasting:
            self._latched_s = graph.now_s
        for mode in self.table.modes:
            graph.publishers[mode.name] = set() if self.silent else {("/", "driver")}
            if (lasting or mode.timeout_s) and not self.silent:
                field, good, bad = MODES[mode.name.split("/")[-1]]
                message = interfaces(mode.type)()
                setattr(message, field, bad if self.refuses else good)
                graph.send(mode.name, message)
        for topic in self.table.states:
            if lasting or not topic.lasting:
                graph.send(topic.name, topic.codec.encode(arrays, interfaces, graph.ros_s))
            if topic.name == "joint_states" and self.rng.random() < 0.2:
                gripper = types("sensor_msgs/msg/JointState")()
                gripper.name, gripper.position = ["finger"], np.zeros(1)
                graph.send(topic.name, gripper)

    def _seen(self) -> dict[str, np.ndarray]:
        position = self.position if self.wrong is None else self.wrong
        if self._once:
            self.wrong = None
        width = 3 if self.measures == "end_effector_position" else len(position)
        return {self.measures: position[:width]} if self.measures else {}


def _rest(contract: Contract) -> dict[str, np.ndarray]:
    observation = {}
    for key, spec in contract.observation.items():
        shape = tuple(2 if size < 0 else size for size in spec.shape)
        observation[key] = np.asarray(STRAIGHT.get(key, np.zeros(shape)), spec.dtype).reshape(shape)
    return observation


class Px4(px4.Px4):
    """PX4 with its pilot."""

    measures = "position"

    def __init__(self, graph: Network, table: Table, limits: Limits) -> None:
        assert table.status is not None
        super().__init__(graph, table.status.name.removeprefix("fmu/out/vehicle_status"), loss_s=0.5)
        self.rng, self.down_s, self.silent = graph.rng, 0.0, False
        self.wrong = None

    def misread(self) -> None:
        """Let the estimate jump, with a reset counter."""
        self.position, self.reset_counter = self.position + 5.0, (self.reset_counter + 1) % 256

    def step(self, period_s: float = 0.0) -> None:  # type: ignore[override]
        """Simulate one period."""
        self.down_s -= period_s
        if not self.alive and self.down_s <= 0.0:
            self.boot()
            self.alive = True
        if not self.silent:
            super().step()

    def change_mode(self, back: bool) -> None:
        """Select a mode, as a ground station; sometimes the estimate jumps, or a warning sets the failsafe flag."""
        if back:
            self.warning = False
            return
        event = int(self.rng.integers(4))
        if event == 0:
            self.position, self.reset_counter = self.position + 5.0, (self.reset_counter + 1) % 256
        elif event == 1:
            self.warning = True
        else:
            self.switch(int(self.rng.choice([px4.HOLD, px4.RETURN, px4.LAND, px4.OFFBOARD])))

    def take_over(self, back: bool) -> None:
        """Let the pilot fly, by switch or sticks, and later hand the quadrotor over or use the kill switch."""
        if back:
            self.switch(int(self.rng.choice([px4.OFFBOARD, px4.HOLD])))
        elif self.rng.random() < 0.1:
            self.kill()
        else:
            self.switch(int(self.rng.choice([px4.POSITION, px4.MANUAL, px4.ALTITUDE])))

    def restart(self, down_s: float) -> None:
        """Cut PX4's power for a while."""
        self.alive, self.down_s = False, down_s
