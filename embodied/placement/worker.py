"""Collector in a process of its own, with environments and a copy of the policy; independent of Ray."""

from __future__ import annotations

import copy
import hashlib
import itertools
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.environment import Environment
from embodied.environments.engine import first_environment
from embodied.networks.precision import Precision
from embodied.policy import TrainablePolicy
from embodied.rollout.joining import NAMED
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.rollout.storage import Storage
from embodied.saving.versions import versions
from embodied.task import Task

PACKAGES = ("embodied", "policies", "sims")


@dataclass(frozen=True)
class CollectorRecipe:
    """Parts from which all collectors of a run are built; it is sent to their processes."""

    make: Callable[[int, int, int], Environment]
    """Factory of a part of the run's environments, from the index of the first one, their number, and a seed."""
    kind: Callable[..., Collector]
    starts: Callable[[Environment, torch.Generator], Starts | None]
    """Factory of the choice of initial states of a collector's environments."""
    policy: TrainablePolicy
    """Policy on the CPU; its weights are sent with every request for a rollout."""
    seed: int = 0
    device: str = "cpu"
    precision: Precision = Precision.FLOAT32
    threads: int = 1


@dataclass(frozen=True)
class CollectorSpec:
    """Index `number` of a collector, its environments, and `restarts`, the number of collectors before it."""

    number: int
    first: int
    count: int
    restarts: int = 0


@dataclass(frozen=True)
class CollectorHost:
    """Machine and software of a collector."""

    node: str
    software: Mapping[str, str]

    def differences(self, ours: Mapping[str, str]) -> str:
        """Differences from `ours`, in words; "" if there are none.

        Builds of one version, such as for CUDA, are equal.
        """
        differences = []
        for name in sorted((ours.keys() | self.software.keys()) - {"cuda"}):
            our_version, their_version = (
                versions.get(name, "none").partition("+")[0] for versions in (ours, self.software)
            )
            if our_version != their_version:
                differences.append(f"{name} {their_version} where the learner has {our_version}")
        return ", ".join(differences)


class Worker:
    """Worker that builds a collector, then collects on request."""

    def build(
        self, recipe: CollectorRecipe, spec: CollectorSpec, policy: TrainablePolicy | None = None
    ) -> CollectorHost:
        """Build environments, policy (a copy of the recipe's if None) and collector.

        The first collector of a run draws the same numbers as a run in one process; every other, and each that
        replaces one that died, has numbers of its own.
        """
        torch.set_num_threads(recipe.threads)
        # Collector 0 of a fresh run has the streams of a run in one process; others and replacements derive their own.
        stream = (spec.number, spec.restarts) if spec.number or spec.restarts else ()
        seed = seeding.derive(recipe.seed, "collector", *stream) & 0x7FFFFFFF if stream else recipe.seed
        seeding.seed_everything(seed)
        self.recipe = recipe
        # the policy that was sent is in shared, read-only memory
        self.policy = copy.deepcopy(recipe.policy).to(recipe.device) if policy is None else policy
        self.env = recipe.make(spec.first, spec.count, seed)
        noise = seeding.generator(recipe.seed, "noise", *stream, device=self.policy.device)
        starts = recipe.starts(self.env, seeding.generator(recipe.seed, "starts", *stream))
        self.collector = recipe.kind(self.env, self.policy, noise, starts)
        self.collector.storage = Storage.CPU
        return CollectorHost(platform.node(), software())

    def collect(self, weights: Mapping[str, Tensor], version: int, decisions: int) -> Rollout:
        """Collect `decisions` in every environment by the policy with `weights`, which had `version` updates.

        All decisions of a rollout are by the same weights; episodes continue from one rollout to the next.
        """
        began = time.process_time()
        self.policy.load_state_dict(weights)
        self.collector.version = version
        with self.recipe.precision.on(self.recipe.device):
            rollout = self.collector.collect(decisions)
        rollout = on_cpu(rollout)
        metrics = {"cpu_s": time.process_time() - began, "received_mb": _bytes(rollout) / 1e6}
        return replace(rollout, placement_metrics=metrics)


def part_of(task: Task, device: str, first: int, count: int, seed: int) -> Environment:
    """Create `count` of a run's training environments, from index `first`: tasks are distributed over all."""
    with first_environment(first):
        return task.environment(count, task.distributions[0], "train", seed, device)


def on_cpu(rollout: Rollout) -> Rollout:
    """Copy of `rollout` in CPU memory."""
    moved: dict[str, Any] = {}
    for name, value in vars(rollout).items():
        if name in NAMED:
            moved[name] = {key: part.to("cpu") for key, part in value.items()}
        else:
            moved[name] = value.to("cpu") if hasattr(value, "to") else value
    return Rollout(**moved)


def _bytes(rollout: Rollout) -> int:
    parts = vars(rollout).values()
    trees = [list(part.values(True, True)) for part in parts if isinstance(part, TensorDict)]
    trees += [list(getattr(rollout, name).values()) for name in NAMED]
    return sum(leaf.nbytes for leaf in [*itertools.chain(*trees), *parts] if isinstance(leaf, Tensor))


def software() -> dict[str, str]:
    """Versions of Python and of the packages that affect numbers, and a digest of our own code."""
    return {**versions(), "code": _code()}


@cache
def _code() -> str:
    """Digest of the sources of the packages that collect, because versions do not distinguish commits."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
