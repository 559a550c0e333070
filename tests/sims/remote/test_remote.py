"""Environments in child processes: the same numbers as in one, whatever dies on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from embodied.command_line.config import compose
from embodied.environment import DifferentiableEnvironment, NumberedStarts, Restorable, SwitchableEnvironment
from embodied.errors import UserError
from sims.remote.task import in_processes
from tests.conformance.test_environments import same
from tests.sims.remote.made import MadeTask, in_children
from train import GROUPS, TrainConfig

ROOT = Path(__file__).parents[3]
KILL, HANG, RAISE = 0.75, 0.5, 0.25
"""Actions that a Fragile environment does not survive."""


def child_ids(env) -> list[int]:
    return [child.process.pid for child in env._children]


def chunks(env, count: int) -> list[torch.Tensor]:
    generator, spec = torch.Generator().manual_seed(0), env.contract.action
    low, high = torch.tensor(spec.low), torch.tensor(spec.high)
    shape = (count, env.num_envs, env.contract.executed, *spec.shape)
    return list(low + (high - low) * torch.rand(shape, generator=generator))


def zeros(env, **by_row: float) -> torch.Tensor:
    """A chunk of zeros, with another first action in some rows: row_2=0.75."""
    chunk = torch.zeros(env.num_envs, env.contract.executed, 1)
    for row, value in by_row.items():
        chunk[int(row.removeprefix("row_")), 0] = value
    return chunk


def assert_same_step(env, alone, chunk: torch.Tensor) -> None:
    """Both do the same; `diverged` and `lost` are events that one process alone may not have."""
    here, there = env.step(chunk), alone.step(chunk)
    for name, value in vars(there).items():
        assert name == "events" or same(getattr(here, name), value), name
    for name, happened in here.events.items():
        assert same(happened, there.events.get(name, torch.zeros_like(happened))), name
    assert there.events.keys() <= here.events.keys()


@pytest.fixture
def environment():
    """Makes environments of a task in processes, which are closed after the test."""
    made = []

    def make(task, num_envs: int, seed: int = 0, distribution: str = "anywhere"):
        made.append(in_children(task).environment(num_envs, distribution, "train", seed))
        return made[-1]

    yield make
    for env in made:
        env.close()


CASES = {
    "quadrotor_hover": ["task.step_limit=7", "task.randomisation=0.2"],
    "quadrotor_swarm": ["task.step_limit=40"],
    "vehicle_navigate": ["task.step_limit=5"],
    "libero_pick": ["task.assets=stand-in", "task.tasks=[0,3]", "task.train_step_limit=6"],
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_one_process(name: str, environment):
    options = [f"task={name}", "task.processes=2", *CASES[name]]
    task = compose(TrainConfig, "train", options, GROUPS)[0].task
    count, distribution = 2 if name == "libero_pick" else 5, task.distributions[0]
    env = environment(task, count, seed=3, distribution=distribution)
    alone = task.environment(count, distribution, "train", 3)
    assert env.contract == alone.contract == task.contract(distribution)
    for field in ("num_envs", "task_names", "instructions", "step_limit", "num_starts", "group"):
        assert getattr(env, field) == getattr(alone, field)
    assert same(env.reset(), alone.reset())
    for chunk in chunks(env, 8):
        assert_same_step(env, alone, chunk)
        assert same(env.start, alone.start)
        ended = alone.done.view(-1, alone.group).all(1).repeat_interleave(alone.group)
        assert same(env.reset(ended), alone.reset(ended))
    alone.close()


def test_tasks_are_dealt_over_all_environments_however_they_are_divided(environment):
    env = environment(MadeTask(tasks=3, processes=2), 5)
    assert env.task_index.tolist() == [0, 1, 2, 0, 1]
    assert [row.stop - row.start for row in env._rows] == [2, 3]
    env = environment(MadeTask(share=4, processes=3), 8)
    assert [row.stop - row.start for row in env._rows] == [4, 4], "a world is in one process"
    with pytest.raises(UserError, match="no process runs task 2: only an EpisodeEngine deals tasks over processes"):
        environment(MadeTask(kind="reach", tasks=3, processes=2), 4)


def test_it_can_what_its_children_can(environment):
    counter, nameless, single = (environment(MadeTask(kind=kind, processes=1), 4) for kind in KINDS)
    for capability, having in ((NumberedStarts, counter), (Restorable, counter), (SwitchableEnvironment, single)):
        for env in (counter, nameless, single):
            assert isinstance(env, capability) == (env is having)
            assert not isinstance(env, DifferentiableEnvironment)
    nameless.reset()
    assert nameless.step(zeros(nameless)).executed.all()
    single.switch("wide", "eval")
    single.reset()
    single.step(zeros(single))
    single.switch("elsewhere", "eval")
    with pytest.raises(RuntimeError, match="AssertionError in a child process: episodes of another place go on"):
        single.step(zeros(single))


KINDS = ("counter", "nameless", "single")


@pytest.mark.parametrize("fatal", [KILL, HANG])
def test_episodes_of_a_process_that_dies_or_hangs_are_lost_and_the_others_go_on(fatal: float, environment, caplog):
    task = MadeTask(processes=2, timeout_s=60.0 if fatal == KILL else 8.0, step_limit=9)
    env, alone = environment(task, 4), task.environment(4, "anywhere", "train")
    assert same(env.reset(), alone.reset())
    assert_same_step(env, alone, zeros(env, row_3=0.125))
    before, ids = env.observe(), child_ids(env)
    lost = env.step(zeros(env, row_2=fatal))
    alone.step(zeros(env))
    assert lost.terminated.tolist() == [False, False, True, True]
    for name in ("lost", "diverged"):
        assert lost.events[name].tolist() == [False, False, True, True]
    assert not lost.success.any()
    assert not lost.truncated.any()
    assert lost.reward[2:].eq(0.0).all()
    assert lost.executed.all(), "the commands were sent"
    assert same(lost.observation[2:], before[2:])
    assert child_ids(env)[0] == ids[0]
    assert child_ids(env)[1] != ids[1]
    with pytest.raises(ProcessLookupError):
        os.kill(ids[1], 0)
    said = "a physics engine says | that memory is corrupt" if fatal == KILL else "gave no answer within 8 s"
    assert said in caplog.text
    assert "2 episodes are lost" in caplog.text
    assert "the simulation diverged" not in caplog.text
    # they stay frozen until they begin again, with numbers as ever
    later = env.step(zeros(env))
    alone.step(zeros(env))
    assert later.executed.any(1).tolist() == [True, True, False, False]
    assert later.events["lost"].tolist() == [False, False, True, True]
    assert same(later.observation[2:], before[2:])
    assert same(env.reset(torch.ones(4, dtype=torch.bool)), alone.reset())
    for chunk in chunks(env, 2):
        assert_same_step(env, alone, chunk * 0.2)


def test_a_process_that_died_between_two_commands_loses_its_running_episodes_alone(environment, caplog):
    env = environment(MadeTask(processes=2), 4)
    env.reset()
    os.kill(child_ids(env)[1], signal.SIGKILL)
    env.reset(torch.tensor([False, False, True, False]))
    transition = env.step(zeros(env))
    assert transition.events["lost"].tolist() == [False, False, False, True]
    assert transition.executed.all()
    assert transition.metrics["x"].shape == (4,)
    assert "1 episodes are lost" in caplog.text


def test_what_was_lost_is_in_the_saved_state(environment):
    env = environment(MadeTask(processes=2), 4)
    env.reset()
    env.step(zeros(env, row_0=KILL))
    state, seen = env.state_dict(), env.observe()
    env.reset()
    assert same(env.load_state_dict(state), seen)
    transition = env.step(zeros(env))
    assert transition.events["lost"].tolist() == [True, True, False, False]
    assert transition.executed.any(1).tolist() == [False, False, True, True]


def test_one_that_dies_again_and_again_is_given_up_with_its_last_words(tmp_path: Path, environment, monkeypatch):
    (simulator := tmp_path / "simulator").touch()
    env = environment(MadeTask(processes=1, needed=str(simulator)), 2)
    env.reset()
    env.step(zeros(env))
    simulator.unlink()
    monkeypatch.setattr("sims.remote.environment.GIVE_UP", 2)
    expected = f"died 2 times in a row .* status 1; its last lines: .*no simulator without {simulator}$"
    with pytest.raises(UserError, match=expected) as caught:
        env.step(zeros(env, row_0=KILL))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=f"ended with status 1; its last lines: .*no simulator without {simulator}$"):
        environment(MadeTask(processes=2, needed=str(simulator)), 2)


def test_an_error_of_the_simulator_is_an_error_here(environment):
    env = environment(MadeTask(processes=2), 4)
    env.reset()
    with pytest.raises(RuntimeError, match="ArithmeticError in a child process: a quarter is not allowed") as caught:
        env.step(zeros(env, row_0=RAISE))
    assert "made.py" in str(caught.value)
    assert not env.step(zeros(env)).events["lost"].any(), "who catches it can go on"


def venv(folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(
    ("interpreter", "told"),
    [
        ("/nowhere/bin/python", r"cannot start task.python=/nowhere/bin/python: No such file or directory; expected"),
        ("/bin/true", r"a process of the simulator ended with status 0$"),
        (None, r"task.python=.*venv/bin/python: numpy is not installed in .*venv/bin/python$"),
    ],
)
def test_a_wrong_interpreter_is_told_on_one_line(interpreter: str | None, told: str, tmp_path: Path):
    task = in_processes(MadeTask(python=interpreter or venv(tmp_path / "venv")))
    with pytest.raises(UserError, match=told):
        task.contract("anywhere")
    with pytest.raises(UserError, match=told):
        task.environment(2, "anywhere", "train")


def test_another_interpreter_makes_the_contract_too(tmp_path: Path):
    python = venv(tmp_path / "venv")
    packages = next(Path(path) for path in sys.path if (Path(path) / "torch").exists())
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "ours.pth").write_text(f"{packages}\n")  # as if all had been installed there
    task = MadeTask(python=python)
    remote = in_processes(task)
    assert remote.contract("anywhere") == task.contract("anywhere")
    env = remote.environment(2, "anywhere", "train")
    assert env._children[0].process.args[0] == python
    assert env.reset()["x"].shape == (2, 1)
    env.close()


@pytest.mark.parametrize("wrong", [{"processes": -1}, {"processes": 1, "timeout_s": 0.0}])
def test_impossible_options_are_refused(wrong):
    with pytest.raises(UserError, match=r"^(processes=-1|timeout_s=0): expected a number"):
        MadeTask(**wrong)


def test_a_task_that_asks_for_nothing_is_itself():
    task = MadeTask()
    assert in_processes(task) is task


PARENT = """
import signal, sys, torch
from sims.remote.task import in_processes
from tests.sims.remote.made import MadeTask
env = in_processes(MadeTask(processes=2)).environment(2, "anywhere", "train")
env.reset()
signal.signal(signal.SIGINT, lambda *_: None)
print(*(child.process.pid for child in env._children), flush=True)
sys.stdin.readline()
print(env.step(torch.zeros(2, 3, 1)).events["lost"].any().item(), flush=True)
env.step(torch.full((2, 3, 1), 0.5))  # hangs
"""


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_ctrl_c_is_the_parents_and_its_death_is_everyones():
    memory = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    children = [int(number) for number in parent.stdout.readline().split()]
    assert len(children) == 2
    os.killpg(parent.pid, signal.SIGINT)  # what a terminal does
    time.sleep(0.5)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline().strip() == "False", "no child died of Ctrl-C"
    time.sleep(0.5)
    assert not any(map(gone, children))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20.0
    while not all(map(gone, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(gone, children))
    assert set(os.listdir("/dev/shm")) <= memory


@pytest.mark.evidence
def test_training_goes_on_where_a_process_is_killed(tmp_path: Path):
    memory = set(os.listdir("/dev/shm"))
    small = ["env_steps=6000", "num_envs=8", "evaluation_starts=4", "evaluation_envs=4", "task.step_limit=20"]
    options = [*small, "task.processes=2", "video=false", "threads=1", f"output={tmp_path / 'run'}"]
    training = subprocess.Popen(
        [sys.executable, "train.py", "task=vehicle_navigate", *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while training.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.05)
    children = workers_of(training.pid)
    assert len(children) >= 2
    os.kill(children[0], signal.SIGKILL)  # the environments of training were made first
    told = training.communicate()[0]
    assert training.returncode == 0, told
    warned = re.search(r"a process of the simulator was killed by SIGKILL; (\d) episodes are lost", told)
    assert warned, told
    lost = int(warned[1])
    assert lost <= 4  # those of its four that had just ended, when the signal came, are not lost
    assert (f'"rollout/lost": {lost}.0' in metrics.read_text()) == (lost > 0)
    report = (tmp_path / "run" / "report.md").read_text()
    assert (f"{lost} of the episodes were lost with processes" in report) == (lost > 0)
    assert all(map(gone, children))
    assert set(os.listdir("/dev/shm")) <= memory


def workers_of(parent: int) -> list[int]:
    """Processes that `parent` started and that run worker.py, the oldest first; numbers of processes start again."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = path.joinpath("stat").read_text().rpartition(")")[2].split()
            if stat[1] == str(parent) and re.search("worker.py", path.joinpath("cmdline").read_text()):
                found.append((int(stat[19]), int(path.name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [number for _, number in sorted(found)]
