"""Exported C against its policy, on this machine; refused exports leave no files."""

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from embodied.contract import Contract, TensorSpec
from embodied.export.network import Network, Normalise, chain, export_target, rollout_outputs
from policies.mlp import MLPConfig
from real_robot.firmware import toolchain
from real_robot.firmware.exporting import Export, Target, Weights, export, strictness
from real_robot.firmware.quantization import QuantizedLinear, quantized
from real_robot.firmware.samples import Samples
from real_robot.firmware.toolchain import run_on_host
from tests.real_robot.firmware import compiled
from tests.real_robot.firmware.compiled import Compiled
from tests.real_robot.firmware.policies import EXPORTS, INTEGERS, KINDS, ROTORS, make

C = Export(Target.c)


def recorded(directory: Path) -> dict:
    return json.loads((directory / "export.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_floats_do_what_the_policy_does(exported, kind: str):
    directory = exported(kind)
    assert recorded(directory)["max_error"] <= 1e-6  # of half the action range
    samples = Samples.load(directory)
    assert samples.inputs.shape[:2] == (20, 50)
    assert samples.outputs.std((0, 1)).min() > 0.01 * make(kind).half_range.min()  # it is not one constant action
    assert torch.equal(samples.outputs, rollout_outputs(make(kind), make(kind).deployable(), samples.inputs))
    contract = Contract.from_dict(json.loads((directory / "contract.json").read_text()))
    assert contract == make(kind).deployable().contract
    assert "force" not in contract.observation  # privileged


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
@pytest.mark.parametrize("compiler", ["host", "arm-none-eabi-gcc"])
def test_it_does_not_compile_where_the_compiler_ignores_infinity(exported, compiler: str, flag: str, tmp_path: Path):
    path = toolchain.host_compiler() if compiler == "host" else shutil.which(compiler)
    if path is None:
        pytest.skip(f"needs {compiler}")
    command = [path, *toolchain.COMMON, flag, "-c", exported("recurrent") / "policy.c", "-o", tmp_path / "policy.o"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode != 0
    assert "compile the policy without -ffast-math, -Ofast and -ffinite-math-only" in answer.stderr


@pytest.mark.parametrize("kind", ["mlp", "recurrent"])
def test_the_check_at_boot_finds_a_compiler_that_says_nothing_of_it(exported, kind: str, tmp_path: Path, monkeypatch):
    assert Compiled(exported(kind), tmp_path / "standard.so").check() == 0
    silent = ("-ffinite-math-only", "-U__FINITE_MATH_ONLY__", "-U__FAST_MATH__")
    monkeypatch.setattr(compiled, "COMMON", (*toolchain.COMMON, *silent))
    assert Compiled(exported(kind), tmp_path / "fast.so").check() == 4


def test_what_is_printed_verifies_policies_that_round_more(exported):
    assert strictness(recorded(exported("mlp"))) == ()
    assert strictness({"max_error": 8e-6, "weights": "float32"}) == ("--tolerance", "1e-05")
    assert strictness(recorded(exported("mlp", Weights.int16))) == ()


@pytest.mark.parametrize(("weights", "kind"), INTEGERS)
def test_integers_do_what_the_quantised_network_does(exported, kind: str, weights: Weights, tmp_path: Path):
    dtype, error, share = {Weights.int16: (torch.int16, 1e-3, 0.85), Weights.int8: (torch.int8, 0.05, 0.65)}[weights]
    directory = exported(kind, weights)
    record, floats = recorded(directory), recorded(exported(kind))
    assert 1e-5 < record["max_error"] <= error
    assert record["constant_bytes"] < share * floats["constant_bytes"]
    samples, network = Samples.load(directory), quantized(make(kind).deployable(), dtype)
    outputs, status = run_on_host(directory, samples.inputs, tmp_path)
    assert status == 0
    memory, expected = network.initial_memory, []
    memory = None if memory is None else memory.expand(20, -1)
    for step in samples.inputs.unbind(1):
        action, memory = chain(network.layers, step, memory)
        expected.append(action)
    difference = (outputs - torch.stack(expected, 1)).abs() / network.limits.half_range
    assert difference.max() < 2e-3
    assert difference.mean() < 2e-5


def test_products_and_sums_of_integers_are_exact():
    layer = nn.Linear(3, 2)
    layer.weight.data = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    layer.bias.data = torch.tensor([10.0, -1.0])
    small = QuantizedLinear(layer, torch.int8)
    assert small.weight.tolist() == [[64, -127, 32], [0, 0, 0]]  # 63.5 and 31.75, rounded half to even
    assert small.limit == 32767
    x = torch.tensor([[4.0, 2.0, -1.0], [0.0, 0.0, 0.0]])
    # inputs become 32767, 16384 (16383.5), -8192 (-8191.75); steps are 4 / 32767 and 2 / 127
    total = 64 * 32767 - 127 * 16384 + 32 * -8192
    torch.testing.assert_close(small(x), torch.tensor([[10 + total * (4 / 32767) * (2 / 127), -1.0], [10.0, -1.0]]))
    # behind tanh, steps are those of 1: inputs become 16384 (16383.5), 8192 (8191.75) and -4096
    half = torch.tensor([[0.5, 0.25, -0.125]])
    total = 64 * 16384 - 127 * 8192 + 32 * -4096
    behind_tanh = QuantizedLinear(layer, torch.int8, peak=1.0)(half)
    torch.testing.assert_close(behind_tanh, torch.tensor([[10 + total / 32767 * (2 / 127), -1.0]]))
    assert [layer.peak for layer in quantized(make("chunks").deployable(), torch.int8).layers[1:4:2]] == [None, 1.0]
    # limits keep the largest sum within 32 bits
    nn.init.ones_((wide := nn.Linear(1000, 1)).weight)
    assert QuantizedLinear(wide, torch.int8).limit == (2**31 - 1) // (127 * 1000)
    words = QuantizedLinear(layer, torch.int16)
    assert words.weight.tolist() == [[16384, -32767, 8192], [0, 0, 0]]
    assert words.limit == 32767
    halves = QuantizedLinear(wide, torch.int16)
    assert halves.weight.unique().tolist() == [1465]  # isqrt((2^31 - 1) / 1000)
    assert halves.limit == (2**31 - 1) // (1465 * 1000)


@pytest.mark.parametrize(("weights", "kind"), EXPORTS)
def test_it_needs_no_library_and_no_heap(exported, tmp_path: Path, kind: str, weights: Weights):
    directory = exported(kind, weights)
    toolchain.call(
        [
            toolchain.host_compiler(),
            *toolchain.COMMON,
            "-pedantic",
            "-fno-stack-protector",
            "-c",
            directory / "policy.c",
            "-o",
            tmp_path / "policy.o",
        ],
        tmp_path,
    )
    lines = subprocess.run(["nm", "-u", tmp_path / "policy.o"], capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1] for line in lines.splitlines()}
    assert undefined <= {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_"}  # which compilers call on their own


def test_the_header_says_what_goes_in_and_out(exported):
    header = (exported("mlp") / "policy.h").read_text()
    assert "  13  velocity.y          m/s    world" in header
    assert "  17  angular_velocity.z  rad/s  body" in header
    assert "   3  action.m4  1            -1 to 1" in header
    assert "#define POLICY_OBSERVATION_VELOCITY 12" in header
    assert "#define POLICY_CONTROL_DT_S 0.01" in header
    chunks = (exported("chunks") / "policy.h").read_text()
    assert "2 actions, one after the other, each for 0.02 s" in chunks
    assert "action[4] 1" in chunks
    assert "-50 to 10" in chunks


@pytest.mark.parametrize(("weights", "kind"), EXPORTS)
def test_every_damaged_constant_is_caught_at_boot(exported, tmp_path: Path, kind: str, weights: Weights):
    directory = exported(kind, weights)
    good = Compiled(directory, tmp_path / "good.so")
    assert good.check() == 0
    image = (tmp_path / "good.so").read_bytes()
    fields = (directory / "policy.c").read_text().split("} constants = {")[1].split("};")[0].split("  .")[1:]
    network = make(kind).deployable()
    normaliser, last = next(layer for layer in network.layers if isinstance(layer, Normalise)), network.layers[-1]
    anchor = image.find(normaliser.mean.numpy().tobytes())  # the first field; the constants follow it
    length = recorded(directory)["constant_bytes"]
    assert anchor > 0
    assert last.low.numpy().tobytes() in image[anchor : anchor + length]
    assert len(fields) > 8
    for place in range(anchor, anchor + length, length // 13):
        for bit in (0, 7):
            damaged = bytearray(image)
            damaged[place] ^= 1 << bit
            path = tmp_path / f"damaged_{place}_{bit}.so"
            path.write_bytes(damaged)
            library = ctypes.CDLL(str(path))
            assert library.policy_check() == 1


def test_a_compiler_that_calculates_otherwise_is_caught_at_boot(exported, tmp_path: Path):
    directory = exported("recurrent")
    for name in ("policy.c", "policy.h"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    kernels = (directory / "policy_kernels.h").read_text()
    assert kernels.count("0.5f + 0.5f * policy_tanh") == 1
    (tmp_path / "policy_kernels.h").write_text(kernels.replace("0.5f * policy_tanh", "0.499f * policy_tanh"))
    assert Compiled(tmp_path, tmp_path / "policy.so").check() == 2


def test_what_is_not_a_number_is_refused_and_not_remembered(exported, tmp_path: Path):
    for kind in ("recurrent", "chunks"):
        directory = exported(kind)
        record = recorded(directory)
        policy, samples = Compiled(directory, tmp_path / f"{kind}.so"), Samples.load(directory)
        sequence = samples.inputs[3].numpy()
        policy.reset()
        clean = [policy.act(row, record["outputs"])[1] for row in sequence[:5]]
        policy.reset()
        for row, expected in zip(sequence[:5], clean, strict=True):
            for wrong in (np.nan, np.inf, -np.inf):
                damaged = row.copy()
                damaged[-1] = wrong
                status, action = policy.act(damaged, record["outputs"])
                assert status == 3
                np.testing.assert_array_equal(action, make(kind).deployable().limits.centre)
            status, action = policy.act(row, record["outputs"])
            assert status == 0
            np.testing.assert_array_equal(action, expected)


def test_a_reset_forgets(exported, tmp_path: Path):
    directory = exported("recurrent")
    record = recorded(directory)
    policy, row = Compiled(directory, tmp_path / "policy.so"), Samples.load(directory).inputs[0, 0].numpy()
    policy.reset()
    first, second = (policy.act(row, record["outputs"])[1] for _ in range(2))
    assert not np.array_equal(first, second)
    for forget in (policy.reset, policy.check):
        forget()
        np.testing.assert_array_equal(policy.act(row, record["outputs"])[1], first)


def test_actions_never_leave_the_limits(exported, tmp_path: Path):
    directory = exported("chunks")
    record = recorded(directory)
    policy = Compiled(directory, tmp_path / "policy.so")
    limits = make("chunks").deployable().limits
    for row in 1e6 * torch.randn(200, record["inputs"], generator=torch.Generator().manual_seed(0)):
        action = torch.from_numpy(policy.act(row.numpy(), record["outputs"])[1])
        assert (action >= limits.low).all()
        assert (action <= limits.high).all()


class Stretched(nn.Module):
    """A layer that firmware does not know."""

    def forward(self, x):
        return 2.0 * x


def unknown_layer():
    policy = MLPConfig(hidden=[8]).build(make("mlp").contract)
    policy.load_state_dict(policy.state_dict() | {"fitted": torch.ones((), dtype=torch.bool)})
    policy.actor[1] = Stretched()
    return policy


def without_unit():
    bare = Contract({"x": TensorSpec((3,))}, ROTORS, 0.01)
    policy = MLPConfig(hidden=[8]).build(bare)
    policy.fitted.fill_(True)
    return policy


class Another(type(make("mlp"))):
    """Its deployed network differs from its actions."""

    def deployable(self) -> Network:
        network = super().deployable()
        network.layers[1].weight += 1e-3
        return network


def diverged():
    policy = make("mlp")
    policy.actor[2].weight.data[3, 4] = torch.nan
    return policy


def overgrown():
    policy = make("mlp")
    policy.actor[2].weight.data[3, 4] = 4.86e37
    return policy


def dishonest():
    policy = make("mlp")
    policy.__class__ = Another
    return policy


def late():
    contract = make("mlp").contract
    policy = MLPConfig().build(contract.delayed(2))
    parts = {key: torch.rand(8, *spec.shape) for key, spec in policy.contract.observation.items()}
    policy.fit(TensorDict(parts, [8]), torch.zeros(8, 1, *contract.action.shape))
    assert export_target(policy) == "onnx"
    return policy


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (unknown_layer, C, "no kernel for layer 2, Stretched; expected Linear, Tanh"),
        (without_unit, C, "no unit of x, which target=c needs; use target=onnx or torchscript"),
        (lambda: MLPConfig().build(make("mlp").contract), C, "no normalisation statistics"),
        (overgrown, C, "layers.3.weight reaches 4.86e\\+37, expected at most 1e\\+06"),
        (diverged, C, "not a number in layers.3.weight; export an earlier checkpoint"),
        (dishonest, C, "the export differs from the policy by"),
        (object, C, "object cannot be exported; expected policy=mlp"),
        (late, C, "without the delay=2 of its training; use target=onnx"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(tmp_path: Path, policy, options: Export, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        export(policy(), options, tmp_path / "deep" / "export")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_only_firmware_needs_units(tmp_path: Path):
    assert export(without_unit(), Export(Target.torchscript), tmp_path / "export")["max_error"] <= 1e-6
    assert export_target(without_unit()) == "onnx"


def test_reports_name_a_target_that_works(tmp_path: Path):
    for kind in KINDS:
        assert export_target(make(kind)) == "c"
    assert export_target(MLPConfig().build(make("mlp").contract)) is None  # no statistics
    assert export_target(object()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((Target.onnx, Weights.int8), "weights=int8 is for target=c, got target=onnx"),
        ((Target.c, Weights.float32, 17), "opset=17 is for target=onnx, got target=c"),
        ((Target.onnx, Weights.float32, 16), "expected opset from 17 to 20, got 16"),
        ((Target.onnx, Weights.float32, 99), "expected opset from 17 to 20, got 99"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        Export(*options)


def test_a_machine_without_compiler_says_so(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="apt-get install gcc"):
        export(make("mlp"), C, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_an_earlier_one_and_nothing_else(tmp_path: Path):
    first = export(make("mlp"), C, tmp_path / "export")
    second = export(make("mlp", seed=1), C, tmp_path / "export")
    assert first["constants_crc32"] != second["constants_crc32"]
    with pytest.raises(ValueError, match="no normalisation statistics"):
        export(MLPConfig().build(make("mlp").contract), C, tmp_path / "export")
    with pytest.raises(ValueError, match="differs from the policy"):
        export(dishonest(), C, tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert recorded(tmp_path / "export") == second
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="exists and is not an export"):
        export(make("mlp"), C, tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_torchscript_does_what_the_policy_does(tmp_path: Path, kind: str):
    record = export(make(kind), Export(Target.torchscript), tmp_path / "export")
    assert record["max_error"] <= 1e-6
    loaded, network = torch.jit.load(tmp_path / "export" / "policy.pt"), make(kind).deployable()
    row = Samples.load(tmp_path / "export").inputs[0, :1]
    memory = () if network.initial_memory is None else (torch.tensor([record["initial_memory"]]),)
    torch.testing.assert_close(loaded(row, *memory), network(row, *memory))


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_does_what_the_policy_does(tmp_path: Path, kind: str, opset: int):
    onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed")
    record = export(make(kind), Export(Target.onnx, opset=opset), tmp_path / "export")
    assert record["max_error"] <= 1e-6
    model = onnx.load(tmp_path / "export" / "policy.onnx")
    assert [entry.version for entry in model.opset_import if not entry.domain] == [opset]
    names = ["observation", "memory"] if kind == "recurrent" else ["observation"]
    assert [entry.name for entry in model.graph.input] == names
