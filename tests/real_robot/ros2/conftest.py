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
    """A run whose policy hovers, trained by its own program."""
    import train

    run = tmp_path_factory.mktemp("hover") / "run"
    options = ["control=false", "video=false", "evaluation_starts=8", "evaluation_envs=8"]
    train.run(["task=quadrotor_hover", f"output={run}", *options])
    return run
