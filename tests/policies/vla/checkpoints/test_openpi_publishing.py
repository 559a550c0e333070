"""Checkpoints of openpi's layout: names and shapes that its loader expects, and what is read from them again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import nn
from transformers import PI0Config, PI0ForConditionalGeneration

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import Steering
from policies.generation.steering import SteeringConfig
from policies.mlp import MLPConfig
from policies.vla import adapters
from policies.vla.adaptive import Pi05Model
from policies.vla.checkpoints.openpi_publishing import HEAD, TIED, UNREAD_HEAD, openpi_name, publish
from policies.vla.checkpoints.starting_points import read
from policies.vla.model import Pi0Model
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.pi05 import Pi05Config
from tests.policies.vla.checkpoints.test_weights import changed, save
from tests.policies.vla.test_pi0 import SEEING, seen
from tests.policies.vla.test_pi05 import named

VOCABULARY = 257152
CONFIGS = {"pi0": Pi0Config, "pi05": Pi05Config}
MODELS = {"pi0": Pi0Model, "pi05": Pi05Model}
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert.model."
TYING = {TIED: HEAD}
"""Tensors of openpi's model that are one and the same."""


def gemma(prefix: str, width: int, inner: int, norms: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Tensors of 18 layers of Gemma with eight heads of 256 and one of keys; `norms` are the tensors of a norm."""
    layer = {
        "self_attn.q_proj.weight": (2048, width),
        "self_attn.k_proj.weight": (256, width),
        "self_attn.v_proj.weight": (256, width),
        "self_attn.o_proj.weight": (width, 2048),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layer |= {f"{norm}.{name}": shape for name, shape in norms.items()}
    layers = {f"{prefix}layers.{index}.{name}": shape for index in range(18) for name, shape in layer.items()}
    return layers | {f"{prefix}norm.{name}": shape for name, shape in norms.items()}


def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def loaded_by_openpi(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state_dict of openpi's PI0Pytorch of gemma_2b and gemma_300m, with 32 actions."""
    width = 1152
    seeing = linear("self_attn.q_proj", width, width) | linear("self_attn.k_proj", width, width)
    seeing |= linear("self_attn.v_proj", width, width) | linear("self_attn.out_proj", width, width)
    seeing |= linear("mlp.fc1", width, 4304) | linear("mlp.fc2", 4304, width)
    seeing |= {f"layer_norm{number}.{part}": (width,) for number in (1, 2) for part in ("weight", "bias")}
    tensors = {f"{VISION}encoder.layers.{index}.{name}": shape for index in range(27) for name, shape in seeing.items()}
    tensors |= {
        f"{VISION}embeddings.patch_embedding.weight": (width, 3, 14, 14),
        f"{VISION}embeddings.patch_embedding.bias": (width,),
        f"{VISION}embeddings.position_embedding.weight": (256, width),
        f"{VISION}post_layernorm.weight": (width,),
        f"{VISION}post_layernorm.bias": (width,),
        "paligemma_with_expert.paligemma.lm_head.weight": (VOCABULARY, 2048),
        "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight": (VOCABULARY, 2048),
        "paligemma_with_expert.gemma_expert.lm_head.weight": (VOCABULARY, 1024),
    }
    tensors |= linear("paligemma_with_expert.paligemma.model.multi_modal_projector.linear", width, 2048)
    tensors |= gemma(LANGUAGE, 2048, 16384, {"weight": (2048,)})
    adaptive = {"dense.weight": (3072, 1024), "dense.bias": (3072,)}
    tensors |= gemma(EXPERT, 1024, 4096, {"weight": (1024,)} if kind == "pi0" else adaptive)
    tensors |= linear("action_in_proj", 32, 1024) | linear("action_out_proj", 1024, 32)
    if kind == "pi05":
        return tensors | linear("time_mlp_in", 1024, 1024) | linear("time_mlp_out", 1024, 1024)
    tensors |= linear("action_time_mlp_in", 2048, 1024) | linear("action_time_mlp_out", 1024, 1024)
    return tensors | linear("state_proj", 32, 1024)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_names_and_shapes_of_the_published_size_are_those_of_openpi(kind: str) -> None:
    with torch.device("meta"):
        native = MODELS[kind](PI0ForConditionalGeneration(PI0Config())).native
    written = {openpi_name(name): tuple(value.shape) for name, value in native.state_dict().items()}
    expected = loaded_by_openpi(kind)
    assert len(expected) == {"pi0": 778, "pi05": 813}[kind]  # two of which are one tensor
    assert written | {UNREAD_HEAD: (VOCABULARY, 1024)} == {
        name: shape for name, shape in expected.items() if name != TIED
    }


def source(folder: Path, kind: str, **fields: object) -> Path:
    """Small published weights of a `kind`, in openpi's layout, with further `fields` of its configuration."""
    folder.mkdir()
    save(folder, "openpi")
    changed(folder, "config.json", **{"pi05": kind == "pi05", **fields})
    if kind == "pi05":
        save_file(named("openpi"), folder / "model.safetensors", {"format": "pt"})
        state, action = ([0.0, -2.0], [1.0, 2.0]), ([-1.0, 0.0, 1.0], [1.0, 2.0, 5.0])
        stats = {name: {"q01": low, "q99": high} for name, (low, high) in (("state", state), ("actions", action))}
        (folder / "assets" / "robot" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    return folder


def trained(folder: Path, kind: str, **options: object) -> Pi0Policy:
    """A policy of the weights in `folder` whose own weights have changed since."""
    torch.manual_seed(0)
    policy = CONFIGS[kind](**{"weights": str(folder), "hidden": 16, **options}).build(SEEING)
    policy.fit(seen(64), 0.3 + torch.rand(64, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    for weight in policy.model.parameters():
        if weight.requires_grad:
            weight.data += 0.02 * torch.randn_like(weight)
    return policy


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"unnorm_key": "demonstrations", "denoising_steps": 3}])
def test_what_is_written_is_read_again_exactly(kind: str, options: dict[str, object], tmp_path: Path) -> None:
    fields = {"pi0": {}, "pi05": {"discrete_state_input": "lora_rank" in options}}[kind]
    policy = trained(source(tmp_path / "published", kind, **fields), kind, **options)
    policy.inputs.antialias = "lora_rank" not in options
    publish(policy, tmp_path / "out", tmp_path)
    assert not adapters.rank_of(policy.model.native)  # merged
    again = CONFIGS[kind](weights=str(tmp_path / "out"), hidden=16).build(SEEING)
    theirs = again.model.native.state_dict()
    own = policy.model.native.state_dict()
    assert own.keys() == theirs.keys()
    assert [name for name, value in own.items() if not torch.equal(value, theirs[name])] == []
    assert again.brought_statistics
    for name in ("action_mean", "action_std", "inputs.state.mean", "inputs.state.scale"):
        size = policy.inputs.state_size if "state" in name else policy.actions
        assert torch.equal(*(_attribute(each, name)[:size] for each in (policy, again))), name
    assert again.grid.steps == policy.grid.steps
    assert again.inputs.antialias == policy.inputs.antialias
    assert getattr(again.inputs, "states_in_prompt", None) == getattr(policy.inputs, "states_in_prompt", None)
    observation = seen(3)
    torch.testing.assert_close(
        again.act(observation, deterministic=True).actions, policy.act(observation, deterministic=True).actions
    )


def _attribute(policy: Pi0Policy, name: str) -> torch.Tensor:
    value: object = policy
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, torch.Tensor)
    return value


class Named(nn.Module):
    """Module with parameters of the names and shapes of `tensors`, in bfloat16, of which those of `TYING` are tied."""

    def __init__(self, tensors: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in tensors.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.full(shape, torch.nan, dtype=torch.bfloat16)))
        for name, other in TYING.items():
            path, _, last = name.rpartition(".")
            self.get_submodule(path).register_parameter(last, self.get_parameter(other))


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_the_strict_loader_of_openpi_takes_the_file(kind: str, tmp_path: Path) -> None:
    policy = trained(source(tmp_path / "published", kind), kind)
    publish(policy, tmp_path / "out", tmp_path)
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "pt") as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    assert shapes[UNREAD_HEAD] == (shapes[HEAD][0], 32)
    model = Named(shapes | {TIED: shapes[HEAD]})
    load_model(model, file)  # strict, as openpi calls it
    own = policy.model.native.state_dict()["model.vlm.language_model.embed_tokens.weight"]
    assert torch.equal(model.get_parameter(TIED), own.bfloat16())
    assert not any(bool(weight.isnan().any()) for weight in model.parameters())


def test_statistics_are_in_openpi_s_form(tmp_path: Path) -> None:
    files = {}
    for kind in CONFIGS:
        policy = trained(source(tmp_path / kind, kind), kind)
        publish(policy, tmp_path / f"{kind}_out", tmp_path)
        (path,) = (tmp_path / f"{kind}_out").rglob("norm_stats.json")
        assert path.parent == tmp_path / f"{kind}_out" / "assets" / "robot"  # as the statistics that it still has
        files[kind] = json.loads(path.read_text())
        assert list(files[kind]) == ["norm_stats"]
        assert [list(each) for each in files[kind]["norm_stats"].values()] == [["mean", "std", "q01", "q99"]] * 2
    state, actions = (files["pi0"]["norm_stats"][name] for name in ("state", "actions"))
    assert actions["mean"] == [1.0, 2.0, 3.0]
    assert actions["std"] == pytest.approx([0.5, 0.6, 0.7])
    assert state["std"] == pytest.approx([0.3, 1.0])  # what never varied is divided by 1
    assert state["q01"] is state["q99"] is None  # unknown
    state, actions = (files["pi05"]["norm_stats"][name] for name in ("state", "actions"))
    assert (state["q01"], state["q99"]) == ([0.0, -2.0], [1.0, 2.0])
    assert (actions["q01"], actions["q99"]) == ([-1.0, 0.0, 1.0], [1.0, 2.0, 5.0])
    assert (actions["mean"], actions["std"]) == ([0.0, 1.0, 3.0], [1.0, 1.0, 2.0])  # openpi asks for them, too


def test_configuration_card_and_further_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = trained(source(tmp_path / "published", "pi0"), "pi0", unnorm_key="demonstrations")
    (tmp_path / "report.md").write_text("It succeeds.\n")
    publish(policy, tmp_path / "out", tmp_path)
    assert "these weights are not of the sizes gemma_2b and gemma_300m" in caplog.text
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["action_dim"], fields["action_horizon"], fields["precision"]) == (32, 4, "float32")
    assert "paligemma_variant" not in fields  # which would be wrong
    assert (tmp_path / "out" / "assets" / "embodied" / "norm_stats.json").exists()  # no longer the robot's
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: openpi" in card
    assert "pi05=False, action_dim=32, action_horizon=4" in card
    assert "`base_0_rgb`: front, `left_wrist_0_rgb`: wrist; the state is, in this order: fingers." in card
    assert card.endswith("It succeeds.\n")
    assert Contract.from_dict(json.loads((tmp_path / "out" / "contract.json").read_text())) == SEEING
    start = read(str(tmp_path / "out"))
    assert start is not None
    assert (start.policy, start.program, start.horizon, start.benchmark) == ("pi0", "openpi", 4, None)


def test_a_published_size_has_openpi_s_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained(source(tmp_path / "published", "pi05"), "pi05")
    monkeypatch.setattr("transformers.PI0Config", lambda: policy.model.native.config)
    publish(policy, tmp_path / "out", tmp_path, "owner/robot")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["paligemma_variant"], fields["action_expert_variant"]) == ("gemma_2b", "gemma_300m")
    assert "vlm_config" not in fields
    assert (tmp_path / "out" / "assets" / "owner" / "robot" / "norm_stats.json").exists()


def test_relative_actions_of_a_pose_are_kept_and_others_refused(tmp_path: Path) -> None:
    pose = replace(SEEING, observation=SEEING.observation | {"fingers": TensorSpec((8,), unit="m")})
    pose = replace(pose, action=TensorSpec((7,), low=(-9.0,) * 7, high=(9.0,) * 7))
    folder = source(tmp_path / "published", "pi0", extra_delta_transform=True)
    stats = {name: {"mean": [0.0] * size, "std": [1.0] * size} for name, size in (("state", 8), ("actions", 7))}
    (folder / "assets" / "robot" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    policy = Pi0Config(weights=str(folder), hidden=16).build(pose)
    publish(policy, tmp_path / "out", tmp_path)
    again = Pi0Config(weights=str(tmp_path / "out"), hidden=16).build(pose)
    assert again.relative.tolist() == [1.0] * 6 + [0.0]
    assert "actions relative to the state." in (tmp_path / "out" / "README.md").read_text()
    policy.relative[2] = 0.0
    with pytest.raises(UserError, match="those of a pose, got elements 0 1 3 4 5; use target=hub"):
        publish(policy, tmp_path / "other", tmp_path)


def test_what_openpi_cannot_represent_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = source(tmp_path / "published", "pi0")
    policy = trained(folder, "pi0")
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"expected asset_id=NAME or OWNER/NAME, got \.\./x"):
        publish(policy, out, tmp_path, "../x")
    with pytest.raises(UserError, match="published exists; choose another output"):
        publish(policy, folder, tmp_path)
    flat = Contract({"x": TensorSpec((2,))}, SEEING.action, 0.05, horizon=4, executed=2)
    with pytest.raises(UserError, match="is for policy=pi0 or pi05, got MLPPolicy"):
        publish(MLPConfig().build(flat), out, tmp_path)
    with pytest.raises(UserError, match="is for published weights"):
        publish(Pi0Config(hidden=16).build(SEEING), out, tmp_path)
    steered = trained(folder, "pi0", steering=SteeringConfig(kind=Steering.NOISE))
    steered.steers.fill_(True)
    with pytest.raises(UserError, match="published weights have no small actor"):
        publish(steered, out, tmp_path)
    labelled = trained(folder, "pi0", advantage_guidance=1.5)
    labelled.acts_positive.fill_(True)
    with pytest.raises(UserError, match="do not name the label"):
        publish(labelled, out, tmp_path)
    late = Pi0Config(weights=str(folder), hidden=16).build(SEEING.delayed(2))
    with pytest.raises(UserError, match=r"cannot say that chunks begin 2 steps late \(delay\); use target=hub"):
        publish(late, out, tmp_path)
    cameras = {name: SEEING.observation["wrist"] for name in ("a", "b", "c", "d")}
    four = replace(SEEING, observation=cameras | {"fingers": SEEING.observation["fingers"]})
    with pytest.raises(UserError, match="openpi reads at most 3 pictures, got a, b, c, d"):
        publish(Pi0Config(weights=str(folder), hidden=16).build(four), out, tmp_path)
    labelled.acts_positive.fill_(False)
    labelled.model.native.config.max_period = 8.0
    with pytest.raises(UserError, match=r"periods from 0\.004 to 4\.0, these weights \(0\.004, 8\.0\)"):
        publish(labelled, out, tmp_path)
    assert not out.exists()
