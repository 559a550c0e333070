"""Demonstrations for a run from outside: a LeRobot dataset, recordings, or files of the task's benchmark."""

from __future__ import annotations

from pathlib import Path

from embodied.contract import Contract
from embodied.rollout.episodes import Episodes, EpisodeWriter, made_once
from embodied.task import PublishedTask, RecordedTask, Task
from real_robot.recording import driven, lerobot_reading


def demonstrations(source: str | Path, contract: Contract, run: Path, task: Task | None = None) -> Episodes:
    """All episodes of `source` as `contract` reads them, decoded once into the folder `run`, then read from there.

    Files in the format of the `task`'s benchmark are read by the task, LeRobot datasets of it by the task's convention.

    Raises:
        UserError: where there is nothing of the kind, or it does not serve the contract.
    """
    path = Path(source)
    if isinstance(task, RecordedTask) and task.demonstration_files(path):
        return task.recorded_demonstrations(path, run)
    convention = task.convention() if isinstance(task, PublishedTask) else None
    recordings = sorted(path.glob("*.mcap")) if path.is_dir() else [path]

    def decode(writer: EpisodeWriter) -> None:
        found = driven.read(recordings, contract) if recordings else lerobot_reading.read(path, contract, convention)
        for episode in found:
            writer.add(episode)

    return made_once(run, contract, {"source": str(source)}, decode)
