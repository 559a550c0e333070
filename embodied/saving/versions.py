"""Provenance of results: the commit of this code, and the versions of packages."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

_DISTRIBUTIONS = ("embodied-rl", "torch", "numpy", "tensordict", "mujoco", "mujoco-warp", "hf-libero", "robosuite")


def git_commit() -> str:
    """Commit of this code, with "-dirty" if files differ from it; "unknown" outside a clone.

    Results that benchmarks have written are no code: a row leaves the rows after it clean.
    """
    clone = Path(__file__).parent.parent.parent
    if not (clone / "pyproject.toml").exists():
        return "unknown"  # an installed wheel, perhaps inside another repository
    try:
        commit = _git(clone, "rev-parse", "HEAD")
        changed = _git(clone, "diff", "--name-only", "HEAD", "--", ".", ":(exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    """Output of git in `folder`."""
    run = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
        errors="replace",
    )
    return run.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect numbers."""
    installed = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
