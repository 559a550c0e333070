"""Reads published checkpoints of openpi, LeRobot, NVIDIA and OpenVLA-OFT as starting points.

LIBERO is recognised by the names of the statistics (openpi: the data set physical-intelligence/libero; OpenVLA-OFT:
libero_*), or by LeRobot's features: a state of 8 elements, an action of 7, and the cameras of LIBERO's data sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.saving.json_text import loads
from embodied.saving.starting_point import StartingPoint
from policies.vla.checkpoints import settings
from policies.vla.checkpoints.settings import CONFIG, LIBERO, learned_libero
from policies.vla.checkpoints.statistics import UNREADABLE, reason
from policies.vla.checkpoints.weights import folder_of, has_adaptive_norms
from policies.vla.groot.weights import RAW as GROOT
from policies.vla.openvla.weights import CODE, writes_in_turn

KIND = "a vision-language-action model"
PROPRIOCEPTION = "proprio_projector--*.pt"
"""Name of OpenVLA-OFT's file for the state."""
REPLANNED = 5
"""Number of actions that openpi's evaluation on LIBERO executes of each chunk."""
CHUNK = 8
"""Number of actions of a chunk of OpenVLA-OFT on LIBERO, all of which are executed; OpenVLA has one."""
STEPS = 50
"""Number of actions of a chunk of pi0, and executed by LeRobot, where the configuration has none."""
GROOT_STEPS = 16
"""Largest number of actions of a chunk of GR00T's in LeRobot, whatever the configuration says."""
STATE, ACTION = 8, 7
"""Numbers of elements of LIBERO's published state and action."""
CAMERAS = ("image", "agentview", "base_0_rgb"), ("image2", "wrist_image", "wrist", "left_wrist_0_rgb")
"""Names in LeRobot's features of the pictures of LIBERO's two cameras, also after openpi's of pi0's inputs."""


def read(weights: str) -> StartingPoint | None:
    """Read the starting point of `weights`, a folder or a name on the hub; None for a file, or adapters.

    Of the hub only texts are fetched, unless the names of tensors decide: a plan needs no gigabytes.

    Raises:
        UserError: if there is no such folder, or its configuration is damaged or of another model.
    """
    if Path(weights).is_file():
        return None
    folder = folder_of(weights, KIND, tensors=False)
    if not settings.has_fields(folder):
        return None
    try:
        fields = settings.read_fields(folder)
        kind = fields.get("type", fields.get("model_type"))
        if kind == "openvla":
            return _openvla(weights, folder_of(weights, KIND, PROPRIOCEPTION, CODE, tensors=False), fields)
        if kind == GROOT:
            size = fields["action_horizon"]
            return StartingPoint(weights, "groot", "NVIDIA", size, size, len(CAMERAS))
        if "type" in fields and kind in ("pi0", "pi05", "smolvla", "groot"):
            return _lerobot(weights, fields)
        if "action_horizon" in fields:
            return _openpi(weights, folder, fields)
        if kind == "pi0":
            size = fields.get("chunk_size", STEPS)
            return StartingPoint(weights, kind, "transformers", size, size, len(CAMERAS))
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{weights}: cannot read {CONFIG} as that of published weights ({reason(error)})") from error
    raise UserError(
        f"{weights}: {CONFIG} is of type {kind or 'unknown'}; expected pi0, pi05, smolvla, groot or openvla"
    )


def _openpi(weights: str, folder: Path, fields: Mapping[str, Any]) -> StartingPoint:
    adaptive = fields["pi05"] if "pi05" in fields else has_adaptive_norms(folder_of(weights, KIND))
    horizon = fields["action_horizon"]
    learned = learned_libero(folder, fields)
    return StartingPoint(
        weights,
        "pi05" if adaptive else "pi0",
        "openpi",
        horizon,
        min(horizon, REPLANNED),
        len(CAMERAS),
        benchmark=LIBERO if learned else None,
        evidence=f"its norm_stats.json is of the data set {LIBERO}" if learned else "",
    )


def _lerobot(weights: str, fields: Mapping[str, Any]) -> StartingPoint:
    features = {**(fields.get("input_features") or {}), **(fields.get("output_features") or {})}
    sizes = [tuple((features.get(name) or {}).get("shape", ())) for name in ("observation.state", "action")]
    pictures = {
        name.rpartition(".")[2]
        for name, feature in features.items()
        if feature["type"] == "VISUAL" and "empty_camera" not in name
    }
    names = [next((name for name in group if name in pictures), None) for group in CAMERAS]
    cameras = [name for name in names if name]
    learned = sizes == [(STATE,), (ACTION,)] and names[0] is not None and len(cameras) == len(pictures)
    horizon = fields.get("chunk_size", STEPS)
    if fields["type"] == "groot":
        horizon = min(horizon, GROOT_STEPS)
    return StartingPoint(
        weights,
        fields["type"],
        "LeRobot",
        horizon,
        min(horizon, fields.get("n_action_steps", horizon)),
        len(cameras),
        benchmark=LIBERO if learned else None,
        evidence=f"it reads a state of {STATE} elements and {' and '.join(cameras)}" if learned else "",
    )


def _openvla(weights: str, folder: Path, fields: Mapping[str, Any]) -> StartingPoint:
    path = folder / "dataset_statistics.json"
    data_sets = tuple(loads(path.read_text(encoding="utf-8")) if path.exists() else fields.get("norm_stats") or {})
    learned = [name for name in data_sets if name.startswith(f"{LIBERO}_")]
    # OpenVLA-OFT's weights that read the state read the wrist camera, too; others have learned with one picture
    cameras = 2 if any(folder.glob(PROPRIOCEPTION)) else 1
    single = writes_in_turn(folder) is True
    steps = 1 if single else CHUNK
    return StartingPoint(
        weights,
        "tokens",
        "OpenVLA" if single else "OpenVLA-OFT",
        steps,
        steps,
        cameras,
        data_sets,
        LIBERO if learned else None,
        f"it has statistics of {' and '.join(learned)}" if learned else "",
    )
