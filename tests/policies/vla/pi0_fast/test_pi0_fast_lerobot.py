"""LeRobot's own class of pi0-FAST, where it can be imported: its losses and its chunks are ours.

Layers are those of the installed transformers, in place of the patched ones that LeRobot needs; its masks, positions,
loss, generation and decoding are its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.fft import dct
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from policies.vla.pi0_fast.policy import Pi0FastConfig, Pi0FastPolicy
from tests.policies.vla.pi0_fast.test_pi0_fast import save
from tests.policies.vla.test_pi0 import SEEING, seen

lerobot: Any = pytest.importorskip("lerobot.policies.pi0_fast.modeling_pi0_fast", exc_type=ImportError)
processing: Any = pytest.importorskip("lerobot.processor.tokenizer_processor", exc_type=ImportError)


class Language(nn.Module):
    """Gemma whose embedding is not scaled, as in LeRobot's transformers."""

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.native, self.layers = native, native.layers

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.native.embed_tokens.weight)

    def forward(self, adarms_cond: None = None, **inputs: Any) -> Any:
        return self.native(**inputs)


class PaliGemma(nn.Module):
    """PaliGemma of `native`, with the interface of LeRobot's transformers."""

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.language_model = Language(native.language_model)
        self.model = SimpleNamespace(
            language_model=self.language_model, get_image_features=lambda x: native.get_image_features(x).pooler_output
        )
        embedding = native.language_model.embed_tokens.weight
        self.lm_head = lambda hidden: hidden @ embedding.T


class Actions:
    """FAST's processor, from its files."""

    def __init__(self, folder: Path) -> None:
        options = json.loads((folder / "processor_config.json").read_text())
        self.scale, self.min_token = options["scale"], options["min_token"]
        self.bpe_tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False
        )

    def __call__(self, chunks: Tensor) -> list[list[int]]:
        numbers = (dct(chunks.numpy(), axis=1, norm="ortho") * self.scale).round()
        texts = ["".join(chr(max(int(each) - self.min_token, 0)) for each in row.flatten()) for row in numbers]
        return [self.bpe_tokenizer(text)["input_ids"] for text in texts]


class Words:
    """Tokenizer that adds an end to a text, as LeRobot loads PaliGemma's."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos_token_id, self.vocab_size = tokenizer.bos_token_id, tokenizer.vocab_size
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id] if add_special_tokens else ids


def made(folder: Path) -> Pi0FastPolicy:
    save(folder)
    options = {"weights": str(folder), "action_tokenizer": str(folder / "fast"), "hidden": 16, "max_tokens": 24}
    return Pi0FastConfig(**options).build(SEEING)


def theirs(policy: Pi0FastPolicy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """LeRobot's network with our weights, its policy around it, and its step that makes tokens of actions."""
    words, actions = Words(policy.inputs.tokenizer.tokenizer), Actions(folder / "fast")
    config = lerobot.PI0FastConfig(
        chunk_size=4, n_action_steps=4, max_action_tokens=24, fast_skip_tokens=20, max_decoding_steps=20, device="cpu"
    )
    monkeypatch.setattr(lerobot, "PaliGemmaForConditionalGeneration", lambda config: PaliGemma(policy.model.native))
    network = lerobot.PI0FastPytorch(config, paligemma_tokenizer=words)
    whole = lerobot.PI0FastPolicy.__new__(lerobot.PI0FastPolicy)
    nn.Module.__init__(whole)
    whole.config, whole.action_tokenizer, whole._paligemma_tokenizer = config, actions, words
    step = processing.ActionTokenizerProcessorStep.__new__(processing.ActionTokenizerProcessorStep)
    step.action_tokenizer, step._paligemma_tokenizer = actions, words
    step.max_action_tokens, step.fast_skip_tokens = 24, 20
    return network, whole, step


def inputs(policy: Pi0FastPolicy, observation: Any) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    pictures, (tokens, real) = policy._read(observation)
    cameras = list(pictures.unbind(1))
    return cameras, [torch.ones(len(tokens), dtype=torch.bool) for _ in cameras], tokens, real.bool()


def test_losses_are_lerobots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made(tmp_path)
    network, _, step = theirs(policy, tmp_path, monkeypatch)
    observation, actions = seen(4), torch.rand(4, 4, 3) * torch.tensor([1.0, 2.0, 3.0])
    tokens, mask = step._tokenize_action(policy.normalised(actions))
    with torch.no_grad():
        expected = network(*inputs(policy, observation), tokens, mask)["loss"]
        found = policy.loss(observation, actions, torch.ones(4, 4))
    print("difference of losses", float((found - expected).abs()), "of", float(expected))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_chunks_are_lerobots_once_answers_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made(tmp_path)
    observation = seen(4)
    slope = torch.linspace(-0.4, 0.4, 4).view(1, 4, 1)
    normalised = torch.where(torch.arange(4).view(4, 1, 1) % 2 == 0, slope, -slope).expand(4, 4, 3)
    actions = normalised * policy.action_std + policy.action_mean
    optimiser = torch.optim.Adam(policy.actor_parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss = policy.loss(observation, actions, torch.ones(4, 4))
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.1
    network, whole, _ = theirs(policy, tmp_path, monkeypatch)
    for generate in (network.sample_actions_fast, network.sample_actions_fast_kv_cache):
        tokens = generate(*inputs(policy, observation), max_decoding_steps=20, temperature=0.0)
        chunks = whole.detokenize_actions(tokens, action_horizon=4, action_dim=3)
        found = policy.normalised(policy.act(observation, deterministic=True).actions)
        print("difference of chunks", float((found - chunks).abs().max()))
        torch.testing.assert_close(found, chunks, rtol=0.0, atol=1e-5)
    assert (found - normalised).abs().max() < 0.2
