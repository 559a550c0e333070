"""Exported C on emulated cores, with the real cross-compiler and the real emulator."""

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.cortex_m4_cycles import REFILL, total_cycles
from embodied.export.network import Normalise
from real_robot.firmware import toolchain
from real_robot.firmware.exporting import Export, Target, Weights, export
from real_robot.firmware.record import write_record
from real_robot.firmware.samples import Samples
from real_robot.firmware.toolchain import CORES, PACKAGES, build_for_core, call, find, run_image
from real_robot.firmware.verify import Verification, main, verify
from tests.real_robot.firmware.policies import EXPORTS, KINDS, make

missing = [tool for tool in PACKAGES if shutil.which(tool) is None]


@pytest.fixture(autouse=True, scope="module")
def tools():
    if missing:
        message = f"{missing[0]} is not installed: {PACKAGES[missing[0]]}"
        assert os.environ.get("CI_FIRMWARE") != "required", message
        pytest.skip(message)


def exchange(directory: Path, name: str, old: str, new: str) -> None:
    """Write a file as if another exporter had, with its checksum."""
    code = (directory / name).read_text()
    assert code.count(old) == 1
    (directory / name).write_text(code.replace(old, new))
    write_record(directory, json.loads((directory / "export.json").read_text()))


def assert_good(result: Verification, directory: Path) -> None:
    assert result.good
    assert result.inputs == 1000
    assert result.check == 0
    assert result.host_equals_core
    record = json.loads((directory / "export.json").read_text())
    assert record["constant_bytes"] < result.flash_bytes < record["constant_bytes"] + 8192
    assert result.ram_bytes == record["static_bytes"]
    assert record["scratch_bytes"] < result.stack_bytes < record["scratch_bytes"] + 400


def test_the_network_of_the_goal_stays_within_it(exported):
    result = verify(exported("mlp"), "m4")
    assert_good(result, exported("mlp"))
    # 18-64-64-4 are 5,504 products, and a sum for each: nothing that counts instructions can find fewer
    assert 2 * 5504 < result.instructions <= 18_000
    assert result.max_error <= 1e-6
    assert result.ram_bytes == 0
    # int16: 5,504 products and sums in half as many instructions
    assert 5504 / 2 < verify(exported("mlp", Weights.int16), "m4").instructions <= 12_500


@pytest.mark.parametrize(("weights", "kind"), EXPORTS)
def test_every_kind_runs_on_the_m4(exported, kind: str, weights: Weights):
    result = verify(exported(kind, weights), "m4")
    assert_good(result, exported(kind, weights))
    assert result.max_error <= {Weights.float32: 1e-6, Weights.int16: 5e-4, Weights.int8: 0.05}[weights]
    assert result.instructions < 30_000


@pytest.mark.parametrize(("kind", "weights"), [("recurrent", Weights.float32), ("attention", Weights.int8)])
def test_the_m7_too(exported, kind: str, weights: Weights):
    assert_good(verify(exported(kind, weights), "m7"), exported(kind, weights))


def test_instructions_are_what_the_core_executes(exported, tmp_path: Path):
    """A thousand more in the source are a thousand more in the count."""
    directory = Path(shutil.copytree(exported("recurrent"), tmp_path / "export"))
    before = verify(directory).instructions
    call = "  infer(observation, kept, next, action);"
    exchange(directory, "policy.c", call, '  __asm__ volatile(".rept 1000\\n nop\\n .endr");\n' + call)
    assert abs(verify(directory).instructions - before - 1000) <= 10


def test_cycles_follow_the_manual():
    code = {
        0: (4, "ldmia", "r0!, {r8, r9, sl}"),  # 1 + 3
        4: (2, "ldr", "r1, [r0, #4]"),  # 2
        6: (2, "ldr", "r2, [r0, #8]"),  # 1, overlapping with the load before it
        8: (4, "vmul.f32", "s0, s1, s2"),  # 1
        12: (4, "vadd.f32", "s3, s3, s0"),  # 1, and 1 because it waits for s0
        16: (4, "vldmia", "r3!, {s4-s7}"),  # 1 + 4
        20: (4, "vdiv.f32", "s8, s9, s10"),  # 14
        24: (2, "bne.n", "0 <loop>"),  # 1, and the refill where it is taken
    }
    assert total_cycles([*code], code) == 4 + 2 + 1 + 1 + 2 + 5 + 14 + 1 + REFILL
    assert total_cycles([24, 26], code | {26: (2, "nop", "")}) == 2 + REFILL  # the last one returns


def test_one_wrong_bit_in_the_image_is_caught_at_boot(exported, tmp_path: Path):
    directory = exported("mlp")
    inputs = Samples.load(directory).inputs[:1]
    image = build_for_core(directory, CORES["m4"], tmp_path)
    good = run_image(image, CORES["m4"], inputs, tmp_path)
    assert good.check == 0
    last = make("mlp").deployable().layers[5]
    content = bytearray(image.read_bytes())
    for values in (make("mlp").deployable().layers[0].std.numpy(), last.bias.numpy()):
        place = content.find(values.tobytes())
        assert place > 0
        content[place + 1] ^= 0x10
        (tmp_path / "damaged.elf").write_bytes(content)
        content[place + 1] ^= 0x10
        assert run_image(tmp_path / "damaged.elf", CORES["m4"], inputs, tmp_path).check == 1


def test_a_core_that_fuses_products_and_sums_is_recognised(exported, monkeypatch):
    flags = [flag for flag in toolchain.COMMON if flag not in ("-std=c99", "-ffp-contract=off")]
    monkeypatch.setattr(toolchain, "COMMON", ("-std=gnu99", "-ffp-contract=fast", *flags))
    result = verify(exported("attention"))
    assert not result.host_equals_core
    assert not result.good
    assert result.max_error <= 2e-6
    assert result.check == 0  # as the Crazyflie's firmware is compiled: close enough to fly


def status(*arguments: str | Path) -> int:
    """Exit status of the command, run in this process."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return 1 if isinstance(stopped.code, str) else int(stopped.code or 0)
    return 0


def test_the_command_prints_what_it_measured_and_says_whether_it_is_good(exported, capsys, tmp_path: Path):
    assert status(exported("recurrent"), "--core", "m7", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    result = verify(exported("recurrent"), "m7")
    for name in ("flash_bytes", "ram_bytes", "stack_bytes", "instructions", "max_error", "host_equals_core"):
        assert found[name] == getattr(result, name)
    assert status(exported("recurrent"), "--tolerance", "1e-9") == 1
    assert "max_error: " in capsys.readouterr().out
    broken = Path(shutil.copytree(exported("recurrent"), tmp_path / "broken"))
    exchange(broken, "policy_kernels.h", "* policy_tanh(0.5f * x)", "* policy_tanh(0.501f * x)")
    with pytest.raises(SystemExit, match=r"^error: the core does not match the policy"):
        main([str(broken)])
    assert "check: 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["policy.c", "policy.h", "policy_kernels.h", "contract.json", "samples.safetensors"])
def test_a_damaged_file_is_one_line(exported, tmp_path: Path, name: str):
    broken = Path(shutil.copytree(exported("mlp"), tmp_path / "broken"))
    data = bytearray((broken / name).read_bytes())
    data[len(data) // 2] ^= 1
    (broken / name).write_bytes(data)
    with pytest.raises(SystemExit, match=f"^error: .*{name} is damaged.*; export the policy again$"):
        main([str(broken)])


def test_a_missing_tool_is_one_line_that_names_the_package(exported, monkeypatch, tmp_path: Path):
    directory = exported("mlp")  # which needs the host's compiler
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main([str(directory)])
    message = "error: arm-none-eabi-gcc is not installed: apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi"
    assert caught.value.code == message


def test_what_is_no_export_to_c_is_one_line(tmp_path: Path):
    export(make("mlp"), Export(Target.torchscript), tmp_path / "other")
    for directory, message in ((tmp_path, "holds no export.json"), (tmp_path / "other", "with target=torchscript")):
        with pytest.raises(ValueError, match=message) as caught:
            verify(directory)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stm32f405_example_builds_and_boots(exported, tmp_path: Path, kind: str):
    directory = Path(shutil.copytree(exported(kind), tmp_path / "export"))
    example = directory / "stm32f405"
    call(["make"], example)
    assert 0 < (example / "policy.bin").stat().st_size < 64 * 1024
    board = Path(__file__).with_name("board.c")
    call(["make", "-B", "policy.elf", f"BOARD={board}"], example)
    # QEMU ends with status 1 where the policy is not healthy, and not at all where it does not start
    run = [find("qemu-system-arm"), "-M", "netduinoplus2", *toolchain.QEMU, "-kernel", "policy.elf"]
    call(run, example)
    image = (example / "policy.elf").read_bytes()
    std = next(layer.std for layer in make(kind).deployable().layers if isinstance(layer, Normalise)).numpy().tobytes()
    assert image.count(std) == 1
    (example / "policy.elf").write_bytes(image.replace(std, bytes([std[0] ^ 1]) + std[1:]))
    with pytest.raises(ValueError, match="failed with status 1"):
        call(run, example)


def test_a_faster_loop_holds_each_action(exported, tmp_path: Path):
    example = Path(shutil.copytree(exported("mlp"), tmp_path / "export")) / "stm32f405"
    board = Path(__file__).with_name("board.c")
    run = [find("qemu-system-arm"), "-M", "netduinoplus2", *toolchain.QEMU, "-kernel", "policy.elf"]
    compiler = "CC=arm-none-eabi-gcc -DLOOP_HZ=500.0f -DHELD={}"
    call(["make", "-B", "policy.elf", f"BOARD={board}", compiler.format(5)], example)
    call(run, example)
    call(["make", "-B", "policy.elf", f"BOARD={board}", compiler.format(4)], example)
    with pytest.raises(ValueError, match="failed with status 1"):
        call(run, example)


@pytest.mark.parametrize("kind", ["mlp", "recurrent"])
def test_the_crazyflie_example_builds_for_its_core(exported, tmp_path: Path, kind: str):
    interface = Path(__file__).with_name("crazyflie_interface")
    source = exported(kind) / "crazyflie" / "src" / "controller_policy.c"
    flags = [*toolchain.COMMON, *CORES["m4"].flags, f"-I{interface}"]
    call([find("arm-none-eabi-gcc"), *flags, "-c", source, "-o", tmp_path / "controller.o"], tmp_path)


def test_outputs_are_those_of_the_emulated_core(exported, tmp_path: Path):
    """A policy whose kernels differ on the core gives different actions there than on this machine."""
    directory = Path(shutil.copytree(exported("mlp"), tmp_path / "export"))
    other = "#ifdef __arm__\n  return 0.5f;\n#endif\n  return x * p / q;"
    exchange(directory, "policy_kernels.h", "return x * p / q;", other)
    result = verify(directory)
    assert not result.host_equals_core
    assert result.max_error > 0.1
    assert result.check == 2
