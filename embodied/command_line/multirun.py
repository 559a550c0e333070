"""Sweeps: python train.py -m seed=0,1,2 runs a job for each combination of listed values, by Hydra's launchers.

Every job is a process of its own, whose numbers are those of the same run alone.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodied.command_line.config import whole
from embodied.commands import CONFIGS, command, option
from embodied.errors import UserError
from embodied.report.finished_run import SUMMARY
from embodied.report.repeating import typed_path
from embodied.runtime.console import LOG
from embodied.runtime.interrupt import GracefulStop
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import loads

log = logging.getLogger(__name__)
FOLDER = CONFIGS / "multirun"
STOPPED = [128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]
"""Exit statuses of jobs that were stopped after saving."""


@dataclass(frozen=True)
class Job:
    """A job that ended: its folder, its values of the swept options, and its exit status."""

    directory: Path
    options: str
    status: int


def multirun(program: str, arguments: Sequence[str], check: Callable[[list[str]], Any]) -> int:
    """Run the jobs of `arguments` by the program in the file `program`; return 1 if one failed, else 0.

    All are checked by `check` before the first begins. Runs of train.py have a folder each, next to a summary.

    Raises:
        UserError: if no option has a list, `check` raises for a job, or the sweep's folder has runs already.
    """
    hydra = [each for each in arguments if each.startswith(("hydra.", "hydra/"))]
    if unsupported := next((each for each in hydra if each.startswith("hydra/sweeper")), None):
        raise UserError(f"expected lists to sweep, such as seed=0,1,2; {unsupported} is not supported")
    options = sorted((whole(each) for each in arguments if each not in hydra), key=_depth, reverse=True)
    jobs, swept = expanded(options)
    if not swept:
        raise UserError("-m needs at least one list, such as seed=0,1,2; without one leave out -m")
    for each in jobs:
        check(each)
    is_training = Path(program).stem == "train"
    if is_training and any(each.startswith("output=") for each in options):
        raise UserError("output=DIR is the folder of one run; that of a sweep is hydra.sweep.dir=DIR")
    finished = _launch(
        [*hydra, *options], partial(_job, program=Path(program).resolve(), swept=swept, own=is_training), is_training
    )
    text = summary(finished, is_training)
    if is_training:
        with complete_or_absent(finished[0].directory.parent / SUMMARY) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    log.info(text)
    return int(any(job.status for job in finished))


def expanded(arguments: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Expand the arguments of each job, in Hydra's order; also returns the names of the swept options.

    Raises:
        UserError: for sweeps that are not lists.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    choices = []
    swept = []
    for text in arguments:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise UserError(f"cannot read {text!r}; expected key=value, or key=value,value") from error
        if not override.is_sweep_override():
            choices.append([text])
            continue
        if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
            raise UserError(f"cannot sweep {text!r}; expected a list, such as seed=0,1,2, or range(3)")
        key = override.get_key_element()
        swept.append(key)
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*choices)], swept


def summary(jobs: Sequence[Job], own: bool) -> str:
    """Markdown table of the jobs' results, and the compare.py commands if they have reports (`own`)."""
    rows = [f"| {typed_path(job.directory)} | {job.options} | {_achieved(job, own)} |" for job in jobs]
    lines = [f"Sweep of {len(jobs)} jobs", "", "| folder | options | result |", "| --- | --- | --- |", *rows]
    reported = [job for job in jobs if _report(job)]
    tasks = dict.fromkeys(_report(job)["task"] for job in reported)
    groups = [[str(typed_path(job.directory)) for job in reported if _report(job)["task"] == task] for task in tasks]
    commands = [f"  {command('compare')} {shlex.join(paths)}" for paths in groups if len(paths) > 1]
    return "\n".join([*lines, *(["", "Next:", *commands] if commands else [])])


def _depth(argument: str) -> int:
    """Depth of an option's name: task.tasks=[a] must precede task=NAME, which replaces all of task here."""
    return argument.partition("=")[0].count(".")


def _check_new(folder: Path) -> None:
    """Raise UserError if the sweep's `folder` has runs, or the summary of some."""
    if next((path for name in (SUMMARY, f"**/{LOG}", "**/report.json") for path in folder.glob(name)), None):
        raise UserError(f"{folder} already has runs; choose another hydra.sweep.dir, or continue each with resume=DIR")


def _launch(overrides: list[str], job: Callable[[Any], Job], own: bool) -> list[Job]:
    """Run `job` for each combination of `overrides` by Hydra's sweeper and launcher; `own` runs use a new folder."""
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    options = OmegaConf.create()
    store = ConfigStore.instance()
    for key in [each.partition("=")[0] for each in reversed(overrides) if not each.startswith("hydra")]:
        OmegaConf.update(options, key, None, force_add=True)
        store.repo.pop(key, None)  # a group of an earlier composition; its choice is a value here
    store.store(name="swept", node=options)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            if own:
                composed = hydra.compose_config("multirun", overrides, RunMode.MULTIRUN, with_log_configuration=False)
                _check_new(Path(composed.hydra.sweep.dir))
            batches = hydra.multirun("multirun", job, overrides, with_log_configuration=False)
    except HydraException as error:
        message = " ".join(str(error).split()).partition(" Config search path")[0]
        extra = "; joblib and submitit_slurm: pip install 'embodied-rl[sweep]'" if "'hydra/launcher/" in message else ""
        raise UserError(f"{message}{extra}") from error
    return [each.return_value for batch in batches for each in batch]


def _job(_: Any, program: Path, swept: list[str], own: bool) -> Job:  # noqa: ANN401 - Hydra's configuration
    """Run one job in a process of its own, which stops with this one; Hydra's state has its options and folder."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    arguments = list(hydra.overrides.task)
    directory = Path(hydra.runtime.output_dir)
    swept_options = ", ".join(each for each in arguments if each.partition("=")[0] in swept)
    log.info(f"job {hydra.job.num}: {swept_options}, in {typed_path(directory)}")
    arguments += [option("output", directory)] if own else []
    status = run_job(program, arguments, "Stopping the sweep")
    return Job(directory, swept_options, status)


def run_job(program: Path, arguments: Sequence[str], message: str, ends: Callable[[], bool] = lambda: False) -> int:
    """Run `program` in a process of its own; returns its exit status. It is stopped where `ends` returns True.

    A signal to this process prints `message`, and stops the other one, too.

    Raises:
        KeyboardInterrupt: after such a signal, once the other process has ended.
    """
    with GracefulStop(message) as stop:
        process = subprocess.Popen([sys.executable, str(program), *arguments], process_group=0)
        while process.poll() is None and not stop.requested:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                if ends():
                    break
        if process.poll() is None:
            process.terminate()
            process.wait()
        if stop.requested:
            raise KeyboardInterrupt
    return process.returncode


def _achieved(job: Job, own: bool) -> str:
    if job.status in STOPPED:
        return "stopped"
    if job.status:
        return f"failed with status {job.status}"
    return _report(job)["headline"] if own else "done"


def _report(job: Job) -> dict[str, Any]:
    path = job.directory / "report.json"
    return loads(path.read_text(encoding="utf-8")) if path.exists() else {}
