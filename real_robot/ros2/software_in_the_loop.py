"""Runs a policy in its simulator over real ROS 2 messages: sim_node, safety_node and policy_node as processes.

`python -m real_robot.ros2.software_in_the_loop checkpoint=RUN` measures it on evaluate.py's numbered initial states. In
lock-step, the default, the policy gets the same observations as in the simulator called directly.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING, OmegaConf

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.configuration import Configuration, NonNegativeInt, PositiveInt
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult
from embodied.runtime.progress import Progress
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from real_robot.sim_to_real.results import BackEndRun

log = logging.getLogger("embodied")
HEARTBEAT_TIMEOUT_S = 30.0
"""Long, because a process on a busy machine may be delayed, and a hold would then not be the policy's fault."""
EPISODE_S = 600.0
PATIENCE_S = 30.0
"""Time for nodes to connect."""


@dataclass
class Episodes(Configuration):
    """Options: run initial states `first_start` to `first_start + episodes - 1` of each of `tasks`.

    Attributes:
        checkpoint: a run of train.py, or one of its checkpoints.
        episodes: number of episodes per task.
        first_start: number of the first initial state.
        tasks: names of tasks, or their numbers in the suite, for tasks with a suite; a simulator runs one at a time.
        distribution: distribution of initial states; "" is the task's first.
        lock_step: whether the simulator waits for every command, or runs in real time.
        output: a JSON file for the summary; "": none.
    """

    checkpoint: str = MISSING
    episodes: PositiveInt = 50
    first_start: NonNegativeInt = 0
    tasks: list[str] = field(default_factory=list)
    distribution: str = ""
    lock_step: bool = True
    output: str = ""


def run_episodes(request: Episodes, directory: Path | None = None) -> BackEndRun:
    """Launch the nodes, run the episodes, end the nodes; logs go to `directory`.

    Raises:
        UserError: if rclpy is not installed, or a node fails.
    """
    try:
        from real_robot.ros2.processes import Processes
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; run this in .venv-ros (`make ros`)") from error
    outcomes = []
    episodes = request.episodes * max(1, len(request.tasks))
    with Processes(directory) as nodes, Progress("ros2", episodes, "episode") as bar:
        _start_controller(nodes, request)
        simulator = {"checkpoint": request.checkpoint, "lock_step": request.lock_step, "listeners": 2}
        nodes.start("sim_node", simulator | {"distribution": request.distribution, "overrides": ""})
        listener = _Listener(nodes)
        for task in request.tasks or [None]:
            nodes.set("sim_node", overrides="" if task is None else f"task.tasks=[{task}]")
            nodes.change("sim_node", "configure", "activate")
            for start in range(request.first_start, request.first_start + request.episodes):
                outcomes.append(listener.run(start))
                bar.update()
            nodes.change("sim_node", "deactivate", "cleanup")
    return _collected(outcomes, max(1, len(request.tasks)))


def _start_controller(nodes: Any, request: Episodes) -> None:  # noqa: ANN401 - Processes, of a package that is optional
    from real_robot.firmware.record import read_contract

    timeout_s = 5.0 * read_contract(request.checkpoint).control_dt_s
    limits = nodes.directory / "limits.yaml"
    limits.write_text(
        json.dumps({"observation_timeout_s": timeout_s, "command_timeout_s": timeout_s}), encoding="utf-8"
    )
    common = {"checkpoint": request.checkpoint, "use_sim_time": True, "limits": str(limits)}
    timeouts = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "liveliness_s": HEARTBEAT_TIMEOUT_S}
    nodes.start("safety_node", common | timeouts)
    nodes.start("policy_node", common | {"pace": "measurement"})
    for name in ("safety_node", "policy_node"):
        nodes.change(name, "configure", "activate")


class _Listener:
    """Begins episodes and receives their outcomes."""

    def __init__(self, nodes: Any) -> None:  # noqa: ANN401 - Processes
        from diagnostic_msgs.msg import DiagnosticStatus
        from std_msgs.msg import Float64MultiArray

        self.nodes = nodes
        self.outcomes: list[tuple[str, dict[str, float]]] = []
        self.traces: list[torch.Tensor] = []
        node = nodes.node
        node.create_subscription(DiagnosticStatus, "/sim_node/episode", self._end, 10)
        node.create_subscription(Float64MultiArray, "/sim_node/trace", self._trace, 10)

    def run(self, start: int) -> tuple[str, dict[str, float], torch.Tensor]:
        """Run the episode from initial state `start`; returns the task's name, outcomes by name and rows [T, 1 + A]."""
        self.outcomes.clear()
        self.traces.clear()
        self.nodes.set("sim_node", start=start)
        self.nodes.trigger("/policy_node/reset")
        self.nodes.trigger("/sim_node/reset", PATIENCE_S)
        self.nodes.wait(lambda: bool(self.outcomes and self.traces), f"the end of episode {start}", EPISODE_S)
        task, values = self.outcomes[0]
        assert values["start"] == start, f"expected the outcome of start {start}, got {values}"
        return task, values, self.traces[0].view(int(values["steps"]), -1)

    def _end(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        self.outcomes.append((message.name, {entry.key: float(entry.value) for entry in message.values}))

    def _trace(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        self.traces.append(torch.tensor(message.data, dtype=torch.float64))


def _collected(outcomes: Sequence[tuple[str, dict[str, float], torch.Tensor]], tasks: int) -> BackEndRun:
    """Collect the episodes' outcomes in arrays [tasks, episodes], with actions and latencies from their rows."""

    def grid(name: str) -> torch.Tensor:
        return torch.tensor([values.get(name, math.nan) for _, values, _ in outcomes], dtype=torch.float64).view(
            tasks, -1
        )

    metrics = sorted({name for _, values, _ in outcomes for name in values if name.startswith("metric.")})
    starts = grid("start").long()
    result = EvaluationResult(
        tuple(dict.fromkeys(task for task, _, _ in outcomes)),
        grid("success") > 0.5,
        grid("steps").long(),
        int(outcomes[0][1]["step_limit"]),
        {name.removeprefix("metric."): grid(name) for name in metrics},
    )
    episodes = [(task, int(start)) for task, row in enumerate(starts) for start in row]
    hold_steps = sum(int(trace[:, 0].isnan().sum()) for _, _, trace in outcomes)
    if hold_steps:
        log.warning(f"the robot held by itself for {hold_steps} of {int(grid('steps').sum())} control steps")
    actions = {episode: trace[:, 1:].float() for episode, (_, _, trace) in zip(episodes, outcomes, strict=True)}
    latency_s = torch.cat([trace[:, 0] for _, _, trace in outcomes])
    return BackEndRun("ros2", result, actions, latency_s=latency_s[latency_s.isfinite()])


def run(arguments: list[str]) -> None:
    """Measure, print the summary, and write the output."""
    options, _ = compose(Episodes, "software_in_the_loop", arguments, {})
    back_end = run_episodes(options)
    assert back_end.result is not None
    assert back_end.latency_s is not None
    quantiles = back_end.latency_s.quantile(torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)).tolist()
    record = back_end.result.summary() | {"latency_s": dict(zip(("p50", "p99", "max"), quantiles, strict=True))}
    log.info(json.dumps(record, indent=2))
    if options.output:
        with complete_or_absent(Path(options.output)) as temporary:
            temporary.write_text(dumps_rows(record), encoding="utf-8")


def describe(_: list[str]) -> str:
    """Describe the options."""
    return f"{__doc__}\n{OmegaConf.to_yaml(OmegaConf.structured(Episodes))}"


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:]))
