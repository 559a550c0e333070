"""LeRobot's diffusion policy: chunks of a plain computation, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.seeding import fixed_noise
from policies.diffusion import DiffusionConfig, DiffusionPolicy
from tests.policies.generation.test_diffusion_checkpoint import ACTIONS, LENGTH, TIME, WIDTHS, tensors, unet
from tests.policies.lerobot import files
from tests.policies.lerobot.files import CAMERAS, ENVIRONMENT, PICTURE, STATE

KEYPOINTS, CROP = 3, (32, 48)
FEATURES = 2 * (STATE + 2 * 2 * KEYPOINTS + ENVIRONMENT)
MODES = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}  # ENV: as it is
CONTRACT = Contract(
    {
        "joints": TensorSpec((2, STATE)),
        "goal": TensorSpec((2, ENVIRONMENT)),
        "top": TensorSpec((2, *PICTURE, 3), "uint8"),
        "wrist": TensorSpec((2, *PICTURE, 3), "uint8"),
        "wind": TensorSpec((1,), privileged=True),
    },
    TensorSpec((ACTIONS,), low=(-3.0, -3.0), high=(4.0, 4.0)),
    control_dt_s=0.1,
    horizon=4,
    executed=3,
)


def config(**changes: Any) -> dict[str, Any]:
    """config.json."""
    inputs = {name: feature for name, feature in files.features().items() if name != "action"}
    return {
        "type": "diffusion",
        "n_obs_steps": 2,
        "horizon": LENGTH,
        "n_action_steps": 4,
        "input_features": inputs,
        "output_features": {"action": {"type": "ACTION", "shape": [ACTIONS]}},
        "normalization_mapping": MODES,
        "vision_backbone": "resnet18",
        "crop_shape": list(CROP),
        "crop_is_random": True,
        "use_group_norm": True,
        "spatial_softmax_num_keypoints": KEYPOINTS,
        "use_separate_rgb_encoder_per_camera": True,
        "down_dims": list(WIDTHS),
        "kernel_size": 5,
        "n_groups": 8,
        "diffusion_step_embed_dim": TIME,
        "use_film_scale_modulation": True,
        "noise_scheduler_type": "DDPM",
        "num_train_timesteps": 100,
        "beta_schedule": "squaredcos_cap_v2",
        "beta_start": 0.0001,
        "beta_end": 0.02,
        "prediction_type": "epsilon",
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "num_inference_steps": None,
    } | changes


def statistics() -> dict[str, Tensor]:
    """Those of the files, for an action of two elements."""
    return {
        name: value[:ACTIONS].clone() if name.startswith("action.") else value
        for name, value in files.statistics().items()
    }


def unet_tensors() -> dict[str, Tensor]:
    """Weights of the UNet by diffusion_policy's names."""
    noise = files.generator(4)
    found = {name: value for name, value in tensors().items() if name.startswith("model.")}
    for name, value in found.items():
        if name.endswith("cond_encoder.1.weight"):
            found[name] = 0.3 * torch.randn(len(value), TIME + FEATURES, generator=noise)
    return found


def eye_tensors(camera: int) -> files.Tensors:
    """Weights that read the pictures of a camera, by torchvision's names."""
    found = files.Tensors("")
    found.noise = files.generator(10 + camera)
    found.resnet18("backbone")
    for name in [name for name in found if "running" in name]:
        del found[name]
    found.dense("pool.nets", KEYPOINTS, 512, 1, 1)
    rows, columns = torch.meshgrid(torch.tensor([0.0]), torch.tensor([-1.0, 1.0]), indexing="ij")
    found["pool.pos_grid"] = torch.stack((columns, -torch.ones_like(rows)), -1).flatten(0, 1)  # of 1 x 2 patches
    found.dense("out", 2 * KEYPOINTS, 2 * KEYPOINTS)
    return found


def published() -> dict[str, Tensor]:
    """model.safetensors."""
    found = {}
    for name, value in unet_tensors().items():
        name = name.replace("blocks.0.block", "conv1.block").replace("blocks.1.block", "conv2.block")
        found["diffusion.unet." + name.removeprefix("model.").replace(".2.conv.", ".2.")] = value
    places = ("conv1", "bn1", None, None, "layer1", "layer2", "layer3", "layer4")
    for camera in range(2):
        for name, value in eye_tensors(camera).items():
            if found_part := re.match(r"backbone\.(\w+)\.", name):
                name = name.replace(found_part[1], str(places.index(found_part[1])), 1)
            found[f"diffusion.rgb_encoder.{camera}.{name}"] = value
    return found


def keypoints(given: dict[str, Tensor], pictures: Tensor) -> Tensor:
    """Features [N, 2 KEYPOINTS] of pictures [N, 3, height, width], plainly; the middle of each is seen."""
    top, left = ((have - want) // 2 for have, want in zip(PICTURE, CROP, strict=True))
    x = pictures[:, :, top : top + CROP[0], left : left + CROP[1]]

    def normal(name: str, x: Tensor) -> Tensor:
        weight, bias = (given[f"backbone.{name}.{part}"] for part in ("weight", "bias"))
        return F.group_norm(x, len(weight) // 16, weight, bias)

    def conv(name: str, x: Tensor, stride: int) -> Tensor:
        weight = given[f"backbone.{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = F.max_pool2d(normal("bn1", conv("conv1", x, 2)).relu(), 3, 2, 1)
    for layer in range(1, 5):
        for block in range(2):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            y = normal(f"{at}.bn1", conv(f"{at}.conv1", x, stride)).relu()
            y = normal(f"{at}.bn2", conv(f"{at}.conv2", y, 1))
            x = (y + (normal(f"{at}.downsample.1", conv(f"{at}.downsample.0", x, 2)) if stride == 2 else x)).relu()
    maps = F.conv2d(x, given["pool.nets.weight"], given["pool.nets.bias"])
    share = maps.flatten(2).softmax(-1).unflatten(2, maps.shape[2:])
    assert maps.shape[2:] == (1, 2)
    places = [(share * torch.tensor([-1.0, 1.0])).sum((2, 3)), -share.sum((2, 3))]  # x, y of numpy's grid of one row
    return F.linear(torch.stack(places, -1).flatten(1), given["out.weight"], given["out.bias"]).relu()


def seen(count: int = 3) -> TensorDict:
    noise = files.generator(1)
    joints = torch.randn(count, 2, STATE, generator=noise)
    joints[..., 2] = files.statistics()["observation.state.min"][2]
    values = {"joints": joints, "goal": torch.randn(count, 2, ENVIRONMENT, generator=noise)}
    for name in ("top", "wrist"):
        values[name] = torch.randint(256, (count, 2, *PICTURE, 3), dtype=torch.uint8, generator=noise)
    return TensorDict(values | {"wind": torch.rand(count, 1)}, [count])


def condition(observation: TensorDict) -> Tensor:
    steps = []
    for step in range(2):
        steps.append(files.normalised("observation.state", observation["joints"][:, step], MODES))
        for index, camera in enumerate(CAMERAS):
            picture = observation[camera.split(".")[-1]][:, step].permute(0, 3, 1, 2) / 255.0
            steps.append(keypoints(eye_tensors(index), files.normalised(camera, picture, MODES)))
        steps.append(observation["goal"][:, step])
    return torch.cat(steps, -1)


def build(folder: Path, contract: Contract = CONTRACT, **settings: Any) -> DiffusionPolicy:
    settings = {"denoising_steps": 5, "tuned_steps": 3, "hidden": 16} | settings
    return DiffusionConfig(**settings, weights=str(folder)).build(contract)


def save(folder: Path, changes: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None) -> Path:
    return files.save(folder, config(**changes or {}), weights or published(), MODES, statistics())


def test_chunks_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    policy, observation = build(save(tmp_path / "pretrained_model")), seen()
    features = condition(observation)
    torch.testing.assert_close(policy.encoder.eval()(observation), features, atol=1e-4, rtol=1e-4)
    x = fixed_noise(torch.cat([observation[key].flatten(1) for key in ("joints", "goal")], 1), (1, LENGTH, ACTIONS))[
        :, 0
    ]
    ddim = DDIMScheduler(100, beta_schedule="squaredcos_cap_v2", clip_sample=True)
    ddim.set_timesteps(5)
    for time in ddim.timesteps.tolist():
        noise = unet(unet_tensors(), x.transpose(1, 2), time, features).transpose(1, 2)
        x = ddim.step(noise, time, x, use_clipped_model_output=True).prev_sample
    low, high = (statistics()[f"action.{name}"] for name in ("min", "max"))
    expected = ((x + 1.0) / 2.0 * (high - low) + low)[:, 1:5]  # the first action lies in the past
    found = policy.act(observation, deterministic=True).actions
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_what_was_loaded_is_scored_trained_and_restored(tmp_path: Path) -> None:
    folder = save(tmp_path / "pretrained_model")
    policy, observation = build(folder), seen(4)
    before = {name: value.clone() for name, value in policy.encoder.named_buffers()}
    policy.fit(observation, torch.randn(4, ACTIONS))  # for the critic; those of the file stay
    assert all(torch.equal(before[name], value) for name, value in policy.encoder.named_buffers())
    torch.testing.assert_close(policy.action_std, (statistics()["action.max"] - statistics()["action.min"]) / 2)
    decision = policy.act(observation, generator=files.generator())
    assert policy.training  # random crops are for the supervised loss alone
    torch.testing.assert_close(policy.evaluate(observation, decision.sample).log_prob, decision.log_prob)
    same = build(folder)
    same.load_state_dict(policy.state_dict())
    first, second = (each.act(observation, deterministic=True).actions for each in (same, policy))
    assert torch.equal(first, second)
    fresh = policy.train().with_new_weights()
    assert not torch.equal(fresh.encoder.eyes[0].out.weight, policy.encoder.eyes[0].out.weight)
    shown = Episodes.of(observation.exclude("wind"), torch.rand(4, ACTIONS))
    learner = SFTConfig(steps=4, batch=4).build(policy, files.generator())
    learner.fit(shown, 4)
    moved = dict(learner.trained.named_parameters())
    assert not torch.equal(moved["encoder.eyes.0.backbone.conv1.weight"], eye_tensors(0)["backbone.conv1.weight"])


def test_the_supervised_loss_alone_crops_at_random_places(tmp_path: Path) -> None:
    policy, observation, seen_pictures = build(save(tmp_path / "pretrained_model")), seen(2), []
    policy.encoder.eyes[0].backbone.register_forward_pre_hook(lambda _, inputs: seen_pictures.append(inputs[0]))
    actions, valid = torch.zeros(2, 4, ACTIONS), torch.ones(2, 4)
    for _ in range(6):
        policy.loss(observation, actions, valid)
    assert len({picture.sum().item() for picture in seen_pictures}) > 2
    seen_pictures.clear()
    policy.act(observation, deterministic=True)
    policy.eval().loss(observation, actions, valid)  # held out
    assert all(torch.equal(picture, seen_pictures[0]) for picture in seen_pictures)
    assert seen_pictures[0].shape[-2:] == CROP


def test_what_is_no_such_policy_is_refused_in_one_line(tmp_path: Path) -> None:
    folder, good = tmp_path / "pretrained_model", published()

    def refused(expected: str, contract: Contract = CONTRACT, **settings: Any) -> None:
        with pytest.raises(UserError, match=expected) as raised:
            build(folder, contract, **settings)
        assert "\n" not in str(raised.value)
        assert str(folder) in str(raised.value)

    save(folder)
    refused(r"set policy\.train_steps=100", train_steps=50)
    refused("predicts 7 actions ahead", Contract(CONTRACT.observation, CONTRACT.action, 0.1, horizon=8))
    blind = {key: spec for key, spec in CONTRACT.observation.items() if key != "top"}
    refused("has learned with wrist, top; the task has wrist", Contract(blind, CONTRACT.action, 0.1, horizon=4))
    single = Contract({"joints": TensorSpec((STATE,))}, CONTRACT.action, 0.1, horizon=4)
    refused("reads 2 observations at once: expected float32 ones with a first axis of 2, oldest first", single)
    save(folder, {"type": "act"})
    refused("it is of type act, and not diffusion")
    for change in ({"kernel_size": 3}, {"vision_backbone": "resnet50"}, {"clip_sample_range": 2.0}):
        save(folder, change)
        refused(f"has {next(iter(change))}={next(iter(change.values()))}")
    for name in (
        "diffusion.unet.mid_modules.1.conv1.block.0.bias",
        "diffusion.rgb_encoder.1.backbone.5.0.conv1.weight",
    ):
        save(folder, weights={key: value for key, value in good.items() if key != name})
        refused(f"lacks the tensor {re.escape(name.removeprefix('diffusion.'))}")
    name = "diffusion.rgb_encoder.0.backbone.0.weight"
    save(folder, weights=good | {name: torch.zeros(64, 3, 5, 5)})
    refused(r"has rgb_encoder\.0\.backbone\.0\.weight of another shape: expected \[64, 3, 7, 7\], got \[64, 3, 5, 5\]")
    save(folder, weights=good | {"diffusion.rgb_encoder.2.out.bias": torch.zeros(3)})
    refused("has the tensor rgb_encoder.2.out.bias, which this network does not have")
