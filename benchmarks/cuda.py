"""A check of everything that runs on a CUDA device, in eight minutes, without a network.

    python benchmarks/cuda.py [--minutes 8] [--only NAME ...] [--device cuda|cpu] [--output outputs/cuda.json]

Parts run one after the other in the order of their importance. Each first compares the device with the CPU on the same
inputs, then measures. A part is a process of its own with a share of the time, and is killed when it exceeds the share;
unused time goes to later parts. The JSON file is written after every part: card, driver, versions, commit, figures,
agreement with the CPU, and tracebacks of failures. With `--only`, the other parts of an existing file of the same card
are preserved. On a CPU sizes are tiny: the code is tested, but the figures are meaningless. Packages are read from the
environment or from a folder on PYTHONPATH; a row whose package is missing is skipped. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] == str(ROOT / "benchmarks"):  # run as a program: `import cuda` must not mean this file
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.cuda_parts import MINUTES, PARTS, Part  # noqa: E402
from benchmarks.cuda_parts.record import RECORD, read  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

POLL_S = 0.05
ERROR_CHARACTERS = 6000
"""Number of last characters of a part's output that are stored if it fails."""


def check(
    parts: Mapping[str, Part], device: str, minutes: float, output: Path, *, keep: bool, commit: str | None = None
) -> dict[str, Any]:
    """Run `parts`, write `output` after each of them, and return its contents.

    With `keep`, results of other parts in `output` are preserved if it is of the same card. `commit` replaces git's.
    """
    machine_info = _about(device)
    report = machine_info | {"parts": _kept_parts(output, machine_info["card"]) if keep else {}}
    deadline = time.monotonic() + 60.0 * minutes
    shares = {name: part.seconds for name, part in parts.items()}
    for index, (name, part) in enumerate(parts.items()):
        remaining_s = deadline - time.monotonic()
        budget = max(0.0, remaining_s) * shares[name] / sum(list(shares.values())[index:])
        print(
            f"[{index + 1}/{len(parts)}] {name}: {part.about} (at most {budget:.0f} s, all {remaining_s:.0f} s)",
            flush=True,
        )
        result = run_part(part, device, budget)
        result |= {"git_commit": commit or git_commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        report["parts"][name] = result
        _write(output, report)
        print(f"    {_outcome(result)}", flush=True)
        for error in _errors(result):
            print(f"    {error}", flush=True)
    return report


def run_part(part: Part, device: str, budget_s: float) -> dict[str, Any]:
    """Run one part in a process of its own for at most `budget_s`; returns its outcome, figures and errors."""
    with tempfile.TemporaryDirectory() as name:
        folder, start_s = Path(name), time.monotonic()
        child, end = str(ROOT / "benchmarks/cuda_parts/child.py"), f"{time.time() + budget_s:.2f}"
        command = [sys.executable, child, part.module, device, end, str(folder)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            with _ended(process):
                try:
                    status: int | None = process.wait(budget_s)
                except subprocess.TimeoutExpired:
                    status = None
        seconds = round(time.monotonic() - start_s, 1)
        entries = read(folder / RECORD)
        agrees = all(each["agrees"] for each in entries["agreement"].values())
        outcome = "failed" if status or entries["failures"] or not agrees else "passed"
        if status is None:
            outcome = "ended"
        result = {"outcome": outcome, "seconds": seconds, "budget_s": round(budget_s, 1), **entries}
        if status or status is None:
            result["output"] = (folder / "output").read_text(errors="replace")[-ERROR_CHARACTERS:]
        return result


@contextmanager
def _ended(process: subprocess.Popen) -> Iterator[None]:
    """Kill `process` on exit, and every process that it started, in any session."""
    try:
        yield
    finally:
        for pid in _descendants(process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def _descendants(pid: int) -> list[int]:
    """The process `pid` and all its descendants, from Linux's /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the program's name may have spaces
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    processes = [pid]
    for each in processes:
        processes += parents.get(each, [])
    return processes


def _about(device: str) -> dict[str, Any]:
    """Card, driver, machine and versions."""
    about: dict[str, Any] = {"device": device, "cores": len(os.sched_getaffinity(0)), "versions": versions()}
    if device == "cpu":
        return about | {"card": "none, tiny sizes on a CPU", "machine": platform.machine()}
    card = torch.cuda.get_device_properties(0)
    return about | {
        "card": card.name,
        "memory_gb": round(card.total_memory / 1e9, 1),
        "driver": _driver(),
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
    }


def _driver() -> str | None:
    """Version of NVIDIA's driver; None where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _kept_parts(output: Path, card: str) -> dict[str, Any]:
    """Results in `output` if it is of the same `card`."""
    if not output.exists():
        return {}
    report = json.loads(output.read_text())
    return report["parts"] if report["card"] == card else {}


def _write(output: Path, report: Mapping[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with complete_or_absent(output) as path:
        path.write_text(dumps_rows(report))


def _outcome(result: Mapping[str, Any]) -> str:
    """One line with the outcome, the time, and the number of comparisons that agree."""
    compared = result["agreement"].values()
    agreeing = sum(each["agrees"] for each in compared)
    skipped = f", {len(result['skipped'])} skipped" if result["skipped"] else ""
    return f"{result['outcome']} after {result['seconds']} s, {agreeing} of {len(compared)} comparisons agree{skipped}"


def _errors(result: Mapping[str, Any]) -> list[str]:
    """One line for each row that failed or does not agree, and for a process that was killed."""
    lines = [f"{name}: {text.strip().splitlines()[-1]}" for name, text in result["failures"].items()]
    lines += [
        f"{name}: differs from the CPU by {_number(each['error'])}, allowed {each['tolerance']:.2g}"
        for name, each in result["agreement"].items()
        if not each["agrees"]
    ]
    if result["outcome"] == "ended":
        lines.append(f"its {result['budget_s']} s were over; figures until then are kept")
    elif "output" in result:
        lines.append((result["output"].strip().splitlines() or ["ended without a message"])[-1])
    return lines


def summary(report: Mapping[str, Any]) -> str:
    """Format the table of parts, followed by their figures, as Markdown."""
    rows = []
    for name, result in report["parts"].items():
        compared = result["agreement"].values()
        agreeing = f"{sum(each['agrees'] for each in compared)} of {len(compared)}"
        remarks = "; ".join(_errors(result) or [f"{key} skipped" for key in result["skipped"]])
        rows.append([name, result["outcome"], f"{result['seconds']:.0f}", agreeing, remarks.replace("|", "/")])
    lines = [table(["part", "outcome", "s", "agree with the CPU", "remarks"], rows), ""]
    figures = [
        [name, key, _number(value)]
        for name, result in report["parts"].items()
        for key, value in result["figures"].items()
    ]
    return "\n".join([*lines, table(["part", "figure", "value"], figures)])


def _number(value: Any) -> str:  # noqa: ANN401 - JSON
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_number(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_number(each) for each in value)
    return str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and print its table; the exit status is 1 unless every part passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "cuda.json")
    parser.add_argument("--commit", help="of a copy without git's history")
    options = parser.parse_args(arguments)
    if not options.minutes > 0.0:
        parser.error(f"--minutes: expected a positive number, got {options.minutes}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available to PyTorch here; --device cpu tries the same code at tiny sizes")
    parts = {name: part for name, part in PARTS.items() if name in (options.only or PARTS)}
    report = check(
        parts, options.device, options.minutes, options.output, keep=bool(options.only), commit=options.commit
    )
    print(f"\n{summary(report)}\n\nwrote {options.output}")
    unfinished = [name for name in parts if report["parts"][name]["outcome"] != "passed"]
    if unfinished:
        print(f"again, once mended: python benchmarks/cuda.py --only {' '.join(unfinished)} --output {options.output}")
    return int(bool(unfinished))


if __name__ == "__main__":
    sys.exit(main())
