"""Progress along the milestones of demonstrations, learned from them and paid as a potential."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.on_policy.grpo import GRPOConfig, Outcome
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.algorithms.rewards.process_reward import LearnedProgress, grippers, progress, shaped
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.networks.value_head import CriticHead, ValueHead
from embodied.rollout.groups import WholeEpisodes, WholeRollout
from embodied.rollout.rollout import Collector, Rollout
from embodied.training.loop import train
from embodied.world import ALONE, World
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from tests.embodied.reach import Reach

ACTION = TensorSpec((2,), names=("x", "gripper"), low=(-1.0, -1.0), high=(1.0, 1.0))
CONTRACT = Contract({"x": TensorSpec((1,))}, ACTION, 0.1)


def demonstration(commands: list[float], success: bool = True, every: int = 1) -> Episodes:
    """Moves by one a step; the gripper gets `commands`. Observed before every one of `every` steps."""
    length = len(commands)
    actions = torch.stack((torch.ones(length), torch.tensor(commands)), 1)
    seen = torch.arange(0, length, every)
    return Episodes.of(TensorDict({"x": seen.float().unsqueeze(1)}, [len(seen)]), actions, success=success, first=seen)


def test_progress_counts_phases_between_the_turns_of_the_gripper() -> None:
    rows, label = progress(demonstration([-1, -1, 1, 1, 1, 1, -1, -1]), [1])
    assert rows.tolist() == list(range(8))
    # three phases of 2, 4 and 2 steps
    assert label.tolist() == pytest.approx([0, 1 / 6, 4 / 12, 5 / 12, 6 / 12, 7 / 12, 4 / 6, 5 / 6])


def test_each_demonstration_has_its_own_milestones_and_failures_none() -> None:
    parts = [demonstration([-1, -1, 1, 1], every=2), demonstration([-1] * 5, False), demonstration([1, -1, -1, -1, -1])]
    rows, label = progress(Episodes.join(parts), [1])
    assert rows.tolist() == [0, 1, *range(7, 12)]
    assert label.tolist() == pytest.approx([0, 1 / 2, 0, 1 / 2, 1 / 2 + 1 / 8, 1 / 2 + 2 / 8, 1 / 2 + 3 / 8])


def rollout(envs: int = 4, decisions: int = 12) -> Rollout:
    env = Reach(envs)
    policy = MLPConfig(hidden=[8], initial_std=0.3).build(env.contract)
    policy.fit(Reach(16).reset(), torch.zeros(1, 1))
    return Collector(env, policy, torch.Generator().manual_seed(0)).collect(decisions)


def test_a_decision_earns_the_discounted_gain_and_an_ending_takes_the_rest_back() -> None:
    found = rollout(1, 3)
    executed = torch.tensor([[[True, True]], [[True, True]], [[True, False]]])
    ends = {"terminated": torch.tensor([[False], [False], [True]]), "executed": executed}
    found = replace(found, reward=torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]], [[1.0, 0.0]]]), **ends)
    before, after = torch.tensor([[0.1], [0.4], [0.4]]), torch.tensor([[0.4], [0.4], [0.9]])
    paid = shaped(found, before, after, weight=0.5, discount=0.9)
    gain = [0.5 * (0.81 * 0.4 - 0.1), 0.5 * (0.81 * 0.4 - 0.4), 1.0 - 0.5 * 0.4]
    assert paid.reward[:, 0, 0].tolist() == pytest.approx(gain)
    assert gain[1] < 0.0  # lingering costs
    assert not paid.reward[..., 1].any()
    assert found.reward[:, 0, 0].tolist() == [0.0, 0.0, 1.0]
    # discounted over the episode only the beginning is left, which no action changes
    total = gain[0] + 0.81 * gain[1] + 0.81**2 * gain[2]
    assert total == pytest.approx(0.81**2 * 1.0 - 0.5 * 0.1)


def learned() -> tuple[MLPPolicy, LearnedProgress]:
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[32]).build(CONTRACT)
    made = Episodes.join([demonstration([-1] * 10 + [1] * 10), demonstration([-1] * 10 + [1] * 10)])
    policy.fit(made.observation, made.actions)
    return policy, LearnedProgress(policy, made, torch.Generator().manual_seed(0), "option")


def moving(places: Tensor) -> Rollout:
    """Environments at `places` [T + 1, N]."""
    seen = TensorDict({"x": places.unsqueeze(-1)}, [*places.shape])
    found, shape = rollout(places.shape[1], len(places) - 1), (len(places) - 1, places.shape[1])
    nowhere = torch.zeros(shape, dtype=torch.bool)
    return replace(
        found,
        observation=seen[:-1],
        last_observation=seen[-1],
        final_observation=None,
        final_rows=None,
        terminated=nowhere,
        truncated=nowhere,
    )


def test_the_model_tells_how_far_an_episode_is() -> None:
    policy, model = learned()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    told, after = model(moving(torch.stack((torch.arange(0.0, 20.0), torch.full((20,), 2.0)), 1)))
    expected = torch.arange(19.0) / 20.0  # two phases of ten steps
    torch.testing.assert_close(told[:, 0], expected, atol=0.06, rtol=0.0)
    torch.testing.assert_close(told[:, 1], torch.full((19,), 0.1), atol=0.06, rtol=0.0)
    torch.testing.assert_close(after[:-1], told[1:])
    assert after[-1, 0] > told[-1, 0]
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in before.items())


def test_a_resumed_model_tells_the_same_and_is_not_trained_again() -> None:
    _, model = learned()
    seen = moving(torch.rand(5, 3) * 20.0)
    told = model(seen)
    _, again = learned()
    again.load_state_dict(model.state_dict())
    again.demonstrations = None
    assert all(torch.equal(*pair) for pair in zip(told, again(seen), strict=True))


class Place:
    """A process model of one's own: progress is nearness to the origin."""

    def __call__(self, rollout: Rollout, world: World = ALONE) -> tuple[Tensor, Tensor]:
        return tuple(
            1.0 - seen["position"].squeeze(-1).abs().clamp(0.0, 1.0)
            for seen in (rollout.observation, rollout.next_observation())
        )

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


def reach(envs: int = 64) -> tuple[Reach, MLPPolicy]:
    torch.manual_seed(0)
    env = Reach(envs, step_limit=40)
    policy = MLPConfig(hidden=[32]).build(env.contract)
    policy.fit(env.reset(torch.ones(envs, dtype=torch.bool), starts=torch.arange(envs)), torch.zeros(1, 1))
    return Reach(envs, step_limit=40), policy


def test_ppo_learns_from_the_task_and_from_progress() -> None:
    env, policy = reach(16)
    learner = PPOConfig(discount=0.9).build(policy, None, env, torch.Generator().manual_seed(0))
    learner.config, learner.process = replace(learner.config, process_reward=2.0), Place()
    prepare, given = learner._prepare, []
    learner._prepare = lambda seen, world: given.append(seen) or prepare(seen, world)
    found = Collector(env, policy, torch.Generator().manual_seed(0)).collect(16)
    told = learner.update(found, 0.0)
    before, after = Place()(found)
    assert torch.equal(given[0].reward, shaped(found, before, after, 2.0, 0.9).reward)
    assert not torch.equal(given[0].reward, found.reward)
    assert told["process_progress"] == pytest.approx(float(before.mean()))


@pytest.mark.parametrize(
    "algorithm",
    [PPOConfig(process_reward=1.0, rollout_length=4), GRPOConfig(outcome=Outcome.PROCESS, group=4, rollout_length=4)],
)
def test_the_loop_lets_the_model_learn(algorithm: PPOConfig | GRPOConfig) -> None:
    """Its optimiser is a part of the learner, and so is its network."""
    env = Reach(8)
    env.contract = replace(env.contract, action=replace(env.contract.action, names=("gripper",)))
    seen = TensorDict({"position": torch.linspace(0.5, 0.1, 5)[:, None], "task": torch.zeros(5, 1)}, [5])
    shown = Episodes.of(seen, torch.tensor([[-0.1], [-0.1], [0.1], [0.1], [0.1]]))
    policy = MLPConfig(hidden=[8], initial_std=0.3).build(env.contract)
    assert next(train(env, policy, algorithm, env_steps=16, demonstrations=shown)).env_steps > 0


def test_grpo_tells_failures_apart_by_the_progress_at_their_end() -> None:
    env, policy = reach(16)
    learner = GRPOConfig(group=8, rollout_length=20).build(policy, None, env, torch.Generator().manual_seed(0))
    learner.config.outcome, learner.process = Outcome.PROCESS, Place()
    found = WholeEpisodes(env, policy, torch.Generator().manual_seed(0), learner.starts).collect(20)
    found = replace(found, success=found.success & (torch.arange(16) < 3))
    episodes = WholeRollout.of(found)
    outcome = learner._outcome(found, episodes, ALONE)
    won, near = map(episodes.at_end, (found.success, Place()(found)[1]))
    torch.testing.assert_close(outcome, torch.where(won, torch.ones(len(won)), 0.6 * near))
    assert outcome[~won].std() > 0.0


def test_what_it_needs_is_one_line() -> None:
    policy, model = learned()
    with pytest.raises(UserError, match=r"^algorithm\.process_reward learns progress from demonstrations, but"):
        PPOConfig(process_reward=1.0).build(policy, None, Reach(2), torch.Generator())
    with pytest.raises(UserError, match=r"^algorithm\.outcome=process learns progress from demonstrations"):
        GRPOConfig(outcome=Outcome.PROCESS).build(policy, None, Reach(2), torch.Generator())
    with pytest.raises(UserError, match="action elements named gripper, which this task lacks"):
        grippers(replace(CONTRACT, action=replace(ACTION, names=("x", "y"))), "option")
    narrow = MLPConfig(hidden=[8], values=ValueHead(CriticHead.HL_GAUSS, value_low=0.0, value_high=0.9)).build(CONTRACT)
    with pytest.raises(UserError, match="value_low=0 value_high=1"):
        LearnedProgress(narrow, model.demonstrations, torch.Generator(), "option")
    memory = RecurrentConfig(hidden=[8]).build(CONTRACT)
    with pytest.raises(UserError, match="use a policy without memory"):
        LearnedProgress(memory, model.demonstrations, torch.Generator(), "option")
