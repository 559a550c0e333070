"""sim_node plays a robot of another row than `simulation`: real message types, frames, and a goal that is computed."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from diagnostic_msgs.msg import DiagnosticStatus
from rclpy.qos import qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import LaserScan
from std_msgs.msg import Float64MultiArray

from embodied.navigation.guard import Guard
from real_robot.ros2.embodied_ros2.parts import load_environment, load_policy
from real_robot.ros2.nodes.policy import PolicySettings
from real_robot.ros2.nodes.sim import SimSettings
from real_robot.ros2.processes import Processes
from real_robot.ros2.robots.vehicles import DRIVE
from sims.vehicle.mapping import drive_of
from sims.vehicle.navigate import Navigate
from sims.vehicle.vehicles import JACKAL

STEPS = 40
"""Of the episode that is compared: differences of float32 grow with time."""


def driven(run: Path, start: int, guarded: bool) -> np.ndarray:
    """Actions [T, A] of an episode in the simulator called directly."""
    environment = load_environment(SimSettings(checkpoint=str(run)))
    policy = load_policy(PolicySettings(checkpoint=str(run)))
    guard = Guard(policy.contract, drive_of(JACKAL, Navigate.LIDAR)) if guarded else None
    observation = environment.reset(starts=torch.tensor([start]))
    actions = []
    for _ in range(STEPS):
        decision = policy.act(observation, deterministic=True)
        action = decision.actions[:, 0]
        action = guard.command(observation, action)[0] if guard else action
        actions.append(action[0].numpy())
        transition = environment.step(action.unsqueeze(1))
        observation = transition.observation
        if bool(transition.done[0]):
            break
    return np.array(actions)


@pytest.mark.parametrize("guard", [False, True], ids=["alone", "guarded"])
def test_a_navigating_vehicle_is_driven_over_the_topics_of_a_differential_drive(
    navigating: Path, tmp_path: Path, guard: bool
):
    limits = tmp_path / "limits.yaml"
    limits.write_text("observation_timeout_s: 0.5\ncommand_timeout_s: 0.5\n")
    options = {"rate_hz": 10.0} | ({"guard": {name: getattr(JACKAL, name) for name in DRIVE}} if guard else {})
    row = {"checkpoint": str(navigating), "robot": "diff_drive", "options": options}
    common = row | {"use_sim_time": True, "limits": str(limits)}
    outcomes, traces, scans = [], [], []
    with Processes(tmp_path) as nodes:
        passed_on = nodes.node.create_publisher(LaserScan, "/passed_on", qos_profile_sensor_data)

        def lose(message: LaserScan) -> None:
            """Pass on to the policy all but the first measurements, and every fifth: it is sent with best effort."""
            scans.append(message)
            if len(scans) > 3 and len(scans) % 5:
                passed_on.publish(message)

        nodes.node.create_subscription(LaserScan, "/scan", lose, qos_profile_sensor_data)
        nodes.node.create_subscription(DiagnosticStatus, "/sim_node/episode", outcomes.append, 10)
        nodes.node.create_subscription(Float64MultiArray, "/sim_node/trace", traces.append, 10)
        nodes.start("sim_node", row | {"listeners": 2, "start": 5})
        nodes.start("safety_node", common | {"heartbeat_timeout_s": 30.0, "liveliness_s": 30.0})
        nodes.start("policy_node", common | {"pace": "measurement"}, remap={"scan": "passed_on"})
        for name in ("sim_node", "safety_node", "policy_node"):
            nodes.change(name, "configure", "activate")
        if not guard:
            nodes.wait(lambda: "options.guard is not set" in nodes.output_of("policy_node"), "a warning")
        nodes.trigger("/sim_node/reset", 30.0)
        nodes.wait(lambda: bool(outcomes and traces), "the end of the episode", 120.0)
    rows = np.asarray(traces[0].data).reshape(-1, 3)
    assert len(scans) > len(rows)  # what was lost was sent again
    assert not np.isnan(rows[:, 0]).any()  # nothing was held
    expected = driven(navigating, 5, guard)
    alone = driven(navigating, 5, False)
    assert (len(alone) == len(expected) and np.allclose(alone, expected)) is not guard
    np.testing.assert_allclose(rows[: len(expected), 1:], expected, atol=2e-3)


def test_the_simulator_goes_on_where_nobody_commands_any_more(navigating: Path, tmp_path: Path):
    """Safety is silent once it has stopped a robot, and lock-step waits for commands: without end, otherwise."""
    row = {"checkpoint": str(navigating), "robot": "diff_drive", "options": {"rate_hz": 10.0}}
    outcomes, traces, times = [], [], []
    with Processes(tmp_path) as nodes:
        nodes.node.create_subscription(DiagnosticStatus, "/sim_node/episode", outcomes.append, 10)
        nodes.node.create_subscription(Float64MultiArray, "/sim_node/trace", traces.append, 10)
        nodes.node.create_subscription(Clock, "/clock", times.append, 10)
        still = {"overrides": "task.step_limit=300", "real_time_factor": 100.0, "silence_s": 1.0}
        nodes.start("sim_node", row | still | {"listeners": 1})
        nodes.start("policy_node", row | {"use_sim_time": True, "pace": "measurement", "prefix": ""})
        for name in ("sim_node", "policy_node"):
            nodes.change(name, "configure", "activate")
        nodes.trigger("/sim_node/reset", 30.0)
        nodes.wait(lambda: len(times) > 3, "some commands")
        nodes.running["policy_node"].send_signal(signal.SIGSTOP)
        nodes.wait(lambda: bool(outcomes and traces), "the end of the episode", 60.0)
        nodes.running["policy_node"].send_signal(signal.SIGCONT)
    latencies = np.asarray(traces[0].data).reshape(-1, 3)[:, 0]
    assert np.isfinite(latencies[0])
    assert np.isnan(latencies[-1])  # it held by itself
