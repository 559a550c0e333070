"""GR00T in the layouts of NVIDIA and LeRobot, with a small model: names, numbers, refusals, and how it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied.errors import UserError
from embodied.policy import Condition
from policies.vla import adapters
from policies.vla.checkpoints.publishing import publish
from policies.vla.groot.policy import GrootConfig, GrootPolicy, stretched
from policies.vla.groot.publishing import publish as publish_lerobot
from tests.policies.vla.checkpoints.test_weights import changed
from tests.policies.vla.groot import files
from tests.policies.vla.test_pi0 import SEEING, seen

ORDER = "front", "wrist"
"""Cameras in the order of LeRobot, by name."""
SENTENCES = "pick the milk", "open"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published folder, which tests only read."""
    return files.save(tmp_path_factory.mktemp("published") / "pretrained_model")


def policy(folder: Path, **options: object) -> GrootPolicy:
    torch.manual_seed(0)
    return GrootConfig(**{"weights": str(folder), "hidden": 16, **options}).build(SEEING)


def plain(row: int, x: torch.Tensor, times: list[float]) -> list[torch.Tensor]:
    """Velocities of one observation of `seen(2)` at each time, in plain torch."""
    observation, model = seen(2), files.Plain(files.tensors())
    pictures = torch.cat([stretched(observation[name], files.SIDE)[row, None] for name in ORDER])
    features = model.features(pictures, files.tokens(2, SENTENCES[row]))
    state = files.normalised(observation["fingers"][row], files.STATE)
    state = torch.nn.functional.pad(state, (0, files.STATE_SIZE - 2))
    return [model.velocity(features, state, x, time) for time in times]


def velocity(made: GrootPolicy, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    observation = seen(2)
    with torch.no_grad():
        return made._velocity(made._state(observation), made._prefix(observation), x, time)[0]


def test_tensors_have_published_names_and_all_are_read(folder: Path) -> None:
    own, published = policy(folder).model.native.state_dict(), files.tensors()
    renamed = {name.replace("vision_model.vision_model", "vision_model"): value for name, value in published.items()}
    unread = {name for name in renamed if "lm_head" in name or "vision_model.head" in name}
    assert own.keys() == renamed.keys() - unread
    assert [name for name, value in own.items() if not value.equal(renamed[name])] == []
    assert {value.dtype for value in own.values()} == {torch.float32}  # the configuration names bfloat16


def test_an_embedding_that_is_stored_as_the_vocabularys_head_is_read(folder: Path, tmp_path: Path) -> None:
    files.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    language = "_groot_model.backbone.eagle_model.language_model."
    tensors[f"{language}lm_head.weight"] = tensors.pop(f"{language}model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    own, other = (policy(each).model.native.state_dict() for each in (folder, tmp_path))
    assert all(value.equal(other[name]) for name, value in own.items())


def test_nvidias_own_folder_is_read_for_a_new_embodiment_without_statistics(folder: Path, tmp_path: Path) -> None:
    base = files.save_base(tmp_path / "base")
    files.save_eagle(base / "eagle")
    changed(base, "config.json", tokenizer_assets_repo="eagle", action_head_cfg={**HEAD, "max_num_embodiments": 32})
    wide = {
        name: torch.cat([value] * 7)[:32] if name.endswith((".W", ".b")) else value
        for name, value in files.tensors().items()
    }
    save_file(wide, base / "model.safetensors")
    made, other = policy(base), policy(folder).model.native.state_dict()
    assert made.model.native.architecture.embodiment == 31
    assert made.lacks_statistics.endswith("has no statistics of state and action")
    own = made.model.native.state_dict()
    assert all(value.equal(other[name]) for name, value in own.items() if not name.endswith((".W", ".b")))
    made.fit(seen(32), torch.rand(32, 4, 3))
    publish_lerobot(made, tmp_path / "out", tmp_path)
    again = policy(tmp_path / "out")
    assert again.model.native.architecture.embodiment == 31
    expected = made.act(seen(2), deterministic=True).actions
    torch.testing.assert_close(again.act(seen(2), deterministic=True).actions, expected, atol=1e-5, rtol=1e-5)


def test_the_prompt_is_the_chat_of_pictures_and_instruction(folder: Path) -> None:
    made = policy(folder)
    tokens, real = made.inputs.tokens(seen(2))
    for row, sentence in enumerate(SENTENCES):
        expected = files.tokens(2, sentence)
        assert tokens[row, real[row].bool()].tolist() == expected
        assert real[row, : len(expected)].all()
    assert tokens.shape[1] == len(files.tokens(2, SENTENCES[0]))
    decoded = made.inputs.tokenizer.tokenizer.decode(tokens[0, real[0].bool()])
    assert decoded == files.prompt(2, "pick the milk")
    assert "['Perform the task.']" in made.inputs.tokenizer.tokenizer.decode(made.inputs.tokenizer._ids(""))


def test_the_velocity_is_that_of_plain_torch(folder: Path) -> None:
    made, x = policy(folder), torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    found = velocity(made, x, torch.tensor([0.7, 0.31]))
    for row, time in enumerate((0.7, 0.31)):
        torch.testing.assert_close(found[row], plain(row, x[row], [time])[0], atol=2e-5, rtol=1e-5)


def test_chunks_are_denoised_as_published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy(folder)
    assert made.grid.steps == files.STEPS
    noise = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(made, "_noise", lambda *_: noise)
    x = noise.clone()
    for time in (1.0, 2 / 3, 1 / 3):
        x = x - torch.stack([plain(row, x[row], [time])[0] for row in range(2)]) / 3
    low, high = (torch.tensor(each) for each in files.ACTION)
    limits = (torch.tensor(each) for each in (SEEING.action.low, SEEING.action.high))
    expected = ((x[..., :3] + 1.0) / 2.0 * (high - low) + low).clamp(*limits)
    torch.testing.assert_close(made.act(seen(2), deterministic=True).actions, expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("steps", [3, 4, 7, 10, 30])
def test_times_of_a_grid_are_in_the_buckets_that_lerobot_computes(folder: Path, steps: int) -> None:
    made = policy(folder, denoising_steps=steps)
    found = made.model.native.action_head._bucket(made.grid.times(torch.arange(steps)))
    assert found.tolist() == [int(step / float(steps) * 1000) for step in range(steps)]


def test_the_loss_is_that_of_plain_torch_at_its_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, actions = policy(folder), torch.rand(2, 4, 3) * torch.tensor([1.0, 2.0, 3.0])
    times, noise = torch.tensor([0.25, 1.0008]), torch.randn(2, 4, 32)  # later than the noise, which Beta / 0.999 gives
    monkeypatch.setattr(made.model, "training_times", lambda *_: times)
    monkeypatch.setattr(torch, "randn_like", lambda _: noise)
    found = made.loss(seen(2), actions, torch.ones(2, 4))
    target = torch.nn.functional.pad(files.normalised(actions, files.ACTION), (0, 29))
    errors = []
    for row, time in enumerate((0.25, 1.0)):
        t = times[row]
        mixed = plain(row, t * noise[row] + (1 - t) * target[row], [time])[0]
        errors.append((mixed - noise[row] + target[row])[:, :3].square())
    torch.testing.assert_close(found, torch.cat(errors).mean(), atol=1e-5, rtol=1e-5)


def test_times_of_the_loss_are_beta_distributed(folder: Path) -> None:
    made = policy(folder)
    torch.manual_seed(0)
    times = made.model.training_times(20_000, made.device) * 0.999
    # Beta(1.5, 1): mean 1.5 / 2.5, variance 1.5 / (2.5^2 3.5)
    assert abs(float(times.mean()) - 0.6) < 0.01
    assert abs(float(times.var()) - 1.5 / (2.5**2 * 3.5)) < 0.003


def test_pictures_are_stretched_and_rounded() -> None:
    images = torch.zeros(1, 16, 64, 3, dtype=torch.uint8)
    images[:, :, 32:] = 255
    found = stretched(images, 32)
    assert found.shape == (1, 3, 32, 32)
    assert (found[..., :12] == -1.0).all()
    assert (found[..., 20:] == 1.0).all()  # no black margin
    pixels = (found + 1.0) * 127.5
    torch.testing.assert_close(pixels, pixels.round(), atol=1e-4, rtol=0.0)


def test_ranges_of_demonstrations_normalise_state_and_actions(folder: Path) -> None:
    made, observation = policy(folder, unnorm_key="demonstrations"), seen(32)
    actions = torch.rand(32, 4, 3) * torch.tensor([1.0, 2.0, 3.0])
    made.fit(observation, actions)
    state = made._state(observation)
    torch.testing.assert_close(state.amin(0), -torch.ones(2))
    torch.testing.assert_close(state.amax(0), torch.ones(2))
    flat = actions.flatten(0, 1)
    torch.testing.assert_close(made.action_mean - made.action_std, flat.amin(0))
    torch.testing.assert_close(made.action_mean + made.action_std, flat.amax(0))


HEAD = files.base_config()["action_head_cfg"]
DIFFUSION = HEAD["diffusion_model_cfg"]


def in_base(**changes: object) -> Callable[[Path], None]:
    return lambda at: changed(at / files.BASE, "config.json", action_head_cfg={**HEAD, **changes})


def in_eagle(**changes: object) -> Callable[[Path], None]:
    return lambda at: changed(at / files.EAGLE, "config.json", **changes)


def in_processor(**changes: object) -> Callable[[Path], None]:
    def change(at: Path) -> None:
        processor = json.loads((at / "policy_preprocessor.json").read_text())
        processor["steps"][0]["config"] |= changes
        (at / "policy_preprocessor.json").write_text(json.dumps(processor))

    return change


def without(at: Path) -> None:
    tensors = load_file(at / "model.safetensors")
    del tensors["_groot_model.action_head.vlln.bias"]
    save_file(tensors, at / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"type": "pi0"}, "cannot read config.json as that of a groot (it is of type pi0)"),
        ({"base_model_path": "nowhere/base"}, "cannot read the configuration of base_model_path=nowhere/base"),
        ({"tokenizer_assets_repo": "nowhere/eagle"}, "cannot read the configuration of Eagle in nowhere/eagle"),
        (in_base(noise_s=1.0), "noise_s is 1.0, and only 0.999 is supported"),
        (in_base(hidden_size=21), "output_dim makes a width of 20, expected 21"),
        (
            in_base(diffusion_model_cfg={**DIFFUSION, "norm_type": "layer_norm"}),
            'norm_type is "layer_norm", and only "ada_norm" is supported',
        ),
        (
            in_base(diffusion_model_cfg={k: v for k, v in DIFFUSION.items() if k != "interleave_self_attention"}),
            "interleave_self_attention is false, and only true is supported",
        ),
        (in_base(max_state_dim=41), "of shape [5, 41, 20] after config.json, got [5, 40, 20]"),
        (in_base(max_num_embodiments=3), "the embodiment unitree_g1 is number 3 of 3"),
        (in_eagle(use_pixel_shuffle=True), "use_pixel_shuffle is true, and only false is supported"),
        (
            in_eagle(text_config={**files.eagle_config()["text_config"], "architectures": ["LlamaForCausalLM"]}),
            "the language model is LlamaForCausalLM, and only Qwen3ForCausalLM is supported",
        ),
        (
            in_eagle(text_config={**files.eagle_config()["text_config"], "tie_word_embeddings": False}),
            "tie_word_embeddings is false, and only true is supported",
        ),
        (in_processor(formalize_language=True), "formalize_language is true, and only false is supported"),
        (lambda at: (at / files.EAGLE / "chat_template.json").unlink(), "there is no chat_template.json in"),
        (lambda at: (at / files.EAGLE / "tokenizer.json").unlink(), "has no tokenizer, and "),
        (lambda at: (at / "model.safetensors").unlink(), "has no model.safetensors"),
        (without, "lacks 1 tensors of groot, such as action_head.vlln.bias"),
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


def test_options_and_chats_that_gr00t_does_not_read_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"leave out policy\.trained_delay"):
        policy(folder, trained_delay=1)
    with pytest.raises(UserError, match="leave out delay"):
        GrootConfig(hidden=16).build(SEEING.delayed(1))
    made = policy(folder)
    made.inputs.tokenizer.tokenizer.chat_template = files.TEMPLATE.replace("<image-", "<picture-")
    with pytest.raises(UserError, match="expected 32 tokens <IMG_CONTEXT> in the prompt, got 0: 'pick the milk'"):
        made.act(seen(1))


def test_frozen_trains_the_action_head(folder: Path) -> None:
    made = policy(folder, frozen=True)
    made.loss(seen(2), torch.rand(2, 4, 3), torch.ones(2, 4)).backward()
    native = made.model.native
    assert all(weight.grad is None for weight in native.backbone.parameters())
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in native.action_head.parameters())
    encoder = native.action_head.state_encoder.layer1.W.grad
    assert [bool(row.any()) for row in encoder] == [row == files.EMBODIMENT for row in range(files.EMBODIMENTS)]


def test_a_condition_is_read_and_guides(folder: Path) -> None:
    made, observation = policy(folder, advantage_guidance=2.0), seen(2)
    before = made.act(observation, deterministic=True).actions
    made.start_conditioning()
    assert (made.act(observation, deterministic=True).actions != before).any()
    tokens, real = made.inputs.tokens(observation, torch.tensor([Condition.POSITIVE] * 2))
    text = made.inputs.tokenizer.tokenizer.decode(tokens[1, real[1].bool()])
    assert text == files.prompt(2, "open") + "Advantage: positive\n"


def test_adapters_are_trained_on_frozen_weights_and_merged(folder: Path, tmp_path: Path) -> None:
    made = policy(folder, lora_rank=2)
    names = {name for name, weight in made.model.native.named_parameters() if weight.requires_grad}
    full = {".".join(name.split(".")[:2]) for name in names if "lora" not in name}
    assert full == {f"action_head.{part}" for part in ("state_encoder", "action_encoder", "action_decoder")}
    adapted = {name.partition(".lora_")[0] for name in names if "lora" in name}
    expert = {name for name in adapted if name.startswith("action_head.model.")}
    assert len(expert) == 6 * files.ACTING_LAYERS
    assert len(adapted) == 6 * files.ACTING_LAYERS + 7 * files.KEPT
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
    made = policy(folder, lora_rank=rank, unnorm_key="demonstrations")
    made.fit(seen(32), torch.rand(32, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    for weight in made.actor_parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    expected = made.act(seen(2), deterministic=True).actions
    out = tmp_path / "out"
    publish_lerobot(made, out, tmp_path)
    again = policy(out)
    torch.testing.assert_close(again.act(seen(2), deterministic=True).actions, expected, atol=1e-4, rtol=1e-4)
    assert again.model.native.architecture.embodiment == files.EMBODIMENT
    config = json.loads((out / "config.json").read_text())
    assert config["base_model_path"] == str(folder / "base")
    assert config["tokenizer_assets_repo"] == str(folder / "eagle")
    assert list(config["input_features"]) == [*(f"observation.images.{name}" for name in ORDER), "observation.state"]
    assert (config["chunk_size"], config["n_action_steps"]) == (4, 2)
    tensors = load_file(out / "model.safetensors")
    names = {name for name in load_file(folder / "model.safetensors") if "lm_head" not in name}
    assert tensors.keys() == names  # the head is the embedding, and another one would replace it
    assert (out / "README.md").read_text().startswith("---\nbase_model: ")
    with pytest.raises(UserError, match="exists; choose another output"):
        publish_lerobot(made, out, tmp_path)


def test_elements_that_never_varied_are_in_the_middle(folder: Path, tmp_path: Path) -> None:
    made, out = policy(folder, unnorm_key="demonstrations"), tmp_path / "out"
    made.fit(seen(32), torch.rand(32, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    publish_lerobot(made, out, tmp_path)
    (path,) = out.glob("policy_preprocessor*.safetensors")
    tensors = load_file(path)
    for name in ("action.min", "action.max"):
        tensors[name][1] = 0.25
    save_file(tensors, path)
    again = policy(out)
    # LeRobot: 0 where min = max; pi0 has -1
    torch.testing.assert_close(again.to_robot(torch.zeros(3))[1], torch.tensor(0.25))


def test_lerobot_s_layout_needs_published_weights_and_the_base_s_steps(folder: Path, tmp_path: Path) -> None:
    made = GrootConfig(hidden=16).build(SEEING)
    with pytest.raises(UserError, match=r"names the vision-language model of policy\.weights"):
        publish_lerobot(made, tmp_path / "out", tmp_path)
    with pytest.raises(UserError, match=r"reads policy\.denoising_steps from GR00T's base, 3, and this policy has 2"):
        publish_lerobot(policy(folder, denoising_steps=2), tmp_path / "out", tmp_path)
    with pytest.raises(UserError, match="transformers has no GR00T; use target=lerobot"):
        publish(policy(folder), tmp_path / "out", tmp_path, peft=False)
    assert not (tmp_path / "out").exists()
