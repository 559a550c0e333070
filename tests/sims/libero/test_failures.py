"""Why episodes failed, in worlds where hands do each kind of thing wrong."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.evaluation.evaluation import evaluate
from embodied.policy import Decision
from sims.libero.assets import STAND_IN, find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert
from sims.libero.failures import STATE
from sims.libero.physics.backend import LiberoSim
from sims.libero.suite import load_tasks

TASK = load_tasks("libero_object", [0])[0]
OFFICIAL = find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in")
ANOTHER = "tomato_sauce_1"
STILL, HOLD, DROP, OTHER = range(4)
"""What the hands of four environments do: nothing, lift the target, and drop it, lift another object."""
OPEN, CLOSED = ([0.0] * 6 + [grip] for grip in (-1.0, 1.0))


def make(task=TASK, num_envs=4, assets=STAND_IN, **options):
    options = {"executed": 1, "horizon": 1, "step_limit": 70, "split": "eval"} | options
    return LiberoEnvironment([task], num_envs, assets=assets, threads=1, **options)


class Hands:
    """The expert, in environment OTHER for another object, until what it lifts is up; then hands hold on or open."""

    def __init__(self, env):
        self.contract, self.env, self.up = env.contract, env, [False] * 4
        scene = env.scenes[0]
        target, other = (scene.objects.index(name) for name in (TASK.problem.obj_of_interest[0], ANOTHER))
        self.bodies = [int(scene.object_body[number]) for number in (target, target, target, other)]
        self.experts = []
        for body in self.bodies:
            goal = tuple(replace(part, a=body) for part in scene.goal)
            expert = Expert(env.simulation)
            expert.goals = [goal] * 4
            self.experts.append(expert)
        self.start = None

    def chunk(self):
        height = np.array([self.env.simulation.data[i].xpos[body][2] for i, body in enumerate(self.bodies)])
        self.start = height if self.start is None else self.start
        actions = [OPEN]
        for i in (HOLD, DROP, OTHER):
            self.up[i] |= bool(height[i] > self.start[i] + 0.05)
            wanted = self.experts[i].act(np.array([i]))[0]
            actions.append(wanted if not self.up[i] else OPEN if i == DROP else CLOSED)
        return torch.tensor(np.array(actions))[:, None]

    def act(self, observation, *, deterministic=False, generator=None):
        """All four run from the first step to the last: they are the first rows of every block."""
        actions = torch.zeros(len(observation), 1, 7)
        actions[:4] = self.chunk()
        return Decision(actions, TensorDict({}, [len(observation)]), torch.zeros(len(observation), 1, 1))


def test_an_evaluation_tells_who_never_grasped_dropped_still_holds_or_took_something_else():
    env = make()
    told = evaluate(env, Hands(env), starts_per_task=4).summary()["per_task"][0]["failures"]
    expected = {"no grasp": STILL, "not placed": HOLD, "dropped": DROP, "wrong object": OTHER}
    assert {reason: each["starts"] for reason, each in told.items()} == {name: [i] for name, i in expected.items()}


def test_what_was_lifted_is_saved_kept_at_the_end_and_forgotten_at_the_next_reset():
    env, other = make(), make(seed=9)
    env.reset()
    hands = Hands(env)
    while not hands.up[DROP]:
        env.step(hands.chunk())
    for _ in range(10):  # it falls
        env.step(torch.tensor([OPEN] * 4)[:, None])
    assert not any(failed.any() for failed in env._handling.failures().values()), "nobody has failed yet"
    other.load_state_dict(env.state_dict())
    while not other.done.all():
        found = other.step(torch.tensor([OPEN] * 4)[:, None])
    assert found.failures["dropped"][DROP]
    again = other.step(torch.zeros(4, 1, 7))
    assert again.failures["dropped"][DROP], "a frozen environment stays as it ended"
    other.reset(mask=torch.arange(4) == DROP)
    assert not other.step(torch.zeros(4, 1, 7)).failures["dropped"][DROP], "that was the episode before"
    for _ in range(69):
        found = other.step(torch.zeros(4, 1, 7))
    assert found.done.all()
    assert found.failures["no grasp"][DROP]
    assert not found.failures["dropped"][DROP]


def test_a_run_that_was_saved_before_there_were_reasons_goes_on():
    env, other = make(), make(seed=9)
    env.reset()
    state = env.state_dict()
    for name in STATE:
        del state["simulator"][name]
    here = other.load_state_dict(state)
    assert torch.equal(here["object_position"], env.observe()["object_position"])


def both_in_the_basket():
    """The task with another object to be put there too."""
    first = TASK.problem.goal[0]
    other = next(name for name in TASK.problem.objects if name not in (*TASK.problem.obj_of_interest, first[1]))
    return replace(TASK, problem=replace(TASK.problem, goal=[first, (first[0], other, first[2])]))


def put(env, index, name, place):
    """Put the object `name` somewhere, to fall from there; the fingers' commands begin in the middle."""
    simulation, scene = env.simulation, env.simulation.scenes[index]
    qpos, here = simulation.qpos(np.array([index]))[0].copy(), scene.object_qposadr[scene.objects.index(name)]
    qpos[here : here + 3] = place
    simulation.write(index, qpos, np.zeros(scene.model.nv))


@pytest.mark.parametrize("sim", [LiberoSim.mujoco, LiberoSim.mjwarp])
def test_of_several_objects_that_count_which_are_not_where_they_belong(sim):
    """In the first world one lies in the basket and the other was never touched; the second hand loses the first.

    In the third it falls far from the hand, which closes on nothing, in the fourth beside a hand that opens.
    """
    task, steps = both_in_the_basket(), 6
    env = make(task, 4, executed=2, horizon=2, step_limit=steps, sim=sim)
    seen, first = env.reset(), task.problem.goal[0][1]
    basket = seen["object_position"][0, env.scenes[0].objects.index("basket_1")]
    put(env, 0, first, basket + torch.tensor([0.0, 0.0, 0.12]))
    env._handling.grasped[0, env.scenes[0].objects.index(first)] = True  # as if the hand had brought it
    for world, aside in ((1, 0.0), (2, 0.3), (3, 0.0)):
        put(env, world, first, seen["end_effector_position"][world] - torch.tensor([0.0, aside, 0.1]))
    for _ in range(steps // 2):
        found = env.step(torch.tensor([[hand] * 2 for hand in (OPEN, CLOSED, CLOSED, OPEN)]))
    assert found.truncated.all()
    assert env.simulation.achieved(0) == [True, False]
    assert env.simulation.achieved(1) == [False, False]
    found = {name: failed.nonzero().flatten().tolist() for name, failed in found.failures.items()}
    assert found == {"not placed": [], "dropped": [1], "wrong object": [], "no grasp": [0, 2, 3]}


@pytest.mark.assets
@pytest.mark.skipif(OFFICIAL.kind != "official", reason="needs LIBERO's assets")
def test_of_knobs_and_drawers_there_is_nothing_to_tell():
    task = next(task for task in load_tasks("libero_goal") if task.name == "turn_on_the_stove")
    env = make(task, 1, assets=OFFICIAL, step_limit=3)
    env.reset()
    for _ in range(3):
        found = env.step(torch.zeros(1, 1, 7))
    assert found.truncated.all()
    assert not any(failed.any() for failed in found.failures.values())
