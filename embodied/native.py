"""Compilation of C for simulators and maps at first use, into a cache that later runs read."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.files import complete_or_absent

# Flags that change results (contraction of a*b+c) do so equally for all lanes: all run the same instructions.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
GCC_FLAGS = ("-fschedule-insns", "-fsched-pressure", "-fno-ipa-cp")
"""Flags that speed up long straight-line code by an eighth and compilation by a quarter; unknown to clang."""
SHARED = ("-shared", "-fPIC")
BACKENDS = ("c", "torch")
TEXT: dict[str, Any] = {"text": True, "encoding": "utf-8", "errors": "replace"}
"""Options of `subprocess.run` for output that may be in any encoding."""
_LOCK = threading.Lock()


def choose(backend: str | None, device: torch.device) -> str:
    """Choose `backend`, or the default of `device` if None: C on the CPU if there is a compiler, else torch.

    Raises:
        UserError: for an unknown backend, and for C where it is not the default.
    """
    default = "c" if device.type == "cpu" and compiler() else "torch"
    backend = backend or default
    if backend not in BACKENDS or (backend == "c" and default != "c"):
        raise UserError(f"expected a backend of {BACKENDS}, c with a compiler on the CPU; got {backend}")
    return backend


@cache
def compiler() -> str | None:
    """Path of the C compiler: $CC, cc, gcc or clang; None, with one warning, if there is none."""
    names = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        warnings.warn(
            "no C compiler found (cc, gcc, clang or $CC): simulators and maps run in plain torch or NumPy, several to "
            "hundreds of times slower; install one",
            RuntimeWarning,
            stacklevel=2,
        )
    return path


def load(source: str, flags: tuple[str, ...] | None = None, include: tuple[Path, ...] = ()) -> ctypes.CDLL | None:
    """Load the library of C `source`, compiled unless cached; None if there is no compiler.

    The cache key is the source, the headers in `include`, the compiler, its flags and the processor. Processes may
    compile the same library at once: each uses its own file name, and the last rename wins.

    Args:
        source: a translation unit.
        flags: of the compiler, instead of `FLAGS` (with `GCC_FLAGS`, if the compiler is GCC).
        include: folders of headers, whose content counts as source.

    Raises:
        UserError: if compilation fails, with the compiler's message.
    """
    with _LOCK:  # threads would share the temporary name
        return _load(source, flags, include)


@cache
def _load(source: str, flags: tuple[str, ...] | None, include: tuple[Path, ...]) -> ctypes.CDLL | None:
    program = compiler()
    if program is None:
        return None
    version = _version(program)
    if flags is None:
        flags = FLAGS if "clang" in version else FLAGS + GCC_FLAGS
    headers = [header.read_text(encoding="utf-8") for folder in include for header in sorted(folder.glob("**/*.h"))]
    key = "\0".join((source, *headers, version, *flags, _cpu()))
    path = cache_folder() / f"sims_{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        with complete_or_absent(path) as temporary:
            _compile([program, *flags, *SHARED, *(f"-I{folder}" for folder in include)], source, temporary)
    return ctypes.CDLL(str(path))


def declared(compiled: ctypes.CDLL | None, types: dict[str, list[Any]]) -> ctypes.CDLL:
    """Declare the types of the arguments of the functions of `compiled`."""
    assert compiled is not None
    for name, arguments in types.items():
        function = getattr(compiled, name)
        function.argtypes = arguments
        function.restype = None
    return compiled


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Pointers to the data of contiguous tensors (float32, int32 or bool)."""
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float32, torch.int32, torch.bool)
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def forget() -> None:
    """Look for the compiler and the cache again at the next `load`; for tests."""
    compiler.cache_clear()
    _load.cache_clear()


def cache_folder() -> Path:
    """Folder of the libraries: $XDG_CACHE_HOME/embodied-rl, in ~/.cache if unset.

    A new folder if that is read-only, and for a user who has no home directory.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied-rl"
    except RuntimeError:
        return _own_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    return folder if writable else _own_folder()


@cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="embodied-rl-"))


def _compile(command: list[str], source: str, path: Path) -> None:
    command = [*command, "-x", "c", "-", "-o", str(path), "-lm"]
    result = subprocess.run(command, input=source, capture_output=True, check=False, **TEXT)
    if result.returncode:
        reason = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[-200:])
        raise UserError(f"{command[0]} could not compile a simulator or a map ({reason}); set CC to another compiler")


def _version(program: str) -> str:
    result = subprocess.run([program, "--version"], capture_output=True, check=False, **TEXT)
    return program + result.stdout


def _cpu() -> str:
    """Description of the processor, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    cpu_lines = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join((platform.machine(), platform.processor(), *sorted(cpu_lines)))
