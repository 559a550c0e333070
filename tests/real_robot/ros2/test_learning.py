"""train.py on a vehicle over ROS 2, which sim_node plays behind safety_node: a person takes over, judges and stops."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from embodied.data.store import EpisodeStore
from embodied.saving import checkpoint
from real_robot.ros2.processes import Processes
from tests.test_record import Program, Typist, program


def stored(run: Path) -> EpisodeStore:
    """Replay of the newest checkpoint."""
    store = EpisodeStore(100_000)
    store.load_state_dict(checkpoint.load(run).state["parts"]["learner"]["replay"])
    return store


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_until(running: Program, run: Path, name: str, above: float) -> None:
    """Wait until the metric `name` of an iteration is `above` a value."""
    for _ in range(1200):
        assert running.process.poll() is None, running.process.stdout.read()
        if (run / "metrics.jsonl").exists() and any(row.get(name, 0.0) > above for row in logged(run)):
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} stayed below {above}: {logged(run)}")


def test_a_vehicle_learns_while_a_person_takes_over_and_stops(
    navigating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    limits = tmp_path / "limits.yaml"
    limits.write_text("observation_timeout_s: 1.0\ncommand_timeout_s: 1.0\nrecovery_s: 0.2\n")
    row = {"checkpoint": str(navigating), "robot": "diff_drive", "options": {"rate_hz": 10.0}}
    common = row | {"use_sim_time": True, "limits": str(limits)}
    run = tmp_path / "run"
    options = ["task=vehicle_navigate", "robot=diff_drive", "robot.options.rate_hz=10", "robot.simulated_time=true"]
    options += [
        f"robot.limits={limits}",
        "robot.waits=false",
        "robot.step_limit=30",
        "policy=squashed",
        "algorithm=sac",
    ]
    options += ["algorithm.warmup=100000", "algorithm.rollout_length=5", "env_steps=100000", "overlap=false"]
    with Processes(tmp_path) as nodes:
        nodes.start("sim_node", row | {"lock_step": False, "start": 5})
        nodes.start("safety_node", common | {"heartbeat_timeout_s": 1.0, "liveliness_s": 1.0})
        for name in ("sim_node", "safety_node"):
            nodes.change(name, "configure", "activate")
        monkeypatch.setenv("ROS_DOMAIN_ID", str(nodes.domain))
        with program(*options, f"output={run}", "threads=1", name="train.py") as person:
            wait_until(person, run, "step", 5)
            with Typist(person, "w"):
                wait_until(person, run, "rollout/human_share", 0.9)
            person.type("\x1b")
            person.wait("the episode ends after .* steps: stopped by a person")
            person.wait(r"the robot stopped \(stopped by a person\): success or go continues")
            count = logged(run)[-1]["step"]
            person.type("\n")
            wait_until(person, run, "step", count + 5)
            person.process.send_signal(signal.SIGINT)
            person.end()
    assert "Stopped and saved" in person.said
    store = stored(run)
    decisions = store.decisions(torch.arange(store.written))
    assert int(decisions["executed"].sum()) == logged(run)[-1]["step"]
    human = decisions["human"]
    assert int(human.sum()) >= 5
    driven = decisions["actions"][human]
    assert (driven[:, 0] > 0.0).all()  # "w" drives forward
