"""Waypoints on a robot are those of the simulator, from what its topics carry."""

import math

import numpy as np
import pytest
import torch

from embodied import native
from embodied.errors import UserError
from embodied.navigation.compiled_map import maps
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import Table
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import Navigate
from sims.vehicle.vehicles import JACKAL


def simulated() -> VehicleEnvironment:
    return VehicleEnvironment(1, mdp=Navigate(), vehicle=JACKAL, mapped=True)


def row(**options) -> Table:
    return robot_table("diff_drive", simulated().contract, {"rate_hz": 10.0} | options)


def told(env: VehicleEnvironment, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What odometry, lidar and RViz publish of a simulated vehicle."""
    x, y, yaw = env.now.state[0, :3].tolist()
    cos, sin = math.cos(yaw), math.sin(yaw)
    return {
        "position": np.array([x, y, 0.0]),
        "rotation": np.array([cos, -sin, 0, sin, cos, 0, 0, 0, 1.0]),
        "goal": np.array([*env.now.world["route"][0, 0].tolist(), 0.0]),
        "lidar": seen["lidar"],
        "velocity": seen["velocity"],
    }


@pytest.mark.parametrize("odometry", ["since the start", "anew in every period"])
def test_a_robot_finds_the_simulators_waypoints(odometry):
    env, table, ways = simulated(), row(), []
    observation = env.reset(starts=torch.tensor([5]))
    for step in range(70):
        seen = {key: value[0].numpy() for key, value in observation.items()}
        arrays = told(env, seen) if odometry == "since the start" else table.measured(seen)
        found = table.observe(arrays)
        np.testing.assert_allclose(found["waypoints"], seen["waypoints"], atol=2e-3, err_msg=f"step {step}")
        np.testing.assert_allclose(found["path_cost"], seen["path_cost"], atol=2e-3)
        # a hit at the edge of a beam's sector may fall into the next one's
        off = np.abs(found["remembered"] - seen["remembered"])
        assert np.quantile(off, 0.97) < 2e-3, f"step {step}"
        ways.append(seen["waypoints"])
        x, y = seen["waypoints"][2:4]
        angle = math.atan2(y, x)
        action = [max(1.0 - abs(angle), 0.1), max(min(2.0 * angle, 1.5), -1.5)]
        observation = env.step(torch.tensor([[action]])).observation
    assert not env.success[0]  # still driving
    assert np.ptp(np.stack(ways), 0).max() > 0.5


def scan(**hits: float) -> np.ndarray:
    """The lidar's ranges with a wall ahead, if any, 6 m wide."""
    angles = simulated().simulator.angles.numpy()
    ahead = np.abs(angles) < 1.0
    return np.where(ahead, hits.get("ahead", 6.0) / np.cos(np.where(ahead, angles, 0.0)), 6.0)


def test_what_was_seen_once_is_driven_around_until_there_is_another_goal():
    table = row()
    pose = {"position": np.zeros(3), "rotation": np.eye(3).reshape(9), "velocity": np.zeros(2)}
    goal = np.array([4.0, 0.0, 0.0])
    around = table.observe(pose | {"goal": goal, "lidar": scan(ahead=2.0)})["waypoints"]
    assert abs(around[5]) > 0.5  # the waypoint 2 m ahead is aside
    still = table.observe(pose | {"goal": goal, "lidar": scan()})["waypoints"]
    np.testing.assert_allclose(still, around, atol=0.3)
    other = table.observe(pose | {"goal": 1.25 * goal, "lidar": scan()})["waypoints"]
    assert abs(other[5]) < 0.2


def test_odometry_that_jumps_begins_a_new_map():
    table = row()
    pose = {"position": np.zeros(3), "rotation": np.eye(3).reshape(9), "velocity": np.zeros(2)}
    goal = np.array([7.0, 0.0, 0.0])
    table.observe(pose | {"goal": goal, "lidar": scan(ahead=4.5)})
    there = pose | {"position": np.array([2.5, 0.0, 0.0]), "goal": goal, "lidar": scan()}  # 2 m before that wall
    assert abs(table.observe(there)["waypoints"][5]) < 0.2


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", ["velocity", "position", "goal"])
def test_a_measurement_that_is_not_finite_leaves_the_map_as_it_is(bad, first):
    good = {
        "position": np.zeros(3),
        "rotation": np.eye(3).reshape(9),
        "velocity": np.zeros(2),
        "goal": np.array([4.0, 0.0, 0.0]),
        "lidar": scan(ahead=2.0),
    }
    broken = good | {bad: np.full_like(good[bad], np.nan)}
    expected, table = row().observe(good), row()
    if not first:
        table.observe(good)
    assert np.isnan(table.observe(broken)["waypoints"]).all()
    for _ in range(12):  # the way is planned anew every five periods
        found = table.observe(good)
        np.testing.assert_allclose(found["waypoints"], expected["waypoints"])
        np.testing.assert_allclose(found["path_cost"], expected["path_cost"])


def test_a_map_needs_a_goal_in_odometry():
    with pytest.raises(UserError, match="needs goal_distance of the robot's own topics"):
        row(arrays=["goal_distance"])


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_maps_are_compiled_before_the_first_measurement(monkeypatch, tmp_path):
    contract = simulated().contract
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.forget()
    maps.cache_clear()
    robot_table("diff_drive", contract, {"rate_hz": 10.0})
    assert list((tmp_path / "embodied-rl").glob("*.so"))
    native.forget()
    maps.cache_clear()
