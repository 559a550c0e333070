"""Rewards, endings and memories of the tasks, as functions of tensors, by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from sims.mjcf.tasks.cartpole import Cartpole
from sims.mjcf.tasks.in_hand import InHand
from sims.mjcf.tasks.lift import Lift
from sims.mjcf.tasks.quadruped import Quadruped, gravity
from sims.mjcf.tasks.reacher import Reacher

ACTION = torch.tensor([[0.3, 0.4, 0.0]])
FORCE = torch.tensor([[3.0, 4.0, 0.0]])
"""Squares: 0.25 of the action and of its change, 25 of the forces."""


def moment(sensors: dict[str, list[float]] | None = None, **fields: object) -> SimpleNamespace:
    """State of one world that rewards and endings read."""
    readings = {name: torch.tensor([value]) for name, value in (sensors or {}).items()}
    tensors = {name: torch.tensor([value]) if isinstance(value, list) else value for name, value in fields.items()}
    shared = {"action": ACTION, "previous": torch.zeros(1, 3), "actuator_force": FORCE}
    return SimpleNamespace(**shared | tensors, sensor=lambda name: readings[name])


def memory(**entries: list[float] | float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([entry]) for name, entry in entries.items()}


def test_cartpole():
    pole = Cartpole()
    now = moment(qpos=[1.0, math.pi / 3.0], qvel=[9.0, 2.0])
    assert pole.reward(now).item() == pytest.approx(0.75 * 0.75 / 1.4 - 0.02 * 0.09)
    for angle, held_s in ((0.19, 1.52), (-0.19, 1.52), (0.21, 0.0)):
        leaning = moment(qpos=[0.0, angle], memory=memory(held_s=1.5), dt_s=0.02)
        assert pole.update(leaning)["held_s"].item() == pytest.approx(held_s)
    for held_s, success in ((2.0, True), (1.98, False)):
        assert pole.success(moment(memory=memory(held_s=held_s))).item() is success


def test_in_hand():
    hand = InHand()
    kept = {"place": [0.018, 0.024, 0.02], "velocity": [0.2, 0.3, 0.6], "top": [0.0, 0.0, 1.0], "side": [1.0, 0.0]}
    cost = 5.0 * 0.03 + 0.5 * 0.7 + 0.05 * 25.0 + 0.005 * 0.25
    for rate, gain in ((0.7, 0.7), (9.0, 1.5), (-9.0, -1.5)):
        assert hand.reward(moment(kept, memory=memory(rate=rate))).item() == pytest.approx(gain - cost)
    turned = memory(rate=0.0, turned=3.2)
    assert (hand.terminated(moment(kept)).item(), hand.success(moment(kept, memory=turned)).item()) == (False, True)
    assert not hand.success(moment(kept, memory=memory(turned=3.1))).item()
    for dropped in ({"place": [0.018, 0.024, -0.001]}, {"place": [0.03, 0.03, 0.02]}, {"top": [0.0, 0.65, 0.76]}):
        now = moment(kept | dropped, memory=turned)
        assert (hand.terminated(now).item(), hand.success(now).item()) == (True, False)
    fallen = moment(kept | {"place": [0.018, 0.024, -0.001]}, memory=memory(rate=0.7))
    assert hand.reward(fallen).item() == pytest.approx(0.7 - cost - 5.0)
    # from 3 to -3 rad it turned on, past pi
    now = moment({"side": [math.cos(-3.0), math.sin(-3.0)]}, memory=memory(heading=3.0, turned=1.0), dt_s=0.05)
    change = 2.0 * math.pi - 6.0
    after = {name: entry.item() for name, entry in hand.update(now).items()}
    assert after == pytest.approx({"heading": -3.0, "rate": change / 0.05, "turned": 1.0 + change}, rel=1e-5)


def test_lift():
    lift = Lift()
    sensors = {"cube": [0.43, 0.0, 0.07], "grip": [0.4, 0.0, 0.11], "down": [0.0, 0.0, -0.9]}
    sensors |= {"left": [2.0], "right": [0.5]}
    near = math.exp(-10.0 * 0.05)
    gain = 0.5 * near + 0.5 * 0.5 * near + 3.0 * 0.5 * (0.07 - 0.02) / 0.1
    assert lift.reward(moment(sensors)).item() == pytest.approx(gain - 0.2 * 0.1 - 0.01 * 0.25, rel=1e-5)
    for height_m, success in ((0.121, True), (0.119, False)):
        now = moment(sensors | {"cube": [0.43, 0.0, height_m]})
        assert lift.success(now).item() is success
        assert lift.metrics(now)["height_m"].item() == pytest.approx(height_m - 0.02)
    half = math.pi / 6.0
    qpos = [*[0.0] * 9, math.cos(half), 0.0, 0.0, math.sin(half), 0.0]
    observation = lift.observe(moment(sensors, qpos=qpos, qvel=[0.0] * 12))
    assert observation["cube_heading"][0].tolist() == pytest.approx([0.5, math.sqrt(0.75)])
    assert observation["error"][0].tolist() == pytest.approx([0.03, 0.0, -0.04])
    assert observation["touch"][0].tolist() == [1.0, 0.5]


def walking(steps: int = 60, landed: float = 0.2, torso: float = 0.0) -> SimpleNamespace:
    """Errors of 0.5 m/s and 0.5 rad/s, a tilt with the cosine 0.9, and two feet that land after 0.3 and 0.5 s."""
    sensors = {"linear_velocity": [0.8, -0.3, 0.2], "angular_velocity": [0.3, 0.4, 0.9], "torso": [torso]}
    sensors |= {"FL_foot": [9.0], "FR_foot": [0.1], "RL_foot": [0.0], "RR_foot": [1.0]}
    memories = memory(command=[0.5, 0.1, 0.4], air_s=[0.3, 0.5, 0.1, 0.0], landed=landed, errors=[3.0, 6.0, 10.0])
    qpos = [0.0, 0.0, 0.3, 0.0, 0.1, 0.2, 0.0, *[0.0] * 12]
    return moment(sensors, qpos=qpos, memory=memories, steps=torch.tensor([steps]), dt_s=0.02, limit=500)


def test_quadruped():
    robot = Quadruped()
    cost = 2.0 * 0.2**2 + 0.05 * 0.25 + 2.0 * (1.0 - 0.9**2) + 2e-4 * 25.0 + 0.05 * 0.25
    assert robot.reward(walking()).item() == pytest.approx(1.5 * math.exp(-1.0) + 0.2 - cost, rel=1e-5)
    assert robot.reward(walking(landed=-5.0)).item() == 0.0
    after = robot.update(walking())
    assert after["air_s"][0].tolist() == pytest.approx([0.0, 0.0, 0.12, 0.0])
    assert after["landed"].item() == pytest.approx(0.32 - 0.25 + 0.52 - 0.25, rel=1e-5)
    assert after["errors"][0].tolist() == pytest.approx([3.5, 6.5, 11.0])
    assert robot.update(walking(steps=50))["errors"][0].tolist() == [3.0, 6.0, 10.0]  # in the first second
    assert robot.update(walking(steps=51))["errors"][0, 2].item() == 11.0
    assert robot.update(walking(steps=300))["errors"][0, 2].item() == 10.0  # and in that of the second command
    standing = walking()
    standing.memory["command"] = torch.tensor([[0.06, 0.06, 0.06]])
    moving = robot.update(standing)["landed"].item()
    standing.memory["command"] = torch.tensor([[0.05, 0.05, 0.05]])
    assert (moving > 0.3, robot.update(standing)["landed"].item()) == (True, 0.0)


@pytest.mark.parametrize(
    ("steps", "torso", "errors", "fell", "success"),
    [
        (500, 0.0, [2.4, 2.9, 10.0], False, True),
        (499, 0.0, [2.4, 2.9, 10.0], False, False),
        (500, 0.1, [2.4, 2.9, 10.0], True, False),
        (500, 0.0, [2.6, 2.9, 10.0], False, False),
        (500, 0.0, [2.4, 3.1, 10.0], False, False),
    ],
)
def test_a_walk_succeeds_if_it_follows_its_commands(steps, torso, errors, fell, success):
    now = walking(steps, torso=torso)
    now.memory["errors"] = torch.tensor([errors])
    robot = Quadruped()
    assert (robot.terminated(now).item(), robot.success(now).item()) == (fell, success)
    metrics = robot.metrics(now)
    assert [metrics[name].item() for name in ("speed_error_m_s", "turn_error_rad_s")] == pytest.approx(
        [errors[0] / 10.0, errors[1] / 10.0]
    )


def test_direction_of_gravity_in_a_body():
    half = math.sqrt(0.5)
    for quaternion, direction in (
        ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1.0]),
        ([half, half, 0.0, 0.0], [0.0, -1.0, 0.0]),  # on its left side
        ([half, 0.0, half, 0.0], [1.0, 0.0, 0.0]),  # nose down
        ([0.5, 0.5, 0.5, 0.5], [0.0, -1.0, 0.0]),
        ([0.5, 0.5, 0.5, -0.5], [1.0, 0.0, 0.0]),
    ):
        assert gravity(torch.tensor([quaternion]))[0].tolist() == pytest.approx(direction, abs=1e-6)


def test_reacher():
    arm = Reacher()
    place = {"mocap_pos": torch.tensor([[[0.13, 0.04, 0.0]]]), "site_xpos": torch.tensor([[[0.1, 0.0, 0.0]]])}
    now = moment(**place, qpos=[math.pi / 2.0, 0.7], qvel=[0.0, 0.0])
    assert arm.reward(now).item() == pytest.approx(math.exp(-1.0) - 0.05 - 0.01 * 0.25)
    observation = arm.observe(now)  # the upper arm points along the world's y
    assert observation["target"][0].tolist() == pytest.approx([0.04, -0.13])
    assert observation["error"][0].tolist() == pytest.approx([0.04, -0.03])
    assert not arm.success(now).item()
    assert Reacher(reached_m=0.051).success(now).item()
