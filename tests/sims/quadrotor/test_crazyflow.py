"""Hover in crazyflow itself: `make test-crazyflow`, which makes its virtual environment.

Other runs skip what needs it, as nothing else installs packages; with CI_CRAZYFLOW=required nothing is skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import evaluate
import train
from embodied.errors import UserError
from sims.quadrotor.crazyflow.interpreter import crazyflow_python
from sims.quadrotor.task import HoverSim, HoverTask
from sims.remote.task import in_processes

ROOT = Path(__file__).parents[3]
NEEDED = pytest.mark.skipif(os.environ.get("CI_CRAZYFLOW") != "required", reason="needs crazyflow: make test-crazyflow")
CHECK = """
import sys, torch
from sims.quadrotor.physics.airframes import AIRFRAMES
from sims.quadrotor.crazyflow.environment import CrazyflowEnvironment
from sims.quadrotor.environment import QuadrotorEnvironment
airframe = AIRFRAMES[sys.argv[1]]
options = {"split": "eval", "airframe": airframe}
ours, theirs = QuadrotorEnvironment(6, **options), CrazyflowEnvironment(6, effects=False, **options)
starts, generator = torch.arange(6) + 5, torch.Generator().manual_seed(0)
first, other = ours.reset(starts=starts), theirs.reset(starts=starts)
for key, value in first.items():
    assert torch.equal(value, other[key]), key
for step in range(15):
    action = airframe.hover_action + 0.1 * torch.randn(6, 1, 4, generator=generator)
    here, there = ours.step(action), theirs.step(action)
for key, value in here.observation.items():
    limit = 1e-5 + 2e-3 * (value - first[key]).abs().max()
    assert (value - there.observation[key]).abs().max() < limit, key
assert (here.reward - there.reward).abs().max() < 1e-3
"""


def test_a_given_interpreter_is_used_and_training_refused():
    task = HoverTask(sim=HoverSim.crazyflow, python="/nowhere/bin/python")
    assert in_processes(task).options.python == "/nowhere/bin/python"
    with pytest.raises(UserError, match="crazyflow only evaluates"):
        task.environment(1, "disturbed", "train")
    assert HoverTask(sim=HoverSim.crazyflow).contract("disturbed") == HoverTask().contract("disturbed")


@NEEDED
@pytest.mark.parametrize("airframe", ["crazyflie", "crazyflie_21"])
def test_without_its_own_effects_it_flies_as_ours_does(airframe: str):
    """Frames, signs, units and the order of rotors are the same in both, for random actions."""
    command = [crazyflow_python(), "-c", CHECK, airframe]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


@NEEDED
def test_a_policy_is_compared_on_the_same_starts(tmp_path: Path):
    run = tmp_path / "run"
    train.run(["task=quadrotor_hover", "env_steps=100_000", "evaluation_starts=8", "video=false", f"output={run}"])
    evaluate.run([f"checkpoint={run}", "sim=[own,crazyflow]", "episodes=8", "task.step_limit=100"])
    (path,) = run.glob("sim_to_sim.json")
    report = json.loads(path.read_text())
    assert [row["back_end"] for row in report["back_ends"]] == ["own", "crazyflow"]
    assert report["back_ends"][1]["gap"]["episodes"] == 8
