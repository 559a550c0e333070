"""Tasks on MJCF models for training: environments, evaluation, video."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from embodied.configuration import FiniteFloat, Pixels, PositiveInt, with_numbers
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.evaluation.video import film, tile, write_video
from embodied.extras import needs_extra
from embodied.policy import Policy
from embodied.task import Task
from sims.backend import Sim
from sims.mjcf.mdp import Mdp
from sims.remote.options import ProcessOptions

if TYPE_CHECKING:
    from sims.mjcf.environment import MjcfEnvironment

SHIPPED = sorted(path.stem for path in (Path(__file__).parent / "tasks").glob("[a-z]*.py"))
FILMED = 4
FRAMES_HZ = 25
"""Number of episodes in a video, and its approximate frames per second."""


@dataclass
class MjcfTask(Task, ProcessOptions):
    """A task on an MJCF model.

    `mdp` names a task of `tasks/`, or a Python file with a subclass of `mdp.Mdp`; `numbers` are the task's. `sim` is
    mujoco (double precision, on the CPU) or mjwarp (single precision, on the policy's device). An episode is truncated
    after `step_limit` control steps, the task's own if None. Policies predict chunks of `horizon` actions (None:
    `executed`), of which `executed` are run between observations. `images` names cameras of the model whose pictures,
    of `image_size` pixels a side, are observed. Observations in `privileged` are read by critics only.
    """

    name: str = "mjcf"
    mdp: str = "cartpole"
    sim: Sim = Sim.mujoco
    numbers: dict[str, FiniteFloat] = field(default_factory=dict)
    step_limit: PositiveInt | None = None
    horizon: PositiveInt | None = None
    executed: PositiveInt = 1
    images: list[str] = field(default_factory=list)
    image_size: Pixels = 128
    privileged: list[str] = field(default_factory=list)

    distributions: ClassVar[tuple[str, ...]] = ("own",)
    meanings: ClassVar[Mapping[str, str]] = {"own": "Initial states that the task itself draws."}
    sims: ClassVar[tuple[str, ...]] = tuple(sim.value for sim in Sim)

    def __post_init__(self) -> None:
        """Make the path of a task absolute; raise UserError for numbers out of range, and unknown tasks and numbers."""
        super().__post_init__()
        if self.mdp.endswith(".py"):
            self.mdp = str(Path(self.mdp).expanduser().resolve())
        self._mdp = with_numbers(find_mdp(self.mdp), self.numbers, "task.numbers")

    def recorded(self) -> dict[str, Any]:
        """Record the absolute path of an own task."""
        return super().recorded() | {"mdp": self.mdp}

    def contract(self, distribution: str) -> Contract:
        """Contract derived from the model's actuators and the task's observations.

        Raises:
            UserError: for an unknown distribution.
        """
        self._check(distribution)
        with needs_extra("mjcf"):
            from sims.mjcf.environment import contract
        return contract(self._mdp, self._mdp.load(), **self._options())

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> MjcfEnvironment:
        """Make environments; initial states of `split` "eval" do not occur in training.

        Raises:
            UserError: for an unknown distribution.
        """
        self._check(distribution)
        with needs_extra("mjcf"):
            from sims.mjcf.environment import MjcfEnvironment
        return MjcfEnvironment(
            num_envs,
            mdp=self._mdp,
            split=split,
            step_limit=self.step_limit,
            seed=seed,
            device=device,
            sim=self.sim,
            **self._options(),
        )

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts."""
        from sims.mjcf.pictures import Studio

        films = {}
        frame_s = 1.0
        for caption, policy in policies.items():
            env = self.environment(FILMED, distribution or self.distributions[0], "eval", device=device)
            chunk_s = env.contract.control_dt_s * self.executed
            stride = max(1, round(1.0 / (chunk_s * FRAMES_HZ)))
            frame_s = chunk_s * stride
            starts = torch.arange(first, first + FILMED)
            films[caption] = film(env, policy, starts, Studio(env).render, device, stride=stride)
        write_video(path, tile(films), round(1.0 / frame_s))

    def _options(self) -> dict[str, Any]:
        """Options that determine the contract."""
        names = ("horizon", "executed", "images", "image_size", "privileged")
        return {name: getattr(self, name) for name in names}

    def _check(self, distribution: str) -> None:
        if distribution not in self.distributions:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")


def find_mdp(name: str) -> Mdp:
    """Task `name` of `tasks/`, or the task in the Python file `name`.

    Raises:
        UserError: for an unknown task, or a file without exactly one.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"there is no task file {path}; if it has moved, use task.mdp=FOLDER/{path.name}")
        spec = importlib.util.spec_from_file_location(f"mjcf_task_{path.stem}", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module
        if (folder := str(path.resolve().parent)) not in sys.path:  # it may import modules of its folder
            sys.path.append(folder)
        spec.loader.exec_module(module)
    elif name in SHIPPED:
        with needs_extra("mjcf"):
            module = importlib.import_module(f"sims.mjcf.tasks.{name}")
    else:
        raise UserError(
            f"unknown task.mdp {name!r}; expected the path of a Python file, or one of {', '.join(SHIPPED)}"
        )
    tasks = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Mdp)]
    tasks = [each for each in tasks if each.__module__ == module.__name__]
    if len(tasks) != 1:
        raise UserError(f"expected one subclass of Mdp in {name}, got {len(tasks)}")
    return tasks[0]()
