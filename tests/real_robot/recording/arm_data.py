"""A tiny data set as LeRobot records it of an arm: positions in degrees, two cameras, texts, no units."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

MOTORS = ["shoulder_pan.pos", "elbow_flex.pos", "gripper.pos"]
RATE_HZ, LENGTH = 10, 12


def record(directory: Path, episodes: int = 8, *, texts: tuple[str, ...] = ("lift the cube",), **changes: Any) -> Path:
    """Episodes that sweep each joint to a target that their pictures show; the last one failed with `failed`=True.

    The actions of the last `unlabelled` ones are unknown.

    Further `columns` have a value by name, next.done the step that is done.
    """
    random, rows, columns = np.random.default_rng(0), [], changes.get("columns", {})
    for episode in range(episodes):
        target = random.uniform(-40.0, 40.0)
        for step in range(LENGTH):
            position = target * step / LENGTH
            state = [position, -position, 50.0 + position / 4]
            picture = np.full((32, 32, 3), int(128 + 2 * target), np.uint8)
            failed = changes.get("failed", False) and episode == episodes - 1
            rows.append(
                {
                    "observation.state": state,
                    "action": [each + target / LENGTH for each in state][: changes.get("actions", 3)],
                    "observation.images.front": {"bytes": _png(picture), "path": "front.png"},
                    "observation.images.wrist": {"bytes": _png(255 - picture), "path": "wrist.png"},
                    "next.success": step == LENGTH - 1 and not failed,
                    "task_index": episode % len(texts),
                    "episode_index": episode,
                    "frame_index": step,
                    **{name: step == value if name == "next.done" else value for name, value in columns.items()},
                }
            )
    if "nan" in changes:
        rows[changes["nan"]]["action"] = [float("nan")] * 3
    for row in rows[LENGTH * (episodes - changes.get("unlabelled", 0)) :]:
        row["action"] = [float("nan")] * len(row["action"])
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (directory / folder).mkdir(parents=True)
    action_names = MOTORS[: changes.get("actions", 3)]
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": MOTORS},
        "action": {"dtype": "float32", "shape": [len(action_names)], "names": action_names},
        **{
            f"observation.images.{camera}": {"dtype": "image", "shape": [32, 32, 3], "names": ["height", "width", "c"]}
            for camera in ("front", "wrist")
        },
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "task_index": {"dtype": "int64", "shape": [1], "names": None},
        **{name: {"dtype": "float32", "shape": [1], "names": None} for name in columns},
    }
    if not changes.get("failed"):
        del features["next.success"]
    info = {"codebase_version": "v3.0", "fps": changes.get("rate_hz", RATE_HZ), "features": features}
    (directory / "meta/info.json").write_text(json.dumps(info))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), directory / "data/chunk-000/file-000.parquet")
    tasks = pa.table({"task_index": list(range(len(texts))), "__index_level_0__": list(texts)})
    pq.write_table(tasks, directory / "meta/tasks.parquet")
    return directory


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png")
    return file.getvalue()
