"""Episodes of unknown outcome end where a classifier detects the success; the verdict of a person remains."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.data.episodes import FAILED, SUCCEEDED, Episodes
from embodied.data.judging import judged
from embodied.data.pictures import Pictures, encode_all


def episode(begin: float, length: int, success: bool | None, *, pictures: bool = False, **options) -> Episodes:
    """Positions begin, begin + 1, ..., with the final one at begin + length."""
    x = begin + torch.arange(length + 1.0)[:, None]
    observation = TensorDict({"x": x}, [length + 1])
    final = observation[-1].clone()
    encoded = None
    if pictures:
        frames = (x.numpy()[:, :, None, None] * np.ones((1, 4, 4, 3))).astype(np.uint8)
        encoded = Pictures.of({"front": encode_all(frames[:-1])})
        final["front"] = torch.from_numpy(frames[-1].copy())
    actions = torch.arange(float(length))[:, None]
    return Episodes.of(observation[:-1], actions, success=success, final_observation=final, pictures=encoded, **options)


def from_4(observation: TensorDict) -> int | None:
    """First position of at least 4."""
    reached = observation["x"][:, 0] >= 4
    return int(reached.long().argmax()) if bool(reached.any()) else None


@pytest.mark.parametrize("pictures", [False, True])
def test_an_unknown_episode_ends_at_the_detected_success(pictures: bool):
    (result,) = judged(episode(0, 8, None, pictures=pictures), from_4)
    # the observation 4 is the one after the action 3
    assert result.actions.flatten().tolist() == [0, 1, 2, 3]
    assert result.reward.tolist() == [0, 0, 0, 1]
    assert result.success.tolist() == [SUCCEEDED]
    assert result.terminated.tolist() == [True]
    assert result.ends.tolist() == [4]
    assert result.observation["x"].flatten().tolist() == [0, 1, 2, 3]
    assert result.final_observation["x"].flatten().tolist() == [4]
    if pictures:
        assert result.chunks(torch.arange(4), 1)["observation"]["front"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
        assert result.final_observation["front"][0, 0, 0].tolist() == [4, 4, 4]


def test_a_success_in_the_last_observation_keeps_the_whole_episode():
    (result,) = judged(episode(0, 4, None), from_4)
    assert result.reward.tolist() == [0, 0, 0, 1]
    assert (result.success.tolist(), result.terminated.tolist()) == ([SUCCEEDED], [True])


def test_without_a_detection_it_failed():
    (result,) = judged(episode(0, 3, None), from_4)
    assert result.reward.tolist() == [0, 0, 0]
    assert (result.success.tolist(), result.terminated.tolist()) == ([FAILED], [False])


def test_a_success_from_the_beginning_is_that_of_the_first_action():
    (result,) = judged(episode(6, 3, None), from_4)
    assert result.reward.tolist() == [1]
    assert result.final_observation["x"].flatten().tolist() == [7]


def test_what_a_person_judged_or_recorded_remains():
    own = torch.tensor([0.5, 0.25])
    data = [episode(0, 8, False), episode(0, 2, True), episode(0, 2, None, reward=own)]
    failed, succeeded, recorded = judged(Episodes.join(data), from_4)
    assert failed.reward.tolist() == [0.0] * 8
    assert failed.success.tolist() == [FAILED]
    assert succeeded.reward.tolist() == [0, 1]
    assert recorded.reward.tolist() == own.tolist()
    assert recorded.success.tolist() == [FAILED]


def test_an_observation_may_be_that_of_a_chunk():
    observations = TensorDict({"x": torch.tensor([[0.0], [2.0], [4.0]])}, [3])
    sparse = Episodes.of(observations, torch.zeros(6, 1), success=None, first=torch.tensor([0, 2, 4]))
    (result,) = judged(sparse, from_4)
    assert result.reward.tolist() == [0, 0, 0, 1]
    assert result.first.tolist() == [0, 2]
    assert result.final_observation is None
