"""Run that is checkpointed completely: after a kill it continues with the numbers of an uninterrupted run."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from embodied import seeding
from embodied.commands import typed
from embodied.errors import DivergedError, UserError
from embodied.placement.local import Processes
from embodied.policy import TrainablePolicy
from embodied.report.repeating import resume_command
from embodied.report.report import Report
from embodied.runtime.interrupt import Abandoned, GracefulStop, Stopped
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.saving.resume import FREE, check_continues
from embodied.saving.tree import copy_tree
from embodied.training.logging import Logger
from embodied.training.own_state import load, load_moved, moved_note, own_state
from embodied.training.timing import PhaseTimer

log = logging.getLogger(__name__)


COUNTERS = (
    "iteration",
    "env_steps",
    "planned_env_steps",
    "episodes",
    "offline_gradient_steps",
    "rl_gradient_steps",
    "rl_checkpoint",
    "cpu_s",
    "lost",
    "pushed",
    "takeovers",
    "human_steps",
    "lost_collectors",
    "dropped_rollouts",
)
"""Counters of a run; schedules use `planned_env_steps`, the first `env_steps`; `rl_checkpoint` is RL's last."""


DONE = "done"
"""Name that stands in place of a stage's once all are done."""


class SavedRun:
    """State of a run in `directory`; `record`, its composed configuration, is stored in checkpoints."""

    policy: TrainablePolicy
    stage: str
    """Name of the current stage."""
    stages: list[str]
    """Names of all stages in order, `DONE` at the end."""
    logger: Logger

    def __init__(
        self, directory: Path, record: dict[str, Any], env_steps: int, report: Report, world: Processes
    ) -> None:
        self.directory = directory
        self.record = record
        self.report = report
        self.timer = PhaseTimer()
        self.world = world
        self.counters: dict[str, Any] = dict.fromkeys(COUNTERS, 0) | {"planned_env_steps": env_steps}
        self.before: dict[str, Any] = {}  # state before the last stages: SFT's learner, or only a "policy"
        self.parts: dict[str, Any] = {}  # state of the stage's parts, if it is resumed
        self.rng: dict[str, Any] = {}  # states of the global generators at the last save
        self.own: dict[str, Any] | None = None  # saved state of this process, if it is not the first
        # environment steps of each change of the number of processes, with the old and the new number
        self.moves: list[list[int]] = []
        self.moved = False  # whether the number has changed with this resumption
        # duration of the stage's last step; infinite before the first
        self.step_s = math.inf
        self.step_cpu_s = 0.0
        self._stop = GracefulStop()

    def _next(self) -> None:
        """Enter the next stage."""
        self.stage = self.stages[self.stages.index(self.stage) + 1]
        self.step_s = math.inf
        self.save({})

    def aside(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy of `state` in CPU memory; with several processes, a copy of each process's part on its device."""
        return copy_tree(state, "cpu" if self.world.size == 1 else None)

    def _keep(self, parts: dict[str, Any], due: bool) -> None:
        """Save if `due` or if a stop was requested, which then ends the run.

        Raises:
            Stopped: if a stop was requested.
        """
        if self.anywhere(self._stop.requested):
            self._leave(self._snapshot(parts))
        if due:
            self.save(parts)

    def anywhere(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        return flag if self.world.size == 1 else bool(self.world.sum(torch.tensor(int(flag))))

    @contextmanager
    def abandonable(self, parts: dict[str, Any], changing: bool = True) -> Iterator[None]:
        """Context in which a requested stop abandons the body and saves the state from before it.

        A resumed run repeats the body with the same numbers. A body that is not `changing` the state needs no copy of
        it. With several processes, which can only save together, the last checkpoint stays the newest.

        Raises:
            Stopped: if a stop was requested.
        """
        before = self._snapshot(parts) if self.world.size == 1 else None
        # the snapshot shares memory with the parts, which the body changes
        before = copy_tree(before, "cpu") if changing else before
        try:
            with self._stop.abandonable():
                yield
        except Abandoned:
            if before is None:
                message = f"Stopped. Continue with: {self._resume_command()}"
                raise Stopped(message, self._stop.number) from None
            self._leave(before)

    @contextmanager
    def leaving(self, parts: dict[str, Any]) -> Iterator[None]:
        """Context of a step that raises Abandoned, with nothing changed, if a stop was requested while it waits.

        Raises:
            Stopped: then, once the state is saved.
        """
        try:
            yield
        except Abandoned:
            self._leave(self._snapshot(parts))

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        """Context that adds the last good checkpoint to the error if the training diverges in the body.

        Raises:
            DivergedError: with the last checkpoint, all of whose weights are finite.
        """
        try:
            yield
        except DivergedError as error:
            last = checkpoint.newest(self.directory)
            saved = f"the last good checkpoint is {last}: {typed('start_from', last or '')}"
            remedy = saved if last else "no checkpoint was saved yet"
            raise DivergedError(f"{error}; {remedy}") from error

    def _resume_command(self) -> str:
        return resume_command(self.directory, self.record.get("arguments", ()))

    def _leave(self, snapshot: dict[str, Any]) -> NoReturn:
        self._write_checkpoint(snapshot)
        raise Stopped(
            f"Stopped and saved. Continue with: {self._resume_command()}",
            self._stop.number,
        )

    def save(self, parts: dict[str, Any]) -> Path:
        """Write a checkpoint of all processes, in a stage with these `parts`, and return its path."""
        return self._write_checkpoint(self._snapshot(parts))

    def _snapshot(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Content of a checkpoint of all processes, as a tree that shares memory with the running parts."""
        others = self.world.gather(own_state(parts)) if self.world.size > 1 else []
        state = {
            "rng": seeding.rng_state(),
            "report": self.report.state_dict(),
            "wall_s": self.timer.seconds,
            "cpu_s": self.timer.cpu,
            "before": self.before,
            "parts": {name: part.state_dict() for name, part in parts.items()},
            **({"others": others} if others else {}),
            "moves": self.moves,
        }
        progress = {"stage": self.stage, "log_rows": self.logger.rows, "processes": self.world.size}
        counters = {**self.counters, **progress}
        return {"policy": dict(self.policy.state_dict()), "counters": counters, "state": state}

    def _write_checkpoint(self, snapshot: dict[str, Any]) -> Path:
        """Write `snapshot` and return its path."""
        with self.timer("checkpoint"):
            folder = self.directory / ".shards"
            self.world.lead(lambda: shutil.rmtree(folder, ignore_errors=True))
            # every process writes the shards of its own divided tensors; process 0 writes the rest
            snapshot, divided = self.world.write_divided(snapshot, folder)
            weights = {name: value for name, value in snapshot["policy"].items() if isinstance(value, torch.Tensor)}
            saved = Checkpoint(
                weights,
                self.policy.contract,
                self.record,
                snapshot["counters"],
                snapshot["state"],
                shards=folder if divided else None,
            )
            rl_checkpoint = snapshot["counters"]["rl_checkpoint"]
            return Path(self.world.lead(lambda: str(checkpoint.save(self.directory, saved, protected=rl_checkpoint))))

    @staticmethod
    def saved(directory: Path, record: dict[str, Any], env_steps: int) -> Checkpoint | None:
        """Newest checkpoint, None if there is none; the one at the end of RL if more steps are now requested."""
        folder = directory / checkpoint.FOLDER
        if not folder.exists():
            return None
        saved = checkpoint.load(directory)
        if not saved.state:
            use = typed("start_from", directory)
            raise UserError(f"{directory} holds a policy alone, which no run continues: use {use}")
        check_continues(saved.config, record, FREE)
        if saved.counters["rl_checkpoint"] and env_steps > saved.counters["env_steps"]:
            saved = checkpoint.load(folder / f"{saved.counters['rl_checkpoint']:06d}")
        return saved

    def _restore(self, saved: Checkpoint) -> int:
        """Continue from `saved`, and return its number of log rows."""
        saved.restore(self.policy)
        self.stage = saved.counters["stage"]
        self.counters = {name: saved.counters.get(name, 0) for name in self.counters}
        self.report.load_state_dict(saved.state["report"])
        self.timer = PhaseTimer(saved.state["wall_s"], saved.state.get("cpu_s"))
        self.before, self.parts, self.rng = (saved.state[name] for name in ("before", "parts", "rng"))
        self.moves, num_before = saved.state.get("moves", []), saved.counters.get("processes", 1)
        self.moved = num_before != self.world.size
        if self.moved:
            self.moves = [*self.moves, [self.counters["env_steps"], num_before, self.world.size]]
        elif self.world.rank:
            own_state = self.own = saved.state["others"][self.world.rank - 1]
            self.rng = own_state["rng"]
        if not self.moved:
            seeding.set_rng_state(self.rng)
        self.report.notes += [moved_note(*move) for move in self.moves]
        if self.moved:
            log.warning(self.report.notes[-1])
        log.info(f"continuing {self.stage} at {self.counters['env_steps']:,} environment steps")
        return saved.counters["log_rows"]

    def _resume(self, parts: dict[str, Any]) -> None:
        """Restore `parts` in the middle of a stage, and the generators.

        The generators come last, because building parts draws random numbers.
        """
        for name, state in self.parts.items():
            if self.moved:
                load_moved(parts[name], state)
            else:
                load(parts[name], state, self.own)
        if self.parts and not self.moved:
            seeding.set_rng_state(self.rng)
        self.parts = {}
        self.own = None
        self.moved = False
