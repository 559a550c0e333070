"""Distillation: a privileged teacher learns first, then a student imitates it in the states that the student visits.

The student's states are labelled by the teacher (DAgger, arXiv 1011.0686). The student has to infer the teacher's
privileged observations from its own, with its memory (RAPTOR, arXiv 2509.11481: one policy for unknown robots).

Differs from the papers:
    - one teacher with privileged observations instead of 1,000 teachers of one robot each: if these include the
    robot's parameters it is a continuous family of teachers, trained at once (phase one of arXiv 2107.04034), and every
    episode can have a different robot;
    - the student's rollouts are not aggregated: each is used for `epochs` and discarded;
    - the student acts from the beginning, with its own exploration noise; the teacher's actions are never mixed in;
    - sequences are cut at the ends of rollouts: gradients stop there, the memory continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import MISSING
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.finite import check_finite
from embodied.algorithms.minibatches import Minibatches
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.schedule import linear_decay
from embodied.configuration import Configuration, Fraction, Limit, NonNegativeFloat, PositiveInt
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import Policy, TrainablePolicy
from embodied.rollout.memory import RecurrentPolicy
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.task import Learner
from embodied.world import ALONE, World


@dataclass
class DistillationConfig(Configuration):
    """Hyper-parameters of both phases.

    The teacher is a policy (`teacher`) that also reads the observations `privileged`; the learner `teaching` trains it
    for `teacher_steps` control steps. Then the student imitates it, for `epochs` on each rollout of `rollout_length`
    decisions, in minibatches of `minibatch` environments; its learning rate decays linearly to its `final_lr_share`.
    """

    teacher: Any = MISSING
    teaching: Any = MISSING
    privileged: list[str] = field(default_factory=list)
    teacher_steps: PositiveInt = 3_700_000
    rollout_length: PositiveInt = 50
    epochs: PositiveInt = 4
    minibatch: PositiveInt = 128
    learning_rate: NonNegativeFloat = 8e-3
    final_lr_share: Fraction = 0.02
    max_gradient_norm: Limit = 1.0

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: never."""
        return False

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: 0.

        Teacher and student take turns in the same environments.
        """
        return 0

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> Distillation:
        """Build the teacher and the learner of `policy`, the student; the demonstrations are not used.

        Raises:
            UserError: for unknown privileged observations, or a teacher that its learner cannot train.
        """
        teacher = self.teacher.build(informed(env.contract, self.privileged)).to(policy.device)
        observation, actions = first_decisions(env, generator)
        teacher.fit(observation.to(policy.device), actions.to(policy.device))
        teacher.start_critic()
        return Distillation(policy, teacher, self.teaching.build(teacher, None, env, generator), self, generator)


def informed(contract: Contract, privileged: list[str]) -> Contract:
    """Copy of `contract` in which the privileged observations named `privileged` are ordinary ones.

    Raises:
        UserError: if one of them is missing or not privileged.
    """
    available = [key for key, spec in contract.observation.items() if spec.privileged]
    if unknown := [key for key in privileged if key not in available]:
        raise UserError(f"expected privileged to be among the privileged observations {available}, got {unknown}")
    specs = contract.observation
    return replace(contract, observation=specs | {key: replace(specs[key], privileged=False) for key in privileged})


class TeacherThenStudent(Collector):
    """Collector of the teacher's rollouts while it learns, then of the student's."""

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None,
        distillation: Distillation,
    ) -> None:
        super().__init__(env, policy, generator, starts)
        self.distillation = distillation
        learner = distillation.teaching
        self.teacher = learner.collector(env, distillation.teacher, generator, learner.starts)

    def collect(self, decisions: int) -> Rollout:
        """Collect `decisions` of the student, or `rollout_length` decisions of the teacher's learner."""
        if self.distillation.taught:
            return super().collect(decisions)
        self.teacher.storage, self.teacher.folder = self.storage, self.folder
        return self.teacher.collect(self.distillation.config.teaching.rollout_length)

    def state_dict(self) -> dict[str, Any]:
        """State of both collectors."""
        return super().state_dict() | {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.teacher.load_state_dict(state["teacher"])
        super().load_state_dict(state)


class Distillation(Composite):
    """Learner that trains the teacher with another learner, then the student on the teacher's labels."""

    starts = None

    def __init__(
        self,
        policy: TrainablePolicy,
        teacher: TrainablePolicy,
        teaching: Learner,
        config: DistillationConfig,
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.teaching = teaching
        self.config = config
        self.generator = generator
        self.parameters = policy.actor_parameters()
        self.optimiser = torch.optim.Adam(self.parameters, config.learning_rate, fused=True)
        self.steps_taught = 0
        self.began = 0.0
        self.student_gradient_steps = 0

    @property
    def taught(self) -> bool:
        """Whether the teacher's training is complete."""
        return self.steps_taught >= self.config.teacher_steps

    @property
    def gradient_steps(self) -> int:
        """Gradient steps of teacher and student."""
        return self.teaching.gradient_steps + self.student_gradient_steps

    @property
    def collector(self) -> Callable[..., Collector]:
        """Factory of the collector that acts with the policy of the current phase."""
        return lambda env, policy, generator, starts: TeacherThenStudent(env, policy, generator, starts, self)

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Train the teacher, or the student on the teacher's labels; returns the teacher's metrics, or the loss."""
        if not self.taught:
            self.steps_taught += int(world.sum(torch.tensor(rollout.env_steps)))
            self.began = progress
            share = min(1.0, self.steps_taught / self.config.teacher_steps)
            return {f"teacher_{name}": value for name, value in self.teaching.update(rollout, share, world).items()}
        # progress of the student's phase, from 0 when the teacher's ended to 1
        share = (progress - self.began) / max(1e-9, 1.0 - self.began)
        linear_decay(self.optimiser, share, self.config.final_lr_share, self.config.learning_rate)
        observation = rollout.observation
        labels = self._labels(rollout.observation)
        minibatches = Minibatches(torch.ones(1, labels.shape[1], dtype=torch.bool), world)
        losses = []
        for _ in range(self.config.epochs):
            for rows, counted in minibatches.draw(self.config.minibatch, self.generator):
                # [T, B]: whole sequences of B environments
                sequences = observation[:, rows.to(rollout.reward.device)]
                share = float(counted.sum() * world.size / world.sum(counted.sum()))
                losses.append(self._step(sequences, labels[:, rows.to(labels.device)], counted, share))
        return {"loss": float(torch.stack(losses).mean())}

    @torch.no_grad()
    def _labels(self, observation: TensorDict) -> Tensor:
        """Labels: the teacher's deterministic actions [T, N, H, A] at observations [T, N]."""
        flat = observation.flatten(0, 1).to(self.policy.device)
        actions = self.teacher.act(flat, deterministic=True).actions
        return actions.unflatten(0, observation.batch_size)

    def _step(self, observation: TensorDict, labels: Tensor, counted: Tensor, share: float) -> Tensor:
        """Take one gradient step on sequences [T, B], through time if the student has memory.

        The loss averages the environments `counted` [B], and is weighted by `share`, this process's part of the mean
        over processes.
        """
        counted = counted.to(labels.device).expand(len(labels), -1)
        if not isinstance(self.policy, RecurrentPolicy):
            observation = observation.flatten(0, 1)
            labels = labels.flatten(0, 1)
            counted = counted.flatten()
        valid = torch.ones(labels.shape[:-1], device=labels.device) * counted.unsqueeze(-1)
        # L = share * policy loss(o, a_teacher) over valid actions, whose average over processes is the mean of all
        loss = share * self.policy.loss(observation.to(self.policy.device), labels, valid)
        self.optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_gradient_norm)
        check_finite({"imitation_loss": loss.detach(), "gradient": norm}, self.student_gradient_steps + 1)
        self.optimiser.step()
        self.student_gradient_steps += 1
        return loss.detach()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the student's minibatch stores, or the teacher's largest pass if that is more; None: unknown."""
        environments = passes.share(self.config.minibatch)
        sequences = (passes.rollout_length, environments)
        student = passes.loss(*(sequences if passes.has_memory else (math.prod(sequences),)))
        if not isinstance(self.teaching, Composite):
            return None
        teaching = self.teaching.largest_pass(passes.of(self.teacher, self.config.teaching.rollout_length))
        return None if teaching is None else max(student, teaching)

    def state_dict(self) -> dict[str, Any]:
        """Teacher, both optimisers, progress and generator."""
        return {
            "teacher": self.teacher.state_dict(),
            "teaching": self.teaching.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "steps_taught": self.steps_taught,
            "began": self.began,
            "student_gradient_steps": self.student_gradient_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.teacher.load_state_dict(state["teacher"])
        self.teaching.load_state_dict(state["teaching"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        for name in ("steps_taught", "began", "student_gradient_steps"):
            setattr(self, name, state[name])
