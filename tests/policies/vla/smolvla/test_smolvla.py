"""SmolVLA in LeRobot's layout, with a small model: names, numbers, masks, what is refused, and how it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from embodied.errors import UserError
from embodied.policy import Condition
from policies.vla import adapters
from policies.vla.checkpoints.publishing import publish
from policies.vla.inputs import squared
from policies.vla.smolvla.model import action_attention, prefix_attention
from policies.vla.smolvla.policy import SmolVLAConfig, SmolVLAPolicy
from policies.vla.smolvla.publishing import publish as publish_lerobot
from tests.policies.vla.checkpoints.test_weights import changed
from tests.policies.vla.smolvla import files
from tests.policies.vla.test_pi0 import SEEING, seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published folder, which tests only read."""
    return files.save(tmp_path_factory.mktemp("published") / "pretrained_model")


def policy(folder: Path, **options: object) -> SmolVLAPolicy:
    torch.manual_seed(0)
    return SmolVLAConfig(**{"weights": str(folder), "hidden": 16, **options}).build(SEEING)


def plain(made: SmolVLAPolicy, row: int, x: torch.Tensor, time: float) -> torch.Tensor:
    """Velocity of one observation of `seen(2)`, in plain torch."""
    observation, tokens = seen(2), [[2, 3, 4], [5]][row]
    pictures = torch.cat([squared(observation[name], 32, antialias=False, centred=False)[row, None] for name in ORDER])
    return files.velocity(files.tensors(), pictures, tokens, files.padded(observation["fingers"])[row], x, time)


ORDER = "wrist", "front"
"""Cameras in the order of the published configuration, which is not the contract's."""


def velocity(made: SmolVLAPolicy, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    observation = seen(2)
    with torch.no_grad():
        return made._velocity(made._state(observation), made._prefix(observation), x, time)[0]


def test_tensors_have_lerobot_s_names_and_all_are_read(folder: Path) -> None:
    own, published = policy(folder).model.native.state_dict(), files.tensors()
    assert own.keys() == {name.removeprefix("model.") for name in published if "lm_head" not in name}
    assert [name for name, value in own.items() if not value.equal(published[f"model.{name}"])] == []
    assert {value.dtype for value in own.values()} == {torch.float32}  # the configuration names bfloat16


def test_weights_of_a_compiled_model_are_read(folder: Path, tmp_path: Path) -> None:
    files.save(tmp_path)
    compiled = {name.replace("model.", "model._orig_mod.", 1): value for name, value in files.tensors().items()}
    save_file(compiled, tmp_path / "model.safetensors")
    own, other = (policy(each).model.native.state_dict() for each in (folder, tmp_path))
    assert all(value.equal(other[name]) for name, value in own.items())


def test_the_velocity_is_that_of_plain_torch(folder: Path) -> None:
    made, x = policy(folder), torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    found = velocity(made, x, torch.tensor([0.7, 0.31]))
    for row, time in enumerate((0.7, 0.31)):
        torch.testing.assert_close(found[row], plain(made, row, x[row], time), atol=1e-5, rtol=1e-5)
    alike = torch.tensor([[0.7] * 4, [0.31] * 4])
    torch.testing.assert_close(velocity(made, x, alike), found)
    mixed = alike.clone()
    mixed[:, 3] = 0.0  # a time of its own of the last action, which no other attends to
    torch.testing.assert_close(velocity(made, x, mixed)[:, :3], found[:, :3])
    assert (velocity(made, x, mixed)[:, 3] != found[:, 3]).any()


def test_chunks_are_denoised_as_published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy(folder)
    assert made.grid.steps == files.STEPS
    noise = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(made, "_noise", lambda *_: noise)
    x = noise.clone()
    for time in (1.0, 2 / 3, 1 / 3):
        x = x - torch.stack([plain(made, row, x[row], time) for row in range(2)]) / 3
    mean, std = (torch.tensor(each) for each in files.ACTION)
    low, high = (torch.tensor(each) for each in (SEEING.action.low, SEEING.action.high))
    expected = (x[..., :3] * std + mean).clamp(low, high)
    torch.testing.assert_close(made.act(seen(2), deterministic=True).actions, expected, atol=1e-5, rtol=1e-5)


def test_words_and_pictures_do_not_attend_to_the_state_nor_actions_to_later_ones() -> None:
    real = torch.tensor([[1, 1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]])  # four of pictures, words, padding, the state
    read, acted = prefix_attention(real), action_attention(real, 3)
    assert read.shape == (2, 1, 7, 7)
    assert acted.shape == (2, 1, 3, 10)
    visible = files.visible(7, 3)
    for row, tokens in enumerate(real.tolist()):
        for query in range(10):
            for key in range(10 if query >= 7 else 7):
                expected = bool(visible[query, key]) and (key >= 7 or bool(tokens[key]))
                found = acted[row, 0, query - 7, key] if query >= 7 else read[row, 0, query, key]
                assert bool(found) == expected, (row, query, key)


def test_padding_of_words_changes_nothing(folder: Path) -> None:
    made, x = policy(folder), torch.randn(2, 4, 32)
    before = velocity(made, x, torch.tensor([0.5, 0.5]))
    made.inputs.tokenizer.longest = 7
    torch.testing.assert_close(velocity(made, x, torch.tensor([0.5, 0.5])), before)


def test_pictures_of_the_weights_are_resized_as_lerobot_does(folder: Path) -> None:
    made, observation = policy(folder), seen(2)
    observation["front"] = torch.randint(256, (2, 64, 128, 3), dtype=torch.uint8)
    observation["wrist"] = observation["front"]
    whole = observation["front"].movedim(-1, 1).float() / 255.0
    expected = torch.nn.functional.interpolate(whole, (16, 32), mode="bilinear", align_corners=False)
    expected = 2.0 * torch.nn.functional.pad(expected, (0, 0, 16, 0)) - 1.0
    torch.testing.assert_close(made.inputs.pictures(observation, 32)[:, 1], expected, atol=1e-5, rtol=0.0)


def test_an_instruction_ends_with_a_new_line_and_has_no_beginning(folder: Path, tmp_path: Path) -> None:
    made = policy(folder)
    tokens, real = made.inputs.tokens(seen(2))  # "pick the milk", "open"
    assert tokens.shape == (2, 48)
    assert real.sum(1).tolist() == [3, 1]
    assert tokens[:, :3].tolist() == [[2, 3, 4], [5, 0, 0]]
    short = policy(files.save(tmp_path, tokenizer_max_length=2))
    with pytest.raises(UserError, match=r"at most 2 tokens, got 3: 'pick the milk'"):
        short.inputs.tokens(seen(2))


def test_chunks_are_guided_by_the_label_of_a_large_advantage(folder: Path) -> None:
    made, observation = policy(folder, advantage_guidance=2.0), seen(2)
    made.start_conditioning()
    state, prefix = made._inputs_of(observation)
    x, index = torch.randn(2, 4, 32), torch.zeros(2, dtype=torch.int64)
    none, positive = (
        made._velocity(state, made._prefix(observation, torch.full((2,), each)), x, made.grid.times(index))[0]
        for each in (Condition.NONE, Condition.POSITIVE)
    )
    assert (none - positive).abs().max() > 1e-5
    torch.testing.assert_close(
        made._field(state, prefix)(x, index)[0], none + 2.0 * (positive - none), atol=1e-4, rtol=1e-4
    )


def test_a_guided_decision_encodes_pictures_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, counts = policy(folder, advantage_guidance=2.0), []
    made.start_conditioning()
    vision = made.model.native.vlm_with_expert.vlm.model.vision_model
    vision.register_forward_pre_hook(lambda _, __, named: counts.append(len(named["pixel_values"])), with_kwargs=True)
    made.act(seen(2))
    assert counts == [2 * 2]


def test_pictures_lie_at_the_bottom_right_without_antialiasing() -> None:
    image = torch.full((1, 8, 16, 3), 255, dtype=torch.uint8)
    square = squared(image, 16, antialias=False, centred=False)
    assert torch.equal(square[0, 0, :, 5], torch.tensor([-1.0] * 8 + [1.0] * 8))
    assert torch.equal(squared(image.transpose(1, 2), 16, centred=False)[0, 0, 5], square[0, 0, :, 5])
    # 10 x 7 pixels to 16: sides are rounded down, 16 and int(7 / 0.625) = 11
    narrow = squared(image[:, :7, :10], 16, centred=False)
    assert (narrow[0, 0] == 1.0).any(1).sum() == 11
    ramp = (60 * torch.arange(4)).to(torch.uint8).view(1, 1, 4, 1).expand(1, 4, 4, 3)
    # halves without antialiasing are means of two neighbours
    expected = torch.tensor([30.0, 150.0]) / 127.5 - 1.0
    torch.testing.assert_close(squared(ramp, 2, antialias=False, centred=False)[0, 0, 0], expected)


@pytest.mark.parametrize("earlier", [False, True])
def test_statistics_of_both_layouts(tmp_path: Path, earlier: bool) -> None:
    made = policy(files.save(tmp_path, earlier=earlier))
    state, action = (torch.tensor(each) for each in (files.STATE, files.ACTION))
    torch.testing.assert_close(torch.stack((made.inputs.state.mean, made.inputs.state.std)), state)
    torch.testing.assert_close(torch.stack((made.action_mean, made.action_std)), action)
    made.fit(seen(8), torch.rand(8, 4, 3))
    torch.testing.assert_close(made.action_mean, action[0])  # those of the weights stay


def test_weights_without_statistics_need_demonstrations(tmp_path: Path) -> None:
    files.save(tmp_path, earlier=True)
    path = tmp_path / "model.safetensors"
    empty = {name: torch.full_like(value, torch.inf) for name, value in load_file(path).items() if "buffer_" in name}
    save_file(load_file(path) | empty, path)  # LeRobot's buffers before they are filled
    made = policy(tmp_path)
    assert made.lacks_statistics.endswith("has no statistics of state and action")
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        made.act(seen(2))
    made.fit(seen(8), torch.rand(8, 4, 3))
    assert made.act(seen(2)).actions.isfinite().all()


def test_cameras_are_read_in_the_order_of_the_weights(folder: Path, tmp_path: Path, caplog) -> None:
    assert policy(folder).inputs.cameras == list(ORDER)
    assert caplog.messages == []
    inputs = files.config()["input_features"]
    top = {"observation.images.top": inputs.pop("observation.images.wrist")}
    files.save(tmp_path, input_features=inputs | top)
    assert policy(tmp_path).inputs.cameras == ["front", "wrist"]
    assert caplog.messages == [f"policy.weights={tmp_path} has learned with front, top, and sees front, wrist"]
    caplog.clear()
    fewer = replace(SEEING, observation={key: spec for key, spec in SEEING.observation.items() if key != "wrist"})
    assert SmolVLAConfig(weights=str(folder)).build(fewer).inputs.cameras == ["front"]
    assert caplog.messages == []


def without(path: Path, name: str) -> None:
    """The file of tensors without one of them."""
    save_file({key: value for key, value in load_file(path).items() if name not in key}, path)


def with_tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, path)


def with_step(path: Path, name: str) -> None:
    """The processor with one more step."""
    processor = json.loads(path.read_text())
    processor["steps"].append({"registry_name": name, "config": {"enabled": True}})
    path.write_text(json.dumps(processor))


WIDE = {"observation.images.front": {"type": "VISUAL", "shape": [3, 16, 24]}}
QUERIES = "model.vlm_with_expert.lm_expert.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"type": "pi0"}, "cannot read config.json as that of a smolvla (it is of type pi0)"),
        ({"attention_mode": "self_attn"}, 'attention_mode is "self_attn", and only "cross_attn" is supported'),
        ({"add_image_special_tokens": True}, "add_image_special_tokens is true, and only false is supported"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha is true, and only false is supported"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2, and only 1 is supported"),
        ({"num_expert_layers": 2}, "num_expert_layers is 2, and only as many as the 4 layers are supported"),
        ({"resize_imgs_with_padding": [32, 16]}, "resize_imgs_with_padding is [32, 16], expected a square whose sides"),
        ({"chunk_size": "a"}, "cannot read config.json as that of a smolvla (invalid literal"),
        ({"vlm_model_name": "nowhere/vlm"}, "cannot read the configuration of vlm_model_name=nowhere/vlm; name its"),
        ({"input_features": WIDE}, "has learned with front; the task has front, wrist: set task.images"),
        ({"max_state_dim": 1}, "of shape [32, 1] after config.json, got [32, 32]"),
        ({"num_vlm_layers": 5}, "lacks 18 tensors of smolvla, such as vlm_with_expert.lm_expert.layers.4.input_layern"),
        ({"self_attn_every_n_layers": 4}, "layers.2.self_attn.k_proj.weight of shape [16, 16] after config.json, got"),
        (
            lambda at: with_step(at / "policy_preprocessor.json", "relative_actions_processor"),
            "has the step relative_actions_processor, which is not supported",
        ),
        (lambda at: (at / "vlm" / "tokenizer.json").unlink(), "has no tokenizer, and "),
        (
            lambda at: LlamaConfig().save_pretrained(at / "vlm"),
            "cannot read the configuration of vlm_model_name=",
        ),
        (lambda at: (at / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda at: without(at / "model.safetensors", "state_proj.bias"), "lacks 1 tensors of smolvla, such as state"),
        (
            lambda at: with_tensor(at / "model.safetensors", QUERIES, lambda x: x * torch.nan),
            "has infinity or not a number in vlm_with_expert.lm_expert.layers.1.self_attn.q_proj.weight",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict | Callable, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files.save(tmp_path)
    if callable(damage):
        damage(tmp_path)
    else:
        changed(tmp_path, "config.json", **damage)
    with pytest.raises(UserError) as refused:
        policy(tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_frozen_trains_the_expert_and_the_projection_of_the_state(folder: Path) -> None:
    made = policy(folder, frozen=True)
    made.loss(seen(2), torch.rand(2, 4, 3), torch.ones(2, 4)).backward()
    native = made.model.native
    assert all(weight.grad is None for weight in native.vlm_with_expert.vlm.parameters())
    others = [weight for name, weight in native.named_parameters() if ".vlm." not in name]
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in others)


def test_adapters_are_trained_on_frozen_weights_and_merged(folder: Path, tmp_path: Path) -> None:
    made = policy(folder, lora_rank=2)
    names = {name for name, weight in made.model.native.named_parameters() if weight.requires_grad}
    assert {name.partition(".")[0] for name in names if "lora" not in name} == {
        *("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"),
    }
    adapted = {name.partition(".lora_")[0] for name in names if "lora" in name}
    expert = {name for name in adapted if "lm_expert" in name}
    assert len(expert) == 7 * 4  # four layers
    assert len(adapted) == 7 * 4 + 7 * 3 + 2  # of the language model's last layer only keys and values are read
    for name, weight in made.model.native.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    noise = torch.Generator().manual_seed(0)
    expected = made.act(seen(2), generator=noise).actions
    publish(made, tmp_path / "adapters", tmp_path, peft=True)
    again = policy(tmp_path / "adapters")
    assert not adapters.rank_of(again.model.native)
    again.load_state_dict({**again.state_dict(), **{"noise.0.weight": made.noise[0].weight}})
    found = again.act(seen(2), generator=torch.Generator().manual_seed(0)).actions
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_published_folder_of_lerobot_s_acts_the_same(folder: Path, tmp_path: Path, rank: int) -> None:
    made = policy(folder, lora_rank=rank, unnorm_key="demonstrations", denoising_steps=2)
    made.fit(seen(32), torch.rand(32, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    for weight in made.actor_parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    expected = made.act(seen(2), deterministic=True).actions
    out = tmp_path / "out"
    publish_lerobot(made, out, tmp_path)
    again = policy(out)
    torch.testing.assert_close(again.act(seen(2), deterministic=True).actions, expected, atol=1e-4, rtol=1e-4)
    config = json.loads((out / "config.json").read_text())
    assert config["vlm_model_name"] == str(folder / "vlm")
    assert list(config["input_features"]) == [*(f"observation.images.{name}" for name in ORDER), "observation.state"]
    assert (config["num_steps"], config["chunk_size"], config["n_action_steps"]) == (2, 4, 2)
    assert load_file(out / "model.safetensors").keys() == files.tensors().keys()
    assert (out / "README.md").read_text().startswith("---\nbase_model: ")
    with pytest.raises(UserError, match="exists; choose another output"):
        publish_lerobot(made, out, tmp_path)


def test_a_constant_element_of_the_state_is_not_amplified_by_lerobot(folder: Path, tmp_path: Path) -> None:
    made, observation = policy(folder, unnorm_key="demonstrations"), seen(32)
    observation["fingers"][:, 1] = 0.5
    made.fit(observation, torch.rand(32, 4, 3))
    publish_lerobot(made, tmp_path / "out", tmp_path)
    # LeRobot divides by std + 1e-8
    std = load_file(tmp_path / "out" / "policy_preprocessor_step_5_normalizer_processor.safetensors")[
        "observation.state.std"
    ]
    torch.testing.assert_close(std, torch.stack((observation["fingers"][:, 0].std(), torch.tensor(1.0))))


def test_other_names_of_cameras_are_replaced_by_the_published_ones(tmp_path: Path) -> None:
    pictures = {f"observation.images.camera{n}": {"type": "VISUAL", "shape": [3, 16, 24]} for n in (1, 2, 3)}
    made = policy(files.save(tmp_path / "weights", input_features=pictures))
    publish_lerobot(made, tmp_path / "out", tmp_path)
    inputs = json.loads((tmp_path / "out" / "config.json").read_text())["input_features"]
    assert inputs == {
        "observation.images.camera1": {"type": "VISUAL", "shape": [3, 16, 24]},  # front
        "observation.images.camera2": {"type": "VISUAL", "shape": [3, 16, 16]},  # wrist
        "observation.state": {"type": "STATE", "shape": [2]},
    }


def test_lerobot_s_layout_needs_published_weights(tmp_path: Path) -> None:
    made = SmolVLAConfig(hidden=16).build(SEEING)
    with pytest.raises(UserError, match=r"names the vision-language model of policy\.weights"):
        publish_lerobot(made, tmp_path / "out", tmp_path)


def test_a_guided_policy_is_not_published_without_its_label(folder: Path, tmp_path: Path) -> None:
    made = policy(folder, advantage_guidance=2.0)
    made.start_conditioning()
    with pytest.raises(UserError, match=r"the label of their prompt \(offline=recap\); use serve\.py"):
        publish_lerobot(made, tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


def test_transformers_has_no_smolvla(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers has no SmolVLA"):
        publish(policy(folder), tmp_path / "out", tmp_path, peft=False)
    assert not (tmp_path / "out").exists()
