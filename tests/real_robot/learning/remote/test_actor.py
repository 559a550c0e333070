"""A learner and an actor over real sockets: what is stored, refused, sent again, and learned from bit for bit."""

from __future__ import annotations

import errno
import http
import logging
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from embodied import seeding
from embodied.algorithms.off_policy.sac import SACConfig
from embodied.errors import UserError
from embodied.rollout.hand_over import HandOverCollector
from embodied.rollout.rollout import Collector
from embodied.run_options import ExperimentConfig
from embodied.runtime.interrupt import STOPPING, Stopped
from embodied.saving import checkpoint
from embodied.task import Task
from embodied.training.experiment import Experiment
from policies.squashed import SquashedConfig
from real_robot.learning.environment import Rules
from real_robot.learning.remote import inbox as inboxes
from real_robot.learning.remote import journal as journals
from real_robot.learning.remote import link
from real_robot.learning.remote.actor import Actor
from real_robot.learning.remote.inbox import Inbox
from real_robot.learning.remote.journal import FOLDER, Journal
from real_robot.learning.remote.link import ActorLink, LearnerServer
from real_robot.learning.remote.messages import packed, play_of, rollout_entries, rollout_of, unpacked
from real_robot.learning.remote.outbox import BACKLOG_BYTES, Outbox
from real_robot.learning.remote.robot import RemoteRobotTask
from real_robot.learning.task import Helper, RobotConfig
from real_robot.safety.safety import State
from real_robot.serving.wire import CLOSE_LATER, CLOSE_REFUSED
from tests.real_robot.learning.test_environment import Script
from tests.real_robot.learning.worlds import Arm, arm_environment

TOKEN = "correct horse battery"
LEARNER = SACConfig(rollout_length=5, warmup=10, updates=1.0, minibatch=16, hidden=[8], capacity=1000)
PATIENCE_S = 30.0


def wait_until(true) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class SlowArm(Arm):
    """An arm whose program leaves some time to others."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        time.sleep(min(seconds, 0.002))


class ArmTask(Task):
    """A task of one arm."""

    name = "arm"
    distributions = ("hold",)

    def contract(self, distribution: str):
        return arm_environment(Arm(), executed=2).contract

    def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
        raise AssertionError


class Robot:
    """An actor's program in a thread, with an arm and perhaps a person, in episodes of `step_limit` steps."""

    def __init__(self, address: str, token: str, person=None, seed: int = 0, step_limit: int = 20) -> None:
        self.arm = SlowArm()
        self.env = arm_environment(self.arm, person, executed=2, rules=Rules(step_limit, waits=False))
        with seeding.undisturbed():  # the learner's generators in this process
            policy = SquashedConfig(hidden=[8]).build(self.env.contract)
            policy.fit(TensorDict({"position": torch.randn(9, 1)}, [9]), torch.zeros(9, 2, 1))
        self.outbox = Outbox(address)
        self.actor = Actor(self.env, policy, self.outbox, seed, "hold")
        self.link = ActorLink(self.outbox, address, token)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with suppress(UserError):  # at the end
            self.actor.run()

    def __enter__(self) -> Robot:
        self.link.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.outbox.refuse("the test is over")
        self.link.__exit__()
        self.thread.join()

    @property
    def moves(self) -> bool:
        return self.env.control.safety.state is State.ACTIVE


def inbox(folder: Path, max_staleness: int = 1) -> Inbox:
    contract = ArmTask().contract("hold")
    return Inbox(Journal(folder), contract, {"contract": contract.to_dict(), "max_staleness": max_staleness})


@contextmanager
def serving(inbox: Inbox, port: int = 0) -> Iterator[tuple[LearnerServer, str]]:
    with LearnerServer(inbox, "127.0.0.1", port, TOKEN) as server:
        yield server, f"127.0.0.1:{server.port}"


def learn(inbox: Inbox, robot: Robot, updates: int) -> None:
    """Ask for rollouts, and "learn" from `updates` of them."""
    inbox.order(do="collect", decisions=3)
    first = inbox.journal.total
    for version in range(first, first + updates):
        inbox.publish(version, dict(robot.actor.policy.state_dict()))
        wait_until(lambda version=version: inbox.journal.total > version)
        inbox.rollout(version)


# What a learner does with the rollouts.


def experiment(directory: Path, env_steps: int = 120) -> tuple[Experiment, RemoteRobotTask]:
    config = ExperimentConfig(
        num_envs=1,
        env_steps=env_steps,
        evaluation_envs=1,
        evaluation_starts=2,
        stages=["rl"],
        video=False,
        checkpoint_every=3,
    )
    record = {"choices": {}, "values": {}, "arguments": []}
    robot = RobotConfig(person=Helper.NOBODY, waits=False, listen="127.0.0.1:0")
    task = RemoteRobotTask(ArmTask(), robot, directory, record)
    return Experiment(config, task, SquashedConfig(hidden=[8]), LEARNER, directory, record=record), task


def run(directory: Path, **options) -> None:
    """Run, or continue, an experiment in `directory` with an actor."""
    with ExitStack() as stack:
        directory.mkdir(exist_ok=True)
        trainer, task = experiment(directory, **options)
        stack.callback(task.close)
        assert task._remote
        port = task._remote.server.port
        token = (directory / "actor_token").read_text().strip()
        stack.enter_context(Robot(f"127.0.0.1:{port}", token))
        report = trainer.run()
        assert report.results["rl", "hold"].success.shape == (1, 2)


def final(directory: Path) -> checkpoint.Checkpoint:
    number = checkpoint.load(directory).counters["rl_checkpoint"]
    return checkpoint.load(directory / "checkpoint" / f"{number:06d}")


def assert_same(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> None:
    assert one.counters["env_steps"] == other.counters["env_steps"]
    assert one.counters["rl_gradient_steps"] == other.counters["rl_gradient_steps"] > 20
    assert all(torch.equal(one.policy[name], part) for name, part in other.policy.items())
    assert torch.equal(one.state["rng"]["torch"], other.state["rng"]["torch"])
    ours, theirs = (each.state["parts"]["learner"] for each in (one, other))
    assert str(ours) == str(theirs)


def copied(run: Path, number: int, to: Path) -> Path:
    """Run in which checkpoint `number` of `run` is the newest, as after a kill at any later time."""
    to.mkdir()
    for name in (FOLDER, "actor_token"):
        (shutil.copytree if (run / name).is_dir() else shutil.copy)(run / name, to / name)
    (to / "checkpoint").mkdir()
    shutil.copytree(run / "checkpoint" / f"{number:06d}", to / "checkpoint" / f"{number:06d}")
    return to


def test_a_killed_learner_takes_the_same_steps_again_from_what_is_stored(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "KEEP", 99)
    run(tmp_path / "run")
    before = final(tmp_path / "run")
    assert Journal(tmp_path / "run" / FOLDER).total >= before.counters["iteration"] >= 12
    for number in (1, 3):  # before the first update, and after some
        run(copied(tmp_path / "run", number, tmp_path / str(number)))
        assert_same(before, final(tmp_path / str(number)))


def test_rollouts_that_no_checkpoint_needs_are_deleted_and_the_oldest_one_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "KEEP", 4)
    run(tmp_path / "run")
    before = final(tmp_path / "run")
    oldest = min(int(path.name) for path in (tmp_path / "run" / "checkpoint").iterdir())
    needed = checkpoint.load_counters(tmp_path / "run")[0]["iteration"]
    journal = Journal(tmp_path / "run" / FOLDER)
    numbers = [int(path.name.split("-")[0]) for path in sorted(journal.folder.iterdir())]
    assert 3 < needed < before.counters["iteration"]
    assert numbers == list(range(needed, journal.total))
    run(copied(tmp_path / "run", oldest, tmp_path / "copy"))
    assert_same(before, final(tmp_path / "copy"))
    run(tmp_path / "run", env_steps=200)  # a further actor, and more rollouts


def test_a_full_disk_at_a_checkpoint_loses_nothing_that_was_acknowledged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "KEEP", 99)
    save = checkpoint.save
    calls = []

    def full(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
        return save(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        run(tmp_path / "run")
    stored = Journal(tmp_path / "run" / FOLDER)
    acknowledged = [stored.read(number) for number in range(stored.total)]
    assert len(acknowledged) >= 6  # checkpoints before rollouts 0, 3 and 6
    run(tmp_path / "run")
    again = Journal(tmp_path / "run" / FOLDER)
    assert [again.read(number) for number in range(len(acknowledged))] == acknowledged
    run(copied(tmp_path / "run", 1, tmp_path / "copy"))  # as if the disk had not been full
    assert_same(final(tmp_path / "run"), final(tmp_path / "copy"))


def test_a_learner_without_an_actor_stops_on_request_and_goes_on(tmp_path: Path) -> None:
    trainer, task = experiment(tmp_path)
    timer = threading.Timer(0.3, STOPPING.set)
    timer.start()
    with pytest.raises(Stopped, match="nothing was learned"):
        trainer.run()
    task.close()
    assert not (tmp_path / "checkpoint").exists()


def test_a_learner_that_is_stopped_while_it_waits_saves_and_goes_on(tmp_path: Path) -> None:
    trainer, task = experiment(tmp_path, env_steps=200)
    assert task._remote
    robot = Robot(f"127.0.0.1:{task._remote.server.port}", (tmp_path / "actor_token").read_text().strip()).__enter__()

    def leave() -> None:
        wait_until(lambda: task._remote.inbox.journal.total >= 6)
        robot.__exit__()
        STOPPING.set()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(Stopped, match="Stopped and saved"):
        trainer.run()
    leaving.join()
    stored = task._remote.inbox.journal.total
    task.close()
    saved = checkpoint.load(tmp_path)
    assert saved.counters["iteration"] == saved.state["parts"]["collector"]["version"] >= 6
    run(tmp_path, env_steps=200)
    assert Journal(tmp_path / FOLDER).total > stored


def test_missing_rollouts_are_named(tmp_path: Path) -> None:
    run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / FOLDER)
    trainer, task = experiment(tmp_path / "run", env_steps=200)
    with pytest.raises(UserError, match=r"rollouts in .*rollouts, got 0"):
        trainer.run()
    task.close()


def test_algorithms_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    task = experiment(tmp_path)[1]
    remote = task._remote
    assert remote
    policy = SquashedConfig(hidden=[8]).build(remote.contract)
    collector = Collector(remote, policy, torch.Generator())
    with pytest.raises(UserError, match="max_staleness=4 is more than the algorithm takes, 1"):
        remote.rollouts(policy, collector, 1)
    with pytest.raises(UserError, match="has a state, which an actor does not keep"):
        remote.rollouts(policy, HandOverCollector(remote, policy, torch.Generator()), 4)
    with pytest.raises(UserError, match="num_envs=1"):
        task.environment(1, "hold", "train")
    task.close()


# What travels.


def test_what_a_person_did_is_stored_as_it_was_executed(tmp_path: Path) -> None:
    box = inbox(tmp_path)
    person = Script(None, None, 0.01, 0.02, 0.5, None, None, 0.1, 0.1)
    transitions = []
    with serving(box) as (_, address), Robot(address, TOKEN, lambda: person) as robot:
        step = robot.env.step
        robot.env.step = lambda actions: transitions.append(step(actions)) or transitions[-1]
        learn(box, robot, 3)
    rollouts = [rollout_of(unpacked(box.journal.read(number))["rollout"], box.contract) for number in range(3)]
    human = torch.cat([each.signals["human"][:, 0] for each in rollouts])
    actions = torch.cat([each.actions[:, 0] for each in rollouts])
    assert human.sum() == 5
    assert torch.equal(human, torch.cat([each.signals["human"] for each in transitions[:9]]))
    assert torch.equal(actions, torch.cat([each.actions for each in transitions[:9]]))
    assert sum(int(each.signals["takeovers"].sum()) for each in rollouts) == 2
    assert [each.policy_version for each in rollouts] == [0, 0, 1] or rollouts[2].policy_version >= 1


def test_what_a_person_did_before_another_order_is_stored(tmp_path: Path) -> None:
    """An evaluation is ordered in the middle of a rollout of a hundred decisions, in which a person acts."""
    person = Script(*[0.01] * 1000)
    box = inbox(tmp_path / FOLDER)
    with serving(box) as (_, address), Robot(address, TOKEN, lambda: person, step_limit=1000) as robot:
        weights = dict(robot.actor.policy.state_dict())
        box.order(do="collect", decisions=100)
        box.publish(0, weights)
        wait_until(lambda: len(robot.arm.commands) > 20)
        number = box.order(do="evaluate", episodes=1, weights=weights)
        person.script.clear()
        robot.env.rules = Rules(4, waits=False)
        wait_until(lambda: box.journal.total == 1 and number in box._results)
    rollout = box.rollout(0)
    assert 5 < len(rollout.executed) < 100
    assert bool(rollout.signals["human"][:5].all())


def example(tmp_path: Path) -> tuple[Inbox, dict]:
    """An inbox, and the entries of a rollout that it accepts."""
    box = inbox(tmp_path)
    env = arm_environment(Arm(), executed=2)
    policy = SquashedConfig(hidden=[8]).build(env.contract)
    policy.fit(TensorDict({"position": torch.randn(9, 1)}, [9]), torch.zeros(9, 2, 1))
    return box, rollout_entries(Collector(env, policy, torch.Generator()).collect(3))


def raw(address: str, session: str = "0" * 16, token: str = TOKEN) -> ClientConnection:
    headers = {"Authorization": f"Api-Key {token}"}
    return connect(f"ws://{address}/{session}", additional_headers=headers, compression=None, proxy=None)


def message(entries: dict, sequence: object = 0) -> bytes:
    return packed({"kind": "rollout", "sequence": sequence, "rollout": entries, "help": {}})


def changed(entries: dict, **values) -> bytes:
    return message({**entries, **values})


def _with_nan(sample: TensorDict) -> TensorDict:
    return sample.apply(lambda part: part * torch.nan if part.is_floating_point() else part)


REFUSED = {
    "text": lambda entries: "hello",
    "garbage": lambda entries: b"\x93garbage",
    "nothing": lambda entries: b"",
    "truncated": lambda entries: message(entries)[:-7],
    "without a kind": lambda entries: packed({"sequence": 0}),
    "unknown kind": lambda entries: packed({"kind": "shutdown"}),
    "no sequence": lambda entries: message(entries, "0"),
    "missing entry": lambda entries: message({name: entries[name] for name in entries if name != "reward"}),
    "further entry": lambda entries: changed(entries, code="import os"),
    "other shape": lambda entries: changed(entries, actions=torch.zeros(3, 1, 5, 1)),
    "other type": lambda entries: changed(entries, terminated=torch.zeros(3, 1)),
    "other batch": lambda entries: changed(entries, log_prob=torch.zeros(4, 1, 1)),
    "no tensor": lambda entries: changed(entries, reward="all of it"),
    "no rows": lambda entries: changed(entries, reward=torch.zeros(0, 1, 2)),
    "not finite": lambda entries: changed(entries, reward=torch.full((3, 1, 2), torch.nan)),
    "bad ends": lambda entries: changed(
        entries, final_rows=torch.tensor([7]), final_observation=entries["last_observation"]
    ),
    "no observation": lambda entries: changed(entries, last_observation=TensorDict({}, [1])),
    "ends of no length": lambda entries: changed(entries, final_rows=torch.tensor([0]), final_observation=1),
    "observation without keys": lambda entries: changed(entries, last_observation=torch.zeros(1, 1)),
    "tensors in no map": lambda entries: message(entries).replace(b"entries", b"entrjes"),
    "signals without steps": lambda entries: changed(entries, signals={"human": torch.zeros(3, 1, dtype=torch.bool)}),
    "events of other type": lambda entries: changed(entries, events={"fault": torch.zeros(3, 1)}),
    "sample not finite": lambda entries: changed(entries, sample=_with_nan(entries["sample"])),
    "log_prob not finite": lambda entries: changed(entries, log_prob=torch.full((3, 1, 1), torch.nan)),
    "no numbers": lambda entries: changed(entries, vanished="none"),
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_is_no_rollout_is_refused_in_one_line(content, tmp_path: Path, caplog) -> None:
    box, entries = example(tmp_path)
    with serving(box) as (_, address), raw(address) as connection:
        assert unpacked(connection.recv())["stored"] == 0
        connection.send(content(entries))
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=PATIENCE_S)
        assert connection.close_code == CLOSE_REFUSED
        wait_until(lambda: "is gone" in caplog.text)
        lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert len(lines) == 1
        assert "\n" not in lines[0]
        assert "Traceback" not in caplog.text
        with raw(address) as again:  # others are served
            again.recv()
            again.send(message(entries))
            assert unpacked(again.recv(timeout=PATIENCE_S))["stored"] == 1
            again.send(message(entries))  # twice
            assert unpacked(again.recv(timeout=PATIENCE_S))["stored"] == 1
    assert box.journal.total == 1


def test_what_is_no_random_play_is_refused(tmp_path: Path) -> None:
    contract = ArmTask().contract("hold")
    actions = torch.zeros(5, contract.executed, 1)

    def result(value: float, size: int = 5) -> dict:
        return {"observation": TensorDict({"position": torch.full((size, 1), value)}, [size]), "actions": actions}

    assert len(play_of(result(0.0), contract)[0]) == 5
    for wrong in (None, [1], {}, result(torch.nan), result(0.0, 4), result(0.0) | {"observation": actions}):
        with pytest.raises(UserError, match="expected"):
            play_of(wrong, contract)


def test_what_is_too_large_is_refused_on_both_sides(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(link, "MESSAGE_BYTES", 10_000)
    box, _ = example(tmp_path)
    with serving(box) as (_, address), raw(address) as connection:
        connection.recv()
        with suppress(ConnectionClosed):
            connection.send(b"x" * 20_000)
            connection.recv(timeout=PATIENCE_S)
        assert connection.close_code == 1009  # message too big
    monkeypatch.setattr("real_robot.learning.remote.outbox.MESSAGE_BYTES", 100)
    with pytest.raises(UserError, match="than the learner takes"):
        Outbox("x").add({"reward": torch.zeros(100)}, {})


def test_strangers_and_a_second_actor_are_refused(tmp_path: Path, caplog) -> None:
    box, entries = example(tmp_path)
    with serving(box) as (server, address):
        with pytest.raises(InvalidStatus) as refused:
            raw(address, token="another token, just as long")
        assert refused.value.response.status_code == http.HTTPStatus.UNAUTHORIZED
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"\x00\xff" * 100)
        with raw(address, "none") as nobody, pytest.raises(ConnectionClosed):
            nobody.recv(timeout=PATIENCE_S)
        wait_until(lambda: not server.connected)
        with raw(address) as first:
            first.recv()
            with pytest.raises(InvalidStatus) as refused:
                raw(address, "1" * 16)
            assert refused.value.response.status_code == http.HTTPStatus.SERVICE_UNAVAILABLE
            first.send(message(entries, 1))  # one is missing
            with pytest.raises(ConnectionClosed):
                first.recv(timeout=PATIENCE_S)
            assert first.close_code == CLOSE_LATER
        assert "Traceback" not in caplog.text
    outbox = Outbox(address)
    with serving(box, server.port), ActorLink(outbox, address, "another token, just as long"):
        wait_until(lambda: outbox.refusal)
    assert "wrong or missing token" in outbox.refusal


def test_a_full_disk_at_a_rollout_keeps_it_at_the_robot_until_there_is_space(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(link, "RETRY_S", 0.02)
    monkeypatch.setattr(inboxes, "FULL_S", (0.2, 0.8))
    caplog.set_level(logging.INFO)
    box = inbox(tmp_path / FOLDER)
    attempts = []
    with serving(box) as (_, address), Robot(address, TOKEN) as robot:
        learn(box, robot, 2)
        with monkeypatch.context() as full:

            def no_space(path: Path):
                attempts.append(time.monotonic())
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

            full.setattr(journals, "complete_or_absent", no_space)
            wait_until(lambda: len(attempts) == 4)
            assert not robot.outbox.connected
            assert not robot.moves
            pauses = np.diff(attempts)
            assert (pauses > (0.2, 0.4, 0.8)).all()
            time.sleep(0.1)
            written = len(robot.arm.commands)
            time.sleep(0.2)
            assert all(command is None for command in robot.arm.commands[written:])
            stored = box.journal.total
        wait_until(lambda: "rollouts can be stored again" in caplog.text)
        learn(box, robot, 3)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("cannot be stored ([Errno 28] No space left on device" in line for line in lines) == 1
    assert sum("the learner's disk is full" in line for line in lines) == 1  # at the robot
    assert not any("is gone" in line for line in lines[:-1])  # but at the end
    assert box.journal.total >= stored + 3
    sequences = [unpacked(box.journal.read(number))["sequence"] for number in range(box.journal.total)]
    assert sequences == list(range(len(sequences)))


# A network that fails.


class Proxy:
    """Forwards connections to `port`, at `bytes_per_s` if it is slow, until it is cut or goes silent."""

    bytes_per_s: float | None = None

    def __init__(self, port: int) -> None:
        self.target = port
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)  # what it holds back counts as sent
        self.port = self.server.getsockname()[1]
        self.sockets: list[socket.socket] = []
        self.is_cut = self.is_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.server.accept()
                if self.is_cut:
                    near.close()
                    continue
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
                far.connect(("127.0.0.1", self.target))
                self.sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                if not self.is_silent:
                    sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self.is_cut = True
        for each in self.sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.server.close()
        for each in self.sockets:
            each.close()


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Inbox, Robot, Proxy]]:
    box = inbox(tmp_path)
    with serving(box) as (server, _), ExitStack() as stack:
        proxy = Proxy(server.port)
        stack.callback(proxy.close)
        yield box, stack.enter_context(Robot(f"127.0.0.1:{proxy.port}", TOKEN)), proxy


@pytest.mark.parametrize("seconds", [1.0, 3.0, pytest.param(60.0, marks=pytest.mark.evidence)])
def test_a_network_that_drops_costs_no_rollout_and_the_robot_holds_meanwhile(proxied, seconds: float, caplog) -> None:
    caplog.set_level(logging.INFO)
    box, robot, proxy = proxied
    learn(box, robot, 3)
    proxy.cut()
    wait_until(lambda: not robot.outbox.connected)
    began = time.monotonic()
    wait_until(lambda: "waiting for robot and person: no learner" in caplog.text)
    written = len(robot.arm.commands)
    stood = robot.arm.position.copy()
    while time.monotonic() < began + seconds:
        time.sleep(0.05)
        assert not robot.moves
    assert np.array_equal(robot.arm.position, stood)
    assert all(command is None for command in robot.arm.commands[written:])
    proxy.is_cut = False
    learn(box, robot, 3)
    sequences = [unpacked(box.journal.read(number))["sequence"] for number in range(box.journal.total)]
    assert sequences == list(range(len(sequences)))
    assert sum("no learner at" in record.getMessage() for record in caplog.records if record.levelno > 20) <= 4
    assert "the learner is back" in caplog.text


def test_a_moment_without_a_network_stops_no_episode(tmp_path: Path, caplog) -> None:
    box = inbox(tmp_path, max_staleness=10**6)
    with serving(box) as (server, _), ExitStack() as stack:
        proxy = Proxy(server.port)
        stack.callback(proxy.close)
        robot = stack.enter_context(Robot(f"127.0.0.1:{proxy.port}", TOKEN, step_limit=10**6))
        learn(box, robot, 2)
        proxy.cut()
        wait_until(lambda: not robot.outbox.connected)
        began = time.monotonic()
        while time.monotonic() < began + 1.0:
            written = len(robot.arm.commands)
            wait_until(lambda written=written: len(robot.arm.commands) > written + 3)
            assert robot.moves
            assert all(command is not None for command in robot.arm.commands[written:])
        assert robot.outbox.unstored > 1
        proxy.is_cut = False
        learn(box, robot, 2)
        wait_until(lambda: robot.outbox.unstored < 3)
    assert "the episode ends" not in caplog.text.partition("the test is over")[0]
    sequences = [unpacked(box.journal.read(number))["sequence"] for number in range(box.journal.total)]
    assert sequences == list(range(len(sequences)))


def test_a_network_that_goes_silent_is_noticed(proxied, monkeypatch) -> None:
    box, robot, proxy = proxied
    learn(box, robot, 1)
    monkeypatch.setattr(link, "PING_S", 0.2)
    monkeypatch.setattr(link, "SILENCE_S", 0.8)
    proxy.cut()  # a new connection has the shorter times
    wait_until(lambda: not robot.outbox.connected)
    proxy.is_cut = False
    wait_until(lambda: robot.outbox.connected)
    proxy.is_silent = True
    wait_until(lambda: not robot.outbox.connected)
    wait_until(lambda: not robot.moves)
    proxy.is_silent = False
    learn(box, robot, 2)


def test_long_messages_on_a_slow_network_are_no_silence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(link, "PING_S", 0.3)
    monkeypatch.setattr(link, "SILENCE_S", 2.3)
    box, entries = example(tmp_path)
    entries["episode_totals"] = {"large": torch.zeros(3, 1, 1 << 18)}  # 3 MB, as the weights
    with serving(box) as (server, _), ExitStack() as stack:
        proxy = Proxy(server.port)
        proxy.bytes_per_s = 1 << 20
        stack.callback(proxy.close)
        outbox = Outbox("learner")
        stack.enter_context(ActorLink(outbox, f"127.0.0.1:{proxy.port}", TOKEN))
        wait_until(lambda: outbox.connected)
        began = time.monotonic()
        box.publish(0, {"w": torch.zeros(3 << 18)})
        outbox.add(entries, {})
        outbox.add(entries, {})
        wait_until(lambda: not outbox.unstored and outbox.take_weights())
        assert time.monotonic() - began > 2.5
        assert len(proxy.sockets) == 2  # the first connection has lasted
    assert box.journal.total == 2


def test_a_stop_while_the_actor_connects_ends_its_link(tmp_path: Path, monkeypatch) -> None:
    admit = LearnerServer._admit
    monkeypatch.setattr(LearnerServer, "_admit", lambda *arguments: time.sleep(0.5) or admit(*arguments))
    with serving(inbox(tmp_path)) as (_, address):
        actor = ActorLink(Outbox(address), address, TOKEN).__enter__()
        time.sleep(0.2)
        ending = threading.Thread(target=actor.__exit__, daemon=True)
        ending.start()
        ending.join(5.0)
        assert not ending.is_alive()


def test_an_actor_that_leaves_does_not_look_for_a_learner(tmp_path: Path, caplog) -> None:
    with serving(inbox(tmp_path)) as (_, address):
        outbox = Outbox(address)
        with ActorLink(outbox, address, TOKEN):
            wait_until(lambda: outbox.connected)
    assert "no learner at" not in caplog.text


def test_without_memory_for_more_rollouts_the_robot_holds_whoever_drives_it() -> None:
    outbox = Outbox("x")
    outbox.connect(packed({"kind": "greeting", "stored": 0, "total": 0, "max_staleness": 10**9}))
    outbox.receive(packed({"kind": "weights", "version": 0, "weights": {}}))
    outbox.take_weights()
    assert outbox.act(True) == outbox.act(False) == ""
    outbox._waiting.append((0, memoryview(bytearray(BACKLOG_BYTES + 1))))
    assert "wait for the learner" in outbox.act(True)


def test_another_task_and_a_learner_that_has_forgotten_are_refused() -> None:
    outbox = Outbox("x")
    greeting = {"kind": "greeting", "stored": 0, "total": 0, "max_staleness": 1, "contract": {"a": 1}}
    outbox.connect(packed(greeting))
    for entries in ({"contract": {"a": 2}}, {"stored": 3}, {"max_staleness": "1"}):
        with pytest.raises(UserError, match=r"another task|3 rollouts of this program|max_staleness"):
            outbox.connect(packed(greeting | entries))
    outbox.add({}, {})
    outbox.receive(packed({"kind": "stored", "stored": 1, "total": 1}))
    with pytest.raises(UserError, match=r"has 0 rollouts of this program, which has made 1: .*start this program"):
        outbox.connect(packed(greeting))
