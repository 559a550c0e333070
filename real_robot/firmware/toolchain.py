"""Compilers and the emulator: their flags, and functions that run exported C on this machine or an emulated core."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.errors import UserError
from real_robot.firmware.samples import STEPS

C = Path(__file__).with_name("c")
KERNELS = C / "policy_kernels.h"
COMMON = ("-std=c99", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wshadow", "-Wdouble-promotion", "-Werror")
PACKAGES = {
    "arm-none-eabi-gcc": "apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi",
    "arm-none-eabi-size": "apt-get install binutils-arm-none-eabi",
    "qemu-system-arm": "apt-get install qemu-system-arm",
}
QEMU = (
    "-semihosting-config",
    "enable=on,target=native",
    "-icount",
    "shift=0",
    "-nographic",
    "-monitor",
    "none",
    "-serial",
    "none",
)
TIME_LIMIT_S = 120


@dataclass(frozen=True)
class Core:
    """A Cortex-M core and the QEMU machine that has it."""

    flags: tuple[str, ...]
    machine: str


CORES = {
    "m4": Core(("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"), "mps2-an386"),
    "m7": Core(("-mcpu=cortex-m7", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv5-sp-d16"), "mps2-an500"),
}
REPORT = np.dtype([(name, "<u4") for name in ("check", "stack_bytes", "ticks", "empty_ticks", "loop_ticks")])
"""Record written by c/core.c: SysTicks of all inferences, of the same number of empty calls, and of the loop below."""
LOOP_INSTRUCTIONS = 2_000_000
"""Instructions in c/core.c's calibration loop, which determines the number of instructions per SysTick."""


@dataclass(frozen=True)
class CoreRun:
    """One run on an emulated core: actions [S, T, A], policy_check's result, memory in bytes, instructions."""

    outputs: Tensor
    check: int
    flash_bytes: int
    ram_bytes: int
    stack_bytes: int
    instructions: int


def find(tool: str) -> str:
    """Path of a tool.

    Raises:
        UserError: if it is not installed; the message names its package.
    """
    path = shutil.which(tool)
    if path is None:
        raise UserError(f"{tool} is not installed: {PACKAGES[tool]}")
    return path


def host_compiler() -> str:
    """Path of this machine's C compiler.

    Raises:
        UserError: if no compiler is installed.
    """
    path = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))), None)
    if path is None:
        raise UserError("no C compiler found; exported C has to be checked: apt-get install gcc")
    return path


def call(command: Sequence[str | Path], directory: Path) -> str:
    """Run a tool in `directory`; returns its output.

    Raises:
        UserError: if it fails or does not end in time.
    """
    words = [str(word) for word in command]
    try:
        result = subprocess.run(
            words,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=TIME_LIMIT_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{Path(words[0]).name} did not end within {TIME_LIMIT_S} s") from error
    if result.returncode:
        output = " ".join((result.stderr or result.stdout).split())[:300]
        raise UserError(f"{Path(words[0]).name} failed with status {result.returncode}: {output}")
    return result.stdout


def run_on_host(source: Path, inputs: Tensor, work: Path) -> tuple[Tensor, int]:
    """Compile the export in `source` for this machine and run it on `inputs` [S, T, I] in the folder `work`.

    Returns the actions [S, T, A] and policy_check's result.
    """
    # commands run in `work`
    source = source.absolute()
    program = work / "host"
    flags = [*COMMON, f"-DSTEPS={STEPS}", f"-I{source}"]
    call([host_compiler(), *flags, C / "host.c", source / "policy.c", "-o", program], work)
    _write_inputs(inputs, work)
    check = int(call([program], work))
    return _read_outputs(inputs, work), check


def build_for_core(source: Path, core: Core, work: Path) -> Path:
    """Cross-compile the export in `source` into an image for `core`; `run_image` runs it."""
    compiler = find("arm-none-eabi-gcc")
    source = source.absolute()
    flags = [*COMMON, *core.flags, "-ffreestanding", "-ffunction-sections", "-fdata-sections", f"-I{source}"]
    for file in (source / "policy.c", C / "core.c"):
        call([compiler, *flags, f"-DSTEPS={STEPS}", "-c", file, "-o", work / f"{file.stem}.o"], work)
    image = work / "core.elf"
    link = ["-nostdlib", "-Wl,--gc-sections", f"-Wl,-T,{C / 'core.ld'}"]
    call([compiler, *core.flags, *link, "core.o", "policy.o", "-lc", "-lgcc", "-o", image], work)
    return image


def run_image(image: Path, core: Core, inputs: Tensor, work: Path) -> CoreRun:
    """Run an image on `inputs` [S, T, I] under QEMU."""
    _write_inputs(inputs, work)
    call([find("qemu-system-arm"), "-M", core.machine, *QEMU, "-kernel", image], work)
    report = np.fromfile(work / "report.bin", dtype=REPORT)[0]
    # instructions per inference = (ticks - empty ticks) * (instructions / tick) / count
    per_tick = LOOP_INSTRUCTIONS / int(report["loop_ticks"])
    count = inputs.shape[0] * inputs.shape[1]
    sizes = _section_sizes(image, work)
    return CoreRun(
        outputs=_read_outputs(inputs, work),
        check=int(report["check"]),
        flash_bytes=sizes[".policy_flash"] + sizes[".policy_data"],
        ram_bytes=sizes[".policy_data"] + sizes[".policy_bss"],
        stack_bytes=int(report["stack_bytes"]),
        instructions=round((int(report["ticks"]) - int(report["empty_ticks"])) * per_tick / count),
    )


def _section_sizes(image: Path, work: Path) -> dict[str, int]:
    rows = (line.split() for line in call([find("arm-none-eabi-size"), "-A", image], work).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 3 and row[0].startswith(".")}


def _write_inputs(inputs: Tensor, work: Path) -> None:
    inputs.numpy().astype("<f4").tofile(work / "inputs.bin")


def _read_outputs(inputs: Tensor, work: Path) -> Tensor:
    values = np.fromfile(work / "outputs.bin", dtype="<f4").astype(np.float32)
    return torch.from_numpy(values).view(*inputs.shape[:2], -1)
