"""serve.py as a user runs it: a process that serves a checkpoint until it is stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import serve
from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.command_line.train_options import GROUPS, TrainConfig
from embodied.errors import UserError
from embodied.saving.checkpoint import Checkpoint
from policies.registry import trained_policy
from real_robot.firmware.exporting import Export, Target, export
from real_robot.serving.policy_client import PolicyClient
from sims.libero.published import Published
from tests.policies.test_registry import saved
from tests.real_robot.firmware.chunk_policies import EXECUTED, make, observations

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path: Path) -> Checkpoint:
    return saved(tmp_path / "run")


@contextmanager
def serving(*options: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "serve.py", *options, "port=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def process(run: Checkpoint, tmp_path: Path) -> Iterator[subprocess.Popen]:
    with serving(f"checkpoint={tmp_path / 'run'}") as process:
        yield process


def test_a_checkpoint_is_served_until_the_process_is_stopped(process, run: Checkpoint, tmp_path: Path):
    found = re.search(r"at (ws://127\.0\.0\.1:\d+), token in (\S+);", process.stdout.readline())
    assert found
    uri, path = found[1], Path(found[2])
    assert path == tmp_path / "run" / "policy_token"
    assert path.stat().st_mode & 0o777 == 0o600
    client = PolicyClient(uri, path.read_text().strip(), deadline_s=10.0)
    observation = TensorDict({"x": torch.randn(1, 3)}, batch_size=[1])
    expected = trained_policy(run).act(observation, deterministic=True).actions
    assert torch.equal(client.act(observation, deterministic=True).actions, expected)
    with pytest.raises(ConnectionRefusedError, match="401"):
        PolicyClient(uri, "x" * 43)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10.0) == 0


def test_an_onnx_export_is_served_with_text_as_the_policy_itself_would_be(tmp_path: Path):
    export(make("objects"), Export(Target.onnx), tmp_path / "export" / "onnx")
    with serving(f"checkpoint={tmp_path / 'export' / 'onnx'}") as process:
        found = re.search(r"at (ws://127\.0\.0\.1:\d+), token in (\S+);", process.stdout.readline())
        assert found
        assert Path(found[2]) == tmp_path / "export" / "policy_token"
        client = PolicyClient(found[1], Path(found[2]).read_text().strip(), deadline_s=10.0)
        seen = observations("objects", 1, seed=0, rows=3)
        actions = client.act(seen, deterministic=True).actions
        expected = make("objects").act(seen, deterministic=True).actions[:, :EXECUTED]
        torch.testing.assert_close(actions, expected, atol=1e-4, rtol=0.0)
    with pytest.raises(ValueError, match="export runs on the CPU; expected device=cpu, got device=meta"):
        serve._load(serve.ServeConfig(checkpoint=str(tmp_path / "export" / "onnx"), device="meta"))


def test_a_token_is_kept_and_not_shared(tmp_path: Path):
    first = serve.token(tmp_path / "token")
    assert len(first) >= 40
    assert serve.token(tmp_path / "token") == first
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        serve.token(tmp_path / "token")


@pytest.mark.parametrize(("task", "expected"), [("libero_pictures", Published), ("quadrotor_hover", type(None))])
def test_vla_evals_observations_have_the_convention_of_the_checkpoints_task(run: Checkpoint, task: str, expected: type):
    config = compose(TrainConfig, "train", [f"task={task}"], GROUPS)[1]
    assert type(serve._convention(replace(run, config=config))) is expected


def test_help_lists_the_options():
    message = serve.describe([])
    assert all(option in message for option in ("checkpoint=...", "host=127.0.0.1", "token_file=null", "clients=8 "))


def test_a_port_that_is_none_is_one_line(run: Checkpoint, tmp_path: Path):
    with pytest.raises(ValueError, match=r"^port=99999999: expected a number of at least 0 and of at most 65535$"):
        serve.run([f"checkpoint={tmp_path / 'run'}", "port=99999999"])


def test_a_host_that_is_none_is_one_line(run: Checkpoint, tmp_path: Path):
    with pytest.raises(UserError, match=r"unknown host=nohost\.invalid; expected an address of"):
        serve.run([f"checkpoint={run.path}", f"token_file={tmp_path / 'token'}", "port=0", "host=nohost.invalid"])


def test_a_port_that_is_taken_is_one_line(run: Checkpoint, tmp_path: Path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert program.main(serve.run, serve.describe, [f"checkpoint={tmp_path / 'run'}", f"port={port}"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "address already in use" in lines[0]


def test_a_damaged_checkpoint_is_not_served(run: Checkpoint, tmp_path: Path):
    damaged = run.path / "policy.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-2] ^= 0x40
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match=r"policy\.safetensors is damaged"):
        serve.run([f"checkpoint={tmp_path / 'run'}"])


def test_without_its_extra_it_is_one_line_before_anything_is_served(run: Checkpoint, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    monkeypatch.setattr(serve.time, "sleep", lambda seconds: pytest.fail("it serves"))
    with pytest.raises(ValueError, match=r"^msgpack is not installed: pip install 'embodied-rl\[robot\]'$"):
        serve.run([f"checkpoint={tmp_path / 'run'}", "port=0"])


def test_a_missing_checkpoint_is_one_line(tmp_path: Path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        serve.run([f"checkpoint={tmp_path}"])
    assert list(tmp_path.iterdir()) == []
