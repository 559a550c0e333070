"""Planners that are not learned: what they do where the right answer is plain, and that they arrive."""

import pytest
import torch
from tensordict import TensorDict

from embodied.evaluation import evaluate
from sims.vehicle.task import VehicleTask

NAVIGATE, RACE = VehicleTask(), VehicleTask(goal="race")


def scene(distance: float = 6.0, direction: tuple[float, float] = (1.0, 0.0), speed: float = 0.5, **ranges: float):
    """What a robot sees in the open, but for `ranges` at beams "ahead", "left" or "right" and their neighbours."""
    lidar = torch.full((1, 90), 6.0)
    for side, value in ranges.items():
        middle = {"ahead": 45, "left": 67, "right": 22}[side]
        lidar[0, middle - 8 : middle + 9] = value
    return TensorDict(
        {
            "lidar": lidar, "goal_distance": torch.tensor([[distance]]), "goal_direction": torch.tensor([direction]),
            "velocity": torch.tensor([[speed, 0.0]]),
        },
        batch_size=[1],
    )  # fmt: skip


def dwa(**seen) -> tuple[float, float]:
    speed, turn = NAVIGATE.baselines()["DWA"].act(scene(**seen)).actions[0, 0].tolist()
    return speed, turn


def test_dwa_drives_straight_to_a_goal_ahead_and_turns_to_one_aside():
    speed, turn = dwa()
    assert speed == pytest.approx(1.0)
    assert abs(turn) < 0.1
    assert dwa(direction=(0.6, 0.8))[1] > 0.4
    assert dwa(direction=(0.6, -0.8))[1] < -0.4


def test_dwa_stays_inside_its_window():
    speed, turn = dwa(speed=0.0, direction=(0.0, 1.0))
    assert speed <= 0.6 + 1e-6  # 2 m/s^2 for 0.3 s
    assert abs(turn) <= 1.5


def test_dwa_goes_around_what_is_ahead_and_never_into_it():
    _, turn = dwa(ahead=1.2)
    assert abs(turn) > 0.2
    assert dwa(ahead=0.3, left=0.35, right=0.35, speed=0.0)[0] == 0.0  # nowhere to go: it stops and turns


@pytest.mark.parametrize(("task", "distribution", "least"), [(NAVIGATE, "rooms", 0.5), (RACE, "tracks", 0.8)])
def test_baselines_arrive(task: VehicleTask, distribution: str, least: float):
    env = task.environment(12, distribution, "train")
    ((_, policy),) = task.baselines().items()
    assert evaluate(env, policy, starts_per_task=12).success.float().mean() >= least
