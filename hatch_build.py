"""Build hook: compiles sims/libero/native.c against the headers in the mujoco wheel, for wheels and editable installs.

Without a C compiler or mujoco's headers the package installs all the same, and LIBERO steps in numpy with one warning.
Run as a script to compile in a working tree: `python hatch_build.py`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object

SOURCE = Path("sims/libero/native.c")
LIBRARY = Path("sims/libero/libnative.so")
# No contraction of a*b+c: results are the same on every machine. MuJoCo's symbols are found when the library is loaded.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]


class NativeBuildHook(BuildHookInterface):
    """Compiles the library and adds it to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel or an editable install (`version` "editable") is built."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        if compile_library(root) is None and version != "editable":  # an editable install reads it from the tree
            build_data["infer_tag"] = False  # the tag this makes is py3-none-<platform>: native code, no Python ABI
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(root / LIBRARY)] = str(LIBRARY)


def compile_library(root: Path) -> str | None:
    """Compile in the tree at `root`; returns why it could not, or None. An older library is removed first."""
    (root / LIBRARY).unlink(missing_ok=True)
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CC", "cc"), "cc", "gcc", "clang"])), None)
    if compiler is None:
        return "no C compiler found"
    spec = importlib.util.find_spec("mujoco")
    if spec is None or not spec.origin:
        return "mujoco is not installed"
    include = Path(spec.origin).parent / "include"
    flags = [*FLAGS, "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else FLAGS
    with tempfile.TemporaryDirectory(dir=root / LIBRARY.parent) as folder:
        built = Path(folder) / LIBRARY.name
        command = [compiler, *flags, f"-I{include}", str(root / SOURCE), "-o", str(built), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return f"{compiler} failed:\n{result.stderr}"
        built.replace(root / LIBRARY)  # whole or not at all
    return None


if __name__ == "__main__":
    if problem := compile_library(Path(__file__).parent):
        sys.exit(f"{SOURCE} was not compiled: {problem}")
