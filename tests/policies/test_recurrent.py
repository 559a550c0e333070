"""The recurrent policy: explicit memory, and learning a task that needs memory."""

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.policy import DeterministicPolicy
from policies.recurrent import RecurrentConfig, RecurrentPolicy

ACTION = TensorSpec((4,), low=(-1.0,) * 4, high=(1.0,) * 4)
QUADROTOR = Contract({"state": TensorSpec((22,)), "mass": TensorSpec((1,), privileged=True)}, ACTION, 0.01)


def make(contract: Contract = QUADROTOR, **sizes: int) -> RecurrentPolicy:
    torch.manual_seed(0)
    policy = RecurrentConfig(**sizes).build(contract)
    for parameter in policy.actor_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    policy.fit(sequences(policy, 1, 64)[0], torch.zeros(1, 4))
    return policy


def sequences(policy: RecurrentPolicy, steps: int, count: int) -> TensorDict:
    specs = policy.contract.observation
    parts = {key: torch.randn(steps, count, *spec.shape) for key, spec in specs.items()}
    return TensorDict(parts | {"started": torch.zeros(steps, count, dtype=torch.bool)}, [steps, count])


def test_it_has_the_size_of_raptors():
    policy = RecurrentConfig().build(QUADROTOR)
    assert sum(parameter.numel() for parameter in policy.actor.parameters()) == 2084
    assert not isinstance(policy, DeterministicPolicy)  # which has no memory


def test_acting_step_by_step_is_unrolling():
    policy = make()
    seen = sequences(policy, 6, 3)
    seen["started"][4, 1] = True
    seen["started"][0] = True
    unrolled, last = policy.unroll(seen)
    memory = policy.initial_memory(3)
    for step in range(6):
        memory = torch.where(seen["started"][step, :, None], policy.initial_memory(3), memory)
        observation = seen[step].set("memory", memory)
        decision = policy.act(observation, deterministic=True)
        torch.testing.assert_close(decision.actions, unrolled[step])
        torch.testing.assert_close(policy.actions(observation), unrolled[step])
        memory = decision.sample["memory"]
    torch.testing.assert_close(memory, last)
    again, _ = policy.unroll(seen[3:], policy.unroll(seen[:3])[1])
    torch.testing.assert_close(again, unrolled[3:])


def test_the_loss_counts_valid_steps_alone():
    policy = make()
    seen = sequences(policy, 6, 3)
    with torch.no_grad():
        wanted, _ = policy.unroll(seen)
        wanted[1, 2] += 0.2
        valid = torch.ones(6, 3, 1)
        valid[4] = 0.0
        wanted[4] += 9.0
        assert float(policy.loss(seen, wanted, valid)) == pytest.approx(0.2**2 / 15, rel=1e-3)


def test_it_remembers_and_the_critic_does_not():
    policy = make()
    first = sequences(policy, 1, 5)[0]
    observation, other = first.clone().set("memory", policy.initial_memory(5)), first.set("memory", torch.randn(5, 16))
    assert (policy.actions(observation) != policy.actions(other)).any(-1).all()
    assert torch.equal(policy.value(observation), policy.value(other))
    decision = policy.act(observation, generator=torch.Generator().manual_seed(0))
    assert torch.equal(policy.evaluate(observation, decision.sample).log_prob, decision.log_prob)
    assert (policy.evaluate(other, decision.sample).log_prob != decision.log_prob).all()


def test_sequences_have_the_values_of_their_steps():
    policy = make()
    seen = sequences(policy, 4, 5).set("memory", torch.randn(4, 5, 16))
    evaluation = policy.evaluate(seen, TensorDict({"raw": torch.zeros(4, 5, 4)}, [4, 5]))
    assert evaluation.value.shape == evaluation.log_prob.shape[:2] == (4, 5)
    torch.testing.assert_close(evaluation.value, torch.stack([policy.value(each) for each in seen]))


def test_without_memory_it_says_where_to_get_one():
    policy = make()
    with pytest.raises(ValueError, match="begin episodes with initial_memory") as caught:
        policy.act(sequences(policy, 1, 2)[0])
    assert "\n" not in str(caught.value)


def test_the_loss_of_one_step_uses_the_memory_that_is_given():
    policy = make()
    observation = sequences(policy, 1, 5)[0].set("memory", torch.randn(5, 16))
    actions = torch.zeros(5, 1, 4)
    expected = (policy.actions(observation) - actions).square().mean()
    torch.testing.assert_close(policy.loss(observation, actions, torch.ones(5, 1)), expected)


def test_the_loss_of_sequences_begins_with_the_memory_that_is_given():
    policy = make()
    seen, actions, valid = sequences(policy, 4, 5), torch.zeros(4, 5, 1, 4), torch.ones(4, 5, 1)
    memory = torch.randn(4, 5, 16)
    expected = policy.unroll(seen, memory[0])[0].square().mean()
    fresh = policy.loss(seen, actions, valid)
    torch.testing.assert_close(fresh, policy.unroll(seen)[0].square().mean())
    torch.testing.assert_close(policy.loss(seen.set("memory", memory), actions, valid), expected)
    assert (fresh - expected).abs() > 1e-4


def test_it_learns_what_takes_a_memory():
    """Repeat the first observation of the episode: a policy without memory stays at the variance, 0.25."""
    contract = Contract({"x": TensorSpec((1,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), 0.1)
    torch.manual_seed(0)
    policy = RecurrentConfig(encoder=8, memory=8).build(contract)
    steps, count = 6, 64
    x = torch.where(torch.rand(steps, count, 1) < 0.5, -1.0, 1.0)
    started = torch.zeros(steps, count, dtype=torch.bool)
    started[0], started[3] = True, torch.arange(count) % 2 == 0
    seen = TensorDict({"x": x, "started": started}, [steps, count])
    policy.fit(seen.flatten(), torch.zeros(1, 1))
    target = torch.stack([torch.where(started[3] & (step >= 3), x[3, :, 0], x[0, :, 0]) for step in range(steps)])
    actions, valid = 0.5 * target.view(steps, count, 1, 1), torch.ones(steps, count, 1)
    optimiser = torch.optim.Adam(policy.actor_parameters(), 2e-2)
    for _ in range(150):
        loss = policy.loss(seen, actions, valid)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.02
    assert policy.gru.initial.grad.abs().sum() > 0
