"""Policy and dynamics in one call against a loop over steps of plain torch."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from embodied import native
from sims.quadrotor import unroll as module
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler: it is about the compiled unroll")


def policy(inputs, widths=(20, 64), seed=0, scale=0.3):
    """Layers of odd and of even widths, around hover's action."""
    g = torch.Generator().manual_seed(seed)
    sizes = [inputs, *widths, 4]
    layers = []
    for fan, width in pairwise(sizes):
        weight = scale * torch.randn(width, fan, generator=g) / fan**0.5
        layers.append((weight.requires_grad_(), (0.1 * torch.randn(width, generator=g)).requires_grad_()))
    layers[-1][1].data += torch.atanh(torch.tensor(CRAZYFLIE.hover_action))
    return layers


FIELDS = "reward", "executed", "terminated", "truncated", "success"


def oracle(env, layers, decisions, most):
    """A step-by-step reference for `unroll` without its code, and without compiled code if `env` has none."""
    remembered = "action_history" if "action_history" in env.contract.observation else "previous_action"
    found, observation = [], env.observe()
    for _ in range(decisions):
        x = torch.cat([observation[key] for key in (*env.mdp.OBSERVED, remembered)], -1)
        for weight, bias in layers:
            x = (x @ weight.t() + bias).tanh()
        x.register_hook(lambda grad: grad * (most / grad.norm(dim=1, keepdim=True)).clamp(max=1.0))
        transition = env.step(x.unsqueeze(1))
        fields = {name: getattr(transition, name) for name in FIELDS}
        found.append({"observation": observation, "actions": x.unsqueeze(1)} | fields)
        observation = transition.observation
    stacked = {name: torch.stack([step[name] for step in found]) for name in found[0]}
    return SimpleNamespace(
        **stacked, last_observation=observation, task_index=env.task_index, start=env.start.expand(decisions, -1)
    )


def both(decisions, layers, history=1, num_envs=70, step_limit=500, most=math.inf, **options):
    """One flight from the same starts, by `unroll` and by the reference in plain torch, with both environments."""
    found = []
    for backend, fly in ((None, QuadrotorEnvironment.unroll), ("torch", oracle)):
        env = QuadrotorEnvironment(num_envs, history=history, step_limit=step_limit, backend=backend, **options)
        env.reset(starts=torch.arange(num_envs))
        found.append((fly(env, layers, decisions, most), env))
    return found


def compare(first, second):
    (one, env), (other, slow) = first, second
    for name in ("executed", "terminated", "truncated", "success", "task_index", "start"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    executed = one.executed
    torch.testing.assert_close(one.reward, other.reward, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.actions[executed], other.actions[executed], rtol=1e-4, atol=1e-4)
    for seen in ("observation", "last_observation"):
        for key in env.contract.observation:
            torch.testing.assert_close(getattr(one, seen)[key], getattr(other, seen)[key], rtol=1e-4, atol=1e-3)
    assert torch.equal(env.steps, slow.steps)
    torch.testing.assert_close(env._state, slow._state, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(env._record, slow._record, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("history", [1, 5])
@pytest.mark.parametrize("step_limit", [500, 17])
def test_an_unroll_is_steps_of_plain_torch(history, step_limit):
    layers = policy(18 + 4 * history)
    first, second = both(24, layers, history, step_limit=step_limit)
    compare(first, second)
    assert (first[0].executed.float().mean() < 0.8) == (step_limit == 17)
    after = [env.step(torch.zeros(70, 1, 4)) for _, env in (first, second)]
    torch.testing.assert_close(after[0].reward, after[1].reward, rtol=1e-4, atol=1e-4)


def total(rollout):
    """Something that depends on every output that carries gradients, where it was executed."""
    g = torch.Generator().manual_seed(9)
    value = (rollout.reward * torch.randn(rollout.reward.shape, generator=g)).sum()
    value = value + (rollout.actions[rollout.executed].square()).sum()
    for seen in (rollout.observation, rollout.last_observation):
        for key in ("position", "rotation", "velocity", "angular_velocity", "rotor_speed"):
            value = value + 0.1 * (seen[key] * torch.randn(seen[key].shape, generator=g)).sum()
        key = "action_history" if "action_history" in seen.keys() else "previous_action"  # noqa: SIM118
        value = value + seen[key].sum()
    return value


@pytest.mark.parametrize("most", [math.inf, 0.5])
@pytest.mark.parametrize("history", [1, 5])
@pytest.mark.parametrize("step_limit", [500, 17])
def test_gradients_of_an_unroll_equal_autograd_through_steps(history, step_limit, most):
    layers = policy(18 + 4 * history)
    flat = [tensor for layer in layers for tensor in layer]
    found = [
        torch.autograd.grad(total(rollout), flat)
        for rollout, _ in both(24, layers, history, step_limit=step_limit, most=most)
    ]
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-4


@pytest.mark.parametrize("widths", [(), (1,), (8, 8, 8), (130,)])
def test_networks_of_any_shape(widths):
    layers = policy(22, widths)
    flat = [tensor for layer in layers for tensor in layer]
    first, second = both(6, layers, num_envs=3)
    compare(first, second)
    one, other = (torch.autograd.grad(rollout.reward.sum(), flat) for rollout, _ in (first, second))
    for mine, expected in zip(one, other, strict=True):
        assert float((mine - expected).norm()) < 1e-4 * float(expected.norm()) + 1e-6


def test_random_platforms_have_gradients_of_their_own():
    layers = policy(22)
    flat = [tensor for layer in layers for tensor in layer]
    first, second = both(8, layers, airframe=None)
    compare(first, second)
    one, other = (torch.autograd.grad(rollout.reward.sum(), flat) for rollout, _ in (first, second))
    for mine, expected in zip(one, other, strict=True):
        assert float((mine - expected).norm() / expected.norm()) < 2e-4


@needs_compiler
def test_threads_change_nothing():
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            layers = policy(22)
            env = QuadrotorEnvironment(600)
            env.reset(starts=torch.arange(600))
            rollout = env.unroll(layers, 5)
            grads = torch.autograd.grad(rollout.reward.sum(), [tensor for layer in layers for tensor in layer])
        finally:
            torch.set_num_threads(1)
        found.append((rollout.reward.detach(), *grads))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_gradients_begin_at_the_present_state_and_environments_wait_for_a_reset():
    layers, env = policy(22), QuadrotorEnvironment(64, step_limit=10)
    env.reset()
    env.unroll(layers, 6)
    assert not env._state.requires_grad
    stepwise = QuadrotorEnvironment(2, backend="torch")
    stepwise.reset()
    assert stepwise.unroll([(w.requires_grad_(), b) for w, b in policy(22)], 1).reward.requires_grad
    assert not stepwise._state.requires_grad
    rollout = env.unroll(layers, 6)
    assert rollout.done[-1].all()
    assert rollout.executed[:, :, 0].sum(0).tolist() == [4] * 64
    assert (rollout.reward[4:] == 0).all()
    assert rollout.env_steps == 4 * 64
    env.reset(mask=rollout.done[-1])
    assert (env.steps == 0).all()
    assert env.unroll(layers, 3).executed.all()


@needs_compiler
def test_the_compiled_tanh_is_torchs():
    env = QuadrotorEnvironment(64, noise=False)
    env.reset()
    for bias in (-20.0, -3.0, -0.5, -1e-3, 0.0, 1e-6, 0.3, 1.0, 4.0, 9.0, 30.0):
        layers = [(torch.zeros(4, 22), torch.full((4,), bias))]
        action = env.unroll(layers, 1).actions
        assert action == pytest.approx(torch.full_like(action, bias).tanh(), abs=2e-7)


def test_layers_that_do_not_fit_are_refused():
    env = QuadrotorEnvironment(2)
    with pytest.raises(ValueError, match="call reset"):
        env.unroll(policy(22), 3)
    env.reset()
    with pytest.raises(ValueError, match=r"a weight of shape \(20, 22\)"):
        env.unroll(policy(21), 3)
    with pytest.raises(ValueError, match="4 outputs of the last layer, one per rotor, got 64"):
        env.unroll(policy(22)[:-1], 3)
    with pytest.raises(ValueError, match="at least one decision"):
        env.unroll(policy(22), 0)
    chunked = QuadrotorEnvironment(2, executed=2)
    chunked.reset()
    with pytest.raises(ValueError, match=r"use task\.executed=1"):
        chunked.unroll(policy(22), 3)
    assert module.MAX_LAYERS == 8
