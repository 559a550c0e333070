"""The policy server over real sockets: the same actions as in process, and whoever misbehaves is refused alone."""

import contextlib
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import serve

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.execution.chunking import Execution, InpaintingPolicy, Running
from embodied.policy import Decision
from embodied.rollout.memory import Memory, RecurrentPolicy
from policies.flow import FlowConfig
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from real_robot.robots.robot import Reading
from real_robot.serving.answerer import Options
from real_robot.serving.chunk_executor import ChunkExecutor
from real_robot.serving.policy_client import PolicyClient
from real_robot.serving.policy_server import PolicyServer, ServerLimits
from real_robot.serving.wire import OPTIONS, pack, unpack
from tests.policies import observations as objects

TOKEN = "correct horse battery"
CONTRACT = Contract(
    {"position": TensorSpec((3,), unit="m"), "wind": TensorSpec((2,), privileged=True)},
    TensorSpec((2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    0.02,
    horizon=4,
    executed=2,
)
LIMITS = ServerLimits(clients=3, handshake_s=0.5, send_s=0.5, idle_s=30.0)


def mlp() -> MLPPolicy:
    torch.manual_seed(0)
    policy = MLPConfig().build(CONTRACT)
    policy.fit(TensorDict({"position": torch.randn(9, 3), "wind": torch.randn(9, 2)}, [9]), torch.zeros(9, 2))
    return policy


def observation(seed: int = 0) -> TensorDict:
    return TensorDict({"position": torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))}, [1])


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    with PolicyServer(mlp(), TOKEN, port=0, limits=LIMITS) as server:
        yield server


def uri(server: PolicyServer) -> str:
    return f"ws://127.0.0.1:{server.port}"


def raw(server: PolicyServer, header: str | None = f"Api-Key {TOKEN}") -> ClientConnection:
    headers = {"Authorization": header} if header is not None else {}
    return connect(uri(server), additional_headers=headers, compression=None, max_size=None, proxy=None).__enter__()


def assert_serves(server: PolicyServer) -> None:
    client = PolicyClient(uri(server), TOKEN, deadline_s=5.0)
    expected = mlp().act(observation(), deterministic=True).actions
    assert torch.equal(client.act(observation(), deterministic=True).actions, expected)
    client.close()


def test_the_same_actions_as_in_process(server: PolicyServer):
    policy, client = mlp(), PolicyClient(uri(server), TOKEN, deadline_s=5.0)
    assert client.contract == CONTRACT
    assert not isinstance(client, RecurrentPolicy | InpaintingPolicy)
    for seed in range(5):
        decision = client.act(observation(seed), deterministic=True)
        assert torch.equal(decision.actions, policy.act(observation(seed), deterministic=True).actions)
    assert torch.equal(client.act(observation()).actions, client.act(observation(), deterministic=True).actions)
    first, again, other = (
        client.act(observation(), deterministic=False, generator=torch.Generator().manual_seed(seed)).actions
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, client.act(observation()).actions)
    with pytest.raises(ValueError, match="one observation, got 2"):
        client.act(torch.cat([observation(), observation()]))


def test_a_memory_travels_and_sessions_never_mix():
    torch.manual_seed(0)
    policy = RecurrentConfig(memory=6).build(CONTRACT)
    policy.fit(TensorDict({"position": torch.randn(9, 3), "wind": torch.randn(9, 2)}, [9]), torch.zeros(9, 2))
    torch.nn.init.normal_(policy.gru.initial)
    with PolicyServer(policy, TOKEN, port=0) as server:
        clients = [PolicyClient(uri(server), TOKEN, deadline_s=5.0) for _ in range(2)]
        assert all(isinstance(client, RecurrentPolicy) for client in clients)
        memories = [Memory(client, 1) for client in clients]
        alone = [Memory(policy, 1) for _ in clients]
        for step in range(6):
            for robot, (client, memory, expected) in enumerate(zip(clients, memories, alone, strict=True)):
                seen = observation(10 * step + robot)
                decision = client.act(memory.with_observation(seen), deterministic=True)
                memory.keep([decision])
                in_process = policy.act(expected.with_observation(seen), deterministic=True)
                expected.keep([in_process])
                assert torch.equal(decision.actions, in_process.actions)
                assert torch.equal(memory.values, expected.values)
        with pytest.raises(ValueError, match="memory: expected an array of float32"):
            clients[0].act(observation(), deterministic=True)


def test_running_chunks_are_continued_from_afar():
    torch.manual_seed(0)
    seen = objects.observations(1)
    policy = FlowConfig(width=16, turn_rad=0.0).build(objects.contract())
    policy.fit(objects.observations(64), torch.randn(64, 2))
    running = Running(torch.full((1, 4, 2), 0.25), torch.tensor([1]), torch.tensor([3]))
    with PolicyServer(policy, TOKEN, port=0) as server:
        client = PolicyClient(uri(server), TOKEN, deadline_s=5.0)
        assert isinstance(client, InpaintingPolicy)
        found = client.inpaint(seen, running, deterministic=True).actions
        assert torch.equal(found, policy.inpaint(seen, running, deterministic=True).actions)
        assert torch.equal(found[:, 0], running.actions[:, 0])
        bad = Running(running.actions, torch.tensor([3]), torch.tensor([1]))
        with pytest.raises(ValueError, match="0 <= frozen <= overlap"):
            client.inpaint(seen, bad, deterministic=True)


def test_instructions_and_names_may_be_sent_as_text():
    torch.manual_seed(0)
    seen = objects.observations(1)
    policy = FlowConfig(width=16).build(objects.contract())
    policy.fit(objects.observations(64), torch.randn(64, 2))
    expected = policy.act(seen, deterministic=True).actions
    said = {"instruction": "pick the milk and place it in the basket"}
    with PolicyServer(policy, TOKEN, port=0) as server:
        client = PolicyClient(uri(server), TOKEN, deadline_s=5.0, constants=said)
        assert torch.equal(client.act(seen.exclude("instruction"), deterministic=True).actions, expected)
        arrays = {key: value[0].numpy() for key, value in seen.items()}
        with raw(server) as other:
            other.recv()
            other.send(pack(arrays | said | {"object_names": list(objects.NAMES)}))
            np.testing.assert_array_equal(unpack(other.recv())["actions"], expected[0])
    for text, answer in (("é" * 33, "got 66 bytes"), ("a " * 21, "expected at most 20 words, got 21"), (7, "got int")):
        with PolicyServer(policy, TOKEN, port=0) as server, raw(server) as other:
            other.recv()
            other.send(pack(arrays | {"instruction": text}))
            assert answer in other.recv()


@pytest.mark.parametrize(
    "header", [None, "", "Api-Key", "Api-Key wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"]
)
def test_a_wrong_or_missing_token_is_refused(server: PolicyServer, header: str | None):
    with pytest.raises(InvalidStatus) as refused:
        raw(server, header)
    assert refused.value.response.status_code == 401
    assert_serves(server)


def test_either_way_to_send_a_token_is_taken(server: PolicyServer):
    for scheme in ("Bearer", "Api-Key"):
        with raw(server, f"{scheme} {TOKEN}") as connection:
            assert "contract" in unpack(connection.recv())
    with pytest.raises(ConnectionRefusedError, match="401 wrong or missing token"):
        PolicyClient(uri(server), "another token at all")
    with pytest.raises(ValueError, match="at least 16 characters"):
        PolicyServer(mlp(), 15 * "x")
    assert PolicyServer(mlp(), 16 * "x").host == "127.0.0.1"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        *((wrong, "expected deterministic, seed, running and deadline_s") for wrong in ([1], {"code": 1}, None)),
        *(({name: 1.5}, "expected a bool, a number, a map") for name in ("deterministic", "seed", "running")),
        *(({"deadline_s": wrong}, "expected a bool, a number, a map") for wrong in ("1", True)),
        *(({"seed": wrong}, "expected a seed of 0 to 2") for wrong in (-1, 2**63)),
        *(({"deadline_s": wrong}, "deadline_s above 0") for wrong in (0.0, -1, math.nan)),
    ],
)
def test_wrong_options_of_a_request_are_named(message: object, expected: str):
    with pytest.raises(UserError, match=expected):
        Options.parse(message)


def test_options_of_a_request():
    assert Options.parse({}) == Options(True, 0, None, math.inf)
    options = {"deterministic": False, "seed": 2**63 - 1, "running": {"a": 1}, "deadline_s": 1}
    assert Options.parse(options) == Options(**options)


class Evil:
    def __reduce__(self) -> tuple:
        return os.mkdir, (str(Evil.path),)

    path = Path("never")


def array(dtype: str, shape: list, data: bytes) -> bytes:
    return msgpack.packb({"position": {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}})


BAD = {
    "garbage": b"\xc1\xff\x00garbage",
    "empty": b"",
    "pickle": pickle.dumps([1, 2, 3]),
    "no map": msgpack.packb([1, 2]),
    "deep": b"\x91" * 3000 + b"\x01",
    "trailing": pack({"position": np.zeros(3, np.float32)}) + b"\x00",
    "extension": msgpack.packb({"position": msgpack.ExtType(3, b"x")}),
    "claims 4 GB": b"\x81\xa8position\xc6\xff\xff\xff\xff",
    "object array": array("|O", [1], pickle.dumps(Evil())),
    "structured": array("|V8", [1], bytes(8)),
    "complex": array("<c16", [1], bytes(16)),
    "text dtype": array("<U3", [1], bytes(12)),
    "no dtype": array("nonsense", [3], bytes(12)),
    "no syntax": array("(,)f4", [3], bytes(12)),
    "negative shape": array("<f4", [-3], bytes(12)),
    "huge shape": array("<f4", [1 << 40, 1 << 40], bytes(12)),
    "wrong size": array("<f4", [3], bytes(8)),
    "float64": pack({"position": np.zeros(3)}),
    "wrong shape": pack({"position": np.zeros(4, np.float32)}),
    "missing": pack({"velocity": np.zeros(3, np.float32)}),
    "a list": pack({"position": [0.0, 0.0, 0.0]}),
    "options": pack({"position": np.zeros(3, np.float32), OPTIONS: {"seed": "1"}}),
    "deadline": pack({"position": np.zeros(3, np.float32), OPTIONS: {"deadline_s": float("nan")}}),
    "option": pack({"position": np.zeros(3, np.float32), OPTIONS: {"code": 1}}),
    "not a number": pack({"position": np.array([0.0, np.nan, 0.0], np.float32)}),
    "infinity": pack({"position": np.array([0.0, 0.0, -np.inf], np.float32)}),
    "no inpainting": pack({"position": np.zeros(3, np.float32), OPTIONS: {"running": {}}}),
    "text": "position",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_request_is_refused_on_one_line(server: PolicyServer, name: str, tmp_path: Path):
    Evil.path = tmp_path / "executed"
    with raw(server) as other, raw(server) as connection:
        other.recv()
        connection.recv()
        connection.send(BAD[name])
        answer = connection.recv(timeout=5.0)
        assert isinstance(answer, str)
        assert 0 < len(answer) < 300
        assert "\n" not in answer
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=5.0)
        other.send(pack({"position": np.zeros(3, np.float32)}))
        assert unpack(other.recv(timeout=5.0))["actions"].shape == (4, 2)
    assert not Evil.path.exists()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"\x81\xa8position" + tail))
def test_no_bytes_do_more_than_be_refused(data: bytes):
    with contextlib.suppress(ValueError):
        assert isinstance(unpack(data), dict)


def test_an_oversized_frame_is_refused(server: PolicyServer):
    with raw(server) as connection:
        connection.recv()
        with contextlib.suppress(ConnectionClosed):
            connection.send(pack({"position": np.zeros(1 << 20, np.float32)}))
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=5.0)
    assert_serves(server)


def test_too_many_clients_are_refused_until_one_leaves(server: PolicyServer):
    connections = [raw(server) for _ in range(3)]
    with pytest.raises(InvalidStatus) as refused:
        raw(server)
    assert refused.value.response.status_code == 503
    with pytest.raises(ConnectionRefusedError, match="503 too many clients"):
        PolicyClient(uri(server), TOKEN)
    for connection in connections:
        connection.close()
    _eventually(lambda: assert_serves(server))


def test_idle_clients_do_not_lock_others_out_and_lose_nothing():
    limits = ServerLimits(clients=2, spare_s=0.2)
    with PolicyServer(mlp(), TOKEN, port=0, limits=limits) as server:
        first, second = (PolicyClient(uri(server), TOKEN, deadline_s=5.0) for _ in range(2))
        with pytest.raises(InvalidStatus):  # nobody has been idle for long
            raw(server)
        _eventually(lambda: assert_serves(server))
        expected = mlp().act(observation(), deterministic=True).actions
        for client in (second, first, second):
            assert torch.equal(client.act(observation(), deterministic=True).actions, expected)


class Slow(MLPPolicy):
    go = threading.Event()

    def act(self, observation, **options):
        assert Slow.go.wait(60)
        return super().act(observation, **options)


def test_a_client_that_waits_for_its_answer_is_not_idle():
    Slow.go.clear()
    policy = mlp()
    policy.__class__ = Slow
    with PolicyServer(policy, TOKEN, port=0, limits=ServerLimits(clients=1, spare_s=0.01)) as server:
        patient = raw(server)
        patient.recv()
        patient.send(pack({"position": np.zeros(3, np.float32)}))
        _eventually(lambda: math.inf in server._idle_since.values() or _fail(OSError))
        time.sleep(0.05)
        with pytest.raises(InvalidStatus):
            raw(server)
        Slow.go.set()
        assert unpack(patient.recv(timeout=30))["actions"].shape == (4, 2)


class Gated(MLPPolicy):
    """Computes only while `go` is set, and notes the first element of every observation that it computes for."""

    go = threading.Event()
    computed: list[float] = []  # noqa: RUF012 - of one test

    def act(self, observation, **options):
        Gated.computed.append(float(observation["position"][0, 0]))
        assert Gated.go.wait(60)
        return super().act(observation, **options)


@contextlib.contextmanager
def gated(limits: ServerLimits = LIMITS) -> Iterator[PolicyServer]:
    Gated.go.clear()
    Gated.computed = []
    policy = mlp()
    policy.__class__ = Gated
    with PolicyServer(policy, TOKEN, port=0, limits=limits) as server:
        yield server
        Gated.go.set()


def ask(server: PolicyServer, number: float, **options) -> ClientConnection:
    """A connection on which an observation that begins with `number` was sent, and waits while `go` is not set."""
    connection, before = raw(server), list(server._idle_since.values()).count(math.inf)
    connection.recv()
    connection.send(pack({"position": np.full(3, number, np.float32), OPTIONS: options}))
    if not Gated.go.is_set():
        _eventually(lambda: list(server._idle_since.values()).count(math.inf) > before or _fail(OSError))
    return connection


def test_nothing_is_computed_for_clients_that_have_left_and_their_places_are_free():
    with gated(ServerLimits(clients=3)) as server:
        first, *leaving = (ask(server, number) for number in (1.0, 2.0, 3.0))
        leaving[0].close()
        leaving[1].socket.shutdown(socket.SHUT_RDWR)  # as our client after its deadline
        _eventually(lambda: len(server._idle_since) == 1 or _fail(OSError))
        last = ask(server, 4.0)
        Gated.go.set()
        assert all(unpack(each.recv(timeout=30))["actions"].shape == (4, 2) for each in (first, last))
    assert Gated.computed == [1.0, 4.0]


def test_nothing_is_computed_for_a_request_past_its_deadline():
    with gated() as server:
        first, late, last = ask(server, 1.0), ask(server, 2.0, deadline_s=0.05), ask(server, 3.0, deadline_s=60.0)
        time.sleep(0.1)
        Gated.go.set()
        assert unpack(first.recv(timeout=30))["actions"].shape == (4, 2)
        assert unpack(last.recv(timeout=30))["actions"].shape == (4, 2)
        with pytest.raises(ConnectionClosed, match=r"1013.*deadline"):
            late.recv(timeout=30)
    assert Gated.computed == [1.0, 3.0]


def test_a_request_that_cannot_be_answered_in_time_yields_to_one_that_waits():
    with gated() as server:
        server._answerer._durations_s.extend([20.0] * 20)  # a slow policy
        _first, hopeless = ask(server, 1.0), ask(server, 2.0, deadline_s=15.0)
        last = ask(server, 3.0, deadline_s=60.0)
        Gated.go.set()
        assert unpack(last.recv(timeout=30))["actions"].shape == (4, 2)
        with pytest.raises(ConnectionClosed):
            hopeless.recv(timeout=30)
        _eventually(lambda: math.inf not in server._idle_since.values() or _fail(OSError))
        server._answerer._durations_s.extend([20.0] * 20)
        with ask(server, 4.0, deadline_s=15.0) as alone:  # it may be faster than expected, and nobody else waits
            assert unpack(alone.recv(timeout=30))["actions"].shape == (4, 2)
    assert Gated.computed == [1.0, 3.0, 4.0]


def test_our_client_states_its_deadline():
    with gated() as server:
        client = PolicyClient(uri(server), TOKEN, deadline_s=0.3)
        busy = ask(server, 1.0)
        with pytest.raises(TimeoutError):
            client.act(observation(1))
        Gated.go.set()
        busy.recv(timeout=30)
        client.deadline_s = 30.0
        assert client.act(observation(2)).actions.shape == (1, 4, 2)
    assert Gated.computed == pytest.approx([1.0, float(observation(2)["position"][0, 0])])


class Follower:
    """Commands the reading's number, eight times."""

    contract = Contract(
        {"position": TensorSpec((1,))}, TensorSpec((1,), low=(-1e9,), high=(1e9,)), 0.02, horizon=8, executed=4
    )

    def act(self, observation, **_) -> Decision:
        actions = observation["position"].view(1, 1, 1).expand(1, 8, 1)
        return Decision(actions, TensorDict({}, [1]), torch.zeros(1, 1, 1))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_robot_goes_on_after_a_restart_of_its_server_with_nothing_old(asynchronous: bool):
    begun = time.monotonic()
    number = 0

    def run(until, timeout_s: float = 20.0) -> list[float | None]:
        """Commands of the control periods up to the first one for which `until` holds."""
        nonlocal number
        commands = []
        while time.monotonic() < begun + timeout_s:
            number += 1
            now_s = time.monotonic()
            executor.observe(Reading({"position": np.array([number], np.float32)}, now_s, number))
            action = executor.action(time.monotonic())
            commands.append(None if action is None else float(action[0]))
            if until(commands[-1]):
                return commands
            time.sleep(0.02)
        raise AssertionError(f"{executor.reason} after {commands[-5:]}")

    with PolicyServer(Follower(), TOKEN, port=0) as server:
        port = server.port
        client = PolicyClient(uri(server), TOKEN, deadline_s=1.0)
        options = {"execution": Execution.BLEND, "clock": time.monotonic, "asynchronous": asynchronous}
        executor = ChunkExecutor(client, Follower.contract, **options)
        run(lambda command: command is not None)
    run(lambda command: command is None)
    stopped = number
    end_s = time.monotonic() + 0.3
    assert set(run(lambda _: time.monotonic() > end_s)) == {None}
    assert "cannot reach the policy server" in executor.reason
    with PolicyServer(Follower(), TOKEN, port=port):
        *holding, moving = run(lambda command: command is not None)
        assert set(holding) <= {None}
        assert moving > stopped
    executor.close()
    client.close()


def test_integers_out_of_the_contracts_range_are_refused():
    words = TensorSpec((2,), "int64", low=(0, 0), high=(9, 4))

    class Reader:
        contract = Contract({"words": words}, TensorSpec((1,)), 0.1)

        def act(self, observation, **_) -> Decision:
            return Decision(observation["words"].float().sum(-1).view(1, 1, 1), observation, torch.zeros(1, 1, 1))

    with PolicyServer(Reader(), TOKEN, port=0) as server:
        client = PolicyClient(uri(server), TOKEN, deadline_s=5.0)
        for given, wanted in (([9, 4], 13.0), ([0, 0], 0.0)):
            assert client.act(TensorDict({"words": torch.tensor([given])}, [1])).actions == wanted
        for given in ([10, 0], [0, 5], [-1, 0], [1 << 40, 0]):
            with pytest.raises(ValueError, match=r"words: expected integers from \(0, 0\) to \(9, 4\), got"):
                client.act(TensorDict({"words": torch.tensor([given])}, [1]))


def test_a_flood_of_bad_clients_is_one_line_of_each_kind(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    with PolicyServer(mlp(), TOKEN, port=0, limits=ServerLimits(log_s=1.0)) as server:

        def bad() -> None:
            with raw(server) as connection:
                connection.recv()
                connection.send("no request")
                connection.recv()
            with contextlib.suppress(InvalidStatus):
                raw(server, None)
            with socket.create_connection(("127.0.0.1", server.port)) as broken:
                broken.sendall(b"nonsense\r\n\r\n")
                broken.recv(100)

        started = time.monotonic()
        while time.monotonic() < started + 0.5:
            bad()
        told = [record for record in caplog.records if record.name.startswith("real_robot.serving")]
        assert sum("refused ('127.0.0.1'" in record.getMessage() for record in told) == 1
        assert len(told) < 10
        time.sleep(1.0)
        caplog.clear()
        bad()
        assert any("more like this before)" in record.getMessage() for record in caplog.records)


def test_clients_that_stall_lose_their_place():
    with PolicyServer(mlp(), TOKEN, port=0, limits=ServerLimits(1, 0.3, 0.3, 0.5)) as server:
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")  # never finishes its handshake
        silent = raw(server)
        silent.recv()
        _eventually(lambda: assert_serves(server))  # the only place is free again
        assert half.recv(100)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 408")
        half.close()
        with pytest.raises(ConnectionClosed):
            silent.recv(timeout=5.0)


def test_a_client_that_never_reads_loses_its_place():
    contract = Contract({"x": TensorSpec((1,))}, TensorSpec((64,), low=(-1.0,) * 64, high=(1.0,) * 64), 0.1, 2000, 1)
    policy = MLPConfig(hidden=[4]).build(contract)
    policy.fit(TensorDict({"x": torch.randn(9, 1)}, [9]), torch.zeros(9, 64))
    request = pack({"x": np.zeros(1, np.float32)})
    with PolicyServer(policy, TOKEN, port=0, limits=ServerLimits(1, 2.0, 0.3, 60.0)) as server:
        greedy = raw(server)
        greedy.recv()
        frame = bytes([0x82, 0x80 | len(request), 0, 0, 0, 0]) + request  # masked with zeros
        with contextlib.suppress(OSError):
            greedy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.socket.settimeout(2.0)
            for _ in range(200):
                greedy.socket.sendall(frame)

        def another_is_served() -> None:
            PolicyClient(uri(server), TOKEN, deadline_s=5.0).close()

        _eventually(another_is_served)


def test_a_failing_policy_is_reported_and_the_server_lives(caplog: pytest.LogCaptureFixture):
    policy = mlp()
    policy.fitted.fill_(False)
    with PolicyServer(policy, TOKEN, port=0) as server:
        client = PolicyClient(uri(server), TOKEN, deadline_s=5.0)
        with pytest.raises(ValueError, match="refuses: the policy failed; its server's log says why"):
            client.act(observation(), deterministic=True)
        assert "no normalisation statistics" in caplog.text
        policy.fitted.fill_(True)
        assert client.act(observation(), deterministic=True).actions.shape == (1, 4, 2)


def test_what_is_not_a_number_is_refused_alone_and_no_such_action_is_sent(server: PolicyServer):
    client = PolicyClient(uri(server), TOKEN, deadline_s=5.0)
    for value in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="position: expected finite numbers, got infinity or not a number"):
            client.act(observation().apply(lambda x, value=value: x.index_fill(1, torch.tensor([1]), value)))
        assert torch.equal(client.act(observation()).actions, mlp().act(observation(), deterministic=True).actions)
    client.close()
    diverged = mlp()
    diverged.actor[0].bias.data.fill_(torch.nan)
    wanted = "the policy's actions are not finite, though its observation is"
    with PolicyServer(diverged, TOKEN, port=0) as broken, pytest.raises(ValueError, match=wanted):
        PolicyClient(uri(broken), TOKEN, deadline_s=5.0).act(observation())


@pytest.mark.parametrize("package", ["msgpack", "websockets.asyncio.server"])
def test_without_its_extra_it_does_not_begin_to_listen(package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    wanted = r"is not installed: pip install 'embodied-rl\[robot\]'"
    with pytest.raises(ValueError, match=wanted), PolicyServer(mlp(), TOKEN, port=0):
        pytest.fail("it listens")


def test_a_client_outlives_its_server():
    with PolicyServer(mlp(), TOKEN, port=0) as server:
        port = server.port
        client = PolicyClient(uri(server), TOKEN, deadline_s=5.0)
        before = client.act(observation(), deterministic=True).actions
    with pytest.raises(ConnectionError, match="cannot reach the policy server ws://"):
        client.act(observation(), deterministic=True)
    with PolicyServer(mlp(), TOKEN, port=port):
        assert torch.equal(client.act(observation(), deterministic=True).actions, before)
    other = MLPConfig().build(Contract({"position": TensorSpec((3,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), 0.1))
    with PolicyServer(other, TOKEN, port=port), pytest.raises(ValueError, match="another contract; connect again"):
        client.act(observation(), deterministic=True)


def test_a_late_answer_is_never_taken_for_the_next_one():
    greeting = pack({"contract": CONTRACT.to_dict()})
    delays = iter([0.6, 0.0])

    def session(connection) -> None:
        connection.send(greeting)
        for request in connection:
            seen = unpack(request)["position"]
            time.sleep(next(delays))
            with contextlib.suppress(ConnectionClosed):
                connection.send(pack({"actions": np.full((4, 2), seen[0], np.float32)}))

    with _openpi_like(session) as port:
        client = PolicyClient(f"ws://127.0.0.1:{port}", TOKEN, deadline_s=0.3)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
            client.act(observation(1), deterministic=True)
        assert time.monotonic() - started < 0.6
        time.sleep(0.5)
        actions = client.act(observation(2), deterministic=True).actions
        assert torch.equal(actions, observation(2)["position"][0, 0].expand(1, 4, 2))
        client.close()


def test_a_server_that_never_reads_cannot_hold_the_loop():
    contract = Contract({"camera": TensorSpec((2048, 2048, 3), "uint8")}, TensorSpec((1,)), 0.1)

    def session(connection) -> None:
        connection.send(pack({"contract": contract.to_dict()}))
        time.sleep(3.0)

    with _openpi_like(session, max_queue=1) as port:
        client = PolicyClient(f"ws://127.0.0.1:{port}", TOKEN, deadline_s=0.5)
        image = TensorDict({"camera": torch.zeros(1, 2048, 2048, 3, dtype=torch.uint8)}, [1])
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="did not answer"):
            client.act(image, deterministic=True)
        assert time.monotonic() - started < 2.0


def test_servers_that_do_not_tell_their_contract_are_given_one():
    seen: list[dict] = []

    def session(connection) -> None:
        connection.send(pack({}))  # as openpi greets
        for request in connection:
            seen.append(unpack(request))
            connection.send(pack({"actions": np.zeros((4, 2)), "server_timing": {"infer_ms": 1.0}}))

    with _openpi_like(session) as port:
        where = f"ws://127.0.0.1:{port}"
        with pytest.raises(ValueError, match="does not send the contract"):
            PolicyClient(where, TOKEN)
        client = PolicyClient(where, TOKEN, contract=CONTRACT, constants={"prompt": "fold the towel"}, deadline_s=5.0)
        decision = client.act(observation(), deterministic=True)
        assert (decision.actions.shape, decision.actions.dtype) == ((1, 4, 2), torch.float32)
        assert seen[0].keys() == {"prompt", "position"}
        assert seen[0]["prompt"] == "fold the towel"
        assert np.array_equal(seen[0]["position"], observation()["position"][0])
        client.close()


@pytest.mark.parametrize("where", ["localhost:8000", "http://localhost:8000", "ws://", "ws://localhost:port"])
def test_what_is_no_address_of_a_server_is_refused(where: str):
    with pytest.raises(UserError, match=f"^expected a policy server as ws://host:port, got '{where}'$"):
        PolicyClient(where, TOKEN)


def test_what_travels_comes_back():
    message = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.float32(0.1),
        "c": {"d": [1, None, "text", 2.5, True]},
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(7),
        "flags": np.array([True, False]),
    }
    found = unpack(pack(message))
    assert found["c"] == message["c"]
    for key in ("a", "b", "empty", "scalar", "flags"):
        assert found[key].dtype == message[key].dtype
        assert np.array_equal(found[key], message[key])
    found["a"][0, 0] = 9  # writable
    for refused in (np.array([object()]), np.array([1j]), object(), np.array(["text"])):
        with pytest.raises(ValueError, match="expected"):
            pack({"x": refused})


@contextlib.contextmanager
def _openpi_like(session, **options) -> Iterator[int]:
    with serve(session, "127.0.0.1", 0, compression=None, max_size=None, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join()


def _fail(error: type[Exception]) -> None:
    raise error


def _eventually(check, timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while True:
        try:
            return check()
        except (OSError, InvalidStatus):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
