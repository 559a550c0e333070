"""Transitions of recorded episodes, by hand."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions, rewards_to_go
from embodied.errors import UserError
from embodied.world import OneProcess


def episodes() -> Episodes:
    """One episode of three steps that terminates, and one of two that a time limit ends."""
    made = []
    for rewards, terminated, offset in (([1.0, 2.0, 3.0], True, 0.0), ([0.0, 4.0], False, 10.0)):
        x = offset + torch.arange(len(rewards) + 1.0).unsqueeze(1)
        seen = TensorDict({"x": x}, [len(x)])
        reward, final = torch.tensor(rewards), seen[-1]
        made.append(Episodes.of(seen[:-1], x[:-1] / 100, reward=reward, terminated=terminated, final_observation=final))
    return Episodes.join(made)


def test_transitions_by_hand() -> None:
    view = Transitions(episodes(), executed=2, discount=0.5)
    returns = torch.tensor([2.75, 3.5, 3.0, 2.0, 4.0])
    assert torch.equal(rewards_to_go(episodes(), 0.5), torch.tensor([2.75, 3.5, 3.0, 2.0, 4.0]))
    assert view.scale == pytest.approx(float(returns.std()))
    batch = view.take(torch.arange(5), horizon=3)
    torch.testing.assert_close(batch["returns"], returns / view.scale)
    torch.testing.assert_close(batch["reward"], torch.tensor([2.0, 3.5, 3.0, 2.0, 4.0]) / view.scale)
    assert batch["carry"].tolist() == [0.25, 0.0, 0.0, 0.25, 0.5]
    # the third step is the last one; nothing was recorded after the end of an episode
    assert batch["next_valid"].tolist() == [[True, False], *[[False, False]] * 4]
    assert batch["next_observation", "x"][[0, 3, 4], 0].tolist() == [2.0, 12.0, 12.0]
    torch.testing.assert_close(batch["next_actions"][0, :, 0], torch.tensor([0.02, 0.02]))
    assert batch["valid"].tolist()[1] == [True, True, False]
    drawn = view.draw(400, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4}


def test_prefixes_by_hand() -> None:
    view = Transitions(episodes(), executed=2, discount=0.5)
    prefixes = view.prefixes(torch.arange(5))
    reward = [[1.0, 2.0], [2.0, 3.5], [3.0, 3.0], [0.0, 2.0], [4.0, 4.0]]
    torch.testing.assert_close(prefixes["reward"], torch.tensor(reward) / view.scale)
    # nothing follows the termination; whatever follows the time limit is not in the data
    assert prefixes["is_known"].tolist() == [[True, True]] * 4 + [[True, False]]
    assert prefixes["carry"].tolist()[:4] == [[0.5, 0.25], [0.5, 0.0], [0.0, 0.0], [0.5, 0.25]]
    assert prefixes["next_observation", "x"][[0, 3], :, 0].tolist() == [[1.0, 2.0], [11.0, 12.0]]
    assert prefixes["next_observation", "x"][4, 0].tolist() == [12.0]
    # without an observation before the second step, only prefixes of two actions begin and end at observations
    whole = episodes()
    kept = torch.tensor([0, 2, 3])
    sparse = replace(whole, observation=whole.observation[kept], first=whole.first[kept])
    is_known = Transitions(sparse, executed=2, discount=0.5).prefixes(torch.arange(3))["is_known"]
    assert is_known.tolist() == [[False, True], [True, True], [False, True]]


def test_rows_without_a_known_successor_are_not_drawn() -> None:
    view = Transitions(replace(episodes(), final_observation=None), executed=2, discount=0.5)
    assert set(view.draw(200, torch.Generator().manual_seed(0)).tolist()) == {0, 1, 2}


def test_data_sets_are_drawn_by_their_weights() -> None:
    weighted = replace(episodes(), dataset_index=torch.tensor([0, 1]), weights=torch.tensor([0.9, 0.1]))
    rows = Transitions(weighted, executed=1, discount=0.5).draw(4_000, torch.Generator().manual_seed(0))
    assert float((rows < 3).float().mean()) == pytest.approx(0.9, abs=0.02)


def test_a_minibatch_looks_up_the_episodes_of_its_own_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = replace(episodes(), dataset_index=torch.tensor([0, 1]), weights=torch.tensor([0.5, 0.5]))
    whole = Transitions(weighted, executed=1, discount=0.5)
    part = whole.of_episodes(torch.tensor([False, True]))
    monkeypatch.setattr(Episodes, "episode", property(lambda _: pytest.fail("looks up all observations")))
    for view, expected in ((whole, {0, 1, 2, 3, 4}), (part, {3, 4})):
        rows = view.draw(200, torch.Generator().manual_seed(0))
        assert set(rows.tolist()) == expected
        batch = view.take(rows, 1)
        assert batch["next_observation", "x"][rows == 4].unique().tolist() == [12.0]  # the final observation


def test_processes_share_a_draw_in_equal_parts() -> None:
    view = Transitions(episodes(), executed=1, discount=0.5)
    parts = [view.draw(6, torch.Generator().manual_seed(0), OneProcess(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).flatten(), view.draw(6, torch.Generator().manual_seed(0)))
    with pytest.raises(UserError, match="batch=5 is shared by 2 processes"):
        view.draw(5, torch.Generator(), OneProcess(0, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward": torch.tensor([1.0, 2.0, 3.0, torch.nan, 0.0])},
            r"unknown in 1 of 2 episodes of the demonstrations: add demonstration_rewards=success",
        ),
        ({"reward": torch.tensor([1.0, 2.0, 3.0, torch.inf, 0.0])}, "not a number in reward"),
        ({"actions": torch.full((5, 1), torch.nan)}, "not a number in action"),
        ({"observation": TensorDict({"x": torch.full((5, 1), torch.inf)}, [5])}, "not a number in x"),
        (
            {"final_observation": TensorDict({"x": torch.full((2, 1), torch.nan)}, [2])},
            "not a number in the final x",
        ),
        ({"reward": torch.zeros(5)}, "nothing to prefer"),
        (
            {"first": torch.tensor([0, 2, 3, 4]), "observation": TensorDict({"x": torch.zeros(4, 1)}, [4])},
            "an observation after every 1 steps",
        ),
    ],
)
def test_data_that_teach_nothing_are_refused_by_their_name(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Transitions(replace(episodes(), **changes), executed=1, discount=0.5)


def test_equal_returns_are_refused_though_they_deviate_by_rounding() -> None:
    x = TensorDict({"x": torch.zeros(1, 1)}, [1])
    equal = Episodes.join([Episodes.of(x, torch.zeros(1, 1), reward=torch.tensor([0.1])) for _ in range(50)])
    assert 0.0 < float(equal.reward.std()) < 1e-7  # by which rewards would be divided
    with pytest.raises(UserError, match="nothing to prefer"):
        Transitions(equal, executed=1, discount=0.5)
