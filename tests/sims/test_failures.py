"""What evaluations in real simulators say of why episodes failed."""

import pytest
import torch
from tensordict import TensorDict

from embodied.evaluation.evaluation import evaluate
from embodied.policy import Decision
from sims.mjcf.environment import MjcfEnvironment
from sims.mjcf.tasks.in_hand import InHand
from sims.mjcf.tasks.quadruped import STANCE, Quadruped
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.tasks.hover import Hover
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.track import Track
from sims.swarm.environment import SwarmEnvironment
from sims.swarm.mdp import Swarm
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import Navigate
from sims.vehicle.race import Race
from sims.vehicle.task import NavigateTask
from sims.vehicle.vehicles import F1TENTH, JACKAL
from tests.sims.remote.made import in_children


class Always:
    """The same action, whatever there is to see."""

    def __init__(self, env, action):
        self.contract, self.action = env.contract, torch.tensor(action)

    def act(self, observation, *, deterministic=False, generator=None):
        n = len(observation)
        actions = self.action.expand(n, self.contract.horizon, -1)
        return Decision(actions, TensorDict({}, [n]), torch.zeros(n, 1, 1))


def reasons(env, action):
    """By reason, how many of four episodes of a policy that always does the same have failed."""
    failures = evaluate(env, Always(env, action), starts_per_task=4).summary()["per_task"][0]["failures"]
    return {reason: failed["episodes"] for reason, failed in failures.items()}


def vehicle(mdp, parameters, **options):
    return VehicleEnvironment(4, mdp=mdp, vehicle=parameters, split="eval", **options)


def quadrotor(mdp, **options):
    return QuadrotorEnvironment(4, mdp=mdp, split="eval", step_limit=300, **options)


def swarm(**options):
    return SwarmEnvironment(4, mdp=Swarm(**options), split="eval", step_limit=300)


def mjcf(mdp, **options):
    return MjcfEnvironment(4, mdp=mdp, split="eval", **options)


OFF = (-1.0,) * 4
PUSHED = (0.0, 0.7, 1.4) * 2 + (0.0, -0.3, 0.0) * 2
CASES = {
    "a vehicle at a wall": (lambda: vehicle(Navigate(), JACKAL), (2.0, 0.0), {"collision"}),
    "a vehicle that waits": (lambda: vehicle(Navigate(), JACKAL, step_limit=5), (0.0, 0.0), {"time-out"}),
    "a car at a wall": (lambda: vehicle(Race(), F1TENTH), (0.0, 3.0), {"collision"}),
    "no thrust to hover": (lambda: quadrotor(Hover()), OFF, {"out of bounds"}),
    "no thrust to follow": (lambda: quadrotor(Track()), OFF, {"too far from the reference"}),
    "no thrust after a throw": (lambda: quadrotor(Recover()), OFF, {"crash"}),
    "no time after a throw": (lambda: quadrotor(Recover(position_limit_m=1e6)), OFF, {"time-out"}),
    "no thrust in a room": (lambda: swarm(drones=1, density=0.0), OFF, {"hit room"}),
    "a quadruped on its side": (lambda: mjcf(Quadruped()), (3.0, 0.0, 0.0, 0.0, 0.0, 0.0) * 2, {"fell"}),
    "a quadruped that stands": (lambda: mjcf(Quadruped(), step_limit=80), STANCE, {"time-out"}),
    "a cube that is pushed": (lambda: mjcf(InHand()), PUSHED, {"dropped"}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_says_what_ended_the_episodes(name):
    make, action, expected = CASES[name]
    assert reasons(make(), action).keys() == expected


def test_an_evaluation_in_other_processes_says_the_same():
    env = in_children(NavigateTask(processes=1, guard=False)).environment(4, "rooms", "eval")
    there = reasons(env, (2.0, 0.0))
    env.close()
    assert there == reasons(vehicle(Navigate(), JACKAL), (2.0, 0.0)) == {"collision": 4}
