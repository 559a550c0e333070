"""Fields of published configurations that change what a policy computes are read, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from embodied.errors import UserError
from embodied.execution.chunking import Running
from embodied.policy import Steering
from policies.generation.steering import SteeringConfig
from policies.vla.checkpoints import settings
from policies.vla.checkpoints.lerobot_publishing import publish as publish_lerobot
from policies.vla.checkpoints.openpi_publishing import publish as publish_openpi
from policies.vla.checkpoints.publishing import publish
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.pi05 import Pi05Config
from tests.policies.vla.checkpoints.test_weights import changed, save
from tests.policies.vla.test_pi0 import SEEING, seen
from tests.policies.vla.test_pi05 import named

NORMALIZER = "policy_preprocessor_step_5_normalizer_processor.safetensors"
VALUES = {
    "mean": (0.1, 1.0),
    "std": (0.5, 2.0),
    "min": (-1.0, -3.0),
    "max": (1.0, 5.0),
    "q01": (-0.5, -2.0),
    "q99": (0.5, 2.0),
    "q10": (-0.2, -1.0),
    "q90": (0.2, 3.0),
}
LOCATED = {
    "MEAN_STD": ((0.1, 0.5), (1.0, 2.0)),
    "MIN_MAX": ((0.0, 1.0), (1.0, 4.0)),
    "QUANTILES": ((0.0, 0.5), (0.0, 2.0)),
    "QUANTILE10": ((0.0, 0.2), (1.0, 2.0)),
    "IDENTITY": ((0.0, 1.0), (0.0, 1.0)),
}
"""Location and scale of the state's and of the action's elements, by LeRobot's normalisation."""


def lerobot(folder: Path, kind: str, **fields: object) -> type[Pi0Config]:
    """A folder as LeRobot leaves it, with all of its statistics."""
    save(folder, "lerobot")
    if kind == "pi05":
        save_file(named("lerobot"), folder / "model.safetensors", {"format": "pt"})
    changed(folder, "config.json", type=kind, **{"use_relative_actions": False, **fields})
    statistics = {f"observation.state.{name}": torch.full((2,), state) for name, (state, _) in VALUES.items()}
    statistics |= {f"action.{name}": torch.full((3,), action) for name, (_, action) in VALUES.items()}
    save_file(statistics, folder / NORMALIZER)
    return Pi05Config if kind == "pi05" else Pi0Config


def built(folder: Path, config: type[Pi0Config] = Pi0Config, **options: object) -> Pi0Policy:
    return config(weights=str(folder), hidden=16, **options).build(SEEING)


def refused(folder: Path, config: type[Pi0Config] = Pi0Config) -> str:
    with pytest.raises(UserError) as caught:
        built(folder, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def located(policy: Pi0Policy) -> tuple[tuple[float, float], tuple[float, float]]:
    pairs = (policy.inputs.state.mean, policy.inputs.state.std), (policy.action_mean, policy.action_std)
    return tuple(tuple(round(float(each[0]), 5) for each in pair) for pair in pairs)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("mode", list(LOCATED))
def test_state_and_action_are_normalised_as_the_configuration_says(kind: str, mode: str, tmp_path: Path) -> None:
    mapping = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    config = lerobot(tmp_path, kind, normalization_mapping=mapping)
    assert located(built(tmp_path, config)) == LOCATED[mode]


@pytest.mark.parametrize("mode", ["MIN_MAX", "QUANTILES"])
def test_a_constant_element_of_a_range_is_at_its_lower_end(tmp_path: Path, mode: str) -> None:
    """LeRobot and openpi: 2 (x - low) / (high - low + epsilon) - 1, which is -1 of what never varied."""
    config = lerobot(tmp_path, "pi05", normalization_mapping={"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode})
    statistics = load_file(tmp_path / NORMALIZER)
    for name in ("min", "max", "q01", "q99"):
        statistics[f"observation.state.{name}"][0] = 0.5
        statistics[f"action.{name}"][2] = 0.25
    save_file(statistics, tmp_path / NORMALIZER)
    policy, observation = built(tmp_path, config), seen(1)
    observation["fingers"][:, 0] = 0.5
    assert policy.inputs.prompts(observation)[0].split("State: ")[1].split()[0] == "0"  # the first bin
    low = torch.tensor([VALUES["min" if mode == "MIN_MAX" else "q01"][1]] * 2 + [0.25])
    policy.action_low.fill_(-100.0)  # nothing is clamped
    torch.testing.assert_close(policy.to_robot(torch.full((32,), -1.0)), low)


def test_each_part_has_its_own_normalisation_and_the_processor_comes_first(tmp_path: Path) -> None:
    mapping = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"}
    config = lerobot(tmp_path, "pi05", normalization_mapping=mapping)
    assert located(built(tmp_path, config)) == (LOCATED["MIN_MAX"][0], LOCATED["MEAN_STD"][1])
    step = {"registry_name": "normalizer_processor", "config": {"norm_map": {**mapping, "STATE": "QUANTILE10"}}}
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    assert located(built(tmp_path, config)) == (LOCATED["QUANTILE10"][0], LOCATED["MEAN_STD"][1])


def test_a_state_that_the_processor_leaves_out_is_not_normalised(tmp_path: Path) -> None:
    mapping = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    config = lerobot(tmp_path, "pi05", normalization_mapping=mapping)
    for keys, state in ((["observation.images.front"], "IDENTITY"), (["observation.state"], "QUANTILES")):
        options = {"norm_map": mapping, "normalize_observation_keys": keys}
        step = {"registry_name": "normalizer_processor", "config": options}
        (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
        assert located(built(tmp_path, config)) == (LOCATED[state][0], LOCATED["QUANTILES"][1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha is true"),
        ({"use_delta_joint_actions_aloha": True}, "use_delta_joint_actions_aloha is true"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2, and only 1 is supported"),
        ({"use_visual_memory": True}, "use_visual_memory is true, and only false is supported"),
        ({"use_proprioceptive_memory": True}, "use_proprioceptive_memory is true"),
        ({"time_sampling_beta_alpha": 1.0}, "time_sampling_beta_alpha is 1.0"),
        ({"image_resolution": [64, 64]}, "image_resolution is [64, 64], and the model reads [32, 32]"),
        ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "the normalisation of VISUAL is MEAN_STD"),
        ({"normalization_mapping": {"ACTION": "LOG"}}, "the normalisation is LOG, expected one of MEAN_STD, MIN_MAX"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(tmp_path: Path, fields: dict, message: str) -> None:
    lerobot(tmp_path, "pi0", **fields)
    assert f"cannot read config.json as that of a pi0 ({message}" in refused(tmp_path)


NAMES = ["shoulder.pos", "elbow.pos", "Gripper_left.pos"]
RELATIVE = {"use_relative_actions": True, "relative_exclude_joints": ["gripper"], "action_feature_names": NAMES}


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_relative_actions_are_added_to_the_state_but_the_gripper(tmp_path: Path, kind: str, processor: bool) -> None:
    """LeRobot: action - state before normalisation; elements whose name contains an excluded one are absolute."""
    config = lerobot(tmp_path, kind)
    absolute, observation = built(tmp_path, config), seen(3)
    if processor:
        options = {"enabled": True, "exclude_joints": ["gripper"], "action_names": NAMES}
        step = {"registry_name": "relative_actions_processor", "config": options}
        (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    else:
        changed(tmp_path, "config.json", **RELATIVE)
    relative = built(tmp_path, config)
    for policy in (absolute, relative):
        policy.action_low.fill_(-100.0)  # nothing is clamped
        policy.action_high.fill_(100.0)
    offset = torch.nn.functional.pad(observation["fingers"], (0, 1))[:, None]
    actions = absolute.act(observation, deterministic=True).actions
    torch.testing.assert_close(relative.act(observation, deterministic=True).actions, actions + offset)
    target, valid = torch.rand(3, 4, 3), torch.ones(3, 4)
    losses = []
    for policy, chunk in ((absolute, target), (relative, target + offset)):
        torch.manual_seed(7)
        losses.append(float(policy.loss(observation, chunk, valid).detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    running = Running(target + offset, torch.ones(3).long(), torch.full((3,), 2))
    torch.testing.assert_close(
        relative.inpaint(observation, running, deterministic=True).actions,
        absolute.inpaint(observation, replace(running, actions=target), deterministic=True).actions + offset,
        atol=1e-4,
        rtol=1e-4,
    )


def test_relative_actions_that_cannot_be_computed_are_refused(tmp_path: Path) -> None:
    config = lerobot(tmp_path, "pi0", **RELATIVE)
    changed(tmp_path, "config.json", action_feature_names=None)  # LeRobot: all are relative without names
    assert "have 3 actions relative to the state, which has 2 elements in this task" in refused(tmp_path)
    changed(tmp_path, "config.json", **RELATIVE)
    with pytest.raises(UserError, match="relative actions cannot be computed here"):
        built(tmp_path, config, unnorm_key="demonstrations")
    with pytest.raises(UserError, match=r"leave out policy\.steering"):
        built(tmp_path, config, steering=SteeringConfig(Steering.NOISE, hidden=[8]))
    with pytest.raises(UserError, match="transformers' format has no actions relative to the state"):
        publish(built(tmp_path, config), tmp_path / "out", tmp_path, peft=False)
    assert not (tmp_path / "out").exists()


def test_the_state_in_prompts_of_lerobot_0_4_is_padded(tmp_path: Path) -> None:
    """It pads the normalised state with zeros, bin 128, to max_state_dim; releases with relative actions do not."""
    config = lerobot(tmp_path, "pi05", max_state_dim=4)
    observation = seen(2)
    prompt = built(tmp_path, config).inputs.prompts(observation)[0]
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["use_relative_actions"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    earlier = built(tmp_path, config)
    assert earlier.inputs.prompts(observation)[0] == prompt.replace(";", " 128 128;")
    assert earlier.act(observation).actions.shape == (2, 4, 3)
    for write in (publish_lerobot, publish_openpi):
        with pytest.raises(UserError, match=r"learned 4 elements for 2: train with max_state_dim=2 in config\.json"):
            write(earlier, tmp_path / "out", tmp_path)
    step = {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {"max_state_dim": 2}}
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))  # as target=lerobot writes it
    assert built(tmp_path, config).inputs.prompts(observation)[0] == prompt
    (tmp_path / "policy_preprocessor.json").unlink()
    (tmp_path / NORMALIZER).unlink()  # such as LeRobot's base, which openpi has trained
    assert settings.read(tmp_path, "pi05", adaptive=True).padded == 0


@pytest.mark.parametrize("data_set", ["libero", "droid"])
def test_openpi_s_weights_of_libero_are_known_by_their_statistics(tmp_path: Path, data_set: str) -> None:
    """openpi/training/config.py: pi0_libero has extra_delta_transform, pi05_libero no discrete_state_input."""
    save(tmp_path, "openpi")
    (tmp_path / "assets" / "robot").rename(tmp_path / "assets" / data_set)
    libero = data_set == "libero"
    # of further elements than those of LIBERO none is relative, as in openpi, whose mask ends with the gripper
    relative = (True,) * 6 + (False,) * 26
    assert settings.read(tmp_path, "pi0", adaptive=False).relative == (relative if libero else ())
    pi05 = settings.read(tmp_path, "pi05", adaptive=True)
    assert pi05.relative == ()
    assert pi05.states_in_prompt == (not libero)
    changed(tmp_path, "config.json", extra_delta_transform=not libero, discrete_state_input=libero)
    assert bool(settings.read(tmp_path, "pi0", adaptive=False).relative) == (not libero)
    assert settings.read(tmp_path, "pi05", adaptive=True).states_in_prompt == libero


def test_lerobot_s_pictures_are_resized_without_antialiasing(tmp_path: Path) -> None:
    pictures = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8)
    whole = pictures.movedim(-1, 1) / 255.0
    for naming, antialias in (("lerobot", False), ("openpi", True)):
        folder = tmp_path / naming
        folder.mkdir()
        save(folder, naming)
        inputs = built(folder).inputs
        expected = torch.nn.functional.interpolate(whole, (32, 32), mode="bilinear", antialias=antialias)
        found = inputs.pictures({"front": pictures, "wrist": pictures}, 32)  # type: ignore[arg-type]
        torch.testing.assert_close(found[:, 0], 2.0 * expected - 1.0, atol=1e-5, rtol=0.0)


def test_an_unknown_processor_of_relative_actions_is_refused(tmp_path: Path) -> None:
    lerobot(tmp_path, "pi0")
    step = {"registry_name": "map_delta_action", "config": {"enabled": True}}
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    assert "policy_preprocessor.json has the step map_delta_action" in refused(tmp_path)
    step["config"]["enabled"] = False
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    built(tmp_path)


def test_the_number_of_denoising_steps_is_that_of_the_configuration(tmp_path: Path) -> None:
    lerobot(tmp_path, "pi0", num_inference_steps=3)
    assert built(tmp_path).act(seen(2)).sample["path"].shape[1] == 3 + 1
    assert built(tmp_path, denoising_steps=6).act(seen(2)).sample["path"].shape[1] == 6 + 1
    changed(tmp_path, "config.json", num_inference_steps=None)
    assert built(tmp_path).act(seen(2)).sample["path"].shape[1] == 10 + 1
    assert Pi0Config(hidden=16).build(SEEING).grid.steps == 4


def test_periods_of_the_embedding_of_time_are_read(tmp_path: Path) -> None:
    lerobot(tmp_path, "pi0", min_period=0.01, max_period=2.0)
    config = built(tmp_path).model.native.config
    assert (config.min_period, config.max_period) == (0.01, 2.0)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("shards", [["embedding", "head"], ["head", "embedding"], ["both"]])
def test_words_are_embedded_by_embed_tokens_where_it_differs_from_the_head(
    kind: str, shards: list[str], tmp_path: Path
) -> None:
    config = lerobot(tmp_path, kind)
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    own = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = torch.randn(tensors[head].shape)
    parts = {"head": tensors, "embedding": {own: embedding}, "both": tensors | {own: embedding}}
    (tmp_path / "model.safetensors").unlink()
    for number, part in enumerate(shards):
        save_file(parts[part], tmp_path / f"model-{number}.safetensors", {"format": "pt"})
    found = built(tmp_path, config).model.native.model.vlm.language_model.embed_tokens.weight
    torch.testing.assert_close(found.detach(), embedding)


def test_one_of_several_data_sets_with_statistics_is_chosen_by_name(tmp_path: Path) -> None:
    save(tmp_path, "openpi")
    (tmp_path / "assets" / "arm").mkdir()
    statistics = json.loads((tmp_path / "assets" / "robot" / "norm_stats.json").read_text())
    statistics["norm_stats"]["actions"]["mean"][0] = 7.0
    (tmp_path / "assets" / "arm" / "norm_stats.json").write_text(json.dumps(statistics))
    assert "has statistics of 2 data sets; choose policy.unnorm_key from arm, robot" in refused(tmp_path)
    assert float(built(tmp_path, unnorm_key="arm").action_mean[0]) == 7.0
    assert float(built(tmp_path, unnorm_key="robot").action_mean[0]) == 1.0
    without = built(tmp_path, unnorm_key="demonstrations")
    assert without.lacks_statistics == "policy.unnorm_key=demonstrations leaves the statistics of weights out"
    with pytest.raises(UserError, match=r"no statistics of policy\.unnorm_key=hand; expected one of arm, robot"):
        built(tmp_path, unnorm_key="hand")


def converted(folder: Path) -> None:
    """A pi0.5 as openpi's converter leaves it: config.json does not say that it is one."""
    save(folder, "openpi")
    save_file(named("openpi"), folder / "model.safetensors", {"format": "pt"})
    variants = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    changed(folder, "config.json", precision="bfloat16", **variants)
    stats = {of: {"q01": [-1.0] * size, "q99": [1.0] * size} for of, size in (("state", 2), ("actions", 3))}
    (folder / "assets" / "robot" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))


def test_a_converted_pi05_is_known_by_its_tensors(tmp_path: Path) -> None:
    converted(tmp_path)
    built(tmp_path, Pi05Config)
    assert "(it is of type pi05)" in refused(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    save(other, "openpi")
    assert "(it is of type pi0)" in refused(other, Pi05Config)


def test_states_are_in_the_prompt_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    converted(tmp_path)
    assert built(tmp_path, Pi05Config).inputs.prompts(seen(1))[0].startswith("Task: pick the milk, State: ")
    changed(tmp_path, "config.json", discrete_state_input=False)
    policy = built(tmp_path, Pi05Config)
    assert policy.inputs.prompts(seen(2)) == ["pick the milk\n", "open\n"]
    assert policy.with_new_weights().inputs.prompts(seen(2)) == ["pick the milk\n", "open\n"]
