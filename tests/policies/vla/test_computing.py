"""Large models on one card: bfloat16, gradient checkpointing and compilation change nothing save by rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PI0Config, PI0ForConditionalGeneration

from embodied.algorithms.micro_batch import saved_bytes
from embodied.errors import UserError
from embodied.networks.precision import Precision
from policies.vla import adapters, computing
from policies.vla.computing import Computing, prepare
from policies.vla.model import Pi0Model
from policies.vla.pi0 import Pi0Config, Pi0Policy, Sampler
from policies.vla.sizes import SIZES, Size
from policies.vla.tokens import TokensPolicy
from tests.policies.vla import test_pi0, test_pi05, test_tokens
from tests.policies.vla.checkpoints.test_weights import save
from tests.policies.vla.test_pi0 import SEEING, seen

BFLOAT16 = {"precision": Precision.BFLOAT16}
KINDS = {
    "pi0": (test_pi0, {}),
    "pi0, every step noisy": (test_pi0, {"sampler": Sampler.FLOW_NOISE}),
    "pi05": (test_pi05, {}),
    "tokens": (test_tokens, {}),
}


def policy(kind: str, **options: object) -> Pi0Policy | TokensPolicy:
    module, usual = KINDS[kind]
    return module.policy(**usual, **options)


def supervised(made: Pi0Policy | TokensPolicy) -> torch.Tensor:
    torch.manual_seed(2)
    return made.loss(seen(4), torch.rand(4, 4, 3), torch.ones(4, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_gives_the_same_gradients_in_a_third_of_the_memory(kind: str) -> None:
    gradients, kept = [], []
    for option in (False, True):
        made = policy(kind, gradient_checkpointing=option)
        sample = made.act(seen(4), generator=torch.Generator().manual_seed(0)).sample
        passes = lambda made=made, sample=sample: made.evaluate(seen(4), sample).log_prob.mean()  # noqa: E731
        kept.append([saved_bytes(passes), saved_bytes(lambda made=made: supervised(made))])
        (passes() + supervised(made)).backward()
        gradients.append({name: weight.grad for name, weight in made.named_parameters() if weight.grad is not None})
    assert all(3 * less < more for more, less in zip(*kept, strict=True)), kept
    assert gradients[0].keys() == gradients[1].keys()
    assert any(".language_model.layers.0." in name for name in gradients[0])
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_what_acted_is_scored_the_same_and_nearly_as_in_float32(kind: str) -> None:
    exact, made = policy(kind), policy(kind, **BFLOAT16)
    decision = made.act(seen(8), generator=torch.Generator().manual_seed(0))
    scored = made.evaluate(seen(8), decision.sample)
    for part in (scored.log_prob, scored.entropy, scored.value, decision.log_prob, decision.actions):
        assert part.dtype == torch.float32
    torch.testing.assert_close(scored.log_prob, decision.log_prob, atol=1e-4, rtol=1e-4)
    expected = exact.evaluate(seen(8), decision.sample).log_prob
    torch.testing.assert_close(scored.log_prob, expected, atol=0.1, rtol=0.02)
    assert not torch.equal(scored.log_prob, expected)
    assert made.loss(seen(4), torch.rand(4, 4, 3), torch.ones(4, 4)).dtype == torch.float32


def test_the_base_of_adapters_is_stored_in_half_and_what_is_trained_is_not(tmp_path: Path) -> None:
    save(tmp_path, "transformers")
    made = Pi0Config(weights=str(tmp_path), lora_rank=2, hidden=16, **BFLOAT16).build(SEEING)
    for weight in made.parameters():
        stored = torch.bfloat16 if not weight.requires_grad and weight.ndim > 1 else torch.float32
        assert weight.dtype == stored
    fresh = made.with_new_weights()
    pairs = zip(made.model.parameters(), fresh.model.parameters(), strict=True)
    assert all((mine.data_ptr() == other.data_ptr()) == (not mine.requires_grad) for mine, other in pairs)
    optimiser = torch.optim.AdamW(made.actor_parameters(), 1e-3, fused=True)
    supervised(made).backward()
    optimiser.step()
    assert {weight.grad.dtype for weight in made.model.parameters() if weight.grad is not None} == {torch.float32}
    fresh.load_state_dict(made.state_dict())
    actions = [each.act(seen(3), deterministic=True).actions for each in (made, fresh)]
    assert torch.equal(*actions)


def test_the_published_size_is_stored_in_seven_gigabytes() -> None:
    with torch.device("meta"):
        made = Pi0Model(PI0ForConditionalGeneration(PI0Config()))
    whole = sum(weight.nbytes for weight in made.parameters())
    adapters.adapt(made, 16)
    prepare(made, Computing(precision=Precision.BFLOAT16))
    assert whole > 12e9
    assert sum(weight.nbytes for weight in made.parameters()) < 7e9


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without making kernels, which takes minutes on a CPU, of models of one layer."""
    monkeypatch.setitem(SIZES, Size.TINY, replace(SIZES[Size.TINY], layers=1, seeing_layers=1))
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(computing, "_compiled", cache(lambda function: torch.compile(function, backend="aot_eager")))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["pi0", "tokens"])
def test_compiled_whole_it_computes_the_same_and_is_not_compiled_again(kind: str) -> None:
    plain, made = policy(kind), policy(kind, compile=True, gradient_checkpointing=kind == "pi0")
    acted = [each.act(seen(3), deterministic=True) for each in (plain, made)]
    torch.testing.assert_close(acted[1].actions, acted[0].actions, atol=1e-4, rtol=0.0)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == (2 if kind == "pi0" else 1)  # prefix and denoising step; whole chunk
    for chunk in range(3):
        made.act(seen(3, seed=chunk + 1))
    assert counters["stats"]["unique_graphs"] == graphs
    if kind == "pi0":
        for each in (plain, made):
            each.evaluate(seen(3), acted[0].sample).log_prob.mean().backward()
        weights = zip(plain.named_parameters(), made.parameters(), strict=True)
        for (name, weight), other in weights:
            if weight.grad is not None:
                torch.testing.assert_close(other.grad, weight.grad, atol=1e-4, rtol=1e-4, msg=name)
    assert not counters["graph_break"]


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"policy\.compile=true needs a C\+\+ compiler, but there is no no-such"):
        Pi0Config(hidden=16, compile=True).build(SEEING)
