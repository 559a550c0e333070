"""Evaluate a trained policy: python evaluate.py checkpoint=DIR [key=value ...].

DIR is a run, such as outputs/libero_pick/<run>, or one of its checkpoints. The same command yields the same numbers.
Published weights (a folder, or a name on the hub) need a task, checkpoint=DIR task=libero_goal, and take task.* and
policy.*; they are evaluated as their authors do.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from embodied import start_up  # noqa: F401 - before PyTorch
from embodied.algorithms.offline.inverse_dynamics import labelled
from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.command_line.train_options import (
    GROUPS,
    TrainConfig,
    starting_options,
    with_conditions,
    with_starting_point,
)
from embodied.contract import Contract
from embodied.environment import Environment
from embodied.environments.delay import with_delay
from embodied.errors import UserError
from embodied.evaluation.groups import compare_in_groups
from embodied.evaluation.open_loop import OpenLoop, split
from embodied.execution.delay import delayed
from embodied.policy import TrainablePolicy
from embodied.report import margins, open_loop
from embodied.report.report import POLICY, write_evaluation
from embodied.saving import checkpoint
from embodied.saving.files import make_folder
from embodied.task import baseline_policies, check_sims, evaluation_distributions
from embodied.training.compute import prepare
from embodied.training.run_directory import new_directory
from embodied.viewer.options import viewing
from policies.vla.checkpoints.settings import has_fields
from real_robot.recording.demonstrations import reader
from real_robot.recording.recorded_task import join
from real_robot.sim_to_real import report as sim_to_real_report
from real_robot.sim_to_real.comparison import LATE, Comparison, EvaluateConfig, in_sim
from sims.registry import VIEWABLE, in_processes

log = logging.getLogger("embodied")


def run(arguments: list[str]) -> None:
    """Evaluate, print the table, and write it into the run, or next to the evaluated checkpoint."""
    train_options, (config, own_record) = [each for each in arguments if late(arguments).match(each)], own(arguments)
    config.check()
    start = published(arguments)
    if start:
        check_published(config, train_options)
    saved = None if start else checkpoint.load(config.checkpoint)
    overrides = {name: getattr(config, name) for name in ("suite", "assets", "executed")}
    common = [f"task.{name}={value}" for name, value in overrides.items() if value is not None] + train_options
    if start:
        common = with_starting_point([*starting_options(config.checkpoint), *common])

    def composed(changes: Sequence[str] = ()) -> tuple[TrainConfig, dict[str, Any]]:
        return compose(TrainConfig, "train", [*common, *changes], GROUPS, saved.config if saved else None)

    check_sims(composed()[0].task, config.sim)
    common += in_sim(config.sim[0]) if len(config.sim) == 1 else []
    trained, train_record = composed()
    if trained.task.held_out_share is not None:
        if saved is None:
            raise UserError(f"task={trained.task.name} has no simulator for published weights; fine-tune them first")
        return log.info(on_recordings(config, saved, trained))
    tasks = [composed(in_sim(name))[0].task for name in config.sim] or [trained.task]
    config.episodes = min(task.default_starts for task in tasks) if config.episodes is None else config.episodes
    config.num_envs = trained.evaluation_envs if config.num_envs is None else config.num_envs
    prepare(config.device, trained.threads if config.threads is None else config.threads)
    if saved is None:
        saved = published_checkpoint(trained)
        policy = published_policy(trained, saved.contract).to(config.device)
        make_folder(Path(saved.path or ""))
    else:
        saved.restore(policy := trained.policy.build(saved.contract).to(config.device))
    robot = delayed(policy, config.delay_s, config.execution, executed=config.executed, device=config.device)
    policies = {POLICY: robot} | (baseline_policies(trained.task) if config.baselines else {})
    usual = trained.task.published_distribution if start else None
    distributions = list(config.distributions or ([usual] if usual else evaluation_distributions(*tasks)))
    conditions = "task", "latency", "delay", "success_classifier", "reflex"
    record = own_record["values"] | {name: train_record["values"][name] for name in conditions}
    path = Path(saved.path or "")
    record |= {"checkpoint": config.checkpoint if start else str(path), "assets": trained.task.asset_kind}
    record["num_envs"], results = config.num_envs, path if start else checkpoint.results_folder(path)

    def environment(distribution: str, num_envs: int, changes: Sequence[str] = ()) -> Environment:
        changed = composed(changes)[0] if changes else trained
        task = viewed(with_conditions(changed, config.device))
        contract = task.contract(distribution)
        saved.check(replace(contract, executed=saved.contract.executed) if config.executed else contract)
        return task.environment(num_envs, distribution, "eval", device=config.device)

    options = {"starts_per_task": config.episodes, "first_start": config.first, "device": config.device}
    with viewing(config, VIEWABLE) as viewed:
        if config.margins:
            sweep = margins.measure(trained.task, partial(environment, num_envs=config.num_envs), robot, **options)
            return log.info(margins.write(results, sweep, record | {"weights_sha256": saved.weights_sha256}))
        if config.sim_to_real or len(config.sim) > 1:
            record |= {"episodes": config.episodes, "distribution": (first := distributions[0])}
            runs = Comparison(config, trained.task, path, robot, first, partial(environment, first)).run()
            return log.info(sim_to_real_report.write(results, runs, saved.contract.action, record, config.compared))
        evaluations = compare_in_groups(trained.task, environment, config.num_envs, distributions, policies, **options)
    log.info(write_evaluation(results / "evaluation.json", record, evaluations, trained.task))
    if config.video or config.render:
        film, filmed = results / "evaluation.mp4", with_delay(in_processes(trained.task), trained.delay)
        filmed.video(film, {"policy": policy}, config.device, distributions[0], config.first)
        log.info(f"wrote {film}")


def on_recordings(config: EvaluateConfig, saved: checkpoint.Checkpoint, trained: TrainConfig) -> str:
    """Compare the policy's actions with those of the held-out episodes of its data set; returns a line with the path.

    Raises:
        UserError: for options of simulators, and if the data set is missing or has changed.
    """
    simulated = ("distributions", "margins", "video", "render", "sim_to_real", "sim", "baselines", "execution")
    if unfit := [name for name in simulated if getattr(config, name)]:
        raise UserError(f"task={trained.task.name} has no simulator for {', '.join(unfit)}; leave them out")
    join(trained)
    prepare(config.device, trained.threads if config.threads is None else config.threads)
    task = with_delay(trained.task, trained.delay)
    saved.check(contract := task.contract(task.distributions[0]))
    path = Path(saved.path or "")
    demonstrations = reader(trained, trained.task)
    assert demonstrations is not None
    directory = path.parent.parent
    learned, held_out = split(demonstrations(contract, directory), trained.task.held_out_share)
    learned, _ = labelled(learned, contract, trained.label_actions, trained.seed, directory)
    saved.restore(policy := trained.policy.build(saved.contract).to(config.device))
    result = OpenLoop(held_out, learned, contract, config.device).evaluate(policy)
    record = {"checkpoint": str(path), "weights_sha256": saved.weights_sha256}
    return open_loop.write_evaluation(checkpoint.results_folder(path), record, result)


def published(arguments: Sequence[str]) -> bool:
    """Whether `arguments` name published weights: a folder with their files, or with a task a name on the hub."""
    options = dict(each.split("=", 1) for each in arguments if "=" in each)
    folder = Path(name := options.get("checkpoint", ""))
    on_hub = "task" in options and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name))
    return has_fields(folder) if folder.exists() else on_hub


def late(arguments: Sequence[str]) -> re.Pattern[str]:
    """Options of train.py that may be set here: of published weights all of task and policy."""
    return re.compile(rf"{LATE.pattern}|task[.=]|policy\.") if published(arguments) else LATE


def check_published(config: EvaluateConfig, train_options: Sequence[str]) -> None:
    """Raise UserError for published weights without a task, and for back ends, which need a run's checkpoint."""
    named = f"checkpoint={config.checkpoint} names published weights"
    if not any(each.startswith("task=") for each in train_options):
        raise UserError(f"{named}: add a task, such as task=libero_goal")
    if config.sim_to_real:
        raise UserError(f"{named}, and sim_to_real needs a run's checkpoint: fine-tune them first")


def published_checkpoint(trained: TrainConfig) -> checkpoint.Checkpoint:
    """Checkpoint without weights for the task of `trained`; its path is that of a new folder for results."""
    contract = trained.task.contract(trained.task.published_distribution or trained.task.distributions[0])
    return checkpoint.Checkpoint({}, contract, path=new_directory(trained.task.name, "_published"))


def published_policy(trained: TrainConfig, contract: Contract) -> TrainablePolicy:
    """Build the policy with the published weights in policy.weights.

    Raises:
        UserError: if the statistics of state and action in them do not fit `contract`.
    """
    policy = trained.policy.build(contract)
    if policy.lacks_statistics:
        raise UserError(f"{policy.lacks_statistics}; fine-tune the weights on demonstrations of {trained.task.name}")
    return policy


def own(arguments: list[str]) -> tuple[EvaluateConfig, dict[str, Any]]:
    """Compose the configuration from all arguments except options of train.py."""
    rest = [re.sub(r"^sim=(\w+)$", r"sim=[\1]", each) for each in arguments if not late(arguments).match(each)]
    return compose(EvaluateConfig, "evaluate", rest, {})


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, EvaluateConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], own))
