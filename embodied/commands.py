"""Where the programs and their configurations are: beside the packages in a clone, within them when installed.

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
NAMES = ("train", "evaluate", "compare", "export", "serve", "identify", "record", "replay")


def python() -> str:
    """The interpreter, as a user types it from here."""
    path, here = Path(sys.executable), Path.cwd()
    if path.is_relative_to(here):
        return shlex.quote(str(path.relative_to(here)))
    return "python" if here == PROGRAMS or shutil.which("python") == str(path) else shlex.quote(str(path))


def command(name: str) -> str:
    """What a user types to run the program `name` from here."""
    path = Path(f"{name}.py") if Path.cwd() == PROGRAMS else PROGRAMS / f"{name}.py"
    return f"{python()} {shlex.quote(str(path))}" if CLONE else f"embodied {name}"


def module(name: str, *arguments: object) -> str:
    """What a user types to run the module `name` with `arguments`."""
    return f"{python()} -m {name} {shlex.join(map(str, arguments))}"


def option(name: str, value: object) -> str:
    """The option `name` with the text `value`, as Hydra reads it: quoted where it would read something else."""
    return f"{name}={quoted(str(value))}"


def typed(name: str, value: object) -> str:
    """`option` as a user types it in a shell."""
    return shlex.quote(option(name, value))


def quoted(text: str) -> str:
    """`text` for Hydra, in quotes unless it reads the same without."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    try:
        read = OverridesParser.create().parse_override(f"text={text}").value()
    except HydraException:
        read = None
    return text if read == text and isinstance(read, str) else QuotedString(text, Quote.double).with_quotes()


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
