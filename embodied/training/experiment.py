"""A run as an experiment: stages evaluated on the same episodes, a control, a report, and checkpoints.

The reinforcement learning loop is in `loop.py`. The control continues SFT, with its optimiser, average and final
learning rate, for as many gradient steps as RL took: RL's gain is reported over the better of SFT and control. A
killed run, once resumed, gives the same numbers as an uninterrupted one if its simulator is `Restorable`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.sft import SFT
from embodied.contract import Contract
from embodied.data.demonstrations import report_notes, with_privileged
from embodied.data.episodes import Episodes
from embodied.environment import Environment, SwitchableEnvironment, lacking
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.in_training import InTraining
from embodied.export.network import export_target
from embodied.interrupt import GracefulStop
from embodied.placement.local import Elsewhere, Local, Processes, one_after_another, own_share
from embodied.policy import Policy, PolicyConfig, TrainablePolicy, unread_observations
from embodied.precision import precision_of
from embodied.progress import Progress
from embodied.report.curves import CURVES
from embodied.report.headline import BASELINE
from embodied.report.report import Report, title, told
from embodied.rollout.ahead import CollectorAhead
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector, RolloutSource
from embodied.run_options import ExperimentConfig
from embodied.saving import checkpoint
from embodied.saving.tree import copy_tree
from embodied.task import Learner, LearnerConfig, Task, evaluation_distributions
from embodied.training.held_out import HeldOut
from embodied.training.logging import Logger, NoLogger
from embodied.training.loop import Iteration, build, iterations
from embodied.training.own_state import own_seed
from embodied.training.saved_run import SavedRun, Stage

log = logging.getLogger(__name__)
PATIENCE_S = 1.0
"""Longest iteration, s, that a stop waits for; longer ones are abandoned, which needs a copy of the state before."""
SEGMENT = 500
"""Gradient steps of supervised training between log entries, and between checkpoints."""


class Experiment(SavedRun):
    """Run in `directory`, which continues from a checkpoint there, if there is one."""

    def __init__(
        self,
        config: ExperimentConfig,
        task: Task,
        policy: PolicyConfig,
        algorithm: LearnerConfig,
        directory: str | Path,
        *,
        record: dict[str, Any],
        seed: int = 0,
        device: str = "cpu",
        wandb_project: str | None = None,
        demonstrations: Callable[[Contract, Path], Episodes] | None = None,
        world: Processes | None = None,
    ) -> None:
        """Build all parts, then start to write; `record`, the composed configuration, is stored in checkpoints.

        `demonstrations`, called with the task's contract and the directory, replaces the task's own demonstrations.
        Several processes make the same `Experiment`, each in its `world`: the first one writes and evaluates.
        """
        precision_of(config.precision, policy.own_precision)  # raises if both set a precision
        directory = Path(directory)
        report = Report(task.name, task.asset_kind, seed, device=device, arguments=record.get("arguments"))
        super().__init__(directory, record, config.env_steps, report, world or Local(device=device))
        self.config, self.task, self.algorithm, self.seed, self.device = config, task, algorithm, seed, device
        self._build_policy, saved = policy.build, self.saved(directory, record, config.env_steps)
        seeding.seed_everything(seed)
        self.contract = task.contract(task.distributions[0])
        if saved:
            saved.check(self.contract)
        # Each process has its own environments and noise; the learner's generators are the same in all of them.
        self.own_seed = own_seed(seed, self.world, saved)
        self.policy = self._policy(None if saved else config.start_from)
        self.env = self._environment("train", task.distributions[0])
        if unread := unread_observations(self.policy):
            self.report.notes.append(f"The policy does not read these observations: {', '.join(unread)}.")
        self.report.notes += lacking(self.env) + ([self.world.remark] if isinstance(self.world, Elsewhere) else [])
        with seeding.undisturbed():
            self.evaluation_envs: dict[str, Environment] = {}
            if not isinstance(self.env, SwitchableEnvironment) and not self.world.rank:
                self.evaluation_envs = {name: self._environment("eval", name) for name in task.distributions}
            # An empty set of demonstrations suffices to check the parts, before a long recording of demonstrations.
            self._try(Episodes.of(TensorDict({}, [0]), torch.zeros(0, *self.contract.action.shape)))
            self.held_out = self._held_out()
        self.demonstrations = self._demonstrate(demonstrations)
        if self.own_seed != seed:
            seeding.seed_everything(self.own_seed)
        if unread:
            log.warning("the policy does not read %s", ", ".join(unread))
        self.stage, *_ = self.stages = self._plan()
        rows = self._restore(saved) if saved else 0
        options = {"config": record, "wandb_project": wandb_project, "rows": rows}
        self.logger = NoLogger() if self.world.rank else Logger(directory, **options)

    def _plan(self) -> list[Stage]:
        """Stages of the run, in order.

        Raises:
            UserError: for supervised training without demonstrations, and RL of weights without statistics.
        """
        requested = self.config.stages or (["rl"] if self.demonstrations is None else ["sft", "rl"])
        if "sft" in requested and self.demonstrations is None:
            raise UserError(f"task={self.task.name} has no demonstrations for stages=[sft]; use stages=[rl]")
        first = [Stage.START] if self.config.start_from else []
        if requested == ["rl"] and not first and self.policy.lacks_statistics:
            raise UserError(f"{self.policy.lacks_statistics}; stages=[sft,rl] computes them from demonstrations")
        control = [Stage.CONTROL] if self.config.control and len(requested) == 2 else []
        return [*first, *map(Stage, requested), *control, Stage.DONE]

    def _held_out(self) -> HeldOut:
        """Evaluations during RL, in the evaluation environment; a note states why there are none."""
        trained_on, config = self.task.distributions[0], self.config
        self.report.in_training = InTraining(trained_on)
        held_out = HeldOut(
            None if self.world.rank else config.evaluate_every_steps,
            self.evaluation_envs.get(trained_on),
            self.report.in_training,
            final=config.evaluation_starts,
            device=self.device,
            precision=config.precision,
        )
        if held_out.refused and held_out.automatic and config.stages != ["sft"]:
            self.report.notes.append(f"No evaluations during training: {held_out.refused}.")
        return held_out

    def _policy(self, start_from: str | None = None) -> TrainablePolicy:
        """Build a policy, with the weights of `start_from` if it is set."""
        policy = self._build_policy(self.contract).to(self.device)
        if start_from:
            checkpoint.load_weights(start_from, self.contract).restore(policy)
        return self.world.place(policy)

    def _environment(self, split: str, distribution: str) -> Environment:
        count, seed = self.config.evaluation_envs, 0
        if split == "train":
            count, seed = own_share(self.config.num_envs, self.world), self.own_seed
        env = self.task.environment(count, distribution, split, seed, self.device)
        if count < len(env.task_names):
            scope = f" in each of {self.world.size} processes" if self.world.size > 1 else ""
            raise UserError(f"expected num_envs of at least {len(env.task_names)}, one per task{scope}; got {count}")
        return env

    def _demonstrate(self, given: Callable[[Contract, Path], Episodes] | None) -> Episodes | None:
        """Load demonstrations by `given`, else the task's own; None if there are none or no stage reads them."""
        if self.config.stages == ["rl"] and not self.algorithm.reads_demonstrations:
            if given:
                log.warning("demonstrations= is not read: neither stages=[rl] nor this algorithm's options ask for any")
            return None
        with self.timer("demonstrations"), one_after_another(self.world):  # the first process records, the others read
            task_demonstrations = self.task.demonstrations
            demonstrations = (
                given(self.contract, self.directory) if given else task_demonstrations(self.directory, self.seed)
            )
        if demonstrations is None:
            with seeding.undisturbed():
                self._try(None)
            return None
        self.report.notes += report_notes(demonstrations, self.directory)
        return demonstrations

    def _try(self, demonstrations: Episodes | None) -> None:
        """Build learner and collector with a throwaway policy, to report incompatible parts before anything runs."""
        env = self.evaluation_envs.get(self.task.distributions[0], self.env)
        self._learner(env, self._policy(), demonstrations)

    def _learner(
        self, env: Environment, policy: TrainablePolicy, demonstrations: Episodes | None
    ) -> tuple[Learner, RolloutSource]:
        learner, collector = build(
            env, policy, self.algorithm, demonstrations, self.seed, self.world, own_seed=self.own_seed
        )
        if isinstance(self.world, Elsewhere):
            parts = self.task, self.algorithm, learner, env, policy, self.config, self.seed
            return learner, self.world.collector(*parts)
        collector.storage, collector.folder = self.config.storage, self.directory
        if self.config.overlap and (self.world.size > 1 or not self.algorithm.max_staleness):
            raise UserError("overlap=true needs one process and an algorithm of max_staleness; use overlap=false")
        return learner, collector

    def run(self) -> Report:
        """Run the remaining stages; writes the report and returns it.

        Raises:
            Stopped: after Ctrl-C or SIGTERM, once everything is saved.
            DivergedError: if a number of the training is not finite; it names the last good checkpoint, which stays.
        """
        stages = {
            Stage.START: self._start,
            Stage.SFT: self._sft,
            Stage.RL: self._reinforce,
            Stage.CONTROL: self._control,
        }
        with GracefulStop("Stopping: saving ...") as self._stop, self.logger:
            is_written = self.stage is Stage.DONE and (self.directory / "report.json").exists()
            while self.stage in stages:
                with self._naming_checkpoint():
                    stages[self.stage]()
            self.report.export_target = export_target(self.world.whole(self.policy))
            policies = self._filmed()
            if self.world.rank:
                return self.report
            if not is_written:
                self._write()
            if policies:
                self._film(policies)
                self._write()
        return self.report

    def _start(self) -> None:
        self._evaluate(self.policy, {})
        self._next()

    def _sft(self) -> None:
        assert self.demonstrations is not None
        if not self.parts and not self.config.start_from:
            observations, actions = self.demonstrations.by_weight()
            generator = seeding.generator(self.seed, "random play")
            observations = with_privileged(observations, self.contract, lambda drawn: self._play(drawn)[0], generator)
            self.policy.fit(observations.to(self.device), actions.to(self.device))
        learner = self.config.sft.build(self.policy, seeding.generator(self.seed, "sft"))
        self._supervise(learner, self.config.sft.steps)
        self._evaluate(self.policy, {"learner": learner})
        # the control continues from here
        self.before = self._aside(learner.state_dict())
        self._next()

    def _play(self, generator: torch.Generator) -> tuple[TensorDict, Tensor]:
        """Run `first_decisions` in separate environments, or in the shared one before its collector begins."""
        shared = isinstance(self.env, SwitchableEnvironment)
        env = self.env if shared else self._environment("train", self.task.distributions[0])
        samples = first_decisions(env, generator)
        if not shared:
            env.close()
        return samples

    def _reinforce(self) -> None:
        if not self.before:
            if not self.config.start_from:
                observation, actions = self._play(seeding.generator(self.seed, "random play"))
                self.policy.fit(observation.to(self.device), actions.to(self.device))
            self.before = self._aside({"policy": dict(self.policy.state_dict())})
        if not self.parts:
            # only at the beginning of the stage: a resumed run loads the critic's weights
            self.policy.start_critic()
        learner, base_collector = self._learner(self.env, self.policy, self.demonstrations)
        precision = self.config.precision
        collector = base_collector
        if self.config.overlap:
            assert isinstance(base_collector, Collector)  # collectors in other processes do not allow overlap
            collector = CollectorAhead(base_collector, self.policy, precision)
        parts = {"learner": learner, "collector": collector, "held_out": self.held_out}
        total, done = self.config.env_steps, self.counters["env_steps"]
        with collector if isinstance(collector, CollectorAhead) else nullcontext():
            self._resume(parts)
            self.world.join(learner)
            steps = iterations(
                learner,
                collector,
                self.algorithm.rollout_length,
                total,
                done=done,
                planned=self.counters["planned_env_steps"],
                precision=precision,
                world=self.world,
            )
            with Progress("RL", total, "step", initial=done) as bar:
                while self.counters["env_steps"] < total:
                    self._watch(self.held_out, total, parts)
                    step = self._iterate(steps, parts)
                    bar.update(min(total, self.counters["env_steps"]) - bar.done, step.note)
                    self._keep(parts, self.counters["iteration"] % self.config.checkpoint_every == 0)
        self._watch(self.held_out, total, parts)
        if not self.counters["rl_checkpoint"]:
            self._finish(parts)
        with self.timer("update"):
            self._evaluate(self.policy, parts)
            self.world.lead(lambda: self._evaluate_baselines(parts))
        self._next()

    def _finish(self, parts: dict[str, Any]) -> None:
        """Save the checkpoint at the end of RL, from which more `env_steps` continue, and delete older results."""
        self.counters["rl_gradient_steps"] = parts["learner"].gradient_steps
        self.counters["rl_checkpoint"] = int(self._save(self._snapshot(parts)).name)
        for name in ("report.json", "video.mp4") if not self.world.rank else ():
            (self.directory / name).unlink(missing_ok=True)

    def _iterate(self, steps: Iterator[Iteration], parts: dict[str, Any]) -> Iteration:
        """Run one collection and update."""
        cpu_began, began = time.process_time(), time.perf_counter()
        # other processes would wait for the abandoned one
        waits = self.iteration_s <= PATIENCE_S or self.world.size > 1
        with nullcontext() if waits else self._abandonable(parts):
            step = next(steps)
            self.counters["iteration"] += 1
            self.counters["env_steps"] = step.env_steps
        self.iteration_s = time.perf_counter() - began
        self.timer.add("simulation", step.simulation_s)
        self.timer.add("policy", step.policy_s)
        self.timer.add("update", self.iteration_s - step.simulation_s - step.policy_s)
        # CPU time of all processes, and of collectors in other processes
        self.counters["cpu_s"] += step.cpu_s + float(self.world.sum(torch.tensor(time.process_time() - cpu_began)))
        self.counters["episodes"] += step.episodes
        for name in ("lost", "pushed"):
            self.counters[name] += step.odd_episodes[name]
        for name in ("lost_collectors", "dropped_rollouts"):
            self.counters[name] += getattr(step, name)
        self.logger.log(step.env_steps, step.logged)
        return step

    def _control(self) -> None:
        control_policy = self.policy.with_new_weights()  # adapters share the same base weights
        learner = self.config.sft.build(control_policy, seeding.generator(self.seed, "sft"))
        learner.load_state_dict(copy_tree(self.before))
        self._supervise(learner, self.config.sft.steps + self.counters["rl_gradient_steps"])
        self._evaluate(learner.policy, {"learner": learner})
        self._next()

    def _supervise(self, learner: SFT, steps: int) -> None:
        """Train on the demonstrations until `steps` gradient steps are done; continues an interrupted run."""
        assert self.demonstrations is not None
        parts, first, label = {"learner": learner}, learner.gradient_steps, title(self.stage.value)
        self._resume(parts)
        self.world.join(learner)
        with Progress(label, steps - first, "step", initial=learner.gradient_steps - first) as bar:
            while learner.gradient_steps < steps:
                with self.timer(label), self.config.precision.on(self.device):
                    loss = learner.fit(self.demonstrations, 1, self.world)
                bar.update(1)
                due = learner.gradient_steps % SEGMENT == 0 or learner.gradient_steps == steps
                if due:
                    self.logger.log(learner.gradient_steps, {f"{self.stage.value}/loss": loss})
                self._keep(parts, due)

    def _evaluate(self, policy: TrainablePolicy, parts: dict[str, Any]) -> None:
        """Evaluate `policy` on the remaining distributions; checkpoints in between contain `parts` of the stage."""
        if self.world.size > 1:
            self._save(self._snapshot(parts))
        whole = self.world.whole(policy)
        self.world.lead(lambda: self._evaluate_here(whole, parts, self.stage.value))

    def _evaluate_baselines(self, parts: dict[str, Any]) -> None:
        with self._abandonable(parts):
            baselines = self.task.baselines()
        for name, policy in baselines.items():
            self._evaluate_here(policy, parts, BASELINE + name)

    def _evaluate_here(self, policy: Policy, parts: dict[str, Any], stage: str) -> None:
        """Evaluate `policy` in the first process, see `_evaluate`."""
        last = self.stages[-2] if self.stages[-2] is not Stage.CONTROL else Stage.RL
        for distribution in evaluation_distributions(self.task) if stage == last.value else self.task.distributions:
            if (stage, distribution) in self.report.results:
                continue
            label, starts = f"{title(stage)}, evaluation on {distribution}", self.config.evaluation_starts
            if stage != last.value or distribution not in self.task.distributions:
                starts = min(starts, self.config.comparison_starts or starts)
            with (
                self._abandonable(parts),
                self.timer("evaluation"),
                self._evaluation_env(distribution, parts) as env,
                self.config.precision.on(self.device),
            ):
                result = evaluate(env, policy, starts_per_task=starts, device=self.device, progress=label)
            self.report.add(stage, distribution, result)
            log.info(f"{label}: {told(result.summary())}")

    @contextmanager
    def _evaluation_env(self, distribution: str, parts: dict[str, Any]) -> Iterator[Environment]:
        """Environment for evaluation on `distribution`; a shared one is switched back and loses its episodes."""
        if isinstance(self.env, SwitchableEnvironment):
            self.env.switch(distribution, "eval")
            yield self.env
            self.env.switch(self.task.distributions[0], "train")
            if "collector" in parts:
                parts["collector"].abandon()
        elif distribution in self.evaluation_envs:
            yield self.evaluation_envs[distribution]
        else:
            env = self._environment("eval", distribution)
            yield env
            env.close()

    def _filmed(self) -> dict[str, Policy]:
        """Policies of the video by caption, before and after training; none if no video is due."""
        if not self.config.video or (self.directory / "video.mp4").exists():
            return {}
        if Stage.RL not in self.stages:
            return {"after: SFT": self.world.whole(self.policy)}
        with seeding.undisturbed():
            before = self._policy()
        before.load_state_dict(self.before["policy"])
        first = "SFT" if Stage.SFT in self.stages else "as it started" if self.config.start_from else "untrained"
        return {f"before: {first}": self.world.whole(before), "after: RL": self.world.whole(self.policy)}

    def _film(self, shown: dict[str, Policy]) -> None:
        """Write the video of the policies `shown`, or a note of the reason why there is none."""
        with self._abandonable({}), self.timer("video"):
            try:
                self.task.video(self.directory / "video.mp4", shown, self.device)
            except UserError as error:  # the run is complete without it
                log.warning(f"no video: {error}")
                self.report.notes.append(f"No video: {error}.")

    def _write(self) -> None:
        for name in ("env_steps", "episodes", "lost", "pushed", "lost_collectors", "dropped_rollouts", "cpu_s"):
            setattr(self.report, name, self.counters[name])
        self.report.wall_s, self.report.phase_cpu_s = self.timer.seconds, self.timer.cpu
        self.report.write(self.directory, CURVES)
