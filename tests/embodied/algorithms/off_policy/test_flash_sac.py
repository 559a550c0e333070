"""FlashSAC: its critics, targets, steps and scale of rewards by hand, and what it refuses."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from embodied.algorithms.critics import Activation
from embodied.algorithms.off_policy.flash_sac import FlashSAC, FlashSACConfig
from embodied.algorithms.off_policy.normalised_critics import NormalisedCritics
from embodied.algorithms.rewards.reward_scale import RunningReturnScale
from embodied.errors import DivergedError, UserError
from embodied.networks.value_head import CriticHead
from embodied.rollout.rollout import Collector
from policies.flow import FlowConfig
from policies.squashed import SquashedConfig
from tests.embodied.reach import Reach


def make(**settings) -> tuple[FlashSAC, Collector]:
    torch.manual_seed(0)
    env = Reach(32)
    policy = SquashedConfig(hidden=[16]).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(0)
    small = {"hidden": [8, 8], "warmup": 32, "discount": 0.9, "minibatch": 48, "updates": 0.05, "bins": 21} | settings
    return FlashSACConfig(**small).build(policy, None, env, generator), Collector(env, policy, generator)


def normalised(norm: nn.BatchNorm1d, x: Tensor, rows: Tensor | None, network: int) -> Tensor:
    """`x` [B, W] by the statistics of `rows` [R, W], or by the running ones of `network`."""
    mine = slice(network * x.shape[1], (network + 1) * x.shape[1])
    mean, var = (
        (norm.running_mean[mine], norm.running_var[mine]) if rows is None else (rows.mean(0), rows.var(0, False))
    )
    return (x - mean) / (var + 1e-5).sqrt() * norm.weight[mine] + norm.bias[mine]


@pytest.mark.parametrize("together", [True, False])
def test_outputs_by_hand(together: bool) -> None:
    torch.manual_seed(0)
    critics = NormalisedCritics(5, FlashSACConfig(hidden=[8, 8], bins=11))
    for norm in critics.norms:  # as after some training
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    critics.bias.data.normal_()
    critics.scale.data.uniform_(0.5, 1.5)
    inputs, companions = torch.randn(7, 5), 2.0 + torch.randn(7, 5)
    before = copy.deepcopy(critics)
    outputs = critics(inputs, companions if together else None)
    for network in range(2):
        rows = torch.cat((inputs, companions)) if together else inputs
        weights, norms = [weight[network] for weight in before.weights], iter(before.norms)
        normalise = lambda x: normalised(next(norms), x, x if together else None, network)  # noqa: E731, B023
        x = normalise(rows) @ weights[0]
        for block in (1, 3):
            x = x + normalise(normalise(x @ weights[block]).relu() @ weights[block + 1]).relu()
        x = x / x.square().mean(-1, keepdim=True).sqrt() * before.scale[network]
        torch.testing.assert_close(outputs[network], (x @ weights[-1] + before.bias[network])[:7], atol=1e-5, rtol=1e-4)
    moved = [not torch.equal(a.running_mean, b.running_mean) for a, b in zip(critics.norms, before.norms, strict=True)]
    assert moved == [together] * 5


def test_targets_and_steps_see_transitions_and_what_follows_in_one_pass() -> None:
    learner, collector = make(initial_temperature=0.3)
    for _ in range(3):
        learner.update(collector.collect(8), 0.0)
    scale, batch = learner.reward_scale(), learner._batch()
    assert batch["reward"].max().item() == pytest.approx(scale)  # of a success
    assert scale != 1.0
    state = learner.generator.get_state()
    following, log_prob = learner._sample(batch["next_observation"])
    learner.generator.set_state(state)
    pairs = (
        learner.q.inputs(batch["observation"], learner.q.scaled(batch["actions"])),
        learner.q.inputs(batch["next_observation"], following.detach()),
    )
    rows = torch.cat(pairs)
    outputs = copy.deepcopy(learner.q.targets)(rows, rows[:0])[:, 48:]
    lowest = outputs[learner.config.values(outputs).argmin(0), torch.arange(48)].softmax(-1)
    atoms = torch.linspace(-5.0, 5.0, 21) - (learner.temperature * log_prob).unsqueeze(-1)
    moved = batch["reward"].unsqueeze(-1) + batch["carry"].unsqueeze(-1) * atoms
    expected = learner.config.projected(moved, lowest).detach()
    outputs = copy.deepcopy(learner.q.critics)(rows, rows[:0])[:, :48]
    loss = sum(nn.functional.cross_entropy(each, expected) for each in outputs)
    before = copy.deepcopy(learner.q.critics)
    assert learner._update_critics(batch)["value_loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    for weight, old in zip(learner.q.critics.weights, before.weights, strict=True):
        assert not torch.equal(weight, old)
        torch.testing.assert_close(weight.norm(dim=1), torch.ones_like(weight[:, 0]))
    for norm in learner.q.critics.norms:
        scale, shift = norm.weight.view(2, -1), norm.bias.view(2, -1)
        torch.testing.assert_close((scale.square() + shift.square()).mean(-1), torch.ones(2))


def test_the_distribution_of_a_return_is_learned() -> None:
    torch.manual_seed(0)
    config = FlashSACConfig(hidden=[8], bins=21)
    critics = config.critics(1)
    optimiser = torch.optim.Adam(critics.parameters(), 1e-2)
    inputs = torch.tensor([-1.0, 1.0]).repeat(16).unsqueeze(1)
    for _ in range(100):
        optimiser.zero_grad()
        critics.loss(inputs, inputs.squeeze(1) + 0.25, companions=inputs).backward()
        optimiser.step()
        critics.constrain()
    expected = torch.tensor([-0.75, 1.25]).expand(2, 2)
    torch.testing.assert_close(critics.values(inputs[:2]).detach(), expected, atol=0.2, rtol=0.0)


def test_rewards_are_scaled_by_running_returns() -> None:
    _, collector = make()
    rollout = collector.collect(3)
    executed, done = torch.ones(3, 32, 2, dtype=torch.bool), torch.zeros(3, 32, dtype=torch.bool)
    executed[1, :, 1] = False
    done[1] = True
    reward = torch.tensor([[1.0, 2.0], [4.0, 0.0], [8.0, 0.0]]).unsqueeze(1).expand(3, 32, 2)
    rollout = replace(rollout, reward=reward, executed=executed, terminated=done, truncated=torch.zeros_like(done))
    scale = RunningReturnScale(0.5, 5.0)
    assert scale() == 1.0
    scale.add(rollout)
    returns = [1.0, 2.5, 5.25, 8.0, 4.0]  # the first episode has three actions, the second has begun
    mean = sum(returns) / 5
    deviation = math.sqrt(sum((each - mean) ** 2 for each in returns) / 5)
    assert scale() == pytest.approx(1.0 / max(deviation, 8.0 / 5.0))
    other = RunningReturnScale(0.5, 2.0)
    other.load_state_dict(scale.state_dict())
    assert other() == pytest.approx(2.0 / 8.0)
    other.add(rollout)
    assert other.largest == 8.0
    assert other.running.tolist() == [4.0] * 32  # 4 -> 3, 3.5, 5.75; then 8, 4 again
    assert other.steps == 2 * 5 * 32


def test_returns_of_abandoned_episodes_do_not_go_on_in_others() -> None:
    _, collector = make()
    none, executed = torch.zeros(3, 32, dtype=torch.bool), torch.tensor([True, False]).expand(3, 32, 2)
    parts = {"reward": torch.full((3, 32, 2), 4.0), "executed": executed, "terminated": none, "truncated": none}
    rollout, scale = replace(collector.collect(3), **parts), RunningReturnScale(0.5, 5.0)
    # 4, 6, 7; the episode goes on: 7.5, 7.75, 7.875; another one begins
    for before, expected in ((0, 7.0), (3, 7.875), (0, 7.0)):
        scale.add(replace(rollout, episode_steps=before + torch.tensor([[1], [2], [3]]).expand(3, 32)))
        assert scale.running.tolist() == [expected] * 32


def test_the_reward_of_a_simulation_that_blew_up_scales_no_others() -> None:
    _, collector = make()
    rollout = collector.collect(2)
    broken, none = torch.zeros(2, 32, dtype=torch.bool), torch.zeros(2, 32, dtype=torch.bool)
    broken[1, 0] = True
    reward, executed = torch.zeros(2, 32, 2), torch.ones(2, 32, 2, dtype=torch.bool)
    reward[0], reward[1, 0] = 4.0, 1e6
    ends = {"terminated": broken, "truncated": none, "events": {"diverged": broken}}
    scale = RunningReturnScale(0.5, 5.0)
    scale.add(replace(rollout, reward=reward, executed=executed, **ends))
    assert scale.largest == 6.0  # 4, then 4 + 2
    assert scale.steps == 2 * 2 * 32 - 2


def test_what_it_cannot_learn_from_is_refused() -> None:
    for options, message in (
        ({"hidden": [8, 16]}, "equally wide"),
        ({"layer_norm": True}, "algorithm=sac"),
        ({"activation": Activation.TANH}, "algorithm=sac"),
        ({"head": CriticHead.SCALAR, "value_low": None, "value_high": None}, "head=c51"),
        ({"continue_values": True}, "use wsrl"),
    ):
        with pytest.raises(UserError, match=message):
            FlashSACConfig(**options)
    env = Reach(2)
    with pytest.raises(UserError, match="policy=squashed"):
        FlashSACConfig().build(
            FlowConfig(width=8, hidden=8, turn_rad=0.0).build(env.contract), None, env, torch.Generator()
        )
    learner, collector = make()
    rollout = collector.collect(8)
    rollout.reward[:] = torch.nan
    before = copy.deepcopy(learner.policy.state_dict())
    with pytest.raises(DivergedError, match="value loss became nan"):
        learner.update(rollout, 0.0)
    assert all(torch.equal(before[name], value) for name, value in learner.policy.state_dict().items())
