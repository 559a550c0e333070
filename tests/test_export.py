"""export.py as a user runs it: from a checkpoint to files or a one-line error."""

import json
import sys
from pathlib import Path

import pytest
import torch

import export
from embodied.command_line import program
from embodied.contract import Contract
from embodied.export.network import rollout_outputs
from embodied.report.margins import Margin, write
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.task import Sweep
from real_robot.firmware.exporting import Export, Target
from real_robot.firmware.samples import Samples
from tests.programs import run_program
from tests.real_robot.firmware import chunk_policies
from tests.real_robot.firmware.policies import CONFIGS, contract, make

CONFIG = {
    # an unknown task: an export builds no task
    "choices": {"task": "somewhere_else", "policy": "mlp", "algorithm": "another"},
    "values": {"task": {"name": "somewhere_else"}, "policy": {"hidden": [64, 64], "initial_std": 0.3}, "seed": 3},
}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with one checkpoint of a policy for 18 observations."""
    policy = make("mlp")
    saved = Checkpoint(policy=policy.state_dict(), contract=contract("mlp"), config=CONFIG)
    checkpoint.save(tmp_path / "run", saved)
    return tmp_path / "run"


@pytest.fixture
def ask(capsys):
    """Runs the program in this process; returns its status and its lines."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        status = program.main(export.run, export.describe, list(arguments))
        written = capsys.readouterr()
        return status, (written.err if status else written.out).strip().splitlines()

    return run


def test_a_checkpoint_becomes_c_whatever_its_task(trained: Path):
    completed = run_program("export.py", f"checkpoint={trained}", "target=c")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    output = trained / "export" / "c"
    first, second = completed.stdout.splitlines()
    assert first.startswith(f"wrote {output}: 5636 parameters, 22856 bytes of constants, 0 bytes of RAM, 512 bytes of")
    assert second.startswith("verify it: ")
    assert second.endswith(f"python -m real_robot.firmware.verify {output}")
    kept = {"policy.c", "policy.h", "policy_kernels.h", "contract.json", "export.json", "samples.safetensors"}
    assert kept | {"stm32f405", "crazyflie", "px4", "flight"} == {path.name for path in output.iterdir()}
    record = json.loads((output / "export.json").read_text())
    assert record["weights_sha256"] == checkpoint.load(trained).weights_sha256
    assert record["weights_sha256"] in (output / "policy.h").read_text()
    written = Contract.from_dict(json.loads((output / "contract.json").read_text()))
    assert written == make("mlp").deployable().contract
    written.bind(contract("mlp"))  # its training task can provide its observations


def as_hover(run: Path, **task: object) -> None:
    """Make the newest checkpoint one of quadrotor_hover."""
    values = {**CONFIG["values"], "task": {"name": "quadrotor_hover", **task}}
    saved = Checkpoint(make("mlp").state_dict(), contract("mlp"), {**CONFIG, "values": values})
    checkpoint.save(run, saved)


def test_a_policy_that_knows_no_latency_is_exported_with_a_caution_in_one_line(trained: Path, capsys):
    as_hover(trained, nominal=True)
    assert program.main(export.run, export.describe, [f"checkpoint={trained}", "target=c"]) == 0
    expected = f"{trained} was trained without latency and without randomisation: expect it to fail on hardware"
    assert capsys.readouterr().err.splitlines() == [expected]
    header = (trained / "export" / "c" / "policy.h").read_text()
    assert "Trained without latency and without randomisation: expect it to fail on hardware." in header
    assert "Margins were not measured: python evaluate.py checkpoint=RUN margins=true" in header
    assert "#define POLICY_FIRST_ACTION 0.0f" in header


def test_the_header_says_what_a_policy_was_trained_for_and_how_far_it_goes(trained: Path, capsys):
    as_hover(trained)
    swept = Margin(Sweep("1", "times the mass", (0.8, 1.0, 1.2)), (90, 100, 100), 100)
    write(trained, {"mass": swept}, {"weights_sha256": checkpoint.load(trained).weights_sha256})
    arguments = [f"checkpoint={trained}", "target=c"]
    assert program.main(export.run, export.describe, arguments) == 0
    assert capsys.readouterr().err == ""
    header = (trained / "export" / "c" / "policy.h").read_text()
    assert "commands 0 to 25 ms late, measurements 0 to 10 ms" in header
    assert "mass: 1 to 1.2 or more (times the mass)" in header
    assert "#define POLICY_FIRST_ACTION -1.0f" in header
    told = json.loads((trained / "export" / "c" / "export.json").read_text())
    assert told["margins"] == {"mass": "1 to 1.2 or more (times the mass)"}
    assert told["conditions"]["missing"] == []
    write(trained, {"mass": swept}, {"weights_sha256": "another policy's"})
    assert program.main(export.run, export.describe, arguments) == 0
    assert "Margins were not measured" in (trained / "export" / "c" / "policy.h").read_text()


@pytest.mark.parametrize(("kind", "memory"), [("recurrent", 16), ("attention", 0)])
def test_other_policies(tmp_path: Path, ask, kind: str, memory: int):
    policy = make(kind)
    values = {"policy": {name: getattr(CONFIGS[kind], name) for name in ("hidden", "initial_std")}}
    config = {"choices": {"policy": kind}, "values": values}
    checkpoint.save(tmp_path / "run", Checkpoint(policy=policy.state_dict(), contract=contract(kind), config=config))
    status, lines = ask(f"checkpoint={tmp_path / 'run'}", "target=c")
    assert status == 0, lines
    written = tmp_path / "run" / "export" / "c"
    assert Contract.from_dict(json.loads((written / "contract.json").read_text())) == policy.deployable().contract
    samples, network = Samples.load(written), policy.deployable()
    assert (network.initial_memory is not None) == bool(memory)
    torch.testing.assert_close(samples.outputs, rollout_outputs(policy, network, samples.inputs))


@pytest.mark.parametrize(
    ("options", "folder", "file"),
    [
        (["weights=int8"], "c_int8", "policy.c"),
        (["target=torchscript"], "torchscript", "policy.pt"),
        (["target=onnx", "opset=18"], "onnx", "policy.onnx"),
    ],
)
def test_other_targets(trained: Path, ask, options: list[str], folder: str, file: str):
    if folder == "onnx":
        pytest.importorskip("onnx", reason="the onnx extra is not installed")
    status, lines = ask(f"checkpoint={trained}", *options)
    assert status == 0
    assert lines[0].startswith(f"wrote {trained / 'export' / folder}: 5636 parameters")
    assert (trained / "export" / folder / file).exists()
    assert json.loads((trained / "export" / folder / "export.json").read_text())["checkpoint"] == str(trained)


def test_a_flow_policy_becomes_a_graph_and_no_firmware(tmp_path: Path, ask):
    policy = chunk_policies.make("objects")
    values = {"policy": {name: getattr(policy.config, name) for name in ("width", "hidden", "candidates", "turn_rad")}}
    config = {"choices": {"policy": "flow"}, "values": values}
    saved = Checkpoint(policy=policy.state_dict(), contract=chunk_policies.contract("objects"), config=config)
    checkpoint.save(tmp_path / "run", saved)
    status, lines = ask(f"checkpoint={tmp_path / 'run'}", "target=onnx")
    assert status == 0, lines
    assert (tmp_path / "run" / "export" / "onnx" / "policy.onnx").exists()
    status, lines = ask(f"checkpoint={tmp_path / 'run'}", "target=c")
    assert (status, len(lines)) == (1, 1)
    assert "target=onnx or torchscript" in lines[0]
    assert "policy.steering.shared_noise=true" in lines[0]


def test_one_checkpoint_of_a_run_and_an_output_elsewhere(trained: Path, ask, tmp_path: Path):
    newest = max((trained / "checkpoint").iterdir())
    status, _ = ask(f"checkpoint={newest}", "target=torchscript", f"output={tmp_path / 'there'}")
    assert status == 0
    assert (tmp_path / "there" / "policy.pt").exists()
    assert not (trained / "export").exists()


def test_a_damaged_checkpoint_is_not_exported(trained: Path, ask):
    damaged = max((trained / "checkpoint").iterdir()) / "policy.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-2] ^= 0x40  # an exponent: 0.143 becomes 4.86e37
    damaged.write_bytes(data)
    status, lines = ask(f"checkpoint={trained}", "target=c")
    assert (status, len(lines)) == (1, 1)
    assert "policy.safetensors is damaged" in lines[0]
    assert not (trained / "export").exists()


def test_without_onnx_it_says_which_extra(trained: Path, ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    status, lines = ask(f"checkpoint={trained}", "target=onnx")
    assert (status, lines) == (1, ["error: onnx is not installed: pip install 'embodied-rl[onnx]'"])
    assert not (trained / "export").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["target=onnx", "opset=5"], "expected opset from 17 to 20, got 5"),
        (["target=c", "opset=17"], "opset=17 is for target=onnx, got target=c"),
        (["target=torchscript", "weights=int8"], "weights=int8 is for target=c, got target=torchscript"),
        (
            ["target=rust"],
            "target: Invalid value 'rust', expected one of [c, onnx, torchscript, hub, transformers, peft, lerobot, "
            "openpi]",
        ),
        (["target=onnx", "asset_id=robot"], "asset_id=robot is for target=openpi, got onnx"),
        (["policy=flow"], "unknown option 'policy'"),
        (["wieghts=int8"], "unknown option 'wieghts'"),
    ],
)
def test_a_wrong_option_is_one_line_and_leaves_nothing(trained: Path, ask, options: list[str], message: str):
    status, lines = ask(f"checkpoint={trained}", *options)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not (trained / "export").exists()


def test_it_needs_a_checkpoint_with_a_policy_that_can_be_exported(ask, tmp_path: Path):
    assert "expected checkpoint=" in ask("target=c")[1][0]
    assert "no checkpoint in" in ask(f"checkpoint={tmp_path}")[1][0]
    saved = Checkpoint(policy=make("mlp").state_dict(), contract=contract("mlp"), config={"choices": {}, "values": {}})
    checkpoint.save(tmp_path / "run", saved)
    status, lines = ask(f"checkpoint={tmp_path / 'run'}")
    assert (status, len(lines)) == (1, 1)
    assert "names no policy" in lines[0]


def test_folders_are_named_after_what_they_hold():
    assert Export(Target.onnx).name == "onnx"
    assert "TARGET is c, onnx, torchscript" in export.describe([])
