"""A run's directory is used by one process at a time, and no existing file is overwritten."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.runtime.console import close_log, run_log
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.training.run_directory import LOCK, new_directory, new_run, resumed_run

HOLDER = "from embodied.training.run_directory import resumed_run\n"
HOLDER += "with resumed_run({!r}):\n    print(flush=True)\n    input()"


@pytest.fixture(autouse=True)
def no_log_stays_open():
    yield
    close_log()


def begin(output: Path):
    return new_run(str(output), Path())


def save(directory: Path, value: float = 0.0, size: int = 4) -> Path:
    contract = Contract({"position": TensorSpec((3,))}, TensorSpec((2,)), 0.1, 1, 1)
    weights = {"weight": torch.full((size,), value)}
    return checkpoint.save(directory, Checkpoint(weights, contract, counters={"value": value}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    for value in (1.0, 2.0):
        save(tmp_path / "run", value)
    return tmp_path / "run"


@contextmanager
def largest_file(size: int):
    """No file grows beyond `size` bytes. Python would leave truncated bytecode of what is imported meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[0][1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        sys.dont_write_bytecode = before[1]


@pytest.mark.parametrize(("rows", "remains"), [("", False), ('{"step": 1, "time": 2.0}\n', True)])
def test_a_run_that_is_refused_before_it_learns_leaves_no_folder(tmp_path: Path, rows: str, remains: bool):
    output = tmp_path / "run"
    with pytest.raises(UserError, match="unknown"), begin(output) as directory:  # noqa: PT012
        for name in ("config.yaml", "demonstrations.json"):
            (directory / name).write_text("{}")
        (directory / "tensorboard").mkdir()
        (directory / "metrics.jsonl").write_text(rows)
        raise UserError("rewards are unknown")
    assert output.exists() == remains


def test_runs_of_one_second_have_directories_of_their_own(tmp_path: Path):
    name = tmp_path / "hover" / "2030-01-01_12-00-00_seed0"
    with new_run(None, name) as first, new_run(None, name) as second, new_run(None, name) as third:
        assert [each.name for each in (first, second, third)] == [name.name, f"{name.name}_2", f"{name.name}_3"]


def test_a_directory_is_locked_until_its_process_ends_however_it_ends(run: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(str(run))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    for opened in (resumed_run(run), resumed_run(run / "checkpoint" / "000001"), begin(run)):
        with pytest.raises(UserError) as refused, opened:
            pass
        if "already has a run" not in str(refused.value):
            assert str(refused.value).startswith(f"process {holder.pid} is using {run}")
    assert (run / "checkpoint" / "000002").exists()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with resumed_run(run) as directory:
        assert directory == run
        assert (run / LOCK).read_text() == f"{os.getpid()}\n"


def test_the_same_new_output_is_taken_once(tmp_path: Path):
    output = tmp_path / "run"
    with (
        begin(output),
        pytest.raises(UserError, match=f"process {os.getpid()} is using"),
        begin(output),
    ):
        pass


def test_an_output_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    for name in "abcd":
        (tmp_path / "notes" / name).write_text("mine")
    with (
        pytest.raises(UserError, match=r"notes has other files \(a, b, c\)"),
        begin(tmp_path / "notes"),
    ):
        pass
    assert sorted(path.name for path in (tmp_path / "notes").iterdir()) == list("abcd")
    with pytest.raises(UserError, match="a is a file"), begin(tmp_path / "notes" / "a"):
        pass


def test_a_run_without_a_checkpoint_is_neither_resumed_nor_written_over(tmp_path: Path):
    (tmp_path / "checkpoint").mkdir()
    with (
        pytest.raises(UserError, match=r"has other files \(checkpoint\); choose"),
        begin(tmp_path),
    ):
        pass
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("there", [True, False])
def test_what_is_refused_at_once_leaves_nothing(tmp_path: Path, there: bool):
    output = tmp_path / "run"
    if there:
        output.mkdir()
    with pytest.raises(UserError, match="too many"), begin(output):
        raise UserError("too many")
    assert output.exists() == there
    assert not there or not list(output.iterdir())
    assert run_log() is None


def test_what_took_long_is_not_thrown_away(tmp_path: Path):
    def make() -> None:
        with begin(tmp_path / "run") as directory:
            (directory / "demonstrations").write_text("took an hour")
            raise UserError("too many")

    with pytest.raises(UserError, match="too many"):
        make()
    assert (tmp_path / "run" / "demonstrations").exists()


def test_a_run_goes_on_from_an_earlier_checkpoint_and_keeps_the_later_one(run: Path):
    with resumed_run(run / "checkpoint" / "000001") as directory:
        assert directory == run
        assert checkpoint.load(run).counters["value"] == 1.0
        save(run, 3.0)
    assert checkpoint.load(run).counters["value"] == 3.0
    assert checkpoint.load(run / "checkpoint" / "000002.aside").counters["value"] == 2.0


def test_a_run_that_is_refused_keeps_its_later_checkpoint(run: Path):
    with pytest.raises(UserError), resumed_run(run / "checkpoint" / "000001"):
        raise UserError("another contract")
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["000001", "000002"]


@pytest.mark.parametrize("path", ["nowhere", "run/checkpoint/000009", "file"])
def test_where_there_is_no_run_says_so(run: Path, path: str):
    (run.parent / "file").write_text("")
    with pytest.raises(UserError, match="no checkpoint in"), resumed_run(run.parent / path):
        pass


def test_a_full_disk_says_which_file_and_what_is_left(run: Path):
    with (
        pytest.raises(UserError, match=r"cannot write \S+safetensors: File too large; \S+/000002 is complete"),
        resumed_run(run),
        largest_file(20_000),
    ):
        save(run, 3.0, size=10_000)
    assert checkpoint.load(run).counters["value"] == 2.0
    with resumed_run(run):
        save(run, 3.0, size=10_000)
    assert checkpoint.load(run).counters["value"] == 3.0


@pytest.mark.parametrize("task", ["../../../etc", "/etc", "a/b", "..", "", "a\nb"])
def test_a_tasks_name_leads_nowhere_else(task: str):
    directory = new_directory("libero_pick", "_seed0")
    assert (directory.parent, directory.name[-6:]) == (Path("outputs/libero_pick"), "_seed0")
    with pytest.raises(UserError, match=r"expected task\.name of letters"):
        new_directory(task)
