"""The programs as a user runs them: a whole small run, its evaluation, its continuation, and wrong options."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import evaluate
import train
from embodied.command_line import combinations, program
from embodied.report.repeating import resume_command
from embodied.saving import checkpoint, sealed
from tests.programs import run_program

ROOT = Path(__file__).parent.parent
SMALL = [
    *("task=libero_pick", "task.assets=stand-in", "task.tasks=[0]", "task.episodes=1", "task.step_limit=100"),
    *("num_envs=2", "env_steps=100", "evaluation_starts=1", "evaluation_envs=1", "video=false", "threads=1"),
    *("sft.steps=20", "algorithm.imitation.rollout_length=4", "algorithm.warmup=1", "policy.width=16"),
    *("algorithm.imitation.gradient_steps=2", "algorithm.gradient_steps=2", "policy.hidden=32"),
]
LOGS = ("tensorboard", "run.log", ".lock")
"""What is written with every start."""


def start(*command: str) -> subprocess.CompletedProcess:
    """Run a program in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )


def files(directory: Path) -> dict[str, bytes]:
    """Content of everything but the logs."""
    paths = (path for path in directory.rglob("*") if path.is_file() and not set(path.parts) & set(LOGS))
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run; copy it before changing it."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    completed = run_program("train.py", *SMALL, f"output={directory}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "success [95% interval]" in completed.stdout
    assert f"evaluate.py checkpoint={directory}" in completed.stdout
    return directory


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def refused(capsys):
    """Runs a program in this process, expects one line and status 1, and returns the line."""
    threads, memory = torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_DATA)

    def ask(module, *arguments: str) -> str:
        assert program.main(module.run, module.describe, list(arguments)) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0]

    yield ask
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, memory)


def test_a_quadrotor_learns_is_measured_and_filmed(tmp_path: Path):
    directory = tmp_path / "hover"
    small = ["env_steps=6000", "evaluation_starts=6", "evaluation_envs=3", "threads=1", "task.step_limit=60"]
    completed = run_program("train.py", "task=quadrotor_hover", *small, f"output={directory}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    report = json.loads((directory / "report.json").read_text())
    assert {(row["stage"], row["episodes"]) for row in report["evaluations"]} == {("untrained", 5), ("rl", 6)}
    assert {"robust", "disturbed", "late_20_ms"} <= {row["distribution"] for row in report["evaluations"]}
    assert {"survive", "position_error_m"} <= report["evaluations"][0].keys()
    assert report["cpu_s"] > 0
    assert "assets" not in (directory / "report.md").read_text()
    assert "(trajectories.png)" in (directory / "report.md").read_text()
    for name in ("trajectories.png", "video.mp4", "curves.png"):
        assert (directory / name).stat().st_size > 1000
    completed = run_program(
        "evaluate.py", f"checkpoint={directory}", "episodes=8", "num_envs=5", "threads=1", "render=true"
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "survive" in completed.stdout
    assert (directory / "evaluation.mp4").stat().st_size > 1000


def test_a_vehicle_learns_and_is_measured_beside_a_planner(tmp_path: Path):
    small = ["env_steps=2000", "num_envs=8", "evaluation_starts=3", "evaluation_envs=3", "task.step_limit=20"]
    completed = run_program("train.py", "task=vehicle_navigate", *small, "video=false", f"output={tmp_path / 'run'}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    planners = ["baseline DWA", "baseline map and DWA"]
    found = {(row["stage"], row["distribution"]): row for row in report["evaluations"]}
    assert set(found) == {(who, on) for who in (*planners, "rl") for on in ("rooms", "drift", "people")}
    assert {"collision", "time_s", "path_m"} <= report["evaluations"][0].keys()
    assert "RL over DWA on rooms" in completed.stdout
    options = ["baselines=true", "episodes=3", "distributions=[rooms]"]
    completed = run_program("evaluate.py", f"checkpoint={tmp_path / 'run'}", *options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    record = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert record["num_envs"] == 3  # as many worlds as in training's evaluations
    assert [row["stage"] for row in record["evaluations"]] == ["policy", *planners]
    beside = [{key: found[who, "rooms"][key] for key in record["evaluations"][1]} for who in planners]
    assert record["evaluations"][1:] == beside  # the same episodes as beside the trained policy
    assert [gain["over"] for gain in record["gains"]] == planners
    assert "policy over map and DWA on rooms: " in completed.stdout
    completed = run_program("evaluate.py", f"checkpoint={tmp_path / 'run'}", "task.guard=false", "episodes=3")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    record = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert record["task"]["guard"] is False
    assert [row["replaced"] for row in record["evaluations"]] == [0.0] * 3


def test_a_quadrotor_learns_and_is_measured_with_latency(tmp_path: Path):
    directory = tmp_path / "late"
    small = ["env_steps=3000", "evaluation_starts=3", "evaluation_envs=3", "threads=1", "task.step_limit=30"]
    late = ["latency.action_s=[0.0,0.03]", "latency.observation_s=[0.01,0.02]", "latency.observed=true"]
    completed = run_program("train.py", "task=quadrotor_hover", *small, *late, f"output={directory}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert (directory / "video.mp4").stat().st_size > 1000
    options = ["episodes=4", "num_envs=2", "threads=1", "latency.action_s=[0.05,0.05]"]
    completed = run_program("evaluate.py", f"checkpoint={directory}", *options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    record = json.loads((directory / "evaluation.json").read_text())
    assert record["latency"] == {
        "observation_s": [0.01, 0.02],
        "action_s": [0.05, 0.05],
        "jitter_s": 0.0,
        "observed": True,
    }


def test_a_policy_for_any_quadrotor_is_distilled_measured_and_exported(tmp_path: Path):
    directory = tmp_path / "any"
    small = [
        *("num_envs=16", "env_steps=2500", "algorithm.teacher_steps=1000", "algorithm.teaching.rollout_length=10"),
        *("algorithm.rollout_length=10", "evaluation_starts=3", "evaluation_envs=2", "task.step_limit=40", "threads=1"),
    ]
    completed = run_program("train.py", "task=quadrotor_any", *small, f"output={directory}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    rows = json.loads((directory / "report.json").read_text())["evaluations"]
    masses = ("0032", "0045", "0080", "0150", "0250", "0400", "0650", "1000", "1600", "2400")
    names = ["beyond_slow_rotors", "crazyflie", "crazyflie_21", "crazyflie_late_10_ms", "crazyflie_late_20_ms"]
    names += ["hexa_0550_g", "hexa_2000_g", "high_thrust", "low_thrust", "octo_0900_g", "octo_2200_g", "random"]
    names += ["slow_rotors", "slower_rotors"]
    names += [f"unseen_{mass}_g" for mass in masses]
    assert sorted({row["distribution"] for row in rows}) == names
    assert all({"survive", "position_error_m"} <= row.keys() for row in rows)
    assert (directory / "video.mp4").stat().st_size > 1000
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    taught = ["rl/teacher_objective" in row for row in logged]
    assert taught == sorted(taught, reverse=True)  # the teacher first
    assert sum(taught) >= 6
    assert all("rl/loss" in row for row, teacher in zip(logged, taught, strict=True) if not teacher)
    options = ["distributions=[unseen_2400_g]", "episodes=4", "num_envs=3", "threads=1"]
    completed = run_program("evaluate.py", f"checkpoint={directory}", *options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    completed = run_program("export.py", f"checkpoint={directory}", "target=c")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    header = (directory / "export" / "c" / "contract.json").read_text()
    assert "platform" not in header  # nobody tells it
    header = (directory / "export" / "c" / "policy.h").read_text()
    assert "commands 0 to 20 ms late" in header
    assert "Margins were not measured" not in header  # which no program does for it
    assert "#define POLICY_FIRST_ACTION 0.0f" in header


def test_a_run_leaves_what_was_promised(finished: Path):
    promised = {
        "report.md",
        "report.html",
        "report.json",
        "curves.png",
        "metrics.jsonl",
        "config.yaml",
        "demonstrations",
    }
    assert promised | {"checkpoint", *LOGS} == {path.name for path in finished.iterdir()}
    report = json.loads((finished / "report.json").read_text())
    assert (report["task"], report["assets"], report["seed"]) == ("libero_pick", "stand-in", 0)
    assert report["env_steps"] >= 100
    rows = [(row["stage"], row["distribution"], row["episodes"]) for row in report["evaluations"]]
    words = [("rl", f"official:{wording}", 1) for wording in ("bddl", "held_out")]
    stages = [(stage, on, 1) for stage in ("rl", "sft", "sft_control") for on in ("official", "wide")]
    assert sorted(rows) == sorted(stages + words)
    assert {row["step_limit"] for row in report["evaluations"]} == {100}
    assert "tand-in assets" in (finished / "report.md").read_text()


def test_the_same_seed_gives_the_same_run(finished: Path, tmp_path: Path):
    again = tmp_path / "again"
    assert start("train.py", *SMALL, f"output={again}").returncode == 0  # in a process of its own
    newest = max((finished / "checkpoint").iterdir()).relative_to(finished)
    assert files(finished / "demonstrations") == files(again / "demonstrations")
    weights = newest / "policy.safetensors"
    assert (finished / weights).read_bytes() == (again / weights).read_bytes()
    first, second = (json.loads((each / "report.json").read_text()) for each in (finished, again))
    assert first["evaluations"] == second["evaluations"]


def test_evaluation_is_the_same_number_every_time(copied: Path):
    def measured(run: Callable) -> bytes:
        completed = run("evaluate.py", f"checkpoint={copied}", "episodes=2", "num_envs=1", "threads=1")
        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert "| all (2 + 2 + 2 + 2 episodes) |" in completed.stdout
        written = (copied / "evaluation.json").read_bytes()
        (copied / "evaluation.json").unlink()
        return written

    once = measured(run_program)
    assert measured(start) == once  # in a process of its own, too
    found = json.loads(once)
    assert found["assets"] == "stand-in"
    assert found["task"]["suite"] == "libero_object"
    measured_on = ["wide", "official", "official:bddl", "official:held_out"]
    assert [row["distribution"] for row in found["evaluations"]] == measured_on


def test_a_run_is_measured_on_mujoco_warp_and_with_what_it_was_not_trained_with(copied: Path):
    asked = ["sim=mjwarp", "episodes=2", "num_envs=2", "distributions=[wide]", "task.step_limit=4", "threads=1"]
    varied = ["task.randomisation.mass=[0.5,2]", "task.randomisation.evaluation=true"]
    completed = run_program("evaluate.py", f"checkpoint={copied}", *asked, *varied)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "| all (2 episodes) |" in completed.stdout
    found = json.loads((copied / "evaluation.json").read_bytes())
    assert found["task"]["sim"] == "mjwarp"
    assert found["task"]["randomisation"]["mass"] == [0.5, 2.0]
    assert "diverged" not in found["evaluations"][0]  # none did


def test_resuming_a_finished_run_changes_nothing(copied: Path):
    before = files(copied)
    completed = run_program("train.py", f"resume={copied}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "success [95% interval]" in completed.stdout
    assert files(copied) == before


def test_a_run_whose_path_needs_quotes_is_resumed_and_evaluated(finished: Path, tmp_path: Path, monkeypatch, refused):
    copied = shutil.copytree(finished, tmp_path / "it's a, läuft=1")
    asked = shlex.split(resume_command(copied))[-1]
    assert asked.startswith('resume="')
    completed = run_program("train.py", asked)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "success [95% interval]" in completed.stdout

    def become(_: str, arguments: list[str]) -> None:
        raise SystemExit(run_program(*arguments[1:], "episodes=1", "threads=1").returncode)

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit, match="0"):
        train.run([asked, "eval_only=true"])
    assert (copied / "evaluation.json").exists()
    plain = shutil.copytree(finished, tmp_path / "plain")
    assert run_program("train.py", f"resume='{plain}'").returncode == 0
    assert refused(train, "resume=/a,b").endswith("""got /a,b; write 'resume="/a,b"'""")


def test_an_evaluation_with_a_slow_policy(copied: Path, refused):
    few = [f"checkpoint={copied}", "episodes=1", "num_envs=1", "threads=1", "distributions=[wide]"]
    slow = ["delay_s=0.1", "execution=inpaint", "executed=2"]
    completed = run_program("evaluate.py", *few, *slow)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    record = json.loads((copied / "evaluation.json").read_text())
    assert (record["delay_s"], record["execution"], record["task"]["executed"]) == (0.1, "inpaint", 2)
    assert "one of inpaint, blend" in refused(evaluate, *few, "delay_s=0.1")
    assert "the longest for horizon=8 executed=4" in refused(evaluate, *few, "delay_s=0.3", "execution=naive")


def test_a_run_under_a_delay_is_evaluated_under_it_alone(tmp_path: Path, refused):
    run = tmp_path / "late"
    options = [each for each in SMALL if not each.startswith("video=")]
    completed = run_program("train.py", *options, "delay=2", "video=true", "comparison_starts=0", f"output={run}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert (run / "video.mp4").exists()
    assert checkpoint.load(run).contract.delay == 2
    few = [f"checkpoint={run}", "episodes=1", "num_envs=1", "threads=1", "distributions=[wide]"]
    completed = run_program("evaluate.py", *few)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert json.loads((run / "evaluation.json").read_text())["delay"] == 2
    assert "delay: expected 2 control steps, got 3" in refused(evaluate, *few, "delay=3")
    assert "leave out delay_s and execution" in refused(evaluate, *few, "delay_s=0.1", "execution=naive")
    small = [each for each in SMALL if not each.startswith("algorithm.")]
    refusal = refused(train, *small, "delay=2", "policy=diffusion", "algorithm=ppo", f"output={tmp_path / 'no'}")
    assert "reads no action prefix, which delay=2 needs; use policy=flow" in refusal


def test_what_cannot_be_compared_or_begun_is_one_line(refused, finished: Path):
    asked = f"checkpoint={finished}", "threads=1"
    assert "libero_pick has no planners to compare with" in refused(evaluate, *asked, "baselines=true")
    message = refused(evaluate, *asked, "baselines=true", "sim_to_real=[simulator]")
    assert "back ends run a policy alone" in message
    assert "first_start=-1: expected a number of at least 0" in refused(evaluate, *asked, "first_start=-1")


def test_eval_only_becomes_evaluate_with_the_options_it_has(finished: Path, monkeypatch):
    def become(path: str, arguments: list[str]) -> None:
        raise SystemExit(arguments)

    monkeypatch.setattr(os, "execv", become)
    options = ["seed=3", "num_envs=7", "device=cpu", "threads=1"]
    with pytest.raises(SystemExit) as caught:
        train.run(["task=libero_pick", f"resume={finished}", "eval_only=true", *options])
    assert caught.value.code[1:] == [str(ROOT / "evaluate.py"), f"checkpoint={finished}", *options]


def test_an_unknown_task_is_one_line_that_lists_the_tasks():
    completed = run_program("train.py", "task=nope")
    assert completed.returncode == 1
    tasks = ", ".join(sorted(path.stem for path in (ROOT / "configs" / "task").glob("*.yaml")))
    assert "libero_pick, " in tasks
    assert completed.stderr == f"error: unknown task 'nope'; expected one of {tasks}\n"
    assert completed.stdout == ""


def test_help_lists_what_there_is_and_the_options_of_what_is_chosen(capsys):
    def message(*chosen: str) -> str:
        assert program.main(train.run, train.describe, [*chosen], train.composed, train.summarise) == 0
        return capsys.readouterr().out

    everything = message("--help=all")
    assert re.search(r"^task: .*\blibero_pick, ", everything, re.MULTILINE)
    assert (
        "algorithm: arsq, bptt, distillation, dsrl, flash_sac, grpo, h2o, hg_dagger, iwr, one_step, ppo" in everything
    )
    assert "num_envs=100 " in everything
    hover = message("--help=all", "task=quadrotor_hover", "algorithm=ppo")
    assert "task=quadrotor_hover takes policy=mlp with algorithm=bptt|ppo|grpo|td3" in hover
    assert "task.reward.reward_alive=3.0\n" in hover
    assert re.search(r"^algorithm\.final_lr_share=0\.02 +# .*decay linearly", hover, re.MULTILINE)
    assert re.search(r"^task\.history=12 +# The policy observes its last `history` actions", hover, re.MULTILINE)
    assert "task.suite" not in hover
    assert "algorithm.teacher_steps=" in message("--help=all", "task=quadrotor_any")


def test_help_begins_with_the_ten_options_that_matter_for_the_task():
    def listed(*arguments: str) -> tuple[list[str], str]:
        text = train.summarise([*arguments])
        return re.findall(r"^([\w.]+)=\S+ +# [A-Z].*\.$", text, re.MULTILINE), text

    options, text = listed("task=quadrotor_hover", "algorithm=ppo")
    assert options[:4] == ["policy", "algorithm", "task.airframe", "env_steps"]
    assert len(options) == 10
    assert re.search(r"^algorithm=ppo .* or with policy=mlp: bptt, grpo, td3\.$", text, re.MULTILINE)
    assert re.search(r"^late_10_ms +# .* 10 ms late\.$", text, re.MULTILINE)
    count = len(re.findall(r"^[\w.]+=", train.describe(["task=quadrotor_hover", "algorithm=ppo"]), re.MULTILINE))
    # the list has neither policy nor algorithm, and one line that begins with task=quadrotor_hover
    assert f"--help=all task=quadrotor_hover algorithm=ppo lists the other {count - 1 - 8} options" in text
    assert "demonstrations" not in options
    options, text = listed()
    assert {"task.tasks", "demonstrations"} <= {*options}
    assert len(options) == 10
    assert re.search(r"^Tasks: .*\blibero_pick, ", text, re.MULTILINE)
    assert "python train.py list=tasks" in text
    assert re.search(r"^official +# LIBERO's 50 official initial states", text, re.MULTILINE)


def test_the_configuration_is_printed_and_nothing_runs(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def printed(*arguments: str) -> dict:
        assert program.main(train.run, train.describe, ["task=quadrotor_hover", *arguments], train.composed) == 0
        return yaml.safe_load(capsys.readouterr().out)

    whole = printed("--cfg", "job", "seed=3")
    assert (whole["seed"], whole["task"]["name"]) == (3, "quadrotor_hover")
    assert printed("-c", "job", "-p", "task") == whole["task"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=0,1"], "expected one value of seed, got 0,1; write seed=[0,1] for a list, or -m for a run of each"),
        (["-m", "seed=0,1", "nosuch=3"], "unknown option 'nosuch'; expected one of num_envs, "),
        (["-m", "seed=0"], "-m needs at least one list"),
        (["--cfg", "all"], "invalid choice: 'all'"),
        (["--cfg", "job", "-p", "nosuch"], "unknown --package nosuch; expected one of "),
        (["-sc", "install=csh"], "expected -sc install=SHELL"),
        (["--nosuch"], "expected key=value, got '--nosuch'"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(capsys, arguments: list[str], message: str):
    assert program.main(train.run, train.describe, ["task=quadrotor_hover", *arguments], train.composed) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        (["record.py", "task=quadrotor_hover", "-p", "task"], "name", "quadrotor_hover"),
        (["record.py", "task=quadrotor_hover"], "robot", "simulation"),
        (["replay.py", "output=x.rrd"], "output", "x.rrd"),
    ],
)
def test_programs_for_recordings_have_the_flags_too(command: list[str], key: str, value: str):
    completed = run_program(*command, "--cfg", "job")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert yaml.safe_load(completed.stdout)[key] == value


def test_a_job_of_a_sweep_is_the_run_alone(tmp_path: Path):
    small = ["task=quadrotor_hover", "env_steps=400", "evaluation_starts=4", "evaluation_envs=4", "video=false"]
    small += ["task.step_limit=20", "threads=1", "num_envs=4", "policy.hidden=[8]", "evaluate_every_steps=null"]
    swept = run_program("train.py", "-m", *small, "seed=1,2", f"hydra.sweep.dir={tmp_path}")
    assert swept.returncode == 0, swept.stderr
    assert f"compare.py {tmp_path}/0 {tmp_path}/1" in swept.stdout
    assert run_program("train.py", *small, "seed=1", f"output={tmp_path}/alone").returncode == 0
    for part in ("0", "alone"):
        shutil.move(next((tmp_path / part / "checkpoint").glob("0*/policy.safetensors")), tmp_path / f"{part}.weights")
    assert (tmp_path / "0.weights").read_bytes() == (tmp_path / "alone.weights").read_bytes()


def test_a_missing_extra_is_one_line_that_names_it(tmp_path: Path):
    code = (
        "import sys; sys.modules['mujoco'] = None; import train; from embodied.command_line import program\n"
        "sys.exit(program.main(train.run, train.describe, sys.argv[1:]))"
    )
    completed = start("-c", code, *SMALL, f"output={tmp_path / 'run'}")
    assert completed.returncode == 1
    assert completed.stderr == "error: mujoco is not installed: pip install 'embodied-rl[libero]'\n"
    assert completed.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("num_envs=a", "num_envs: Value 'a' of type 'str' could not be converted to Integer"),
        ("num_env=3", "unknown option 'num_env'"),
        ("device=tpu", "unknown device 'tpu'"),
        ("threads=0", "threads=0: expected a number of at least 1"),
        ("threads=1000000", "threads from 1 to"),
        ("num_envs=10000000000", "out of memory, 80000000000 bytes were asked for; use a"),
        ("policy.hidden=1000000000", "out of memory"),
        ("task.suite=nope", "unknown LIBERO suite 'nope'"),
        ("task.tasks=[nope]", "unknown task 'nope' of libero_object"),
        ("task.tasks=[0,1]", "num_envs of at least 2, one per task"),
        ("task.assets=/nowhere", "assets=/nowhere: expected a folder"),
        ("task.suite=libero_spatial", "libero_spatial needs LIBERO's official assets"),
        ("task.executed=9", "executed=9, horizon=8"),
        ("task.episodes=0", "task.episodes=0: expected a number of at least 1"),
        ("output=/proc/run", "no folder can be made at /proc/run; choose another output"),
        ("resume=/nowhere", "no checkpoint in /nowhere"),
        ("resume=", "expected key=value, got 'resume='"),
        ("eval_only=true", "eval_only=true needs a run to evaluate: resume=DIR"),
    ],
)
def test_a_wrong_option_is_one_line_and_leaves_nothing(refused, tmp_path: Path, option: str, message: str):
    assert message in refused(train, *SMALL, f"output={tmp_path / 'run'}", option)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "option", "message"),
    [
        ("quadrotor_hover", "num_envs=1e10", "out of memory, 80000000000 bytes were asked for; use a"),
        ("quadrotor_hover", "policy.hidden=[1000000,1000000]", "4000000000000 bytes were asked for; use a smaller"),
        ("quadrotor_hover", "task.history=100000000", "history of at most step_limit=500 actions, got 100000000"),
        (
            "vehicle_navigate",
            "num_envs=1e10",
            "out of memory, 80000000000 bytes were asked for; use a",
        ),
        ("vehicle_race", "task.numbers.laps=2.7", "task.numbers.laps=2.7: expected a whole number"),
    ],
)
def test_sizes_that_no_machine_has_are_one_line_and_leave_nothing(refused, tmp_path: Path, task, option, message):
    assert message in refused(train, f"task={task}", "threads=1", f"output={tmp_path / 'run'}", option)
    assert not (tmp_path / "run").exists()


def test_parts_that_do_not_go_together_are_one_line_that_says_what_does(refused, tmp_path: Path):
    for parts in (
        ["task=quadrotor_any", "algorithm=ppo"],
        ["task=quadrotor_hover", "algorithm=ranking"],
        ["task=libero_pick", "policy=mlp"],
    ):
        line = refused(train, *parts, f"output={tmp_path / 'run'}")
        task = parts[0].removeprefix("task=")
        assert line.endswith(f"which takes {combinations.described(task)}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", [train, evaluate])
def test_cuda_that_is_not_here_is_one_line(refused, monkeypatch, finished: Path, tmp_path: Path, module):
    monkeypatch.setattr(torch.version, "cuda", None)
    options = [*SMALL, f"output={tmp_path / 'run'}"] if module is train else [f"checkpoint={finished}"]
    assert "device=cuda, but this PyTorch has no CUDA" in refused(module, *options, "device=cuda")
    assert not (tmp_path / "run").exists()


def test_an_output_that_holds_a_run_is_not_written_over(refused, copied: Path):
    before = files(copied)
    assert f"continue it with resume={copied}" in refused(train, *SMALL, f"output={copied}")
    assert files(copied) == before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("task.executed=2", "has task.executed=4, got 2; only env_steps may grow"),
        ("policy.width=32", "has policy.width=16, got 32"),
        ("seed=1", "has seed=0, got 1"),
        ("env_steps=90", "has env_steps=100, got 90"),
        ("algorithm=ppo", "the saved run has algorithm=ranking"),
    ],
)
def test_a_run_is_not_resumed_as_something_else(refused, copied: Path, option: str, message: str):
    before = files(copied)
    assert message in refused(train, f"resume={copied}", option)
    assert files(copied) == before


def test_evaluation_needs_a_checkpoint(refused, tmp_path: Path):
    assert "expected checkpoint=" in refused(evaluate)
    assert "no checkpoint in" in refused(evaluate, f"checkpoint={tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_checkpoint_names_the_one_before(refused, copied: Path):
    *_, before, newest = sorted((copied / "checkpoint").iterdir())
    broken = newest / "policy.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    for module, option in ((evaluate, "checkpoint"), (train, "resume")):
        line = refused(module, f"{option}={copied}")
        assert f"{newest} cannot be read" in line
        assert line.endswith(f"; use {before}")
    assert not (copied / "evaluation.json").exists()
    completed = run_program("train.py", f"resume={before}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert f"renamed to {newest}.aside" in completed.stderr
    assert "success [95% interval]" in completed.stdout
    assert checkpoint.load(copied).counters["stage"] == "done"


def test_a_run_is_measured_with_as_many_threads_as_it_was_trained_with(refused, monkeypatch, finished: Path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    for options, threads in (([], 1), (["threads=2"], 2)):
        assert "nowhere" in refused(evaluate, f"checkpoint={finished}", "distributions=[nowhere]", *options)
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("field", "value"), [("executed", 2), ("horizon", 16)])
def test_a_checkpoint_of_another_contract_is_not_evaluated(refused, copied: Path, field: str, value: int):
    path = max((copied / "checkpoint").iterdir()) / "checkpoint.json"
    record = json.loads(path.read_text())
    record["config"]["values"]["task"][field] = value
    sealed.write(path, record, record["files"])
    message = refused(evaluate, f"checkpoint={copied}")
    assert f"trained with another contract ({field}: expected" in message
    assert not (copied / "evaluation.json").exists()
