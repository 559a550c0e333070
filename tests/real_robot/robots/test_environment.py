"""A robot as an Environment: equal to its simulator; human intervention."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.contract import Contract
from embodied.environment import NumberedStarts, Restorable
from embodied.evaluation.evaluation import evaluate
from embodied.policy import Decision
from embodied.rollout.rollout import Collector
from real_robot.robots.environment import RobotEnvironment, buttons
from real_robot.robots.intervention import Controls, Operator
from real_robot.robots.robot import Reading, SimulatedRobot
from real_robot.safety.limits import Limits, Range
from real_robot.safety.safety import Safety, State
from tests.conformance.test_environments import same
from tests.embodied.reach import Reach


class Scripted:
    """Controls as a person would move them, one after the other."""

    def __init__(self, *controls: Controls) -> None:
        self.controls = list(controls)

    def read(self) -> Controls:
        if not self.controls:
            return Controls()
        now = self.controls.pop(0)
        if "unplug" in now.pressed:
            raise OSError("No such device")
        return now

    def close(self) -> None: ...


def make(executed: int = 4, step_limit: int = 7, channel: Scripted | None = None, limits: Limits | None = None):
    """Reach as a robot: the script that sets the scene up resets the simulator."""
    simulator = Reach(1, executed=1, horizon=1, step_limit=100, tasks=1)
    robot = SimulatedRobot(simulator, holding=lambda observation: np.zeros(1))
    safety = Safety(robot, limits or Limits(observation_timeout_s=0.25), robot.clock)
    env = RobotEnvironment(
        robot, safety, executed=executed, step_limit=step_limit, clock=robot.clock,
        ready=lambda task, start: robot.reset(starts=torch.tensor([start])),
        outcome=buttons if channel else lambda reading, pressed: True if reached(reading) else None,
        operator=Operator(channel, robot.contract, {"0": ("x", 0.25)}) if channel else None,
        task="reach", sleep=lambda seconds: pytest.fail("simulated time needs no waiting"),
    )  # fmt: skip
    return env, robot, safety


def reached(reading: Reading) -> bool:
    return abs(reading.observation["position"][0]) < 0.1


class Push:
    """Pushes the point to the origin."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def act(self, observation, *, deterministic=False, generator=None) -> Decision:
        step = (-observation["position"] / 8).clamp(-0.25, 0.25)
        actions = step.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        return Decision(actions, observation.select("position"), torch.zeros(len(step), 1))


def test_everything_about_it_is_readable_before_the_first_reset():
    env, *_ = make()
    assert isinstance(env, NumberedStarts)
    assert (env.contract.executed, env.contract.horizon, env.num_envs, env.task_names) == (4, 4, 1, ("reach",))


def test_it_is_the_same_as_the_simulator_that_it_wraps():
    env, *_ = make()
    simulator = Reach(1, executed=4, horizon=4, step_limit=7, tasks=1)
    for start in range(6):
        assert same(env.reset(starts=torch.tensor([start])), simulator.reset(starts=torch.tensor([start])))
        generator = torch.Generator().manual_seed(start)
        for _ in range(4):
            actions = (torch.rand(1, 4, 1, generator=generator) - 0.7 * (1 - 2 * (start % 2)) - 0.2) * 0.25
            actions = actions.clamp(-0.25, 0.25)
            here, there = env.step(actions), simulator.step(actions)
            for field in ("observation", "reward", "executed", "terminated", "truncated", "success"):
                assert same(getattr(here, field), getattr(there, field)), field
            assert torch.equal(env.steps, simulator.steps)
            assert not here.human.any()


def test_evaluation_runs_on_it():
    env, *_ = make(step_limit=40)
    result = evaluate(env, Push(env.contract), starts_per_task=5)
    direct = evaluate(Reach(1, executed=4, horizon=4, step_limit=40, tasks=1), Push(env.contract), starts_per_task=5)
    assert result.success.all()
    assert torch.equal(result.steps, direct.steps)


def test_steps_before_a_reset_and_actions_that_are_no_numbers_are_refused():
    env, robot, _ = make()
    with pytest.raises(ValueError, match=r"reset\(\) before"):
        env.step(torch.zeros(1, 4, 1))
    env.reset()
    before, held = robot.clock(), []
    robot.hold = lambda: held.append(True)
    for wrong, message in ((torch.full((1, 4, 1), torch.nan), "not finite"), (torch.zeros(1, 3, 1), "of shape")):
        with pytest.raises(ValueError, match=message):
            env.step(wrong)
    assert robot.clock() == before
    assert held == [True, True]


def test_a_person_takes_over_and_what_they_did_is_marked():
    moving, nothing = Controls({"x": 1.0}), Controls()
    channel = Scripted(nothing, moving, moving, nothing)
    env, *_ = make(channel=channel)
    env.reset(starts=torch.tensor([0]))  # begins at 0.3
    transition = env.step(torch.full((1, 4, 1), 0.1))
    assert transition.human.tolist() == [[False, True, True, False]]
    np.testing.assert_allclose(transition.actions[0, :, 0], [0.1, 0.25, 0.25, 0.1], rtol=1e-6)
    np.testing.assert_allclose(transition.observation["position"], 1.0, rtol=1e-6)
    assert transition.metrics["human_share"].item() == 0.5
    env.reset()
    assert env.step(torch.zeros(1, 4, 1)).metrics["human_share"].item() == 0.0


def test_initial_states_are_asked_for_one_after_the_other():
    env, *_ = make()
    requested, begin = [], env._ready
    env._ready = lambda task, start: requested.append((task, start)) or begin(task, start)
    for _ in range(3):
        env.reset()
    assert requested == [("reach", 0), ("reach", 1), ("reach", 2)]


def test_the_robot_holds_at_the_step_limit():
    env, robot, _ = make(executed=4, step_limit=7)
    env.reset(starts=torch.tensor([0]))
    held = []
    robot.hold = lambda: held.append(robot.clock())
    away = torch.full((1, 4, 1), 0.05)
    assert not env.step(away).truncated.item()
    assert held == []
    assert env.step(away).truncated.item()
    assert held == [robot.clock()]


def test_learners_get_the_actions_that_were_executed():
    channel = Scripted(Controls(), Controls(), Controls({"x": 1.0}))
    env, *_ = make(executed=2, step_limit=6, channel=channel)
    rollout = Collector(env, Push(env.contract), torch.Generator()).collect(3)
    assert rollout.human.squeeze(1).tolist() == [[False, False], [True, False], [False, False]]
    assert rollout.actions[1, 0, 0, 0] == 0.25
    assert (rollout.actions[[0, 2]] < 0).all()


@pytest.mark.parametrize("button", ["success", "failure"])
def test_a_person_judges(button):
    env, *_ = make(channel=Scripted(Controls(), Controls(pressed=frozenset({button}))))
    env.reset()
    transition = env.step(torch.zeros(1, 4, 1))
    assert transition.executed.tolist() == [[True, True, False, False]]
    assert transition.terminated.item()
    assert transition.success.item() == (button == "success")
    assert transition.reward.tolist() == [[0.0, float(button == "success"), 0.0, 0.0]]
    assert not env.step(torch.zeros(1, 4, 1)).executed.any()


@pytest.mark.parametrize(("button", "reason"), [("stop", "stopped by a person"), ("unplug", "controls are gone")])
def test_a_person_stops_it_and_ready_lets_it_go_on(button, reason):
    env, _, safety = make(channel=Scripted(Controls(), Controls(pressed=frozenset({button}))))
    env.reset()
    transition = env.step(torch.full((1, 4, 1), 0.1))
    assert safety.state is State.STOPPED
    assert reason in safety.reason
    assert transition.executed.sum() == 2
    assert transition.truncated.item()
    assert not transition.terminated.item()
    env.reset()
    assert env.step(torch.full((1, 4, 1), 0.1)).executed.all()


def test_a_bound_that_is_broken_ends_the_episode():
    env, _, safety = make(limits=Limits(observed={"position.0": Range(-0.5, 0.5)}, observation_timeout_s=0.25))
    env.reset(starts=torch.tensor([0]))
    transition = env.step(torch.full((1, 4, 1), 0.15))
    assert safety.state is State.STOPPED
    assert transition.truncated.item()
    assert transition.executed.tolist() == [[True, True, True, False]]
    assert abs(transition.observation["position"].item()) == pytest.approx(0.6)


def test_a_robot_is_not_put_back_and_a_resumed_collection_begins_an_episode():
    env, *_ = make()
    assert not isinstance(env, Restorable)
    collector = Collector(env, Push(env.contract), torch.Generator())
    collector.collect(1)
    resumed = Collector(make()[0], Push(env.contract), torch.Generator())
    resumed.load_state_dict(collector.state_dict())
    assert resumed.collect(1).start.tolist() == [[0]]


def test_a_measurement_that_is_not_finite_is_not_observed_and_the_robot_holds():
    env, robot, safety = make(executed=1)
    env.reset()
    measured, before = robot.read, env.step(torch.full((1, 1, 1), 0.1)).observation
    broken = {"position": np.array([np.nan], np.float32)}

    def read() -> Reading:
        return replace(measured(), observation=measured().observation | broken)

    robot.read = read
    found = env.step(torch.full((1, 1, 1), 0.1))
    assert same(found.observation, before)
    assert (safety.state, safety.reason) == (State.HOLDING, "position is not finite")
    robot.read = measured
    assert env.step(torch.full((1, 1, 1), 0.1)).observation["position"].isfinite().all()
    assert safety.state is State.ACTIVE
