"""Paths of the programs and their configurations: next to the packages in a clone, within them when installed.

`embodied train task=quadrotor_hover` is `python train.py task=quadrotor_hover`, from any folder.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
CLONE = (_ROOT / "pyproject.toml").is_file()
PROGRAMS = _ROOT if CLONE else Path(__file__).parent / "programs"
CONFIGS = PROGRAMS / "configs"
NAMES = (
    *("train", "tune", "evaluate", "compare", "plot", "export", "serve"),
    *("identify", "classify", "reflex", "record", "replay", "actor"),
)


def python() -> str:
    """Interpreter, as a user types it in the working directory."""
    path = Path(sys.executable)
    folder = Path.cwd()
    if path.is_relative_to(folder):
        return shlex.quote(str(path.relative_to(folder)))
    return "python" if folder == PROGRAMS or shutil.which("python") == str(path) else shlex.quote(str(path))


def command(name: str) -> str:
    """Command that runs the program `name`, as typed in the working directory."""
    path = Path(f"{name}.py") if Path.cwd() == PROGRAMS else PROGRAMS / f"{name}.py"
    return f"{python()} {shlex.quote(str(path))}" if CLONE else f"embodied {name}"


def module(name: str, *arguments: object) -> str:
    """Command that runs the module `name` with `arguments`."""
    return f"{python()} -m {name} {shlex.join(map(str, arguments))}"


def option(name: str, value: object) -> str:
    """Option `name` with the text `value` for Hydra: quoted where Hydra would parse another value."""
    return f"{name}={quoted(str(value))}"


def typed(name: str, value: object) -> str:
    """Option as a user types it in a shell."""
    return shlex.quote(option(name, value))


def quoted(text: str) -> str:
    """Text for Hydra, in quotes unless it parses the same without."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"text={text}").value()
    except HydraException:
        parsed = None
    return text if parsed == text and isinstance(parsed, str) else QuotedString(text, Quote.double).with_quotes()


def main() -> None:
    """Run the program that the first argument names with the other arguments; without one, list the programs."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        programs = "\n".join(f"  embodied {each} --help" for each in NAMES)
        print(f"embodied PROGRAM [key=value ...], where PROGRAM is one of\n\n{programs}\n\nembodied train list=tasks")
        sys.exit(name not in ("-h", "--help"))
    path = PROGRAMS / f"{name}.py"
    sys.argv, sys.path[0] = [str(path), *arguments], str(PROGRAMS)
    runpy.run_path(str(path), run_name="__main__")
