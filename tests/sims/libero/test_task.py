"""LIBERO tasks: environments, and demonstrations that belong to exactly this task."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

from embodied.data.episodes import FOLDER, EpisodeWriter, read
from embodied.environments.latency import LatencyConfig, with_latency
from embodied.task import evaluation_distributions
from policies.encoders.libero import missing
from policies.flow import FlowConfig
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask

pytestmark = pytest.mark.assets
ASSETS = os.environ.get("LIBERO_ASSETS") or "stand-in"


def task(**settings) -> LiberoTask:
    return LiberoTask(**({"tasks": ["0"], "assets": ASSETS, "episodes": 1, "noise": 0.0} | settings))


def test_training_is_cut_short_and_evaluation_is_not():
    train, held_out = (task().environment(2, "wide", split) for split in ("train", "eval"))
    assert (train.step_limit, held_out.step_limit) == (140, 280)
    assert task(step_limit=99, train_step_limit=9).environment(2, "wide", "train").step_limit == 9
    assert (train.num_starts, task().environment(2, "official", "eval").num_starts) == (None, 50)


def test_training_starts_from_the_distribution_that_is_asked_for(tmp_path: Path):
    areas = task(starts="areas")
    assert areas.distributions == ("areas", "official")
    areas.demonstrations(tmp_path, 0)
    with pytest.raises(ValueError, match="starts: expected wide, got areas"):
        task().demonstrations(tmp_path, 0)
    with pytest.raises(ValueError, match=r"unknown task\.starts=official; expected one of wide, areas"):
        task(starts="official")


def test_a_policy_that_sees_is_filmed(tmp_path: Path):
    seeing = task(images=["agentview"], image_size=8, joints=False, step_limit=8)
    env = seeing.environment(2, "wide", "train")
    policy = FlowConfig().build(env.contract)
    policy.fit(env.reset(), torch.randn(4, 7))
    seeing.video(tmp_path / "film.mp4", {"new": policy}, "cpu")
    assert (tmp_path / "film.mp4").stat().st_size > 1000


def test_tasks_go_by_number_or_name_and_are_all_of_the_suite_by_default():
    names = [each.name for each in load_tasks("libero_object")]
    assert task(tasks=["3", names[1]]).environment(2, "wide", "train").task_names == (names[3], names[1])
    assert task(tasks=[]).environment(10, "wide", "train").task_names == tuple(names)
    with pytest.raises(ValueError, match="unknown task 'nope' of libero_object"):
        task(tasks=["nope"]).environment(1, "wide", "train")


def test_pictures_are_of_the_contract_and_hide_where_objects_are():
    seen = task(images=["robot0_eye_in_hand"], image_size=16)
    contract = seen.contract("wide")
    assert {name for name in contract.observation if "image" in name} == {"wrist_image"}
    assert contract.observation["wrist_image"].shape == (16, 16, 3)
    privileged = {name for name, spec in contract.observation.items() if spec.privileged}
    assert privileged == {"object_position", "object_rotation", "object_names", "object_mask"}
    assert not any(spec.privileged for spec in task().contract("wide").observation.values())
    assert "object_position" in missing(contract)  # no actor may read it
    env = seen.environment(1, "wide", "eval")
    assert env.contract == contract
    assert env.reset()["wrist_image"].shape == (1, 16, 16, 3)
    with pytest.raises(ValueError, match="unknown images: front; expected some of agentview, robot0_eye_in_hand"):
        task(images=["front"]).contract("wide")
    with pytest.raises(ValueError, match=r"image_size=0: expected a number of at least 1 and of at most 4096"):
        task(image_size=0)


def test_with_latency_a_task_is_measured_in_the_same_words():
    late = with_latency(task(), LatencyConfig(observation_s=[0.0, 0.1]))
    assert evaluation_distributions(late) == ("wide", "official", "official:bddl", "official:held_out")


def test_only_policies_that_see_are_measured_by_words_that_are_held_out():
    assert task(images=["agentview"]).variants == ("official:bddl", "official:held_out", "official:held_out_words")


def test_demonstrations_are_made_once(tmp_path: Path):
    made = task().demonstrations(tmp_path, 0)
    written = (tmp_path / FOLDER).stat().st_mtime_ns
    read = task().demonstrations(tmp_path, 0)
    assert (tmp_path / FOLDER).stat().st_mtime_ns == written
    assert torch.equal(made.actions, read.actions)
    assert made.actions.shape == (len(made), 7)
    assert 30 < len(made) < 280


def test_damaged_demonstrations_are_refused_and_made_again_unchanged(tmp_path: Path):
    made = task().demonstrations(tmp_path, 0)
    actions = made.actions.clone()
    path = tmp_path / FOLDER / "actions.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    message = rf"{FOLDER}: actions\.npy is damaged.*; delete .*{FOLDER} to make them again"
    with pytest.raises(ValueError, match=message) as caught:
        task().demonstrations(tmp_path, 0)
    assert "\n" not in str(caught.value)
    shutil.rmtree(tmp_path / FOLDER)
    assert torch.equal(task().demonstrations(tmp_path, 0).actions, actions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["1"]}, "tasks: expected"),
        ({"episodes": 2}, "episodes: expected 2, got 1"),
        ({"noise": 0.1}, "noise: expected 0.1, got 0.0"),
        ({"step_limit": 200}, "step_limit: expected 200, got 280"),
    ],
)
def test_demonstrations_of_something_else_are_refused(tmp_path: Path, change: dict, message: str):
    task().demonstrations(tmp_path, 0)
    with pytest.raises(ValueError, match=f"made for something else .*{message}") as caught:
        task(**change).demonstrations(tmp_path, 0)
    assert "\n" not in str(caught.value)


def test_demonstrations_of_another_contract_are_refused(tmp_path: Path):
    task().demonstrations(tmp_path, 0)
    found, contract, origin = read(tmp_path / FOLDER)
    shutil.rmtree(tmp_path / FOLDER)  # mapped data stays valid
    with EpisodeWriter(tmp_path / FOLDER, dataclasses.replace(contract, control_dt_s=0.02), origin) as writer:
        writer.add(found)
    with pytest.raises(ValueError, match=r"control_dt_s: expected 0\.05, got 0\.02"):
        task().demonstrations(tmp_path, 0)
