"""Policies that generate chunks, as graphs of numbers: they act as the policy does, whoever runs them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.export.chunk_network import ChunkInputs
from embodied.export.network import export_target
from embodied.saving.tree import load_tree
from policies.generation.base import GenerativePolicy
from real_robot.firmware.exporting import Export, Target, export
from real_robot.firmware.samples import draw_chunks
from real_robot.serving.onnx_policy import OnnxPolicy
from tests.real_robot.firmware import chunk_policies
from tests.real_robot.firmware.chunk_policies import CONFIGS, EXECUTED, contract, make, observations

HALF_RANGE = torch.tensor([1.0] * 6 + [0.4])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports of a kind and target, each written once."""
    folder, written = tmp_path_factory.mktemp("exports"), {}

    def of(kind: str, target: Target = Target.onnx) -> Path:
        path = folder / kind / target.value
        if path not in written:
            written[path] = export(make(kind), Export(target), path)
        return path

    return of


def executed(policy: GenerativePolicy, seen: TensorDict) -> torch.Tensor:
    return policy.act(seen, deterministic=True).actions[:, :EXECUTED]


@pytest.mark.parametrize("kind", CONFIGS)
def test_under_onnx_runtime_it_acts_as_the_policy(exported, kind: str):
    policy, runs = make(kind), OnnxPolicy(exported(kind))
    assert policy.teaches == (kind == "pictures")
    assert export_target(policy) == "onnx"
    for count, rows in ((1, 3), (7, 1), (40, 6)):
        seen = observations(kind, count, seed=count, rows=rows)
        torch.testing.assert_close(runs.act(seen).actions, executed(policy, seen), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("kind", ["objects", "pictures"])
def test_a_graph_reads_what_the_actor_reads_and_nothing_privileged(exported, kind: str):
    runs = OnnxPolicy(exported(kind))
    assert set(runs.contract.observation) == set(make(kind).encoder.reads)
    assert not any(spec.privileged for spec in runs.contract.observation.values())
    assert runs.contract.horizon == EXECUTED
    runs.contract.bind(contract(kind))
    seen = observations(kind, 3, seed=1)
    torch.testing.assert_close(
        runs.act(seen.select(*runs.contract.observation)).actions, executed(make(kind), seen), atol=1e-4, rtol=0.0
    )


def test_candidates_are_ranked_and_their_noise_is_the_observations_own(exported):
    seen = observations("objects", 30, seed=2)
    best = OnnxPolicy(exported("objects")).act(seen).actions
    assert (
        best - make("objects").act(seen.flip(0), deterministic=True).actions[:, :EXECUTED].flip(0)
    ).abs().max() < 1e-4
    network = make("objects").deployable()
    actions, advantage = network.candidates(*network.inputs.of(seen).values())
    assert actions.shape[1] == 8
    assert ((actions[:, 0] - best).abs().amax((1, 2)) > 1e-3).float().mean() > 0.5
    chosen = (actions - best.unsqueeze(1)).abs().amax((2, 3)).argmin(1)
    assert torch.equal(chosen, advantage.argmax(1))


@pytest.mark.parametrize("kind", ["objects", "pictures", "diffusion"])
def test_torchscript_runs_without_our_code(exported, tmp_path: Path, kind: str):
    directory, seen = exported(kind, Target.torchscript), observations(kind, 9, seed=4, rows=6)
    record = json.loads((directory / "export.json").read_text())
    inputs = ChunkInputs(Contract.from_dict(json.loads((directory / "contract.json").read_text())), **record["chunks"])
    torch.save(list(inputs.of(seen).values()), tmp_path / "inputs")
    program = (
        "import sys, torch\n"
        f"policy, inputs = torch.jit.load({str(directory / 'policy.pt')!r}), torch.load({str(tmp_path / 'inputs')!r})\n"
        f"torch.save(policy(*inputs), {str(tmp_path / 'actions')!r})\n"
        "assert not {'policies', 'embodied', 'real_robot'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env={"OMP_NUM_THREADS": "1"})
    torch.testing.assert_close(torch.load(tmp_path / "actions"), executed(make(kind), seen), atol=1e-4, rtol=0.0)


def test_stored_samples_let_other_readers_check_themselves(exported):
    import onnxruntime

    directory = exported("objects")
    stored = load_tree(directory / "samples.safetensors")
    session = onnxruntime.InferenceSession(str(directory / "policy.onnx"))
    assert [each.name for each in session.get_inputs()] == list(stored["inputs"])
    (actions,) = session.run(None, {name: value.numpy() for name, value in stored["inputs"].items()})
    torch.testing.assert_close(torch.from_numpy(actions), stored["outputs"], atol=1e-4, rtol=0.0)


def test_a_graph_that_differs_from_the_policy_is_not_kept(tmp_path: Path, monkeypatch):
    policy = make("flat").with_new_weights()
    other = make("flat").deployable()
    monkeypatch.setattr(policy, "deployable", lambda: other)
    with pytest.raises(UserError, match=r"the export differs from the policy by .* expected at most 0\.0001"):
        export(policy, Export(Target.torchscript), tmp_path / "there")
    assert not list(tmp_path.iterdir())


def test_another_candidate_is_an_error_unless_it_is_as_good():
    policy = make("objects")
    samples = draw_chunks(policy, policy.deployable())
    assert samples.error(samples.outputs) < 1e-5
    second = samples.candidates[torch.arange(len(samples.outputs)), samples.advantage.topk(2)[1][:, 1]]
    assert samples.error(second) > 0.01
    assert replace(samples, advantage=torch.ones_like(samples.advantage)).error(second) == 0.0
    assert samples.error(torch.full_like(second, torch.nan)) == float("inf")


def test_what_cannot_be_exported_says_what_can(tmp_path: Path):
    with pytest.raises(UserError, match=r"FlowPolicy generates .* target=c .*; expected target=onnx or torchscript"):
        export(make("objects"), Export(Target.c), tmp_path / "c")
    with pytest.raises(UserError, match="no normalisation statistics; train it"):
        export(CONFIGS["objects"][1].build(contract("objects")), Export(Target.onnx), tmp_path / "onnx")
    assert not list(tmp_path.iterdir())


def test_what_onnx_lacks_is_one_line_that_names_another_target(tmp_path: Path, capfd, monkeypatch):
    odd = {"agentview_image": TensorSpec((36, 36, 3), "uint8", camera="agentview")}
    monkeypatch.setitem(chunk_policies.SPECS, "pictures", chunk_policies.SPECS["pictures"] | odd)
    policy = make.__wrapped__("pictures", steps=0)
    with pytest.raises(UserError, match="ONNX opset 17 cannot express the policy, use target=torchscript: ") as error:
        export(policy, Export(Target.onnx), tmp_path / "onnx")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""
    assert not list(tmp_path.iterdir())
    export(policy, Export(Target.torchscript), tmp_path / "torchscript")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda seen: seen.exclude("object_mask"),
            "the observation lacks object_mask; expected .*instruction",
        ),
        (
            lambda seen: seen.set("gripper_position", seen["gripper_position"].double()),
            r"float32 \(2,\) .* got float64",
        ),
        (lambda seen: seen.set("gripper_command", torch.zeros(2, 3)), r"gripper_command: .* \(1,\) .* got .* \(3,\)"),
        (lambda seen: seen.set("instruction", torch.zeros(2, 20, dtype=torch.int64)), r"uint8 \(48,\) .*got int64"),
        (lambda seen: seen.set("object_position", torch.zeros(2, 4, 3)), "object_position 4, .*object_mask 5"),
        (lambda seen: seen.update({key: seen[key][:, :0] for key in chunk_policies.OBJECTS}), "at least one, got .* 0"),
        (lambda seen: seen["instruction"].fill_(255) is None or seen, "expected text in UTF-8"),
    ],
)
def test_a_wrong_observation_is_one_line(exported, change, message: str):
    with pytest.raises(UserError, match=message) as error:
        OnnxPolicy(exported("objects")).act(change(observations("objects", 2, seed=0)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["policy.onnx", "contract.json", "export.json"])
def test_a_changed_file_is_refused(exported, tmp_path: Path, name: str):
    for path in exported("objects").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name} is damaged.*; export the policy again$"):
        OnnxPolicy(tmp_path)
