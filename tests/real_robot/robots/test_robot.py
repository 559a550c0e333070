"""A simulated robot: the simulator's observations and time through the interface of a real robot."""

import numpy as np
import pytest
import torch

from real_robot.robots.control_loop import Controller
from real_robot.robots.robot import Robot, SimulatedRobot
from real_robot.safety.limits import ElementLimits, Limits, ObservedRange
from real_robot.safety.safety import Safety, State
from sims.quadrotor.environment import QuadrotorEnvironment
from tests.embodied.reach import Reach


def reach() -> SimulatedRobot:
    return SimulatedRobot(Reach(1, executed=1, horizon=1, tasks=1), holding=lambda observation: np.zeros(1))


def test_it_is_a_robot_that_measures_once_it_has_been_reset():
    robot = reach()
    assert isinstance(robot, Robot)
    assert robot.read() is None
    robot.hold()
    assert robot.clock() == 0.0
    reading = robot.reset(starts=torch.tensor([2]))
    assert reading is robot.read()
    assert reading.observation["position"] == pytest.approx([0.4])


def test_every_command_and_every_hold_is_one_period():
    robot = reach()
    robot.reset(starts=torch.tensor([0]))
    robot.write(np.array([0.1]))
    robot.hold()
    robot.write(np.array([0.2]))
    reading = robot.read()
    assert (reading.sequence, reading.stamp_s) == (3, pytest.approx(0.3))
    assert robot.clock() == reading.stamp_s
    assert reading.observation["position"] == pytest.approx([0.6])
    assert robot.transition.observation["position"].item() == pytest.approx(0.6)
    assert robot.reset().sequence == 4  # measurement counter and time continue
    assert robot.clock() == reading.stamp_s


def test_what_was_read_does_not_change():
    robot = reach()
    first = robot.reset(starts=torch.tensor([0]))
    before = first.observation["position"].copy()
    robot.write(np.array([0.25]))
    assert first.observation["position"] == before


def test_other_environments_and_actions_are_refused():
    for environment in (Reach(2, executed=1, horizon=1), Reach(1, executed=2)):
        with pytest.raises(ValueError, match="expected one environment"):
            SimulatedRobot(environment, np.zeros)
    robot = reach()
    with pytest.raises(ValueError, match=r"expected reset\(\)"):
        robot.write(np.zeros(1))
    robot.reset()
    with pytest.raises(ValueError, match="expected an action"):
        robot.write(np.zeros(2))


def test_a_quadrotor_is_flown_and_stopped_through_safety():
    env = QuadrotorEnvironment(1, noise=False, step_limit=2000)
    robot = SimulatedRobot(env, holding=lambda observation: np.zeros(4))
    privileged = {key for key, spec in env.contract.observation.items() if spec.privileged}
    assert privileged
    assert not privileged & robot.reset().observation.keys()
    height = float(robot.reset(starts=torch.tensor([0])).observation["position"][2])
    names = env.contract.action.names
    limits = Limits(
        {name: ElementLimits(velocity=20.0) for name in names},
        {"position.z": ObservedRange(height - 0.1, height + 9.0)},
        attitude="rotation",
        tilt_rad=1.2,
        observation_timeout_s=3 * env.contract.control_dt_s,
    )
    safety = Safety(robot, limits, robot.clock)

    class Falling:
        def reset(self) -> None: ...

        def observe(self, reading) -> None: ...

        def action(self, now_s: float) -> np.ndarray:
            return -np.ones(4)

    controller = Controller(robot, Falling(), safety, robot.clock)
    written = [np.zeros(4)]
    while (verdict := controller.tick()).state is State.ACTIVE:
        written.append(verdict.action)
        assert robot.clock() < 5.0
    assert verdict.state is State.STOPPED
    assert verdict.reason.startswith("position.z is")
    steps = np.abs(np.diff(np.array(written), axis=0)).max()
    assert steps <= 20.0 * env.contract.control_dt_s * (1 + 1e-9)
    before = robot.clock()
    assert controller.tick().state is State.STOPPED
    assert robot.clock() > before  # it holds, and time continues
