"""A traced program: compiled and in plain torch, with gradients, on any device, and with a policy in one call."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from embodied import native
from sims.tracer import unroll
from sims.tracer.kernels import Kernels
from tests.sims.tracer.pendulum import PENDULUM, given

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


@needs_compiler
def test_compiled_and_plain_torch_agree_with_gradients():
    found = []
    for backend in ("c", "torch"):
        inputs = {**given(128), "action": torch.linspace(-1.0, 1.0, 128).unsqueeze(0)}
        del inputs["observation"]
        wanted = [inputs[name].requires_grad_() for name in ("state", "action")]
        after = Kernels([PENDULUM], CPU, backend=backend)("swing", inputs)
        loss = after["reward"].sum() + after["observation"].square().sum()
        found.append([*after.values(), *torch.autograd.grad(loss, wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_function_that_gives_more_rows_than_it_says_is_refused():
    def swing(**rows):
        found = PENDULUM.function(**rows)
        return {**found, "state": [*found["state"], 0.0]}

    with pytest.raises(ValueError, match=r"program swing gives \d rows of state; expected \d"):
        Kernels([replace(PENDULUM, function=swing)], CPU)


def test_other_devices_run_torch_and_say_so():
    assert Kernels([PENDULUM], torch.device("cuda")).backend == "torch"
    with pytest.raises(
        ValueError, match=r"expected a backend of \('c', 'torch'\), c with a compiler on the CPU; got c"
    ):
        Kernels([PENDULUM], torch.device("cuda"), backend="c")
    with pytest.raises(ValueError, match="got cuda"):
        Kernels([PENDULUM], CPU, backend="cuda")


def by_steps(layers, decisions, inputs, past):
    """A reference for `unroll.run`, one step at a time in plain torch."""
    inputs, remembered = dict(inputs), list(past)
    seen, rewards = [inputs.pop("observation")], []
    for _ in range(decisions):
        x = torch.cat((seen[-1][:2], *remembered[-len(past) :])).t()
        for weight, bias in layers:
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        remembered.append(x.t())
        after = PENDULUM.run({**inputs, "action": remembered[-1]})
        inputs |= {name: after[name] for name in ("state", "record")}
        seen.append(after["observation"])
        rewards.append(after["reward"][0])
    return torch.stack(rewards), torch.stack(seen), inputs["state"]


@needs_compiler
@pytest.mark.parametrize("history", [1, 3])
def test_a_policy_in_the_same_call_is_a_loop_over_steps(history):
    g, decisions, lanes = torch.Generator().manual_seed(1), 40, 128
    sizes = [2 + history, 20, 1]  # the policy reads two of three observed rows
    layers = [
        (torch.randn(b, a, generator=g).div_(a**0.5).requires_grad_(), torch.zeros(b).requires_grad_())
        for a, b in pairwise(sizes)
    ]
    flat = [tensor for layer in layers for tensor in layer]
    inputs, past = given(lanes), torch.zeros(history, 1, lanes)
    kernels = Kernels([PENDULUM], CPU, appendix=unroll.source(PENDULUM, observed=2))
    one = unroll.run(kernels.library, PENDULUM, layers, decisions, inputs, past)
    reward, seen, state = by_steps(layers, decisions, inputs, past)
    assert 0.0 < one.executed.mean() < 1.0  # some end in between
    torch.testing.assert_close(one.reward, reward, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one.observation, seen, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one.state[-1], state, rtol=1e-3, atol=1e-3)
    found = torch.autograd.grad(one.reward.mean() + one.observation.square().mean(), flat)
    expected = torch.autograd.grad(reward.mean() + seen.square().mean(), flat)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-3
