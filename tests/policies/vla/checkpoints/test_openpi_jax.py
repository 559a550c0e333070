"""Checkpoints of openpi's JAX models: numbers by hand, and openpi's own models if OPENPI_PYTHON has them.

OPENPI_PYTHON names an interpreter with openpi and JAX (openpi_jax_results.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration

from embodied.errors import UserError
from policies.vla.adaptive import Pi05Model
from policies.vla.checkpoints import openpi_jax, settings, starting_points, statistics
from policies.vla.checkpoints.openpi_publishing import HEAD, UNREAD_HEAD, own_sizes
from policies.vla.checkpoints.publishing import publish
from policies.vla.checkpoints.weights import _renamed, fill, published
from policies.vla.model import Pi0Model, untrained
from policies.vla.pi0 import Pi0Config
from policies.vla.pi05 import Pi05Config
from policies.vla.sizes import Size
from tests.policies.vla.checkpoints.openpi_jax_files import ATTENTION, BLOCK, IMG, LAYERS, LLM, arrays_of, write
from tests.policies.vla.checkpoints.test_openpi_publishing import EXPERT, LANGUAGE, VISION, loaded_by_openpi
from tests.policies.vla.checkpoints.test_weights import ACTION, STATE, save
from tests.policies.vla.test_pi0 import SEEING, seen

PYTHON = os.environ.get("OPENPI_PYTHON")
MODELS = {"pi0": Pi0Model, "pi05": Pi05Model}
CONFIGS = {"pi0": Pi0Config, "pi05": Pi05Config}
Shapes = dict[str, tuple[int, ...]]


def shapes(kind: str, published_size: bool) -> Shapes:
    """Shapes of the arrays of a pi0 or pi0.5 of the published size, as openpi's training lists them, or a tiny one."""
    layers, heads, keys, head = (18, 8, 1, 256) if published_size else (2, 4, 2, 2)
    width, inner, vocabulary = (2048, 16384, 257152) if published_size else (3, 5, 7)
    acting, hidden, action = (1024, 4096, 32) if published_size else (3, 4, 5)
    blocks, seeing, dense, eyes = (27, 1152, 4304, 16) if published_size else (2, 6, 5, 2)
    patch, patches = (14, 256) if published_size else (2, 4)
    arrays: Shapes = {f"{LLM}embedder.input_embedding": (vocabulary, width)}
    for expert, size, middle in (("", width, inner), ("_1", acting, hidden)):
        arrays[f"{LAYERS}attn.q_einsum{expert}.w"] = (layers, heads, size, head)
        arrays[f"{LAYERS}attn.kv_einsum{expert}.w"] = (layers, 2, keys, size, head)
        arrays[f"{LAYERS}attn.attn_vec_einsum{expert}.w"] = (layers, heads, head, size)
        arrays[f"{LAYERS}mlp{expert}.gating_einsum"] = (layers, 2, size, middle)
        arrays[f"{LAYERS}mlp{expert}.linear"] = (layers, middle, size)
        for norm, stack in (
            ("layers.pre_attention_norm", (layers,)),
            ("layers.pre_ffw_norm", (layers,)),
            ("final_norm", ()),
        ):
            if kind == "pi05" and expert:
                arrays[f"{LLM}{norm}{expert}.Dense_0.kernel"] = (*stack, size, 3 * size)
                arrays[f"{LLM}{norm}{expert}.Dense_0.bias"] = (*stack, 3 * size)
            else:
                arrays[f"{LLM}{norm}{expert}.scale"] = (*stack, size)
    for name in ("query", "key", "value"):
        arrays[f"{ATTENTION}{name}.kernel"] = (blocks, seeing, eyes, seeing // eyes)
        arrays[f"{ATTENTION}{name}.bias"] = (blocks, eyes, seeing // eyes)
    arrays[f"{ATTENTION}out.kernel"] = (blocks, eyes, seeing // eyes, seeing)
    arrays[f"{ATTENTION}out.bias"] = (blocks, seeing)
    for name, sizes in (("0", (seeing, dense)), ("1", (dense, seeing))):
        arrays[f"{BLOCK}MlpBlock_0.Dense_{name}.kernel"] = (blocks, *sizes)
        arrays[f"{BLOCK}MlpBlock_0.Dense_{name}.bias"] = (blocks, sizes[1])
        arrays |= {f"{BLOCK}LayerNorm_{name}.{part}": (blocks, seeing) for part in ("scale", "bias")}
    arrays |= {f"{IMG}Transformer.encoder_norm.{part}": (seeing,) for part in ("scale", "bias")}
    arrays |= {f"{IMG}embedding.kernel": (patch, patch, 3, seeing), f"{IMG}embedding.bias": (seeing,)}
    arrays |= {f"{IMG}pos_embedding": (1, patches, seeing)}
    projections = {
        f"{IMG}head": (seeing, width),
        "action_in_proj": (action, acting),
        "action_out_proj": (acting, action),
    }
    if kind == "pi05":
        projections |= {"time_mlp_in": (acting, acting), "time_mlp_out": (acting, acting)}
    else:
        projections |= {"state_proj": (action, acting), "action_time_mlp_in": (2 * acting, acting)}
        projections |= {"action_time_mlp_out": (acting, acting)}
    for name, sizes in projections.items():
        arrays |= {f"{name}.kernel": sizes, f"{name}.bias": sizes[1:]}
    return arrays


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Array whose elements have the digits of their indices: 213 at [2, 1, 3]."""
    digits = np.indices(shape, dtype=np.float32)
    return sum(10.0 ** (len(shape) - 1 - axis) * digits[axis] for axis in range(len(shape))).astype(np.float32)


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    """Kind, and tensors that are read from arrays of numbered elements."""
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, {name: numbered(shape) for name, shape in shapes(request.param, False).items()})
    return request.param, dict(openpi_jax.tensors(folder))


def test_attention_by_hand(read: tuple[str, dict[str, Tensor]]) -> None:
    _, tensors = read
    for prefix in (LANGUAGE, EXPERT):
        layers = [
            {part: tensors[f"{prefix}layers.{index}.self_attn.{part}_proj.weight"] for part in "qkvo"}
            for index in (0, 1)
        ]
        # array [layer, head, input, element]; row 3 is element 1 of head 1
        assert layers[1]["q"][3].tolist() == [1101, 1111, 1121]
        assert layers[0]["q"].shape == (8, 3)
        # [layer, keys or values, head, input, element]
        assert layers[0]["k"][3].tolist() == [101, 111, 121]
        assert layers[1]["v"][0].tolist() == [11000, 11010, 11020]
        # [layer, head, element, output]; a row is an output
        assert layers[0]["o"][2].tolist() == [2, 12, 102, 112, 202, 212, 302, 312]


def test_dense_layers_norms_and_embedding_by_hand(read: tuple[str, dict[str, Tensor]]) -> None:
    kind, tensors = read
    mlp = f"{LANGUAGE}layers.1.mlp."
    assert tensors[f"{mlp}gate_proj.weight"][4].tolist() == [1004, 1014, 1024]
    assert tensors[f"{mlp}up_proj.weight"][4].tolist() == [1104, 1114, 1124]
    assert tensors[f"{mlp}down_proj.weight"][1].tolist() == [101, 111, 121, 131, 141]
    assert tensors[f"{LANGUAGE}layers.1.post_attention_layernorm.weight"].tolist() == [10, 11, 12]
    assert tensors[f"{LANGUAGE}embed_tokens.weight"][6].tolist() == [60, 61, 62]
    norm = f"{EXPERT}layers.1.input_layernorm."
    if kind == "pi0":
        assert tensors[f"{norm}weight"].tolist() == [10, 11, 12]
        assert tensors["action_time_mlp_in.weight"][2].tolist() == [2, 12, 22, 32, 42, 52]
        assert tensors["state_proj.weight"][2].tolist() == [2, 12, 22, 32, 42]
        return
    assert tensors[f"{norm}dense.weight"][8].tolist() == [108, 118, 128]  # the gate of the last of three elements
    assert tensors[f"{norm}dense.bias"].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert tensors[f"{EXPERT}norm.dense.weight"][1].tolist() == [1, 11, 21]
    assert tensors["time_mlp_in.weight"][2].tolist() == [2, 12, 22]


def test_vision_by_hand(read: tuple[str, dict[str, Tensor]]) -> None:
    _, tensors = read
    # kernel [y, x, colour, output]
    patch = tensors[f"{VISION}embeddings.patch_embedding.weight"]
    assert patch.shape == (6, 3, 2, 2)
    assert patch[5, 2].tolist() == [[25, 125], [1025, 1125]]
    assert tensors[f"{VISION}embeddings.position_embedding.weight"][3].tolist() == [30, 31, 32, 33, 34, 35]
    attention = f"{VISION}encoder.layers.1.self_attn."
    # kernel [layer, input, head, element] and bias [layer, head, element]; row 4 is element 1 of head 1
    assert tensors[f"{attention}q_proj.weight"][4].tolist() == [1011, 1111, 1211, 1311, 1411, 1511]
    assert tensors[f"{attention}v_proj.bias"].tolist() == [100, 101, 102, 110, 111, 112]
    # kernel [layer, head, element, output]
    assert tensors[f"{attention}out_proj.weight"][5].tolist() == [1005, 1015, 1025, 1105, 1115, 1125]
    layer = f"{VISION}encoder.layers.0."
    assert tensors[f"{layer}mlp.fc1.weight"][4].tolist() == [4, 14, 24, 34, 44, 54]
    assert tensors[f"{layer}layer_norm2.bias"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_convolution_with_the_read_kernel_sees_rows_and_columns_as_jax_does(
    read: tuple[str, dict[str, Tensor]],
) -> None:
    kernel, picture = numbered((2, 2, 3, 6)), np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    expected = torch.from_numpy(np.einsum("yxc,yxco->o", picture, kernel))
    patch = read[1][f"{VISION}embeddings.patch_embedding.weight"]
    seen_by_torch = nn.functional.conv2d(torch.from_numpy(picture).permute(2, 0, 1)[None], patch).flatten()
    torch.testing.assert_close(seen_by_torch, expected)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_the_published_size_has_the_tensors_of_openpi_and_the_default_configuration(kind: str, tmp_path: Path) -> None:
    write(tmp_path, shapes(kind, True))
    layouts = openpi_jax._layouts(kind == "pi05")
    names = {
        name: tuple(value.shape)
        for array, layout in layouts.items()
        for name, value in openpi_jax._parts(layout, torch.empty(shapes(kind, True)[array], device="meta"))
    }
    unread = HEAD, UNREAD_HEAD
    assert names == {name: shape for name, shape in loaded_by_openpi(kind).items() if name not in unread}
    options = settings.read(tmp_path, kind, adaptive=None)
    own, default = options.model.to_dict(), PI0Config().to_dict()
    del default["vlm_config"]["vision_config"]["vocab_size"]  # which no vision model reads
    assert own == default
    with pytest.raises(UserError, match="is damaged, or not whole"):
        next(openpi_jax.tensors(tmp_path))  # no array has been written


def small(kind: str) -> nn.Module:
    """Our small network of a `kind`, with random weights in all of its layers."""
    torch.manual_seed(0)
    native = MODELS[kind](untrained(Size.TINY, 4, 2, 3).native).native
    for weight in native.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return native


def source(folder: Path, kind: str, data_set: str = "robot", **layout: object) -> Path:
    """Small published weights of a `kind`, as openpi publishes its JAX models, with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, "openpi")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    (folder / "assets" / "robot").rename(folder / "assets" / data_set)
    if kind == "pi05":
        state, action = ([0.0, -2.0], [1.0, 2.0]), ([-1.0, 0.0, 1.0], [1.0, 2.0, 5.0])
        stats = {name: {"q01": low, "q99": high} for name, (low, high) in (("state", state), ("actions", action))}
        (folder / "assets" / data_set / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    write(folder, arrays_of(small(kind), kind), **layout)
    return folder


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("layout", [{}, {"end": ".value"}, {"ocdbt": False}])
def test_weights_statistics_and_sizes_are_read(kind: str, layout: dict[str, object], tmp_path: Path) -> None:
    policy = CONFIGS[kind](weights=str(source(tmp_path, kind, **layout)), hidden=16).build(SEEING)
    own, expected = policy.model.native.state_dict(), small(kind).state_dict()
    assert own.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(own[name], value)] == []
    assert policy.brought_statistics
    if kind == "pi0":
        torch.testing.assert_close(policy.inputs.state.mean, torch.tensor(STATE[0]))
        torch.testing.assert_close(policy.action_std, torch.tensor(ACTION[1]))
    else:
        torch.testing.assert_close(policy.inputs.state.mean, torch.tensor([0.5, 0.0]))
        torch.testing.assert_close(policy.action_std, torch.tensor([1.0, 1.0, 2.0]))
        assert policy.inputs.states_in_prompt
    assert policy.act(seen(2), deterministic=True).actions.shape == (2, 4, 3)


def test_bfloat16_is_read_bit_by_bit(tmp_path: Path) -> None:
    source(tmp_path, "pi0")
    arrays = {name: value.astype(ml_dtypes.bfloat16) for name, value in arrays_of(small("pi0"), "pi0").items()}
    write(tmp_path, arrays)
    assert {value.dtype for _, value in openpi_jax.tensors(tmp_path)} == {torch.bfloat16}
    own, expected = published(str(tmp_path)).model.native.state_dict(), small("pi0").state_dict()
    assert [name for name, value in expected.items() if not torch.equal(own[name], value.bfloat16().float())] == []


def test_it_trains_on_and_is_published_in_other_layouts(tmp_path: Path) -> None:
    from policies.vla.checkpoints import lerobot_publishing, openpi_publishing

    policy = Pi05Config(weights=str(source(tmp_path / "jax", "pi05")), hidden=16, lora_rank=2).build(SEEING)
    policy.loss(seen(2), torch.rand(2, 4, 3), torch.ones(2, 4, dtype=torch.bool)).backward()
    assert own_sizes(policy)["dit_config"]["hidden_size"] == 32
    publish(policy, tmp_path / "peft", tmp_path, peft=True)
    assert Pi05Config(weights=str(tmp_path / "peft"), hidden=16, lora_rank=2).build(SEEING).brought_statistics
    openpi_publishing.publish(policy, tmp_path / "openpi", tmp_path)
    assert (tmp_path / "openpi" / "assets" / "robot" / "norm_stats.json").exists()
    lerobot_publishing.publish(policy, tmp_path / "lerobot", tmp_path)
    for name in ("openpi", "lerobot"):
        again = Pi05Config(weights=str(tmp_path / name), hidden=16).build(SEEING)
        torch.testing.assert_close(
            again.act(seen(2), deterministic=True).actions, policy.act(seen(2), deterministic=True).actions
        )


def test_the_data_set_tells_what_openpi_s_configurations_do(tmp_path: Path) -> None:
    for kind, horizon in (("pi0", 50), ("pi05", 10)):
        folder = source(tmp_path / kind, kind, "libero")
        start = starting_points.read(str(folder))
        assert start is not None
        assert (start.policy, start.program, start.horizon, start.benchmark) == (kind, "openpi", horizon, "libero")
        options = settings.read(folder, kind, adaptive=None)
        assert (options.model.chunk_size, bool(options.relative)) == (horizon, kind == "pi0")
        assert not options.states_in_prompt
        assert options.antialias
    (folder / "config.json").write_text(json.dumps({"action_horizon": 16, "discrete_state_input": True}))
    options = settings.read(folder, "pi05", adaptive=None)
    assert (options.model.chunk_size, options.states_in_prompt) == (16, True)
    assert options.model.dit_config.hidden_size == 32  # of the arrays still
    (folder / "config.json").unlink()
    (folder / "assets" / "libero").rename(folder / "assets" / "trossen")
    turned = r"trossen/norm_stats\.json is of ALOHA, whose joints openpi turns"
    with pytest.raises(UserError, match=turned):
        Pi05Config(weights=str(folder), hidden=16).build(SEEING)
    Pi05Config(weights=str(folder), hidden=16, unnorm_key="demonstrations").build(SEEING)
    shutil.copytree(folder / "assets" / "trossen", folder / "assets" / "droid")  # as in openpi's base models
    assert settings.read(folder, "pi05", adaptive=None).model.chunk_size == 50
    with pytest.raises(UserError, match=r"statistics of 2 data sets; choose policy\.unnorm_key from droid, trossen"):
        Pi05Config(weights=str(folder), hidden=16).build(SEEING)
    with pytest.raises(UserError, match=turned):
        Pi05Config(weights=str(folder), hidden=16, unnorm_key="trossen").build(SEEING)


def changed(folder: Path, **arrays: np.ndarray | None) -> None:
    """Write the numbered arrays with others by name, of which __ is a point; without those that are None."""
    others = {name.replace("__", "."): value for name, value in arrays.items()}
    all_arrays = {name: numbered(shape) for name, shape in shapes("pi0", False).items()} | others
    write(folder, {name: value for name, value in all_arrays.items() if value is not None})


def spoil(folder: Path, value: float) -> None:
    """Write the arrays of the small network, of which one has this `value`."""
    arrays = arrays_of(small("pi0"), "pi0")
    write(folder, arrays | {"state_proj.bias": np.full_like(arrays["state_proj.bias"], value)})


def truncate(folder: Path) -> None:
    for file in (folder / "params" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: changed(at, action_in_proj__bias=None), "lacks 1 arrays of pi0, such as action_in_proj.bias"),
        (
            lambda at: changed(at, PaliGemma__llm__layers__attn__q_einsum__lora_a=numbered((2, 4, 3, 1))),
            "has 1 unknown arrays for pi0, such as PaliGemma.llm.layers.attn.q_einsum.lora_a",
        ),
        (
            lambda at: changed(at, PaliGemma__llm__layers__mlp_1__linear=numbered((2, 5, 3))),
            "expected PaliGemma.llm.layers.mlp_1.linear of shape [2, 4, 3], which fits the others, got [2, 5, 3]",
        ),
        (
            lambda at: changed(at, action_time_mlp_in__kernel=numbered((3, 3))),
            "expected action_time_mlp_in.kernel of shape [6, 3], which fits the others, got [3, 3]",
        ),
        (
            lambda at: changed(at, PaliGemma__img__pos_embedding=numbered((4, 6))),
            "expected PaliGemma.img.pos_embedding of 3 axes, got the shape [4, 6]",
        ),
        (
            lambda at: changed(at, state_proj__bias=np.zeros(3, np.int32)),
            "expected arrays of type bfloat16, float16, float32, float64, got int32 of state_proj.bias in",
        ),
        (lambda at: (at / "params" / "_METADATA").write_text("[]"), "_METADATA is damaged; download the checkpoint"),
        (
            lambda at: (at / "params" / "manifest.ocdbt").write_bytes(b""),
            "is damaged, or not whole (DATA_LOSS): download",
        ),
        (truncate, "is damaged, or not whole ("),
        (lambda at: spoil(at, np.nan), "infinity or not a number in embed_action_time.state_proj.bias; download"),
    ],
)
def test_arrays_that_do_not_fit_are_one_line(tmp_path: Path, damage, message: str) -> None:
    source(tmp_path, "pi0")
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(str(tmp_path)) == 1


def test_a_chunk_that_was_not_downloaded_is_no_zeros(tmp_path: Path) -> None:
    source(tmp_path, "pi0", ocdbt=False)
    (tmp_path / "params" / "params.action_in_proj.kernel" / "0.0").unlink()
    with pytest.raises(UserError, match=r"array action_in_proj\.kernel is damaged, or not whole \(NOT_FOUND\)"):
        published(str(tmp_path))


def test_other_folders_and_a_missing_package_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source(tmp_path / "weights", "pi05")
    with pytest.raises(UserError, match=r"cannot read the arrays in params as those of a pi0 \(it is of type pi05\)"):
        Pi0Config(weights=str(folder), hidden=16).build(SEEING)
    with pytest.raises(UserError, match="params are arrays without statistics; name the folder that holds both"):
        Pi05Config(weights=str(folder / "params"), hidden=16).build(SEEING)
    (folder / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"cannot read config\.json"):  # as for openpi, it comes before the arrays
        Pi05Config(weights=str(folder), hidden=16).build(SEEING)
    (folder / "model.safetensors").unlink()
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    message = "tensorstore is not installed: pip install 'embodied-rl[orbax]'"
    for read in (starting_points.read, lambda weights: Pi05Config(weights=weights, hidden=16).build(SEEING)):
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            read(str(folder))


def velocity(folder: Path, kind: str, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """First velocity and chunk of our model from `inputs`; times are openpi's, which adds up float32."""
    options = settings.read(folder, kind, adaptive=None)
    model = MODELS[kind](PI0ForConditionalGeneration(options.model))
    fill(model.native, str(folder), folder, kind, lambda name: _renamed(name, adaptive=kind == "pi05"))
    pictures = torch.stack([inputs[name].permute(0, 3, 1, 2) for name in ("base_0_rgb", "left_wrist_0_rgb")], 1)
    with torch.no_grad():
        prefix = model.prefix(pictures, inputs["tokens"].long(), inputs["real"].long())
        x, time, velocities = inputs["noise"], torch.ones(2), []
        for _ in range(10):
            velocities.append(model.velocity(prefix, inputs["state"], x, time)[0])
            x, time = x - velocities[-1] / 10, time - torch.tensor(0.1)
    return velocities[0], x


@pytest.mark.skipif(not PYTHON, reason="OPENPI_PYTHON names no interpreter with openpi and JAX")
def test_openpi_s_own_models_have_the_same_velocities(tmp_path: Path) -> None:
    command = [str(PYTHON), str(Path(__file__).with_name("openpi_jax_results.py")), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in MODELS:
        results = np.load(tmp_path / f"{kind}.npz")
        inputs = {name: torch.from_numpy(results[name]) for name in results.files}
        expected = dict(openpi_jax.tensors(tmp_path / kind / "released"))
        for layout in ("released", "zarr", "zarr3", "training/1", "bfloat16"):
            folder = tmp_path / kind / layout
            tensors = dict(openpi_jax.tensors(folder))
            lower = layout == "bfloat16"
            assert tensors.keys() == expected.keys()
            assert [
                x for x, value in expected.items() if not torch.equal(tensors[x], value.bfloat16() if lower else value)
            ] == []
            assert settings.read(folder, kind, adaptive=None).model.dit_config.hidden_size == 40
        assert len(statistics.read(tmp_path / kind / "training/1", (settings.MODES[kind],) * 2)["state_mean"]) == 5
        first, chunk = velocity(tmp_path / kind / "training/1", kind, inputs)
        for name, own in (("velocity", first), ("actions", chunk)):
            difference = float((own - inputs[name]).abs().max() / inputs[name].std())
            print(f"{kind}: {name} differ by {difference:.1e} standard deviations")
            assert difference < 2e-5
