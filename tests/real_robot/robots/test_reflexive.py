"""A reflex on a robot: it cuts chunks before safety, which still limits commands, and holds where risk is unknown."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.execution.chunking import Execution
from embodied.execution.reflex import Reflex
from embodied.policy import Decision
from real_robot.robots.control_loop import Controller
from real_robot.robots.reflexive import Reflexive
from real_robot.robots.robot import Reading
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import State
from real_robot.serving.chunk_executor import ChunkExecutor
from tests.real_robot.plant import DT_S, Plant, guarded

NAMES = ("b", "a")
"""The policy has the robot's elements in the other order."""


class Forward:
    """Chunks of four velocities, for b and a; counts its decisions."""

    def __init__(self, chunk: list[list[float]]) -> None:
        position = TensorSpec((2,), unit="m", frame="base", names=NAMES)
        speed = replace(position, unit="m/s", low=(-9.0, -9.0), high=(9.0, 9.0))
        self.contract = Contract({"position": position}, speed, DT_S, 4, 4)
        self.chunk, self.decisions = torch.tensor([chunk]), 0

    def act(self, observation, *, deterministic=False, generator=None):
        self.decisions += 1
        return Decision(self.chunk.clone(), TensorDict({}, [1]), torch.zeros(1, 4, 1))


def of_a(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
    """Risk of moving a forwards: its speed; NaN beyond 5."""
    speed = actions[:, NAMES.index("a")]
    return torch.where(speed > 5.0, math.nan, speed.clamp(0.0, 1.0))


class Setup:
    """A plant, whose velocities of a and b are limited to 1, and its programs up to safety."""

    def __init__(self, chunk: list[list[float]], risk=of_a, latency_s: float = 0.0) -> None:
        self.plant = Plant(Kind.VELOCITY, np.zeros(2))
        spec = replace(self.plant.contract.action, unit="m/s", low=(-9.0, -9.0), high=(9.0, 9.0))
        self.plant.contract = replace(self.plant.contract, action=spec)
        limits = Limits({name: ElementLimits(Kind.VELOCITY, velocity=1.0) for name in "ab"})
        self.safety = guarded(self.plant, limits)
        self.policy = Forward(chunk)
        options = {"execution": Execution.NAIVE, "clock": self.plant.clock, "asynchronous": False}
        self.executor = ChunkExecutor(self.policy, self.plant.contract, latency_s=latency_s, **options)
        step = replace(self.policy.contract, horizon=1, executed=1)
        self.reflexive = Reflexive(self.executor, Reflex(risk, step, 0.5, (0.0, 0.0)), self.plant.contract)
        self.controller = Controller(self.plant, self.reflexive, self.safety, self.plant.clock)

    def tick(self):
        self.plant.tick()
        return self.controller.tick()

    def command(self, **changed: np.ndarray) -> list[float] | None:
        """The action after one reading, in the robot's order a, b."""
        reading = self.plant.tick()
        self.reflexive.observe(replace(reading, observation=dict(reading.observation) | changed))
        action = self.reflexive.action(self.plant.clock())
        return None if action is None else [*map(float, action)]


SAFE, RISKY, BROKEN = [0.3, 0.2], [0.4, 0.8], [0.0, 6.0]


def test_a_chunk_without_risk_is_the_executors_own():
    setup = Setup([SAFE, SAFE, SAFE, SAFE])
    assert [setup.command() for _ in range(8)] == [pytest.approx([0.2, 0.3])] * 8
    assert setup.policy.decisions == 2


def test_a_chunk_is_cut_at_the_risky_action_and_the_policy_decides_anew():
    setup = Setup([SAFE, RISKY, SAFE, SAFE])
    assert setup.command() == pytest.approx([0.2, 0.3])
    assert setup.command() == pytest.approx([0.0, 0.0])  # the safest: braking
    assert setup.policy.decisions == 1
    assert setup.command() == pytest.approx([0.2, 0.3])  # the first action of a new chunk
    assert setup.policy.decisions == 2


def test_until_the_next_chunk_arrives_the_robot_holds():
    setup = Setup([SAFE, RISKY, SAFE, SAFE], latency_s=2 * DT_S)
    ran = [setup.command() for _ in range(8)]
    moves, stop = pytest.approx([0.2, 0.3]), pytest.approx([0.0, 0.0])
    assert ran == [None, None, moves, stop, None, None, moves, stop]
    setup.command()
    assert "cut" in setup.executor.reason


def test_an_unknown_risk_holds():
    setup = Setup([SAFE, BROKEN, SAFE, SAFE])
    setup.tick()
    verdict = setup.tick()
    assert verdict.state is State.HOLDING
    assert verdict.reason == "no command"
    assert setup.tick().state is State.ACTIVE  # a new chunk


@pytest.mark.parametrize("lie", [math.nan, math.inf])
def test_a_measurement_that_is_not_finite_holds_and_the_next_good_one_goes_on(lie: float):
    setup = Setup([SAFE, SAFE, SAFE, SAFE])
    assert setup.command() is not None
    assert setup.command(position=np.array([0.0, lie])) is None
    assert setup.command() == pytest.approx([0.2, 0.3])


def test_without_a_measurement_since_the_reset_it_holds():
    setup = Setup([SAFE, SAFE, SAFE, SAFE])
    assert setup.command() is not None
    setup.reflexive.reset()
    assert setup.reflexive.action(setup.plant.clock()) is None
    assert setup.command() == pytest.approx([0.2, 0.3])


def test_actions_that_are_not_finite_are_left_to_safety():
    setup = Setup([SAFE, SAFE, SAFE, SAFE])
    setup.executor.action = lambda now_s: np.array([np.nan, 0.0])
    setup.reflexive.observe(setup.plant.tick())
    assert np.isnan(setup.reflexive.action(setup.plant.clock())[0])


@pytest.mark.parametrize("risk", [0.0, 1.0, math.nan])
def test_safety_gets_the_same_or_a_smaller_command_and_still_limits_it(risk: float):
    """Whatever the critic says: even one that finds the fastest action the safest."""

    def critic(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        speed = actions.abs().amax(1)
        return torch.where(speed > 7.0, risk, 1.0 - speed / 10.0)

    setup = Setup([[8.0, -8.0]] * 4, critic)
    for _ in range(6):
        verdict = setup.tick()
        if verdict.action is not None:
            assert np.abs(verdict.action).max() <= 1.0
    requested = setup.command()
    if requested is not None:
        assert np.abs(requested).max() <= 8.0


def test_three_elements_are_put_into_the_reflexs_order_and_back():
    class Fixed:
        """An executor that commands 1, 2 and 3 to the robot's a, b and c."""

        observe = drop = lambda self, value: None

        def action(self, now_s: float) -> np.ndarray:
            return np.array([1.0, 2.0, 3.0])

    checked = []

    def risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        checked.append([*observation["position"][0].tolist(), *actions[0].tolist()])
        return torch.tensor([1.0 if len(checked) == 1 else 0.0])

    spec = TensorSpec((3,), unit="m", names=("a", "b", "c"), low=(-9.0,) * 3, high=(9.0,) * 3)
    robot = Contract({"position": spec}, spec, DT_S)
    own = replace(spec, names=("c", "a", "b"))
    reflex = Reflex(risk, Contract({"position": own}, own, DT_S), 0.5, (None, 0.0, 0.0))
    reflexive = Reflexive(Fixed(), reflex, robot)
    reflexive.observe(Reading({"position": np.array([10.0, 20.0, 30.0], np.float32)}, 0.0, 1))
    assert reflexive.action(0.0).tolist() == [0.0, 0.0, 3.0]  # c keeps its value
    assert checked[0] == [30.0, 10.0, 20.0, 3.0, 1.0, 2.0]


def test_a_reflex_of_another_robot_is_refused():
    setup = Setup([SAFE] * 4)
    other = Contract({"force": TensorSpec((1,))}, setup.policy.contract.action, DT_S)
    with pytest.raises(UserError, match="force"):
        Reflexive(setup.executor, Reflex(of_a, other, 0.5, (0.0, 0.0)), setup.plant.contract)
