"""Learn a reflex for a policy: python reflex.py checkpoint=RUN [key=value ...].

The policy's own episodes in its simulator, with exploration, and recorded ones (demonstrations=LOGS) teach a small
critic the risk of a failure; a threshold of the risk is chosen on other episodes. The reflex is written into a folder
that evaluate.py, train.py and policy_node read (reflex=DIR). Options are printed by --help.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import MISSING

from embodied import start_up  # noqa: F401 - before PyTorch
from embodied.algorithms.off_policy import risk
from embodied.algorithms.off_policy.risk import RecordedFailures, RiskConfig, RiskLearner
from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.command_line.train_options import GROUPS, TrainConfig
from embodied.configuration import FiniteFloat, Fraction, NonNegativeInt, PositiveInt, Seed
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.environments.latency import with_latency
from embodied.environments.reflex import ReflexTask, in_steps
from embodied.errors import UserError
from embodied.execution.reflex import Reflex, braking
from embodied.report.markdown import table
from embodied.saving import checkpoint
from embodied.seeding import generator
from embodied.task import Task
from embodied.training.compute import prepare
from embodied.training.reflex import chosen_threshold, collect, rows, validate
from real_robot.recording.demonstrations import DemonstrationOptions, reader
from real_robot.recording.recorded_task import join
from sims.registry import in_processes

log = logging.getLogger("embodied")


@dataclass
class ReflexConfig(DemonstrationOptions):
    """Options of the program.

    The critic learns from `episodes` of the policy in the `distribution` (by default that of training), a share
    `varied` of whose chunks is slower or random, and from `demonstrations`, recorded episodes of any outcome.
    `brake` is the action at which the robot stops, by default zeros for velocities; null keeps the policy's value of an
    element. Unless `risk.reciprocal` is named, the critic reads the same distances as reciprocals as the policy. The
    `threshold` is chosen on `validation_starts` initial states of each task unless it is named. The reflex
    is written to `output`, by default RUN/reflex.
    """

    checkpoint: str = MISSING
    episodes: NonNegativeInt = 1_000
    distribution: str | None = None
    varied: Fraction = 0.2
    validation_starts: PositiveInt = 200
    threshold: Fraction | None = None
    brake: list[FiniteFloat | None] | None = None
    risk: RiskConfig = field(default_factory=RiskConfig)
    output: str | None = None
    num_envs: PositiveInt | None = None
    seed: Seed = 0
    device: str = "cpu"
    threads: PositiveInt | None = None


def run(arguments: list[str]) -> None:
    """Collect or read episodes, learn the critic, choose the threshold, and write the reflex."""
    config, _ = compose(ReflexConfig, "reflex", arguments, {})
    saved = checkpoint.load(config.checkpoint)
    trained, _ = compose(TrainConfig, "train", [], GROUPS, saved.config)
    output = Path(config.output or checkpoint.results_folder(Path(saved.path or "")) / "reflex")
    if output.exists():
        raise UserError(f"{output} exists; choose another output=DIR")
    join(trained)
    prepare(config.device, trained.threads if config.threads is None else config.threads)
    distribution = config.distribution or trained.task.distributions[0]
    task, steps = (with_latency(in_processes(each), trained.latency) for each in (trained.task, in_steps(trained.task)))
    saved.check(task.contract(distribution))
    policy = trained.policy.build(saved.contract).to(config.device)
    saved.restore(policy)
    contract = steps.contract(distribution)
    if not config.risk.reciprocal:
        config.risk.reciprocal = list(getattr(trained.policy, "reciprocal", ()))
    brake = braking(contract, config.brake)
    draws = generator(config.seed, "reflex", device=config.device)
    learner = RiskLearner(contract, config.risk, draws, config.device)
    reflex = Reflex(learner.critic, contract, 1.0 if config.threshold is None else config.threshold, brake)
    num_envs = config.num_envs or trained.evaluation_envs
    sources = []
    if config.episodes:
        env = steps.environment(min(num_envs, config.episodes), distribution, "train", config.seed, config.device)
        options = {
            "episodes": config.episodes,
            "varied": config.varied,
            "generator": draws,
            "device": config.device,
        }
        sources.append(collect(env, policy, reflex, **options))
        env.close()
    if read := reader(config, trained.task):
        with TemporaryDirectory() as index:  # the run's own index is that of its demonstrations
            sources.append(read(contract, Path(index)))
    if not sources:
        raise UserError("episodes=0 leaves nothing to learn from; name recorded episodes: demonstrations=LOGS")
    log.info(learned(learner, sources))
    results = []
    if config.threshold is None:

        def environment(threshold: float | None) -> Environment:
            chosen: Task = task if threshold is None else ReflexTask(task, steps, replace(reflex, threshold=threshold))
            return chosen.environment(num_envs, distribution, "train", config.seed, config.device)

        options = {"starts_per_task": config.validation_starts, "signals": config.risk.signals, "device": config.device}
        results = validate(environment, policy, **options)
        names = ("threshold", "score", "failed", "time_out", "reflex")
        log.info(table(list(names), [[f"{getattr(each, name) or 0:.3g}" for name in names] for each in results]))
        reflex = replace(reflex, threshold=chosen_threshold(results))
    risk.save(output, learner.critic, config.risk, reflex, rows(results))
    log.info(f"wrote {output}, threshold {reflex.threshold:g}: evaluate.py checkpoint={saved.path} reflex={output}")


def learned(learner: RiskLearner, sources: list[Episodes]) -> str:
    """Let `learner` learn from all `sources`; returns a line with what it learned from."""
    episodes = Episodes.join([replace(each, texts=None, pictures=None) for each in sources])
    recorded = RecordedFailures(episodes, learner.contract, learner.config)
    metrics = learner.fit(recorded, learner.config.steps)
    count = int((recorded.failure == 1.0).sum())
    unknown = int(recorded.failure.isnan().sum())
    source = f"{count} failures in {len(episodes.ends)} episodes, {unknown} steps unknown"
    return f"learned from {source}: risk {metrics['risk']:.3g}, loss {metrics['risk_loss']:.3g}"


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ReflexConfig)


if __name__ == "__main__":
    sys.exit(
        program.main(run, describe, sys.argv[1:], lambda arguments: compose(ReflexConfig, "reflex", arguments, {}))
    )
