"""Rewards, outcomes and endings of data sets in the layouts of robomimic, minari, D4RL and OGBench."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from embodied.command_line.config import compose
from embodied.contract import Contract, TensorSpec
from embodied.data import hdf5
from embodied.data.cache import VARIABLE
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes
from embodied.data.rewards import check_rewards
from embodied.data.store import EpisodeStore
from embodied.errors import UserError
from real_robot.recording.data_sets.contract import data_contract
from real_robot.recording.data_sets.data_set_reading import source_of
from real_robot.recording.data_sets.outcomes import Rewards, parse_columns
from real_robot.recording.demonstrations import DemonstrationOptions, reader
from real_robot.recording.recorded_task import join
from tests.programs import Completed, run_program
from tests.real_robot.recording import arm_data
from train import GROUPS, TrainConfig

CONTRACT = Contract({"observation": TensorSpec((2,))}, TensorSpec((1,)), control_dt_s=0.1)
NAN = float("nan")
EFFORT = {"demonstration_columns": {"cost": "effort"}}
IN_CHILD = hdf5.contents, hdf5.arrays


@pytest.fixture(autouse=True)
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 files are read in this process, which is faster, and the cache is empty."""

    def contents(path: Path) -> hdf5.Contents:
        with h5py.File(path) as file:
            header = hdf5._contents(file)
        shapes = {name: tuple(shape) for name, shape in header["shapes"].items()}
        return hdf5.Contents(shapes, header["dtypes"], header["attributes"])

    def arrays(path: Path, slices: list[hdf5.Slice]) -> Iterator[np.ndarray]:
        with h5py.File(path) as file:
            yield from [hdf5._array(file, *each) for each in slices]

    monkeypatch.setattr(hdf5, "contents", contents)
    monkeypatch.setattr(hdf5, "arrays", arrays)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))


def states(count: int, first: float = 0.0) -> np.ndarray:
    """Observations [count, 2] that count from `first`."""
    return np.stack([first + np.arange(count), -np.ones(count)], 1).astype(np.float32)


def actions(count: int) -> np.ndarray:
    return np.linspace(-1.0, 1.0, count, dtype=np.float32)[:, None]


def robomimic(folder: Path, *, following: bool = True) -> Path:
    """Two demonstrations, of which the second is done in the middle, after its step 1, and goes on."""
    path = folder / "low_dim.hdf5"
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 10}})
        for number, done in ((10, [0, 0, 1]), (2, [0, 1, 0, 0])):
            length = len(done)
            demo = file.create_group(f"data/demo_{number}")
            demo["obs/observation"] = states(length, number)
            if following:
                demo["next_obs/observation"] = states(length, number + 1)
            demo["obs/agentview_image"] = np.full((length, 4, 4, 3), number, np.uint8)
            demo["actions"], demo["dones"] = actions(length).astype(np.float64), np.array(done)
            demo["rewards"], demo["effort"] = np.array(done, np.float64), np.arange(length) / 2
        file["mask/train"], file["mask/valid"] = np.array([b"demo_2"]), np.array([b"demo_10"])
    return path


def minari(folder: Path) -> Path:
    """An episode that terminates after two steps, and one that a time limit ends after three."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        for number, (length, terminated) in enumerate(((2, True), (3, False))):
            group, last = file.create_group(f"episode_{number}"), np.arange(length) == length - 1
            group["observations"], group["actions"] = states(length + 1, 10.0 * number), actions(length)
            group["rewards"] = np.arange(length, dtype=np.float64)
            group["terminations"], group["truncations"] = last & terminated, last & (not terminated)
            group["infos/success"] = np.append(False, last & terminated)  # the first is from before the first step
    (folder / "data/metadata.json").write_text(json.dumps({"total_episodes": 2, "data_format": "hdf5"}))
    return folder


def d4rl(folder: Path, *, following: bool = False) -> Path:
    """Episodes of 2 steps to a termination, 3 to a time limit, and 2 to the end of the file."""
    path = folder / "hopper.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = states(7), actions(7)
        file["rewards"] = np.array([1, 2, 3, 4, 5, NAN, 7], np.float32)
        file["terminals"], file["timeouts"] = np.arange(7) == 1, np.arange(7) == 4
        file["infos/qpos"] = states(7)
        if following:
            file["next_observations"] = states(7) + np.float32(0.5)
    return path


def ogbench(folder: Path, *, by_state: bool = True, **arrays: np.ndarray) -> Path:
    """Two trajectories of 3 steps; `masks` have a termination in the middle of the first, after its step 1."""
    path, last = folder / "cube.npz", [0, 0, 0, 1] if by_state else [0, 0, 1]
    length = len(last)
    whole = np.concatenate([states(length), states(length, 10.0)])
    masks = np.ones(2 * length, np.float32)
    masks[1] = 0.0
    columns = {"observations": whole, "actions": actions(2 * length), "terminals": np.tile(last, 2)}
    columns |= {"masks": masks, "rewards": masks - 1} | ({} if by_state else {"next_observations": whole + 1})
    np.savez_compressed(path, **(columns | arrays))
    return path


def read(path: Path, contract: Contract = CONTRACT, **options: object) -> Episodes:
    config = DemonstrationOptions(demonstrations=str(path), **{f"demonstration_{k}": v for k, v in options.items()})
    read_for = reader(config, None)
    assert read_for is not None
    return read_for(contract, Path(tempfile.mkdtemp(dir=path.parent)))


def transitions(episodes: Episodes, steps: int = 1) -> list[tuple[float, float, float]]:
    """First observation, reward and next first observation, NaN after a termination, of every known transition."""
    store = EpisodeStore(100)
    store.add_episodes(episodes)
    rows = store.draw(300, torch.Generator().manual_seed(0)).unique()
    batch = store.transitions(rows, steps, 1.0)
    following = batch["next_observation", "observation"][:, 0].where(batch["carry"] > 0, torch.nan)
    columns = batch["observation", "observation"][:, 0], batch["reward"], following
    return [*map(tuple, torch.stack(columns, 1).tolist())]


def same(got: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> None:
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def test_robomimic_ends_where_it_is_done(tmp_path: Path):
    episodes = read(robomimic(tmp_path), columns={"cost": "effort"})
    # demo_2, then demo_10: ordered by number; the steps after the one that is done are an episode of their own
    assert episodes.ends.tolist() == [2, 4, 7]
    assert episodes.terminated.tolist() == [True, False, True]
    assert episodes.success.tolist() == [UNKNOWN] * 3
    assert episodes.signals["cost"].tolist() == [0.0, 0.5, 1.0, 1.5, 0.0, 0.5, 1.0]
    same(
        transitions(episodes),
        [(2, 0, 3), (3, 1, NAN), (4, 0, 5), (5, 0, 6), (10, 0, 11), (11, 0, 12), (12, 1, NAN)],
    )


def test_filter_keys_choose_demonstrations(tmp_path: Path):
    path = robomimic(tmp_path)
    assert read(path, filter="valid").observation["observation"][:, 0].tolist() == [10.0, 11.0, 12.0]
    with pytest.raises(UserError, match=r"no filter key test; it has train, valid"):
        source_of(path, DemonstrationOptions(demonstration_filter="test").matching)


def test_without_the_last_observation_the_last_step_is_left_out(tmp_path: Path):
    pictures = Contract({"agentview_image": TensorSpec((2, 2, 3), "uint8")}, TensorSpec((1,)), 0.1)
    path = robomimic(tmp_path, following=False)
    succeeded = read(path, columns={"terminated": None, "success": True})
    assert succeeded.ends.tolist() == [4, 7]
    episodes = read(path, pictures)
    assert episodes.ends.tolist() == [2, 3, 6]  # the second lost its last step; the others terminated
    assert episodes.final_observation["agentview_image"].shape == (3, 2, 2, 3)
    assert episodes.final_observation["agentview_image"][:, 0, 0, 0].tolist() == [2, 2, 10]
    store = EpisodeStore(10)
    store.add_episodes(episodes)
    assert len(store) == 6


def test_d4rl_separates_terminations_from_time_limits(tmp_path: Path):
    episodes = read(d4rl(tmp_path))
    assert episodes.ends.tolist() == [2, 4, 5]
    assert episodes.terminated.tolist() == [True, False, False]
    np.testing.assert_array_equal(episodes.reward, [1, 2, 3, 4, NAN])  # NaN: unknown
    whole = read(d4rl(tmp_path, following=True).rename(tmp_path / "whole.hdf5"))
    assert whole.ends.tolist() == [2, 5, 7]
    assert whole.final_observation["observation"][:, 0].tolist() == [1.5, 4.5, 6.5]
    with pytest.raises(UserError, match=r"rewards are unknown in 1 of 3 episodes of .*whole\.hdf5"):
        check_rewards(whole)


@pytest.mark.parametrize("by_state", [True, False])
def test_ogbench_terminates_where_masks_are_zero(tmp_path: Path, by_state: bool):
    path = ogbench(tmp_path, by_state=by_state)
    episodes = read(path)
    assert episodes.ends.tolist() == [2, 3, 6]
    same(
        transitions(episodes),
        [(0, 0, 1), (1, -1, NAN), (2, 0, 3), (10, 0, 11), (11, 0, 12), (12, 0, 13)],
    )
    assert read(path, columns={"terminated": None}).ends.tolist() == [3, 6]


def test_minari_has_both_endings_and_infos_after_each_step(tmp_path: Path):
    path = minari(tmp_path / "data_set")
    episodes = read(path, columns={"success": "infos/success"})
    assert episodes.success.tolist() == [SUCCEEDED, FAILED]
    same(transitions(episodes), [(0, 0, 1), (1, 1, NAN), (10, 0, 11), (11, 1, 12), (12, 2, 13)])
    same(transitions(episodes, 2), [(0, 1, NAN), (1, 1, NAN), (10, 1, 12), (11, 3, 13), (12, 2, 13)])


@pytest.mark.parametrize(("rewards", "expected"), [("success", [0, 1, 0, 0, 0]), ("steps", [-1, 0, -1, -1, -1])])
def test_rewards_follow_from_success(tmp_path: Path, rewards: str, expected: list[float]):
    path = minari(tmp_path / "data_set")
    options = [f"demonstrations={path}", "demonstration_columns={success:infos/success,reward:null}"]
    options += [f"demonstration_rewards={rewards}", "demonstration_rate_hz=10", "demonstration_units=1"]
    config, _ = compose(TrainConfig, "train", ["task=dataset", "policy=mlp", *options], GROUPS)
    join(config)
    episodes = reader(config, config.task)(config.task.contract("recorded"), tmp_path / "run")
    assert episodes.reward.tolist() == expected


def test_a_failure_that_terminates_has_no_rewards_of_steps(tmp_path: Path):
    """They would cost the less, the earlier it failed."""
    path = minari(tmp_path / "data_set")
    with pytest.raises(UserError, match=r"to fail early would be best; use demonstration_rewards=success"):
        read(path, columns={"success": False}, rewards=Rewards.STEPS)
    assert read(path, columns={"success": False}, rewards=Rewards.SUCCESS).reward.tolist() == [0.0] * 5


def test_rewards_of_an_unknown_outcome_stay_unknown(tmp_path: Path):
    assert read(minari(tmp_path / "data_set"), rewards=Rewards.SUCCESS).reward.isnan().all()


def test_unknown_rewards_name_the_data_set_and_an_option_that_helps(tmp_path: Path):
    path = minari(tmp_path / "data_set")
    chosen = {"reward": None}
    with pytest.raises(UserError, match=r"unknown in 2 of 2 episodes of .*data_set: add 'demonstration_columns=\{rew"):
        check_rewards(read(path, columns=chosen))
    check_rewards(read(path, columns={"reward": "rewards"}))
    chosen["success"] = "infos/success"
    with pytest.raises(UserError, match=r"data_set: add demonstration_rewards=success"):
        check_rewards(read(path, columns=chosen))


def test_lerobot_columns_have_costs_and_endings(tmp_path: Path):
    data = arm_data.record(tmp_path / "arm", 2, failed=True, columns={"cost": 0.5, "next.reward": 2.0, "next.done": 6})
    joints = {"joints": TensorSpec((3,), names=tuple(arm_data.MOTORS))}
    contract = Contract(joints, TensorSpec((3,), names=tuple(arm_data.MOTORS)), 0.1)
    named = {"joints": "observation.state"}
    episodes = read(data, contract, names=named, columns={"cost": "cost"})
    assert episodes.ends.tolist() == [12, 24]
    assert episodes.terminated.tolist() == [True, False]  # the first succeeded
    assert episodes.reward.unique().tolist() == [2.0]
    assert episodes.signals["cost"].unique().tolist() == [0.5]
    parts = read(data, contract, names=named, columns={"terminated": "next.done"})  # also after step 6, in the middle
    assert parts.ends.tolist() == [7, 12, 19, 24]
    assert parts.terminated.tolist() == [True, False, True, False]
    assert parts.success.tolist() == [FAILED, SUCCEEDED, FAILED, FAILED]
    with pytest.raises(UserError, match=r"has no column effort .*, for demonstration_columns=cost; it has cost, n"):
        read(data, contract, names=named, columns={"cost": "effort"})
    half = Contract(contract.observation, contract.action, 0.2)
    resampled = read(data, half, names=named, resampling=True, columns={"cost": "cost"})
    assert resampled.signals["cost"].tolist() == [1.0] * 12


def test_the_negation_of_a_cost_is_a_reward(tmp_path: Path):
    columns = {"reward": "~effort", "idle": "~effort"}
    episodes = read(robomimic(tmp_path), columns=columns)
    assert episodes.reward[:4].tolist() == [0.0, -0.5, -1.0, -1.5]
    assert episodes.signals["idle"][:4].tolist() == [1.0, 0.5, 0.0, -0.5]


@pytest.mark.parametrize("success", [1, 0, 1.0])
def test_the_success_of_all_episodes_is_true_or_false(success: float):
    with pytest.raises(UserError, match="demonstration_columns"):
        parse_columns({"success": success})


def test_data_sets_are_mixed_with_what_all_of_them_have(tmp_path: Path):
    paths = [robomimic(tmp_path), ogbench(tmp_path)]
    options = DemonstrationOptions(demonstrations=[*map(str, paths)], demonstration_weights=[1.0, 1.0])
    mixed = reader(options, None)(CONTRACT, tmp_path / "run")
    assert mixed.ends.tolist() == [2, 4, 7, 9, 10, 13]
    assert mixed.final_observation["observation"][:, 0].tolist() == [4, 6, 13, 2, 3, 13]
    again = read(tmp_path / "run")  # of another run, in its own words
    assert torch.equal(again.final_observation["observation"], mixed.final_observation["observation"])
    with pytest.raises(UserError, match=r"low_dim.hdf5 and .*hopper.hdf5 cannot be mixed: .* has no column effort"):
        reader(replace(options, demonstrations=[str(paths[0]), str(d4rl(tmp_path))], **EFFORT), None)(
            CONTRACT, tmp_path
        )


def wrong(kind: str, folder: Path) -> Path:
    """A data set that cannot be read."""
    if kind == "pickled":
        return ogbench(folder, rewards=np.array([None] * 8, dtype=object))
    if kind == "cut npz":
        path = ogbench(folder)
        path.write_bytes(path.read_bytes()[:-200])
        return path
    if kind == "short npz":
        return ogbench(folder, rewards=np.zeros(7))
    if kind == "columns":
        return ogbench(folder, actions=np.asfortranarray(np.zeros((8, 2))))
    if kind == "wide":
        return ogbench(folder, terminals=np.zeros((8, 2)))
    if kind == "no masks":
        path = folder / "own.npz"
        np.savez(path, observations=states(3), actions=actions(3), rewards=np.ones(3), terminals=np.arange(3) == 2)
        return path
    if kind == "missing episode":
        path = minari(folder / "data_set")
        metadata = path / "data/metadata.json"
        metadata.write_text(metadata.read_text().replace('"total_episodes": 2', '"total_episodes": 3'))
        return path
    if kind == "several":
        ogbench(folder)
        return d4rl(folder).parent
    path = d4rl(folder) if kind in ("nan", "infinite", "no timeouts", "unknown layout") else robomimic(folder)
    with h5py.File(path, "a") as file:
        if kind == "nan":
            file["observations"][3, 1] = NAN
        elif kind == "infinite":
            file["rewards"][3] = np.inf
        elif kind in ("no timeouts", "unknown layout"):
            del file["timeouts" if kind == "no timeouts" else "terminals"]
        elif kind == "lengths":
            del file["data/demo_2/rewards"]
            file["data/demo_2/rewards"] = np.zeros(3)
        elif kind == "shapes":
            del file["data/demo_10/obs/observation"]
            file["data/demo_10/obs/observation"] = np.zeros((3, 5))
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pickled", "has Python objects, which are never read"),
        ("cut npz", r"cannot read .*cube\.npz: BadZipFile"),
        ("short npz", "expected 8 rows of rewards, as many as the actions need, got 7 rows"),
        ("columns", r"expected an array actions .*; if it is stored column by column, save numpy.ascontiguousarray"),
        ("wide", r"expected a number for each step in terminals, got \[8, 2\]"),
        ("no masks", r"has no array timeouts, .* are not known; add timeouts \(D4RL\), or masks \(OGBench\)"),
        ("missing episode", r"metadata.json has 3 episodes, main_data.hdf5 2; it is cut short"),
        ("several", r"has several data sets, cube.npz, hopper.hdf5; choose one, such as .*cube.npz"),
        ("nan", "has infinity or not a number in observation, from row 2 on"),
        ("infinite", "has infinity or not a number in reward, from row 2 on"),
        ("no timeouts", "has no array timeouts, without which episodes that a time limit ended are not known"),
        ("unknown layout", "expected data/demo_N .*; got actions, infos, observations, rewards, timeouts"),
        ("lengths", "data/demo_2: expected 4 rows of rewards, as many as the actions need, got 3 rows"),
        ("shapes", r"data/demo_10: expected observation.observation of shape \[2\] as in data/demo_2, got \[5\]"),
    ],
)
def test_a_wrong_data_set_gives_one_line(tmp_path: Path, kind: str, message: str):
    with pytest.raises(UserError, match=message) as refused:
        read(wrong(kind, tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ({"agentview_image": np.full((2, 8, 8, 3), 0.5, np.float32)}, "expected pictures of uint8, got float32"),
        ({"observation": np.zeros((2, 2), np.complex64)}, "expected numbers, got complex64"),
    ],
)
def test_observations_of_another_type_are_refused(tmp_path: Path, observed: dict[str, np.ndarray], expected: str):
    path = tmp_path / "data.hdf5"
    with h5py.File(path, "w") as file:
        demo = file.create_group("data/demo_0")
        for name, values in observed.items():
            demo[f"obs/{name}"] = values
        demo["actions"], demo["rewards"], demo["dones"] = actions(2), np.zeros(2), np.array([0, 1])
    specs = {"agentview_image": TensorSpec((4, 4, 3), "uint8"), "observation": TensorSpec((2,))}
    contract = Contract({name: specs[name] for name in observed}, TensorSpec((1,)), control_dt_s=0.1)
    with pytest.raises(UserError, match=expected):  # floats of 0 to 1 would be black pictures
        read(path, contract)


@pytest.mark.parametrize("suffix", [".hdf5", ".npz"])
def test_numbers_of_another_order_of_bytes_are_read(tmp_path: Path, suffix: str):
    path = tmp_path / f"data{suffix}"
    flags = {"terminals": np.arange(3) == 2, "timeouts": np.zeros(3)}
    arrays = {"observations": states(3).astype(">f4"), "actions": actions(3), "rewards": np.arange(3, dtype=">f8")}
    if suffix == ".npz":
        np.savez(path, **arrays, **flags)
    else:
        with h5py.File(path, "w") as file:
            for name, values in (arrays | flags).items():
                file[name] = values
    options = DemonstrationOptions(demonstration_rate_hz=10.0).matching
    assert {*data_contract(path, options, "1", 128, None).observation} == {"observation"}
    assert read(path).reward.tolist() == [0.0, 1.0, 2.0]


def test_arrays_are_read_in_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = d4rl(tmp_path)
    expected = read(path)
    for name, function in zip(("contents", "arrays"), IN_CHILD, strict=True):
        monkeypatch.setattr(hdf5, name, function)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    episodes = read(path)
    assert episodes.ends.tolist() == expected.ends.tolist()
    assert torch.equal(episodes.actions, expected.actions)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cannot read .*hopper\.hdf5: OSError"):
        read(path)


def test_a_rate_and_units_are_added_to_arrays_once(tmp_path: Path):
    """task=dataset learns from arrays, and says which options they need."""
    path = ogbench(tmp_path)

    def trained(*options: str) -> Completed:
        learner = ["policy=mlp", "stages=[offline]", "offline=iql", "offline.steps=2", "offline.batch=4"]
        chosen = ["task=dataset", f"demonstrations={path}", f"output={tmp_path / 'refused'}", *learner, *options]
        return run_program("train.py", *chosen)

    assert "add demonstration_rate_hz=HZ" in trained().stderr
    rate = "demonstration_rate_hz=20"
    assert "demonstration_units=percent for all of them" in trained(rate).stderr
    known = [rate, "demonstration_units=1"]
    refused = trained(*known, "demonstration_columns={reward:null}")
    assert "episodes of " + str(path) + ": add 'demonstration_columns={reward:NAME}'" in refused.stderr
    completed = trained(*known, f"output={tmp_path / 'run'}")
    assert completed.returncode == 0, completed.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["open_loop"]["held_out_episodes"] == 1
    contract = Contract.from_dict(json.loads((tmp_path / "run/demonstrations.json").read_text())["contract"])
    assert contract.control_dt_s == pytest.approx(0.05)
    with pytest.raises(UserError, match=r"states 10 Hz; leave out demonstration_rate_hz=20"):
        read(robomimic(tmp_path), rate_hz=20.0)
