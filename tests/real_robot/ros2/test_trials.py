"""Trials on a robot, simulated by sim_node in real time, with scripted answers of a person."""

from pathlib import Path

import pytest
import torch
from diagnostic_msgs.msg import DiagnosticArray

from real_robot.ros2.processes import Processes
from real_robot.ros2.trials import Trials, run_trials

LIMITS = "observation_timeout_s: 0.5\ncommand_timeout_s: 0.5\n"
SAFETY = "/safety_node: safety"
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
    answers, asked, passed = iter(["", "y", "", "n"]), [], []

    def hear(message: DiagnosticArray) -> None:
        for status in message.status:
            passed.extend(int(v.value) for v in status.values if (status.name, v.key) == (SAFETY, "passed"))

    def ask(question: str, timeout_s: float | None) -> str | None:
        asked.append(question)
        if timeout_s is not None:  # a busy machine takes longer for as many commands
            before = passed[-1]
            robot.wait(lambda: passed[-1] > before + 50, "fifty commands")
            return None if len(asked) < 3 else ""
        passed.clear()
        robot.wait(lambda: bool(passed), "a report of the commands so far")
        return next(answers)

    (tmp_path / "sim").mkdir()
    with Processes(tmp_path / "sim") as robot:
        robot.node.create_subscription(DiagnosticArray, "/diagnostics", hear, 50)
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
    with pytest.raises(ValueError, match="exists from earlier trials"):
        run_trials(trials(hover, tmp_path), tmp_path, ask)
