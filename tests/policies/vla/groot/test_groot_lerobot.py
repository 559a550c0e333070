"""LeRobot's own classes of GR00T, where LEROBOT_PYTHON names an interpreter with them: chunks and losses are ours.

LeRobot 0.4.4 needs transformers 4.57, so that it runs in an environment of its own (lerobot_results.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.text import encode, text_spec
from policies.vla.groot.policy import GrootConfig, GrootPolicy
from policies.vla.groot.publishing import publish
from tests.policies.vla.groot import files

PYTHON = os.environ.get("LEROBOT_PYTHON")
TASKS = ["pick the milk", "open", "don't spill 2 cups"]
COUNT = len(TASKS)
CONTRACT = Contract(
    {
        "wrist": TensorSpec((24, 40, 3), "uint8"),
        "front": TensorSpec((24, 40, 3), "uint8"),
        "joints": TensorSpec((7,)),
        "instruction": text_spec(32),
    },
    TensorSpec((6,), low=(-100.0,) * 6, high=(100.0,) * 6),
    0.1,
    horizon=files.CHUNK,
    executed=files.CHUNK,
)

pytestmark = pytest.mark.skipif(not PYTHON, reason="LEROBOT_PYTHON names no interpreter with LeRobot 0.4.4")


def drawn() -> tuple[TensorDict, dict[str, Tensor]]:
    """Observations, and what LeRobot reads of them and more."""
    noise = torch.Generator().manual_seed(3)
    pictures = {
        name: torch.randint(256, (COUNT, *CONTRACT.observation[name].shape), dtype=torch.uint8, generator=noise)
        for name in ("wrist", "front")
    }
    state = torch.randn(COUNT, 7, generator=noise)
    inputs = {f"observation.images.{name}": value.permute(0, 3, 1, 2).contiguous() for name, value in pictures.items()}
    inputs["observation.state"] = state
    for name, size in (("observation.state", 7), ("action", 6)):
        inputs[f"{name}.min"] = torch.randn(size, generator=noise) - 1.0
        inputs[f"{name}.max"] = inputs[f"{name}.min"] + 1.0 + torch.rand(size, generator=noise)
    inputs["action"] = torch.randn(COUNT, files.CHUNK, 6, generator=noise)
    inputs["noise"] = torch.randn(COUNT, files.CHUNK, files.ACTION_SIZE, generator=noise)
    inputs["time"] = torch.tensor([0.2, 0.5, 0.9])
    words = torch.stack([torch.from_numpy(encode(task, 32)) for task in TASKS])
    return TensorDict({**pictures, "joints": state, "instruction": words}, [COUNT]), inputs


def run(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of LeRobot's classes on `inputs`."""
    assert PYTHON
    save_file(inputs, folder / "inputs.safetensors")
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    program = Path(files.__file__).with_name("lerobot_results.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, program, folder], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(folder / "outputs.safetensors")


def difference(policy: GrootPolicy, found: Tensor, results: dict[str, Tensor]) -> float:
    expected = torch.stack([results[f"actions.{row}"] for row in range(COUNT)])
    return float(((found - expected).abs() / policy.action_std).max())


def test_chunks_and_losses_are_lerobots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observation, inputs = drawn()
    files.save_base(tmp_path / "base")
    files.save_eagle(tmp_path / "eagle")
    results = run(tmp_path, inputs)
    own = GrootConfig(weights=str(tmp_path / "policy"), hidden=16).build(CONTRACT)
    tokens, real = own.inputs.tokens(observation)
    pictures, state = own.inputs.pictures(observation, files.SIDE), own._state(observation)
    for row in range(COUNT):
        assert tokens[row, real[row].bool()].tolist() == results[f"tokens.{row}"].tolist()
        levels = (pictures[row] - results[f"pictures.{row}"]).abs() * 127.5
        assert levels.max() < 1.01  # torch's weights for integers are rounded
        assert (levels > 0.01).float().mean() < 0.01
        torch.testing.assert_close(state[row], results[f"state.{row}"][0, 0, :7], atol=1e-6, rtol=1e-6)
    monkeypatch.setattr(own, "_noise", lambda *_: inputs["noise"])
    chunks = own.act(observation, deterministic=True).actions
    largest = difference(own, chunks, results)
    print(f"GR00T's actions differ by at most {largest:.1e} of half a range from LeRobot's")
    assert largest < 2e-5

    publish(own, tmp_path / "out", tmp_path)
    (tmp_path / "policy").rename(tmp_path / "before")
    (tmp_path / "out").rename(tmp_path / "policy")
    again = run(tmp_path, inputs)
    print(f"LeRobot's actions from our folder: {difference(own, chunks, again):.1e}")
    assert difference(own, chunks, again) < 2e-5

    for row in range(COUNT):
        noise, time = (inputs[name][row : row + 1] for name in ("noise", "time"))
        monkeypatch.setattr(own.model, "training_times", lambda *_, time=time: time)
        monkeypatch.setattr(torch, "randn_like", lambda _, noise=noise: noise)
        one = torch.ones(1, files.CHUNK)
        loss = own.loss(observation[row : row + 1], inputs["action"][row : row + 1], one)
        torch.testing.assert_close(loss, results[f"loss.{row}"], atol=1e-5, rtol=1e-5)
