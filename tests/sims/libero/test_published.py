"""LIBERO as others publish it, in LeRobot's format: what was seen comes back, and what does not fit is refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mujoco
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import train
from embodied.data.pictures import encode
from embodied.errors import UserError
from embodied.evaluation.video import write_video
from embodied.training import built_run
from real_robot.recording.demonstrations import demonstrations
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert
from sims.libero.published import axis_angle as published_axis_angle
from sims.libero.published import rotation
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask, Observations

SIZE, LONG = 16, 6
IMAGE, WRIST, STATE = "observation.images.image", "observation.images.image2", "observation.state"
CAMERAS = {IMAGE: "agentview_image", WRIST: "wrist_image"}
TASK = LiberoTask(
    tasks=["6"], assets="stand-in", images=["agentview", "robot0_eye_in_hand"], image_size=SIZE, joints=False
)
PUBLISHED = replace(TASK, observations=Observations.PUBLISHED)
TEXT = load_tasks("libero_object", [6])[0].language
OTHER = "open the middle drawer of the cabinet"


@pytest.fixture(scope="module")
def seen():
    """Observations before each of the expert's first actions, those actions, and the hand's rotation matrices."""
    env = LiberoEnvironment(
        load_tasks("libero_object", [6]), 1, horizon=1, executed=1, assets="stand-in", threads=1, image_size=SIZE
    )
    observation, expert, model = env.reset(starts=torch.zeros(1).long()), Expert(env.simulation), env.scenes[0].model
    rows, actions, hands, data = [], [], [], mujoco.MjData(model)
    for step in range(LONG):
        action = torch.from_numpy(expert.act()).float()
        action[:, 6] = 1.0 if step > 2 else -1.0
        data.qpos[:] = env.simulation.data[0].qpos
        mujoco.mj_kinematics(model, data)
        rows.append(observation[0].clone())
        actions.append(action[0])
        hands.append(data.body("robot0_right_hand").xquat.copy())
        observation = env.step(action[:, None]).observation
    env.close()
    return torch.stack(rows), torch.stack(actions), np.stack(hands)


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """As robosuite has it: up to 2 pi."""
    angle = 2.0 * np.arccos(np.clip(quaternion[0], -1.0, 1.0))
    return quaternion[1:] / np.sqrt(1.0 - quaternion[0] ** 2) * angle


def publish(folder: Path, seen, *, videos=False, rate=10, texts=(TEXT, OTHER), **changes) -> Path:
    """Two episodes, of `texts`, in the layout of lerobot/libero; `changes` replace columns of the rows."""
    observation, actions, hands = seen
    fingers = observation["gripper_position"].numpy()
    turned = np.stack([axis_angle(hand) for hand in hands])
    state = np.concatenate((observation["end_effector_position"].numpy(), turned, fingers), 1).astype(np.float32)
    pictures = {name: observation[key].numpy()[:, :, ::-1] for name, key in CAMERAS.items()}
    columns = {
        STATE: [*state, *state],
        "action": [*actions.numpy(), *-actions.numpy()],
        "index": [*range(2 * LONG)],
        "frame_index": [*range(LONG)] * 2,
        "episode_index": [0] * LONG + [1] * LONG,
        "task_index": [0] * LONG + [1] * LONG,
    }
    motors = ["x", "y", "z", "axis_angle1", "axis_angle2", "axis_angle3"]
    shown = {"dtype": "video" if videos else "image", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channel"]}
    features = {name: shown for name in CAMERAS} | {
        STATE: {"dtype": "float32", "shape": [8], "names": {"motors": [*motors, "gripper", "gripper"]}},
        "action": {"dtype": "float32", "shape": [7], "names": {"motors": [*motors, "gripper"]}},
    }
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in columns if "index" in name}
    places = {"episode_index": [0, 1]}
    for name, frames in pictures.items():
        if videos:
            path = folder / f"videos/{name}/chunk-000/file-000.mp4"
            path.parent.mkdir(parents=True)
            write_video(path, np.concatenate((frames, frames)), rate)
            places |= {f"videos/{name}/{part}": [0, 0] for part in ("chunk_index", "file_index")}
            places[f"videos/{name}/from_timestamp"] = [0.0, LONG / rate]
        else:
            columns[name] = [{"bytes": encode(frame), "path": "frame.png"} for frame in [*frames, *frames]]
    for key, value in changes.items():
        columns[key.replace("__", ".")] = value
    columns = {key: [v.tolist() if isinstance(v, np.ndarray) else v for v in values] for key, values in columns.items()}
    for part in ("meta/episodes/chunk-000", "data/chunk-000"):
        (folder / part).mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "data/chunk-000/file-000.parquet", row_group_size=4)
    pq.write_table(pa.table(places), folder / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": texts}), folder / "meta/tasks.parquet")
    info = {
        "codebase_version": "v3.0",
        "fps": rate,
        "chunks_size": 1000,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def published_env(**changes) -> LiberoEnvironment:
    """The environment of `seen` with observations as openpi, LeRobot and OpenVLA-OFT evaluate with."""
    return LiberoEnvironment(
        load_tasks("libero_object", [6]),
        1,
        distribution="official",
        horizon=1,
        executed=1,
        assets="stand-in",
        threads=1,
        **{"image_size": SIZE, "convention": PUBLISHED.convention()} | changes,
    )


def test_observations_at_run_time_are_those_of_the_published_evaluations():
    """The state by robosuite's formula, from MuJoCo's quaternion of the hand as it is, after ten steps."""
    env, ours = published_env(), published_env(convention=None)
    start = torch.zeros(1).long()
    observation, model = env.reset(starts=start), env.scenes[0].model
    ours.reset(starts=start)
    no_operation = torch.tensor([[[0.0] * 6 + [-1.0]]])
    for _ in range(10 - 5):  # ours waits for five steps, these evaluations for ten
        native = ours.step(no_operation).observation
    assert not torch.equal(env.step(no_operation).observation["state"], observation["state"])
    torch.testing.assert_close(native["gripper_position"], observation["gripper_position"])
    data, angles = mujoco.MjData(model), []
    observation = env.reset(starts=start)
    turn = torch.tensor([[[0.0, 0.2, -0.1, 0.4, -0.3, 0.7, 1.0]]])
    for step in range(40):
        data.qpos[:] = env.simulation.data[0].qpos
        mujoco.mj_kinematics(model, data)
        quaternion = data.body("robot0_right_hand").xquat
        arm = [data.joint(f"robot0_joint{number}").qpos[0] for number in range(1, 8)]
        np.testing.assert_allclose(observation["joint_position"][0].numpy(), arm, atol=1e-6)
        fingers = [data.joint(f"gripper0_finger_joint{number}").qpos[0] for number in (1, 2)]
        hand = data.site("gripper0_grip_site").xpos
        expected = np.concatenate((hand, axis_angle(quaternion), fingers))
        np.testing.assert_allclose(observation["state"][0].numpy(), expected, atol=2e-5)
        angles.append(np.linalg.norm(expected[3:6]))
        observation = env.step(turn * (1.0 if step < 20 else -1.0)).observation
    assert min(angles) < np.pi < max(angles)  # the sign of the quaternion does not change where the angle passes pi
    env.close()
    ours.close()


def test_of_two_quaternions_the_one_with_a_positive_x_is_taken():
    """Also of small turns, whose largest element is w: -0.6 rad about x is 2 pi - 0.6 rad."""
    matrices = torch.from_numpy(rotation(np.array([[-0.6, 0.0, 0.0], [0.6, 0.0, 0.0], [-0.3, 0.4, 0.0]])))
    far = 2 * np.pi - 0.5
    expected = torch.tensor([[2 * np.pi - 0.6, 0.0, 0.0], [0.6, 0.0, 0.0], [0.6 * far, -0.8 * far, 0.0]])
    torch.testing.assert_close(published_axis_angle(matrices), expected.double())


def test_pictures_at_run_time_are_stock_s_turned_by_half_a_turn():
    env, native = published_env(), published_env(convention=None)
    start = torch.zeros(1).long()
    turned = env.reset(starts=start)
    native.reset(starts=start)
    for _ in range(5):
        upright = native.step(torch.tensor([[[0.0] * 6 + [-1.0]]])).observation
    for key in CAMERAS.values():
        stock = upright[key][0].numpy()[::-1]  # stock's first row is the bottom
        np.testing.assert_array_equal(turned[key][0].numpy(), stock[::-1, ::-1])
    env.close()
    native.close()


def test_the_contract_of_published_checkpoints_differs_and_lets_critics_alone_read_our_poses():
    own, published = TASK.contract("wide"), PUBLISHED.contract("wide")
    actors = [key for key, spec in published.observation.items() if not spec.privileged]
    assert actors == ["agentview_image", "wrist_image", "state", "instruction"]
    assert published.observation["state"].shape == (8,)
    assert own.observation.keys() <= published.observation.keys()
    assert any("camera" in row for row in own.differences(published))  # mirrored pictures are not taken for ours
    assert published.action == own.action


def test_a_dataset_and_the_expert_serve_a_run_with_published_observations(tmp_path: Path, seen):
    observation, _, hands = seen
    folder = publish(tmp_path / "d", seen)
    rows = read(folder, PUBLISHED).chunks(torch.arange(LONG), 1)["observation"]
    state = np.stack([axis_angle(hand) for hand in hands])
    torch.testing.assert_close(rows["state"][:, 3:6], torch.from_numpy(state).float())
    torch.testing.assert_close(rows["state"][:, :3], observation["end_effector_position"])
    torch.testing.assert_close(rows["agentview_image"], observation["agentview_image"].flip(2))
    task = replace(PUBLISHED, step_limit=280)
    expert = task.demonstrations(tmp_path / "run", 0).chunks(torch.arange(3), 1)["observation"]
    assert expert["state"].shape == (3, 8)
    assert expert["state"][:, 3].min() > 0.0


def read(folder: Path, task: LiberoTask = TASK):
    return demonstrations(folder, task.contract("wide"), folder.with_name("run"), task)


@pytest.mark.parametrize("videos", [False, True])
def test_what_was_seen_comes_back(tmp_path: Path, seen, videos: bool):
    observation, actions, _ = seen
    for _ in range(2):  # the second time from the run's folder
        episodes = read(
            publish(tmp_path / "d", seen, videos=videos) if not (tmp_path / "d").exists() else tmp_path / "d"
        )
        assert episodes.ends.tolist() == [LONG]  # the other episode is of no task of this run
        torch.testing.assert_close(episodes.actions, actions)
        found = episodes.chunks(torch.arange(LONG), 1)["observation"]
        for key in ("end_effector_position", "end_effector_rotation", "gripper_position", "gripper_command"):
            torch.testing.assert_close(found[key], observation[key], atol=2e-5, rtol=0, msg=lambda m, key=key: key + m)
        assert bytes(found["instruction"][0].tolist()).rstrip(b"\0").decode() == TEXT
        for key in CAMERAS.values():
            difference = (found[key].int() - observation[key].int()).abs().float()
            assert difference.mean() < (10.0 if videos else 1e-9)
            assert difference.mean() < (found[key].flip(2).int() - observation[key].int()).abs().float().mean()


def test_larger_pictures_are_reduced_and_joints_are_read_where_they_are(tmp_path: Path, seen):
    folder = publish(tmp_path / "d", seen)
    info = json.loads((folder / "meta/info.json").read_text())
    joints = "observation.states.joint_state"
    info["features"][joints] = {"dtype": "float32", "shape": [7], "names": None}
    (folder / "meta/info.json").write_text(json.dumps(info))
    path = folder / "data/chunk-000/file-000.parquet"
    values = [*seen[0]["joint_position"].tolist()] * 2
    pq.write_table(pq.read_table(path).append_column(joints, pa.array(values)), path)
    episodes = read(folder, replace(TASK, image_size=SIZE // 4, joints=True))
    found = episodes.chunks(torch.arange(LONG), 1)["observation"]
    torch.testing.assert_close(found["joint_position"], seen[0]["joint_position"])
    blocks = seen[0]["wrist_image"].reshape(LONG, SIZE // 4, 4, SIZE // 4, 4, 3).float().mean((2, 4))
    assert (found["wrist_image"].float() - blocks).abs().max() <= 0.51


def refused(folder: Path, task: LiberoTask = TASK) -> str:
    with pytest.raises(UserError) as error:
        read(folder, task)
    assert "\n" not in str(error.value)
    assert not folder.with_name("run").joinpath("demonstrations.json").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"joints": True}, "joint_position: not in such datasets; task.joints=false leaves joints to critics"),
        ({"images": []}, "task.images=[agentview,robot0_eye_in_hand] leaves objects to critics"),
        ({"image_size": 12}, "expected pictures of 12x12, or of a multiple, got 16x16; choose another image_size"),
        ({"tasks": ["5", "6"]}, f"which has: {TEXT}; {OTHER}; choose task.tasks=[...]"),
    ],
)
def test_a_run_that_it_does_not_serve_is_refused(tmp_path: Path, seen, change, message: str):
    assert message in refused(publish(tmp_path / "d", seen), replace(TASK, **change))


def test_other_meanings_are_refused(tmp_path: Path, seen):
    odd = [[0.0] * 6 + [1.0]] * (2 * LONG)
    assert "it never opens" in refused(publish(tmp_path / "a", seen, action=odd))
    assert "rate: expected 10 or 20 Hz, got 30 Hz" in refused(publish(tmp_path / "b", seen, rate=30))
    folder = publish(tmp_path / "c", seen)
    info = folder / "meta/info.json"
    info.write_text(info.read_text().replace("image2", "left"))
    assert "wrist_image: expected a feature observation.images.image2 or" in refused(folder)
    short = [[0.0] * 6] * (2 * LONG)
    assert "action is not of shape [7]" in refused(publish(tmp_path / "e", seen, action=short))
    other = publish(tmp_path / "f", seen, action=short)
    info = other / "meta/info.json"
    info.write_text(info.read_text().replace("[7]", "[6]"))
    assert "action: expected 7 elements as in lerobot/libero, got (6,)" in refused(other)


def test_damaged_files_are_refused(tmp_path: Path, seen):
    folder = publish(tmp_path / "a", seen)
    path = folder / "data/chunk-000/file-000.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "cannot read the data of" in refused(folder)
    cells = [{"bytes": b"nothing", "path": ""}] * (2 * LONG)
    assert "cannot decode a picture" in refused(publish(tmp_path / "b", seen, observation__images__image=cells))
    assert "rows out of order" in refused(publish(tmp_path / "c", seen, frame_index=[*range(2 * LONG)][::-1]))
    lost = publish(tmp_path / "d", seen)
    (lost / "meta/tasks.parquet").unlink()
    assert "cannot read the tasks in" in refused(lost)
    bare = publish(tmp_path / "e", seen)
    pq.write_table(pq.read_table(path := bare / "data/chunk-000/file-000.parquet").drop([WRIST]), path)
    assert f"lacks {WRIST}; it has" in refused(bare)


@pytest.mark.parametrize("policy", ["flow", "pi0"])
def test_a_run_learns_from_it(tmp_path: Path, seen, monkeypatch, policy: str):
    """The objects that the flow policy's critic reads, which no such dataset has, come from random play."""
    monkeypatch.setattr(built_run, "first_decisions", partial(built_run.first_decisions, count=8))
    options = ["task.tasks=['6']", "task.assets=stand-in", "task.images=[agentview,robot0_eye_in_hand]"]
    options += [f"task.image_size={SIZE}", "task.joints=false", "task.step_limit=4", "stages=[sft]", "num_envs=1"]
    options += ["sft.steps=2", "sft.batch=2", "evaluation_envs=1", "evaluation_starts=1", "video=false"]
    source, run = publish(tmp_path / "d", seen), tmp_path / "run"
    arguments = ["task=libero_pick", f"policy={policy}", f"demonstrations={source}", f"output={run}", *options]
    train.run([*arguments, "algorithm=ppo", "threads=1"])
    assert (run / "report.md").exists()
    assert [json.loads(line)["sft/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
