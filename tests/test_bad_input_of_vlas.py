"""Wrong files and options of policies that read pictures and words, as a user gives them: one line, nothing lost."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import evaluate
import export
import serve
import train
from embodied.command_line import program
from tests.policies.vla.checkpoints.test_statistics import write
from tests.policies.vla.checkpoints.test_weights import save
from tests.policies.vla.test_pi0 import RUN
from tests.programs import run_program

ROOT = Path(__file__).parent.parent
STATE, ACTION = 19, 7
"""Elements of LIBERO's state and action."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run with one camera; copy it before changing it."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    completed = run_program("train.py", *RUN, "task.images=[agentview]", f"output={directory}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return directory


@pytest.fixture
def refused(capsys):
    """Runs a program in this process, expects one line of error and status 1, and returns the line."""
    threads, memory = torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_DATA)

    def ask(module, *arguments: str) -> str:
        assert program.main(module.run, module.describe, list(arguments)) == 1
        told = [line for line in capsys.readouterr().err.strip().splitlines() if line.startswith("error: ")]
        assert len(told) == 1
        assert "traceback" not in told[0]
        return told[0]

    yield ask
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, memory)


def weights(folder: Path, state: int = STATE, action: int = ACTION) -> Path:
    """A small pi0 as transformers saves it, with statistics of so many elements."""
    folder.mkdir()
    save(folder, "transformers")
    write(folder, "transformers", state=([0.0] * state, [1.0] * state), action=([0.0] * action, [1.0] * action))
    return folder


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("task.images=[wrist]", "unknown images: wrist; expected some of agentview, robot0_eye_in_hand"),
        ("task.images=agentview", "expected a list, task.images=[...]"),
        ("task.images=[agentview,agentview]", "names a camera twice"),
        ("task.images=[]", "name cameras in task.images"),
        ("task.image_size=0", "task.image_size=0: expected a number of at least 1 and of at most 4096"),
        ("task.image_size=16000", "task.image_size=16000: expected a number of at least 1"),
        ("sft.learning_rate=nan", "sft.learning_rate=nan: expected a finite number of at least 0"),
        ("algorithm.learning_rate=-1", "algorithm.learning_rate=-1: expected a number of at least 0"),
        ("algorithm.memory_gb=nan", "algorithm.memory_gb=nan: expected a finite number above 0"),
        ("precision=bfloat16", "use policy.precision=bfloat16 in its place"),
        ("policy.weights=README.md", "README.md is a file; expected the folder"),
        ("policy.hidden=1e9", "algorithm.minibatch or policy.hidden, or algorithm.memory_gb=0.3"),
    ],
)
def test_a_wrong_option_is_one_line_and_leaves_nothing(refused, tmp_path: Path, option: str, message: str):
    assert message in refused(train, *RUN, f"output={tmp_path / 'run'}", option)
    assert not (tmp_path / "run").exists()


def test_the_plan_of_a_run_refuses_what_the_run_refuses(refused):
    assert "use policy.precision=bfloat16 in its place" in refused(train, *RUN, "precision=bfloat16", "plan=true")


def test_weights_without_statistics_or_of_another_robot_begin_with_demonstrations(refused, tmp_path: Path):
    given, output = weights(tmp_path / "weights"), f"output={tmp_path / 'run'}"
    only_rl = [*RUN, output, f"policy.weights={given}", "stages=[rl]"]
    (given / "processor_config.json").unlink()
    line = refused(train, *only_rl)
    assert f"policy.weights={given} has no statistics of state and action; stages=[sft,rl] computes them" in line
    other = weights(tmp_path / "other", state=8, action=6)
    line = refused(train, *only_rl, f"policy.weights={other}")
    assert "has statistics of 8 and 6 elements of state and action, not of 19 and 7; stages=[sft,rl]" in line
    assert not (tmp_path / "run").exists()
    assert program.main(train.run, train.describe, [*RUN, output, f"policy.weights={given}", "stages=[sft]"]) == 0


def test_another_size_camera_or_chunk_than_the_checkpoints_is_one_line(refused, finished: Path, tmp_path: Path):
    run = [*RUN, f"output={tmp_path / 'run'}", f"start_from={finished}", "stages=[rl]", "task.images=[agentview]"]
    line = refused(train, *run, "task.image_size=64")
    assert "(observation 'agentview_image' shape: expected (32, 32, 3), got (64, 64, 3))" in line
    assert "(observation 'agentview_image': missing)" in refused(train, *run, "task.images=[robot0_eye_in_hand]")
    assert "horizon: expected 8, got 4" in refused(train, *run, "task.horizon=4")
    assert "use the policy and the observations of its config" in refused(train, *run, "task.joints=false")
    shown = [*RUN, f"output={tmp_path / 'run'}", f"demonstrations={finished}"]
    line = refused(train, *shown, "task.images=[agentview]", "task.image_size=64")
    assert "shape: expected (64, 64, 3), got (32, 32, 3); choose the task's options so" in line
    assert not (tmp_path / "run").exists()


def test_damaged_weights_are_not_begun_with(refused, finished: Path, tmp_path: Path):
    run = [*RUN, f"output={tmp_path / 'run'}", "stages=[rl]", "task.images=[agentview]"]
    tensors = load_file(max((finished / "checkpoint").iterdir()) / "policy.safetensors")
    changed = tmp_path / "changed.safetensors"
    for values, message in (
        (torch.zeros(ACTION), "action_std is a standard deviation of 0"),
        (torch.full((ACTION,), torch.nan), "infinity or not a number in action_std"),
        (torch.ones(6), "size mismatch for action_std"),
    ):
        save_file(tensors | {"action_std": values}, changed)
        assert message in refused(train, *run, f"start_from={changed}")
    changed.write_bytes(changed.read_bytes()[:-500])
    assert f"cannot read the weights {changed}" in refused(train, *run, f"start_from={changed}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", [evaluate, serve, export, train])
def test_a_damaged_checkpoint_of_every_program_is_one_line(refused, finished: Path, tmp_path: Path, module):
    copied = Path(shutil.copytree(finished, tmp_path / "run"))
    for each in (copied / "checkpoint").iterdir():
        (each / "policy.safetensors").write_bytes((each / "policy.safetensors").read_bytes()[:2000])
    before = {path.name for path in copied.rglob("*")}
    more = {serve: ["port=0"], export: ["target=transformers", f"output={tmp_path / 'out'}"]}.get(module, [])
    line = refused(module, f"{'resume' if module is train else 'checkpoint'}={copied}", *more)
    assert "policy.safetensors is damaged: its checksum differs" in line
    assert {path.name for path in copied.rglob("*")} == before
    assert not (tmp_path / "out").exists()


def test_an_absurd_learning_rate_keeps_what_was_learned_before(refused, tmp_path: Path):
    line = refused(train, *RUN, "algorithm.learning_rate=1e30", "task.images=[agentview]", f"output={tmp_path / 'run'}")
    assert "became nan at gradient step" in line
    last = max((tmp_path / "run" / "checkpoint").iterdir())
    assert line.endswith(f"the last good checkpoint is {last}: start_from={last}")
    again = [*RUN, f"start_from={last}", "task.images=[agentview]", "stages=[rl]", f"output={tmp_path / 'again'}"]
    assert program.main(train.run, train.describe, again) == 0


def test_a_run_for_which_memory_does_not_suffice_names_options_that_it_has(tmp_path: Path):
    """The process has a gigabyte more than it takes to begin; a minibatch of all decisions needs more."""
    code = (
        "import resource, sys, train\n"
        "from embodied.command_line import program\n"
        "from embodied.training import compute\n"
        "def limit():\n"
        "    begun = int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (begun + 2**30, begun + 2**30))\n"
        "compute._limit_memory = limit\n"
        "sys.exit(program.main(train.run, train.describe, sys.argv[1:]))"
    )
    large = ["num_envs=16", "algorithm.minibatch=100000", "algorithm.rollout_length=16", "policy.size=SMALL"]
    options = [*RUN, *large, "stages=[rl]", "env_steps=1024", f"output={tmp_path / 'run'}"]
    completed = subprocess.run(
        [sys.executable, "-c", code, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 1
    *_, line = completed.stderr.strip().splitlines()
    assert line.startswith("error: out of memory")
    assert "use a smaller num_envs, evaluation_envs, task.image_size, sft.batch, algorithm.rollout_length" in line
    assert line.endswith(
        "or algorithm.memory_gb=0.3, policy.gradient_checkpointing=true; plan=true tells what takes how much"
    )
