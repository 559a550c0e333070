"""replay.py: what is in a recording, as text, in rerun's format, and as a layout for Foxglove."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from embodied.text import encode, text_spec
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict
from tests.programs import run_program
from tests.real_robot.recording.test_recording import CONTRACT, reading

WORDS = CONTRACT.observation | {"instruction": text_spec(16)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    contract = type(CONTRACT)(WORDS, CONTRACT.action, CONTRACT.control_dt_s)
    with Recorder(tmp_path / "a.mcap", contract, origin={"robot": "arm"}) as recorder:
        for task, success in (("stack the cups", True), ("pour", False)):
            recorder.begin_episode(task)
            for index in range(5):
                seen = reading(index)
                observation = seen.observation | {"instruction": encode(task, 16)}
                verdict = Verdict(State.ACTIVE, np.array([0.5, -0.25]))
                if index == 3:
                    verdict = Verdict(State.HOLDING, None, "stale measurement")
                seen = Reading(observation, seen.stamp_s, index)
                recorder.write(100.0 + index / 50, seen, np.array([0.1, 0.2]), verdict, intervention=index < 2)
            recorder.end_episode(success=success)
    return tmp_path / "a.mcap"


def test_it_tells_what_is_in_a_recording(file: Path):
    done = run_program("replay.py", str(file))
    assert done.stdout.splitlines() == [
        f'{file}, recorded with {{"robot": "arm"}}',
        "episode 0 stack the cups: success, 5 periods, 2 by a person; 1 held: stale measurement",
        "episode 1 pour: failure, 5 periods, 2 by a person; 1 held: stale measurement",
    ]
    data = file.read_bytes()
    file.write_bytes(data[: data.index(b"embodied_end") - 5])
    assert "it was not finished: the end is missing" in run_program("replay.py", str(file)).stdout


def test_foxglove_gets_a_layout_of_topics_that_are_there(file: Path):
    assert "Import from file" in run_program("replay.py", str(file), "viewer=foxglove").stdout
    layout = json.loads(Path(f"{file}.layout.json").read_text())
    panels = layout["configById"]
    tiles, waiting = [], [layout["layout"]]
    for tile in waiting:
        tiles += [tile] if isinstance(tile, str) else []
        waiting += [tile["first"], tile["second"]] if isinstance(tile, dict) else []
    assert sorted(tiles) == sorted(panels)
    assert panels["Image!camera"]["imageMode"]["imageTopic"] == "/embodied/observation/camera"
    assert [path["label"] for path in panels["Plot!position"]["paths"]] == ["x [m]", "y [m]", "z [m]"]
    assert not {"Plot!instruction", "Plot!secret", "Plot!objects"} & set(panels)
    recorded = {(channel.topic, schema.name): message for channel, schema, message in Recording(file)._messages()}
    topics = {topic for topic, _ in recorded}
    drawn = [path["value"] for panel in panels.values() for path in panel.get("paths", ())]
    assert {re.fullmatch(r"(/embodied/[\w/]+)\.data\[\d\]", path)[1] for path in drawn} <= topics
    assert {"/embodied/observation/camera", panels["RawMessages!tick"]["topicPath"]} <= topics
    assert "exists; choose another output" in run_program("replay.py", str(file), "viewer=foxglove").stderr


def test_rerun_gets_pictures_curves_with_names_points_words_and_events(file: Path):
    rerun = pytest.importorskip("rerun", reason="needs the extra rerun")
    done = run_program("replay.py", str(file), "viewer=rerun", f"output={file.with_suffix('.rrd')}")
    assert done.returncode == 0, done.stderr
    assert "showed 10 control periods" in done.stdout
    columns: dict[str, dict[str, list]] = {}
    reader = rerun.chunk.RrdReader(file.with_suffix(".rrd"))
    for chunk in reader.stream():
        batch = chunk.to_record_batch()
        for name in (name for name in batch.schema.names if ":" in name):  # others are times and numbers of rows
            columns.setdefault(chunk.entity_path, {}).setdefault(name, []).extend(batch[name].to_pylist())
    assert columns["/action/written"]["Scalars:scalars"] == 8 * [[0.5, -0.25]]  # not where it held
    assert columns["/action/asked"]["SeriesLines:names"] == [["left [rad/s]", "right [rad/s]"]]
    np.testing.assert_allclose(
        columns["/space/position"]["Points3D:positions"][4][0], reading(4).observation["position"]
    )
    assert len(columns["/cameras/camera"]["EncodedImage:blob"]) == 10
    assert columns["/text/instruction"]["TextDocument:text"][0] == ["stack the cups"]
    said = [text for (text,) in columns["/events"]["TextLog:text"]]
    assert said[:4] == ["episode 0 of stack the cups", "holding: stale measurement", "active: ", "success"]
    assert said[-1] == "failure"
    (blueprint,) = reader.blueprints()
    batches = [chunk.to_record_batch() for chunk in reader.stream(store=blueprint)]
    origin = "ViewBlueprint:space_origin"
    views = {path for batch in batches if origin in batch.schema.names for (path,) in batch[origin].to_pylist()}
    assert views == {"action", "cameras/camera", "events", "observation/position", "space"}
    again = run_program("replay.py", str(file), "viewer=rerun", f"output={file.with_suffix('.rrd')}")
    assert "exists; choose another output" in again.stderr


def test_what_cannot_be_shown_is_one_line(tmp_path: Path):
    for arguments, message in (
        ([], "expected one recording, python replay.py FILE.mcap, got none"),
        ([str(tmp_path / "none.mcap")], "cannot read .*none.mcap"),
        (["a.mcap", "viewer=television"], "viewer"),
    ):
        done = run_program("replay.py", *arguments)
        assert done.returncode == 1
        (line,) = done.stderr.strip().splitlines()
        assert re.search(message, line)
