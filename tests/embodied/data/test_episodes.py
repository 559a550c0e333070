"""Episodes: content, chunks that end with their episode, and exact reading from disk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.data.demonstrations import record_once
from embodied.data.episodes import (
    FAILED,
    FOLDER,
    FORMATS,
    RECORD,
    SUCCEEDED,
    UNKNOWN,
    Episodes,
    EpisodeWriter,
    columns,
    read,
)
from embodied.errors import UserError
from embodied.saving import sealed

CONTRACT = Contract({"x": TensorSpec((1,))}, TensorSpec((2,)), control_dt_s=0.1)


def episode(length: int, number: int, **options) -> Episodes:
    """Observations 100 n, 100 n + 1, ...; actions are the same, and their negative."""
    x = 100.0 * number + torch.arange(length).float().unsqueeze(1)
    picture = torch.full((length, 4, 4, 3), number, dtype=torch.uint8)
    seen = TensorDict({"x": x, "picture": picture}, [length])
    return Episodes.of(seen, torch.cat((x, -x), 1), task_index=number, **options)


def written(folder: Path, *parts: Episodes) -> None:
    with EpisodeWriter(folder, CONTRACT, {"seed": 3}) as writer:
        for part in parts:
            writer.add(part)


def same(first: Episodes, second: Episodes) -> bool:
    mine, theirs = columns(first), columns(second)
    return mine.keys() == theirs.keys() and all(
        torch.equal(value.nan_to_num(-7.0), theirs[name].nan_to_num(-7.0)) for name, value in mine.items()
    )


def test_chunks_end_with_their_episode_and_repeat_its_last_action():
    episodes = Episodes.join([episode(3, 0), episode(2, 1)])
    chunks = episodes.chunks(torch.tensor([0, 2, 3, 1]), 3)
    assert chunks["observation", "x"].flatten().tolist() == [0.0, 2.0, 100.0, 1.0]
    assert chunks["actions"][..., 0].tolist() == [[0, 1, 2], [2, 2, 2], [100, 101, 101], [1, 2, 2]]
    assert chunks["valid"].tolist() == [[True] * 3, [True, False, False], [True, True, False], [True, True, False]]
    assert chunks["task_index"].tolist() == [0, 0, 1, 0]
    assert (chunks["actions"][..., 0] == -chunks["actions"][..., 1]).all()


def test_observations_of_decisions_alone_begin_chunks_of_all_the_actions_between():
    whole = Episodes.join([episode(5, 0), episode(3, 1)])
    decisions = torch.tensor([0, 2, 4, 5, 7])  # every second step of each episode
    sparse = Episodes(**{**vars(whole), "observation": whole.observation[decisions], "first": decisions})
    assert len(sparse) == 5
    assert sparse.episode.tolist() == [0, 0, 0, 1, 1]
    for mine, theirs in zip(
        *(x.items() for x in (sparse.chunks(torch.arange(5), 4), whole.chunks(decisions, 4))), strict=True
    ):
        assert (mine[1] == theirs[1]).all()


def test_every_observation_is_as_likely_to_be_sampled():
    episodes = Episodes.join([episode(3, 0), episode(1, 1)])
    drawn = episodes.sample(4000, 1, torch.Generator().manual_seed(0))["observation", "x"].flatten()
    shares = [float((drawn == value).float().mean()) for value in (0.0, 1.0, 2.0, 100.0)]
    assert shares == pytest.approx([0.25] * 4, abs=0.03)


def test_datasets_are_drawn_by_weight_and_their_observations_alike():
    parts = [replace(episode(length, number), dataset_index=torch.tensor([of])) for length, number, of in PARTS]
    episodes = replace(Episodes.join(parts), weights=torch.tensor([3.0, 1.0]))
    drawn = episodes.sample(8000, 1, torch.Generator().manual_seed(0))["observation", "x"].flatten()
    shares = {float(value): float((drawn == value).float().mean()) for value in drawn.unique()}
    expected = dict.fromkeys((0.0, 1.0, 100.0), 1 / 4) | dict.fromkeys((200.0, 201.0, 202.0), 1 / 12)
    assert shares == pytest.approx(expected, abs=0.02)
    seen, actions = episodes.by_weight()  # 6 observations: 4.5 and 1.5
    assert seen["x"].flatten().tolist() == [0.0, 0.0, 1.0, 100.0, 200.0, 201.0]
    assert torch.equal(actions, torch.cat((seen["x"], -seen["x"]), 1))
    unweighted = replace(episodes, weights=None)
    assert torch.equal(unweighted.by_weight()[1], episodes.actions)
    assert "weights" not in columns(episodes)  # files say which dataset an episode is of, runs how often it is drawn


PARTS = (2, 0, 0), (1, 1, 0), (3, 2, 1)


def test_some_episodes_are_cut_out_with_all_that_belongs_to_them():
    whole = Episodes.join([episode(3, 0), episode(2, 1, success=False), episode(4, 2)])
    assert same(whole.part(1, 3), Episodes.join([episode(2, 1, success=False), episode(4, 2)]))
    assert same(whole.part(0, 1), episode(3, 0))
    sparse = replace(whole, observation=whole.observation[::2], first=torch.arange(0, 9, 2))  # 0 and 2, 4, 6 and 8
    assert sparse.part(1, 2).first.tolist() == [1]
    assert sparse.part(1, 2).observation["x"].flatten().tolist() == [101.0]


def test_they_come_back_from_the_disk_as_they_were(tmp_path):
    last = TensorDict({"x": torch.tensor([9.0]), "picture": torch.zeros(4, 4, 3, dtype=torch.uint8)}, [])
    parts = [
        episode(4, 0, success=False, reward=torch.rand(4), final_observation=last),
        episode(7, 1, human=torch.arange(7) > 4, terminated=True, final_observation=last),
    ]
    written(tmp_path / "made", *parts)
    stored, contract, origin = read(tmp_path / "made")
    assert same(stored, Episodes.join(parts))
    assert (contract, origin) == (CONTRACT, {"seed": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert np.load(tmp_path / "made/observation.picture.npy").shape == (11, 4, 4, 3)  # readable by any program


def test_rows_are_read_when_they_are_asked_for(tmp_path):
    length = 200_000
    x = torch.rand(length, 50)  # 40 MB
    written(tmp_path / "made", Episodes.of(TensorDict({"x": x}, [length]), x[:, :1]))

    def resident() -> int:
        return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

    before = resident()
    stored, *_ = read(tmp_path / "made")
    assert torch.equal(stored.chunks(torch.tensor([7, 199_999]), 1)["observation", "x"], x[[7, 199_999]])
    assert resident() - before < 20_000  # kB


def test_what_fails_leaves_nothing(tmp_path):
    def broken() -> None:
        with EpisodeWriter(tmp_path / "made", CONTRACT) as writer:
            writer.add(episode(2, 0))
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        broken()
    assert not list(tmp_path.iterdir())
    wide = episode(2, 0)
    wide.observation["x"] = torch.zeros(2, 3)
    blind = Episodes.of(episode(2, 0).observation.select("x"), torch.zeros(2, 2))
    with EpisodeWriter(tmp_path / "made", CONTRACT) as writer:
        writer.add(episode(2, 0))
        with pytest.raises(UserError, match="expected rows of"):
            writer.add(wide)
        with pytest.raises(UserError, match=r"expected episodes with .*observation\.picture"):
            writer.add(blind)
    assert len(read(tmp_path / "made")[0]) == 2


def test_damage_is_reported_and_a_folder_is_not_overwritten(tmp_path):
    written(tmp_path / "made", episode(3, 0))
    with pytest.raises(UserError, match="exists; choose another"):
        written(tmp_path / "made", episode(3, 0))
    path = tmp_path / "made/actions.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"actions\.npy is damaged"):
        read(tmp_path / "made")
    with pytest.raises(UserError, match="cannot read episodes from"):
        read(tmp_path / "nothing")


def test_what_a_run_imitates_is_made_once_for_what_was_asked(tmp_path):
    def make(writer: EpisodeWriter) -> None:
        made.append(writer.folder)
        writer.add(episode(3, 0))
        writer.origin["failed"] = 7

    made: list[Path] = []
    for _ in range(2):
        stored = record_once(tmp_path / "run", CONTRACT, {"seed": 3}, make)
        assert same(stored, episode(3, 0))
    assert made == [tmp_path / "run" / FOLDER]
    assert read(made[0])[2] == {"seed": 3, "failed": 7}
    with pytest.raises(UserError, match=r"made for something else \(seed: expected 4, got 3\); choose another output"):
        record_once(tmp_path / "run", CONTRACT, {"seed": 4}, make)
    with pytest.raises(UserError, match=r"made for something else \(control_dt_s: expected 0\.2, got 0\.1\)"):
        record_once(tmp_path / "run", replace(CONTRACT, control_dt_s=0.2), {"seed": 3}, make)
    (made[0] / "actions.npy").unlink()
    with pytest.raises(UserError, match=r"actions\.npy is missing; delete .* to make them again"):
        record_once(tmp_path / "run", CONTRACT, {"seed": 3}, make)


def test_an_episode_has_an_observation_and_a_reward_for_each_action():
    x = TensorDict({"x": torch.zeros(4, 1)}, [4])
    first = torch.tensor([0, 2])
    assert len(Episodes.of(x[:2], torch.zeros(4, 2), first=first)) == 2
    # an observation too many would shift those of all later episodes
    for options in ({}, {"first": torch.arange(3)}, {"reward": torch.zeros(2)}, {"reward": torch.zeros(3, 1)}):
        with pytest.raises(UserError, match=r"for 3 actions, got \["):
            Episodes.of(x[: 3 + (len(options) == 0 or "first" in options)], torch.zeros(3, 2), **options)


def test_failed_episodes_are_kept_but_not_drawn():
    parts = [episode(2, 0), episode(3, 1, success=False), episode(1, 2, success=None), episode(2, 3, success=False)]
    episodes = Episodes.join(parts)
    assert episodes.success.tolist() == [SUCCEEDED, FAILED, UNKNOWN, FAILED]
    drawn = episodes.sample(3000, 1, torch.Generator().manual_seed(0))["observation", "x"].flatten()
    shares = {float(value): float((drawn == value).float().mean()) for value in drawn.unique()}
    assert shares == pytest.approx(dict.fromkeys((0.0, 1.0, 200.0), 1 / 3), abs=0.03)
    seen, actions = episodes.by_weight()
    assert seen["x"].flatten().tolist() == actions[:, 0].tolist() == [0.0, 1.0, 200.0]
    sparse = replace(episodes, observation=episodes.observation[::2], first=torch.arange(0, 8, 2))
    assert sparse.sample(50, 1, torch.Generator())["observation", "x"].unique().tolist() == [0.0]
    failures = Episodes.join([parts[1], parts[3]])
    for imitate in (lambda: failures.sample(1, 1, torch.Generator()), failures.imitated_rows):
        with pytest.raises(UserError, match="all 2 episodes of the demonstrations failed; imitation needs others"):
            imitate()
    # statistics for learners of values, which learn from failures alone, too
    seen, actions = failures.by_weight()
    assert seen["x"].flatten().tolist() == actions[:, 0].tolist() == [100.0, 101.0, 102.0, 300.0, 301.0]


def test_failed_episodes_of_a_dataset_do_not_change_its_weight():
    outcomes = True, False, False, True
    parts = [
        replace(episode(2, number, success=outcomes[number]), dataset_index=torch.tensor([number // 2]))
        for number in range(4)
    ]
    episodes = replace(Episodes.join(parts), weights=torch.tensor([3.0, 1.0]))
    drawn = episodes.sample(8000, 1, torch.Generator().manual_seed(0))["observation", "x"].flatten()
    shares = {float(value): float((drawn == value).float().mean()) for value in drawn.unique()}
    assert shares == pytest.approx({0.0: 3 / 8, 1.0: 3 / 8, 300.0: 1 / 8, 301.0: 1 / 8}, abs=0.02)
    seen, actions = episodes.by_weight()  # 4 observations: 3 and 1
    assert seen["x"].flatten().tolist() == actions[:, 0].tolist() == [0.0, 0.0, 1.0, 300.0]
    failed = replace(episodes, success=torch.tensor([1, 0, 0, 0], dtype=torch.int8), sources=("good", "bad"))
    with pytest.raises(UserError, match="all 2 episodes of bad failed"):
        failed.sample(1, 1, torch.Generator())
    seen, actions = failed.by_weight()  # 6 observations: 4 and 2
    assert seen["x"].flatten().tolist() == actions[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 200.0, 300.0]


def rewards_read(folder: Path, version: int, *parts: Episodes) -> list[float]:
    """Rewards that are read from a folder whose record says that it is of this `version`."""
    written(folder, *parts)
    record = sealed.read(folder / RECORD, *FORMATS)
    sealed.write(folder / RECORD, record | {"format": version}, record["files"])
    return read(folder)[0].reward.nan_to_num(-7.0).tolist()


def test_rewards_that_are_unknown_are_not_zero(tmp_path):
    zero, one = episode(2, 0, reward=torch.zeros(2)), episode(2, 1, reward=torch.tensor([0.0, 1.0]))
    assert rewards_read(tmp_path / "unknown", 3, episode(2, 0), one) == [-7.0, -7.0, 0.0, 1.0]
    assert rewards_read(tmp_path / "known", 3, zero) == [0.0, 0.0]
    # of an earlier version, where zero was also unknown
    assert rewards_read(tmp_path / "old", 2, zero, one) == [0.0, 0.0, 0.0, 1.0]
    assert rewards_read(tmp_path / "unclear", 2, zero) == [-7.0, -7.0]
    with pytest.raises(UserError, match="has format 4, this version reads format 2 or 3"):
        rewards_read(tmp_path / "new", 4, zero)


def test_outcomes_of_earlier_versions_are_read_where_they_are_clear(tmp_path):
    for folder, success in (("clear", True), ("unclear", False)):
        old = replace(episode(2, 0), success=torch.tensor([success]))
        written(tmp_path / folder, old)
    assert read(tmp_path / "clear")[0].success.tolist() == [SUCCEEDED]
    with pytest.raises(UserError, match="did not tell failed from unknown; write them again"):
        read(tmp_path / "unclear")
