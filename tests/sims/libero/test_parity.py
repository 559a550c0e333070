"""The parity tool on generated recordings, and on stock LIBERO's if assets and recordings are available."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from sims.libero import parity
from sims.libero.assets import STAND_IN
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.scene import build_scene
from sims.libero.suite import WARM_UP, initial_states, load_tasks

ASSETS = os.environ.get("LIBERO_ASSETS")
TRACES = Path(ASSETS).parent / "libero_traces" if ASSETS else None


def record(path, gain=1.0, steps=12, episodes=2):
    """A recording in stock's format; `gain` other than 1 makes it one of another controller."""
    scene = build_scene(load_tasks("libero_object", [0])[0], STAND_IN)
    simulation = Simulation([scene] * episodes, sleep=False)
    for e, state in enumerate(initial_states(scene.task)[:episodes]):
        simulation.write(e, state[1 : 1 + scene.model.nq], state[1 + scene.model.nq :])
    ids, actions = np.arange(episodes), np.random.default_rng(0).uniform(-0.5, 0.5, (episodes, steps, 7))
    simulation.step(ids, np.zeros((episodes, 40, 7)), stop_on_success=False)
    starts = np.stack([np.concatenate(([0.0], data.qpos, data.qvel)) for data in simulation.data])
    for e, state in enumerate(starts):
        simulation.write(e, state[1 : 1 + scene.model.nq], state[1 + scene.model.nq :])
    warm_up = np.broadcast_to(WARM_UP, (episodes, *WARM_UP.shape))
    simulation.step(ids, warm_up, stop_on_success=False)
    rows = {name: [] for name in ("qpos", "qvel", "success", "gripper_action", "goal_orientation")}

    def note():
        rows["qpos"].append([data.qpos.copy() for data in simulation.data])
        rows["qvel"].append([data.qvel.copy() for data in simulation.data])
        rows["gripper_action"].append(simulation.memory["gripper"].copy())
        rows["goal_orientation"].append(simulation.memory["goal_orientation"].copy())

    note()
    for step in range(steps):
        scaled = actions[:, step : step + 1] * [gain, gain, gain, 1, 1, 1, 1]
        rows["success"].append(simulation.step(ids, scaled, stop_on_success=False)[1])
        note()
    stacked = {name: np.moveaxis(np.array(values), 0, 1) for name, values in rows.items()}
    np.savez(
        path,
        init_state=starts,
        actions=actions,
        qpos_after_warmup=stacked["qpos"][:, 0],
        qvel_after_warmup=stacked["qvel"][:, 0],
        qpos=stacked["qpos"][:, 1:],
        qvel=stacked["qvel"][:, 1:],
        gripper_action=stacked["gripper_action"],
        goal_orientation=stacked["goal_orientation"],
        success=stacked["success"],
        initial_joint=scene.initial_arm,
        body_pos=np.repeat(scene.model.body_pos[None], episodes, axis=0),
        body_quat=np.repeat(scene.model.body_quat[None], episodes, axis=0),
        body_names=np.array([scene.model.body(i).name for i in range(scene.model.nbody)]),
        bddl=np.array(scene.task.bddl.name),
    )
    return path


def test_our_own_recording_agrees(tmp_path):
    result = parity.measure(record(tmp_path / "own.npz"), STAND_IN, sleep=False)
    assert (result.replays, result.replays_agree) == (2, 2)
    assert result.steps_free + result.steps_contact == 24
    assert result.steps_free > 10
    assert result.step_error_free_max < 1e-8
    assert result.warm_up_error_max < 1e-12


def test_a_recording_that_began_elsewhere_is_noticed(tmp_path):
    path = record(tmp_path / "own.npz", steps=1)
    arrays = dict(np.load(path))
    arrays["initial_joint"][1] += 0.01  # state that stock's controller read first
    np.savez(path, **arrays)
    assert parity.measure(path, STAND_IN, sleep=False).warm_up_error_max > 1e-3


def test_another_controller_is_noticed(tmp_path):
    result = parity.measure(record(tmp_path / "other.npz", gain=0.9), STAND_IN, sleep=False)
    assert result.step_error_free_max > 1e-4


def test_a_recording_of_other_bodies_is_refused(tmp_path):
    path = record(tmp_path / "own.npz", steps=1)
    arrays = dict(np.load(path))
    arrays["body_names"][-1] = "teapot"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="teapot"):
        parity.measure(path, STAND_IN)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not an archive"])
def test_a_broken_recording_is_one_line(tmp_path, content):
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.npz: expected"):
        parity.measure(path, STAND_IN)


def test_a_recording_without_an_array_is_refused(tmp_path):
    np.savez(tmp_path / "part.npz", actions=np.zeros((1, 1, 7)))
    with pytest.raises(ValueError, match=r"part\.npz: expected an \.npz with init_state, actions"):
        parity.measure(tmp_path / "part.npz", STAND_IN)


def test_command_line_needs_official_assets(monkeypatch, capsys):
    monkeypatch.setattr(parity, "find_assets", lambda _: STAND_IN)
    with pytest.raises(SystemExit, match="official assets"):
        parity.main(["none.npz"])
    assert capsys.readouterr().out == ""


def test_a_missing_file_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(parity, "find_assets", lambda _: find_assets_official(tmp_path))
    with pytest.raises(SystemExit, match=r"error: .*none\.npz"):
        parity.main(["none.npz"])


def find_assets_official(root):
    return type(STAND_IN)(root, "official")


@pytest.mark.assets
@pytest.mark.skipif(TRACES is None or not TRACES.is_dir(), reason="needs LIBERO_ASSETS and the recordings beside it")
@pytest.mark.parametrize("name", ["libero_object_4", "random_libero_90_33", "random_libero_goal_0"])
def test_stock_libero_recordings(name, capsys):
    parity.main([str(TRACES / f"{name}.npz"), "--json", "--no-sleep"])
    (result,) = json.loads(capsys.readouterr().out)
    assert result["replays_agree"] == result["replays"]
    assert result["warm_up_error_max"] <= 1e-12
    assert result["step_error_free_max"] <= 1e-6
    assert result["step_error_contact_p99"] <= 1e-4
