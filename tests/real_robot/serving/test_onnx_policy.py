"""An exported policy under ONNX Runtime acts as the policy it was exported from, memory included."""

import json
import random
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.rollout.memory import Memory, RecurrentPolicy
from real_robot.firmware.exporting import Export, Target, export
from real_robot.firmware.record import write_record
from real_robot.serving.onnx_policy import OnnxPolicy
from tests.real_robot.firmware.policies import contract, make


def observation(kind: str, count: int, seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    specs = {key: spec for key, spec in contract(kind).observation.items() if not spec.privileged}
    values = {key: torch.randn(count, *spec.shape, generator=generator) for key, spec in specs.items()}
    return TensorDict(values, batch_size=[count])


@pytest.mark.parametrize("kind", ["mlp", "recurrent", "attention", "chunks"])
@pytest.mark.parametrize("count", [1, 5])
def test_it_acts_as_the_policy_does(tmp_path: Path, kind: str, count: int):
    policy = make(kind)
    export(policy, Export(Target.onnx), tmp_path / "onnx")
    exported = OnnxPolicy(tmp_path / "onnx")
    executed = policy.contract.executed
    assert exported.contract.horizon == executed
    policy.contract.bind(contract(kind))
    assert isinstance(exported, RecurrentPolicy) == isinstance(policy, RecurrentPolicy)
    memories = Memory(policy, count), Memory(exported, count)
    for step in range(5):
        seen = observation(kind, count, step)
        expected = policy.act(memories[0].with_observation(seen), deterministic=True)
        found = exported.act(memories[1].with_observation(seen), deterministic=True)
        memories[0].keep([expected])
        memories[1].keep([found])
        assert found.actions.shape == (count, executed, *policy.contract.action.shape)
        assert torch.allclose(found.actions, expected.actions[:, :executed], atol=2e-5, rtol=1e-5)
    assert torch.allclose(memories[0].values, memories[1].values, atol=1e-5)


def test_it_never_samples(tmp_path: Path):
    export(make("mlp"), Export(Target.onnx), tmp_path / "onnx")
    with pytest.raises(ValueError, match="deterministic=True"):
        OnnxPolicy(tmp_path / "onnx").act(observation("mlp", 1, 0), deterministic=False)
    OnnxPolicy(tmp_path / "onnx").act(observation("mlp", 1, 0))


def test_what_is_no_export_is_reported(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no export\.json; expected .* `python export\.py target=onnx`"):
        OnnxPolicy(tmp_path)
    export(make("mlp"), Export(Target.torchscript), tmp_path / "torchscript")
    with pytest.raises(ValueError, match="holds an export with target=torchscript; expected target=onnx"):
        OnnxPolicy(tmp_path / "torchscript")
    export(make("mlp"), Export(Target.onnx), tmp_path / "onnx")
    (tmp_path / "onnx" / "policy.onnx").write_bytes(b"no graph")
    write_record(tmp_path / "onnx", json.loads((tmp_path / "onnx" / "export.json").read_text()))
    with pytest.raises(ValueError, match="ONNX Runtime cannot run"):
        OnnxPolicy(tmp_path / "onnx")


@pytest.mark.parametrize("name", ["policy.onnx", "contract.json", "export.json", "samples.safetensors"])
def test_a_flipped_bit_anywhere_is_one_line_that_names_the_file(tmp_path: Path, name: str):
    export(make("recurrent"), Export(Target.onnx), tmp_path / "onnx")
    damaged = tmp_path / "onnx" / name
    whole = damaged.read_bytes()
    for bit in random.Random(name).sample(range(8 * len(whole)), 50):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{name} is damaged.*; export the policy again$") as error:
            OnnxPolicy(tmp_path / "onnx")
        assert "\n" not in str(error.value), bit
