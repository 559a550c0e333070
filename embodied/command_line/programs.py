"""Where the programs and their configurations are: beside the packages in a clone, within them when installed.

`embodied train task=quadrotor_hover` is `python train.py task=quadrotor_hover`, from any folder.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
CLONE = (_ROOT / "pyproject.toml").is_file()
PROGRAMS = _ROOT if CLONE else Path(__file__).parents[1] / "programs"
CONFIGS = PROGRAMS / "configs"
NAMES = ("train", "evaluate", "compare", "export", "serve", "identify", "record", "replay")


def python() -> str:
    """The interpreter, as a user types it from here."""
    path, here = Path(sys.executable), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else "python"


def command(name: str) -> str:
    """What a user types to run the program `name` from here."""
    return f"{python()} {name}.py" if CLONE else f"embodied {name}"


def main() -> None:
    """Run the program that the first argument names with the others; without one, tell which there are."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        listed = "\n".join(f"  embodied {each} --help" for each in NAMES)
        print(f"embodied PROGRAM [key=value ...], where PROGRAM is one of\n\n{listed}\n\nembodied train list=tasks")
        sys.exit(name not in ("-h", "--help"))
    path = PROGRAMS / f"{name}.py"
    sys.argv, sys.path[0] = [str(path), *arguments], str(PROGRAMS)
    runpy.run_path(str(path), run_name="__main__")
