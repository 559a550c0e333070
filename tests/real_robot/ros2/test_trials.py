"""Trials on a robot, which sim_node plays in real time; the person's answers are written down here."""

import time
from pathlib import Path

import pytest
import torch

from real_robot.ros2.processes import Processes
from real_robot.ros2.trials import Trials, run_trials

LIMITS = "observation_timeout_s: 0.5\ncommand_timeout_s: 0.5\n"
PARAMETERS = """
/**:
  ros__parameters: {robot: simulation, use_sim_time: true, limits: LIMITS}
/**/policy_node:
  ros__parameters: {pace: measurement}
/**/safety_node:
  ros__parameters: {heartbeat_timeout_s: 5.0}
"""


def trials(hover: Path, directory: Path) -> Trials:
    (directory / "limits.yaml").write_text(LIMITS)
    (directory / "robot.yaml").write_text(PARAMETERS.replace("LIMITS", str(directory / "limits.yaml")))
    return Trials(str(hover), str(directory / "robot.yaml"), "hover", 2, 5, step_limit=200, control_dt_s=0.01)


def test_trials_are_recorded_and_judged(hover: Path, tmp_path: Path, monkeypatch):
    answers, asked = iter(["", "y", "", "n"]), []

    def ask(question: str, timeout_s: float | None) -> str | None:
        asked.append(question)
        if timeout_s is not None:
            time.sleep(min(timeout_s, 1.7))  # nodes need some of it to connect
            return None if len(asked) < 3 else ""
        return next(answers)

    (tmp_path / "sim").mkdir()
    with Processes(tmp_path / "sim") as robot:
        robot.start("sim_node", {"checkpoint": str(hover), "lock_step": False})
        robot.change("sim_node", "configure", "activate")
        monkeypatch.setenv("ROS_DOMAIN_ID", str(robot.domain))
        run = run_trials(trials(hover, tmp_path), tmp_path, ask)
    assert run.result is not None
    assert run.latency_s is not None
    assert run.result.success.tolist() == [[True, False]]
    assert sorted(run.actions) == [(0, 5), (0, 6)]
    assert all(50 < len(actions) <= 250 for actions in run.actions.values())
    assert "initial state 6" in asked[3]
    assert torch.isfinite(run.latency_s).all()
    with pytest.raises(ValueError, match="is there from earlier trials"):
        run_trials(trials(hover, tmp_path), tmp_path, ask)
