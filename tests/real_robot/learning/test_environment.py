"""A robot as an environment: executed actions are those written, whoever acts; faults end episodes alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.environment import SwitchableEnvironment, Transition, in_real_time
from embodied.errors import UserError
from embodied.runtime.interrupt import STOPPING
from real_robot.learning.control import Control
from real_robot.learning.environment import RobotEnvironment, Rules
from real_robot.learning.homing import Homing
from real_robot.learning.judging import Judge
from real_robot.learning.scripted import HelpConfig, ScriptedPerson
from real_robot.robots.intervention import Controls, Operator
from real_robot.robots.robot import Reading
from real_robot.robots.teleoperation import Station
from real_robot.safety.consistency import START_READINGS
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import UNSETTLED, Safety, State, Verdict
from tests.real_robot.learning.worlds import LIMITED, Arm, arm_environment, reaching


class Script:
    """A person who, call by call, acts (a number), leaves it (None), presses a button (text) or loses the device."""

    def __init__(self, *script: float | str | OSError | None) -> None:
        self.script = list(script)
        self.pressed: frozenset[str] = frozenset()
        self.waited: list[tuple[str, ...]] = []
        self.closed = False

    def action(self, proposed):
        step = self.script.pop(0) if self.script else None
        self.pressed = frozenset([step]) if isinstance(step, str) else frozenset()
        if isinstance(step, OSError):
            raise step
        return np.array([step]) if isinstance(step, float) else None

    def wait_for(self, *buttons, sleep):
        sleep(0.02)
        self.waited.append(buttons)
        return buttons[0]

    def close(self):
        self.closed = True


def driven(*script, **options):
    """An arm, its environment, and the person of `script`."""
    arm = Arm()
    person = Script(*script)
    env = arm_environment(arm, lambda: person, **options)
    env.reset()
    return arm, env, person


def near(values):
    """`values`, up to the rounding of float32."""
    return pytest.approx(values, abs=1e-6)


def chunk(*actions: float) -> torch.Tensor:
    return torch.tensor(actions).view(1, -1, 1)


def executed(transition: Transition) -> list[float]:
    assert transition.actions is not None
    return transition.actions[0, transition.executed[0], 0].tolist()


def flags(transition: Transition, name: str) -> list[bool]:
    return transition.signals[name][0].bool().tolist()


def test_it_is_an_environment_of_one_robot_in_real_time():
    env, _ = reaching()
    assert isinstance(env, SwitchableEnvironment)
    assert in_real_time(env)
    assert (env.num_envs, env.task_names, env.instructions) == (1, ("reach",), ("reach the origin",))


def test_actions_that_safety_limits_are_returned_as_written():
    arm, env, _ = driven()
    transition = env.step(chunk(0.01, 0.5, 0.5, 0.04))
    # 2 m/s for 0.01 s is 0.02 m in a period
    assert executed(transition) == near([0.01, 0.03, 0.05, 0.04])
    assert [command[0] for command in arm.commands] == near(executed(transition))
    assert flags(transition, "limited") == [False, True, True, False]
    assert transition.observation["position"].item() == near(0.04)
    assert not transition.done.any()


def test_a_take_over_in_the_middle_of_a_chunk_replaces_its_rest_and_is_marked():
    arm, env, _ = driven(None, None, -0.01, -0.02)
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01, 0.02, 0.0, -0.02])
    assert [command[0] for command in arm.commands] == near(executed(transition))
    assert flags(transition, "human") == [False, False, True, True]
    assert flags(transition, "takeovers") == [False, False, True, False]


def test_handing_back_cuts_the_chunk_and_the_next_one_goes_on_without_a_jump():
    arm, env, _ = driven(0.02, 0.04, None, None, 0.0, 0.0)
    began = START_READINGS - 1  # periods until enough measurements are consistent
    first = env.step(chunk(0.5, 0.5, 0.5, 0.5))
    assert executed(first) == near([0.02, 0.04])
    assert first.actions[0, :, 0].tolist() == near([0.02, 0.04, 0.04, 0.04])  # repeats the last one
    assert first.observation["position"].item() == near(0.04)
    assert not first.done.any()
    second = env.step(chunk(-0.5, -0.5, -0.5, -0.5))  # far away: approached by 0.02 m in a period
    assert executed(second) == near([0.02, 0.0, 0.0])
    assert flags(second, "human") == [False, True, True, False]
    assert flags(second, "takeovers") == [False, True, False, False]
    moves = np.abs(np.diff([0.0, *(command[0] for command in arm.commands)]))
    assert moves.max() <= 0.02 + 1e-9
    assert len(arm.commands) == arm.ticks - began  # no period was lost, and none had two commands


def test_a_take_over_at_the_beginning_of_a_chunk_continues_over_its_end():
    _, env, _ = driven(0.01, 0.02, 0.03, 0.04, 0.05, None)
    assert flags(env.step(chunk(0.0, 0.0, 0.0, 0.0)), "takeovers") == [True, False, False, False]
    second = env.step(chunk(0.0, 0.0, 0.0, 0.0))
    assert executed(second) == near([0.05])
    assert (flags(second, "human"), flags(second, "takeovers")) == ([True, False, False, False], [False] * 4)


@pytest.mark.parametrize(
    ("button", "reward", "terminated", "success"),
    [("success", [0, 1, 0, 0], True, True), ("failure", [0, 0, 0, 0], True, False)],
)
def test_a_button_ends_the_episode_with_the_step_at_which_it_was_pressed(button, reward, terminated, success):
    arm, env, _ = driven(None, button)
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert transition.executed[0].tolist() == [True, True, False, False]
    assert transition.reward[0].tolist() == reward
    assert (bool(transition.terminated), bool(transition.truncated)) == (terminated, False)
    assert bool(transition.success) is success
    frozen = env.step(chunk(0.5, 0.5, 0.5, 0.5))
    assert not frozen.executed.any()
    assert not frozen.reward.any()
    assert bool(frozen.terminated)
    assert bool(frozen.success) is success
    assert arm.position == near([0.02])


def test_a_stop_holds_at_once_and_the_next_episode_waits_for_the_person():
    arm, env, person = driven(None, None, "stop")
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01, 0.02])
    assert (bool(transition.terminated), bool(transition.truncated)) == (False, True)
    assert {name: bool(value) for name, value in transition.events.items()} == {"fault": True, "stopped": True}
    assert arm.commands[-1] is None  # held
    assert not person.waited
    env.reset()
    assert person.waited == [("success", "go")]
    after = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert after.executed.all()
    assert not any(bool(value) for value in after.events.values())


def test_a_stop_before_the_first_action_of_a_chunk_executes_nothing():
    _, env, _ = driven(None, None, None, None, "stop")
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()
    transition = env.step(chunk(0.05, 0.06, 0.07, 0.08))
    assert not transition.executed.any()
    assert bool(transition.truncated)
    assert transition.observation["position"].item() == near(0.04)


def test_a_robot_that_was_stopped_between_two_episodes_waits_for_the_person_too():
    _, env, person = driven(None, "failure")
    env.step(chunk(0.01, 0.02, 0.03, 0.04))
    env.control.safety.trip("somebody leaned on it")
    env.reset()
    assert person.waited == [("success", "go")]
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


FAULTS = {
    "not finite": lambda reading: replace(reading, observation={"position": np.array([np.nan])}),
    "late": lambda reading: replace(reading, stamp_s=reading.stamp_s - 1.0),
    "refusal": lambda reading: replace(reading, refusal="the brakes are closed"),
    "silence": lambda reading: None,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_measurement_that_fails_ends_the_episode_and_waits_until_it_is_good_again(fault):
    arm, env, person = driven()

    def later(reading: Reading) -> Reading | None:
        return fault(reading) if arm.position >= 0.019 and reading.sequence < 40 else reading

    arm.fault = later
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01, 0.02])
    assert bool(transition.truncated)
    assert bool(transition.events["fault"])
    assert not bool(transition.events["stopped"])
    assert transition.observation["position"].item() == near(0.01)  # the newest valid one
    observation = env.reset()
    assert arm.position == near([0.02])
    assert arm.ticks >= 49  # recovery_s = 0.1 s of good measurements after the last bad one
    assert observation["position"].isfinite().all()
    assert person.waited
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


def test_what_an_encoder_measures_that_jumps_is_neither_decided_by_nor_judged():
    """Positions jump by 0.5 m after the last step of a chunk, for a period; the arm may move 0.02 m in one."""
    judged = []
    judge = Judge(lambda observation: judged.append(float(observation["position"][0])) or 0.0)
    arm, env, _ = driven(rules=Rules(50, judge, waits=False))
    env.step(chunk(0.01, 0.02, 0.03, 0.04))
    jumped = arm.ticks + 4

    def jump(reading: Reading) -> Reading:
        at = reading.observation["position"]
        return replace(reading, observation={"position": at + 0.5 * (reading.sequence == jumped)})

    arm.fault = jump
    transition = env.step(chunk(0.05, 0.06, 0.07, 0.08))
    assert transition.executed.all()
    assert not bool(transition.truncated)
    assert transition.observation["position"].item() == near(0.07)  # the measurement before
    assert env.step(chunk(0.08, 0.08, 0.08, 0.08)).observation["position"].item() == near(0.08)
    assert max(judged) < 0.1


def test_silence_within_the_timeout_is_no_fault():
    arm, env, _ = driven()
    env.step(chunk(0.0, 0.0, 0.0, 0.0))
    before = arm.read()
    arm.fault = lambda reading: before if reading.sequence < before.sequence + 4 else reading
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


@pytest.mark.parametrize("kind", [Kind.POSITION, Kind.VELOCITY])
def test_while_the_learner_takes_its_time_the_robot_rests_and_then_goes_on(kind: Kind):
    arm = Arm(kind=kind)
    env = arm_environment(arm)
    env.reset()
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()
    count = len(arm.commands)
    for _ in range(100):  # the watchdog's calls
        arm.ticks += 1
        env.control.safety.watch()
    if kind is Kind.VELOCITY:
        assert any(command is not None and command[0] == 0.0 for command in arm.commands[count:])
    rested = float(arm.position[0])
    transition = env.step(chunk(0.03, 0.03, 0.03, 0.03))
    assert transition.executed.all()
    assert not bool(transition.events["fault"])
    if kind is Kind.POSITION:
        assert executed(transition)[0] == near(0.03)
        assert rested == near(0.04)


def test_a_clock_that_goes_back_keeps_nobody_waiting():
    class Jumping(Arm):
        back_s = 0.0

        def clock(self) -> float:
            return super().clock() - self.back_s

        def write(self, action: np.ndarray) -> None:
            super().write(action)
            if len(self.commands) == 2:
                self.back_s = 60.0

    arm = Jumping()
    env = arm_environment(arm)
    env.reset()
    before_s = arm.slept
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01, 0.02])
    assert bool(transition.events["fault"])
    assert arm.slept - before_s < 0.1  # the person's stop is read again soon
    env.reset()
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


def test_a_clock_that_is_set_forward_interrupts_no_motion():
    """The computers' time is set forward by a minute, that of the arm's measurements too; it speeds up by 0.25 m/s."""

    class Jumping(Arm):
        ahead_s = 0.0

        def clock(self) -> float:
            return super().clock() + self.ahead_s

    arm = Jumping(kind=Kind.VELOCITY)
    arm.stops_after_s = 0.5  # after which its motion would begin at rest
    env = arm_environment(arm, steady=lambda: Arm.clock(arm), acceleration=25.0)
    env.reset()
    assert executed(env.step(chunk(0.5, 0.5, 0.5, 0.5))) == near([0.25, 0.5, 0.5, 0.5])
    arm.ahead_s = 60.0
    arm.ticks += 1  # the next measurement
    transition = env.step(chunk(0.5, 0.5, 0.5, 0.5))
    assert env.control.fault == ""
    assert executed(transition) == near([0.5] * 4)
    assert [float(command[0]) for command in arm.commands[-4:]] == near([0.5] * 4)


def test_a_device_that_is_unplugged_during_a_take_over_holds_the_robot_until_it_is_back():
    arm = Arm()
    lost, back = Script(0.01, 0.02, OSError("no such device")), Script()
    tries = iter([lost, UserError("no gamepad"), UserError("no gamepad"), back])

    def opened():
        person = next(tries)
        if isinstance(person, UserError):
            raise person
        return person

    env = arm_environment(arm, opened)
    env.reset()
    transition = env.step(chunk(-0.5, -0.5, -0.5, -0.5))
    assert executed(transition) == near([0.01, 0.02])
    assert flags(transition, "human") == [True, True, False, False]
    assert bool(transition.truncated)
    assert bool(transition.events["fault"])
    assert not bool(transition.events["stopped"])
    env.reset()
    assert lost.closed
    assert back.waited == [("success", "go")]
    assert arm.position == near([0.02])  # it stood still meanwhile
    assert env.step(chunk(0.0, 0.0, 0.0, 0.0)).executed.all()


def test_a_robot_whose_driver_fails_ends_the_episode():
    arm, env, _ = driven()
    write = arm.write

    def broken(action):
        if len(arm.commands) == 2:
            raise ConnectionError("the cable is out")
        write(action)

    arm.write = broken
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01, 0.02])
    assert bool(transition.truncated)
    assert bool(transition.events["fault"])
    arm.write = write
    env.reset()
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()


def test_a_robot_that_is_not_there_at_the_beginning_is_an_error():
    arm = Arm()
    arm.fault = lambda reading: None
    with pytest.raises(UserError, match="not ready in 5 s: no measurement"):
        arm_environment(arm, Script).reset()


def test_an_episode_ends_at_its_time_limit_and_where_the_scene_looks_solved():
    _, env, _ = driven(rules=Rules(3, waits=False))
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert (executed(transition), bool(transition.truncated)) == (near([0.01, 0.02, 0.03]), True)
    solved = Rules(50, Judge(lambda observation: float(observation["position"][0] > 0.015)), waits=False)
    _, env, _ = driven(rules=solved)
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert transition.reward[0].tolist() == [0, 1, 0, 0]
    assert bool(transition.terminated)
    assert bool(transition.success)


def test_as_many_measurements_in_a_row_as_the_judge_asks_for_are_a_success():
    scores = iter([1.0, 0.0, 0.9, 0.85])
    _, env, _ = driven(rules=Rules(50, Judge(lambda observation: next(scores), frames=2), waits=False))
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert transition.reward[0].tolist() == [0, 0, 0, 1]
    assert bool(transition.success)


def test_a_probability_that_is_not_a_number_is_no_success_of_which_one_line_tells(caplog):
    scores = iter([1.0, float("nan"), 1.0, float("nan"), 1.0, 1.0])
    _, env, _ = driven(rules=Rules(50, Judge(lambda observation: next(scores), frames=2), waits=False))
    first = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert first.executed.all()
    assert not first.done.any()
    assert not first.reward.any()
    assert caplog.text.count("not a number") == 1
    assert env.step(chunk(0.04, 0.04)).reward[0].tolist() == [0, 1]


def test_an_evaluated_episode_in_which_a_person_takes_over_has_failed():
    arm = Arm()
    env = arm_environment(arm, lambda: Script(None, 0.02))
    env.switch("hold", "eval")
    env.reset()
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01])
    assert bool(transition.truncated)
    assert not bool(transition.success)
    assert not bool(transition.events["fault"])
    env.reset()
    assert env.control.person.waited == [("success", "go")]  # until they let go


def test_a_person_who_takes_over_while_the_robot_waits_for_measurements_fails_the_evaluated_episode_too():
    arm, env, _ = driven(None, 0.5, None)
    env.switch("hold", "eval")
    env.reset()
    tick, waits = env.control._tick, [Verdict(State.READY, None, UNSETTLED)]
    env.control._tick = lambda: waits.pop() if waits else tick()
    count = len(arm.commands)
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert transition.truncated.item()
    assert not transition.executed.any()
    assert all(command is None for command in arm.commands[count:])  # nothing of the person's


def test_the_robot_moves_home_within_its_limits_before_the_person_puts_the_scene_back():
    rules = Rules(50, waits=True, homing=Homing([[0.1], [-0.1]], waypoint_s=0.15))
    arm = Arm(0.3)
    person = Script()
    env = arm_environment(arm, lambda: person, rules=rules)
    observation = env.reset()
    assert observation["position"].item() == near(-0.1)
    assert person.waited == [("success", "go")] * 2  # before the first motion, and for the scene
    commands = [command[0] for command in arm.commands if command is not None]
    assert np.abs(np.diff([0.3, *commands])).max() <= 0.02 + 1e-9
    env.reset()
    assert person.waited == [("success", "go")] * 3


def test_a_stop_on_the_way_home_is_waited_for():
    rules = Rules(50, waits=False, homing=Homing([[0.1]], waypoint_s=0.1))
    arm = Arm(0.3)
    person = Script(None, None, "stop")
    env = arm_environment(arm, lambda: person, rules=rules)
    env._ready = True  # as in a later episode
    env.reset()
    assert person.waited == [("success", "go")]
    assert arm.position == near([0.1])


def test_a_requested_stop_on_the_way_home_stops_the_robot():
    arm = Arm(kind=Kind.VELOCITY)
    env = arm_environment(arm, rules=Rules(50, waits=False, homing=Homing([[0.5]], waypoint_s=1.0)))
    arm.fault = lambda reading: (STOPPING.set() if arm.position >= 0.02 else None) or reading
    try:
        env.reset()
        assert env.control.safety.state is State.HOLDING
        assert [command[0] for command in arm.commands if command is not None][-1] == 0.0
        assert arm.position < 0.05
    finally:
        STOPPING.clear()


@pytest.mark.parametrize(
    ("waypoints", "limits", "message"),
    [
        ([[0.0, 0.0]], LIMITED, "waypoint of a"),
        ([[2.0]], LIMITED, "outside the action's limits"),
        ([[0.0]], ElementLimits(low=-1.0, high=1.0), "would jump"),
    ],
)
def test_a_home_that_cannot_be_reached_safely_is_refused(waypoints, limits, message):
    with pytest.raises(UserError, match=message):
        Homing(waypoints).check(Arm().contract, Limits({"a": limits}))


def test_a_requested_stop_of_the_run_ends_the_episode_and_keeps_its_steps():
    arm, env, _ = driven()
    arm.fault = lambda reading: (STOPPING.set() if arm.position >= 0.019 else None) or reading
    try:
        transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
        assert executed(transition) == near([0.01, 0.02])
        assert bool(transition.truncated)
        assert not bool(transition.events["fault"])
        env.reset()
        after = env.step(chunk(0.5, 0.5, 0.5, 0.5))
        assert not after.executed.any()
        assert not after.done.any()
        assert arm.position == near([0.02])
    finally:
        STOPPING.clear()


def test_an_interruption_in_the_middle_of_a_step_holds_the_robot():
    arm, env, _ = driven()
    sleep = arm.sleep

    def interrupted(seconds):
        sleep(seconds)
        if arm.position >= 0.019 and env.control.safety.state is State.ACTIVE:
            raise KeyboardInterrupt

    env.control.station = replace(env.control.station, sleep=interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert arm.commands[-1] is None
    assert env.control.safety.state.value == "holding"


@pytest.mark.parametrize("abandon", [lambda env: env.switch("hold", "eval"), lambda env: env.reset()])
def test_an_episode_that_is_abandoned_leaves_no_robot_that_moves(abandon):
    arm = Arm(kind=Kind.VELOCITY)
    env = arm_environment(arm)
    env.reset()
    env.step(chunk(0.02, 0.02, 0.02, 0.02))
    assert env.control.safety.state is State.ACTIVE
    abandon(env)
    assert [command for command in arm.commands if command is not None][-1].tolist() == [0.0]
    assert env.control.safety.state is not State.ACTIVE


@pytest.mark.parametrize("button", ["success", "failure"])
def test_a_press_from_before_the_first_action_judges_no_step(button):
    _, env, _ = driven(button, None)
    assert env.step(chunk(0.01, 0.02, 0.03, 0.04)).executed.all()
    rules = Rules(50, waits=True, homing=Homing([[0.1]], waypoint_s=0.1))
    person = Script(None, None, button)  # on the way home
    env = arm_environment(Arm(0.1), lambda: person, rules=rules)
    env.reset()
    transition = env.step(chunk(0.1, 0.1, 0.1, 0.1))
    assert transition.executed.all()
    assert not transition.done.any()


def test_a_scripted_person_does_not_help_on_the_way_home():
    class Stuck:
        """An expert without progress, who goes elsewhere."""

        def reset(self) -> None: ...

        def action(self):
            return np.array([0.5])

        def progress(self) -> float:
            return 0.0

    arm = Arm()
    person = ScriptedPerson(Stuck(), HelpConfig(patience=1, lasting=50, budget=10))
    rules = Rules(4, waits=False, homing=Homing([[0.0]], waypoint_s=0.2))
    env = arm_environment(arm, lambda: person, rules=rules, begins=person.begin)
    assert env.reset()["position"].item() == near(0.0)
    assert flags(env.step(chunk(0.0, 0.0, 0.0, 0.0)), "human") == [False, True, True, True]  # and more to come
    assert env.reset()["position"].item() == near(0.0)
    assert person.takeovers == 1


def test_a_press_from_before_the_question_does_not_begin_an_episode_and_a_stop_is_not_lost():
    class Keys:
        """Reads once per call what was pressed since."""

        def __init__(self) -> None:
            self.buttons = ["success"]
            self.reads = 0

        def read(self) -> Controls:
            self.reads += 1
            pressed, self.buttons = frozenset(self.buttons), ["go"] if self.reads > 4 else []
            return Controls(pressed=pressed)

        def close(self) -> None: ...

    keys = Keys()
    arm = Arm()
    env = arm_environment(arm, lambda: Operator(keys, arm.contract, {}), rules=Rules(50, waits=True))
    env.reset()
    assert keys.reads == 6
    keys.buttons, keys.reads = ["stop", "success"], 4
    env.reset()
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert bool(transition.events["fault"])
    assert not transition.executed.any()


def test_a_failure_is_noted_although_the_robot_fails_at_the_same_time():
    arm, env, _ = driven(None, "failure")
    arm.fault = lambda reading: replace(reading, refusal="the brakes are closed") if arm.position > 0.01 else reading
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert executed(transition) == near([0.01, 0.02])
    assert (bool(transition.terminated), bool(transition.truncated)) == (True, False)


def test_the_same_measurement_is_judged_once():
    arm, env, _ = driven(rules=Rules(50, Judge(lambda observation: 1.0, frames=2), waits=False))
    moved = []  # measurements after the first action, of which the second and third are lost

    def lossy(reading: Reading) -> Reading:
        if arm.position >= 0.009:
            moved.append(reading)
        return moved[0] if moved and reading.sequence <= moved[0].sequence + 2 else reading

    arm.fault = lossy
    transition = env.step(chunk(0.01, 0.02, 0.03, 0.04))
    assert transition.reward[0].tolist() == [0, 0, 0, 1]


def test_translated_commands_begin_at_rest_in_every_episode():
    class Momentum:
        """Adds up the actions since its reset."""

        def __init__(self, executor) -> None:
            self.executor = executor
            self.reset()

        def reset(self) -> None:
            self.total = 0.0

        def observe(self, reading) -> None: ...

        def action(self, now_s):
            self.total = self.total + self.executor.action(now_s)
            return self.total

    arm = Arm()
    station = Station(arm, arm.contract, arm.clock, arm.sleep, lambda: None, translate=Momentum)
    safety = Safety(arm, Limits({"a": LIMITED}, observation_timeout_s=0.05, recovery_s=0.1), arm.clock)
    contract = replace(arm.contract, horizon=2, executed=2)
    env = RobotEnvironment(Control(station, safety, None), contract, ("hold", "hold"), Rules(2, waits=False))
    env.reset()
    env.step(chunk(0.01, 0.01))
    assert [command[0] for command in arm.commands[:2]] == near([0.01, 0.02])
    env.reset()
    before = len(arm.commands)
    env.step(chunk(0.01, 0.01))
    assert [command[0] for command in arm.commands[before : before + 2]] == near([0.01, 0.02])


def test_a_stop_of_the_run_before_the_first_measurement_is_one_line():
    STOPPING.set()
    try:
        with pytest.raises(UserError, match="stopped before the robot measured"):
            arm_environment(Arm()).reset()
    finally:
        STOPPING.clear()
