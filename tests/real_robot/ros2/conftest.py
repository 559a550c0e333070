"""Tests over real ROS 2 messages. Without rclpy they are skipped, but where CI_ROS=required they fail.

Those in the folders inside need no rclpy.
"""

import importlib.util
import os
from pathlib import Path

import pytest

HAVE = importlib.util.find_spec("rclpy") is not None
if os.environ.get("CI_ROS") == "required" and not HAVE:
    raise RuntimeError("CI_ROS=required, but rclpy is not installed; run these tests with `make test-ros`")
collect_ignore_glob = [] if HAVE else ["test_*.py"]


@pytest.fixture(scope="session")
def hover(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy hovers, trained by its own program: without what makes that take long."""
    nominal = ["task.nominal=true", "env_steps=425_000", "algorithm.learning_rate=7e-3"]
    few = ["control=false", "evaluation_starts=8", "evaluation_envs=8"]
    return _trained(tmp_path_factory, "quadrotor_hover", few + nominal)


@pytest.fixture(scope="session")
def navigating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of vehicle_navigate whose policy has hardly been trained."""
    small = ["env_steps=256", "num_envs=8", "evaluation_starts=1", "evaluation_envs=1", "task.step_limit=40"]
    return _trained(tmp_path_factory, "vehicle_navigate", small)


def _trained(folders: pytest.TempPathFactory, task: str, options: list[str]) -> Path:
    import train

    run = folders.mktemp(task) / "run"
    train.run([f"task={task}", f"output={run}", "video=false", *options])
    return run
