"""Estimated cycles of one inference on a Cortex-M4: the instructions that QEMU executes, with the manual's timing.

The timing is that of Arm's Technical Reference Manual of the Cortex-M4 (sections 3.3.1 and 7.2.3), from memory without
wait states. Taken branches count `REFILL` more, of 1 to 3; integer divisions their longest time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from real_robot.firmware.toolchain import CORES, QEMU, call, find

REFILL = 2
"""Cycles to refill the pipeline after a branch."""
ARITHMETIC = ("vadd", "vsub", "vmul", "vdiv", "vsqrt", "vfma", "vfms", "vmla", "vmls", "vnmul")
"""Instructions whose result is ready one cycle later for the instruction behind them."""
SINGLE = ("ldr", "str")


def cycles(image: Path, inputs: torch.Tensor, work: Path) -> int:
    """Estimate the cycles of `policy_act` in `image` for the first of `inputs` [S, T, I], which runs in `work`."""
    symbols = _symbols(image, work)
    inputs[:1, :1].numpy().astype("<f4").tofile(work / "inputs.bin")
    # everything of the policy but its check, which would fill the disk
    start, end, check = (symbols[name][0] for name in ("policy_start", "policy_end", "policy_check"))
    sides = ((start, check), (check + symbols["policy_check"][1], end))
    ranges = ",".join(f"0x{first:x}+0x{last - first:x}" for first, last in sides if first < last)
    trace = ["-singlestep", "-d", "exec,nochain", "-dfilter", ranges, "-D", "trace.txt"]
    call([find("qemu-system-arm"), "-M", CORES["m4"].machine, *QEMU, "-kernel", image, *trace], work)
    lines = (work / "trace.txt").read_text().splitlines()
    addresses = [int(line.split("/")[1], 16) for line in lines if line.startswith("Trace")]
    act = symbols["policy_act"][0]
    first = addresses.index(act)
    return total_cycles(addresses[first : addresses.index(act, first + 1)], dict(_instructions(image, work)))


def _symbols(image: Path, work: Path) -> dict[str, tuple[int, int]]:
    """Address and size in bytes of each function, and the limits of the policy's code."""
    rows = [line.split() for line in call([find("arm-none-eabi-nm"), "-S", image], work).splitlines()]
    symbols = {row[3]: (int(row[0], 16), int(row[1], 16)) for row in rows if len(row) == 4}
    for line in call([find("arm-none-eabi-size"), "-A", image], work).splitlines():
        if line.startswith(".policy_flash"):
            size, address = map(int, line.split()[1:])
            symbols |= {"policy_start": (address, 0), "policy_end": (address + size, 0)}
    return symbols


def _instructions(image: Path, work: Path) -> Iterator[tuple[int, tuple[int, str, str]]]:
    """Size in bytes, name and operands of the instruction at each address."""
    for line in call([find("arm-none-eabi-objdump"), "-d", image], work).splitlines():
        if match := re.match(r"\s*([0-9a-f]+):\t([0-9a-f ]+)\t(\S+)(?:\t([^@;]*))?", line):
            address, code, name, operands = match.groups()
            yield int(address, 16), (len(code.replace(" ", "")) // 2, name.removesuffix(".w"), (operands or "").strip())


def total_cycles(addresses: list[int], instructions: dict[int, tuple[int, str, str]]) -> int:
    """Cycles of the instructions at `addresses`, in the order of execution; the last one is a branch that is taken."""
    total, earlier, result = 0, "", ""
    for address, following in zip(addresses, [*addresses[1:], 0], strict=True):
        size, name, operands = instructions[address]
        total += _own_cycles(name, operands)
        total += REFILL if following != address + size else 0
        registers = re.split(r"[\s,{}\[\]]+", operands)
        # a load or store behind another one overlaps with it; a result of the FPU is one cycle late
        total -= name[:3] in SINGLE and earlier[:3] in SINGLE and not name.startswith(("ldrd", "strd"))
        total += bool(result) and result in registers[0 if name.startswith("vst") else 1 :]
        earlier, result = name, registers[0] if name.startswith(ARITHMETIC) else ""
    return total


def _own_cycles(name: str, operands: str) -> int:
    """Cycles of an instruction by itself, without the refill of a branch."""
    listed = re.search(r"\{(.*)\}", operands)
    if listed and name.startswith(("ldm", "stm", "push", "pop", "vldm", "vstm", "vpush", "vpop")):
        return 1 + sum(map(_count, listed.group(1).split(",")))
    if name.startswith(("ldrd", "strd")):
        return 3
    if name.startswith((*SINGLE, "vldr", "vstr", "tbb", "tbh")):
        return 2 + (name.startswith(("vldr", "vstr")) and operands.startswith("d"))
    if name.startswith(("vdiv", "vsqrt")):
        return 14
    if name.startswith(("vfma", "vfms", "vfnm", "vmla", "vmls", "vnml")):
        return 3
    return 12 if name.startswith(("sdiv", "udiv")) else 1


def _count(registers: str) -> int:
    """Number of words in a register or a range such as s4-s19."""
    ends = [int(end) for end in re.findall(r"[rsd](\d+)", registers)]
    return (2 if registers.strip().startswith("d") else 1) * (ends[-1] - ends[0] + 1 if len(ends) == 2 else 1)
