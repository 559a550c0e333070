"""Replay keeps successful chunks only, across rollout borders, with the actions that were executed."""

import pytest
import torch
from tensordict import TensorDict

from embodied.data.episodes import Episodes
from embodied.data.replay import ChunkReplay, EpisodeAssembler
from embodied.rollout.rollout import Collector, Rollout
from tests.embodied.reach import Reach
from tests.embodied.rollout.test_rollout import Constant


def assembled(split: list[int], action: float = -0.1) -> TensorDict:
    env = Reach(1, tasks=1, horizon=3)
    collector, episodes = Collector(env, Constant(env, action), torch.Generator()), EpisodeAssembler()
    found = [episodes.add(collector.collect(decisions)) for decisions in split]
    made = Episodes.join([each for each in found if each is not None])
    return made.chunks(torch.arange(len(made)), 3)


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


def random_rollout(draw: torch.Generator, envs: int, decisions: int, executed: int) -> Rollout:
    """Random endings, chunks that stop early only there; all values are distinct."""
    shape = (decisions, envs)
    done = torch.rand(shape, generator=draw) < 0.3
    count = torch.randint(1, executed + 1, shape, generator=draw).where(done, torch.tensor(executed))
    success = torch.rand(shape, generator=draw) < 0.5
    actions = torch.rand(*shape, executed + 1, 1, generator=draw)
    return Rollout(
        observation=TensorDict({"x": torch.rand(*shape, 2, generator=draw)}, shape),
        last_observation=TensorDict({"x": torch.zeros(envs, 2)}, [envs]),
        actions=actions,
        sample=TensorDict({}, shape),
        log_prob=torch.zeros(*shape, 1),
        reward=torch.zeros(*shape, executed),
        executed=torch.arange(executed) < count.unsqueeze(-1),
        terminated=done,
        truncated=torch.zeros_like(done),
        success=success,
        task_index=torch.arange(envs) % 3,
    )


class OneByOne:
    """A reference assembler: environment by environment, decision by decision."""

    def __init__(self, horizon: int, envs: int) -> None:
        self.horizon, self.running = horizon, [[] for _ in range(envs)]

    def add(self, rollout: Rollout) -> list[tuple]:
        found = []
        for env, episode in enumerate(self.running):
            for t in range(len(rollout.done)):
                executed = rollout.actions[t, env, :-1][rollout.executed[t, env]].flatten().tolist()
                seen = rollout.observation["x"][t, env].tolist()
                episode.append((seen, executed))
                if rollout.done[t, env]:
                    found += self._chunks(episode, env % 3) if rollout.success[t, env] else []
                    episode.clear()
        return found

    def _chunks(self, episode: list[tuple], task: int) -> list[tuple]:
        chunks = []
        for first, (seen, _) in enumerate(episode):
            following = [action for _, actions in episode[first:] for action in actions][: self.horizon]
            chunks.append((seen, following, task))
        return chunks


@pytest.mark.parametrize("trial", range(40))
def test_cut_all_at_once_chunks_are_those_cut_one_after_the_other(trial: int) -> None:
    draw = torch.Generator().manual_seed(trial)
    envs, horizon, executed = (int(torch.randint(1, high, (), generator=draw)) for high in (6, 8, 4))
    episodes, reference = EpisodeAssembler(), OneByOne(horizon, envs)
    for round_ in range(6):
        rollout = random_rollout(draw, envs, int(torch.randint(1, 6, (), generator=draw)), executed)
        made, expected = episodes.add(rollout), reference.add(rollout)
        chunks = None if made is None else made.chunks(torch.arange(len(made)), horizon)
        actual = (
            []
            if chunks is None
            else [
                (
                    row["observation", "x"].tolist(),
                    row["actions"].flatten()[row["valid"]].tolist(),
                    int(row["task_index"]),
                )
                for row in chunks
            ]
        )
        assert actual == expected
        if chunks is not None:
            assert (chunks["valid"][:, 1:] <= chunks["valid"][:, :-1]).all()
        if round_ == 2:
            again = EpisodeAssembler()
            again.load_state_dict(episodes.state_dict())
            episodes = again


def test_an_episode_that_was_abandoned_is_not_joined_to_the_next() -> None:
    env = Reach(1, tasks=1, horizon=3)
    collector, episodes = Collector(env, Constant(env, -0.1), torch.Generator()), EpisodeAssembler()
    assert episodes.add(collector.collect(1)) is None  # start 0, from .3 to .1
    collector.abandon()
    env.start[:] = 1  # start 2 follows: .4 succeeds after four steps
    made = episodes.add(collector.collect(2))
    chunks = made.chunks(torch.arange(len(made)), 3)
    torch.testing.assert_close(chunks["observation", "position"].flatten(), torch.tensor([0.4, 0.2]))
