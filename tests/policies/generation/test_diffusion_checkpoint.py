"""Checkpoints of diffusion_policy: what they compute, in plain functions, and what is refused without running it."""

import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.seeding import fixed_noise
from policies.diffusion import DiffusionConfig, DiffusionPolicy
from policies.kernels.diffusion import Prediction

STATE, ACTIONS, WIDTHS, TIME, LENGTH = 5, 2, (16, 32), 8, 8
CONTRACT = Contract(
    {"observation": TensorSpec((2, STATE)), "wind": TensorSpec((1,), privileged=True)},
    TensorSpec((ACTIONS,), low=(-3.0, -3.0), high=(4.0, 4.0)),
    control_dt_s=0.1,
    horizon=4,
    executed=3,
)
SIZES = {"denoising_steps": 5, "tuned_steps": 3, "hidden": 16}


def tensors() -> dict[str, Tensor]:
    """Random weights of a UNet that reads two observations, by the names in diffusion_policy's files."""
    generator, given = torch.Generator().manual_seed(0), TIME + 2 * STATE
    found: dict[str, Tensor] = {"_dummy_variable": torch.zeros(0), "mask_generator._dummy_variable": torch.zeros(0)}

    def layer(name: str, *shape: int) -> None:
        found[f"model.{name}.weight"] = 0.3 * torch.randn(*shape, generator=generator)
        found[f"model.{name}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)

    def residual(name: str, before: int, after: int) -> None:
        for block, channels in (("0", before), ("1", after)):
            layer(f"{name}.blocks.{block}.block.0", after, channels, 5)
            layer(f"{name}.blocks.{block}.block.1", after)
        layer(f"{name}.cond_encoder.1", 2 * after, given)
        if before != after:
            layer(f"{name}.residual_conv", after, before, 1)

    first, second = WIDTHS
    layer("diffusion_step_encoder.1", 4 * TIME, TIME)
    layer("diffusion_step_encoder.3", TIME, 4 * TIME)
    for name, before, after in (
        ("mid_modules.0", second, second),
        ("mid_modules.1", second, second),
        ("down_modules.0.0", ACTIONS, first),
        ("down_modules.0.1", first, first),
        ("down_modules.1.0", first, second),
        ("down_modules.1.1", second, second),
        ("up_modules.0.0", 2 * second, first),
        ("up_modules.0.1", first, first),
    ):
        residual(name, before, after)
    layer("down_modules.0.2.conv", first, first, 3)
    found["model.up_modules.0.2.conv.weight"] = 0.3 * torch.randn(first, first, 4, generator=generator)
    found["model.up_modules.0.2.conv.bias"] = torch.zeros(first)
    layer("final_conv.0.block.0", first, first, 5)
    layer("final_conv.0.block.1", first)
    layer("final_conv.1", ACTIONS, first, 1)
    for key, count in (("obs", STATE), ("action", ACTIONS)):
        found[f"normalizer.params_dict.{key}.scale"] = 0.5 + torch.rand(count, generator=generator)
        found[f"normalizer.params_dict.{key}.offset"] = torch.randn(count, generator=generator) / 4
        found[f"normalizer.params_dict.{key}.input_stats.min"] = torch.zeros(count)
    return found


def configuration(**changes: Any) -> dict[str, Any]:
    noise = {"num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "prediction_type": "epsilon"}
    noise |= {"_target_": "diffusers.DDPMScheduler", "clip_sample": True, "variance_type": "fixed_small"}
    model = {"down_dims": [*WIDTHS], "kernel_size": 5, "n_groups": 8, "cond_predict_scale": True}
    policy = {"horizon": "${horizon}", "n_obs_steps": "${n_obs_steps}", "oa_step_convention": True, "model": model}
    return {"horizon": LENGTH, "n_obs_steps": 2, "policy": policy | {"noise_scheduler": noise | changes}}


def dilled(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A pickle module that writes types as dill does, by name."""
    package, inner = types.ModuleType("dill"), types.ModuleType("dill._dill")

    def _load_type(name: str) -> type:
        raise AssertionError(f"{name} is loaded")

    _load_type.__module__, _load_type.__qualname__ = "dill._dill", "_load_type"
    inner._load_type = _load_type  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dill", package)
    monkeypatch.setitem(sys.modules, "dill._dill", inner)

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: object) -> Any:
            known = isinstance(obj, type) and obj.__module__ == "builtins"
            return (_load_type, (obj.__name__,)) if known else NotImplemented

    package.Pickler, package.__version__ = Pickler, "0.3.5"  # type: ignore[attr-defined]
    return package


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as diffusion_policy writes it."""
    worse = {name: torch.zeros_like(value) for name, value in tensors().items()}
    payload = {
        "cfg": OmegaConf.create(configuration()),
        "state_dicts": {"model": worse, "ema_model": tensors(), "optimizer": {"state": {}, "param_groups": []}},
        "pickles": {"global_step": pickle.dumps(5), "epoch": pickle.dumps(os.getcwd)},
    }
    torch.save(payload, tmp_path / "latest.ckpt", pickle_module=dilled(monkeypatch))
    return tmp_path / "latest.ckpt"


def build(weights: Path, contract: Contract = CONTRACT, **settings: Any) -> DiffusionPolicy:
    return DiffusionConfig(**SIZES | settings, weights=str(weights)).build(contract)


def seen(count: int = 3) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    values = {"observation": torch.randn(count, 2, STATE, generator=generator), "wind": torch.rand(count, 1)}
    return TensorDict(values, [count])


def unet(given: dict[str, Tensor], x: Tensor, time: int, features: Tensor) -> Tensor:
    """[N, A, L], plainly."""

    def of(name: str) -> tuple[Tensor, Tensor]:
        return given[f"model.{name}.weight"], given[f"model.{name}.bias"]

    def conv(name: str, x: Tensor) -> Tensor:
        return F.mish(F.group_norm(F.conv1d(x, *of(f"{name}.block.0"), padding=2), 8, *of(f"{name}.block.1")))

    def residual(name: str, x: Tensor) -> Tensor:
        scale, shift = F.linear(F.mish(told), *of(f"{name}.cond_encoder.1")).unsqueeze(-1).chunk(2, 1)
        found = conv(f"{name}.blocks.1", scale * conv(f"{name}.blocks.0", x) + shift)
        same = f"model.{name}.residual_conv.weight" not in given
        return found + (x if same else F.conv1d(x, *of(f"{name}.residual_conv")))

    angle = time * torch.exp(-torch.arange(TIME // 2) * torch.tensor(10000.0).log() / (TIME // 2 - 1))
    said = F.mish(F.linear(torch.cat((angle.sin(), angle.cos()))[None], *of("diffusion_step_encoder.1")))
    said = F.linear(said, *of("diffusion_step_encoder.3")).expand(len(x), -1)
    told = torch.cat((said, features), -1)
    fine = residual("down_modules.0.1", residual("down_modules.0.0", x))
    x = F.conv1d(fine, *of("down_modules.0.2.conv"), stride=2, padding=1)
    coarse = residual("down_modules.1.1", residual("down_modules.1.0", x))
    x = residual("mid_modules.1", residual("mid_modules.0", coarse))
    x = residual("up_modules.0.1", residual("up_modules.0.0", torch.cat((x, coarse), 1)))
    x = F.conv_transpose1d(x, *of("up_modules.0.2.conv"), stride=2, padding=1)
    return F.conv1d(conv("final_conv.0", x), *of("final_conv.1"))


def condition(observation: TensorDict) -> Tensor:
    scale, offset = (tensors()[f"normalizer.params_dict.obs.{name}"] for name in ("scale", "offset"))
    return (observation["observation"] * scale + offset).flatten(1)


def predicted(x: Tensor, time: int, features: Tensor) -> Tensor:
    """[N, L, A]."""
    return unet(tensors(), x.transpose(1, 2), time, features).transpose(1, 2)


def unnormalised(x: Tensor) -> Tensor:
    """Four actions in robot units; the first of the chunk lies in the past."""
    scale, offset = (tensors()[f"normalizer.params_dict.action.{name}"] for name in ("scale", "offset"))
    return ((x - offset) / scale)[:, 1:5]


def test_chunks_are_those_of_a_plain_computation(file: Path) -> None:
    """From the same noise, by diffusers' DDIM and, exploring, its DDPM, with clipped samples."""
    observation, features = seen(), condition(seen())
    x = fixed_noise(observation["observation"].flatten(1), (1, LENGTH, ACTIONS))[:, 0]
    ddim = DDIMScheduler(100, beta_schedule="squaredcos_cap_v2", clip_sample=True)
    ddim.set_timesteps(5)
    for time in ddim.timesteps.tolist():
        x = ddim.step(predicted(x, time, features), time, x, use_clipped_model_output=True).prev_sample
    assert bool((x.abs() > 0.999).any())  # some are clipped
    found = build(file).act(observation, deterministic=True).actions
    torch.testing.assert_close(found, unnormalised(x), atol=1e-4, rtol=1e-4)
    ddpm = DDPMScheduler(100, beta_schedule="squaredcos_cap_v2", clip_sample=True, variance_type="fixed_small")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 1, LENGTH, ACTIONS, generator=generator)[:, 0]
    for time in range(99, -1, -1):
        x = ddpm.step(predicted(x, time, features), time, x, generator=generator).prev_sample
    policy = build(file, denoising_steps=100, smallest_std=1e-6)
    policy.fit(seen(6), torch.randn(6, ACTIONS))  # for the critic
    found = policy.act(observation, generator=torch.Generator().manual_seed(3)).actions
    torch.testing.assert_close(found, unnormalised(x), atol=1e-3, rtol=1e-3)


def test_what_was_loaded_is_scored_trained_and_restored(file: Path, tmp_path: Path) -> None:
    policy, observation = build(file), seen(6)
    mean = policy.encoder.mean.clone()
    policy.fit(observation, torch.randn(6, ACTIONS))
    assert torch.equal(policy.encoder.mean[: 2 * STATE], mean[: 2 * STATE])  # brought by the file
    decision = policy.act(observation, generator=torch.Generator().manual_seed(0))
    assert decision.actions.shape == (6, 4, ACTIONS)
    torch.testing.assert_close(policy.evaluate(observation, decision.sample).log_prob, decision.log_prob)
    same = build(file)
    same.load_state_dict(policy.state_dict())
    first, second = (each.act(observation, deterministic=True).actions for each in (same, policy))
    assert torch.equal(first, second)
    fresh = policy.with_new_weights()
    assert torch.equal(fresh.action_std, policy.action_std)
    assert not torch.equal(fresh.network.final_conv[1].weight, policy.network.final_conv[1].weight)
    shown = Episodes.of(observation.exclude("wind"), torch.rand(6, ACTIONS))
    learner = SFTConfig(steps=40, batch=16).build(policy, torch.Generator().manual_seed(0))
    early = learner.fit(shown, 5)
    assert learner.fit(shown, 35)["loss"] < early["loss"]
    save_file(tensors(), tmp_path / "ema.safetensors")
    plain = build(tmp_path / "ema.safetensors")  # tells nothing of its length
    assert plain.generated == 5
    assert torch.equal(plain.network.final_conv[1].weight, build(file).network.final_conv[1].weight)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path(os.environ["EVIL"]) / "was here"),)


def saved(path: Path, weights: dict[str, Tensor], **more: Any) -> Path:
    torch.save({"state_dicts": {"model": weights}} | more, path)
    return path


def test_what_is_no_such_checkpoint_is_refused_in_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(expected: str, path: Path, contract: Contract = CONTRACT, **settings: Any) -> None:
        with pytest.raises(UserError, match=expected) as raised:
            build(path, contract, **settings)
        assert "\n" not in str(raised.value)
        assert str(path) in str(raised.value)

    good, path = tensors(), tmp_path / "other.ckpt"
    monkeypatch.setenv("EVIL", str(tmp_path))
    torch.save({"state_dicts": {"model": good}, "cfg": Evil()}, path)
    refused("nothing is run from files. Convert it where diffusion_policy is installed", path)
    assert not (tmp_path / "was here").exists()
    path.write_bytes(b"no checkpoint")
    refused("policy.weights=", path)
    refused(r"expected a checkpoint of diffusion_policy .*FileNotFoundError", tmp_path / "nowhere.ckpt")
    refused(r"expected a checkpoint of diffusion_policy", tmp_path / "nowhere.safetensors")
    whole = file.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("policy.weights=", path)
    refused("reads pictures by robomimic's encoder", saved(path, good | {"obs_encoder.x": torch.zeros(1)}))
    refused("is no UNet of diffusion_policy", saved(path, {"model.encoder.weight": torch.zeros(1)}))
    without = {name: value for name, value in good.items() if "params_dict.action" not in name}
    refused(r"has no statistics: there is no normalizer\.params_dict\.action\.scale", saved(path, without))
    first = "model.down_modules.0.0.blocks.0.block.0.weight"
    refused("has kernel_size=3; expected 5", saved(path, good | {first: torch.zeros(16, ACTIONS, 3)}))
    unscaled = {"model.down_modules.0.0.cond_encoder.1.weight": torch.zeros(16, TIME + 2 * STATE)}
    refused("has cond_predict_scale=false", saved(path, good | unscaled))
    refused("is of another network", saved(path, {n: v for n, v in good.items() if "mid_modules.1" not in n}))
    refused(
        r"set policy\.train_steps=100 policy\.prediction=epsilon", file, train_steps=50, prediction=Prediction.SAMPLE
    )
    wide = Contract({"observation": TensorSpec((STATE,))}, CONTRACT.action, 0.1, horizon=4)
    refused("reads 2 observations, oldest first, of 5 elements: 10 in all; the task has 5", file, wide)
    one = TensorSpec((1,), low=(-1.0,), high=(1.0,))
    refused("has actions of 2 elements, the task of 1", file, Contract(CONTRACT.observation, one, 0.1, horizon=4))
    long = Contract(CONTRACT.observation, CONTRACT.action, 0.1, horizon=8)
    refused("predicts 7 actions ahead, the task asks for 8", file, long)
    refused("has n_groups=4; expected 8", saved(path, good, cfg={"policy": {"model": {"n_groups": 4}}}))
