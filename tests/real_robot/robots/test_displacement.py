"""Displacements become the velocities with which the simulator's own controller follows them."""

import math

import numpy as np
import pytest
import torch

from real_robot.robots.displacement import Displaced, Response
from sims.libero.environment import LiberoEnvironment
from sims.libero.observation import CONTROL_DT_S
from sims.libero.suite import load_tasks


class Constant:
    """An executor that always wants the same."""

    def __init__(self, action):
        self.given, self.resets = action, 0

    def reset(self):
        self.resets += 1

    def observe(self, reading):
        self.reading = reading

    def action(self, now_s):
        return self.given


def test_the_response_is_that_of_a_damped_spring_integrated_finely():
    response, action, velocity = Response(0.05), np.array([1.0, -0.5, 0.0, 0.2, 0.0, 0.0]), np.full(6, 0.03)
    goal, x, v, dt = np.array([0.05] * 3 + [0.5] * 3) * action, np.zeros(6), velocity.copy(), 1e-6
    for _ in range(50_000):
        v = v + dt * (150.0 * (goal - x) - 2.0 * math.sqrt(150.0) * v)
        x = x + dt * v
    mean, after = response.after(action, velocity)
    np.testing.assert_allclose(mean, x / 0.05, rtol=1e-4)
    np.testing.assert_allclose(after, v, rtol=1e-4)


def test_repeated_displacements_of_5_cm_move_the_hand_a_quarter_of_that_and_never_faster():
    fastest = Response(0.05).fastest
    np.testing.assert_allclose(fastest[:3], 0.265, atol=0.001)
    np.testing.assert_allclose(fastest[3:], 2.65, atol=0.01)
    velocity, generator = np.zeros(6), np.random.default_rng(0)
    for _ in range(500):
        mean, velocity = Response(0.05).after(generator.choice([-1.0, 1.0], 6), velocity)
        assert (np.abs(mean) <= fastest * (1 + 1e-9)).all()


def test_liberos_own_controller_moves_the_hand_so():
    env = LiberoEnvironment(
        load_tasks("libero_object", [0]), 1, distribution="official", split="eval", horizon=4, executed=4, threads=1
    )
    seen = env.reset(starts=torch.tensor([0]))
    velocity, moved, expected = np.zeros(6), [], []
    for way in (
        [0.8, 0.0, 0.4],
        [0.8, 0.0, 0.4],
        [0.0, -0.7, 0.0],
        [0.0, -0.7, 0.0],
        [0.0, -0.7, 0.5],
        [-0.5, 0.0, 0.0],
    ):
        action = torch.tensor([[[*way, 0.0, 0.0, 0.0, -1.0]] * 4])
        before = seen["end_effector_position"][0]
        seen = env.step(action).observation
        moved.append((seen["end_effector_position"][0] - before).numpy())
        means = []
        for _ in range(4):
            mean, velocity = Response(CONTROL_DT_S).after(action[0, 0, :6].numpy(), velocity)
            means.append(mean[:3])
        expected.append(CONTROL_DT_S * np.sum(means, 0))
    moved, expected = np.array(moved), np.array(expected)
    share = (moved * expected).sum() / (expected**2).sum()
    assert 0.85 < share < 1.05  # less by friction and by what moves the other joints
    assert np.linalg.norm(moved - expected) < 0.25 * np.linalg.norm(expected)


def test_an_executor_of_displacements_becomes_one_of_velocities():
    inner = Constant(np.array([3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.7]))  # the simulator clips to 1
    commands = Displaced(inner, Response(0.05))
    first, second = commands.action(0.0), commands.action(0.05)
    mean, velocity = Response(0.05).after(np.array([1.0, 0, 0, 0, 0, 0]), np.zeros(6))
    np.testing.assert_allclose(first, [*mean, 0.7])
    np.testing.assert_allclose(second[:6], Response(0.05).after(np.array([1.0, 0, 0, 0, 0, 0]), velocity)[0])
    inner.given = None
    assert commands.action(0.1) is None
    inner.given = np.array([1.0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(commands.action(0.15)[:6], mean)  # the hand has come to rest in between
    commands.reset()
    assert inner.resets == 1
    np.testing.assert_allclose(commands.action(0.2)[:6], mean)


@pytest.mark.parametrize("stiffness", [50.0, 300.0])
def test_a_stiffer_controller_covers_more(stiffness):
    assert (Response(0.05, stiffness=stiffness).fastest[0] > Response(0.05).fastest[0]) == (stiffness > 150.0)
