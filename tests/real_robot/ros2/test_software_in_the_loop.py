"""The same policy over ROS 2 and in the simulator called directly."""

from pathlib import Path

import torch

from embodied.evaluation import evaluate
from embodied.sim_to_real import ActionLog
from real_robot.ros2.embodied_ros2.parts import load_environment, load_policy
from real_robot.ros2.policy_node import PolicySettings
from real_robot.ros2.sim_node import SimSettings
from real_robot.ros2.software_in_the_loop import Episodes, run_episodes


def test_in_lock_step_every_episode_is_that_of_the_simulator_called_directly(hover: Path):
    log, episodes = ActionLog(), 3
    environment = load_environment(SimSettings(checkpoint=str(hover)))
    policy = load_policy(PolicySettings(checkpoint=str(hover)))
    direct = evaluate(environment, policy, starts_per_task=episodes, first_start=40, watch=log)
    found = run_episodes(Episodes(checkpoint=str(hover), episodes=episodes, first_start=40))
    assert found.result is not None
    assert found.latency_s is not None
    torch.testing.assert_close(found.result.steps, direct.steps)
    torch.testing.assert_close(found.result.success, direct.success)
    assert found.result.tasks == direct.tasks
    assert found.result.step_limit == direct.step_limit
    expected = {(0, start): log.episodes()[0, start] for start in (40, 41, 42)}
    for episode, actions in expected.items():
        torch.testing.assert_close(found.actions[episode], actions, atol=1e-3, rtol=0.0)  # rounding, 500 steps on
    assert len(found.latency_s) == int(direct.steps.sum())
