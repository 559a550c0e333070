"""sim_node plays a robot of another row than `simulation`: real message types, frames, and a goal that is computed."""

from pathlib import Path

import numpy as np
import torch
from diagnostic_msgs.msg import DiagnosticStatus
from std_msgs.msg import Float64MultiArray

from real_robot.ros2.embodied_ros2.parts import load_environment, load_policy
from real_robot.ros2.nodes.policy import PolicySettings
from real_robot.ros2.nodes.sim import SimSettings
from real_robot.ros2.processes import Processes

STEPS = 40
"""Of the episode that is compared: differences of float32 grow with time."""


def driven(run: Path, start: int) -> np.ndarray:
    """Actions [T, A] of an episode in the simulator called directly."""
    environment = load_environment(SimSettings(checkpoint=str(run)))
    policy = load_policy(PolicySettings(checkpoint=str(run)))
    observation = environment.reset(starts=torch.tensor([start]))
    actions = []
    for _ in range(STEPS):
        decision = policy.act(observation, deterministic=True)
        actions.append(decision.actions[0, 0].numpy())
        transition = environment.step(decision.actions)
        observation = transition.observation
        if bool(transition.done[0]):
            break
    return np.array(actions)


def test_a_navigating_vehicle_is_driven_over_the_topics_of_a_differential_drive(tmp_path: Path):
    import train

    run = tmp_path / "run"
    small = [
        "env_steps=256",
        "num_envs=8",
        "evaluation_starts=2",
        "evaluation_envs=2",
        "task.step_limit=40",
        "video=false",
    ]
    train.run(["task=vehicle_navigate", f"output={run}", *small])
    limits = tmp_path / "limits.yaml"
    limits.write_text("observation_timeout_s: 0.5\ncommand_timeout_s: 0.5\n")
    row = {"checkpoint": str(run), "robot": "diff_drive", "options": {"rate_hz": 10.0}}
    common = row | {"use_sim_time": True, "limits": str(limits)}
    outcomes, traces = [], []
    with Processes(tmp_path) as nodes:
        nodes.node.create_subscription(DiagnosticStatus, "/sim_node/episode", outcomes.append, 10)
        nodes.node.create_subscription(Float64MultiArray, "/sim_node/trace", traces.append, 10)
        nodes.start("sim_node", row | {"listeners": 2, "start": 5})
        nodes.start("safety_node", common | {"heartbeat_timeout_s": 30.0, "liveliness_s": 30.0})
        nodes.start("policy_node", common | {"pace": "measurement"})
        for name in ("sim_node", "safety_node", "policy_node"):
            nodes.change(name, "configure", "activate")
        nodes.trigger("/sim_node/reset", 30.0)
        nodes.wait(lambda: bool(outcomes and traces), "the end of the episode", 120.0)
    rows = np.asarray(traces[0].data).reshape(-1, 3)
    assert not np.isnan(rows[:, 0]).any()  # nothing was held
    expected = driven(run, 5)
    np.testing.assert_allclose(rows[: len(expected), 1:], expected, atol=2e-3)
