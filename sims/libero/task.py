"""LIBERO pick-and-place tasks: environments, demonstrations, evaluation, video."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from embodied.configuration import Fraction, NonNegativeFloat, Pixels, PositiveInt
from embodied.contract import Contract
from embodied.data.cache import DataSet
from embodied.data.demonstrations import decoded_once, record_once
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.evaluation.video import film, tile, write_video
from embodied.extras import needs_extra
from embodied.policy import Policy
from embodied.saving.starting_point import StartingPoint
from embodied.task import Expert, Task
from sims.libero.assets import HOW_TO_GET, Assets, find_assets
from sims.libero.perturbed import plus
from sims.libero.perturbed.selection import available, left_out
from sims.libero.physics.backend import LiberoSim
from sims.libero.randomisation import Randomisation
from sims.libero.suite import BASES, load_tasks, step_limit_of
from sims.libero.suite import Task as SuiteTask
from sims.remote.options import ProcessOptions

if TYPE_CHECKING:
    from sims.libero.environment import LiberoEnvironment
    from sims.libero.published import Published

FILMED = 5
PUBLISHED_CAMERAS = "agentview", "robot0_eye_in_hand"
"""Cameras of published policies, the first of which all of them read."""
PUBLISHED_PIXELS = 256
"""Side of the pictures in published evaluations, which policies resize."""


class Observations(Enum):
    """Convention of observations: our NATIVE one, or the PUBLISHED one of openpi, LeRobot and OpenVLA-OFT."""

    NATIVE = "native"
    PUBLISHED = "published"


@dataclass
class LiberoTask(Task, ProcessOptions):
    """`tasks` (names or numbers; all if empty) of one LIBERO suite, for one policy.

    Training and evaluation start from the distribution `starts`: wide (any object anywhere, at any yaw) or areas (the
    areas of LIBERO's own resets); evaluations start from LIBERO's official initial states, too. With wide, a share
    `areas_share` of training episodes, and the first demonstration of each task, begin in areas. In a share
    `counterfactual_share` of training episodes and demonstrations, instruction, goal and reward are of another object
    of the scene.
    `horizon` actions are predicted and `executed` run between observations. `episodes` demonstrations of each task with
    action noise `noise` come from the scripted expert. Evaluation episodes are truncated at `step_limit` control steps
    (None: the suite's, `suite.STEP_LIMITS`), training episodes at `train_step_limit` (None: half of that), because
    slower episodes rarely succeed and should not be imitated. `assets` is a folder of LIBERO's own objects, "package"
    (those of `make assets`) or "stand-in"; None: official ones if there are any. `sim` computes the physics of training
    and evaluation: mujoco on the CPU's cores, or mjwarp on the policy's device; demonstrations come from mujoco.
    Evaluations also run in stock LIBERO (`stock`), from its official initial states, under the interpreter `python`, or
    one that is created for it.
    `images` names cameras (agentview, robot0_eye_in_hand) whose pictures of `image_size` pixels a side are observed,
    rendered once a chunk; poses and names of objects are then privileged. Without `joints` actors observe no joint
    angles, which LIBERO's published LeRobot datasets lack. `observations` are ours, or those of published checkpoints
    (`sims.libero.published`), which `policy.weights` choose by their files. `randomisation` varies friction, masses,
    lights and cameras between training episodes (`friction`, `mass`, `light`, `light_m`, `light_colour`, `camera_m`,
    `camera_rad`); demonstrations have none, and evaluations only with `evaluation`.
    """

    name: str = "libero"
    starts: str = "wide"
    areas_share: Fraction = 0.0
    counterfactual_share: Fraction = 0.0
    suite: str = "libero_object"
    tasks: list[str] = field(default_factory=list)
    assets: str | None = None
    horizon: PositiveInt = 8
    executed: PositiveInt = 4
    step_limit: PositiveInt | None = None
    train_step_limit: PositiveInt | None = None
    episodes: PositiveInt = 1
    noise: NonNegativeFloat = 0.1
    sim: LiberoSim = LiberoSim.mujoco
    images: list[str] = field(default_factory=list)
    image_size: Pixels = 128
    joints: bool = True
    observations: Observations = Observations.NATIVE
    randomisation: Randomisation = field(default_factory=Randomisation)

    published_distribution: ClassVar[str | None] = "official"
    meanings: ClassVar[Mapping[str, str]] = {
        "wide": "Any object anywhere, at any yaw.",
        "areas": "Objects in the areas from which LIBERO's own resets draw.",
        "official": "LIBERO's 50 official initial states of each task, as in published results.",
        "official:bddl": "The same states; instructions are worded as in the task's BDDL file.",
        "official:held_out": "The same states; paraphrases held out by sentence: other verbs or orders of clauses.",
        "official:held_out_words": "The same states; paraphrases held out by words: no verb, noun or preposition of "
        "training where there is another one.",
    }

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for unknown starts."""
        super().__post_init__()
        if self.starts not in ("wide", "areas"):
            raise UserError(f"unknown task.starts={self.starts}; expected one of wide, areas")

    @property
    def distributions(self) -> tuple[str, ...]:
        """Distributions of initial states: `starts` for training; LIBERO's own states are only for evaluation."""
        only_official = self.sim is LiberoSim.stock or self.suite in plus.SUITES
        return ("official",) if only_official else (self.starts, "official")

    @property
    def sims(self) -> tuple[str, ...]:
        """Names of the available simulators."""
        return tuple(sim.value for sim in LiberoSim)

    @property
    def default_starts(self) -> int:
        """Default number of starts of evaluations: ten in stock LIBERO, which is slow, and LIBERO-plus's own one."""
        if self.suite in plus.SUITES:
            return 1
        return 10 if self.sim is LiberoSim.stock else super().default_starts

    @property
    def max_envs(self) -> int | None:
        """Largest number of environments: one per task in stock LIBERO, where each takes seconds and 100 MB."""
        return len(self._tasks()) if self.sim is LiberoSim.stock else None

    def settled(self) -> LiberoTask:
        """The task with the interpreter and the number of processes for its simulator.

        Stock LIBERO's own interpreter is created unless `python` names one; by default it has a process per core, at
        most one per task.

        Raises:
            UserError: without LIBERO's official assets, or if its interpreter cannot be created.
        """
        if self.sim is not LiberoSim.stock:
            return self
        if self._assets().root is None:
            raise UserError(f"stock LIBERO needs its official assets; {HOW_TO_GET}")
        from sims.libero.stock.interpreter import stock_python

        processes = self.processes or min(len(os.sched_getaffinity(0)), len(self._tasks()))
        return replace(self, python=self.python or str(stock_python()), processes=processes)

    @property
    def asset_kind(self) -> str:
        """Kind of the objects' assets: "official" or "stand-in"."""
        return self._assets().kind

    @property
    def asset_source(self) -> str:
        """Where the objects' assets come from, as a sentence."""
        return self._assets().source

    @property
    def variants(self) -> tuple[str, ...]:
        """Distributions with LIBERO's own initial states and other wordings of the instructions.

        Paraphrases held out by words are for policies that see: others find the objects' names in the instruction.
        LIBERO-plus has wordings of its own.
        """
        if self.suite in plus.SUITES:
            return ()
        words = ("official:held_out_words",) if self.images else ()
        return ("official:bddl", "official:held_out", *words)

    @property
    def kinds(self) -> Mapping[str, Sequence[str]]:
        """Names of the tasks of a suite of LIBERO-plus by category of the perturbation."""
        kinds: dict[str, list[str]] = {}
        for task in self._tasks() if self.suite in plus.SUITES else ():
            assert task.perturbation
            kinds.setdefault(task.perturbation.category, []).append(task.name)
        return kinds

    @property
    def left_out(self) -> Mapping[str, int]:
        """Number of tasks of a suite of LIBERO-plus, by category, whose models, scenes or words are not available."""
        return left_out(self._listed_tasks()) if self.suite in plus.SUITES else {}

    def contract(self, distribution: str) -> Contract:
        """The contract, which is the same for every distribution and suite.

        Raises:
            UserError: for an unknown distribution, or if the simulator is not installed.
        """
        with needs_extra("libero"):
            from sims.libero.observation import contract
            from sims.libero.scene.placement import check_names

        check_names(distribution.partition(":")[0], "eval")
        return contract(self.horizon, self.executed, joints=self.joints, **self._observed())

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> LiberoEnvironment:
        """Make environments that start from the `split` ("train" or "eval") of `distribution`; on `device` with mjwarp.

        The instruction is the task's name in evaluation and varies in training; "DISTRIBUTION:WORDING" selects another
        of `language.WORDINGS`.

        Raises:
            UserError: if the simulator is not installed.
        """
        with needs_extra("libero"):
            from sims.libero.environment import LiberoEnvironment

        if split == "train" and self.sim is LiberoSim.stock:
            raise UserError("stock LIBERO only evaluates: evaluate.py checkpoint=RUN sim=stock")
        if split == "train" and self.suite in plus.SUITES:
            raise UserError(f"LIBERO-plus only evaluates: evaluate.py checkpoint=RUN suite={self.suite}")
        tasks = self._tasks()
        step_limit = self.train_step_limit if split == "train" else self.step_limit
        if split == "train" and step_limit is None:
            step_limit = step_limit_of(tasks) // 2
        start, _, wording = distribution.partition(":")
        wording = wording or ("training" if split == "train" else "name")
        return LiberoEnvironment(
            tasks,
            num_envs,
            distribution=start,
            split=split,
            areas_share=self.areas_share,
            counterfactual_share=self.counterfactual_share,
            wording=wording,
            horizon=self.horizon,
            executed=self.executed,
            step_limit=step_limit,
            assets=self._assets(),
            seed=seed,
            joints=self.joints,
            sim=self.sim,
            device=device,
            randomisation=self.randomisation,
            **self._observed(),
        )

    def expert(self, env: Environment) -> Expert | None:
        """The scripted expert of demonstrations, in environments of this process that simulate with MuJoCo."""
        from sims.libero.environment import LiberoEnvironment

        if not isinstance(env, LiberoEnvironment) or self.sim is not LiberoSim.mujoco:
            return None
        from sims.libero.expert.helping import Helper

        return Helper(env)

    def start_condition(self, env: Environment) -> Callable[[], bool] | None:
        """Whether the objects of the goal are back where they were, in environments of this process."""
        from sims.libero.environment import LiberoEnvironment

        if not isinstance(env, LiberoEnvironment) or self.sim is not LiberoSim.mujoco:
            return None
        from sims.libero.returned import start_condition

        return start_condition(env)

    @property
    def max_demonstration_steps(self) -> int:
        """Largest number of control steps of all demonstrations."""
        tasks = self._tasks()
        return len(tasks) * self.episodes * (self.step_limit or step_limit_of(tasks))

    def demonstrations(self, directory: Path, seed: int) -> Episodes:
        """The expert's episodes; made once, then read from `directory`.

        Raises:
            UserError: if `directory` has demonstrations of another task or seed.
        """
        from sims.libero.expert.demonstrations import collect

        tasks = self._tasks()
        contract = self.contract(self.starts)
        limit = step_limit_of(tasks) if self.step_limit is None else self.step_limit
        options = {
            "assets": self._assets(),
            "seed": seed,
            "noise": self.noise,
            "step_limit": limit,
            "starts": self.starts,
        }
        if self.areas_share:
            options["areas_share"] = self.areas_share
        if self.counterfactual_share:
            options["counterfactual_share"] = self.counterfactual_share
        origin = {
            **options,
            "tasks": [task.name for task in tasks],
            "assets": self.asset_kind,
            "episodes": self.episodes,
        }
        return record_once(
            directory,
            contract,
            origin,
            lambda writer: collect(writer, tasks, self.episodes, stride=self.executed, **options, **self._observed()),
        )

    def demonstration_files(self, source: Path) -> list[Path]:
        """LIBERO's own files of demonstrations (HDF5) in `source`."""
        from sims.libero.recorded import files

        return files(source)

    def recorded_demonstrations(self, source: Path, directory: Path) -> Episodes:
        """The episodes in LIBERO's own files in `source`, replayed unless the cache has them.

        The run's `directory` keeps an index.

        Raises:
            UserError: for files that do not fit the tasks.
        """
        from sims.libero.recorded import collect, files

        tasks = self._tasks()
        assets = self._assets()
        settings = {"tasks": [task.name for task in tasks], "assets": self.asset_kind}
        return decoded_once(
            directory,
            self.contract(self.starts),
            {"source": str(source), **settings},
            [DataSet(source, files(source))],
            lambda writer: collect(writer, files(source), tasks, assets, **self._observed()),
            settings,
        )

    def published_options(self, start: StartingPoint) -> list[str]:
        """Observations, chunks and step limits of the evaluations of openpi, LeRobot and OpenVLA-OFT."""
        if start.benchmark != "libero":
            return []
        suite = BASES.get(self.suite, self.suite)
        statistics = [name for name in (suite, f"{suite}_no_noops") if name in start.data_sets]
        return [
            f"task.observations={Observations.PUBLISHED.value}",
            f"task.images=[{','.join(PUBLISHED_CAMERAS[: start.cameras])}]",
            f"task.image_size={PUBLISHED_PIXELS}",
            f"task.horizon={start.horizon}",
            f"task.executed={start.executed}",
            *([f"policy.unnorm_key={statistics[0]}"] if statistics and len(start.data_sets) > 1 else []),
            *(["task.step_limit=280"] if (start.program, suite) == ("LeRobot", "libero_spatial") else []),
        ]

    def convention(self) -> Published:
        """Convention of LIBERO's published LeRobot datasets and checkpoints."""
        from sims.libero.published import Published

        return Published(self._tasks(), mirrored=self.observations is Observations.NATIVE)

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Write a video of each policy, by caption, from the start `first` of each of up to five tasks."""
        from sims.libero.environment import LiberoEnvironment
        from sims.libero.rendering.cameras import AGENT_VIEW, Cameras

        tasks = self._tasks()[:FILMED]
        among, _, wording = (distribution or self.starts).partition(":")
        env = LiberoEnvironment(
            tasks,
            len(tasks),
            distribution=among,
            split="eval",
            wording=wording or "name",
            horizon=self.horizon,
            executed=math.gcd(self.executed, 4),
            step_limit=self.step_limit,
            assets=self._assets(),
            joints=self.joints,
            **self._observed(),
        )
        cameras = Cameras(env.simulation, [AGENT_VIEW], 256, 256, film=True)
        starts = torch.full((len(tasks),), first)
        films = {
            caption: film(env, policy, starts, lambda ids: cameras.render(ids)[:, 0], device)
            for caption, policy in policies.items()
        }
        frames_per_s = round(1.0 / (env.contract.control_dt_s * env.contract.executed))
        write_video(path, tile(films, [task.language for task in tasks]), 2 * frames_per_s)

    def _observed(self) -> dict[str, Any]:
        pictures = {"image_size": self.image_size, "images": tuple(self.images)} if self.images else {}
        return pictures | ({} if self.observations is Observations.NATIVE else {"convention": self.convention()})

    def _assets(self) -> Assets:
        return find_assets(self.assets)

    def _listed_tasks(self) -> list[SuiteTask]:
        return load_tasks(self.suite, [int(task) if task.isdigit() else task for task in self.tasks] or None)

    def _tasks(self) -> list[SuiteTask]:
        """Tasks that run, without those of a suite of LIBERO-plus that cannot."""
        tasks = self._listed_tasks()
        return available(tasks, named=bool(self.tasks)) if self.suite in plus.SUITES else tasks
