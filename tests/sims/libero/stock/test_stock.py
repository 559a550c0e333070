"""Our policies in stock LIBERO itself: `make test-stock`, which makes its virtual environment.

Other runs skip this file, as nothing else installs packages; with CI_STOCK=required nothing is skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate
import train
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert
from sims.libero.physics.backend import LiberoSim
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask
from sims.remote.task import in_processes

pytestmark = pytest.mark.skipif(os.environ.get("CI_STOCK") != "required", reason="needs stock LIBERO: make test-stock")
STATE = ("joint_position", "end_effector_position", "end_effector_rotation", "gripper_position", "gripper_command")
OBJECTS = ("object_position", "object_rotation")
EXACT = ("object_names", "object_mask", "instruction")
START = 3


@pytest.fixture(scope="module", autouse=True)
def official():
    assert find_assets().kind == "official", "stock LIBERO needs its official assets; set LIBERO_ASSETS"


def pair(suite: str, index: int):
    """Our simulator and stock's, of one task, after LIBERO's warm-up from the same official initial state."""
    task = load_tasks(suite, [index])
    ours = LiberoEnvironment(task, 1, distribution="official", split="eval", executed=4)
    options = {"suite": suite, "tasks": [str(index)], "sim": LiberoSim.stock}
    stock = in_processes(LiberoTask(**options)).environment(8, "official", "eval")
    starts = torch.tensor([START])
    return ours, stock, ours.reset(starts=starts), stock.reset(starts=starts)


def assert_close(ours, stock, tolerance: float) -> None:
    for name in (*STATE, *OBJECTS):
        torch.testing.assert_close(stock[name], ours[name], rtol=0, atol=tolerance, msg=name)
    for name in EXACT:
        assert torch.equal(stock[name], ours[name])


def grasp(env: LiberoEnvironment) -> list[np.ndarray]:
    """What our expert does to the end of the task, in chunks."""
    expert, chunks, success = Expert(env.simulation), [], False
    while not success and len(chunks) < 60:
        chunk = []
        for _ in range(env.contract.executed):
            chunk.append(expert.act(np.arange(1)))
            success |= bool(env.simulation.step(np.arange(1), chunk[-1][:, None], stop_on_success=False)[1][0])
        chunks.append(np.stack(chunk, 1))
    return chunks


def test_stock_shows_and_judges_what_we_do():
    """Same contract, start, observation and motion; an expert's open-loop grasp succeeds there as it does here."""
    ours, stock, here, there = pair("libero_object", 0)
    assert stock.contract == ours.contract
    assert (stock.num_envs, stock.step_limit, stock.num_starts) == (1, 280, 50)
    assert stock.instructions == ours.instructions
    assert_close(here, there, 2e-5)  # our simulator's sleep
    chunks = grasp(ours)
    starts = torch.tensor([START])
    ours.reset(starts=starts)
    for number, chunk in enumerate(chunks):
        here, there = ours.step(torch.from_numpy(chunk)), stock.step(torch.from_numpy(chunk))
        if number < 4:
            assert_close(here.observation, there.observation, 1e-4)
            assert not there.done.any()
        if there.done.any():
            break
    assert there.terminated.all()
    assert there.success.all()
    assert here.success.all()
    assert float(there.reward.sum()) == 1.0
    assert int(there.executed.sum()) <= 4
    frozen = stock.step(torch.from_numpy(chunks[0]))
    assert not frozen.executed.any()
    ours.close(), stock.close()


def test_fixtures_are_where_ours_are():
    ours, stock, here, there = pair("libero_goal", 0)
    assert_close(here, there, 2e-5)
    movable = len(ours.scenes[0].objects)
    fixtures = here["object_position"][0, movable : movable + len(ours.scenes[0].fixtures)]
    nominal = ours.scenes[0].model.body_pos[[fixture.body for fixture in ours.scenes[0].fixtures]]
    assert (fixtures - torch.from_numpy(nominal)).abs().max() > 1e-4  # not where every model has them
    ours.close(), stock.close()


def test_a_run_is_evaluated_and_compared(tmp_path: Path):
    run = tmp_path / "run"
    small = ["task.tasks=[0]", "num_envs=2", "env_steps=100", "evaluation_starts=1", "evaluation_envs=1", "threads=1"]
    sizes = ["policy.width=16", "policy.hidden=32", "sft.steps=20", "algorithm=ppo", "algorithm.rollout_length=4"]
    train.run(
        ["task=libero_pick", "task.step_limit=160", "video=false", "control=false", *small, *sizes, f"output={run}"]
    )
    evaluate.run([f"checkpoint={run}", "sim=stock", "episodes=2", "task.step_limit=8", "task.processes=1"])
    record = json.loads((run / "evaluation.json").read_text())
    assert (record["task"]["sim"], record["assets"]) == ("stock", "official")
    (row,) = [each for each in record["evaluations"] if each["distribution"] == "official"]
    assert (row["episodes"], row["step_limit"], row["per_task"][0]["mean_steps"]) == (2, 8, 8.0)
    evaluate.run([f"checkpoint={run}", "sim=[mujoco,stock]", "episodes=2", "task.step_limit=8"])
    report = json.loads((run / "sim_to_sim.json").read_text())
    assert [row["back_end"] for row in report["back_ends"]] == ["mujoco", "stock"]
    assert report["distribution"] == "official"
    assert report["back_ends"][1]["gap"]["episodes"] == 2
