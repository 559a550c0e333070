"""Quadrotor tasks for training: the options of each goal, its environments, video and trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from embodied.configuration import FiniteFloat, PositiveInt, Range
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.export.conditions import Conditions
from embodied.policy import Policy
from embodied.task import Sweep, Task, evaluation_distributions
from sims.quadrotor.environment import STEP_LIMIT, QuadrotorEnvironment
from sims.quadrotor.episode import Mdp, reweighted, weights
from sims.quadrotor.flights import HISTORY, MEANINGS, SWEEPS, Flight, named_flights, nominal, prepared, swept
from sims.quadrotor.observation import contract
from sims.quadrotor.physics.airframes import AIRFRAMES, SCATTER_MAX, Airframe
from sims.quadrotor.physics.dynamics import Options
from sims.quadrotor.physics.own_airframe import AirframeOptions, chosen_airframe
from sims.quadrotor.planners.raceline import Raceline
from sims.quadrotor.platforms import MEASURED, Ranges, described
from sims.quadrotor.tasks.any_platform import POSITION_LIMIT_M, AnyHover
from sims.quadrotor.tasks.hover import Hover
from sims.quadrotor.tasks.race import Race
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.robust import RobustHover
from sims.quadrotor.tasks.track import Track
from sims.quadrotor.video.filming import FILMED, film_policies
from sims.remote.options import ProcessOptions


@dataclass
class QuadrotorTask(Task, ProcessOptions):
    """Options common to all goals of one drone, which flies under constant random forces and torques.

    The policy observes its last `history` actions, and decides on the next `executed` ones at once. An episode is
    truncated after `step_limit` control steps. `reward` contains the weights of the goal's reward, see its function
    `reward`.
    """

    name: str = "quadrotor"
    history: PositiveInt = 1
    executed: PositiveInt = 1
    step_limit: PositiveInt = STEP_LIMIT
    reward: dict[str, FiniteFloat] = field(default_factory=dict)

    MDPS: ClassVar[Mapping[str, Mdp]] = {}
    """Goals by name of the distribution; the first one is for training."""
    OPTIONS: ClassVar[Options] = Options()
    """Effects of the dynamics."""

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, a history longer than an episode, and unknown weights."""
        super().__post_init__()
        if self.history > self.step_limit:
            raise UserError(f"expected history of at most step_limit={self.step_limit} actions, got {self.history}")
        for mdp in self.MDPS.values():
            reweighted(mdp, self.reward)

    @property
    def distributions(self) -> tuple[str, ...]:
        """The goal's distributions, each with random initial states, forces and torques."""
        return tuple(self.MDPS)

    def flown(self, distribution: str) -> dict[str, Any]:
        """Options of the environment for its airframe: `airframe`, and `scatter_width` or `platforms`."""
        raise NotImplementedError

    def contract(self, distribution: str) -> Contract:
        """The contract of the goal's environments, with the actions that the policy observes."""
        return contract(self._mdp(distribution).OBSERVED, self.history, self.executed)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> QuadrotorEnvironment:
        """Make environments that start from the `split` ("train" or "eval").

        Raises:
            UserError: for an unknown distribution.
        """
        return self._simulator(
            num_envs,
            mdp=self._mdp(distribution),
            options=self.OPTIONS,
            split=split,
            history=self.history,
            executed=self.executed,
            step_limit=self._steps(split),
            seed=seed,
            device=device,
            **self.flown(distribution),
        )

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts; also plot their paths into a file next to the video."""
        among = distribution or self.distributions[0]
        envs = {caption: self.environment(FILMED, among, "eval", device=device) for caption in policies}
        film_policies(path, envs, policies, self.flown(among)["airframe"] or AIRFRAMES["crazyflie"], device, first)

    def _steps(self, split: str) -> int:
        """Control steps of an episode."""
        return self.step_limit

    @property
    def _simulator(self) -> type[QuadrotorEnvironment]:
        return QuadrotorEnvironment

    def _mdp(self, distribution: str) -> Mdp:
        if distribution not in self.MDPS:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")
        return reweighted(self.MDPS[distribution], self.reward)


@dataclass
class AirframeTask(QuadrotorTask, AirframeOptions):
    """A goal of a drone with a chosen airframe.

    Each episode's parameters differ from the airframe's by up to the share `randomisation`.
    """

    randomisation: Annotated[float, Range(at_least=0, at_most=SCATTER_MAX)] = 0.0

    @property
    def conditions(self) -> Conditions:
        """Conditions of training: the airframe, with parameters that vary if `randomisation` is above 0."""
        varied = f"{self.airframe}, parameters within {100 * self.randomisation:g}%"
        missing = ("latency",) if self.randomisation else ("latency", "randomisation")
        return Conditions((varied,), missing, first_action=0.0)

    def flown(self, distribution: str) -> dict[str, Any]:
        """The same airframe in every distribution."""
        return {"airframe": self._airframe, "scatter_width": self.randomisation}

    @property
    def _airframe(self) -> Airframe:
        return chosen_airframe(self.airframe, self.airframes)


class HoverSim(Enum):
    """Simulators of the quadrotors."""

    own = "own"
    crazyflow = "crazyflow"


@dataclass
class HoverTask(AirframeTask):
    """Hover at the origin of the world under realistic conditions: latency, wind, and parameters off the data sheet.

    Training draws `variation.TRAINED` and the disturbances of `RobustHover` for every episode, which takes
    `training_steps`, because the beginning of a flight is its hard part. Parameters of Crazyflies lie between those of
    arXiv 2311.13081 and arXiv 2509.11481. `nominal` trains without any of it, in the MDP of arXiv 2311.13081
    ("disturbed"). The policy observes its last `history` actions: by default 12, or 1 if `nominal`.

    Evaluations also run in crazyflow, an independent simulator (`sim`), under the interpreter `python`, or one that is
    created for it.
    """

    name: str = "quadrotor_hover"
    nominal: bool = False
    history: PositiveInt | None = None  # type: ignore[assignment]
    training_steps: PositiveInt = 150
    sim: HoverSim = HoverSim.own
    reward: dict[str, FiniteFloat] = field(default_factory=lambda: weights(Hover()))

    MDPS: ClassVar[Mapping[str, Mdp]] = {"robust": RobustHover(), "disturbed": Hover()}
    meanings: ClassVar[Mapping[str, str]] = MEANINGS

    def __post_init__(self) -> None:
        """Set the default history; raise UserError as in QuadrotorTask."""
        if self.history is None:
            self.history = 1 if self.nominal else max(1, min(HISTORY, self.step_limit))
        super().__post_init__()

    @property
    def distributions(self) -> tuple[str, ...]:
        """The distribution for training."""
        return ("disturbed",) if self.nominal or self.sim is not HoverSim.own else ("robust",)

    @property
    def variants(self) -> tuple[str, ...]:
        """Distributions with a single departure from the nominal MDP, and the nominal MDP itself."""
        if self.sim is not HoverSim.own:
            return ()
        return tuple(name for name in ("disturbed", *self._flights()) if name not in self.distributions)

    @property
    def margins(self) -> Mapping[str, Sweep]:
        """Sweeps of `evaluate.py margins=true`; their points are distributions, see `flights.SWEEPS`."""
        return SWEEPS

    @property
    def conditions(self) -> Conditions:
        """Conditions of training."""
        return nominal(self.airframe) if self.nominal else prepared(self.airframe, self._flights()["robust"])

    @property
    def sims(self) -> tuple[str, ...]:
        """Names of the available simulators."""
        return tuple(sim.value for sim in HoverSim)

    def settled(self) -> HoverTask:
        """The task with the interpreter for its simulator: crazyflow's own one is created unless `python` names one.

        Raises:
            UserError: if it cannot be created.
        """
        if self.sim is HoverSim.own:
            return self
        from sims.quadrotor.crazyflow.interpreter import crazyflow_python

        return replace(self, python=self.python or str(crazyflow_python()))

    def contract(self, distribution: str) -> Contract:
        """Contract of hover, the same for all distributions.

        Raises:
            UserError: for an unknown distribution.
        """
        if distribution != "disturbed":
            self._flight(distribution)
        return contract(Hover.OBSERVED, self.history or HISTORY, self.executed)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> QuadrotorEnvironment:
        """Make environments as `QuadrotorTask.environment`; in crazyflow for evaluations only.

        Raises:
            UserError: for training in crazyflow.
        """
        if self.sim is HoverSim.crazyflow and split == "train":
            raise UserError("crazyflow only evaluates: evaluate.py checkpoint=RUN sim=crazyflow")
        if distribution == "disturbed":
            return super().environment(num_envs, distribution, split, seed, device)
        flight = self._flight(distribution)
        steps = min(self.training_steps, self.step_limit) if split == "train" else self.step_limit
        return self._simulator(
            num_envs,
            mdp=reweighted(flight.mdp, self.reward),
            airframe=flight.airframe,
            variation=flight.variation,
            scatter_width=self.randomisation,
            options=flight.options,
            split=split,
            history=self.history,
            executed=self.executed,
            step_limit=steps,
            seed=seed,
            device=device,
        )

    def flown(self, distribution: str) -> dict[str, Any]:
        """The airframe before variation."""
        airframe = self._airframe if distribution == "disturbed" else self._flight(distribution).airframe
        return {"airframe": airframe, "scatter_width": self.randomisation}

    def _flights(self) -> dict[str, Flight]:
        return named_flights(self.airframe, self._airframe)

    def _flight(self, distribution: str) -> Flight:
        if "=" in distribution:
            return swept(self._airframe, distribution)
        if (flight := self._flights().get(distribution)) is None:
            expected = ", ".join(evaluation_distributions(self))
            raise UserError(f"unknown distribution {distribution!r}; expected one of {expected}")
        return flight

    @property
    def _simulator(self) -> type[QuadrotorEnvironment]:
        if self.sim is HoverSim.own:
            return QuadrotorEnvironment
        from sims.quadrotor.crazyflow.environment import CrazyflowEnvironment

        return CrazyflowEnvironment


def _eight(speed_m_s: float) -> Track:
    return Track(eight_share=1.0, lissajous_share=0.0, speed_low_m_s=speed_m_s, speed_high_m_s=speed_m_s)


@dataclass
class TrackTask(AirframeTask):
    """Follow moving references; numbers in distribution names are highest speeds in m/s."""

    name: str = "quadrotor_track"
    reward: dict[str, FiniteFloat] = field(default_factory=lambda: weights(Track()))

    MDPS: ClassVar[Mapping[str, Mdp]] = {
        "mixed": Track(),
        "random": Track(eight_share=0.0, lissajous_share=0.0),
        "lissajous": Track(eight_share=0.0, lissajous_share=1.0),
        **{f"figure_eight_{speed}": _eight(speed) for speed in (1, 2, 3)},
    }
    meanings: ClassVar[Mapping[str, str]] = {
        "mixed": "References of all the kinds below.",
        "random": "Sums of random sines.",
        "lissajous": "Lissajous curves.",
        **{f"figure_eight_{speed}": f"Figure-eights at up to {speed} m/s." for speed in (1, 2, 3)},
    }


@dataclass
class RecoverTask(AirframeTask):
    """Come to rest upright after a throw."""

    name: str = "quadrotor_recover"
    reward: dict[str, FiniteFloat] = field(default_factory=lambda: weights(Recover()))

    MDPS: ClassVar[Mapping[str, Mdp]] = {"thrown": Recover()}
    meanings: ClassVar[Mapping[str, str]] = {"thrown": "Thrown upside down or on its side, moving and turning."}


@dataclass
class RaceTask(AirframeTask):
    """Race through gates."""

    name: str = "quadrotor_race"
    reward: dict[str, FiniteFloat] = field(default_factory=lambda: weights(Race()))

    MDPS: ClassVar[Mapping[str, Mdp]] = {"track": Race()}
    meanings: ClassVar[Mapping[str, str]] = {"track": "One track of gates, from random initial states."}
    OPTIONS: ClassVar[Options] = Options(drag=True, delay_steps=1)

    def baselines(self) -> dict[str, Policy]:
        """Planner that uses the track, the airframe and the rotors' speeds."""
        return {"raceline": Raceline(self.contract("track"), self._airframe)}


@dataclass
class AnyPlatformTask(QuadrotorTask):
    """Hover with any platform: random ones for training, others for evaluation, by distribution.

    Every episode of training has a platform drawn from the ranges `platforms`, and takes `training_steps`, because
    platforms are identified in the beginning. Platforms of evaluation are never drawn.
    """

    name: str = "quadrotor_any"
    platforms: Ranges = field(default_factory=Ranges)
    training_steps: PositiveInt = 150
    reward: dict[str, FiniteFloat] = field(default_factory=lambda: weights(AnyHover()))

    MDPS: ClassVar[Mapping[str, Mdp]] = {
        "random": AnyHover(),
        **dict.fromkeys(MEASURED, Hover(position_limit_m=POSITION_LIMIT_M)),
    }
    meanings: ClassVar[Mapping[str, str]] = {
        "random": "Platforms drawn as in training.",
        **{name: described(name, airframe) for name, airframe in MEASURED.items()},
    }
    OPTIONS: ClassVar[Options] = Options(drag=True, delay_steps=2)

    @property
    def conditions(self) -> Conditions:
        """Conditions of training."""
        return self.platforms.conditions

    def flown(self, distribution: str) -> dict[str, Any]:
        """A random platform in every episode, or the evaluated one."""
        return {"airframe": MEASURED.get(distribution), "platforms": self.platforms}

    def _steps(self, split: str) -> int:
        """Control steps of an episode, fewer for training."""
        return min(self.training_steps, self.step_limit) if split == "train" else self.step_limit
