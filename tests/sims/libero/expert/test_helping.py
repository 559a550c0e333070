"""The scripted expert as a helper: it solves the task from anywhere, and its measure of progress rises until then."""

import pytest
import torch

from sims.libero.expert.expert import Phase
from sims.libero.expert.helping import Helper
from sims.libero.task import LiberoTask


def test_it_solves_the_task_from_where_a_policy_has_left_it_and_measures_progress() -> None:
    task = LiberoTask(tasks=["0"], horizon=1, executed=1, train_step_limit=280)
    env = task.environment(1, "wide", "train", seed=1)
    helper = task.expert(env)
    assert isinstance(helper, Helper)
    env.reset()
    helper.reset()
    generator = torch.Generator().manual_seed(0)
    progress = []
    for step in range(280):
        action = torch.from_numpy(helper.action()).float()
        assert action.abs().max() <= 1.0
        progress.append(helper.progress())
        if step < 15:  # the policy wanders at first, while the helper watches
            action = torch.rand(7, generator=generator) - 0.5
        transition = env.step(action.view(1, 1, 7))
        if bool(transition.done):
            break
    assert bool(transition.success)
    # the hand comes nearer (up to 1 for each metre), then phases advance by 1 each
    assert progress[-1] > progress[15] + 2.0
    best = torch.tensor(progress).cummax(0).values
    waits = (best[15:].diff() < 1e-3).long()
    longest = max(len(run) for run in "".join(map(str, waits.tolist())).split("0"))
    assert longest < 40
    env.close()


def test_it_carries_what_the_policy_has_grasped_and_does_not_open_the_hand() -> None:
    task = LiberoTask(tasks=["0"], horizon=1, executed=1, train_step_limit=280)
    env = task.environment(1, "wide", "train", seed=1)
    other, helper = Helper(env), Helper(env)
    env.reset()
    other.reset()
    helper.reset()

    def grasped() -> bool:
        return bool(env.simulation.gripper()[0, 1] > 0.0) and other._expert.phase[0] == Phase.CARRY

    # another plan than the helper's grasps: by a hand that is turned by a quarter
    for _ in range(120):
        transition = env.step(torch.from_numpy(other.action()).float().view(1, 1, 7))
        helper._expert.phase[0] = Phase.REACH if helper._expert.phase[0] == Phase.CLOSE else helper._expert.phase[0]
        if grasped():
            break
    assert grasped()
    for _ in range(160):
        action = torch.from_numpy(helper.action()).float()
        assert action[6] == 1.0 or helper._expert.phase[0] >= Phase.OPEN
        transition = env.step(action.view(1, 1, 7))
        if bool(transition.done):
            break
    assert bool(transition.success)
    env.close()


def test_it_plans_another_grasp_for_a_hand_that_was_turned() -> None:
    task = LiberoTask(tasks=["0"], horizon=1, executed=1, train_step_limit=280)
    env = task.environment(1, "wide", "train", seed=1)
    helper = Helper(env)
    env.reset()
    helper.reset()
    turns = []
    for _ in range(16):
        helper.action()
        turns.append(helper._expert.turn(0))
        env.step(torch.tensor([[[0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0]]]))
    assert max(turns) < 0.5  # the hand is a rad away from the first plan
    env.close()


def test_a_plan_that_is_kept_goes_on_from_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time and the body's place when it was planned stay: a hand that turns slowly waits no longer, and a body
    that was pushed has a new plan.
    """
    task = LiberoTask(tasks=["0"], horizon=1, executed=1, train_step_limit=280)
    env = task.environment(1, "wide", "train", seed=1)
    expert = Helper(env)._expert
    env.reset()
    expert.reset()
    for _ in range(3):
        expert.act()
    plan, planned = expert._plans[0], expert._planned[0].copy()
    env.simulation.data[0].xpos[plan.body] += 0.01
    turns = iter((0.5, 0.6))
    current = expert.turn

    def turn(number: int) -> float:
        current(number)  # which plans
        return next(turns)

    monkeypatch.setattr(expert, "turn", turn)
    expert.replan(0)
    assert expert._plans[0] is plan
    assert (expert._planned[0] == planned).all()
    assert expert._timer[0] == 3
    assert expert.phase[0] == Phase.REACH
    env.close()


def test_other_simulators_have_no_helper() -> None:
    task = LiberoTask(tasks=["0"])
    assert task.expert(object()) is None
