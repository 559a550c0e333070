"""An actor and a learner under thousands of random sequences of faults, in one thread, by an injected clock.

Whatever happens, every command is within limits, the robot moves only while the person drives it or the policy's
weights are fresh, and home only while the learner is there, the person's actions win, and every rollout is stored
exactly once.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.policy import Decision
from embodied.runtime.interrupt import STOPPING
from embodied.saving import files
from real_robot.learning.environment import Rules
from real_robot.learning.homing import Homing
from real_robot.learning.remote.actor import Actor
from real_robot.learning.remote.inbox import Inbox, Sent
from real_robot.learning.remote.journal import Journal
from real_robot.learning.remote.messages import unpacked
from real_robot.learning.remote.outbox import Outbox
from real_robot.safety.safety import State
from tests.real_robot.learning.worlds import Arm, arm_environment

SEQUENCES, PARTS = 2000, 4
TICKS = 18
"""Control periods of a sequence. Then everything is repaired, and the program stopped once it has gone on."""
MOVE = 0.02
"""Largest change of the command in a period: 2 m/s for 0.01 s."""
NETWORK = "drop", "drop", "slow", "fast", "restart", "swap", "twice"
EVENTS = (
    *NETWORK,
    *("drive", "drive", "release", "release", "stop", "unplug", "success", "nan", "late"),
)
REPAIRS = "connect", "healthy", "plug"
MENDED = 20
"""Multiple of TICKS within which a repaired system has to go on."""


class Wanderer:
    """A policy of random actions, which notes the version of its weights."""

    device = torch.device("cpu")

    def __init__(self, contract, rng: random.Random) -> None:
        self.contract, self.rng, self.version = contract, rng, -1

    def act(self, observation, *, deterministic=False, generator=None) -> Decision:
        assert self.version >= 0, "it acts without weights"
        assert bool(observation["position"].isfinite().all())
        actions = torch.full((1, self.contract.horizon, 1), self.rng.uniform(-1.2, 1.2))
        return Decision(actions, TensorDict({}, [1]), torch.zeros(1, self.contract.executed, 1))

    def load_state_dict(self, weights) -> None:
        assert int(weights["version"]) > self.version
        self.version = int(weights["version"])


class RandomPerson:
    """A person who drives, lets go, presses buttons and pulls the plug as the world's events say."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pressed: frozenset[str] = frozenset()
        world.command = None

    def action(self, proposed):
        world = self.world
        pressed, world.button = world.button, ""
        self.pressed = frozenset([pressed] if pressed else [])
        if pressed == "stop":
            world.stopped = True
        if world.unplugged:
            world.command, world.drives = None, False
            raise OSError("no such device")
        world.command = world.rng.uniform(-1.2, 1.2) if world.drives else None
        return None if world.command is None else np.array([world.command])

    def wait_for(self, *buttons, sleep):
        for _ in range(self.world.rng.randrange(1, 8)):
            sleep(0.01)
            if self.world.unplugged:
                raise OSError("no such device")
        self.world.button, self.world.stopped, self.world.waited = "", False, self.world.waited + 1
        return buttons[0]

    def close(self) -> None: ...


class World:
    """A robot, a person, a network and a learner, which change at every control period."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.drives, self.unplugged, self.stopped, self.button, self.waited = False, False, False, "", 0
        self.command: float | None = None
        self.ready = 0
        self.prepares = True
        self.arm = arm = Arm()
        arm.fault, self.reading = self._measured, "healthy"
        self.written: list[tuple[int, float]] = []
        self.violations: list[AssertionError] = []
        write, arm.write = arm.write, self._checked_write
        self._write = write
        homing = Homing([[rng.uniform(-0.1, 0.1)]] if rng.random() < 0.5 else [], waypoint_s=0.03)
        rules = Rules(rng.randrange(3, 30), waits=rng.random() < 0.5, homing=homing)
        self.env = arm_environment(arm, lambda: self._person(), executed=2, rules=rules, begins=self._begins)
        arm.sleep = self._sleep
        object.__setattr__(self.env.control.station, "sleep", self._sleep)
        # the learner, and the network
        self.folder, self.staleness = folder, rng.randrange(2)
        self.version = self.saved = self.busy = 0
        self.pace = rng.choice((1, 5, 1000))
        self.inbox = self._inbox()
        self.outbox = Outbox("learner")
        self.sent: Sent | None = None  # None: no connection
        self.to_actor: list[tuple[int, bytes]] = []
        self.to_learner: list[tuple[int, bytes]] = []
        self.learned: list[bytes] = []
        self.swap = self.twice = False
        self.policy = Wanderer(self.env.contract, rng)
        self.made: list[bytes] = []
        add = self.outbox.add

        def noted(rollout, used) -> None:
            add(rollout, used)
            self.made.append(self.outbox._waiting[-1][1])

        self.outbox.add = noted

    def run(self) -> None:
        """Run the actor until it is stopped, then let the learner have what is left."""
        try:
            Actor(self.env, self.policy, self.outbox, 0, "hold").run()
        finally:
            STOPPING.clear()
        for violation in self.violations:
            raise violation
        assert len(self.made) > self.made_before + 1, "it did not go on"
        assert self.env.control.safety.state is not State.ACTIVE
        self._drop()
        for _ in range(200):
            self._connect()
            self.arm.ticks += 1
            self._network()
        assert not self.outbox.unstored
        assert self.outbox._added == len(self.made)
        journal = Journal(self.folder)
        assert [journal.read(number) for number in range(journal.total)] == self.made
        assert self.learned == self.made[: len(self.learned)]

    # The robot.

    def _person(self) -> RandomPerson:
        if self.unplugged:
            raise OSError("no such device")
        return RandomPerson(self)

    def _measured(self, reading):
        if self.reading == "nan":
            reading.observation["position"][:] = np.nan
        if self.reading == "late":
            object.__setattr__(reading, "stamp_s", reading.stamp_s - 1.0)
        return reading

    def _begins(self, training: bool) -> None:
        self.prepares = not training
        assert self.outbox.connected

    def _checked_write(self, action) -> None:
        try:
            self._check(action)
        except AssertionError as error:  # which the robot's program takes for a failure of the robot
            self.violations.append(error)
        self.written.append((self.arm.ticks, float(action[0])))
        self._write(action)

    def _check(self, action) -> None:
        tick, value = self.arm.ticks, float(action[0])
        last_tick, last = self.written[-1] if self.written else (-1, float(self.arm.position[0]))
        assert abs(value) <= 1.0 + 1e-9
        assert abs(value - last) <= MOVE + 1e-9
        assert tick > last_tick
        if self.env.control.safety.state is State.ACTIVE:
            assert not self.stopped
            assert self.button != "stop" or tick - self.pressed_tick <= 1  # since the person was asked
            assert self.env.control.human == (self.command is not None)
            if self.prepares:  # on the way home
                assert self.outbox.connected
            else:  # rollout n, which is being made, by weights of version v: n - v updates
                assert self.env.control.human or len(self.made) - self.policy.version <= self.staleness
            if self.command is not None:  # to within a step of what the person wants, as fast as may be
                goal = min(max(self.command, -1.0), 1.0)
                assert abs(goal - value) <= max(abs(goal - last) - MOVE, MOVE) + 1e-6

    def _sleep(self, seconds: float) -> None:
        periods = max(1, round(seconds / 0.01))
        steps = min(periods, 3)
        for _ in range(steps):
            self.arm.ticks += periods // steps
            mending = self.ready > TICKS
            if self.rng.random() < 0.1 and not mending:
                # a robot or a person who is not there at first is an error, see test_environment.py
                self._happen(self.rng.choice(EVENTS if self.env._ready else NETWORK))
            if self.rng.random() < 0.3 or mending:
                self._happen(self.rng.choice((*REPAIRS, "release", "fast") if mending else REPAIRS))
            self._network()
            self._learn()
        self.ready += self.env._ready
        if self.ready <= TICKS:
            self.made_before = len(self.made)
        elif len(self.made) > self.made_before + 1 or self.ready > MENDED * TICKS:
            STOPPING.set()

    def _happen(self, event: str) -> None:
        if event in ("drive", "release"):
            self.drives = event == "drive" and not self.unplugged
        elif event in ("stop", "success"):
            self.button, self.pressed_tick = event, self.arm.ticks
        elif event == "unplug":
            self.unplugged = True
        elif event == "plug":
            self.unplugged = False
        elif event in ("nan", "late", "healthy"):
            self.reading = event
        elif event in ("slow", "fast"):
            self.pace = {"slow": 1000, "fast": 2}[event]
        elif event == "drop":
            self._drop()
        elif event == "connect":
            self._connect()
        elif event == "restart":  # killed: it goes on from its last checkpoint
            self._drop()
            self.version = self.saved
            del self.learned[self.version :]
            self.inbox = self._inbox()
        else:
            self.swap, self.twice = self.swap or event == "swap", self.twice or event == "twice"

    # The network.

    def _inbox(self) -> Inbox:
        description = {"contract": {}, "max_staleness": self.staleness}
        inbox = Inbox(Journal(self.folder), self.env.contract, description)
        inbox.order(do="collect", decisions=2)
        inbox.publish(self.version, {"version": torch.tensor(self.version)})
        return inbox

    def _connect(self) -> None:
        if self.sent is None:
            self.sent = Sent()
            self.outbox.connect(self.inbox.greeting(self.outbox.session))

    def _drop(self) -> None:
        self.sent = None
        self.to_actor, self.to_learner = [], []
        self.outbox.disconnect("dropped")

    def _network(self) -> None:
        if self.sent is None:
            return
        due = self.arm.ticks + self.rng.randrange(4)
        if (message := self.inbox.next(self.sent, 0.0)) is not None:
            self.to_actor.append((due, message))
        if (message := self.outbox.next(0.0)) is not None:
            self.to_learner += [(due, message)] * (2 if self.twice else 1)
            self.twice = False
        if self.swap and len(self.to_learner) > 1:
            self.to_learner.reverse()
            self.swap = False
        while self.to_actor and self.to_actor[0][0] <= self.arm.ticks:
            self.outbox.receive(self.to_actor.pop(0)[1])
        while self.to_learner and self.to_learner[0][0] <= self.arm.ticks:
            try:
                answer = self.inbox.receive(self.outbox.session, self.to_learner.pop(0)[1])
            except ConnectionError:
                return self._drop()
            if answer is not None:
                self.to_actor.append((due, answer))
        return None

    def _learn(self) -> None:
        self.busy += 1
        if self.busy < self.pace or self.version >= self.inbox.journal.total:
            return
        self.busy = 0

        self.learned.append(self.inbox.journal.read(self.version))
        self.version += 1
        self.inbox.publish(self.version, {"version": torch.tensor(self.version)})
        if self.rng.random() < 0.3:
            self.saved = self.version


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_the_robot_is_safe_and_no_rollout_is_lost(part: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "flush", lambda path: None)  # thousands of syncs
    count = SEQUENCES // PARTS
    rollouts = motions = humans = 0
    for seed in range(part * count, (part + 1) * count):
        world = World(seed, tmp_path / str(seed))
        world.run()
        rollouts += len(world.made)
        motions += len(world.written)
        humans += sum(bool(unpacked(data)["rollout"]["signals"]["human"].any()) for data in world.made)
    # so that this tests something: about 3 rollouts and 12 commands in each sequence
    assert rollouts > 2 * count
    assert motions > 8 * count
    assert humans > count / 10
