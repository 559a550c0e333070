"""Who sends PX4 what, in each of its modes and through every fault: the real safety_node with PX4's commander."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from embodied.contract import Contract
from real_robot.ros2 import ros_robot, topics
from real_robot.ros2.engagement import LEAVE_S, QUIET_S
from real_robot.ros2.nodes import safety
from real_robot.ros2.nodes.managed import ERROR, OK, WARN
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION
from tests.real_robot.ros2.in_process import Graph, InProcess, heartbeat, interfaces
from tests.real_robot.ros2.px4 import HOLD, LAND, OFFBOARD, POSITION, RETURN, STATUS_AGAIN_S, TERMINATION, Px4
from tests.real_robot.ros2.robots.test_tables import HISTORY, HOVER, RATES, flying

PERIOD_S = 0.01
ARM, DISARM, TO_OFFBOARD, TO_HOLD = (400, (1, 0, 0)), (400, (0, 21196, 0)), (176, (1, 6, 0)), (176, (1, 4, 3))
LIMITS = Path(safety.__file__).parents[2] / "ros2/launch/config/quadrotor_limits.yaml"


class Node(safety.SafetyNode, InProcess):
    """safety_node, in process."""


@dataclass
class Nothing:
    """No settings."""


class World:
    """PX4, safety_node, and a policy that sends what it always sends."""

    def __init__(self, directory: Path, row: str, contract: Contract) -> None:
        self.graph, self.row, self.directory = Graph(), row, directory
        (directory / "contract.json").write_text(contract.to_json())
        self.px4 = Px4(self.graph)
        self.policy = False
        self.node = self.started()
        self.run(QUIET_S + 0.1)
        self.policy = True

    def started(self) -> Node:
        """A safety_node, configured and activated; the one before ends without a word."""
        self.graph.timers.clear()
        for name in [name for name in self.graph.heard if name.startswith(("fmu/out", "policy"))]:
            del self.graph.heard[name]
        Node.graph = self.graph
        self.node = Node()
        self.node.settings = safety.SafetySettings(
            str(self.directory), self.row, {"rate_hz": 100.0}, heartbeat_timeout_s=0.1, limits=str(LIMITS)
        )
        self.node.configure()
        self.node.activate()
        return self.node

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for step in range(round(seconds / PERIOD_S)):
            self.px4.step()
            if self.policy:
                if step % 5 == 0:
                    self.graph.send("policy/heartbeat", heartbeat(self.graph.ros_s))
                self.command(np.array([0.1, 0.2, 0.3, 0.4]))
            self.graph.tick(PERIOD_S)

    def command(self, action: np.ndarray) -> None:
        """A command of the policy."""
        command = self.node._table.command
        message = command.codec.encode({ACTION: action}, interfaces, self.graph.ros_s)
        self.graph.send(f"policy/{command.name}", message)

    def fly(self) -> None:
        """Reach the state in which PX4 follows the policy."""
        self.run(2.0)
        assert (self.px4.mode, self.px4.armed, self.px4.flying) == (OFFBOARD, True, True)
        assert self.flows
        assert self.report[0] == OK

    @property
    def flows(self) -> bool:
        """Whether set-points flow, one a period."""
        before = len(self.px4.setpoints)
        self.run(0.1)
        return len(self.px4.setpoints) - before >= 9

    def silent(self, seconds: float, beats: bool = False) -> None:
        """Nothing is sent to PX4 for a while, or nothing but the heartbeat."""
        sent = self.sent(beats)
        self.run(seconds)
        assert self.sent(beats) == sent

    def sent(self, beats: bool = False) -> tuple[int, int, int]:
        return len(self.px4.setpoints), len(self.px4.commands), 0 if beats else len(self.px4.beats)

    def asked(self, since: int = 0) -> list[tuple[int, tuple[int, ...]]]:
        """Commands to PX4 in order, without repetitions."""
        commands = [(command, each) for _, command, each, _ in self.px4.commands[since:]]
        return [each for place, each in enumerate(commands) if place == 0 or each != commands[place - 1]]

    def reset(self) -> None:
        self.graph.call("safety_node/reset")

    def stop(self) -> None:
        self.graph.call("safety_node/emergency_stop")

    def lose(self, *topics: str) -> None:
        self.graph.lost = lambda topic: any(part in topic for part in topics)

    @property
    def report(self) -> tuple[bytes, str]:
        report = self.node.reports["robot"]()
        return report.level, report.message


both = pytest.mark.parametrize("world", ["px4_actuators", "px4_rates"], indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    row = getattr(request, "param", "px4_actuators")
    for module in (ros_robot, topics):
        monkeypatch.setattr(module, "types", interfaces)
    made = World(tmp_path, row, HOVER if row == "px4_actuators" else flying(RATES))
    yield made
    assert made.px4.strays == 0


def test_nothing_is_sent_before_a_policy_commands(world: World):
    world.policy = False
    world.silent(3.0)
    assert world.report[0] == WARN


@both
def test_heartbeats_come_first_then_offboard_then_arming_and_set_points_only_in_offboard(world: World):
    world.fly()
    assert world.asked() == [TO_OFFBOARD, ARM]
    px4 = world.px4
    begun, first = px4.beats[0], px4.commands[0][0]
    assert first - begun >= 1.0
    assert max(np.diff(px4.beats)) < 0.5  # more than 2 Hz
    assert px4.setpoints[0][0] >= first
    assert not px4.setpoints[0][2]  # the first one is there before the rotors turn
    assert all(result == 0 for _, result in px4.acknowledged)


def test_setpoints_stay_away_from_a_px4_that_refuses_to_arm_and_it_is_told(world: World):
    world.px4.preflight = False
    world.run(5.0)
    assert world.asked() == [TO_OFFBOARD, ARM, TO_HOLD]
    assert world.px4.mode == HOLD
    assert "does not follow: PX4 is disarmed; it gets nothing from here before ~/reset" in world.report[1]
    world.silent(5.0)
    world.px4.preflight = True
    world.reset()
    world.fly()


TAKE_OVERS: dict[str, tuple[Callable[[Px4], object], int, str]] = {
    "position, by radio": (lambda px4: px4.switch(POSITION), POSITION, "in Position mode: somebody else flies"),
    "manual, by radio": (lambda px4: px4.switch(0), 0, "in Manual mode: somebody else flies"),
    "hold, by radio": (lambda px4: px4.switch(HOLD), HOLD, "in Hold mode: somebody else flies"),
    "land, by a ground station": (lambda px4: px4.switch(LAND), LAND, "in Land mode: somebody else flies"),
    "return, by low battery": (lambda px4: px4.switch(RETURN), RETURN, "in Return mode: somebody else flies"),
    "termination": (lambda px4: px4.switch(TERMINATION), TERMINATION, "in Termination mode"),
    "disarmed": (lambda px4: px4.disarm(forced=True), HOLD, "PX4 is disarmed"),
    "restarted": (lambda px4: px4.boot(), HOLD, "in Hold mode, disarmed"),
}


@pytest.mark.parametrize("how", TAKE_OVERS)
def test_who_takes_over_is_left_alone_until_an_operator_engages_again(world: World, how: str):
    take_over, mode, why = TAKE_OVERS[how]
    world.fly()
    count = len(world.px4.commands)
    take_over(world.px4)
    world.run(LEAVE_S + 0.3)
    assert why in world.report[1]
    assert world.report[0] == ERROR
    world.silent(5.0)  # the policy commands on
    assert world.px4.mode == mode
    late = [at for at, mode, _ in world.px4.setpoints if mode != OFFBOARD]
    assert all(at <= world.px4.left_s + STATUS_AGAIN_S + 2 * PERIOD_S for at in late)  # PX4 limits its status's rate
    assert set(world.asked(count)) <= ({TO_HOLD} if how == "disarmed" else set())
    assert any(why in line for line in world.graph.logged)


def test_sticks_take_over_where_px4_says_so(world: World):
    world.fly()
    world.px4.sticks_override = True
    world.px4.sticks()
    world.run(0.3)
    world.silent(3.0)
    assert world.px4.mode == POSITION


def test_a_kill_switch_is_not_answered_by_arming(world: World):
    world.fly()
    count = len(world.px4.commands)
    world.px4.kill()
    world.run(7.0)
    assert not world.px4.armed
    assert set(world.asked(count)) <= {TO_HOLD}
    world.silent(3.0)


@both
def test_a_pilot_who_flies_is_asked_for_nothing_and_hands_over_by_switch(world: World):
    world.policy = False
    world.px4.arm()
    world.px4.flying = True
    world.px4.switch(POSITION)
    world.run(0.5)
    world.policy = True
    world.run(3.0)
    assert len(world.px4.beats) > 50  # PX4 needs them before it can be switched
    for mode in (HOLD, POSITION):
        world.px4.switch(mode)
        world.silent(3.0, beats=True)  # also where PX4 could be asked by now
    assert world.px4.switch(OFFBOARD)
    world.run(0.5)
    assert world.flows
    assert world.px4.commands == []


def test_after_a_take_over_reset_leaves_it_to_the_pilot_and_asks_a_px4_that_hovers(world: World):
    world.fly()
    world.px4.switch(POSITION)
    world.run(2.0)
    count = len(world.px4.commands)
    world.reset()
    world.run(3.0)
    assert world.asked(count) == []
    assert world.px4.mode == POSITION
    assert world.px4.switch(OFFBOARD)
    world.run(0.5)
    assert world.flows
    world.px4.switch(HOLD)
    world.run(2.0)
    world.reset()
    world.run(2.0)
    assert world.asked(count) == [TO_OFFBOARD]
    assert world.flows


def test_nobody_elses_offboard_flight_is_disturbed(world: World):
    world.policy = False

    def other(seconds: float) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            world.px4._beat_s = world.graph.now_s
            world.run(PERIOD_S)

    other(0.1)
    world.px4.switch(OFFBOARD)
    world.px4.arm()
    world.px4.flying = True
    other(1.0)
    world.policy = True
    sent = world.sent()
    other(3.0)
    assert world.sent() == sent
    assert "follows somebody else's commands already" in world.report[1]


@both
@pytest.mark.parametrize("gap_s", [0.03, 0.07])
def test_a_late_command_interrupts_nothing(world: World, gap_s: float):
    world.fly()
    count, setpoints = len(world.px4.commands), len(world.px4.setpoints)
    world.policy = False
    world.run(gap_s)
    world.policy = True
    world.run(1.0)
    assert len(world.px4.commands) == count
    assert len(world.px4.setpoints) - setpoints > 90
    assert world.flows


@pytest.mark.parametrize("what", ["a command that is not finite", "measurements are lost", "a command from the future"])
def test_a_bad_input_interrupts_nothing(world: World, what: str):
    world.fly()
    count, setpoints = len(world.px4.commands), len(world.px4.setpoints)
    if what == "measurements are lost":
        world.lose("vehicle_odometry")
        world.run(0.08)
        world.lose()
    else:
        world.graph.jumped_s += 3.0 if "future" in what else 0.0
        world.command(np.full(4, 0.1 if "future" in what else np.nan))
        world.graph.jumped_s = 0.0
    world.run(1.0)
    assert len(world.px4.commands) == count
    assert len(world.px4.setpoints) - setpoints > 90
    assert world.flows


@both
def test_the_rate_controller_keeps_the_attitude_while_commands_are_missing(world: World):
    got: list[tuple[list[float], float]] = []
    world.graph.heard["fmu/in/vehicle_rates_setpoint"].append(
        lambda m: got.append(([m.roll, m.pitch, m.yaw], -m.thrust_body[2]))
    )
    world.fly()
    world.policy = False
    world.run(0.2)
    if world.row == "px4_rates":
        assert got[-1][0] == [0.0, 0.0, 0.0]
        assert got[-1][1] == pytest.approx(0.4)
        assert world.px4.mode == OFFBOARD
    else:
        assert world.px4.mode == HOLD  # rotors cannot be left alone for as long


@both
def test_a_policy_that_stops_hands_over_to_hold_mode_for_good(world: World):
    world.fly()
    count = len(world.px4.commands)
    world.policy = False
    stopped_s = world.graph.now_s
    world.run(0.5)
    assert world.asked(count) == [TO_HOLD]
    assert world.px4.mode == HOLD
    pause_s = world.node._table.pause.longest_s
    assert world.px4.beats[-1] <= stopped_s + pause_s + PERIOD_S
    assert world.px4.left_s <= stopped_s + pause_s + 0.06
    world.run(1.0)
    world.policy = True
    world.silent(3.0)
    assert f"no valid command for {pause_s:g} s" in world.report[1]
    world.reset()
    world.run(2.0)
    assert world.flows


@pytest.mark.parametrize("fallback", [POSITION, HOLD, LAND, RETURN])
def test_px4s_own_failsafe_backs_ours_and_is_not_ended_by_new_heartbeats(world: World, fallback: int):
    world.px4.fallback = fallback
    world.fly()
    world.lose("vehicle_command")
    world.policy = False
    stopped_s = world.graph.now_s
    world.run(3.0)
    assert world.px4.mode == fallback
    assert world.px4.left_s < stopped_s + world.px4.loss_s + world.node._table.pause.longest_s + 0.1
    world.lose()
    world.policy = True
    world.silent(2.0)
    world.reset()  # the mode that was asked for still is offboard: a heartbeat would end the failsafe at once
    world.silent(3.0)
    assert world.px4.mode == fallback
    world.px4.switch(HOLD)
    world.run(1.0)
    world.reset()
    world.run(2.0)
    assert world.flows


@pytest.mark.parametrize("state", ["offboard", "failsafe", "hold", "stopped"])
def test_a_node_that_was_restarted_resumes_nothing_by_itself(world: World, state: str):
    world.fly()
    if state == "failsafe":
        world.graph.timers.clear()  # the process has ended
        world.policy = False
        world.run(2.0)
    elif state == "hold":
        world.node.deactivate()
        world.run(1.0)
    elif state == "stopped":
        world.stop()
        world.run(1.0)
    world.policy = True
    world.started()  # and activated, by whoever supervises it
    world.silent(5.0)
    assert world.px4.mode == {"hold": HOLD, "stopped": OFFBOARD}.get(state, POSITION)
    assert world.px4.armed is (state != "stopped")
    assert "commands came already" in world.report[1]


@pytest.mark.parametrize("after_s", [0.2, 3.0])
def test_an_operator_who_resets_a_restarted_node_too_early_ends_no_failsafe(world: World, after_s: float):
    world.fly()
    world.started()
    world.run(after_s)
    world.reset()
    world.silent(4.0)
    assert world.px4.mode == POSITION


def test_deactivating_the_node_hands_over_at_once(world: World):
    world.fly()
    count = len(world.px4.commands)
    world.node.deactivate()
    assert world.px4.mode == HOLD
    world.run(0.5)
    world.silent(3.0)
    assert world.asked(count) == [TO_HOLD]


@pytest.mark.parametrize("began", [False, True])
def test_an_emergency_stop_is_repeated_until_px4_is_disarmed_and_not_afterwards(world: World, began: bool):
    if began:
        world.fly()
    else:
        world.policy = False
        world.px4.arm()
        world.run(0.5)
    world.lose("vehicle_command")
    world.stop()
    world.run(1.0)
    assert world.px4.armed
    world.lose()
    world.run(0.5)
    assert not world.px4.armed
    assert world.report == (ERROR, "emergency stop; it gets nothing from here before ~/reset")
    world.policy = True
    world.silent(3.0)
    world.node.deactivate()
    world.node.activate()
    world.px4.arm(forced=True)  # a pilot's next flight is not ours to end
    world.px4.flying = True
    world.silent(3.0)
    assert world.px4.armed


def test_an_emergency_stop_reaches_a_vehicle_that_a_pilot_flies(world: World):
    world.fly()
    world.px4.switch(POSITION)
    world.run(2.0)
    world.stop()
    assert not world.px4.armed


def test_an_emergency_stop_without_confirmation_is_told(world: World):
    world.fly()
    world.lose("vehicle_command")
    world.stop()
    world.run(2.0)
    assert world.report == (ERROR, "the robot does not confirm the emergency stop, which is repeated: use another one")
    assert any("does not confirm" in line for line in world.graph.logged)
    sent = len(world.px4.commands)
    world.node.deactivate()
    world.node.activate()
    world.lose()
    world.run(1.0)
    assert len(world.px4.commands) > sent
    assert not world.px4.armed


def test_a_jump_of_the_estimate_ends_the_flight_and_a_small_reset_does_not(world: World):
    world.fly()
    count = len(world.px4.commands)
    world.px4.reset_counter += 1
    world.px4.position += (0.0, 0.02, 0.0)
    world.run(1.0)
    assert world.flows
    world.px4.reset_counter += 1
    world.px4.position += (1.0, 0.0, 0.0)
    setpoints = len(world.px4.setpoints)
    world.run(0.01)
    assert len(world.px4.setpoints) == setpoints
    assert world.asked(count) == [TO_HOLD]
    world.run(0.5)
    assert "jumped by 1 m" in world.report[1]
    world.silent(3.0)
    world.reset()
    world.run(2.0)
    assert world.flows


def test_without_its_status_px4_gets_nothing(world: World):
    world.fly()
    count = len(world.px4.commands)
    world.lose("vehicle_status")
    world.run(3.0)
    assert world.asked(count) == [TO_HOLD]
    world.silent(3.0)
    assert "nothing was heard on fmu/out/vehicle_status_v1" in world.report[1]


def test_lost_requests_are_repeated(world: World):
    world.run(1.0)
    world.lose("vehicle_command")
    world.run(1.2)
    assert world.px4.mode == HOLD
    world.lose()
    world.run(1.5)
    assert world.flows


def test_a_warning_of_px4_is_no_take_over(world: World):
    world.fly()
    world.px4.warning = True  # low battery, say: its flag `failsafe` is set, its mode stays
    world.run(2.0)
    assert world.flows


def test_landed_and_disarmed_by_px4_nothing_arms_again(world: World):
    world.fly()
    world.px4.flying = False
    world.px4.disarm()
    count = len(world.px4.commands)
    world.run(5.0)
    assert ARM not in world.asked(count)


@both
def test_a_clock_that_jumps_back_keeps_no_heartbeat_alive(world: World):
    world.fly()
    world.graph.jumped_s = -60.0
    world.policy = False
    world.run(0.5)
    assert world.px4.mode == HOLD
    world.silent(3.0)


def fair(command: tuple[int, tuple[int, ...]], told: tuple[int, int, int, bool]) -> bool:
    """Whether a command takes PX4 from nobody, as far as its sender could know."""
    arming, wanted, mode, failsafe = told
    if command == TO_OFFBOARD:
        return arming == 1 or (mode == HOLD and wanted == HOLD and not failsafe)
    if command == ARM:
        return arming == 1 and mode == OFFBOARD
    return command == TO_HOLD and mode == OFFBOARD


def event(world: World, random: np.random.Generator) -> str:
    """Something that goes wrong, or an operator who wants to go on."""
    px4, graph = world.px4, world.graph
    rate = random.choice([0.0, 0.1, 0.5])

    def again() -> None:
        world.policy = True
        px4.switch(HOLD)
        world.run(0.6)
        world.reset()
        world.run(1.5)

    events: dict[str, Callable[[], object]] = {
        "the policy stops or goes on": lambda: setattr(world, "policy", not world.policy),
        "reset": world.reset,
        "a pilot takes over": lambda: px4.switch(int(random.choice([0, 1, POSITION, LAND, HOLD, OFFBOARD]))),
        "disarmed": lambda: px4.disarm(forced=True),
        "jump": lambda: (
            setattr(px4, "reset_counter", px4.reset_counter + 1),
            px4.position.fill(random.uniform(-1, 0)),
        ),
        "PX4 restarts": px4.boot,
        "our node restarts": world.started,
        "not finite": lambda: world.command(np.full(4, np.nan)),
        "clock": lambda: setattr(graph, "jumped_s", float(random.choice([0.0, -5.0, 5.0]))),
        "messages are lost": lambda: setattr(graph, "lost", lambda t: t.startswith("fmu") and random.random() < rate),
        "again": again,
    }
    name = str(random.choice([*events, *["again"] * 5]))
    events[name]()
    return name


@both
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_px4_is_taken_from_nobody(world: World, seed: int):
    walk(world, np.random.default_rng(seed), 20)
    assert len(world.px4.setpoints) > 100


def walk(world: World, random: np.random.Generator, events: int) -> None:
    """Let `events` happen, and check all that was sent."""
    pause_s = world.node._table.pause.longest_s
    for _ in range(events):
        begun, asked = len(world.px4.beats), len(world.px4.commands)
        happened = event(world, random)
        silent_s = world.graph.now_s
        world.run(float(random.uniform(0.05, 3.0)))
        for _, command, parameters, told in world.px4.commands[asked:]:
            assert fair((command, parameters), told), (happened, command, parameters, told)
        if not world.policy:
            assert all(at <= silent_s + pause_s for at in world.px4.beats[begun:]), happened


def test_policy_node_sends_px4_nothing_and_remembers_only_what_px4_did(monkeypatch: pytest.MonkeyPatch):
    for module in (ros_robot, topics):
        monkeypatch.setattr(module, "types", interfaces)
    graph = Graph()
    px4 = Px4(graph)
    node = type("Node", (InProcess,), {"graph": graph})("policy_node", Nothing)
    robot = ros_robot.RosRobot(node, robot_table("px4_actuators", HISTORY, {"rate_hz": 100.0}), "policy/")
    passed: list[object] = []
    graph.heard["policy/fmu/in/actuator_motors"].append(passed.append)

    def history() -> list[float]:
        robot.write(np.full(4, 0.5))
        robot.hold()
        px4.step()
        graph.tick(0.5)
        reading = robot.read()
        assert reading is not None
        return reading.observation["action_history"].tolist()

    px4.step()
    assert history() == [-1.0] * 12  # rotors stood still
    px4.switch(OFFBOARD)
    px4.arm(forced=True)
    px4._beat_s = np.inf
    px4.step()
    assert history() == [-1.0] * 8 + [0.5] * 4
    px4.switch(POSITION)
    px4.step()
    assert history() == [-1.0] * 12
    assert len(passed) == 3
    assert (px4.setpoints, px4.commands, px4.beats) == ([], [], [])


@both
def test_who_takes_over_before_px4_has_armed_is_not_asked_back(world: World):
    world.px4.preflight = False
    world.run(2.0)
    assert (world.px4.mode, world.px4.armed) == (OFFBOARD, False)
    world.px4.switch(HOLD)
    world.run(STATUS_AGAIN_S + 0.02)
    since = len(world.px4.commands)
    world.run(5.0)
    assert world.asked(since) == []  # it asked for offboard mode again, once a status
    assert (world.px4.mode, world.report[0]) == (HOLD, ERROR)
