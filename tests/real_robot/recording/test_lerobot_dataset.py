"""Recordings become LeRobot datasets, are read back and train; foreign datasets are read or clearly refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.video import write_video
from policies.mlp import MLPConfig
from real_robot.recording import lerobot_dataset
from real_robot.recording.data_sets import data_set_reading
from real_robot.recording.data_sets.matching import Match
from real_robot.recording.demonstrations import demonstrations
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Gap, Recording
from real_robot.robots.robot import Reading, SimulatedRobot
from real_robot.safety.safety import State, Verdict
from tests.embodied.reach import Reach

DT_S = 0.1
CONTRACT = Contract(
    {
        "joint_position": TensorSpec((3,), unit="rad", names=("shoulder", "elbow", "wrist")),
        "objects": TensorSpec((-1, 2), unit="m", frame="world", names=("x", "y")),
        "front": TensorSpec((24, 33, 3), "uint8"),
        "instruction": TensorSpec((4,), "int64"),
        "names": TensorSpec((-1, 2), "int64"),
        "mask": TensorSpec((-1,), "bool"),
        "force": TensorSpec((1,), privileged=True),
    },
    TensorSpec((2,), unit="rad/s", names=("shoulder", "elbow"), low=(-1.0, -1.0), high=(1.0, 1.0)),
    DT_S,
    horizon=4,
    executed=2,
)


def seen(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    picture = np.zeros((24, 33, 3), np.uint8) + np.uint8(40 + 20 * step)
    return {
        "joint_position": rng.normal(size=3).astype(np.float32),
        "objects": rng.normal(size=(2, 2)).astype(np.float32),
        "front": picture,
        "instruction": np.arange(4) + step,
        "names": np.full((2, 2), step),
        "mask": np.array([True, False]),
    }


def drive(recorder: Recorder, steps: range, *, first_s: float = 0.0) -> None:
    for step in steps:
        now_s = first_s + step * DT_S
        action = np.array([step / 10, -step / 10])
        verdict = Verdict(State.ACTIVE, action)
        recorder.write(now_s, Reading(seen(step), now_s - 0.01, step), action + 1, verdict, intervention=step == 1)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    with Recorder(tmp_path / "a.mcap", CONTRACT) as recorder:
        recorder.begin_episode("pick")
        drive(recorder, range(3))
        recorder.begin_episode("place")
        drive(recorder, range(5))
        recorder.write(0.5, Reading(seen(5), 0.5, 5), None, Verdict(State.HOLDING, None, "stale"))
        drive(recorder, range(6, 8))
        drive(recorder, range(8, 9), first_s=3 * DT_S)
        recorder._put(Gap(2))
        drive(recorder, range(9, 10), first_s=3 * DT_S)
    return Recording(tmp_path / "a.mcap")


LENGTHS = [3, 5, 2, 1, 1]
STEPS = [range(3), range(5), range(6, 8), range(8, 9), range(9, 10)]


def observed(episode: Episodes) -> TensorDict:
    """All its observations, pictures among them."""
    return episode.chunks(torch.arange(len(episode)), 1)["observation"]


def test_what_was_driven_comes_back(recording: Recording, tmp_path: Path):
    assert lerobot_dataset.write([recording], tmp_path / "data", robot="arm") == 5
    episodes = list(data_set_reading.read(tmp_path / "data", CONTRACT))
    assert [len(episode) for episode in episodes] == LENGTHS
    for steps, episode in zip(STEPS, episodes, strict=True):
        observation, actions = observed(episode), episode.actions
        assert episode.human.tolist() == [step == 1 for step in steps]
        assert torch.equal(actions, torch.tensor([[step / 10, -step / 10] for step in steps], dtype=torch.float32))
        for row, step in enumerate(steps):
            for key, value in seen(step).items():
                found = observation[key][row]
                assert found.dtype == torch.from_numpy(value).dtype
                if key == "front":
                    assert np.abs(found.numpy().astype(int) - value).max() <= 3  # a video
                else:
                    assert torch.equal(found, torch.from_numpy(value))


def test_the_files_are_those_of_the_format(recording: Recording, tmp_path: Path):
    directory = tmp_path / "data"
    lerobot_dataset.write([recording, recording], directory, robot="arm")
    info = json.loads((directory / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 10, "arm")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (10, 24, 2)
    assert info["splits"] == {"train": "0:10"}
    state = info["features"]["observation.state"]
    assert state["names"] == [
        "joint_position.shoulder",
        "joint_position.elbow",
        "joint_position.wrist",
        "objects[0].x",
        "objects[0].y",
        "objects[1].x",
        "objects[1].y",
    ]
    assert info["features"]["observation.images.front"]["shape"] == [24, 34, 3]
    rows = pq.read_table(directory / "data/chunk-000/file-000.parquet").to_pydict()
    assert rows["index"] == list(range(24))
    assert rows["episode_index"][:9] == [0] * 3 + [1] * 5 + [2]
    assert rows["frame_index"][:4] == [0, 1, 2, 0]
    assert np.allclose(rows["timestamp"][:4], [0.0, 0.1, 0.2, 0.0])
    assert rows["complementary_info.is_intervention"][:4] == [False, True, False, False]
    episodes = pq.read_table(directory / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["length"] for row in episodes] == LENGTHS * 2
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in episodes[:3]] == [(0, 3), (3, 8), (8, 10)]
    assert [row["tasks"] for row in episodes[:2]] == [["pick"], ["place"]]
    assert (directory / "videos/observation.images.front/chunk-000/file-009.mp4").exists()
    stats = json.loads((directory / "meta/stats.json").read_text())
    actions = np.array(rows["action"])
    expected = {"min": actions.min(0), "max": actions.max(0), "mean": actions.mean(0), "std": actions.std(0)}
    for name, share in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        expected[name] = np.quantile(actions, share, axis=0)
    assert stats["action"].keys() == {*expected, "count"}
    for name, values in expected.items():
        assert np.allclose(stats["action"][name], values), name
    first = np.array(rows["action"][:3])
    assert np.allclose(episodes[0]["stats/action/q90"], np.quantile(first, 0.9, axis=0))
    assert all({*expected, "count"} == stats[key].keys() for key in info["features"])
    assert stats["action"]["count"] == [24]
    assert np.shape(stats["observation.images.front"]["mean"]) == (3, 1, 1)


def test_elements_are_bound_by_name_and_units_are_checked(recording: Recording, tmp_path: Path):
    lerobot_dataset.write([recording], tmp_path / "data")
    turned = replace(
        CONTRACT,
        observation={
            "joint_position": TensorSpec((2,), unit="rad", names=("wrist", "shoulder")),
            "objects": TensorSpec((2, 2), unit="m", frame="world", names=("y", "x")),
        },
        action=replace(CONTRACT.action, names=("elbow", "shoulder")),
    )
    episode = next(data_set_reading.read(tmp_path / "data", turned))
    observation, actions = episode.observation, episode.actions
    assert torch.equal(observation["joint_position"][2], torch.from_numpy(seen(2)["joint_position"][[2, 0]]))
    assert torch.equal(observation["objects"][2], torch.from_numpy(seen(2)["objects"][:, [1, 0]]))
    assert torch.allclose(actions[2], torch.tensor([-0.2, 0.2]))
    wrong = replace(CONTRACT, observation={"joint_position": TensorSpec((3,), unit="deg")}, control_dt_s=0.05)
    with pytest.raises(ValueError, match=r"unit: expected 'deg', got 'rad'.*control_dt_s: expected 0\.05, got 0\.1"):
        list(data_set_reading.read(tmp_path / "data", wrong))


def test_chunks_never_reach_over_the_end_of_an_episode(recording: Recording, tmp_path: Path):
    lerobot_dataset.write([recording], tmp_path / "data")
    found = demonstrations(tmp_path / "data", CONTRACT, tmp_path / "run")
    chunks = found.chunks(torch.arange(len(found)), 4)
    assert chunks["actions"].shape == (12, 4, 2)
    expected = [min(4, length - start) for length in LENGTHS for start in range(length)]
    assert chunks["valid"].sum(1).tolist() == expected


def test_what_makes_no_dataset_is_reported(recording: Recording, tmp_path: Path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists"):
        lerobot_dataset.write([recording], tmp_path / "there")
    with Recorder(tmp_path / "b.mcap", replace(CONTRACT, control_dt_s=0.2)) as recorder:
        recorder.write(0.0, Reading(seen(0), 0.0, 0), None, Verdict(State.HOLDING, None, "no command"))
    with pytest.raises(ValueError, match="have different contracts"):
        lerobot_dataset.write([recording, Recording(tmp_path / "b.mcap")], tmp_path / "new")
    with pytest.raises(ValueError, match="no tick with both"):
        lerobot_dataset.write([Recording(tmp_path / "b.mcap")], tmp_path / "new")
    with Recorder(tmp_path / "c.mcap", CONTRACT) as recorder:
        for count in (1, 2):
            observation = seen(0) | {"objects": np.zeros((count, 2), np.float32)}
            recorder.write(count * DT_S, Reading(observation, 0.0, count), None, Verdict(State.ACTIVE, np.zeros(2)))
    with pytest.raises(ValueError, match="objects changes its shape"):
        lerobot_dataset.write([Recording(tmp_path / "c.mcap")], tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mcap", "b.mcap", "c.mcap", "there"]


@pytest.mark.parametrize("source", ["data", "a.mcap", "."])
def test_a_recording_trains_as_a_dataset_and_as_it_is(source: str, tmp_path: Path):
    """The demonstrator pushes to the origin as fast as it may; a policy that saw only the recording does, too."""
    robot = SimulatedRobot(Reach(1, executed=1, horizon=2, tasks=1), lambda _: np.zeros(1))
    with Recorder(tmp_path / "a.mcap", robot.contract, clock=robot.clock) as recorder:
        for start in range(22):
            reading = robot.reset(starts=torch.tensor([start]))
            recorder.begin_episode("to the origin")
            while robot.transition is None or not robot.transition.done:
                action = np.clip(-reading.observation["position"], -0.25, 0.25)
                now_s = robot.clock()
                robot.write(action)
                recorder.write(now_s, reading, action, Verdict(State.ACTIVE, action))
                reading = robot.read()
    if source == "data":
        lerobot_dataset.write([Recording(tmp_path / "a.mcap")], tmp_path / "data")
    env = Reach(4, executed=2, horizon=2, tasks=1)
    found = demonstrations(tmp_path / source, env.contract, tmp_path / "run")
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[32]).build(env.contract)
    policy.fit(found.observation, found.actions)
    before = evaluate(env, policy, starts_per_task=22)
    learner = SFTConfig(steps=300, batch=32).build(policy, torch.Generator().manual_seed(0))
    learner.fit(found, 300)
    after = evaluate(env, policy, starts_per_task=22)
    assert before.success.float().mean() < 0.2
    assert after.success.all()


def others(
    directory: Path, version: str, features: dict[str, Any], columns: dict[str, list], lengths: list[int]
) -> Path:
    """A dataset as LeRobot lays it out, without what is ours."""
    v3 = version == "v3.0"
    info = {
        "codebase_version": version,
        "fps": 10,
        "chunks_size": 1000,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        if v3
        else "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if v3
        else "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (directory / folder).mkdir(parents=True)
    (directory / "meta/info.json").write_text(json.dumps(info))
    numbers = [episode for episode, length in enumerate(lengths) for _ in range(length)]
    columns = columns | {"episode_index": numbers, "frame_index": [i for length in lengths for i in range(length)]}
    table = pa.table(columns)
    if v3:
        pq.write_table(table, directory / "data/chunk-000/file-000.parquet")
    else:
        for episode in range(len(lengths)):
            rows = table.filter(pa.array([number == episode for number in numbers]))
            pq.write_table(rows, directory / f"data/chunk-000/episode_{episode:06d}.parquet")
    return directory


WANTED = Contract(
    {
        "joint_position": TensorSpec((2,), unit="rad", names=("elbow", "shoulder")),
        "wrist": TensorSpec((8, 6, 3), "uint8"),
    },
    TensorSpec((2,), unit="rad", names=("elbow", "shoulder"), low=(-9.0, -9.0), high=(9.0, 9.0)),
    0.1,
)
NAMES = ["shoulder", "elbow", "gripper"]


def features(camera: str) -> dict[str, Any]:
    return {
        "observation.state": {"dtype": "float32", "shape": [3], "names": {"motors": NAMES}},
        "action": {"dtype": "float32", "shape": [2], "names": ["shoulder", "elbow"]},
        "observation.images.wrist": {"dtype": camera, "shape": [8, 6, 3], "names": ["height", "width", "channels"]},
    }


STATES = [[float(row), 10.0 + row, 20.0] for row in range(5)]
ACTIONS = [[float(row), -float(row)] for row in range(5)]


def _check(directory: Path, tolerance: int) -> None:
    match = Match(directory)
    episodes = list(data_set_reading.read(directory, WANTED, match))
    units = "joint_position in rad, action in rad"
    assert match.notes == [f"no units and frames; they are assumed to match the contract: {units}."]
    assert all(episode.success.item() == UNKNOWN for episode in episodes)
    assert [len(episode) for episode in episodes] == [2, 3]
    observation = torch.cat([observed(episode) for episode in episodes])
    assert observation["joint_position"].tolist() == [[10.0 + row, float(row)] for row in range(5)]
    actions = torch.cat([episode.actions for episode in episodes])
    assert actions.tolist() == [[-float(row), float(row)] for row in range(5)]
    expected = torch.arange(5).view(5, 1, 1, 1) * 40 + 20
    assert (observation["wrist"].int() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_videos_of_others_are_read_with_a_note(tmp_path: Path, version: str):
    directory = others(
        tmp_path / "d", version, features("video"), {"observation.state": STATES, "action": ACTIONS}, [2, 3]
    )
    frames = (np.zeros((5, 8, 6, 3), np.uint8) + (np.arange(5) * 40 + 20).reshape(5, 1, 1, 1)).astype(np.uint8)
    if version == "v3.0":  # both episodes in one file
        path = directory / "videos/observation.images.wrist/chunk-000/file-000.mp4"
        path.parent.mkdir(parents=True)
        write_video(path, frames, 10)
        place = {f"videos/observation.images.wrist/{name}": [0, 0] for name in ("chunk_index", "file_index")}
        place |= {"videos/observation.images.wrist/from_timestamp": [0.0, 0.2], "episode_index": [0, 1]}
        pq.write_table(pa.table(place), directory / "meta/episodes/chunk-000/file-000.parquet")
    else:
        for episode, rows in enumerate((frames[:2], frames[2:])):
            path = directory / f"videos/chunk-000/observation.images.wrist/episode_{episode:06d}.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_video(path, rows, 10)
    _check(directory, tolerance=3)


def test_pictures_of_others_are_read(tmp_path: Path):
    cells = []
    for row in range(5):
        Image.fromarray(np.full((8, 6, 3), row * 40 + 20, np.uint8)).save(tmp_path / "a.png")
        cells.append({"bytes": (tmp_path / "a.png").read_bytes(), "path": "a.png"})
    columns = {"observation.state": STATES, "action": ACTIONS, "observation.images.wrist": cells}
    _check(others(tmp_path / "d", "v2.1", features("image"), columns, [2, 3]), tolerance=0)


def test_what_a_dataset_of_others_tells_beside_is_kept(tmp_path: Path):
    more = {
        "next.reward": ("float32", [0.0, 1.0, 0.5, 0.0, 0.25]),
        "next.success": ("bool", [False, True] + 3 * [False]),
    }
    more["complementary_info.is_intervention"] = ("bool", [True] + 4 * [False])
    specs = {key: {"dtype": dtype, "shape": [1], "names": None} for key, (dtype, _) in more.items()}
    columns = {"observation.state": STATES, "action": ACTIONS} | {key: values for key, (_, values) in more.items()}
    directory = others(tmp_path / "d", "v3.0", features("video") | specs, columns, [2, 3])
    first, second = data_set_reading.read(directory, _without(WANTED, "wrist"))
    assert (first.reward.tolist(), second.reward.tolist()) == ([0.0, 1.0], [0.5, 0.0, 0.25])
    assert (first.human.tolist(), second.human.tolist()) == ([True, False], [False] * 3)
    assert (first.success.item(), second.success.item()) == (SUCCEEDED, FAILED)


def _without(contract: Contract, key: str) -> Contract:
    return replace(contract, observation={name: spec for name, spec in contract.observation.items() if name != key})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, control_dt_s=0.05), "rate: expected 20 Hz, got 10 Hz"),
        (
            lambda c: replace(c, action=TensorSpec((2,), names=("x", "y"))),
            "expected elements x, y, got shoulder, elbow",
        ),
        (lambda c: replace(c, observation={"imu": TensorSpec((3,))}), "imu: expected a feature imu or observation.imu"),
        (lambda c: replace(c, observation={"state": TensorSpec((4,))}), r"state: expected \(4,\), got \(3,\)"),
    ],
)
def test_what_does_not_fit_is_reported_with_what_is_there(
    tmp_path: Path, change: Callable[[Contract], Contract], message: str
):
    columns = {"observation.state": STATES, "action": ACTIONS}
    directory = others(tmp_path / "d", "v2.1", features("video"), columns, [2, 3])
    with pytest.raises(ValueError, match=message) as refused:
        list(data_set_reading.read(directory, change(_without(WANTED, "wrist"))))
    assert "it has observation.state (3,) ['shoulder', 'elbow', 'gripper']" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_dataset_is_reported(recording: Recording, tmp_path: Path):
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match="is no LeRobot dataset"):
        demonstrations(tmp_path / "data", CONTRACT, tmp_path / "run")
    directory = others(tmp_path / "d", "v1.6", features("video"), {"observation.state": STATES}, [2, 3])
    with pytest.raises(ValueError, match=r"has format v1\.6; expected one of v2\.0, v2\.1, v3\.0"):
        demonstrations(directory, WANTED, tmp_path / "run")
    (tmp_path / "data").rmdir()
    lerobot_dataset.write([recording], tmp_path / "data")
    video = tmp_path / "data/videos/observation.images.front/chunk-000/file-001.mp4"
    write_video(video, np.zeros((2, 24, 34, 3), np.uint8), 10)
    with pytest.raises(ValueError, match="expected 5 frames from 0 on"):
        list(data_set_reading.read(tmp_path / "data", CONTRACT))
    shutil.rmtree(tmp_path / "data/data")
    with pytest.raises(ValueError, match="cannot read the data"):
        list(data_set_reading.read(tmp_path / "data", CONTRACT))


@pytest.mark.parametrize("store", list(lerobot_dataset.Store))
def test_collected_episodes_become_a_dataset_and_come_back(tmp_path: Path, store: lerobot_dataset.Store):
    """Once as they were collected, once as they were read from a dataset, with their pictures encoded."""
    contract = replace(CONTRACT, horizon=1, executed=1)
    made, lengths = [], (3, 2)
    for task, length in enumerate(lengths):
        rows = [
            {key: torch.from_numpy(value) for key, value in seen(3 * task + step).items()} for step in range(length)
        ]
        reward = torch.arange(length).float()
        actions = torch.arange(2.0 * length).view(length, 2) / 10 - task
        observation = torch.stack([TensorDict(row) for row in rows])
        made.append(Episodes.of(observation, actions, reward=reward, success=task == 1, task_index=task))
    with EpisodeWriter(tmp_path / "first", contract, {"tasks": ["pick_it", "place_it"]}) as writer:
        for episode in made:
            writer.add(episode)
    source = tmp_path / "first"
    for turn in range(2):
        directory = tmp_path / f"data{turn}"
        lerobot_dataset.main([str(source), str(directory), f"pictures={store.value}"])
        info = json.loads((directory / "meta/info.json").read_text())
        assert info["features"]["observation.images.front"]["dtype"] == store.value
        assert (info["video_path"] is None) == (store.value == "image")
        stats = json.loads((directory / "meta/stats.json").read_text())
        assert stats["action"]["min"] == pytest.approx(torch.cat([each.actions for each in made]).amin(0).tolist())
        assert stats["observation.images.front"]["mean"][0][0][0] == pytest.approx(80 / 255, abs=0.02)
        assert np.shape(stats["observation.images.front"]["q99"]) == (3, 1, 1)
        tasks = pq.read_table(directory / "meta/tasks.parquet").to_pydict()["__index_level_0__"]
        assert tasks == (["pick it", "place it"] if turn == 0 else [""])
        found = list(data_set_reading.read(directory, contract))
        for one, other in zip(found, made, strict=True):
            assert torch.equal(one.actions, other.actions)
            assert torch.equal(one.reward, other.reward)
            assert one.success.item() == other.success.item()
            for key, value in observed(one).items():
                tolerance = 6 if key == "front" and store.value == "video" else 0
                assert (value.float() - other.observation[key].float()).abs().max() <= tolerance
        with EpisodeWriter(source := tmp_path / f"second{turn}", contract) as writer:
            for episode in found:
                writer.add(episode)


def test_unknown_rewards_are_no_feature_of_a_dataset(tmp_path: Path):
    contract = replace(CONTRACT, horizon=1, executed=1)
    rows = [{key: torch.from_numpy(value) for key, value in seen(step).items()} for step in range(2)]
    episode = Episodes.of(torch.stack([TensorDict(row) for row in rows]), torch.zeros(2, 2), success=None)
    with EpisodeWriter(tmp_path / "episodes", contract) as writer:
        writer.add(episode)
    lerobot_dataset.write_episodes(tmp_path / "episodes", tmp_path / "data", pictures=lerobot_dataset.Store.IMAGE)
    features = json.loads((tmp_path / "data/meta/info.json").read_text())["features"]
    assert "action" in features
    assert not {"next.reward", "next.success"} & features.keys()
    (found,) = data_set_reading.read(tmp_path / "data", contract)
    assert found.reward.isnan().all()


def test_what_cannot_be_exported_is_refused(tmp_path: Path, recording: Recording):
    with pytest.raises(ValueError, match="cannot read episodes from"):
        lerobot_dataset.main([str(tmp_path), str(tmp_path / "new")])
    for wrong in (["a"], ["a.mcap", "b", "pictures=gif"], ["pictures=image"]):
        with pytest.raises(ValueError, match=r"expected SOURCE\.\.\. DATASET \[pictures=video\|image\]"):
            lerobot_dataset.main(wrong)
    with pytest.raises(ValueError, match="expected recordings, or one folder of episodes"):
        lerobot_dataset.main([str(tmp_path), str(tmp_path), "new"])


def test_what_a_run_collected_is_read_in_another_with_its_pictures(recording: Recording, tmp_path: Path):
    """Pictures stay encoded; those that lie there as numbers are encoded, without loss; they go together, too."""
    lerobot_dataset.write([recording], tmp_path / "data", pictures=lerobot_dataset.Store.IMAGE)
    first = demonstrations(tmp_path / "data", CONTRACT, tmp_path / "first")
    whole = observed(first)
    with EpisodeWriter(tmp_path / "raw", CONTRACT, {"tasks": ["pick"]}) as writer:
        force = torch.arange(12.0)[:, None]
        writer.add(replace(first, observation=whole.copy().update({"force": force}), pictures=None))
    for source in ("first", "raw"):
        again = demonstrations(tmp_path / source, CONTRACT, tmp_path / f"from_{source}")
        assert (observed(again).select(*whole.keys()) == whole).all()
        assert ("force" in again.observation) == (source == "raw")  # for the critic
        assert (again.actions == first.actions).all()
    both = demonstrations([tmp_path / "first", tmp_path / "raw"], CONTRACT, tmp_path / "both")
    assert (observed(both) == torch.cat((whole, whole))).all()
    small = replace(CONTRACT, observation=CONTRACT.observation | {"front": TensorSpec((12, 12, 3), "uint8")})
    with pytest.raises(UserError, match=r"does not serve the contract: .*'front' shape: expected \(12, 12, 3\), got"):
        demonstrations(tmp_path / "raw", small, tmp_path / "small")


def test_what_is_damaged_is_named_on_one_line(recording: Recording, tmp_path: Path):
    for store in lerobot_dataset.Store:
        lerobot_dataset.write([recording], tmp_path / store.value, pictures=store)

    def info(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        path = folder / "meta/info.json"
        change(found := json.loads(path.read_text()))
        path.write_text(json.dumps(found))

    def row(folder: Path, **values: Any) -> None:
        rows = pq.read_table(path := folder / "data/chunk-000/file-000.parquet").to_pylist()
        pq.write_table(pa.Table.from_pylist([rows[0] | {}, rows[1] | values, *rows[2:]]), path)

    def empty(folder: Path) -> None:
        path = folder / "data/chunk-000/file-000.parquet"
        pq.write_table(pq.read_table(path).slice(0, 0), path)

    front, unplaced = "observation.images.front", "does not tell video_path"
    state = "expected joint_position.elbow in observation.state"
    undecoded, lost = f"{front}: cannot decode a picture: cannot identify image file;", f"{front} lacks pictures in"
    vague, infinite = "does not tell dtype and shape of action", "infinity or not a number in action, from row 0 on"
    cases: list[tuple[str, str, Callable[[Path], Any]]] = [
        ("image", state, lambda at: info(at, lambda found: found.update(features={}))),
        ("image", vague, lambda at: info(at, lambda found: found["features"]["action"].pop("dtype"))),
        ("image", "cannot read .*contract.json", lambda at: (at / "meta/contract.json").write_text("{")),
        ("image", undecoded, lambda at: row(at, **{front: {"bytes": b"x"}})),
        ("image", lost, lambda at: row(at, **{front: {"bytes": None}})),
        ("image", infinite, lambda at: row(at, action=[0.0, float("nan")])),
        ("image", "has no episodes", empty),
        ("video", unplaced, lambda at: info(at, lambda found: found.update(video_path=None))),
        ("video", "file-000.mp4: there is no such file$", lambda at: shutil.rmtree(at / "videos")),
    ]
    for number, (store, expected, damage) in enumerate(cases):
        damage(shutil.copytree(tmp_path / store, folder := tmp_path / f"case{number}"))
        with pytest.raises(UserError, match=expected) as raised:
            demonstrations(folder, CONTRACT, tmp_path / "run")
        assert "\n" not in str(raised.value)
