"""Demonstrations for a run from outside: a LeRobot dataset, a recording, or a folder of recordings."""

from __future__ import annotations

from pathlib import Path

from embodied.contract import Contract
from embodied.rollout.episodes import Episodes, EpisodeWriter, made_once
from real_robot.recording import driven, lerobot_reading


def demonstrations(source: str | Path, contract: Contract, run: Path) -> Episodes:
    """All episodes of `source` as `contract` reads them, decoded once into the folder `run`, then read from there.

    Raises:
        UserError: where there is nothing of the kind, or it does not serve the contract.
    """
    path = Path(source)
    recordings = sorted(path.glob("*.mcap")) if path.is_dir() else [path]

    def decode(writer: EpisodeWriter) -> None:
        found = driven.read(recordings, contract) if recordings else lerobot_reading.read(path, contract)
        for episode in found:
            writer.add(episode)

    return made_once(run, contract, {"source": str(source)}, decode)
