"""Data sets of others are matched with a run: texts with tasks, names with the contract, rates and limits."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied.command_line.config import compose
from embodied.contract import Contract, TensorSpec
from embodied.data.demonstrations import folder_of, notes
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes, EpisodeWriter, read
from embodied.errors import UserError
from real_robot.recording import lerobot_dataset
from real_robot.recording.data_sets.data_set_reading import source_of
from real_robot.recording.data_sets.matching import MatchOptions, match_options, resampled_reward, resampled_rows
from real_robot.recording.demonstrations import demonstrations, sources
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict
from sims.gym.task import GymTask
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask
from tests.real_robot.recording.test_lerobot_dataset import others
from train import GROUPS, TrainConfig

MOTORS = ["shoulder_pan.pos", "elbow_flex.pos"]
WANTED = Contract(
    {"joint_position": TensorSpec((2,), unit="rad", names=("pan", "elbow"))},
    TensorSpec((2,), unit="rad", names=("pan", "elbow"), low=(-2.0, -2.0), high=(2.0, 2.0)),
    0.1,
)
RENAMED = MatchOptions(names={"joint_position": "observation.state", "pan": MOTORS[0], "elbow": MOTORS[1]})


def dataset(
    folder: Path,
    actions: np.ndarray,
    *,
    success: list[bool | None] | None = None,
    names: Any = MOTORS,
    further: dict[str, Any] | None = None,
    **columns: list[Any],
) -> Path:
    """A LeRobot data set of two episodes of equal length, whose states are `actions` less 1."""
    size = actions.shape[1]
    features: dict[str, Any] = {
        key: {"dtype": "float32", "shape": [size], "names": names} for key in ("observation.state", "action")
    }
    features |= further or {}
    columns |= {"observation.state": (actions - 1).tolist(), "action": actions.tolist()}
    if success is not None:
        features["next.success"] = {"dtype": "bool", "shape": [1], "names": None}
        columns["next.success"] = success
    return others(folder, "v3.0", features, columns, [len(actions) // 2] * 2)


def ramp(scale: float = 1.0) -> np.ndarray:
    return scale * np.stack((np.linspace(-1.5, 1.5, 12), np.linspace(1.0, -1.0, 12)), 1)


def test_motors_are_renamed_and_read_in_the_contracts_order(tmp_path: Path):
    folder = dataset(tmp_path / "d", ramp()[:, ::-1], names=MOTORS[::-1])
    with pytest.raises(UserError, match=r"expected elements pan, elbow, got .*demonstration_names=\{OURS:THEIRS\}"):
        demonstrations(folder, WANTED, tmp_path / "run")
    episodes = demonstrations(folder, WANTED, tmp_path / "run", options=RENAMED)
    torch.testing.assert_close(episodes.actions, torch.from_numpy(ramp()).float())
    torch.testing.assert_close(episodes.observation["joint_position"], torch.from_numpy(ramp() - 1).float())
    (note,) = notes(tmp_path / "run")
    assert note.endswith("are assumed to match the contract: joint_position in rad, action in rad.")
    with pytest.raises(UserError, match="demonstration_names has wrist; expected names of the contract: joint_pos"):
        demonstrations(folder, WANTED, tmp_path / "other", options=MatchOptions(names={"wrist": "x"}))


def test_named_motors_train_a_gymnasium_task(tmp_path: Path):
    """As typed: Pendulum observes three numbers as "observation" and has one torque."""
    names = "demonstration_names={observation:observation.state,action_0:torque}"
    command = ["task=gym", names, "demonstration_resampling=true"]
    config, _ = compose(TrainConfig, "train", command, GROUPS)
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "speed"]},
        "action": {"dtype": "float32", "shape": [1], "names": ["torque"]},
    }
    columns = {"observation.state": np.eye(3)[np.arange(4) % 3].tolist(), "action": [[0.5]] * 4}
    folder = others(tmp_path / "d", "v2.1", features, columns, [2, 2])
    options = match_options(config.demonstration_tasks, config.demonstration_names, config.demonstration_resampling)
    task = GymTask()
    contract = task.contract(task.distributions[0])
    episodes = demonstrations(folder, contract, tmp_path / "run", task, options=options)
    ratio = 10 * contract.control_dt_s
    assert episodes.steps == 2 * math.ceil(2 / ratio)


def test_degrees_are_refused_for_radians(tmp_path: Path):
    degrees = dataset(tmp_path / "d", ramp(57.3))
    with pytest.raises(
        UserError, match=r"d: 100\.0% of the actions are .* pan is from -85\.95 to 85\.95, expected -2 to 2"
    ):
        demonstrations(degrees, WANTED, tmp_path / "run", options=RENAMED)
    assert not (tmp_path / "run").exists()


def test_few_actions_outside_the_limits_are_noted(tmp_path: Path):
    actions = np.tile(ramp(), (10, 1))
    actions[5, 1] = 2.5
    demonstrations(dataset(tmp_path / "d", actions), WANTED, tmp_path / "run", options=RENAMED)
    assert notes(tmp_path / "run")[-1].startswith(f"{tmp_path / 'd'}: 0.8% of the actions are")
    actions[::10, 1] = 2.5
    with pytest.raises(UserError, match=r"10\.\d% of the actions"):
        demonstrations(dataset(tmp_path / "e", actions), WANTED, tmp_path / "other", options=RENAMED)


@pytest.mark.parametrize("rate_hz", [30, 4])
def test_another_rate_is_resampled_if_asked(tmp_path: Path, rate_hz: int):
    folder = dataset(tmp_path / "d", ramp(), success=[False] * 5 + [True] + [False] * 6)
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(info | {"fps": rate_hz}))
    with pytest.raises(UserError, match=rf"expected 10 Hz, got {rate_hz} Hz; demonstration_resampling=true"):
        demonstrations(folder, WANTED, tmp_path / "run", options=RENAMED)
    episodes = demonstrations(folder, WANTED, tmp_path / "run", options=replace(RENAMED, resampling=True))
    rows = [0, 3] if rate_hz == 30 else [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 5]
    torch.testing.assert_close(episodes.part(0, 1).actions, torch.from_numpy(ramp()[rows]).float())
    assert episodes.success.tolist() == [SUCCEEDED, FAILED]  # its row is not among those that are kept
    assert f"{folder}: {rate_hz} Hz; its rows are skipped or repeated for 10 Hz." in notes(tmp_path / "run")


def test_our_own_data_sets_are_resampled_too(tmp_path: Path):
    with Recorder(tmp_path / "a.mcap", WANTED) as recorder:
        for step in range(6):
            reading = Reading({"joint_position": np.full(2, step / 10, np.float32)}, 0.1 * step, step)
            recorder.write(0.1 * step, reading, None, Verdict(State.ACTIVE, np.full(2, step / 10)))
    lerobot_dataset.write([Recording(tmp_path / "a.mcap")], tmp_path / "data")
    slow = replace(WANTED, control_dt_s=0.2)
    with pytest.raises(UserError, match=r"control_dt_s.*demonstration_resampling=true"):
        demonstrations(tmp_path / "data", slow, tmp_path / "run")
    episodes = demonstrations(tmp_path / "data", slow, tmp_path / "run", options=MatchOptions(resampling=True))
    assert episodes.actions[:, 0].tolist() == pytest.approx([0.0, 0.2, 0.4])


def test_rewards_keep_their_sum_at_another_rate():
    reward = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert resampled_rows(5, 2.0).tolist() == [0, 2, 4]
    assert resampled_reward(reward, 2.0).tolist() == [3.0, 7.0, 5.0]
    assert resampled_rows(2, 0.5).tolist() == [0, 0, 1, 1]
    assert resampled_reward(reward[:2], 0.5).tolist() == [0.5, 0.5, 1.0, 1.0]
    assert resampled_rows(1, 3.0).tolist() == [0]
    assert resampled_reward(reward[:1], 3.0).tolist() == [1.0]


@pytest.mark.parametrize("success", [[False] * 12, [False] * 11 + [True]])
def test_failed_episodes_of_a_data_set_are_not_imitated(tmp_path: Path, success: list[bool]):
    folder = dataset(tmp_path / "d", ramp(), success=success)
    episodes = demonstrations(folder, WANTED, tmp_path / "run", options=RENAMED)
    if not any(success):
        with pytest.raises(UserError, match=r"all 2 episodes of .* failed; imitation needs others"):
            episodes.sample(200, 1, torch.Generator().manual_seed(0))
        return
    assert episodes.success.tolist() == [FAILED, SUCCEEDED]
    drawn = episodes.sample(200, 1, torch.Generator().manual_seed(0))["actions"][:, 0, 0].unique()
    assert drawn.tolist() == pytest.approx(ramp()[6:, 0].tolist())


TASK = LiberoTask(tasks=["3"], assets="stand-in")
SUITE = load_tasks("libero_object", range(10))


def test_missing_outcomes_of_a_data_set_are_unknown(tmp_path: Path):
    folder = dataset(tmp_path / "d", ramp(), success=[None] * 6 + [False] * 5 + [True])
    episodes = demonstrations(folder, WANTED, tmp_path / "run", None, options=RENAMED)
    assert episodes.success.tolist() == [UNKNOWN, SUCCEEDED]
    assert episodes.terminated.tolist() == [False, True]


def test_outcomes_of_episodes_are_true_false_or_unknown(tmp_path: Path):
    folder = dataset(tmp_path / "d", ramp())
    place = folder / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pa.table({"episode_index": [0, 1], "success": [1.0, math.nan]}), place)
    episodes = demonstrations(folder, WANTED, tmp_path / "run", None, options=RENAMED)
    assert episodes.success.tolist() == [SUCCEEDED, UNKNOWN]
    pq.write_table(pa.table({"episode_index": [0, 1], "success": ["yes", "no"]}), place)
    with pytest.raises(UserError, match="in success of episode 0, got 'yes'"):
        demonstrations(folder, WANTED, tmp_path / "another", None, options=RENAMED)


@pytest.mark.parametrize(("values", "read"), [([None, 3], [math.nan, 3.0]), ([0.5, 1.0], [0.5, 1.0])])
def test_numbers_of_a_column_are_those_of_the_file(tmp_path: Path, values: list, read: list[float]):
    further = {"cost": {"dtype": "int64", "shape": [1], "names": None}}
    folder = dataset(tmp_path / "d", ramp(), further=further, cost=values * 6)
    options = replace(RENAMED, columns={"cost": "cost"})
    signals = demonstrations(folder, WANTED, tmp_path / "run", None, options=options).signals
    assert signals is not None
    np.testing.assert_equal(signals["cost"].numpy(), np.float32(read * 6))


def test_numbers_that_do_not_fit_their_type_are_reported(tmp_path: Path):
    further = {"cost": {"dtype": "uint8", "shape": [1], "names": None}}
    folder = dataset(tmp_path / "d", ramp(), further=further, cost=[300] * 12)
    with pytest.raises(UserError, match=r"cost is not of shape .* and uint8"):
        demonstrations(folder, WANTED, tmp_path, None, options=replace(RENAMED, columns={"cost": "cost"}))


def test_a_data_set_is_not_mixed_with_itself(tmp_path: Path):
    folder = str(dataset(tmp_path / "d", ramp()))
    with pytest.raises(UserError, match="names a folder twice"):
        sources([folder, folder + "/"], None)


@pytest.mark.parametrize("text", ['{"task_index": 0}', "no JSON"])
def test_damaged_texts_of_tasks_give_one_line(tmp_path: Path, text: str):
    folder = dataset(tmp_path / "d", ramp())
    (folder / "meta/tasks.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=r"cannot read the tasks in .*tasks\.jsonl"):
        _ = source_of(folder).tasks


def test_damaged_rows_give_one_line_where_a_contract_is_derived(tmp_path: Path):
    folder = dataset(tmp_path / "d", ramp())
    (folder / "data/chunk-000/file-000.parquet").write_bytes(b"no rows")
    with pytest.raises(UserError, match="cannot read the data of"):
        source_of(folder).column("action")


def test_rows_that_a_broken_download_lacks_are_noted(tmp_path: Path):
    folder = dataset(tmp_path / "d", ramp())
    place = folder / "meta/info.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"total_frames": 18}))
    demonstrations(folder, WANTED, tmp_path / "run", None, options=RENAMED)
    assert any("only 12 of the 18 rows" in note for note in notes(tmp_path / "run"))


def test_a_folder_of_episodes_states_its_rate(tmp_path: Path):
    first = demonstrations(dataset(tmp_path / "d", ramp()), WANTED, tmp_path / "run", None, options=RENAMED)
    with EpisodeWriter(tmp_path / "folder", WANTED) as writer:
        writer.add(first)
    with pytest.raises(UserError, match="states 10 Hz; leave out demonstration_rate_hz=50"):
        demonstrations(tmp_path / "folder", WANTED, tmp_path / "b", None, options=MatchOptions(rate_hz=50.0))


def spoken(folder: Path, texts: list[str], form: str) -> Path:
    """An episode for each of `texts`, as a recording, a data set or a run's folder; all actions are its number / 10."""
    contract = TASK.contract("wide")
    contract = replace(contract, observation={k: v for k, v in contract.observation.items() if not v.is_text})
    folder.parent.mkdir(exist_ok=True)
    with Recorder(folder.with_suffix(".mcap"), contract) as recorder:
        for number, text in enumerate(texts):
            recorder.begin_episode(text)
            seen = {
                key: np.zeros([abs(size) for size in spec.shape], spec.dtype)
                for key, spec in contract.observation.items()
                if not spec.privileged
            }
            verdict = Verdict(State.ACTIVE, np.full(7, number / 10))
            recorder.write(float(number), Reading(seen, float(number), number), None, verdict)
    if form == "recording":
        return folder.with_suffix(".mcap")
    lerobot_dataset.write([Recording(folder.with_suffix(".mcap"))], folder)
    return folder


def matched(folder: Path, task: LiberoTask = TASK, **options: Any) -> Episodes:
    contract = task.contract("wide")
    contract = replace(contract, observation={k: v for k, v in contract.observation.items() if not v.is_text})
    return demonstrations(folder, contract, folder.with_name("run"), task, options=MatchOptions(**options))


@pytest.mark.parametrize("form", ["recording", "data set"])
def test_only_episodes_of_the_runs_tasks_are_used(tmp_path: Path, form: str):
    """Of a data set of ten tasks `task.tasks=[3]` takes one; a run's folder keeps its tasks' names."""
    folder = spoken(tmp_path / "d", [task.language for task in SUITE], form)
    episodes = matched(folder)
    assert episodes.actions[:, 0].tolist() == pytest.approx([0.3])
    (note,) = notes(tmp_path / "run")
    assert "episodes of other tasks are left out: " in note
    assert SUITE[4].language in note
    assert SUITE[3].language not in note
    assert read(folder_of(tmp_path / "run"))[2]["tasks"] == [SUITE[3].name]
    (tmp_path / "run").rename(tmp_path / "first")
    with pytest.raises(UserError, match=f"no episodes of {SUITE[5].name} in .*which has: {SUITE[3].name}"):
        matched(tmp_path / "first", LiberoTask(tasks=["5"], assets="stand-in"))
    both = matched(tmp_path / "first", TASK)
    assert both.task_index.tolist() == [0]


@pytest.mark.parametrize("form", ["recording", "data set"])
def test_unknown_texts_are_listed_and_mapped_by_an_option(tmp_path: Path, form: str):
    folder = spoken(tmp_path / "d", ["grab that thing", "tidy up"], form)
    with pytest.raises(
        UserError, match=f"no episodes of {SUITE[3].name} in .*: grab that thing; tidy up; choose"
    ) as error:
        matched(folder)
    assert f'demonstration_tasks={{{SUITE[3].name}:["TEXT"]}}' in str(error.value)
    typed = f'demonstration_tasks={{{SUITE[3].name}:["grab that thing"]}}'
    config, _ = compose(TrainConfig, "train", ["task=libero_pick", typed], GROUPS)
    options = match_options(config.demonstration_tasks, None, False)
    episodes = matched(folder, tasks=options.tasks)
    assert (len(episodes.ends), notes(tmp_path / "run")) == (
        1,
        [f"{folder}: episodes of other tasks are left out: tidy up."],
    )
    with pytest.raises(UserError, match="demonstration_tasks names pick; expected "):
        matched(spoken(tmp_path / "other/e", ["tidy up"], form), tasks={"pick": ["tidy up"]})


@pytest.mark.parametrize(
    ("tasks", "names", "expected"),
    [
        ("pick", None, r'expected demonstration_tasks=\{TASK:\["TEXT"\]\}, got \'pick\''),
        ({"pick": "text"}, None, r'expected demonstration_tasks=\{TASK:\["TEXT"\]\}'),
        ({"pick": []}, None, r"expected demonstration_tasks="),
        ({"pick": ["one"], "place": ["one"]}, None, r"has 'one' for several tasks"),
        (None, ["a"], r"expected demonstration_names=\{OURS:THEIRS\}, got \['a'\]"),
        (None, {"a": 1}, r"expected demonstration_names="),
    ],
)
def test_impossible_options_are_refused(tasks: Any, names: Any, expected: str):
    with pytest.raises(UserError, match=expected):
        match_options(tasks, names, False)


def test_wordings_of_training_are_known(tmp_path: Path):
    text = f"please {SUITE[3].language.replace('pick up', 'take')}"
    assert TASK.convention().task_index(text) == 0
    assert TASK.convention().task_index(SUITE[4].language) is None


def test_tasks_that_are_imitated_as_one_are_noted(tmp_path: Path):
    folder = dataset(tmp_path / "d", ramp())
    table = pq.read_table(path := folder / "data/chunk-000/file-000.parquet")
    pq.write_table(table.append_column("task_index", pa.array([0] * 6 + [1] * 6)), path)
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["open", "close"]}), folder / "meta/tasks.parquet")
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["task_index"] = {"dtype": "int64", "shape": [1], "names": None}
    (folder / "meta/info.json").write_text(json.dumps(info))
    demonstrations(folder, WANTED, tmp_path / "run", GymTask(), options=RENAMED)
    assert f"{folder}: all of its tasks are imitated as one: open; close." in notes(tmp_path / "run")
    chosen = replace(RENAMED, tasks={"gym": ["close"]})
    episodes = demonstrations(folder, WANTED, tmp_path / "other", GymTask(), options=chosen)
    torch.testing.assert_close(episodes.actions, torch.from_numpy(ramp()[6:]).float())
