"""Checkpoints that LeRobot itself writes, where it is installed: chunks and losses are its own."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.text import encode, text_spec
from policies.diffusion import DiffusionConfig
from policies.lerobot.act import ACTConfig
from policies.lerobot.publishing import publish
from policies.vla.smolvla.policy import SmolVLAConfig
from tests.policies.vla.smolvla import files as smolvla_files

pytest.importorskip("torchvision")
types = pytest.importorskip("lerobot.configs.types", exc_type=ImportError)
act = [pytest.importorskip(f"lerobot.policies.act.{part}_act") for part in ("modeling", "configuration", "processor")]
diffusion = [
    pytest.importorskip(f"lerobot.policies.diffusion.{part}_diffusion")
    for part in ("modeling", "configuration", "processor")
]

SIZES = {"observation.images.top": (3, 64, 48), "observation.images.wrist": (3, 64, 48), "observation.state": (7,)}
KINDS = {"observation.images.top": "VISUAL", "observation.images.wrist": "VISUAL", "observation.state": "STATE"}
OUTPUT = {"action": types.PolicyFeature(types.FeatureType.ACTION, (6,))}
CHUNK = 16


class Clipped(DDIMScheduler):
    """DDIM that derives the noise from clipped actions, as DiffusionPolicy acts."""

    def step(self, *args: Any, **options: Any) -> Any:
        return super().step(*args, **options, use_clipped_model_output=True)


def inputs() -> dict[str, Any]:
    return {name: types.PolicyFeature(types.FeatureType[KINDS[name]], size) for name, size in SIZES.items()}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomised(policy: torch.nn.Module) -> torch.nn.Module:
    """`policy` with random weights, also of its frozen normalisation."""
    noise = generator(1)
    for name, value in policy.state_dict().items():
        if value.is_floating_point() and "pos_" not in name:
            drawn = torch.rand(value.shape, generator=noise) if "running_var" in name else None
            value.copy_(0.5 + drawn if drawn is not None else value + 0.05 * torch.randn(value.shape, generator=noise))
    return policy.eval()


def saved(folder: Path, policy: Any, processors: Any) -> tuple[Any, Any]:
    """Write policy and processors; returns the processors, with random statistics."""
    noise, statistics = generator(2), {}
    for name, size in {**SIZES, "action": (6,)}.items():
        low = torch.randn(size if len(size) == 1 else (3, 1, 1), generator=noise)
        high = low + 0.5 + torch.rand(low.shape, generator=noise)
        std = 0.3 + torch.rand(low.shape, generator=noise)
        statistics[name] = {"min": low, "max": high, "mean": (low + high) / 2, "std": std}
    pre, post = processors(policy.config, statistics)
    for part in (policy, pre, post):
        part.save_pretrained(folder)
    return pre, post


def published(own: Any, folder: Path, kind: Any) -> tuple[Any, Any, Any]:
    """LeRobot's policy of a `kind` and processors of the folder of our policy with other weights."""
    with torch.no_grad():
        for weight in own.actor_parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator(8))
    publish(own, folder, folder)
    pipeline = pytest.importorskip("lerobot.processor")
    read = pipeline.PolicyProcessorPipeline.from_pretrained
    converters = {
        "to_transition": pipeline.converters.policy_action_to_transition,
        "to_output": pipeline.converters.transition_to_policy_action,
    }
    before = read(folder, config_filename="policy_preprocessor.json")
    after = read(folder, config_filename="policy_postprocessor.json", **converters)
    return kind.from_pretrained(folder, strict=True).eval(), before, after


def contract(*lead: int) -> Contract:
    specs = {name.split(".")[-1]: TensorSpec((*lead, 64, 48, 3), "uint8") for name in SIZES if "images" in name}
    specs["state"] = TensorSpec((*lead, 7))
    action = TensorSpec((6,), low=(-100.0,) * 6, high=(100.0,) * 6)
    return Contract(specs, action, 0.1, horizon=8, executed=8)


def seen(*lead: int) -> TensorDict:
    noise = generator(3)
    values = {"state": torch.randn(3, *lead, 7, generator=noise)}
    for name in ("top", "wrist"):
        values[name] = torch.randint(256, (3, *lead, 64, 48, 3), dtype=torch.uint8, generator=noise)
    return TensorDict(values, [3])


def theirs(observation: TensorDict) -> dict[str, Tensor]:
    """A batch by their names."""
    found = {f"observation.images.{name}": observation[name].permute(0, 3, 1, 2) / 255.0 for name in ("top", "wrist")}
    return found | {"observation.state": observation["state"]}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_act(tmp_path: Path, pre_norm: bool) -> None:
    sizes = {"dim_model": 32, "n_heads": 4, "dim_feedforward": 64, "n_encoder_layers": 2, "n_vae_encoder_layers": 2}
    sizes |= {"n_decoder_layers": 2, "chunk_size": CHUNK, "n_action_steps": CHUNK, "latent_dim": 8, "dropout": 0.0}
    sizes |= {"pretrained_backbone_weights": None, "device": "cpu", "pre_norm": pre_norm}
    policy: Any = randomised(
        act[0].ACTPolicy(act[1].ACTConfig(input_features=inputs(), output_features=OUTPUT, **sizes))
    )
    pre, post = saved(tmp_path, policy, act[2].make_act_pre_post_processors)
    own, observation = ACTConfig(weights=str(tmp_path), dropout=0.0).build(contract()), seen()
    expected = post(policy.predict_action_chunk(pre(theirs(observation))))[:, :8]
    torch.testing.assert_close(own.act(observation).actions, expected, atol=2e-5, rtol=1e-4)
    actions = torch.randn(3, CHUNK, 6, generator=generator(4))
    batch = pre(theirs(observation) | {"action": actions})
    batch["action_is_pad"] = torch.zeros(3, CHUNK, dtype=torch.bool)
    torch.manual_seed(5)
    loss, _ = policy.train()(batch)
    torch.manual_seed(5)
    found = own.loss(observation, actions, torch.ones(3, CHUNK, dtype=torch.bool))
    torch.testing.assert_close(found, loss, atol=1e-4, rtol=1e-5)
    again, before, after = published(own, tmp_path / "out", act[0].ACTPolicy)
    chunks = after(again.predict_action_chunk(before(theirs(observation))))[:, :8]
    own = own.eval().act(observation).actions
    assert (own - expected).abs().max() > 0.01
    print(f"LeRobot's ACT from our folder differs by at most {(chunks - own).abs().max():.1e}")
    torch.testing.assert_close(chunks, own, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"crop_shape": (56, 40)}, {"use_separate_rgb_encoder_per_camera": True}, {"use_group_norm": False}],
)
def test_diffusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(diffusion[0], "DDIMScheduler", Clipped)
    sizes = {"horizon": CHUNK, "n_action_steps": 8, "down_dims": (16, 32), "diffusion_step_embed_dim": 16}
    sizes |= {"spatial_softmax_num_keypoints": 8, "num_inference_steps": 10, "noise_scheduler_type": "DDIM"}
    sizes |= {"pretrained_backbone_weights": None}
    settings = diffusion[1].DiffusionConfig(
        input_features=inputs(), output_features=OUTPUT, device="cpu", **sizes, **options
    )
    policy: Any = randomised(diffusion[0].DiffusionPolicy(settings))
    pre, post = saved(tmp_path, policy, diffusion[2].make_diffusion_pre_post_processors)
    assert json.loads((tmp_path / "config.json").read_text())["type"] == "diffusion"
    own, observation = DiffusionConfig(weights=str(tmp_path), hidden=16).build(contract(2)), seen(2)
    noise = torch.randn(3, CHUNK, 6, generator=generator(6))
    monkeypatch.setattr(own, "_noise", lambda *_: noise.unsqueeze(1))
    expected = denoised(policy, pre, post, observation, noise)
    actions = own.act(observation, deterministic=True).actions
    torch.testing.assert_close(actions, expected, atol=1e-4, rtol=1e-4)
    chunks = denoised(*published(own, tmp_path / "out", diffusion[0].DiffusionPolicy), observation, noise)
    actions = own.act(observation, deterministic=True).actions
    assert (actions - expected).abs().max() > 0.01
    print(f"LeRobot's chunks from our folder differ by at most {(actions - chunks).abs().max():.1e}")
    torch.testing.assert_close(actions, chunks, atol=1e-3, rtol=1e-3)  # the first step amplifies rounding


def denoised(policy: Any, pre: Any, post: Any, observation: TensorDict, noise: Tensor) -> Tensor:
    """Actions of LeRobot's diffusion policy after two observations."""
    policy.reset()
    for step in range(2):
        policy._queues["action"].clear()
        batch = pre(theirs(observation.apply(lambda each, at=step: each[:, at])))
        batch = {name: value for name, value in batch.items() if name.startswith("observation")}
        first = policy.select_action(batch, noise=noise)
    return post(torch.stack([first, *policy._queues["action"]], 1))


@pytest.mark.parametrize("options", [{}, {"prefix_length": 40, "pad_language_to": "max_length", "empty_cameras": 1}])
def test_smolvla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    modules = [
        pytest.importorskip(f"lerobot.policies.smolvla.{name}")
        for name in ("modeling_smolvla", "configuration_smolvla", "processor_smolvla", "smolvlm_with_expert")
    ]
    vlm = tmp_path / "vlm"
    smolvla_files.vlm_config("float32").save_pretrained(vlm)  # in which LeRobot then stores weights
    smolvla_files.tokenizer().save_pretrained(vlm)
    special = SimpleNamespace(fake_image_token_id=6, global_image_token_id=7)  # of its processor it reads only these
    monkeypatch.setattr(
        modules[3],
        "AutoProcessor",
        SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(tokenizer=special)),
    )
    sizes = {"chunk_size": CHUNK, "n_action_steps": CHUNK, "num_vlm_layers": 4, "num_steps": 3}
    sizes |= {"resize_imgs_with_padding": (32, 32), "vlm_model_name": str(vlm), "device": "cpu"}
    settings = modules[1].SmolVLAConfig(input_features=inputs(), output_features=OUTPUT, **sizes, **options)
    policy: Any = randomised(modules[0].SmolVLAPolicy(settings).float())
    pre, post = saved(tmp_path, policy, modules[2].make_smolvla_pre_post_processors)
    specs = contract().observation | {"instruction": text_spec(32)}
    own = SmolVLAConfig(weights=str(tmp_path), hidden=16).build(replace(contract(), observation=specs))
    published = {name.removeprefix("model.") for name in policy.state_dict()} - {"vlm_with_expert.vlm.lm_head.weight"}
    assert own.model.native.state_dict().keys() == published
    tasks = ["pick the milk", "open", "the milk"]
    observation = seen()
    observation["instruction"] = torch.stack([torch.from_numpy(encode(task, 32)) for task in tasks])
    noise = torch.randn(3, CHUNK, 32, generator=generator(6))
    monkeypatch.setattr(own, "_noise", lambda *_: noise[:, :8])
    batch = pre(theirs(observation) | {"task": tasks})
    expected = post(policy.predict_action_chunk(dict(batch), noise=noise.clone()))[:, :8]
    chunks = own.act(observation, deterministic=True).actions
    difference = ((chunks - expected).abs() / own.action_std).max()
    print(f"SmolVLA's actions differ by at most {difference:.1e} standard deviations from LeRobot's")
    assert difference < 2e-5
    publish(own, tmp_path / "out", tmp_path)
    again = modules[0].SmolVLAPolicy.from_pretrained(tmp_path / "out").float()
    pipeline = pytest.importorskip("lerobot.processor").PolicyProcessorPipeline
    before = pipeline.from_pretrained(tmp_path / "out", config_filename="policy_preprocessor.json")
    batch = before(theirs(observation) | {"task": tasks})
    chunks = again.predict_action_chunk(dict(batch), noise=noise[:, :8].clone())
    assert (chunks - (expected - own.action_mean) / own.action_std).abs().max() < 2e-5
    actions = torch.randn(3, CHUNK, 6, generator=generator(4))
    batch = pre(theirs(observation) | {"task": tasks, "action": actions})
    time = torch.tensor([0.2, 0.5, 0.9])
    words = batch["observation.language.tokens"], batch["observation.language.attention_mask"].bool()
    parts = *policy.prepare_images(batch), *words, policy.prepare_state(batch), policy.prepare_action(batch)
    losses = policy.model(*parts, noise, time)[..., :6]  # 0.4.4 averages over padding, too, and 0.6 does not
    target = own._padded((actions - own.action_mean) / own.action_std)
    t = time.view(-1, 1, 1)
    with torch.no_grad():
        velocity, _ = own._velocity(
            own._state(observation), own._prefix(observation), t * noise + (1.0 - t) * target, time
        )
    torch.testing.assert_close((velocity - noise + target)[..., :6].square(), losses, atol=1e-4, rtol=1e-4)
