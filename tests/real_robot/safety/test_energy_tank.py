"""The energy output never exceeds the tank's initial energy plus the returned energy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Reading
from real_robot.safety.energy_tank import EnergyTank, Tank
from real_robot.safety.limits import ElementLimits, Kind, Limits
from tests.real_robot.plant import Plant, guarded


def test_by_hand():
    tank = EnergyTank(Tank(["a"], ["f.a"], start_j=1.0, most_j=1.5, reserve_j=0.2))
    assert tank.share(lambda share: 0.6 * share) == 1.0
    assert tank.share(lambda share: 1.2 * share) == pytest.approx(0.8 / 1.2, abs=1e-5)
    assert tank.share(lambda share: 1.2 * share**2) == pytest.approx((0.8 / 1.2) ** 0.5, abs=1e-5)
    tank.spend([2.0], [3.0], 0.1)
    assert tank.energy_j == pytest.approx(0.4)
    tank.spend([-2.0], [30.0], 0.1)  # 6 J come back: more than it takes
    assert tank.energy_j == 1.5
    tank.reset()
    assert tank.energy_j == 1.0


class Pressing(Plant):
    """It meets an arbitrarily changing force."""

    def __init__(self, kind: Kind, seed: int) -> None:
        super().__init__(kind, np.zeros(2))
        spec = self.contract.action
        observation = {"position": spec, "force": TensorSpec((2,), unit="N", names=spec.names)}
        self.contract = Contract(observation, spec, self.contract.control_dt_s)
        self.rng, self.force = np.random.default_rng(seed), np.zeros(2)

    def read(self) -> Reading:
        self.force = self.rng.normal(0.0, 20.0, 2)
        return Reading({"position": self.position, "force": self.force}, self.clock(), self.ticks)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from([Kind.VELOCITY, Kind.DELTA]), forward_only=st.booleans())
def test_the_world_gets_no_more_energy_than_there_was(seed, kind, forward_only):
    plant = Pressing(kind, seed)
    scale = plant.contract.control_dt_s if kind is Kind.DELTA else 1.0
    if forward_only:
        action = replace(plant.contract.action, low=(0.0, 0.0), high=(2.0 * scale, 2.0 * scale))
        plant.contract = replace(plant.contract, action=action)
    limits = {name: ElementLimits(kind, velocity=2.0) for name in "ab"}
    tank = Tank(["a", "b"], ["force.a", "force.b"], start_j=0.5, most_j=0.8)
    safety = guarded(plant, Limits(limits, tank=tank))
    rng, given_j, limited = np.random.default_rng(seed + 1), 0.0, 0
    for _ in range(100):
        reading = plant.tick()
        verdict = safety.command(rng.uniform(-1.0, 2.0, 2) * scale, reading)
        given_j += float(verdict.action @ reading.observation["force"]) / scale * plant.contract.control_dt_s
        limited += verdict.limited
        assert given_j <= 0.5 + 1e-9
        assert -1e-9 <= safety.energy_j <= 0.8
    assert limited > 0


def test_stops_are_paid_for_however_often_it_holds():
    plant = Pressing(Kind.VELOCITY, 0)
    plant.read = lambda: Reading({"position": plant.position, "force": np.full(2, 10.0)}, plant.clock(), plant.ticks)
    limits = {name: ElementLimits(Kind.VELOCITY, velocity=2.0, acceleration=4.0) for name in "ab"}
    tank = Tank(["a", "b"], ["force.a", "force.b"], start_j=1.0, most_j=1.0)
    safety, before = guarded(plant, Limits(limits, tank=tank)), plant.position.copy()
    for period in range(600):
        safety.command(None if period % 40 > 10 else np.full(2, 0.1), plant.tick())
    work_j = 10.0 * float((plant.position - before).sum())
    assert 0.9 <= work_j <= 1.0 + 1e-9  # it was 1.88
    assert safety.energy_j == pytest.approx(1.0 - work_j)


def test_positions_are_refused_since_less_of_a_position_is_no_rest():
    plant = Pressing(Kind.POSITION, 0)
    limits = {name: ElementLimits(velocity=2.0) for name in "ab"}
    with pytest.raises(ValueError, match="kind VELOCITY or DELTA of 'a' in `commands`, because `tank`"):
        guarded(plant, Limits(limits, tank=Tank(["a", "b"], ["force.a", "force.b"])))


def test_a_reset_fills_the_tank():
    plant = Pressing(Kind.VELOCITY, 0)
    limits = {name: ElementLimits(Kind.VELOCITY, velocity=2.0) for name in "ab"}
    safety = guarded(plant, Limits(limits, tank=Tank(["a"], ["force.a"], start_j=0.5)))
    for _ in range(20):
        safety.command(np.ones(2), plant.tick())
    assert safety.energy_j != 0.5
    safety.reset()
    assert safety.energy_j == 0.5


@pytest.mark.parametrize(
    "fields", [{}, {"elements": ["a"]}, {"elements": ["a"], "conjugate": ["f"], "start_j": 3.0, "most_j": 2.0}]
)
def test_impossible_tanks_are_refused(fields):
    with pytest.raises(ValueError, match="expected"):
        Tank(**fields)
