"""Trials of a policy on a real robot over ROS 2: a person sets up each trial and judges its outcome.

safety_node and policy_node run with the parameters of a launch file; every trial is recorded.
"""

from __future__ import annotations

import logging
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult
from real_robot.recording.recording import Recording
from real_robot.sim_to_real.back_ends import written
from real_robot.sim_to_real.results import BackEndRun

if TYPE_CHECKING:
    from real_robot.ros2.processes import Processes

log = logging.getLogger("embodied")
RECORDING = "trials.mcap"
Ask = Callable[[str, float | None], str | None]
"""Shows a person a line and returns the answer; None without an answer within the given seconds (None: wait)."""


@dataclass(frozen=True)
class Trials:
    """Trials from initial states `first_start` to `first_start + episodes - 1` of `task`, each at most `limit_s` long.

    `parameters` is a parameter file such as launch/config/arm.yaml, which names the robot; `step_limit` is the limit in
    the simulator.
    """

    checkpoint: str
    parameters: str
    task: str
    episodes: int
    first_start: int
    step_limit: int
    control_dt_s: float

    @property
    def limit_s(self) -> float:
        """Duration of a trial that nobody ends, s."""
        return self.step_limit * self.control_dt_s


def run_trials(trials: Trials, directory: Path, ask: Ask) -> BackEndRun:
    """Run the trials in this process's ROS domain; the recording and the nodes' logs are written into `directory`.

    Raises:
        UserError: if rclpy is not installed, a file is missing or exists already, or a node fails.
    """
    try:
        from real_robot.ros2.processes import Processes
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; run this in .venv-ros (`make ros`)") from error
    if not Path(trials.parameters).is_file():
        raise UserError(f"no parameter file {trials.parameters!r}; expected one such as launch/config/arm.yaml")
    recording = directory / RECORDING
    if recording.exists():
        raise UserError(f"{recording} exists from earlier trials; move it away")
    with Processes(directory, shared=True) as nodes:
        common = {"checkpoint": trials.checkpoint}
        nodes.start("safety_node", common, files=[trials.parameters])
        nodes.start("policy_node", common | {"recording": str(recording)}, files=[trials.parameters])
        nodes.change("safety_node", "configure", "activate")
        nodes.change("policy_node", "configure")
        outcomes = [_trial(nodes, trials, start, ask) for start in _starts(trials)]
        nodes.change("policy_node", "cleanup")  # finishes the recording
    actions, latency_s = written(Recording(recording))
    success = torch.tensor([[won for won, _ in outcomes]])
    steps = torch.tensor([[round(duration_s / trials.control_dt_s) for _, duration_s in outcomes]])
    result = EvaluationResult((trials.task,), success, steps, trials.step_limit)
    if len(actions) != trials.episodes:  # the disk was too slow, but the outcomes are still useful
        log.warning(f"{recording} has {len(actions)} of {trials.episodes} trials: commands are not compared")
        actions = []
    actions_by_start = {(0, start): episode for start, episode in zip(_starts(trials), actions, strict=False)}
    return BackEndRun("robot", result, actions_by_start, latency_s=latency_s)


def _starts(trials: Trials) -> range:
    return range(trials.first_start, trials.first_start + trials.episodes)


def _trial(nodes: Processes, trials: Trials, start: int, ask: Ask) -> tuple[bool, float]:
    """Run one trial; returns whether it succeeded, and its duration in s."""
    ask(f"{trials.task}, initial state {start}: set it up, keep clear of the robot, press Enter to begin", None)
    nodes.change("policy_node", "activate")
    begin_s = time.monotonic()
    ask(
        f"running; press Enter when it is over; it ends by itself after {trials.limit_s:.0f} s",
        trials.limit_s,
    )
    nodes.change("policy_node", "deactivate")  # the robot holds
    duration_s = time.monotonic() - begin_s
    while (answer := ask("did it succeed? y or n", None)) not in ("y", "n"):
        continue
    return answer == "y", min(duration_s, trials.limit_s)


def console(question: str, timeout_s: float | None) -> str | None:
    """Ask on the terminal.

    Raises:
        UserError: if nobody can answer.
    """
    log.info(question)
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return None
    if not (line := sys.stdin.readline()):
        raise UserError("trials on a robot need a person at the terminal; standard input has ended")
    return line.strip().lower()
