"""LeRobot's folders of ACT and diffusion policies: what is written is read again, and what is refused.

test_lerobot_itself.py compares with LeRobot's own classes.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.diffusion import DiffusionConfig
from policies.lerobot.act import ACTConfig
from policies.lerobot.publishing import publish
from tests.policies.lerobot import files, test_act, test_diffusion
from tests.policies.lerobot.files import ACTIONS, CHUNK, PICTURE, STATE


def trained(policy: TrainablePolicy) -> TrainablePolicy:
    """`policy` with other weights."""
    noise = files.generator(4)
    with torch.no_grad():
        for weight in policy.actor_parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=noise)
    return policy.eval()


def test_act_of_published_weights(tmp_path: Path) -> None:
    folder = files.save(tmp_path / "published", files.act_config(), files.act_tensors())
    policy, out = trained(test_act.build(folder)), tmp_path / "out"
    publish(policy, out, tmp_path)
    assert load_file(out / "model.safetensors").keys() == files.act_tensors().keys()
    config, published = (json.loads((each / "config.json").read_text()) for each in (out, folder))
    changed = {"normalization_mapping", "pretrained_backbone_weights", "n_action_steps"}
    assert {name: config[name] for name in config.keys() - changed} == {
        name: published[name] for name in config.keys() - changed
    }
    assert config["normalization_mapping"] == dict.fromkeys(("VISUAL", "STATE", "ENV", "ACTION"), "MEAN_STD")
    assert (config["chunk_size"], config["n_action_steps"]) == (CHUNK, 3)
    observation = test_act.seen()
    again = test_act.build(out).eval()
    torch.testing.assert_close(again.act(observation).actions, policy.act(observation).actions)
    card = (out / "README.md").read_text()
    assert "`python train.py policy=act policy.weights=FOLDER` continues" in card
    assert "policy = ACTPolicy.from_pretrained(FOLDER)" in card
    assert "vision-language-action" not in card
    with pytest.raises(UserError, match="out exists; choose another output"):
        publish(policy, out, tmp_path)


def test_act_from_scratch_has_the_task_s_cameras_and_its_own_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = ACTConfig(**test_act.SMALL).build(test_act.CONTRACT)
    observation = test_act.seen(16)
    actions = torch.rand(16, CHUNK - 1, ACTIONS)
    actions[..., 1] = 0.5  # a constant element
    policy.fit(observation, actions)
    publish(policy.eval(), tmp_path / "out", tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["input_features"] == {
        "observation.images.top": {"type": "VISUAL", "shape": [3, *PICTURE]},
        "observation.images.wrist": {"type": "VISUAL", "shape": [3, *PICTURE]},
        "observation.state": {"type": "STATE", "shape": [policy.state.observed]},
    }
    statistics = load_file(tmp_path / "out" / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    assert statistics["observation.images.top.mean"].shape == (3, 1, 1)
    assert statistics["observation.state.std"][2] == 1.0  # constant: LeRobot would divide by 1e-8
    torch.testing.assert_close(statistics["action.std"], actions.flatten(0, 1).std(0))
    again = ACTConfig(weights=str(tmp_path / "out"), hidden=16).build(test_act.CONTRACT).eval()
    torch.testing.assert_close(again.act(observation).actions, policy.act(observation).actions)


def test_diffusion_of_published_weights(tmp_path: Path) -> None:
    folder = test_diffusion.save(tmp_path / "published")
    policy, out = trained(test_diffusion.build(folder)), tmp_path / "out"
    publish(policy, out, tmp_path)
    assert load_file(out / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    config = json.loads((out / "config.json").read_text())
    assert (config["noise_scheduler_type"], config["num_inference_steps"], config["n_action_steps"]) == ("DDIM", 5, 3)
    again = test_diffusion.build(out).eval()
    observation = test_diffusion.seen()
    found, expected = (each.act(observation, deterministic=True).actions for each in (again, policy))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_lerobot_does_not_have_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    blind = Contract({"x": TensorSpec((STATE,))}, TensorSpec((ACTIONS,)), 0.1, horizon=4, executed=2)
    with pytest.raises(UserError, match="LeRobot's ACT needs pictures or an environment's state"):
        publish(ACTConfig(**test_act.SMALL).build(blind), out, tmp_path)
    limited = replace(blind, action=TensorSpec((ACTIONS,), low=(-1.0,) * ACTIONS, high=(1.0,) * ACTIONS))
    with pytest.raises(UserError, match="diffusion policies that began with LeRobot's weights; use target=hub"):
        publish(DiffusionConfig().build(limited), out, tmp_path)
    assert not out.exists()
