"""PPO's ratio is one before the first update, and it learns a small control task in chunks."""

import copy

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.advantage import next_values, values
from embodied.algorithms.on_policy.ppo import PPO, PPOConfig
from embodied.errors import DivergedError
from embodied.policy import Evaluation
from embodied.rollout.rollout import Collector, Rollout
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach


def make(
    seed: int = 0, initial_std: float = 0.5, step_limit: int = 7, **settings: float
) -> tuple[Reach, MLPPolicy, PPO, Collector]:
    torch.manual_seed(seed)
    env = Reach(64, step_limit=step_limit)
    policy = MLPConfig(hidden=[32], initial_std=initial_std).build(env.contract)
    policy.fit(env.reset(torch.ones(64, dtype=torch.bool), starts=torch.arange(64)), torch.zeros(1, 1))
    env = Reach(64, step_limit=step_limit)
    learner = PPOConfig(minibatch=256, learning_rate=3e-3, target_kl=1.0, discount=0.9, **settings).build(
        policy, TensorDict(), env, torch.Generator().manual_seed(seed)
    )
    return env, policy, learner, Collector(env, policy, torch.Generator().manual_seed(seed))


def success_rate(rollout: Rollout) -> float:
    return float(rollout.success.sum() / rollout.done.sum())


def test_ratio_is_one_before_the_first_update() -> None:
    _, _, learner, collector = make(epochs=1, critic_warmup=0)
    learner.config.minibatch = 10**6
    metrics = learner.update(collector.collect(4), 0.0)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["policy_loss"] == pytest.approx(0.0, abs=1e-5)  # normalised advantages average to nothing


def test_values_of_next_observations_are_those_of_the_next_decision_or_of_the_ending() -> None:
    _, policy, _, collector = make()
    rollout = collector.collect(16)
    assert rollout.done[:-1].any()
    found = next_values(policy, rollout, values(policy, rollout.observation))
    assert torch.allclose(found, values(policy, rollout.next_observation()), atol=1e-6)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("reward", "sum of advantages became nan"),
        ("actor", "gradient of the actor became"),
        ("critic", "value loss became inf"),
    ],
)
def test_what_is_not_finite_is_named_and_never_becomes_weights(what: str, message: str) -> None:
    _, policy, learner, collector = make(critic_warmup=0)
    rollout = collector.collect(4)
    if what == "reward":
        rollout.reward[2, 5, 0] = torch.nan
    if what == "actor":
        next(iter(policy.actor_parameters())).register_hook(lambda gradient: gradient * torch.inf)
    if what == "critic":
        rollout.reward[2, 5, 0] = 1e30
        learner.reward_scale = lambda: 1.0
        learner.reward_scale.add = lambda *_: None
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(DivergedError, match=f"^{message}.* at gradient step 1; try a lower learning rate"):
        learner.update(rollout, 0.0)
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_rates_fall_to_their_final_share() -> None:
    _, _, learner, collector = make(final_lr_share=0.25)
    learner.update(collector.collect(2), 1.0)
    assert [group["lr"] for group in learner.optimiser.param_groups] == pytest.approx([0.25 * 3e-3, 0.25 * 1e-3])


def test_parts_of_a_log_probability_are_clipped_and_discounted_each() -> None:
    _, _, learner, _ = make(clip=0.1, clip_first=0.02, part_discount=0.5)
    clip, high, weight = learner._of_parts(torch.ones(3, 4))
    assert torch.equal(clip, high)
    assert clip[0] == pytest.approx(0.02)
    assert clip[-1] == pytest.approx(0.1)
    assert (clip.diff().diff() > 0.0).all()  # exponentially
    assert weight.tolist() == [0.125, 0.25, 0.5, 1.0]
    assert learner._of_parts(torch.ones(3, 1)) == (0.1, 0.1, 1.0)
    learner.config.clip_first = None
    assert (learner._of_parts(torch.ones(3, 4))[0] == 0.1).all()


def test_a_part_beyond_its_clip_range_has_no_gradient() -> None:
    _, policy, learner, _ = make(clip=0.3, clip_first=0.1, entropy_weight=0.0)
    learner.iterations = learner.config.critic_warmup
    ratios = torch.tensor([[1.2, 1.2]])  # the first part is clipped at 1.1, the second at 1.3
    old, log_prob = torch.zeros(1, 2), ratios.log().requires_grad_()
    policy.evaluate = lambda observation, sample: Evaluation(log_prob, torch.zeros(1, 2), torch.zeros(1))
    batch = {"observation": TensorDict({}, [1]), "sample": TensorDict({}, [1]), "log_prob": old}
    batch |= {"advantage": torch.ones(1), "return": torch.zeros(1), "own": torch.ones(1, dtype=torch.bool)}
    learner._losses(TensorDict(batch, [1]), 1)[0].backward()
    assert log_prob.grad[0, 0] == 0.0
    assert log_prob.grad[0, 1] == pytest.approx(-1.2 / 2)


def test_learns_to_reach_from_sparse_reward() -> None:
    _, _, learner, collector = make()
    rates = []
    for _ in range(25):
        rollout = collector.collect(16)
        rates.append(success_rate(rollout))
        learner.update(rollout, 0.0)
    assert rates[0] < 0.6
    assert rates[-1] > 0.95


@pytest.mark.parametrize("seed", [1, 2])
def test_learns_where_the_first_rollouts_have_hardly_a_reward(seed: int) -> None:
    _, _, learner, collector = make(seed, initial_std=0.2, step_limit=4)
    rates = []
    for _ in range(36):
        rollout = collector.collect(16)
        rates.append(success_rate(rollout))
        learner.update(rollout, 0.0)
    assert rates[0] < 0.02
    assert sum(rates[-3:]) / 3 > 0.95


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    _, policy, learner, collector = make()
    learner.update(collector.collect(4), 0.0)
    rollout = collector.collect(4)
    _, other_policy, other, _ = make(seed=1)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    other.generator.set_state(learner.generator.get_state())
    first, second = learner.update(rollout, 0.0), other.update(rollout, 0.0)
    assert first == second
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)
