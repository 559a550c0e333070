"""pi0 and pi0.5 in LeRobot's layout: what is written, read again, and computed by LeRobot's own classes from it.

LEROBOT6_PYTHON names an interpreter with LeRobot 0.6, which needs transformers 5.5 (lerobot_results.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, processors
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import Steering
from embodied.text import encode
from policies.generation.steering import SteeringConfig
from policies.lerobot.publishing import publish
from policies.mlp import MLPConfig
from policies.vla import adapters
from policies.vla.checkpoints import statistics
from policies.vla.checkpoints.settings import processor_steps
from policies.vla.checkpoints.starting_points import read
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.pi05 import Pi05Config
from tests.policies.vla.checkpoints.test_openpi_publishing import loaded_by_openpi
from tests.policies.vla.checkpoints.test_weights import changed, save
from tests.policies.vla.test_pi0 import SEEING, TEXT, seen
from tests.policies.vla.test_pi05 import named

PYTHON = os.environ.get("LEROBOT6_PYTHON")
CONFIGS = {"pi0": Pi0Config, "pi05": Pi05Config}
NORMALISER = "policy_{}processor_step_{}_{}normalizer_processor.safetensors"
ACTIONS = {"MEAN_STD": ("mean", "std"), "QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max")}
TASKS = ["pick the milk", "open", "the milk"]


def improve(file: Path) -> None:
    """Let the tokenizer know numbers, and add the token of a beginning by itself, as PaliGemma's does."""
    words = Tokenizer.from_file(str(file))
    words.add_tokens([AddedToken(str(number), single_word=True) for number in range(-1, 256)])
    words.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    words.save(str(file))


LEROBOT_PI05 = {"type": "pi05", "use_relative_actions": False}  # LeRobot since 0.5.1


def source(folder: Path, naming: str, kind: str = "pi0", mode: str | None = None) -> Path:
    """Small published weights of a `kind` in the `naming` of a program, with LeRobot's statistics of a `mode`."""
    folder.mkdir()
    save(folder, naming)
    improve(folder / "tokenizer.json")
    if kind == "pi05":
        save_file(named(naming), folder / "model.safetensors", {"format": "pt"})
        changed(folder, "config.json", **(LEROBOT_PI05 if naming == "lerobot" else {"pi05": True}))
        if naming == "openpi":
            state, action = ([0.0, -2.0], [1.0, 2.0]), ([-1.0, 0.0, 1.0], [1.0, 2.0, 5.0])
            stats = {name: {"q01": low, "q99": high} for name, (low, high) in (("state", state), ("actions", action))}
            (folder / "assets" / "robot" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    if naming == "lerobot":
        names = ACTIONS[mode or "MEAN_STD"]
        changed(folder, "config.json", normalization_mapping=dict.fromkeys(("STATE", "ACTION"), mode or "MEAN_STD"))
        values = {"observation.state": ([0.1, -0.2], [0.9, 1.2]), "action": ([-0.5, 0.1, 0.2], [0.6, 1.9, 2.0])}
        save_file(
            {
                f"{key}.{name}": torch.tensor(each)
                for key, pair in values.items()
                for name, each in zip(names, pair, strict=True)
            },
            folder / NORMALISER.format("pre", 5, ""),
        )
    return folder


def trained(folder: Path, kind: str, contract: Contract = SEEING, **options: object) -> Pi0Policy:
    """A policy of the weights in `folder` whose own weights have changed since."""
    torch.manual_seed(0)
    policy = CONFIGS[kind](**{"weights": str(folder), "hidden": 16, **options}).build(contract)
    actions = 0.3 + torch.rand(64, 4, policy.actions) * torch.arange(1.0, 1.0 + policy.actions)
    observation = seen(64)
    observation["fingers"] = observation["fingers"].repeat(1, 2)[:, : policy.inputs.state_size]
    policy.fit(observation, actions)
    for weight in policy.model.parameters():
        if weight.requires_grad:
            weight.data += {"pi0": 0.02, "pi05": 0.1}[kind] * torch.randn_like(weight)
    return policy


CASES = [
    ("pi0", "transformers", None, {}),
    ("pi0", "openpi", None, {"lora_rank": 2}),
    ("pi0", "lerobot", "MEAN_STD", {"denoising_steps": 3}),
    ("pi0", "lerobot", "QUANTILES", {}),
    ("pi0", "openpi", None, {"unnorm_key": "demonstrations"}),
    ("pi05", "openpi", None, {"lora_rank": 2}),
    ("pi05", "lerobot", "QUANTILES", {}),
    ("pi05", "lerobot", "MEAN_STD", {"denoising_steps": 3}),
    ("pi05", "openpi", None, {"unnorm_key": "demonstrations"}),
]


@pytest.mark.parametrize(("kind", "naming", "mode", "options"), CASES)
def test_what_is_written_is_read_again(
    kind: str, naming: str, mode: str | None, options: dict[str, object], tmp_path: Path
) -> None:
    policy = trained(source(tmp_path / "published", naming, kind, mode), kind, **options)
    out = tmp_path / "out"
    publish(policy, out, tmp_path)
    assert not adapters.rank_of(policy.model.native)  # merged
    again = CONFIGS[kind](weights=str(out), hidden=16).build(SEEING)
    own, theirs = policy.model.native.state_dict(), again.model.native.state_dict()
    assert own.keys() == theirs.keys()
    assert [name for name, value in own.items() if not torch.equal(value, theirs[name])] == []
    assert again.brought_statistics
    assert again.grid.steps == policy.grid.steps
    observation = seen(3)
    torch.testing.assert_close(again.inputs.tokens(observation), policy.inputs.tokens(observation))
    torch.testing.assert_close(
        again.act(observation, deterministic=True).actions, policy.act(observation, deterministic=True).actions
    )
    with pytest.raises(UserError, match="out exists; choose another output"):
        publish(policy, out, tmp_path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_tensors_have_the_names_that_lerobot_loads_strictly(kind: str, tmp_path: Path) -> None:
    policy = trained(source(tmp_path / "published", "openpi", kind), kind)
    publish(policy, tmp_path / "out", tmp_path)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        written = set(tensors.keys())
    # openpi's, of as many layers as the small model has; the embedding has the name of the head, to which it is tied
    layers = ["model.layers.", "encoder.layers."]
    expected = {
        f"model.{name}"
        for name in loaded_by_openpi(kind)
        if not any(
            f".{index}." in name.rpartition("layers")[2]
            for index in range(2, 27)
            if any(each in name for each in layers)
        )
    }
    assert written == {
        name for name in expected if not name.endswith("paligemma.model.language_model.embed_tokens.weight")
    }


def statistics_in(folder: Path, mode: str) -> dict[str, list[float]]:
    """Statistics of a folder by LeRobot's names, the same in both processors."""
    before, after = (
        load_file(next(folder.glob(NORMALISER.format(part, "*", prefix))))
        for part, prefix in (("pre", ""), ("post", "un"))
    )
    assert before.keys() == after.keys()
    config = json.loads((folder / "config.json").read_text())
    assert config["normalization_mapping"]["ACTION"] == mode
    return {name: value.tolist() for name, value in before.items()}


def test_statistics_keep_their_published_normalisation(tmp_path: Path) -> None:
    folders = {}
    for kind, naming, mode in (
        ("pi0", "lerobot", "MIN_MAX"),
        ("pi05", "lerobot", "MEAN_STD"),
        ("pi05", "openpi", None),
    ):
        policy = trained(source(tmp_path / f"{kind}_{naming}", naming, kind, mode), kind)
        folders[kind, naming] = tmp_path / f"{kind}_{naming}_out"
        publish(policy, folders[kind, naming], tmp_path)
    statistics = statistics_in(folders["pi0", "lerobot"], "MIN_MAX")
    assert statistics["observation.state.min"] == pytest.approx([0.1, -0.2])
    assert statistics["action.max"] == pytest.approx([0.6, 1.9, 2.0])
    statistics = statistics_in(folders["pi05", "lerobot"], "MEAN_STD")
    assert statistics["observation.state.std"] == pytest.approx([0.9, 1.2])
    statistics = statistics_in(folders["pi05", "openpi"], "QUANTILES")
    assert (statistics["action.q01"], statistics["action.q99"]) == ([-1.0, 0.0, 1.0], [1.0, 2.0, 5.0])


def test_statistics_of_the_demonstrations_are_named_as_they_were_computed(tmp_path: Path) -> None:
    policy = trained(source(tmp_path / "published", "openpi", "pi05"), "pi05", unnorm_key="demonstrations")
    publish(policy, tmp_path / "out", tmp_path)
    statistics = statistics_in(tmp_path / "out", "MEAN_STD")
    assert sorted(statistics) == ["action.mean", "action.std", "observation.state.q01", "observation.state.q99"]
    low, high = (seen(64)["fingers"].quantile(share, 0) for share in (0.01, 0.99))
    assert statistics["observation.state.q01"] == pytest.approx(low.tolist(), abs=1e-6)
    assert statistics["observation.state.q99"] == pytest.approx(high.tolist(), abs=1e-6)
    assert statistics["action.mean"] == policy.action_mean.tolist()


def test_configuration_processors_card_and_further_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = trained(source(tmp_path / "published", "openpi", "pi05"), "pi05", denoising_steps=7)
    (tmp_path / "report.md").write_text("It succeeds.\n")
    out = tmp_path / "out"
    publish(policy, out, tmp_path)
    assert "these weights are not of the sizes gemma_2b and gemma_300m: LeRobot cannot load them" in caplog.text
    fields = json.loads((out / "config.json").read_text())
    assert (fields["type"], fields["chunk_size"], fields["n_action_steps"]) == ("pi05", 4, 2)
    assert (fields["num_inference_steps"], fields["tokenizer_max_length"]) == (7, 200)
    assert fields["image_resolution"] == [32, 32]
    assert list(fields["input_features"]) == [
        *("observation.images.front", "observation.images.wrist", "observation.state")
    ]
    assert not any("relative" in name for name in fields)  # which LeRobot 0.4 does not know
    assert processor_steps(out)[3:5] == [
        ("pi05_prepare_state_tokenizer_processor_step", {"max_state_dim": 2}),
        (
            "tokenizer_processor",
            {
                "max_length": 200,
                "task_key": "task",
                "padding_side": "right",
                "padding": "max_length",
                "truncation": True,
                "tokenizer_name": "google/paligemma-3b-pt-224",
            },
        ),
    ]
    card = (out / "README.md").read_text()
    assert "library_name: lerobot" in card
    assert "policy = PI05Policy.from_pretrained(FOLDER)" in card
    assert "`observation.images.front`: front, `observation.images.wrist`: wrist; `observation.state` is" in card
    assert card.endswith("It succeeds.\n")
    assert Contract.from_dict(json.loads((out / "contract.json").read_text())) == SEEING
    start = read(str(out))
    assert start is not None
    assert (start.policy, start.program, start.horizon, start.executed) == ("pi05", "LeRobot", 4, 2)


def test_a_published_size_has_lerobot_s_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained(source(tmp_path / "published", "transformers"), "pi0")
    monkeypatch.setattr("transformers.PI0Config", lambda: policy.model.native.config)
    publish(policy, tmp_path / "out", tmp_path)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["paligemma_variant"], fields["action_expert_variant"]) == ("gemma_2b", "gemma_300m")
    assert "vlm_config" not in fields


ARM = replace(
    SEEING,
    observation=SEEING.observation | {"fingers": TensorSpec((3,), unit="m")},
    action=TensorSpec((3,), names=("arm", "wrist", "gripper"), low=(-9.0,) * 3, high=(9.0,) * 3),
)


def make_relative(folder: Path) -> None:
    """Let the weights have actions of which two elements are relative, and a state of three."""
    changed(folder, "config.json", use_relative_actions=True, action_feature_names=["a", "b", "gripper"])
    values = {"observation.state.mean": [0.1, 0.3, 0.5], "observation.state.std": [0.9, 0.8, 0.7]}
    values |= {"action.mean": [0.2, 0.0, 0.1], "action.std": [1.0, 0.5, 0.7]}
    save_file({name: torch.tensor(each) for name, each in values.items()}, folder / NORMALISER.format("pre", 5, ""))


@pytest.mark.parametrize("names", [("arm", "wrist", "gripper"), ("gripper_x", "wrist", "gripper"), ()])
def test_relative_actions_are_kept(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = source(tmp_path / "published", "lerobot")
    make_relative(folder)
    contract = replace(ARM, action=replace(ARM.action, names=names))
    policy = Pi0Config(weights=str(folder), hidden=16).build(contract)
    publish(policy, tmp_path / "out", tmp_path)
    again = Pi0Config(weights=str(tmp_path / "out"), hidden=16).build(contract)
    assert again.relative.tolist() == policy.relative.tolist() == [1.0, 1.0, 0.0]
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = ["relative_0", "relative_1", "absolute_2"] if names != ARM.action.names else list(names)
    assert fields["action_feature_names"] == expected
    assert fields["relative_exclude_joints"] == expected[2:]
    steps = json.loads((tmp_path / "out" / "policy_postprocessor.json").read_text())["steps"]
    assert [each["registry_name"] for each in steps] == [
        *("unnormalizer_processor", "absolute_actions_processor", "device_processor")
    ]


def test_what_lerobot_cannot_represent_is_refused_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = source(tmp_path / "published", "openpi")
    out = tmp_path / "out"
    flat = Contract({"x": TensorSpec((2,))}, SEEING.action, 0.05, horizon=4, executed=2)
    with pytest.raises(
        UserError, match=r"policy=pi0, pi05, pi0_fast, smolvla, groot, act and diffusion, got MLPPolicy; use target="
    ):
        publish(MLPConfig().build(flat), out, tmp_path)
    with pytest.raises(UserError, match=r"is for published weights .*; use target=hub"):
        publish(Pi0Config(hidden=16).build(SEEING), out, tmp_path)
    steered = trained(folder, "pi0", steering=SteeringConfig(kind=Steering.NOISE))
    steered.steers.fill_(True)
    with pytest.raises(UserError, match="published weights have no small actor"):
        publish(steered, out, tmp_path)
    delayed = Pi0Config(weights=str(folder), hidden=16).build(SEEING.delayed(1))
    with pytest.raises(UserError, match=r"begin 1 steps late \(delay\); use target=hub"):
        publish(delayed, out, tmp_path)
    stateless = source(tmp_path / "pi05", "openpi", "pi05")
    changed(stateless, "config.json", discrete_state_input=False)
    with pytest.raises(UserError, match=r"pi0\.5 reads the state, and these weights do not; use target="):
        publish(trained(stateless, "pi05"), out, tmp_path)
    policy = trained(folder, "pi0")
    policy.has_relative = True
    with pytest.raises(UserError, match="relative actions of 3 elements to a state of 2; use target=hub"):
        publish(policy, out, tmp_path)
    assert not out.exists()
    assert "antialiasing" not in caplog.text
    assert "beginning" not in caplog.text
    large = replace(SEEING, observation=SEEING.observation | {"wrist": TensorSpec((64, 64, 3), "uint8")})
    publish(Pi0Config(weights=str(folder), hidden=16).build(large), out, tmp_path)
    assert "LeRobot resizes without antialiasing, unlike this policy: give it pictures of 32 x 32" in caplog.text
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing("$A")
    words.save(str(folder / "tokenizer.json"))
    publish(trained(folder, "pi0"), tmp_path / "other", tmp_path)
    assert "adds no beginning as PaliGemma's does; LeRobot relies on it" in caplog.text


def test_other_names_of_cameras_are_the_published_ones(tmp_path: Path) -> None:
    folder = source(tmp_path / "published", "lerobot")
    pictures = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 32, 32]} for name in ("a", "b", "c")}
    changed(folder, "config.json", input_features=pictures)
    publish(trained(folder, "pi0"), tmp_path / "out", tmp_path)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(fields["input_features"]) == ["observation.images.a", "observation.images.b", "observation.state"]


def test_every_mode_has_the_inverse_of_its_statistics() -> None:
    offset, divisor = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0])
    for mode in statistics.Mode:
        if mode is not statistics.Mode.IDENTITY:
            torch.testing.assert_close(mode.located(*mode.stated(offset, divisor)), (offset, divisor))


def prepared(folder: Path, kind: str, naming: str, mode: str | None, options: dict[str, object]) -> Tensor:
    """Our normalised actions [3, 4, 3]; `folder` has policy and inputs for lerobot_results.py afterwards."""
    folder.mkdir()
    relative = options.pop("relative", False)
    contract = replace(ARM if relative else SEEING, action=replace(ARM.action, names=()))
    weights = source(folder / "published", naming, kind, mode)
    if relative:
        make_relative(weights)
    policy = trained(weights, kind, contract, **options)
    noise = torch.Generator().manual_seed(6)
    observation, drawn = seen(3), torch.randn(3, 4, 32, generator=noise)
    observation["fingers"] = torch.rand(3, policy.inputs.state_size, generator=noise)
    observation["instruction"] = torch.stack([torch.from_numpy(encode(task, TEXT)) for task in TASKS])
    policy._noise = lambda *_: drawn
    publish(policy, folder / "policy", folder)
    inputs = {
        f"observation.images.{name}": observation[name].permute(0, 3, 1, 2).contiguous() for name in ("front", "wrist")
    }
    inputs |= {"observation.state": observation["fingers"], "noise": drawn, "scale": policy.action_std}
    save_file(inputs, folder / "inputs.safetensors")
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    return policy.act(observation, deterministic=True).actions / policy.action_std


@pytest.mark.skipif(not PYTHON, reason="LEROBOT6_PYTHON names no interpreter with LeRobot 0.6")
def test_lerobot_s_own_classes_load_it_strictly_and_act_the_same(tmp_path: Path) -> None:
    cases = [*CASES, *((kind, "lerobot", "MEAN_STD", {"relative": True}) for kind in CONFIGS)]
    folders = [tmp_path / str(index) for index in range(len(cases))]
    expected = [prepared(folder, *case) for folder, case in zip(folders, cases, strict=True)]
    command = [str(PYTHON), Path(__file__).with_name("lerobot_results.py"), *folders]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, (kind, naming, mode, options), own in zip(folders, cases, expected, strict=True):
        scale = load_file(folder / "inputs.safetensors")["scale"]
        difference = float((load_file(folder / "outputs.safetensors")["actions"] / scale - own).abs().max())
        print(f"{kind} of {naming}, {mode}, {options}: actions differ by {difference:.1e} of their normalisation")
        assert difference < 1e-5
        shapes = json.loads((folder / "names.json").read_text())
        assert shapes == {f"model.{name}": list(shape) for name, shape in loaded_by_openpi(kind).items()}
