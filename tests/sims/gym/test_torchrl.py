"""TorchRL collects from our environments, unchanged."""

import pytest
import torch
from tensordict import TensorDict

from sims.gym.environment import GymEnvironment
from tests.embodied.counter import Counter
from tests.sims.gym import worlds  # noqa: F401 - registers

pytest.importorskip("torchrl", reason="needs the extra torchrl")

from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from sims.gym.torchrl import as_torchrl


@pytest.mark.parametrize("executed", [1, 4])
def test_its_own_check_passes(executed):
    env = as_torchrl(GymEnvironment(3, "Line-v0", executed=executed))
    check_env_specs(env)
    assert env.action_spec.shape == ((3, 2) if executed == 1 else (3, 4, 2))
    env.close()


def test_its_collector_sees_true_last_observations_and_resets_those_that_ended_alone():
    counter = Counter(4, step_limit=7, executed=1, tasks=1)
    env = as_torchrl(counter)
    env.set_seed(3)
    up = torch.tensor([[1.0], [0.0], [-1.0], [0.0]])

    def policy(seen: TensorDict) -> TensorDict:
        return seen.set("action", up.clone())

    (batch,) = Collector(env, policy, frames_per_batch=4 * 16, total_frames=4 * 16)
    assert batch.shape == (4, 16)
    after, ends = batch["next", "x"][..., 0], batch["next", "done"][..., 0]
    assert ends[0].nonzero().flatten().tolist() == [4, 9, 14]
    assert ends[1].nonzero().flatten().tolist() == [6, 13]
    assert after[0][ends[0]].tolist() == [5.0, 5.0, 5.0]
    assert batch["x"][0, :, 0].tolist() == [0.0, 1, 2, 3, 4] * 3 + [0.0]
    assert batch["next", "terminated"][0, 4].all()
    assert not batch["next", "truncated"][0].any()
    assert batch["next", "truncated"][1, 6].all()
    assert not batch["next", "terminated"][1].any()
    assert batch["next", "reward"].sum() == 4 * 16
    starts = [start for _, begun in counter.begun for start in begun]
    assert starts == sorted(set(starts))  # each initial state once, in order
    assert starts[-1] > 3 << 24


def test_a_rollout_over_endings_holds_the_true_last_and_the_next_first_observation():
    torch.manual_seed(0)
    env = as_torchrl(GymEnvironment(8, "Line-v0"))
    rollout = env.rollout(20, break_when_any_done=False)
    assert rollout.batch_size == (8, 20)
    done = rollout["next", "done"][..., 0]
    following = rollout["state"][:, 1:, 1][done[:, :-1]]
    assert (following == 0).all()  # a new episode's first observation
    assert (rollout["next", "state"][..., 1][done] > 0).all()  # the true last one
    assert rollout["next", "camera"].dtype == torch.uint8
