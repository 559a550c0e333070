"""The same policy over ROS 2 and in the simulator called directly."""

from pathlib import Path

import numpy as np
import torch

from embodied.evaluation.evaluation import evaluate
from embodied.execution.chunking import Execution
from real_robot.robots.control_loop import Controller
from real_robot.robots.robot import SimulatedRobot
from real_robot.ros2.embodied_ros2.parts import load_environment, load_policy
from real_robot.ros2.nodes.policy import PolicySettings
from real_robot.ros2.nodes.sim import SimSettings
from real_robot.ros2.software_in_the_loop import Episodes, run_episodes
from real_robot.safety.safety import Limits, Safety
from real_robot.serving.chunk_executor import ChunkExecutor


def flown(run: Path, start: int) -> torch.Tensor:
    """Actions [T, A] of an episode under the same control loop without ROS."""
    robot = SimulatedRobot(load_environment(SimSettings(checkpoint=str(run))), lambda _: np.zeros(4))
    policy = load_policy(PolicySettings(checkpoint=str(run)))
    executor = ChunkExecutor(
        policy, robot.contract, execution=Execution.SYNCHRONOUS, clock=robot.clock, asynchronous=False
    )
    controller = Controller(robot, executor, Safety(robot, Limits(), robot.clock), robot.clock)
    robot.reset(starts=torch.tensor([start]))
    actions = []
    while robot.transition is None or not bool(robot.transition.done[0]):
        actions.append(controller.tick().action)
    return torch.tensor(np.array(actions), dtype=torch.float32)


def test_in_lock_step_every_episode_is_that_of_the_simulator_called_directly(hover: Path):
    episodes = 3
    environment = load_environment(SimSettings(checkpoint=str(hover)))
    policy = load_policy(PolicySettings(checkpoint=str(hover)))
    direct = evaluate(environment, policy, starts_per_task=episodes, first_start=40)
    found = run_episodes(Episodes(checkpoint=str(hover), episodes=episodes, first_start=40))
    assert found.result is not None
    assert found.latency_s is not None
    torch.testing.assert_close(found.result.steps, direct.steps)
    torch.testing.assert_close(found.result.success, direct.success)
    assert found.result.tasks == direct.tasks
    assert found.result.step_limit == direct.step_limit
    for start in (40, 41, 42):  # bit for bit: no message is lost, none comes twice, and nothing is held
        torch.testing.assert_close(found.actions[0, start], flown(hover, start), atol=0.0, rtol=0.0)
    assert len(found.latency_s) == int(direct.steps.sum())
