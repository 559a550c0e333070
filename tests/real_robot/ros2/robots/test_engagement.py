"""The decision who steers, without messages; with PX4's commander as the partner in ../test_px4.py."""

import pytest

from real_robot.ros2.engagement import ASK_S, LEAVE_S, QUIET_S, STOP_AGAIN_S, Engagement, Phase
from real_robot.ros2.robots.quadrotors import ARM, TO_OFFBOARD
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import Condition
from tests.real_robot.ros2.robots.test_tables import HOVER

TABLE = robot_table("px4_actuators", HOVER, {"rate_hz": 100.0})
IDLE = Condition(False, "idle", True, TO_OFFBOARD)
DISARMED = Condition(True, "disarmed", True, ARM)
FOLLOWS = Condition(True)
PILOT = Condition(False, "a pilot flies")
FAILSAFE = Condition(False, "a failsafe flies", beat=False)


class Clock:
    """Time that passes in periods of 0.01 s."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.engagement = Engagement(TABLE, lambda: self.now_s)
        self.sent: list[tuple[float, object]] = []
        self.beats = 0

    def run(self, seconds: float, heard: Condition | None = None, commands: bool = True) -> None:
        """Pass time; the status is `heard` every 0.5 s."""
        for step in range(round(seconds / 0.01)):
            if heard and step % 50 == 0:
                self.engagement.hear(heard)
            if commands:
                self.engagement.command()
            if due := self.engagement.due:
                self.sent.append((self.now_s, due))
            self.beats += self.engagement.beats
            self.now_s += 0.01

    def asked(self) -> list[object]:
        return [due for _, due in self.sent]

    def follow(self) -> Engagement:
        """Get to the phase FOLLOWED."""
        self.run(1.3, IDLE)
        self.run(0.1, DISARMED)
        self.run(0.1, FOLLOWS)
        assert self.engagement.phase is Phase.FOLLOWED
        assert self.asked() == [TO_OFFBOARD, ARM]
        self.sent.clear()
        return self.engagement


def test_requests_come_after_the_heartbeat_and_are_repeated_at_each_status_without_effect():
    clock = Clock()
    clock.run(1.2, IDLE)
    assert (clock.asked(), clock.engagement.commands) == ([], False)
    assert clock.beats > 100
    clock.run(1.2, IDLE)
    times = [at for at, _ in clock.sent]
    assert clock.asked() == [TO_OFFBOARD] * 3  # at once, and at two statuses
    assert times[0] == pytest.approx(6.2, abs=0.02)
    clock.run(0.02, DISARMED)
    assert clock.asked()[3:] == [ARM]
    assert clock.engagement.commands
    clock.run(0.02, FOLLOWS)
    assert (clock.engagement.phase, clock.engagement.reason) == (Phase.FOLLOWED, "")
    clock.run(1.0, FOLLOWS)
    assert len(clock.sent) == 4


def test_commands_begin_only_after_the_request():
    clock = Clock()
    clock.engagement.hear(DISARMED)
    while clock.engagement.phase is Phase.READY:
        clock.engagement.command()
        clock.now_s += 0.01
    assert (clock.engagement.phase, clock.engagement.commands) == (Phase.ASKING, False)
    assert clock.engagement.due == ARM
    assert clock.engagement.commands


def test_a_request_without_effect_is_given_up():
    clock = Clock()
    clock.run(1.3 + ASK_S, IDLE)
    assert clock.engagement.phase is Phase.LOST
    assert "does not follow: idle" in clock.engagement.reason
    sent = len(clock.sent)
    clock.run(3.0, IDLE)
    assert len(clock.sent) == sent


@pytest.mark.parametrize("after_s", [1.0, 1.3])
def test_somebody_who_takes_over_meanwhile_is_not_asked(after_s: float):
    clock = Clock()
    clock.run(after_s, IDLE)
    sent = len(clock.sent)
    clock.run(2.0, PILOT)
    assert len(clock.sent) == sent
    assert clock.engagement.phase is (Phase.READY if after_s < 1.2 else Phase.LOST)
    assert not clock.engagement.commands


def test_a_pilot_hands_over_himself_even_from_where_a_robot_could_be_asked():
    clock = Clock()
    clock.run(2.0, PILOT)
    clock.run(2.0, IDLE)
    assert (clock.asked(), clock.engagement.phase) == ([], Phase.READY)
    clock.run(0.5, FOLLOWS)
    assert clock.engagement.commands


@pytest.mark.parametrize("quiet_s", [0.0, 1.0, QUIET_S + 0.1])
def test_a_node_that_begins_follows_up_only_what_an_operator_starts_later(quiet_s: float):
    clock = Clock()
    clock.engagement.begin()
    clock.run(quiet_s, IDLE, commands=False)
    clock.run(5.0, IDLE)
    follows = quiet_s > QUIET_S
    assert bool(clock.asked()) is bool(clock.beats) is follows
    clock.engagement.reset()
    clock.run(2.0, IDLE)
    assert clock.asked()


def test_in_a_failsafe_that_a_heartbeat_would_end_there_is_none():
    clock = Clock()
    clock.run(2.0, FAILSAFE)
    assert (clock.beats, clock.asked()) == (0, [])


def test_without_commands_there_is_no_heartbeat_and_an_interruption_begins_anew():
    clock = Clock()
    clock.run(1.0, IDLE, commands=False)
    assert clock.beats == 0
    clock.run(0.8, IDLE)
    clock.run(0.3, IDLE, commands=False)
    beats = clock.beats
    assert 80 <= beats <= 92
    clock.run(0.8, IDLE)
    assert clock.asked() == []
    clock.run(0.5, IDLE)
    assert clock.asked() == [TO_OFFBOARD]


def test_what_follows_somebody_else_is_left_alone():
    clock = Clock()
    clock.run(3.0, FOLLOWS)
    assert (clock.asked(), clock.beats, clock.engagement.commands) == ([], 0, False)


@pytest.mark.parametrize("gap_s", [0.08, 0.2])
def test_a_gap_is_bridged_or_ends_it(gap_s: float):
    clock = Clock()
    engagement = clock.follow()
    clock.run(gap_s, commands=False)
    assert engagement.bridges is (gap_s < TABLE.pause.longest_s)
    clock.run(0.3, FOLLOWS)
    assert engagement.commands is (gap_s < TABLE.pause.longest_s)
    assert (clock.asked() == []) is engagement.commands


def test_a_stalled_process_does_not_go_on_as_if_nothing_had_been():
    clock = Clock()
    engagement = clock.follow()
    clock.now_s += 0.3
    engagement.command()
    assert not engagement.commands
    assert engagement.reason == "no valid command for 0.1 s"


@pytest.mark.parametrize("condition", [PILOT, DISARMED, FAILSAFE])
def test_a_robot_that_no_longer_follows_is_not_followed_up(condition: Condition):
    clock = Clock()
    engagement = clock.follow()
    clock.run(2.0, condition)
    assert (engagement.phase, engagement.reason) == (Phase.LOST, condition.fault)
    assert all(each == TABLE.hold for each in clock.asked())
    assert bool(clock.asked()) is condition.follows
    beats, sent = clock.beats, len(clock.sent)
    clock.run(2.0, FOLLOWS)  # somebody else's doing
    assert (clock.beats, len(clock.sent), engagement.commands) == (beats, sent, False)
    engagement.reset()
    clock.run(2.0, IDLE)
    assert clock.asked()[-1] == TO_OFFBOARD


def test_a_robot_is_made_to_hold_once_for_each_status_that_shows_no_effect_and_for_a_while():
    clock = Clock()
    engagement = clock.follow()
    engagement.lose("enough")
    clock.run(5.0, FOLLOWS)
    assert clock.asked() == [TABLE.hold] * 3
    assert clock.sent[-1][0] - clock.sent[0][0] <= LEAVE_S
    assert engagement.reason == "enough"


def test_without_a_status_it_is_made_to_hold_once():
    clock = Clock()
    engagement = clock.follow()
    clock.run(5.0)
    assert clock.asked() == [TABLE.hold]
    assert "nothing was heard on fmu/out/vehicle_status_v1 for 1.5 s" in engagement.reason


@pytest.mark.parametrize("before", [IDLE, FOLLOWS, PILOT, None])
def test_an_emergency_stop_is_sent_until_a_later_status_confirms_it(before: Condition | None):
    clock = Clock()
    if before:
        engagement = clock.follow() if before is FOLLOWS else clock.engagement
        clock.run(0.3, before)
    engagement = clock.engagement
    clock.sent.clear()
    engagement.stop()
    clock.run(2.0)
    assert engagement.unconfirmed
    engagement.stop()  # again, by a second press of the button
    assert clock.asked() == [TABLE.emergency] * len(clock.sent)
    assert len(clock.sent) == pytest.approx(2.0 / STOP_AGAIN_S, abs=12)
    clock.run(0.1, IDLE)
    assert (engagement.stopped, engagement.unconfirmed) == (True, False)
    sent = len(clock.sent)
    clock.run(3.0, FOLLOWS)
    assert (len(clock.sent), engagement.commands, engagement.beats) == (sent, False, False)
