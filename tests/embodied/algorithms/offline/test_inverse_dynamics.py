"""Unknown actions, predicted by an inverse-dynamics model from the episodes with known ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied.algorithms.offline.inverse_dynamics import _windows, labelled
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.open_loop import split
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded

CONTRACT = Reach(1).contract


def without_actions(episodes: Episodes, first: int) -> Episodes:
    """The `episodes`, of which those from `first` on have unknown actions."""
    actions = episodes.actions.clone()
    actions[int(episodes.ends[first - 1]) :] = torch.nan
    return replace(episodes, actions=actions)


@pytest.mark.parametrize("final", [True, False])
def test_predicts_unknown_actions(tmp_path: Path, final: bool) -> None:
    episodes = recorded(final=final)
    first = int(episodes.ends[19])
    made, note = labelled(without_actions(episodes, 20), CONTRACT, 200, 0, tmp_path)
    error = (made.actions - episodes.actions)[first:].square()
    last = torch.zeros(len(error), dtype=torch.bool)
    last[episodes.ends[20:] - 1 - first] = True
    # positions after all steps but the last follow from the action; after the last only if they were recorded
    assert error[~last].mean().sqrt() < 0.1 * episodes.actions.std()
    assert (error[last].mean().sqrt() < 0.1 * episodes.actions.std()) == final
    assert torch.equal(made.actions[:first], episodes.actions[:first])
    assert f"Actions of {len(error)} of {episodes.steps} recorded steps are unknown" in note
    again, same_note = labelled(without_actions(episodes, 20), CONTRACT, 200, 1, tmp_path)
    assert torch.equal(again.actions, made.actions)  # read from the run's folder
    assert same_note == note


def test_windows_by_hand() -> None:
    episodes = recorded(2, final=False)
    end = int(episodes.ends[0])
    position = episodes.observation["position"][:, 0]
    inputs = _windows(episodes, CONTRACT)
    assert inputs.shape == (episodes.steps, 4 * 2 + 1)
    # s_{t-2}, s_{t-1}, s_t, s_{t+1}, each with its position and task, within the episode
    for step, rows in ((end, [end, end, end, end + 1]), (end - 1, [end - 3, end - 2, end - 1, end - 1])):
        assert inputs[step, :8:2].tolist() == position[rows].tolist()
        assert inputs[step, 8] == float(step != end - 1)
    final = recorded(2)
    assert final.final_observation is not None
    assert _windows(final, CONTRACT)[end - 1, 6:].tolist() == [
        *final.final_observation["position"][0].tolist(),
        0.0,
        1.0,
    ]


def test_episodes_with_unknown_actions_are_not_held_out_and_refused_without_labels(tmp_path: Path) -> None:
    episodes = without_actions(replace(recorded(), success=torch.full((60,), -1, dtype=torch.int8)), 40)
    assert episodes.unlabelled.tolist() == [False] * 40 + [True] * 20
    trained, held_out = split(episodes, 0.5)
    assert not held_out.unlabelled.any()
    assert int(trained.unlabelled.sum()) == 20
    with pytest.raises(UserError, match=r"actions are unknown in 20 of 60 episodes: add label_actions=2000"):
        labelled(episodes, CONTRACT, 0, 0, tmp_path)
    whole = recorded()
    assert labelled(whole, CONTRACT, 0, 0, tmp_path) == (whole, "")
    assert "label_actions predicts none" in labelled(whole, CONTRACT, 5, 0, tmp_path)[1]
    with pytest.raises(UserError, match="at least 2 episodes with known actions"):
        labelled(without_actions(episodes, 1), CONTRACT, 5, 0, tmp_path)
    sparse = replace(episodes, observation=episodes.observation[::2], first=episodes.first[::2])
    with pytest.raises(UserError, match="an observation before every step"):
        labelled(sparse, CONTRACT, 5, 0, tmp_path)
