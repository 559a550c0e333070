"""Run whose parts are built and checked, before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.imitation.one_step import OneStepConfig
from embodied.algorithms.offline.bppo import BPPOConfig
from embodied.algorithms.offline.inverse_dynamics import labelled
from embodied.algorithms.offline.oer import OERConfig
from embodied.contract import ACTION_PREFIX, Contract
from embodied.data.demonstrations import report_notes
from embodied.data.episodes import Episodes
from embodied.environment import Environment, NumberedStarts, SwitchableEnvironment, capability_notes
from embodied.environments.engine import check_starts
from embodied.errors import UserError
from embodied.evaluation.in_training import InTraining
from embodied.evaluation.open_loop import OpenLoop, split
from embodied.networks.precision import precision_of
from embodied.placement.actor import ActorEnvironment
from embodied.placement.local import Local, Processes, RunParts, one_after_another
from embodied.policy import PolicyConfig, TrainablePolicy, unread_observations
from embodied.report.report import Report
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import RolloutSource
from embodied.run_options import ExperimentConfig
from embodied.saving import checkpoint
from embodied.task import ContinuesValues, Learner, LearnerConfig, LearnsValues, OfflineLearnerConfig, Task
from embodied.training.held_out import HeldOut
from embodied.training.kept_episodes import read_kept
from embodied.training.logging import Logger, NoLogger
from embodied.training.loop import build
from embodied.training.own_state import own_seed
from embodied.training.saved_run import DONE, SavedRun

log = logging.getLogger(__name__)
READERS = "use policy=flow, pi0, pi05 or smolvla, one with policy.encoder=flat, or delay=0"


class BuiltRun(SavedRun):
    """Run in `directory` with all its parts, which continues from a checkpoint there, if there is one."""

    def __init__(
        self,
        config: ExperimentConfig,
        task: Task,
        policy: PolicyConfig,
        algorithm: LearnerConfig | None,
        directory: str | Path,
        *,
        record: dict[str, Any],
        seed: int = 0,
        device: str = "cpu",
        wandb_project: str | None = None,
        demonstrations: Callable[[Contract, Path], Episodes] | None = None,
        offline: OfflineLearnerConfig | None = None,
        world: Processes | None = None,
    ) -> None:
        """Build all parts, then start to write; `record`, the composed configuration, is stored in checkpoints.

        `algorithm` learns in the stage rl, and `offline` in the stage offline; None without that stage.
        `demonstrations`, called with the task's contract and the directory, replaces the task's own demonstrations.
        Several processes make the same run, each in its `world`: the first one writes and evaluates.
        """
        config.check_learners(algorithm, offline)
        if task.held_out_share is not None and "rl" in (config.stages or ["rl"]):
            raise UserError(
                f"task={task.name} has no simulator for reinforcement learning; use stages=[sft] or [offline]"
            )
        precision_of(config.precision, policy.own_precision)  # raises if both set a precision
        directory = Path(directory)
        report = Report(task.name, task.asset_kind, seed, device=device, arguments=record.get("arguments"))
        report.meanings = task.meanings
        super().__init__(directory, record, config.env_steps, report, world or Local(device=device))
        self.config = config
        self.task = task
        self.offline = offline
        self.algorithm = algorithm if task.held_out_share is None else None
        self.seed = seed
        self.device = device
        self._build_policy, saved = policy.build, self.saved(directory, record, config.env_steps)
        seeding.seed_everything(seed)
        self.contract = task.contract(task.distributions[0])
        if saved:
            saved.check(self.contract)
        # Each process has its own environments and noise; the learner's generators are the same in all of them.
        self.own_seed = own_seed(seed, self.world, saved)
        self.policy = self._policy(None if saved else config.start_from)
        self.kept: Episodes | None = None
        """Kept observations of the tasks before; None without, and in a resumed run, whose learner has them."""
        if isinstance(offline, OERConfig):
            if config.rounds.are_used:
                raise UserError("offline=oer learns one task, without rounds; use rounds.count=1 rounds.gate=none")
            if config.start_from and config.stages != ["offline"]:
                raise UserError("offline=oer start_from=RUN takes stages=[offline]; others would forget RUN's tasks")
            if config.start_from and not saved:
                self.kept = read_kept(config.start_from, self.contract)
        self.open_loop: OpenLoop | None = None
        capabilities: list[str] = []
        if task.held_out_share is None:
            self.env = self.environment("train", task.distributions[0])
            capabilities = capability_notes(self.env)
        if self.contract.delay and ACTION_PREFIX not in self.policy.actor_keys:
            raise UserError(f"the policy reads no action prefix, which delay={self.contract.delay} needs; {READERS}")
        if unread := unread_observations(self.policy):
            self.report.notes.append(f"The policy does not read these observations: {', '.join(unread)}.")
        self.report.notes += capabilities + ([self.world.remark] if self.world.remark else [])
        self.report.notes += self.policy.remarks
        with seeding.undisturbed():
            self.evaluation_envs: dict[str, Environment] = {}
            own = task.held_out_share is None and not isinstance(self.env, SwitchableEnvironment)
            if own and not self.world.rank:
                names = task.distributions[:1] if config.comparison_starts == 0 else task.distributions
                self.evaluation_envs = {name: self.environment("eval", name) for name in names}
            # An empty set of demonstrations suffices to check the parts, before a long recording of demonstrations.
            self._try(Episodes.of(TensorDict({}, [0]), torch.zeros(0, *self.contract.action.shape)))
            self.held_out = self._held_out()
        if task.asset_source and not self.world.rank:
            log.info(task.asset_source)
        self.demonstrations = self._demonstrate(demonstrations)
        if self.own_seed != seed:
            seeding.seed_everything(self.own_seed)
        if unread:
            log.warning("the policy does not read %s", ", ".join(unread))
        self.stage, *_ = self.stages = self._plan()
        rows = self._restore(saved) if saved else 0
        options = {"config": record, "wandb_project": wandb_project, "rows": rows}
        self.logger = NoLogger() if self.world.rank else Logger(directory, **options)

    def _plan(self) -> list[str]:
        """Stages of the run, in order.

        Raises:
            UserError: for supervised training without demonstrations, and RL of weights without statistics.
        """
        requested = self.config.stages or (["rl"] if self.demonstrations is None else ["sft", "rl"])
        if self.demonstrations is None and (offline := [name for name in requested if name != "rl"]):
            stages = ",".join(offline)
            raise UserError(f"task={self.task.name} has no demonstrations for stages=[{stages}]; use stages=[rl]")
        first = ["start"] if self.config.start_from else []
        if requested == ["rl"] and not first and self.policy.lacks_statistics:
            raise UserError(f"{self.policy.lacks_statistics}; stages=[sft,rl] computes them from demonstrations")
        learning = {"offline": self.offline, "rl": self.algorithm}.get(requested[0])
        if isinstance(learning, OneStepConfig | BPPOConfig) and not first:
            verb = "one_step distils" if isinstance(learning, OneStepConfig) else "bppo improves"
            note = f"No stage trains the policy that {verb}: use start_from=RUN, or the stage sft before."
            log.warning(note)
            self.report.notes.append(note)
        # the control is compared with what follows SFT
        control = ["sft_control"] if self.config.control and "sft" in requested and len(requested) > 1 else []
        return [*first, *requested, *control, DONE]

    def _held_out(self) -> HeldOut:
        """Evaluations during RL, in the evaluation environment; a note states why there are none."""
        trained_on = self.task.distributions[0]
        config = self.config
        self.report.in_training = InTraining(trained_on)
        held_out = HeldOut(
            None if self.world.rank else config.evaluate_every_steps,
            self.evaluation_envs.get(trained_on),
            self.report.in_training,
            final=config.evaluation_starts,
            first=config.evaluation_first_start,
            device=self.device,
            precision=config.precision,
        )
        if held_out.refused and held_out.automatic and "rl" in (config.stages or ["rl"]):
            self.report.notes.append(f"No evaluations during training: {held_out.refused}.")
        return held_out

    def _policy(self, start_from: str | None = None) -> TrainablePolicy:
        """Build a policy, with the weights of `start_from` if it is set."""
        policy = self._build_policy(self.contract).to(self.device)
        if start_from:
            checkpoint.load_weights(start_from, self.contract).restore(policy)
        return self.world.place(policy)

    def environment(self, split: str, distribution: str) -> Environment:
        """Make environments of the `split` "train" or "eval" of `distribution`."""
        count = self.config.evaluation_envs
        seed = 0
        if split == "train":
            count = self.world.own_envs(self.config.num_envs)
            seed = self.own_seed
        env = self.task.environment(count, distribution, split, seed, self.device)
        if split == "eval":
            check_first_start(env, self.config.evaluation_first_start)
        if count < len(env.task_names):
            scope = f" in each of {self.world.size} processes" if self.world.size > 1 else ""
            raise UserError(f"expected num_envs of at least {len(env.task_names)}, one per task{scope}; got {count}")
        return env

    def _demonstrate(self, load: Callable[[Contract, Path], Episodes] | None) -> Episodes | None:
        """Load demonstrations by `load`, else the task's own; None if there are none or no stage reads them."""
        if self.config.stages == ["rl"] and self.algorithm and not self.algorithm.reads_demonstrations:
            if load:
                log.warning("demonstrations= is not read: neither stages=[rl] nor this algorithm's options ask for any")
            return None
        with self.timer("demonstrations"), one_after_another(self.world):  # the first process records, the others read
            task_demonstrations = self.task.demonstrations
            demonstrations = (
                load(self.contract, self.directory) if load else task_demonstrations(self.directory, self.seed)
            )
        if demonstrations is None:
            with seeding.undisturbed():
                self._try(None)
            return None
        imitated = "sft" in (self.config.stages or ["sft"]) or self.config.rounds.imitate_anew
        if imitated:
            demonstrations.check_imitable()
        self.report.notes += report_notes(demonstrations, self.directory, offline=self.offline is not None)
        if self.task.held_out_share is not None:
            demonstrations, held_out = split(demonstrations, self.task.held_out_share, failures=not imitated)
            demonstrations = self._with_known_actions(demonstrations)
            self.open_loop = OpenLoop(held_out, demonstrations, self.contract, self.device)
            return demonstrations
        return self._with_known_actions(demonstrations)

    def _with_known_actions(self, demonstrations: Episodes) -> Episodes:
        """The `demonstrations` with predictions of unknown actions, which the first process makes and stores."""
        steps = self.config.label_actions
        with self.timer("demonstrations"), one_after_another(self.world):
            demonstrations, note = labelled(demonstrations, self.contract, steps, self.seed, self.directory)
        self.report.notes += [note] if note else []
        return demonstrations

    def _try(self, demonstrations: Episodes | None) -> None:
        """Build the learners with a throwaway policy, to report incompatible parts before anything runs."""
        policy = self._policy()
        values = None
        if self.offline:
            has_simulator = self.task.held_out_share is None
            self.config.rounds.check(policy, self.world.size, has_simulator=has_simulator)
            offline = self.offline.build(policy, torch.Generator())
            values = offline.values() if isinstance(offline, LearnsValues) else None
        if self.algorithm:
            env = self.evaluation_envs.get(self.task.distributions[0], self.env)
            learner, _ = self.learner_and_collector(env, policy, demonstrations)
            if isinstance(learner, ContinuesValues):
                learner.continue_values(values)

    @property
    def learning(self) -> LearnerConfig:
        """Config of the learner of the stage rl."""
        assert self.algorithm is not None
        return self.algorithm

    def learner_and_collector(
        self, env: Environment, policy: TrainablePolicy, demonstrations: Episodes | None
    ) -> tuple[Learner, RolloutSource]:
        """Build the learner of `policy` for the stage rl, and its collector in `env`."""
        algorithm = self.learning
        learner, collector = build(
            env, policy, algorithm, demonstrations, self.seed, self.world, own_seed=self.own_seed
        )
        parts = RunParts(self.task, algorithm, learner, env, policy, self.config, self.seed)
        if (remote := self.world.remote_collector(parts)) is not None:
            return learner, remote
        if isinstance(env, ActorEnvironment):
            return learner, env.rollouts(policy, collector, algorithm.max_staleness)
        collector.storage = self.config.storage
        collector.folder = self.directory
        if self.config.overlap and (self.world.size > 1 or not algorithm.max_staleness):
            raise UserError("overlap=true needs one process and an algorithm of max_staleness; use overlap=false")
        return learner, collector

    def random_play(self, generator: torch.Generator) -> tuple[TensorDict, Tensor]:
        """Run `first_decisions` in separate environments, or in the shared one before its collector begins."""
        if isinstance(self.env, ActorEnvironment):
            return self.env.play(generator)
        shared = isinstance(self.env, SwitchableEnvironment)
        env = self.env if shared else self.environment("train", self.task.distributions[0])
        samples = first_decisions(env, generator)
        if not shared:
            env.close()
        return samples


def check_first_start(env: Environment, first: int) -> None:
    """Raise UserError unless evaluations in `env` can begin with the initial state `first`."""
    if first and not isinstance(env, NumberedStarts):
        raise UserError(
            f"evaluation_first_start={first} needs numbered initial states, which the simulator lacks; leave it out"
        )
    if isinstance(env, NumberedStarts) and env.num_starts:
        check_starts(first, env.num_starts)
