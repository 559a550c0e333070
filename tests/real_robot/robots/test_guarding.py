"""A guard on a robot: it sees the newest measurement, commands nothing by itself, and leaves faults to safety."""

import numpy as np
import pytest
import torch

from embodied.errors import UserError
from embodied.navigation.guard import Guard
from real_robot.robots.guarding import Guarding
from real_robot.robots.robot import Reading
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.vehicles import DRIVE
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.mapping import drive_of
from sims.vehicle.navigate import Navigate
from sims.vehicle.task import NavigateTask
from sims.vehicle.vehicles import JACKAL

CONTRACT = NavigateTask().contract("rooms")
VEHICLE = {name: getattr(JACKAL, name) for name in DRIVE}


class Policy:
    """An executor that commands `given`."""

    def __init__(self):
        self.given, self.resets, self.readings = np.array([1.0, 0.0]), 0, []

    def reset(self):
        self.resets += 1

    def observe(self, reading):
        self.readings.append(reading)

    def action(self, now_s):
        return self.given


def reading(wall_m: float, **changed: np.ndarray) -> Reading:
    """Of a vehicle at 1 m/s towards a wall around it, by a policy's keys and shapes."""
    observation = {key: np.zeros(spec.shape, np.float32) for key, spec in CONTRACT.observation.items()}
    observation |= {"lidar": np.full(90, wall_m, np.float32), "velocity": np.array([1.0, 0.0], np.float32)}
    observation |= {"remembered": np.full(90, 6.0, np.float32)}
    return Reading(observation | changed, 0.0, 1)


@pytest.fixture
def behind() -> tuple[Policy, Guarding]:
    policy = Policy()
    guard = Guard(CONTRACT, drive_of(JACKAL, Navigate.LIDAR))
    return policy, Guarding(policy, guard)


def test_a_command_is_passed_on_as_it_is_where_there_is_room(behind):
    policy, guarding = behind
    guarding.observe(reading(5.0))
    assert guarding.action(0.0) is policy.given
    assert len(policy.readings) == 1


def test_a_command_towards_a_wall_becomes_braking_until_there_is_room_again(behind):
    policy, guarding = behind
    guarding.observe(reading(5.0))
    guarding.observe(reading(0.5))  # the newest counts
    action = guarding.action(0.0)
    assert action[0] < 0.8
    assert action.dtype == policy.given.dtype
    guarding.observe(reading(5.0))
    assert guarding.action(0.1) is policy.given


def test_without_a_command_nothing_is_commanded(behind):
    policy, guarding = behind
    guarding.observe(reading(0.5))
    policy.given = None
    assert guarding.action(0.0) is None


@pytest.mark.parametrize("key", ["lidar", "remembered", "velocity", "waypoints"])
def test_a_measurement_that_is_not_finite_is_left_to_safety(behind, key):
    policy, guarding = behind
    guarding.observe(reading(0.5))
    broken = np.array(reading(0.5).observation[key])
    broken[0] = np.nan
    guarding.observe(reading(0.5, **{key: broken}))
    assert guarding.action(0.0) is policy.given
    assert len(policy.readings) == 2  # the policy's executor hears of it
    policy.given = np.array([np.nan, 0.0])
    guarding.observe(reading(0.5))
    assert guarding.action(0.0) is policy.given


def test_an_episode_begins_without_what_was_measured_before(behind):
    policy, guarding = behind
    guarding.observe(reading(0.5))
    guarding.reset()
    assert policy.resets == 1
    assert guarding.action(0.0) is policy.given


def test_a_differential_drive_has_the_guard_of_its_simulator():
    table = robot_table("diff_drive", CONTRACT, {"rate_hz": 10.0, "guard": VEHICLE})
    env = VehicleEnvironment(16, mdp=Navigate(), vehicle=JACKAL, mapped=True)
    observation = env.reset(starts=torch.arange(16))
    guard = Guard(CONTRACT, drive_of(JACKAL, Navigate.LIDAR))
    replaced = 0
    for _ in range(40):
        ahead = torch.tensor([[1.0, 0.0]]).expand(16, 2)
        expected, other = guard.command(observation, ahead)
        replaced += int(other.sum())
        for row in other.nonzero().squeeze(1).tolist():
            guarding = table.translate(Policy())
            seen = {key: value[row].numpy() for key, value in observation.items()}
            guarding.observe(Reading(seen, 0.0, 1))
            np.testing.assert_array_equal(guarding.action(0.0), expected[row].numpy())
        observation = env.step(expected.unsqueeze(1)).observation
    assert replaced > 10


def test_the_guard_must_know_the_whole_vehicle_and_nothing_else():
    for given in (VEHICLE | {"mass_kg": 17.0}, {"length_m": 0.5}):
        with pytest.raises(UserError, match=r"expected length_m, .*lag_s in options.guard; got"):
            robot_table("diff_drive", CONTRACT, {"rate_hz": 10.0, "guard": given})


def test_who_drives_a_policy_with_waypoints_without_a_guard_is_told():
    assert robot_table("diff_drive", CONTRACT, {"rate_hz": 10.0}).advice.startswith("options.guard is not set")
    assert not robot_table("diff_drive", CONTRACT, {"rate_hz": 10.0, "guard": VEHICLE}).advice
    plain = NavigateTask(map=False, guard=False).contract("rooms")
    assert not robot_table("diff_drive", plain, {"rate_hz": 10.0}).advice
    with pytest.raises(UserError, match=r"the policy has no remembered; leave out options\.guard"):
        robot_table("diff_drive", plain, {"rate_hz": 10.0, "guard": VEHICLE}).translate(Policy())
