"""Recorded episodes for a run under a delay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import ACTION_PREFIX, Contract
from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.errors import UserError
from real_robot.recording.demonstrations import demonstrations
from tests.embodied.reach import Reach

PLAIN = Reach(1).contract


def folder(path: Path, contract: Contract) -> Path:
    """Folder with one episode of actions 0, 0.1, 0.2 and 0.2."""
    actions = torch.tensor([[0.0], [0.1], [0.2], [0.2]])
    parts = {key: torch.zeros(4, *spec.shape) for key, spec in contract.observation.items()}
    with EpisodeWriter(path, contract) as writer:
        writer.add(Episodes.of(TensorDict(parts, [4]), actions))
    return path


def test_a_data_set_is_read_with_the_prefix_of_each_observation(tmp_path: Path) -> None:
    source = folder(tmp_path / "recorded", PLAIN)
    episodes = demonstrations(source, PLAIN.delayed(2), tmp_path / "run")
    assert episodes.actions.flatten().tolist() == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert episodes.observation[ACTION_PREFIX][:2].flatten().tolist() == pytest.approx([0.0, 0.1, 0.1, 0.2])
    again = demonstrations(source, PLAIN.delayed(2), tmp_path / "run")  # the run's index is that of the recording
    assert torch.equal(again.actions, episodes.actions)


def test_episodes_that_were_decided_under_a_delay_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "collected", PLAIN.delayed(2))
    with pytest.raises(UserError, match="executed 2 steps later"):
        demonstrations(source, PLAIN, tmp_path / "run")
