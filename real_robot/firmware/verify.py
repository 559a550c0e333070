"""Verify exported C on an emulated core: python -m real_robot.firmware.verify DIR [--core m4|m7] [--json].

Compiles the export for this machine and for a Cortex-M, runs both on 1,000 stored inputs (the core under QEMU) and
compares them with the policy and with each other. Instructions are counted, not cycles: QEMU models neither pipeline
nor wait states.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from embodied.errors import UserError
from embodied.export.network import ToRange
from real_robot.firmware.record import exported_contract, read_record
from real_robot.firmware.samples import Samples
from real_robot.firmware.toolchain import CORES, build_for_core, find, run_image, run_on_host

TOLERANCE = {"float32": 1e-6, "int16": 1e-3, "int8": 0.05}
"""Largest allowed difference from the policy, in half action ranges; rounding is added for ranges far from zero."""


@dataclass(frozen=True)
class Verification:
    """Result for one export on one core.

    Memory is in bytes, `instructions` per inference, `max_error` in half action ranges. `check` is the result of
    policy_check() at boot, 0 if all is well. `stack_bytes` is the larger of policy_act's and policy_check's.
    """

    core: str
    weights: str
    inputs: int
    check: int
    flash_bytes: int
    ram_bytes: int
    stack_bytes: int
    instructions: int
    max_error: float
    tolerance: float
    host_equals_core: bool

    @property
    def good(self) -> bool:
        """Whether the export matches the policy."""
        return self.check == 0 and self.max_error <= self.tolerance and self.host_equals_core


def verify(directory: Path, core: str = "m4", tolerance: float | None = None) -> Verification:
    """Build and run the export in `directory` on `core`, "m4" or "m7"; `tolerance` in half action ranges.

    Raises:
        UserError: if a tool is missing, or `directory` holds no C export or a damaged one.
    """
    record = read_record(directory, "c")
    contract = exported_contract(directory)
    samples = Samples.load(directory)
    for tool in ("arm-none-eabi-gcc", "arm-none-eabi-size", "qemu-system-arm"):
        find(tool)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        on_host, _ = run_on_host(directory, samples.inputs, work)
        image = build_for_core(directory, CORES[core], work)
        run = run_image(image, CORES[core], samples.inputs, work)
    limits = ToRange(contract.action.low, contract.action.high)
    allowed_error = (TOLERANCE[record["weights"]] if tolerance is None else tolerance) + limits.rounding
    return Verification(
        core=core,
        weights=record["weights"],
        inputs=samples.inputs.shape[0] * samples.inputs.shape[1],
        check=run.check,
        flash_bytes=run.flash_bytes,
        ram_bytes=run.ram_bytes,
        stack_bytes=run.stack_bytes,
        instructions=run.instructions,
        max_error=samples.error(run.outputs, limits.half_range.repeat(contract.executed)),
        tolerance=allowed_error,
        # bits are compared, not numbers, so that 0.0 and -0.0 differ
        host_equals_core=torch.equal(on_host.view(torch.int32), run.outputs.view(torch.int32)),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the exit status is 0 only if the core matches the policy."""
    parser = argparse.ArgumentParser(
        prog="python -m real_robot.firmware.verify", description=str(__doc__).split("\n\n")[1]
    )
    parser.add_argument("directory", type=Path, help="folder written by export.py target=c")
    parser.add_argument("--core", choices=CORES, default="m4", help="Cortex-M4 (default) or M7")
    parser.add_argument(
        "--tolerance", type=float, help="largest error, in half action ranges (1e-6; int16: 1e-3; int8: 0.05)"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(arguments)
    try:
        result = verify(options.directory, options.core, options.tolerance)
    except (OSError, UserError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    values = asdict(result)
    text = json.dumps(values, indent=2) if options.json else "\n".join(f"{key}: {values[key]}" for key in values)
    sys.stdout.write(text + "\n")
    if not result.good:
        sys.exit(
            f"error: the core does not match the policy: expected check 0, max_error of at most "
            f"{result.tolerance:g} and host_equals_core, got the above"
        )


if __name__ == "__main__":
    main()
