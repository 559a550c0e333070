"""Stock LIBERO's virtual environment: made once, in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import venv
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from embodied.errors import UserError
from sims.native import cache_folder

log = logging.getLogger(__name__)
STOCK = ("robosuite==1.4.0", "hf-libero==0.1.4", "bddl==1.0.1")
"""Installed without their dependencies, which pin old versions."""
DEPENDENCIES = (
    *("scipy", "numba", "opencv-python-headless", "pillow", "termcolor", "pyyaml", "matplotlib", "h5py", "gymnasium"),
    *("gym==0.26.2", "easydict==1.13", "future==1.0.0", "cloudpickle", "networkx"),
)
SHARED = ("mujoco", "numpy", "torch")
"""Stock runs on our own versions of them."""


def stock_python() -> Path:
    """The interpreter of stock LIBERO's virtual environment, which the first call makes with pip.

    It adds the packages of this interpreter to its own.

    Raises:
        UserError: with pip's last line, where it cannot be made.
    """
    key = "\0".join((sys.prefix, *STOCK, *DEPENDENCIES, *(f"{name}=={version(name)}" for name in SHARED)))
    folder = cache_folder() / f"stock_libero_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        log.info(f"installing stock LIBERO into {folder} (once; 600 MB)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / "venv"
            _make(made)
            with suppress(OSError):  # another process was faster
                os.rename(made, folder)
    return folder / "bin" / "python"


def _make(folder: Path) -> None:
    venv.create(folder, symlinks=True)
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
    (site / "zz_shared.pth").write_text(lines)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version(name)}\n" for name in SHARED))
        constraints.flush()
        _pip(folder, "--no-deps", *STOCK)
        _pip(folder, "--constraint", constraints.name, *DEPENDENCIES)


def _pip(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    done = subprocess.run([*command, "install", "--quiet", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise UserError(
            f"cannot install stock LIBERO ({said[-1].strip()}); or give an interpreter that has it: task.python=PATH"
        )
