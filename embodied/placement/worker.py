"""A collector in a process of its own, with environments and a copy of the policy; it knows nothing of Ray."""

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
from embodied.policy import TrainablePolicy
from embodied.precision import Precision
from embodied.rollout.joining import NAMED
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.rollout.storage import Storage
from embodied.saving.versions import versions
from embodied.task import Task

PACKAGES = ("embodied", "policies", "sims")


@dataclass(frozen=True)
class Recipe:
    """What all collectors of a run are made of; it is sent to where they run."""

    make: Callable[[int, int, int], Environment]
    """Makes a part of the run's environments, from the number of the first one, their number, and a seed."""
    kind: Callable[..., Collector]
    starts: Callable[[Environment, torch.Generator], Starts | None]
    """Makes what chooses the initial states of a collector's environments."""
    policy: TrainablePolicy
    """On the CPU; its weights come with every rollout that is asked for."""
    seed: int = 0
    device: str = "cpu"
    precision: Precision = Precision.FLOAT32
    threads: int = 1


@dataclass(frozen=True)
class Place:
    """Which collector of a run this is: its `number`, its environments, and how many had its number `before` it."""

    number: int
    first: int
    count: int
    before: int = 0


@dataclass(frozen=True)
class About:
    """Where a collector runs, and with which software."""

    node: str
    software: Mapping[str, str]

    def differences(self, ours: Mapping[str, str]) -> str:
        """What differs from `ours`, in words; "" if nothing does. Builds of one version, such as for CUDA, do not."""
        told = []
        for name in sorted((ours.keys() | self.software.keys()) - {"cuda"}):
            here, there = (versions.get(name, "none").partition("+")[0] for versions in (ours, self.software))
            if here != there:
                told.append(f"{name} {there} where the learner has {here}")
        return ", ".join(told)


class Worker:
    """Makes a collector, then collects whenever it is asked to."""

    def build(self, recipe: Recipe, place: Place, policy: TrainablePolicy | None = None) -> About:
        """Make environments, policy (a copy of the recipe's, unless given) and collector.

        The first collector of a run draws the numbers of a run in one process; every other, and each that takes the
        place of one that died, has numbers of its own.
        """
        torch.set_num_threads(recipe.threads)
        own = (place.number, place.before) if place.number or place.before else ()
        seed = seeding.derive(recipe.seed, "collector", *own) & 0x7FFFFFFF if own else recipe.seed
        seeding.seed_everything(seed)
        self.recipe = recipe
        # what was sent is shared and read-only
        self.policy = copy.deepcopy(recipe.policy).to(recipe.device) if policy is None else policy
        self.env = recipe.make(place.first, place.count, seed)
        noise = seeding.generator(recipe.seed, "noise", *own, device=self.policy.device)
        starts = recipe.starts(self.env, seeding.generator(recipe.seed, "starts", *own))
        self.collector = recipe.kind(self.env, self.policy, noise, starts)
        self.collector.storage = Storage.CPU
        return About(platform.node(), software())

    def collect(self, weights: Mapping[str, Tensor], version: int, decisions: int) -> Rollout:
        """`decisions` in every environment by the policy with `weights`, which had `version` updates.

        All decisions of a rollout are by the same weights; episodes go on from one rollout to the next.
        """
        began = time.process_time()
        self.policy.load_state_dict(weights)
        self.collector.version = version
        with self.recipe.precision.on(self.recipe.device):
            rollout = self.collector.collect(decisions)
        rollout = on_cpu(rollout)
        told = {"cpu_s": time.process_time() - began, "received_mb": _bytes(rollout) / 1e6}
        return replace(rollout, told=told)


def part_of(task: Task, device: str, first: int, count: int, seed: int) -> Environment:
    """`count` of a run's training environments, from number `first`: tasks are dealt over all."""
    with first_environment(first):
        return task.environment(count, task.distributions[0], "train", seed, device)


def on_cpu(rollout: Rollout) -> Rollout:
    """`rollout` in this machine's memory, whatever device the environments are on."""
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
    """Digest of the sources of the packages that collect: versions do not tell two commits apart."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
