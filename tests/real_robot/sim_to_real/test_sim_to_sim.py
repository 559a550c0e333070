"""`evaluate.py sim=...`: a policy in other simulators than that of its training, on the same initial states."""

import json
import shutil
from pathlib import Path

import pytest

import evaluate
import train
from embodied.task import check_sims
from sims.quadrotor.task import HoverTask

FEW = ("episodes=3", "num_envs=3", "threads=1")


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("cartpole") / "run"
    small = ["env_steps=2000", "num_envs=8", "task.step_limit=30", "video=false", "evaluation_starts=2", "threads=1"]
    train.run(["task=mjcf_cartpole", *small, "evaluation_envs=2", f"output={run}"])
    return run


def test_simulators_are_compared_on_the_same_initial_states(cartpole: Path, tmp_path: Path):
    run = Path(shutil.copytree(cartpole, tmp_path / "run"))
    evaluate.run([f"checkpoint={run}", *FEW, "sim=mjwarp"])
    alone = json.loads((run / "evaluation.json").read_text())
    assert alone["task"]["sim"] == "mjwarp"
    evaluate.run([f"checkpoint={run}", *FEW, "sim=[mujoco,mjwarp]"])
    report = json.loads((run / "sim_to_sim.json").read_text())
    mujoco, warp = report["back_ends"]
    assert (mujoco["back_end"], warp["back_end"]) == ("mujoco", "mjwarp")
    assert (report["episodes"], report["distribution"]) == (3, "own")
    assert warp["summary"] == {key: alone["evaluations"][0][key] for key in warp["summary"]}
    assert 0.0 < warp["action_discrepancy"]["max"] < 1e-2  # the same starts, in single precision
    assert warp["gap"]["episodes"] == 3
    assert "From one simulator to another" in (run / "sim_to_sim.md").read_text()
    assert (run / "sim_to_sim.png").exists()
    assert not (run / "sim_to_real.json").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["sim=stock"], "mjcf_cartpole does not run in sim=stock; expected one of mujoco, mjwarp"),
        (["sim=[mujoco,moon]"], "mjcf_cartpole does not run in sim=moon; expected one of mujoco, mjwarp"),
        (["sim=[mujoco,mujoco]"], "expected different simulators in sim, got mujoco, mujoco"),
    ],
)
def test_what_a_task_does_not_run_in_is_refused(cartpole: Path, options: list[str], expected: str):
    with pytest.raises(ValueError, match=expected):
        evaluate.run([f"checkpoint={cartpole}", *FEW, *options])
    assert not (cartpole / "sim_to_sim.json").exists()


def test_a_quadrotor_is_not_flown_in_stock_libero():
    with pytest.raises(ValueError, match="quadrotor_hover does not run in sim=stock; expected one of own, crazyflow"):
        check_sims(HoverTask(name="quadrotor_hover"), ["stock"])
