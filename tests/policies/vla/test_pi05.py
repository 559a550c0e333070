"""pi0.5 with a small random model: its prompt, its expert against a plain one, and published weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, silu
from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

from embodied.errors import UserError
from policies.vla.adaptive import Pi05Model
from policies.vla.checkpoints.publishing import publish
from policies.vla.model import untrained
from policies.vla.pi05 import Pi05Config, Pi05Policy
from policies.vla.sizes import Size
from tests.policies.vla.checkpoints.test_weights import save
from tests.policies.vla.test_pi0 import SEEING, seen

LOW, HIGH = torch.tensor([0.0, -2.0]), torch.tensor([1.0, 2.0])


def policy(**options: object) -> Pi05Policy:
    torch.manual_seed(0)
    made = Pi05Config(**{"hidden": 16, **options}).build(SEEING)
    for parameter in made.parameters():  # so that no layer has its special initial weights
        parameter.data += 0.1 * torch.randn_like(parameter)
    made.fit(seen(64), torch.rand(64, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    return made


def test_the_prompt_tells_the_bins_of_the_state() -> None:
    made, observation = policy(), seen(4)
    made.inputs.state.mean.copy_((LOW + HIGH) / 2)
    made.inputs.state.std.copy_((HIGH - LOW) / 2)
    observation["fingers"] = torch.tensor([[0.0, 0.0], [1.0, -2.0], [0.999, 1.99], [0.3, 5.0]])
    normalised = 2 * (observation["fingers"] - LOW) / (HIGH - LOW) - 1
    bins = np.digitize(normalised.numpy(), np.linspace(-1, 1, 257)[:-1]) - 1
    words = ["pick the milk", "open"] * 2
    expected = [f"Task: {said}, State: {a} {b};\nAction: " for said, (a, b) in zip(words, bins, strict=True)]
    assert made.inputs.prompts(observation) == expected
    assert expected[0] == "Task: pick the milk, State: 0 128;\nAction: "
    tokens, real = made.inputs.tokens(observation)
    assert real.sum(1).tolist() == [1 + len(prompt) for prompt in expected]
    assert bytes((tokens[1][real[1].bool()][1:] - 2).tolist()).decode() == expected[1]


def test_the_range_of_the_state_is_between_quantiles() -> None:
    made, observation = policy(), seen(201)
    observation["fingers"][:, 0] = torch.arange(201.0)
    observation["fingers"][:, 1] = 7.0
    made.inputs.fit(observation)
    torch.testing.assert_close(made.inputs.state.mean, torch.tensor([100.0, 7.0]))
    torch.testing.assert_close(made.inputs.state.scale, torch.tensor([98.0, 1.0]))
    observation["fingers"][:, 1] = 0.001 * torch.arange(201.0)  # a range of 0.2 mm is one, too
    made.inputs.fit(observation)
    torch.testing.assert_close(made.inputs.state.scale, torch.tensor([98.0, 0.098]))


def plain(made: Pi05Policy, observation: object, x: torch.Tensor, time: float) -> torch.Tensor:
    """The expert's velocity, one matrix after the other."""
    native, prefix = made.model.native, made._prefix(observation)
    embedding, expert = native.embed_action_time, native.model.dit
    frequency = embedding.sinusoid_embeds.sinusoid_freq
    angle = torch.cat(((frequency * time).sin(), (frequency * time).cos()))
    condition = silu(embedding.time_mlp_out(silu(embedding.time_mlp_in(angle))))

    def normed(norm: object, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift, gate = norm.dense(condition).split(hidden.shape[-1])
        return hidden / (hidden.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * (1 + scale) + shift, gate

    hidden, count, steps = embedding.action_in_proj(x), len(x), x.shape[1]
    places = prefix.real.sum(1, keepdim=True) + torch.arange(steps)
    cosine, sine = expert.rotary_emb(hidden, places)
    mask = torch.cat((prefix.real.bool(), torch.ones(count, steps, dtype=torch.bool)), 1)[:, None, None]
    for index, layer in enumerate(expert.layers):
        inside, gate = normed(layer.input_layernorm, hidden)
        of = layer.self_attn
        query, key, value = (
            part(inside).view(count, steps, -1, of.head_dim).transpose(1, 2)
            for part in (of.q_proj, of.k_proj, of.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cosine, sine)
        keys, values = prefix.keys_values[index]
        key, value = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        score = (query @ key.transpose(2, 3) * of.head_dim**-0.5).masked_fill(~mask, -torch.inf)
        hidden = hidden + gate * of.o_proj((score.softmax(-1) @ value).transpose(1, 2).reshape(count, steps, -1))
        inside, gate = normed(layer.post_attention_layernorm, hidden)
        dense = layer.mlp
        hidden = hidden + gate * dense.down_proj(
            gelu(dense.gate_proj(inside), approximate="tanh") * dense.up_proj(inside)
        )
    return native.action_out_proj(normed(native.final_norm, hidden)[0])


def test_the_expert_is_gated_by_time_and_attends_to_all_actions() -> None:
    made, observation = policy(denoising_steps=2), seen(3)
    path = made.act(observation, deterministic=True).sample["path"]
    with torch.no_grad():
        for step, time in enumerate((1.0, 0.5)):
            expected = path[:, step] - plain(made, observation, path[:, step], time) / 2
            torch.testing.assert_close(path[:, step + 1], expected, atol=1e-5, rtol=1e-5)
    moved = observation.clone()
    moved["fingers"][0] += 0.3
    first, second = (
        made.model.velocity(made._prefix(each), None, path[:, 0], torch.ones(3))[0] for each in (observation, moved)
    )
    assert (first[0] != second[0]).any()  # the state is read
    torch.testing.assert_close(first[1:], second[1:])


def named(naming: str) -> dict[str, torch.Tensor]:
    """Tensors of a small model as LeRobot or openpi name them."""
    torch.manual_seed(3)
    native = Pi05Model(untrained(Size.TINY, 4, 2, 3).native).native
    for weight in native.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    before = {
        "model.vlm.language_model.embed_tokens.": "paligemma_with_expert.paligemma.lm_head.",
        "model.vlm.": "paligemma_with_expert.paligemma.model.",
        "model.dit.": "paligemma_with_expert.gemma_expert.model.",
        "final_norm.": "paligemma_with_expert.gemma_expert.model.norm.",
        "embed_action_time.": "",
        "action_out_proj.": "action_out_proj.",
    }
    tensors = {}
    for name, value in native.state_dict().items():
        start = next(each for each in before if name.startswith(each))
        renamed = before[start] + name.removeprefix(start)
        renamed = renamed.replace("vision_tower.", "vision_tower.vision_model.")
        tensors[("model." if naming == "lerobot" else "") + renamed] = value.contiguous()
    return tensors


@pytest.mark.parametrize("naming", ["lerobot", "openpi"])
def test_weights_and_statistics_of_each_naming(naming: str, tmp_path: Path) -> None:
    save(tmp_path, naming)
    tensors = named(naming)
    assert any(name.endswith("gemma_expert.model.layers.1.input_layernorm.dense.bias") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text()) | (
        {"type": "pi05"} if naming == "lerobot" else {"pi05": True}
    )
    (tmp_path / "config.json").write_text(json.dumps(said))
    state, action = ([0.0, -2.0], [1.0, 2.0]), ([-1.0, 0.0, 1.0], [1.0, 2.0, 5.0])
    if naming == "lerobot":
        given = dict(zip(("observation.state.q01", "observation.state.q99"), map(torch.tensor, state), strict=True))
        given |= dict(zip(("action.q01", "action.q99"), map(torch.tensor, action), strict=True))
        save_file(given, tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    else:
        stats = {of: {"q01": low, "q99": high} for of, (low, high) in (("state", state), ("actions", action))}
        (tmp_path / "assets" / "robot" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    made = Pi05Config(weights=str(tmp_path), hidden=16).build(SEEING)
    torch.manual_seed(3)
    expected = Pi05Model(untrained(Size.TINY, 4, 2, 3).native).native
    for weight in expected.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    found = made.model.native.state_dict()
    assert [name for name, value in expected.state_dict().items() if not torch.equal(found[name], value)] == []
    torch.testing.assert_close(made.inputs.state.mean, torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(made.inputs.state.std, torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(made.action_mean, torch.tensor([0.0, 1.0, 3.0]))
    torch.testing.assert_close(made.action_std, torch.tensor([1.0, 1.0, 2.0]))
    tokens = made.inputs.tokens(seen(2))[0]
    assert tokens.shape == (2, 200)
    assert tokens[0, 0] == 1
    whole = made.act(seen(2), deterministic=True).actions
    adapted = Pi05Config(weights=str(tmp_path), hidden=16, lora_rank=2).build(SEEING)
    torch.testing.assert_close(adapted.act(seen(2), deterministic=True).actions, whole)
    assert sum(".lora_B" in name for name in adapted.state_dict()) == 7 + 2 + 2 * 7
    with pytest.raises(UserError, match=r"transformers has no pi0\.5"):
        publish(made, tmp_path / "out", tmp_path, peft=False)
    gone = next(iter(name for name in tensors if name.endswith("time_mlp_in.bias")))
    save_file({name: value for name, value in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks 1 tensors of pi05, such as embed_action_time\.time_mlp_in\.bias"):
        Pi05Config(weights=str(tmp_path), hidden=16).build(SEEING)
    (tmp_path / "config.json").write_text(json.dumps(said | {"type": "pi0"}))
    with pytest.raises(UserError, match=r"cannot read config\.json as that of a pi05 \(it is of type pi0\)"):
        Pi05Config(weights=str(tmp_path), hidden=16).build(SEEING)
