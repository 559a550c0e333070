"""A data set is decoded once for all runs; a run's folder has an index of it, which is compared when it resumes."""

import json
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.contract import Contract, TensorSpec
from embodied.data import demonstrations as run_demonstrations
from embodied.data.cache import VARIABLE
from embodied.data.demonstrations import INDEX, folder_of, record_once
from embodied.data.episodes import FOLDER, Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.saving import sealed
from embodied.text import encode, text_spec
from real_robot.recording import lerobot_dataset
from real_robot.recording.data_sets import data_set_reading
from real_robot.recording.demonstrations import demonstrations
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict

CONTRACT = Contract(
    {"joint": TensorSpec((2,)), "camera": TensorSpec((8, 6, 3), "uint8"), "instruction": text_spec(32)},
    TensorSpec((2,)),
    control_dt_s=0.1,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache/data_sets"


@pytest.fixture(params=lerobot_dataset.Store, ids=lambda store: store.value)
def data_set(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "data", request.param)


def write(folder: Path, store: lerobot_dataset.Store = lerobot_dataset.Store.IMAGE, seed: int = 0) -> Path:
    """A data set of two episodes of random joints and pictures."""
    rng = np.random.default_rng(seed)
    recording = folder.with_suffix(".mcap")
    with Recorder(recording, CONTRACT) as recorder:
        for task in ("open the door", "close it"):
            recorder.begin_episode(task)
            for step in range(5):
                observation = {
                    "joint": rng.random(2, np.float32),
                    "camera": rng.integers(0, 256, (8, 6, 3), np.uint8),
                    "instruction": encode(task, 32),
                }
                action = rng.random(2, np.float32)
                verdict = Verdict(State.ACTIVE, action)
                recorder.write(0.1 * step, Reading(observation, 0.1 * step, step), action, verdict)
            recorder.end_episode(success=True)
    lerobot_dataset.write([Recording(recording)], folder, pictures=store)
    recording.unlink()
    return folder


def batches(episodes: Episodes) -> list[torch.Tensor]:
    """Content of five minibatches that one seed draws."""
    generator = torch.Generator().manual_seed(0)
    draws = [episodes.sample(4, 3, generator).flatten_keys() for _ in range(5)]
    return [draw[key] for draw in draws for key in sorted(draw.keys())]


def equal(first: Episodes, second: Episodes) -> bool:
    pairs = zip(batches(first), batches(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_minibatches_are_those_of_a_copy_in_the_run(tmp_path: Path, data_set: Path):
    def copy(writer: EpisodeWriter) -> None:
        for episode in data_set_reading.read(data_set, CONTRACT):
            writer.add(episode)

    copied = record_once(tmp_path / "copy", CONTRACT, {}, copy)
    plain = Episodes.join([*data_set_reading.read(data_set, CONTRACT)])
    shared = demonstrations(data_set, CONTRACT, tmp_path / "run")
    assert equal(shared, copied)
    assert equal(shared, plain)


def test_runs_share_one_copy_and_have_an_index_alone(tmp_path: Path, data_set: Path, cache: Path, monkeypatch):
    first = demonstrations(data_set, CONTRACT, tmp_path / "first")
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert files(tmp_path / "first") == [INDEX]
    index = json.loads((tmp_path / "first" / INDEX).read_text())
    assert {*index["content"]} == {str(data_set)}
    assert index["origin"] == {"source": str(data_set)}
    monkeypatch.setattr(data_set_reading, "read", None)  # nothing is decoded again
    second = demonstrations(data_set, replace(CONTRACT, horizon=4, executed=2), tmp_path / "second")
    assert equal(first, second)
    data_set.rename(tmp_path / "moved")
    third = demonstrations(tmp_path / "moved", CONTRACT, tmp_path / "third")  # the content counts, not the place
    assert equal(first, third)
    assert folder_of(tmp_path / "third") == folder
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_runs_that_begin_together_decode_once(tmp_path: Path, cache: Path, monkeypatch):
    source, read, decoded = write(tmp_path / "data"), data_set_reading.read, []

    def slow(*arguments):
        decoded.append(arguments[0])
        time.sleep(0.2)
        return read(*arguments)

    monkeypatch.setattr(data_set_reading, "read", slow)
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(demonstrations, source, CONTRACT, tmp_path / f"run {n}") for n in range(3)]
        first, *others = [run.result() for run in runs]
    assert decoded == [source]
    assert all(equal(first, other) for other in others)


def test_other_contracts_and_contents_have_folders_of_their_own(tmp_path: Path, cache: Path):
    sources = [write(tmp_path / "a"), write(tmp_path / "b", seed=1)]
    small = replace(CONTRACT, observation=CONTRACT.observation | {"camera": TensorSpec((4, 3, 3), "uint8")})
    half = replace(CONTRACT, observation={"joint": CONTRACT.observation["joint"]})
    wanted = [(sources[0], CONTRACT), (sources[1], CONTRACT), (sources[0], half)]
    for number, (source, contract) in enumerate(wanted):
        demonstrations(source, contract, tmp_path / f"run {number}")
    assert len({folder_of(tmp_path / f"run {number}") for number in range(3)}) == 3
    with pytest.raises(UserError, match="camera"):
        demonstrations(sources[0], small, tmp_path / "small")
    both = demonstrations(sources, CONTRACT, tmp_path / "both")
    assert both.dataset_index is not None
    assert both.dataset_index.tolist() == [0, 0, 1, 1]


def test_data_that_are_missing_or_changed_stop_a_run_that_resumes(tmp_path: Path, data_set: Path):
    run = tmp_path / "run"
    first = demonstrations(data_set, CONTRACT, run)
    data_set.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"run was trained on .*data, which is missing; put it back") as missing:
        demonstrations(data_set, CONTRACT, run)
    (tmp_path / "moved").rename(data_set)
    assert equal(first, demonstrations(data_set, CONTRACT, run))
    path = next((data_set / "data").rglob("*.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"data has changed since .*run began; restore it") as changed:
        demonstrations(data_set, CONTRACT, run)
    path.write_bytes(content)
    path.with_name("file-001.parquet").write_bytes(content)
    with pytest.raises(UserError, match="has changed"):
        demonstrations(data_set, CONTRACT, run)
    path.with_name("file-001.parquet").unlink()
    assert equal(first, demonstrations(data_set, CONTRACT, run))
    assert "\n" not in f"{missing.value}{changed.value}"
    with pytest.raises(UserError, match=r"demonstrations\.json was made for something else \(source: expected"):
        demonstrations(write(tmp_path / "other"), CONTRACT, run)
    with pytest.raises(UserError, match=r"made for something else \(control_dt_s: expected 0\.2, got 0\.1\)"):
        demonstrations(data_set, replace(CONTRACT, control_dt_s=0.2), run)


def test_videos_count_only_where_they_are_read(tmp_path: Path):
    source = write(tmp_path / "data", lerobot_dataset.Store.VIDEO)
    state = replace(CONTRACT, observation={"joint": CONTRACT.observation["joint"]})
    runs = [(CONTRACT, tmp_path / "seeing"), (state, tmp_path / "blind")]
    for contract, run in runs:
        demonstrations(source, contract, run)
    shutil.rmtree(source / "videos")
    with pytest.raises(UserError, match="has changed"):
        demonstrations(source, *runs[0])
    demonstrations(source, *runs[1])


def test_a_damaged_cache_is_decoded_again_to_the_same_minibatches(tmp_path: Path, data_set: Path, cache: Path, caplog):
    expected = batches(demonstrations(data_set, CONTRACT, tmp_path / "run"))
    folder = folder_of(tmp_path / "run")
    assert folder is not None
    for name in ("actions.npy", "encoded.camera.npy", "episodes.json"):
        data = bytearray((folder / name).read_bytes())
        data[-2] ^= 1
        (folder / name).unlink()  # others may have mapped the file
        (folder / name).write_bytes(data)
        again = demonstrations(data_set, CONTRACT, tmp_path / "run")
        assert all(torch.equal(one, other) for one, other in zip(batches(again), expected, strict=True))
        assert f"{name} is damaged" in caplog.text
        assert "the data set is decoded again" in caplog.text
    shutil.rmtree(cache)
    assert all(torch.equal(a, b) for a, b in zip(batches(again), expected, strict=True))  # mapped files stay
    again = demonstrations(data_set, CONTRACT, tmp_path / "run")
    assert all(torch.equal(one, other) for one, other in zip(batches(again), expected, strict=True))
    assert "not to the same bytes" not in caplog.text


def test_decoding_to_other_bytes_is_reported(tmp_path: Path, cache: Path, monkeypatch, caplog):
    source = write(tmp_path / "data")
    demonstrations(source, CONTRACT, tmp_path / "run")
    monkeypatch.setattr("embodied.data.cache.versions", lambda: {"embodied-rl": "another"})
    read = data_set_reading.read

    def reversed_actions(*arguments):
        return (replace(episode, actions=episode.actions.flip(0)) for episode in read(*arguments))

    monkeypatch.setattr(data_set_reading, "read", reversed_actions)
    demonstrations(source, CONTRACT, tmp_path / "run")
    assert "run: its data sets were decoded again, not to the same bytes" in caplog.text
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_a_run_of_an_earlier_version_keeps_its_copy(tmp_path: Path, cache: Path):
    source = write(tmp_path / "data")

    def copy(writer: EpisodeWriter) -> None:
        for episode in data_set_reading.read(source, CONTRACT):
            writer.add(episode)

    copied = record_once(tmp_path / "run", CONTRACT, {"source": str(source)}, copy)
    shutil.rmtree(source)
    assert equal(copied, demonstrations(source, CONTRACT, tmp_path / "run"))
    assert files(tmp_path / "run") == [FOLDER]
    assert not cache.exists()


def test_another_run_imitates_the_demonstrations_of_a_run(tmp_path: Path, data_set: Path, cache: Path):
    first = demonstrations(data_set, CONTRACT, tmp_path / "first")
    assert equal(first, demonstrations(tmp_path / "first", CONTRACT, tmp_path / "second"))
    shutil.rmtree(cache)
    with pytest.raises(
        UserError, match=r"the cache no longer has the demonstrations of .*first; use .*data, or resume"
    ):
        demonstrations(tmp_path / "first", CONTRACT, tmp_path / "third")


def test_a_damaged_index_and_a_cache_that_cannot_be_written_are_reported(tmp_path: Path, monkeypatch):
    source = write(tmp_path / "data")
    demonstrations(source, CONTRACT, tmp_path / "run")
    path = tmp_path / "run" / INDEX
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"content": {}}))
    with pytest.raises(UserError, match=r"demonstrations\.json is damaged: its checksum does not match"):
        demonstrations(source, CONTRACT, tmp_path / "run")
    sealed.write(path, {key: value for key, value in record.items() if key not in ("files", "sha256")}, [])
    demonstrations(source, CONTRACT, tmp_path / "run")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UserError, match=f"cannot create a cache of decoded data sets: .*; set {VARIABLE} to a folder"):
        demonstrations(source, CONTRACT, tmp_path / "other")
    assert run_demonstrations.notes(tmp_path / "other") == []


def test_a_run_that_another_release_decoded_again_can_be_imitated(tmp_path: Path, cache: Path, monkeypatch):
    source = write(tmp_path / "data")
    first = demonstrations(source, CONTRACT, tmp_path / "run")
    shutil.rmtree(cache)
    monkeypatch.setattr("embodied.data.cache.versions", lambda: {"embodied-rl": "another"})
    demonstrations(source, CONTRACT, tmp_path / "run")
    assert equal(first, demonstrations(tmp_path / "run", CONTRACT, tmp_path / "other"))


@pytest.mark.parametrize("most_bytes", [0, 100, 1_000])
def test_a_full_disk_is_reported_with_the_place(tmp_path: Path, cache: Path, most_bytes: int):
    source = write(tmp_path / "data")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))  # of each file that is written
    try:
        with pytest.raises(UserError, match=rf"cannot write {cache}/.*: .*; set {VARIABLE} to a folder") as error:
            demonstrations(source, CONTRACT, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    demonstrations(source, CONTRACT, tmp_path / "run")
