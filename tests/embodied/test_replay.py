"""Replay keeps successful chunks only, across rollout borders, with the actions that were executed."""

import torch
from tensordict import TensorDict

from embodied.replay import ChunkReplay, EpisodeAssembler
from embodied.rollout import Collector
from tests.embodied.reach import Reach
from tests.embodied.test_rollout import Constant


def assembled(split: list[int], action: float = -0.1) -> TensorDict:
    env = Reach(1, tasks=1, horizon=3)
    collector, episodes = Collector(env, Constant(env, action), torch.Generator()), EpisodeAssembler(1, 3)
    found = [episodes.add(collector.collect(decisions)) for decisions in split]
    return torch.cat([chunks for chunks in found if chunks is not None])


def test_successful_episodes_become_chunks() -> None:
    # start 0 (.3) succeeds after 3 steps; start 1 (-.35) fails; start 2 (.4) succeeds after 4
    chunks = assembled([8])
    torch.testing.assert_close(chunks["observation", "position"].flatten(), torch.tensor([0.3, 0.1, 0.4, 0.2]))
    assert chunks["valid"].tolist() == [[True] * 3, [True, False, False], [True] * 3, [True, True, False]]
    torch.testing.assert_close(chunks["actions"], torch.full((4, 3, 1), -0.1))


def test_rollout_borders_do_not_matter() -> None:
    whole, parts = assembled([8]), assembled([1, 3, 1, 3])
    assert (whole == parts).all()


def test_of_more_rows_than_fit_the_last_are_held() -> None:
    replay = ChunkReplay(3)
    replay.add(TensorDict({"x": torch.arange(7)}, batch_size=[7]))
    assert replay.rows["x"].sort().values.tolist() == [4, 5, 6]


def test_ring_overwrites_the_oldest() -> None:
    replay = ChunkReplay(3)
    for value in range(5):
        replay.add(TensorDict({"x": torch.tensor([value])}, batch_size=[1]))
    drawn = replay.sample(200, torch.Generator().manual_seed(0))["x"]
    assert len(replay) == 3
    assert set(drawn.tolist()) == {2, 3, 4}
    copy = ChunkReplay(3)
    copy.load_state_dict(replay.state_dict())
    for each in (replay, copy):
        each.add(TensorDict({"x": torch.tensor([9])}, batch_size=[1]))
    draws = [each.sample(50, torch.Generator().manual_seed(1))["x"].tolist() for each in (replay, copy)]
    assert draws[0] == draws[1]
