"""Frames are labelled as counted by hand, and no episode is in two parts of a split."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import FAILED, SUCCEEDED, Episodes
from embodied.data.success_frames import (
    FINAL,
    TEST,
    TRAIN,
    VALIDATION,
    Frames,
    LabelConfig,
    check_parts,
    counts,
    labelled_frames,
    split,
)
from embodied.errors import UserError
from embodied.report.success_classifier import worst_errors

P, N, U = 1, 0, -1


def episode(begin: float, length: int, success: bool | None, *, final: bool = True, marks=None) -> Episodes:
    """Episode of positions begin, begin + 1, ..., of which the final one is at begin + length."""
    x = begin + torch.arange(length + 1.0)[:, None]
    observation = TensorDict({"x": x}, [length + 1])
    last = observation[-1] if final else None
    made = Episodes.of(observation[:-1], torch.zeros(length, 1), success=success, final_observation=last)
    signals = None if marks is None else TensorDict({"mark": torch.tensor(marks)}, [length])
    return replace(made, signals=signals)


def test_labels_counted_by_hand():
    config = LabelConfig(positive_last=2, gap=3)
    data = Episodes.join([episode(0, 7, True), episode(100, 3, False), episode(200, 5, None), episode(300, 2, True)])
    frames, notes = labelled_frames(data, config, "logs")
    # 8 frames with the final one: 3 negative, a gap of 3, the last 2 positive; the third episode is left out
    assert frames.label.tolist() == [N, N, N, U, U, U, P, P] + [N] * 4 + [U, P, P]
    assert frames.episode.tolist() == [0] * 8 + [1] * 4 + [2] * 3
    assert frames.names == ("episode 0 of logs", "episode 1 of logs", "episode 3 of logs")
    assert notes == ["logs: of 4 episodes 1 of unknown outcome are left out."]
    assert frames.take(torch.arange(len(frames)))["x"].flatten().tolist() == [
        *range(8),
        *range(100, 104),
        *range(300, 303),
    ]
    assert frames.take(torch.tensor([14, 0, 7, 11]))["x"].flatten().tolist() == [302, 0, 7, 103]
    assert (frames.row == FINAL).nonzero().flatten().tolist() == [7, 11, 14]


def strided(begin: float) -> Episodes:
    """Episode of ten steps with an observation before every fourth, as pictures are recorded."""
    whole = episode(begin, 10, True)
    return replace(whole, observation=whole.observation[::4], first=torch.tensor([0, 4, 8]))


def test_frames_of_recordings_with_fewer_observations_than_steps_have_their_own_times():
    config = LabelConfig(positive_last=1, gap=0)
    logs = [Episodes.join([strided(0), strided(100)]), Episodes.join([episode(200, 2, True, final=False)])]
    frames = Frames.join([labelled_frames(each, config, "logs")[0] for each in logs])
    assert frames.step.tolist() == [0, 4, 8, 10, 0, 4, 8, 10, 0, 1]
    score = torch.tensor([0.0, 0.1, 0.9, 1.0] * 2 + [0.0, 1.0], dtype=torch.float64)
    contract = Contract({"x": TensorSpec((1,))}, TensorSpec((1,)), control_dt_s=0.05)
    (error,) = worst_errors(frames, score, torch.arange(4, 8), 0.5, contract)
    assert error.caption == "false positive: episode 1 of logs, 0.40 s, score 0.900; x: 108"


def test_without_a_final_observation_the_last_frame_is_the_last_observation():
    frames, _ = labelled_frames(episode(0, 4, True, final=False), LabelConfig(positive_last=1, gap=1), "logs")
    assert frames.label.tolist() == [N, N, U, P]


def test_marks_replace_the_last_frames_and_what_follows_them_is_unknown():
    config = LabelConfig(positive_last=1, gap=1, positive_key="mark")
    marks = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    nan = float("nan")
    data = Episodes.join(
        [
            episode(0, 6, True, marks=marks),
            episode(10, 3, False, marks=[0.0, 1.0, nan]),
            episode(20, 2, True, marks=[0.0, 0.0]),
            episode(30, 4, True, marks=[nan, 0.0, 0.0, 1.0]),
        ]
    )
    frames, notes = labelled_frames(data, config, "logs")
    assert frames.label[:7].tolist() == [N, N, U, P, U, P, P]
    assert frames.label[7:11].tolist() == [N, U, U, U]
    assert frames.label[11:14].tolist() == [U, U, U]
    assert frames.label[14:].tolist() == [U, N, U, P, P]
    assert "no frame of the successful episodes 2" in notes[0]
    with pytest.raises(UserError, match="no signal other for positive_key; it has mark"):
        labelled_frames(data, replace(config, positive_key="other"), "logs")


def test_only_failures_count_of_the_episodes_of_a_policy():
    data = Episodes.join([episode(0, 7, True), episode(100, 3, False), episode(200, 5, None)])
    frames, notes = labelled_frames(data, LabelConfig(), "run", failed_only=True)
    assert frames.names == ("episode 1 of run",)
    assert frames.label.tolist() == [N] * 4
    assert notes == ["run: of 3 episodes 1 of unknown outcome and 1 that succeeded are left out."]
    with pytest.raises(UserError, match="run has no episodes that a person marked as failures among its 1"):
        labelled_frames(episode(0, 7, True), LabelConfig(), "run", failed_only=True)
    with pytest.raises(UserError, match="logs has no episodes of known outcome among its 1"):
        labelled_frames(episode(0, 7, None), LabelConfig(), "logs")


def test_a_split_is_by_episode_with_the_same_share_of_successes():
    success = torch.tensor([SUCCEEDED] * 20 + [FAILED] * 10, dtype=torch.int8)
    config = LabelConfig(validation_share=0.2, test_share=0.3)
    part = split(success, config, seeding.generator(0, "split"))
    numbers = {
        kind: [int(((part == kind) & (success == each)).sum()) for each in (SUCCEEDED, FAILED)] for kind in range(3)
    }
    assert numbers == {TRAIN: [10, 5], VALIDATION: [4, 2], TEST: [6, 3]}
    assert torch.equal(part, split(success, config, seeding.generator(0, "split")))
    assert not torch.equal(part, split(success, config, seeding.generator(1, "split")))
    few = split(torch.tensor([SUCCEEDED] * 3 + [FAILED] * 2, dtype=torch.int8), config, seeding.generator(0, "split"))
    assert sorted(few[:3].tolist()) == [TRAIN, VALIDATION, TEST]
    assert few[3:].tolist() == [TRAIN, TRAIN]


def test_frames_of_an_episode_are_in_one_part():
    data = Episodes.join([episode(100 * n, 12, n % 2 == 0) for n in range(12)])
    frames, _ = labelled_frames(data, LabelConfig(positive_last=1, gap=1), "logs")
    part = split(frames.success, LabelConfig(), seeding.generator(0, "split"))
    check_parts(frames, part)
    own = [set(frames.episode[frames.of_part(part, number)].tolist()) for number in (TRAIN, VALIDATION, TEST)]
    assert sum(map(len, own)) == 12
    assert set.union(*own) == set(range(12))
    assert counts(frames, part)["test"] == {
        "episodes": 2,
        "successes": 1,
        "positive_frames": 1,
        "negative_frames": 11 + 13,
    }


def test_too_few_successes_are_refused_with_their_number():
    frames, _ = labelled_frames(Episodes.join([episode(0, 30, True), episode(0, 30, False)]), LabelConfig(), "logs")
    part = split(frames.success, LabelConfig(), seeding.generator(0, "split"))
    with pytest.raises(UserError, match=r"no positive frames \(1 of 2 episodes succeeded\); expected at least 3"):
        check_parts(frames, part)


def test_shares_that_leave_nothing_are_refused():
    with pytest.raises(UserError, match=r"validation_share=0\.5 and test_share=0.5 leave nothing"):
        LabelConfig(validation_share=0.5, test_share=0.5)


def test_frames_of_several_data_sets():
    config = LabelConfig(positive_last=1, gap=0)
    parts = [
        labelled_frames(each, config, name)[0]
        for each, name in ((episode(0, 2, True), "a"), (episode(50, 1, False), "b"))
    ]
    frames = Frames.join([*parts, parts[0]])
    assert frames.label.tolist() == [N, N, P, N, N, N, N, P]
    assert frames.episode.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert frames.take(torch.tensor([7, 4, 0, 5]))["x"].flatten().tolist() == [2, 51, 0, 0]
    assert frames.names == ("episode 0 of a", "episode 0 of b", "episode 0 of a")
