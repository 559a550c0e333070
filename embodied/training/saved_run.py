"""A run that is checkpointed as a whole, so that one that was killed continues with the numbers of one that was not."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from embodied import seeding
from embodied.command_line.config import check_continues
from embodied.evaluation.report import Report, resume_command
from embodied.policy import TrainablePolicy
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.saving.tree import copy_tree
from embodied.training.interrupt import Abandoned, GracefulStop, Stopped
from embodied.training.logging import Logger
from embodied.training.timing import PhaseTimer

log = logging.getLogger(__name__)

FREE = {
    "video", "wandb", "device", "threads", "checkpoint_every", "evaluation_envs", "resume", "output", "eval_only",
    "storage",
}  # fmt: skip
"""Options that may have another value when a run is resumed: no result depends on them, but for rounding."""

COUNTERS = (
    "iteration", "env_steps", "planned_env_steps", "episodes", "rl_gradient_steps", "rl_checkpoint", "cpu_s",
)  # fmt: skip
"""What a run counts; learners plan over `planned_env_steps`, asked for at first; RL ended in the `rl_checkpoint`."""


class Stage(Enum):
    """What a run does now."""

    START = "start"
    SFT = "sft"
    RL = "rl"
    CONTROL = "sft_control"
    DONE = "done"


class SavedRun:
    """What a run in `directory` has become so far; `record`, its composed configuration, is kept in checkpoints."""

    policy: TrainablePolicy
    stage: Stage
    stages: list[Stage]
    logger: Logger

    def __init__(self, directory: Path, record: dict[str, Any], env_steps: int, report: Report) -> None:
        self.directory, self.record, self.report, self.timer = directory, record, report, PhaseTimer()
        self.counters: dict[str, Any] = dict.fromkeys(COUNTERS, 0) | {"planned_env_steps": env_steps}
        self.before: dict[str, Any] = {}  # where RL and control start: SFT's learner, or a "policy" alone
        self.parts: dict[str, Any] = {}  # state of the stage's learner and collector
        self.rng: dict[str, Any] = {}  # of the global generators, when those were saved
        self.iteration_s = math.inf  # how long the last one took
        self._stop = GracefulStop()

    def _next(self) -> None:
        """Enter the stage that follows."""
        self.stage, self.parts = self.stages[self.stages.index(self.stage) + 1], {}
        self._save(self._snapshot({}))

    def _keep(self, parts: dict[str, Any], due: bool) -> None:
        """Save when `due`, or asked to stop: then leave.

        Raises:
            Stopped: when asked to.
        """
        if self._stop.requested:
            self._leave(self._snapshot(parts))
        if due:
            self._save(self._snapshot(parts))

    @contextmanager
    def _abandonable(self, parts: dict[str, Any]) -> Iterator[None]:
        """Asked to stop inside, leave with the state before: a resumed run repeats the body with the same numbers.

        Raises:
            Stopped: when asked to.
        """
        before = copy_tree(self._snapshot(parts))
        try:
            with self._stop.abandonable():
                yield
        except Abandoned:
            self._leave(before)

    def _leave(self, snapshot: dict[str, Any]) -> NoReturn:
        self._save(snapshot)
        raise Stopped(f"Stopped and saved. Continue with: {resume_command(self.directory)}")

    def _snapshot(self, parts: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds now, as a tree that shares memory with what it is of."""
        state = {
            "rng": seeding.rng_state(),
            "report": self.report.state_dict(),
            "wall_s": self.timer.seconds,
            "before": self.before,
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }
        counters = {**self.counters, "stage": self.stage.value, "log_rows": self.logger.rows}
        return {"policy": dict(self.policy.state_dict()), "counters": counters, "state": state}

    def _save(self, snapshot: dict[str, Any]) -> Path:
        with self.timer("checkpoint"):
            saved = Checkpoint(contract=self.policy.contract, config=self.record, **snapshot)
            return checkpoint.save(self.directory, saved, kept=snapshot["counters"]["rl_checkpoint"])

    @staticmethod
    def saved(directory: Path, record: dict[str, Any], env_steps: int) -> Checkpoint | None:
        """The newest checkpoint, if any; with more steps asked for than it has, that in which RL ended."""
        folder = directory / checkpoint.FOLDER
        if not folder.exists():
            return None
        saved = checkpoint.load(directory)
        check_continues(saved.config, record, FREE)
        if saved.counters["rl_checkpoint"] and env_steps > saved.counters["env_steps"]:
            saved = checkpoint.load(folder / f"{saved.counters['rl_checkpoint']:06d}")
        return saved

    def _restore(self, saved: Checkpoint) -> int:
        """Take up `saved`; returns the rows of the log that it knew."""
        saved.restore(self.policy)
        self.stage = Stage(saved.counters["stage"])
        self.counters = {name: saved.counters[name] for name in self.counters}
        self.report.load_state_dict(saved.state["report"])
        self.timer = PhaseTimer(saved.state["wall_s"])
        self.before, self.parts, self.rng = (saved.state[name] for name in ("before", "parts", "rng"))
        seeding.set_rng_state(self.rng)
        log.info(f"continuing {self.stage.value} at {self.counters['env_steps']:,} environment steps")
        return saved.counters["log_rows"]

    def _resume(self, parts: dict[str, Any]) -> None:
        """Take up `parts` in the middle of a stage; to build them may have drawn random numbers."""
        for name, state in self.parts.items():
            parts[name].load_state_dict(state)
        if self.parts:
            seeding.set_rng_state(self.rng)
        self.parts = {}
