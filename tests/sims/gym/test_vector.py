"""Our environments as Gymnasium's, beside Gymnasium's own."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import create_empty_array

from embodied.errors import UserError
from sims.gym.environment import GymEnvironment
from sims.gym.vector import as_gymnasium
from tests.embodied.counter import Counter
from tests.embodied.nameless import Nameless
from tests.sims.gym import worlds  # noqa: F401 - registers


def same(ours: dict, theirs: dict) -> bool:
    return np.allclose(ours["state"], theirs["state"]) and np.array_equal(ours["camera"], theirs["camera"])


@pytest.mark.parametrize("mode", AutoresetMode)
def test_it_does_as_gymnasiums_own_do_in_every_mode(mode):
    # All worlds begin at 0: Gymnasium resets without a seed.
    env = as_gymnasium(GymEnvironment(3, "Line-v0", options={"spread": 0.0}), mode)
    theirs = SyncVectorEnv([lambda: gymnasium.make("Line-v0", spread=0.0)] * 3, autoreset_mode=mode)
    assert env.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == mode
    random = np.random.default_rng(0)
    first, _ = env.reset(seed=3)
    assert env.observation_space.contains(first)
    assert same(first, theirs.reset(seed=3)[0])
    ended = 0
    for _ in range(60):
        actions = random.uniform(-1.0, 1.0, (3, 2)).astype(np.float32)
        seen, reward, terminated, truncated, infos = env.step(actions)
        expected = theirs.step(actions.astype(np.float64).reshape(3, 2, 1))
        assert same(seen, expected[0])
        assert reward == pytest.approx(expected[1], abs=1e-5)
        assert np.array_equal(terminated, expected[2])
        assert np.array_equal(truncated & ~terminated, expected[3] & ~expected[2])
        done = terminated | truncated
        ended += done.sum()
        if mode is AutoresetMode.SAME_STEP:
            assert ("final_obs" in infos) == done.any()
            for row in done.nonzero()[0]:
                assert same(infos["final_obs"][row], expected[4]["final_obs"][row])
                assert infos["final_info"]["success"][row] == expected[4]["final_info"]["is_success"][row]
        elif done.any():
            assert np.array_equal(infos["_success"], done)
            assert np.array_equal(infos["success"][done], expected[4]["is_success"][done])
        if mode is AutoresetMode.DISABLED and done.any():
            with pytest.raises(UserError, match="have ended; reset them"):
                env.step(actions)
            again, _ = env.reset(options={"reset_mask": done})
            assert same(again, theirs.reset(options={"reset_mask": done})[0])
    assert ended > 10


def test_spaces_are_those_of_the_contract_and_actions_of_chunks():
    env = as_gymnasium(GymEnvironment(2, "Line-v0", executed=4))
    assert env.single_action_space.shape == (4, 2)
    assert env.action_space.shape == (2, 4, 2)
    seen, _ = env.reset()
    assert env.observation_space.contains(seen)
    empty = create_empty_array(env.single_observation_space, 2)
    assert {name: part.dtype for name, part in seen.items()} == {name: part.dtype for name, part in empty.items()}
    assert env.single_observation_space["camera"].high.max() == 255
    reward = env.step(np.zeros((2, 4, 2), np.float32))[1]
    assert reward == pytest.approx(-4.0 * np.abs(seen["state"][:, 0]))


def test_a_seed_chooses_all_episodes_and_observations_are_ones_own():
    def rollout(seed: int) -> tuple[np.ndarray, list[int]]:
        counter = Counter(2, 3)
        env = as_gymnasium(counter)
        first, _ = env.reset(seed=seed)
        kept = {name: part.copy() for name, part in first.items()}
        starts = counter.start.tolist()
        for _ in range(9):
            env.step(np.zeros(env.action_space.shape, np.float32))
            starts += counter.start.tolist()
        assert all(np.array_equal(first[name], kept[name]) for name in kept)
        return starts

    assert rollout(5) == rollout(5)
    assert rollout(5) != rollout(6)
    assert len(set(rollout(5))) == 10  # five episodes of two environments


def test_without_numbered_starts_a_seed_is_refused():
    env = as_gymnasium(Nameless(2))
    env.reset()
    with pytest.raises(UserError, match="reset it without a seed"):
        env.reset(seed=0)
