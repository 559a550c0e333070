"""Virtual environments of simulators whose packages are incompatible with ours: created once, in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from embodied.errors import UserError
from embodied.native import TEXT, cache_folder

log = logging.getLogger(__name__)


def own_python(
    what: str, name: str, size: str, shared: Sequence[str], alone: Sequence[str], dependencies: Sequence[str]
) -> Path:
    """Interpreter of the virtual environment `name` for `what`, which the first call creates with pip.

    It adds the packages of this interpreter to its own, with our versions of those in `shared`. The requirements
    `alone` are installed without their dependencies, `dependencies` with theirs.

    Raises:
        UserError: with pip's last line, if it cannot be created.
    """
    key = "\0".join((sys.prefix, *alone, *dependencies, *(f"{each}=={version(each)}" for each in shared)))
    folder = cache_folder() / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        log.info(f"installing {what} into {folder} (once; {size})")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            new_folder = Path(temporary) / "venv"
            _make(new_folder, what, shared, alone, dependencies)
            with suppress(OSError):  # another process was faster
                os.rename(new_folder, folder)
    return folder / "bin" / "python"


def _make(folder: Path, what: str, shared: Sequence[str], alone: Sequence[str], dependencies: Sequence[str]) -> None:
    venv.create(folder, symlinks=True)
    site_folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in site_folders)
    (site / "zz_shared.pth").write_text(lines, encoding="utf-8")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        constraints.write("".join(f"{name}=={version(name)}\n" for name in shared))
        constraints.flush()
        if alone:
            _pip(folder, what, "--no-deps", *alone)
        _pip(folder, what, "--constraint", constraints.name, *dependencies)


def _pip(folder: Path, what: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    result = subprocess.run([*command, "install", "--quiet", *arguments], capture_output=True, check=False, **TEXT)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise UserError(
            f"cannot install {what} ({lines[-1].strip()}); or give an interpreter that has it: task.python=PATH"
        )
