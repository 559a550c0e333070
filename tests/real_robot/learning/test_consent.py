"""What has to agree before a robot moves: asked again after every wait, and in every period on the way home."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from embodied.rollout.rollout import Cancelled
from policies.squashed import SquashedConfig
from real_robot.learning.consent import Consent
from real_robot.learning.environment import RETRY_S, RobotEnvironment, Rules
from real_robot.learning.homing import Homing
from real_robot.learning.remote import outbox as outboxes
from real_robot.learning.remote.actor import Actor
from real_robot.learning.remote.messages import packed
from real_robot.learning.remote.outbox import Outbox
from tests.real_robot.learning.test_environment import Script
from tests.real_robot.learning.worlds import Arm, arm_environment


class Link(Consent):
    """A learner that is there or not."""

    def __init__(self) -> None:
        self.there = True

    def begin(self) -> str:
        return "" if self.there else "no learner"


class WatchedArm(Arm):
    """An arm that notes where it is at every attempt to begin an episode; after three the learner is back."""

    def __init__(self, link: Link, start: float) -> None:
        super().__init__(start)
        self.link = link
        self.stood: list[float] = []

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if seconds == RETRY_S:
            self.stood.append(float(self.position[0]))
            self.link.there = self.link.there or len(self.stood) == 3


class Slow(Script):
    """A person who presses the key after the learner has been lost, the first time that they are asked."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link

    def wait_for(self, *buttons, sleep):
        self.link.there = self.link.there and bool(self.waited)
        return super().wait_for(*buttons, sleep=sleep)


def made(person_type=Script, start: float = 0.3, **rules) -> tuple[WatchedArm, RobotEnvironment, Script]:
    link = Link()
    arm = WatchedArm(link, start)
    person = person_type(link) if person_type is Slow else person_type()
    env = arm_environment(arm, lambda: person, rules=Rules(50, **rules))
    env.consent = link
    return arm, env, person


HOME = Homing([[0.1]], waypoint_s=0.1)


def test_a_learner_that_is_lost_while_the_person_is_asked_moves_no_robot_home():
    arm, env, person = made(Slow, waits=False, homing=HOME)
    env.reset()
    assert arm.stood == [0.3, 0.3, 0.3]
    # before the motion home; why the robot stopped; before the motion home
    assert person.waited == [("success", "go")] * 3
    assert float(arm.position[0]) == pytest.approx(0.1)


def test_a_learner_that_is_lost_on_the_way_home_stops_the_robot_until_it_is_back_and_a_key_is_pressed():
    arm, env, person = made(waits=False, homing=HOME)
    env._ready = True  # as in a later episode
    read = arm.read

    def losing():
        if float(arm.position[0]) < 0.25 and not arm.stood:
            arm.link.there = False
        return read()

    arm.read = losing
    env.reset()
    stood = arm.stood[0]
    assert arm.stood == [stood] * 3
    assert 0.25 - 2 * 0.02 <= stood < 0.25  # a command that was written is carried out
    assert person.waited == [("success", "go")]
    assert float(arm.position[0]) == pytest.approx(0.1)


def test_a_learner_that_is_lost_while_the_scene_is_put_back_begins_no_episode():
    arm, env, person = made(Slow, waits=True)
    put_back = []
    object.__setattr__(env.control.station, "put_back", lambda: put_back.append(arm.link.there))
    env.reset()
    assert len(arm.stood) == 3
    assert put_back == [True]
    assert len(person.waited) == 3  # the scene, why the robot stopped, the scene


def test_a_learner_that_is_lost_during_the_last_measurements_begins_no_episode():
    arm, env, _ = made(waits=False)
    begun = []
    env._begins = begun.append
    reads = []
    read = arm.read

    def losing():
        reads.append(arm.link.there)
        arm.link.there = arm.link.there and len(reads) != 2  # the second wait for measurements
        return read()

    arm.read = losing
    env.reset()
    assert len(arm.stood) == 3
    assert begun[0] is False
    assert begun.count(True) == 1


# What an actor's learner consents to.


def connected(max_staleness: int = 1, total: int = 0) -> Outbox:
    """An outbox whose learner has ordered rollouts and sent weights of version `total`."""
    outbox = Outbox("x")
    outbox.connect(packed({"kind": "greeting", "stored": 0, "total": total, "max_staleness": max_staleness}))
    outbox.receive(packed({"kind": "order", "id": "a", "do": "collect"}))
    outbox.running = "a"
    outbox.receive(packed({"kind": "weights", "version": total, "weights": {}}))
    outbox.take_weights()
    return outbox


def test_without_memory_for_more_no_rollout_and_no_episode_begins_whoever_drives(monkeypatch):
    monkeypatch.setattr(outboxes, "BACKLOG_BYTES", 100)
    outbox = connected(max_staleness=10**9)
    env = arm_environment(Arm(), executed=2)
    actor = Actor(env, SquashedConfig(hidden=[8]).build(env.contract), outbox, 0, "hold")
    assert outbox.begin() == ""
    assert not actor._waits_for_learner()
    outbox.add({"x": torch.zeros(100)}, {})
    assert "wait for the learner" in outbox.begin()
    monkeypatch.setattr(RobotEnvironment, "human", True)
    assert actor._waits_for_learner()
    outbox.receive(packed({"kind": "stored", "stored": 1, "total": 1}))
    assert outbox.begin() == ""
    assert not actor._waits_for_learner()


def test_another_order_before_the_first_measurement_cancels_what_begins():
    outbox = connected()
    env = arm_environment(Arm(), executed=2)
    env.consent = outbox
    outbox.receive(packed({"kind": "order", "id": "b", "do": "evaluate"}))
    with pytest.raises(Cancelled):
        env.reset()
    env.switch("hold", "train")
    outbox.running = "b"
    assert isinstance(env.reset(), TensorDict)


def test_older_weights_of_a_learner_that_was_killed_hold_nobody():
    outbox = connected(total=5)
    outbox.receive(packed({"kind": "weights", "version": 2, "weights": {}}))
    assert outbox.begin() == ""
    assert outbox.take_weights() is None
    assert outbox.version == 5
