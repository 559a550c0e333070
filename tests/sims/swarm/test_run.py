"""A swarm as a user trains, films, measures and exports it."""

import json
from pathlib import Path

from embodied.export.network import PRESENT
from tests.programs import run_program


def run(program: str, *options: str) -> str:
    completed = run_program(program, *options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_a_swarm_learns_is_filmed_measured_and_exported(tmp_path: Path):
    directory = tmp_path / "swarm"
    small = ["num_envs=16", "env_steps=1500", "evaluation_starts=10", "evaluation_envs=8", "task.step_limit=40"]
    run("train.py", "task=quadrotor_swarm", *small, "algorithm.rollout_length=20", f"output={directory}")
    rows = json.loads((directory / "report.json").read_text())["evaluations"]
    whole = {row["distribution"]: row["episodes"] for row in rows}
    assert whole == {"density_20": 16, "drones_16": 16, "drones_32": 32}  # ten starts fill worlds
    for row in rows:
        assert {"collision_free", "world_collision_free", "hit_drone", "hit_obstacle", "hit_room"} <= row.keys()
        hit = row["hit_drone"] + row["hit_obstacle"] + row["hit_room"]
        assert abs(row["collision_free"] + hit - 1.0) < 1e-6
    for name in ("trajectories.png", "video.mp4"):
        assert (directory / name).stat().st_size > 1000
    shown = run("evaluate.py", f"checkpoint={directory}", "episodes=8", "num_envs=5", "threads=1", "render=true")
    assert "collision_free" in shown
    assert (directory / "evaluation.mp4").stat().st_size > 1000
    run("export.py", f"checkpoint={directory}", "target=c")
    contract = json.loads((directory / "export" / "c" / "contract.json").read_text())
    assert contract["observation"]["neighbours"]["names"][-1] == PRESENT
    assert "force" not in contract["observation"]
