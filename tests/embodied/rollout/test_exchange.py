"""Exchanged chunks are other environments', and are recorded as they were executed."""

import copy

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.errors import UserError
from embodied.policy import Decision
from embodied.rollout.exchange import ExchangingCollector
from embodied.rollout.rollout import Collector
from tests.embodied.reach import Reach

ENVS = 4000
LIMIT = 40


class Own:
    """Each environment's action is its own number, so small that no episode succeeds."""

    def __init__(self, env: Reach) -> None:
        self.contract = env.contract

    def act(self, observation, *, deterministic=False, generator=None):
        noise = torch.rand(len(observation), generator=generator)  # a sampling policy draws, too
        own = 1e-7 * torch.arange(len(observation)).float()
        actions = own[:, None, None].expand(-1, self.contract.horizon, 1)
        return Decision(actions, TensorDict({"raw": actions}, [len(own)]), torch.zeros(len(own), 2, 1), noise)


def collector(exchange: float | None, envs: int = ENVS) -> Collector:
    env, noise = Reach(envs, step_limit=LIMIT), torch.Generator().manual_seed(0)
    return (
        Collector(env, Own(env), noise)
        if exchange is None
        else ExchangingCollector(env, Own(env), noise, None, exchange)
    )


def moved(rollout, envs: int = ENVS) -> torch.Tensor:
    """Decisions that were another environment's, [T, N]."""
    return rollout.actions[:, :, 0, 0] != 1e-7 * torch.arange(envs).float()


def test_a_share_of_decisions_is_exchanged():
    share = moved(collector(0.3).collect(LIMIT // 2)).float().mean(1)
    torch.testing.assert_close(share, torch.full_like(share, 0.3), atol=0.03, rtol=0.0)  # 4 standard deviations


def test_what_was_executed_is_recorded():
    rollout = collector(1.0).collect(LIMIT // 2)
    exchanged = moved(rollout)
    assert exchanged.any()
    assert (rollout.sample["raw"] == rollout.actions).all()
    went = rollout.next_observation()["position"] - rollout.observation["position"]
    torch.testing.assert_close(went, rollout.actions.sum(2), atol=1e-6, rtol=0.0)
    whose = (rollout.actions[:, :, 0, 0] / 1e-7).round()
    assert whose[exchanged].unique().numel() > ENVS / 2  # not always the same one's


def test_without_exchange_nothing_is_drawn():
    plain, own = collector(None, 8), collector(0.0, 8)
    for _ in range(2):
        one, other = plain.collect(LIMIT // 2), own.collect(LIMIT // 2)
        assert (one.actions == other.actions).all()
        assert (one.value == other.value).all()


def test_a_collector_goes_on_where_it_was_saved():
    whole = collector(1.0, 64)
    whole.collect(15)
    state = copy.deepcopy(whole.state_dict())
    wanted = whole.collect(10)
    again = collector(1.0, 64)
    again.load_state_dict(state)
    found = again.collect(10)
    assert moved(found, 64)[:5].any()
    assert (found.actions == wanted.actions).all()


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(share: float):
    with pytest.raises(UserError, match="exchange"):
        SelfImitationConfig(exchange=share)
