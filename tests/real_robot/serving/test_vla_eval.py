"""vla-eval's protocol over real sockets: by its own client where it is installed, and by one written from its facts."""

import io
import time

import anyio
import msgpack
import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from embodied.contract import Contract, TensorSpec
from embodied.rollout.memory import Memory
from embodied.text import encode, text_spec
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from real_robot.serving.answerer import Answerer
from real_robot.serving.policy_client import PolicyClient
from real_robot.serving.policy_server import PolicyServer, ServerLimits
from real_robot.serving.vla_eval import VlaEvalSession
from sims.libero.observation import contract as libero_contract
from sims.libero.published import Published, gripper_commands

TOKEN = "correct-horse-battery"
CONTRACT = Contract(
    {"position": TensorSpec((3,), unit="m"), "wind": TensorSpec((2,), privileged=True)},
    TensorSpec((2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    0.02,
    horizon=4,
    executed=2,
)


def mlp() -> MLPPolicy:
    torch.manual_seed(0)
    policy = MLPConfig().build(CONTRACT)
    policy.fit(TensorDict({"position": torch.randn(9, 3), "wind": torch.randn(9, 2)}, [9]), torch.zeros(9, 2))
    return policy


def uri(server: PolicyServer, token: str = TOKEN) -> str:
    return f"ws://vla-eval:{token}@127.0.0.1:{server.port}/vla-eval"


class Client:
    """A client as the protocol describes it; arrays are encoded by hand."""

    def __init__(self, server: PolicyServer) -> None:
        self.connection: ClientConnection = connect(
            uri(server), compression=None, max_size=None, proxy=None
        ).__enter__()
        self.seq = 0

    def send(self, kind: str, payload: dict) -> None:
        self.seq += 1
        message = {"type": kind, "payload": payload, "seq": self.seq, "timestamp": time.time()}
        self.connection.send(msgpack.packb(message, use_bin_type=True))

    def ask(self, kind: str, payload: dict) -> tuple[str, dict]:
        self.send(kind, payload)
        reply = msgpack.unpackb(self.connection.recv(timeout=20.0), raw=False)
        assert reply.keys() == {"type", "payload", "seq", "timestamp"}
        assert reply["seq"] == self.seq
        return reply["type"], reply["payload"]

    def act(self, **payload: object) -> np.ndarray:
        kind, reply = self.ask("observation", payload)
        assert kind == "action", reply
        encoded = reply["actions"]
        assert encoded["__ndarray__"] is True
        return np.frombuffer(encoded["data"], encoded["dtype"]).reshape(encoded["shape"])


def array(values: object, dtype: str = "float64") -> dict:
    values = np.asarray(values, dtype)
    return {"__ndarray__": True, "data": values.tobytes(), "dtype": values.dtype.str, "shape": list(values.shape)}


def picture(pixels: np.ndarray, form: str = "png") -> dict:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return {"__image__": True, "format": form, "data": file.getvalue(), "shape": list(pixels.shape)}


def chunk(policy: MLPPolicy, position: list[float]) -> np.ndarray:
    return policy.act(TensorDict({"position": torch.tensor([position])}, [1]), deterministic=True).actions[0].numpy()


def test_chunks_are_sent_action_by_action_and_begin_anew_with_each_episode():
    policy = mlp()
    with PolicyServer(policy, TOKEN, port=0) as server:
        client = Client(server)
        kind, hello = client.ask("hello", {"harness_version": "0.8.0", "protocol_version": 1})
        assert kind == "hello"
        assert hello["protocol_version"] == 1
        assert isinstance(hello["harness_version"], str)
        assert hello["model_server"] == "MLPPolicy"
        first, second = chunk(policy, [0.1, 0.2, 0.3]), chunk(policy, [1.0, -2.0, 3.0])
        client.send("episode_start", {"task": {"name": "a"}})
        for expected, position in ((first[0], [0.1, 0.2, 0.3]), (first[1], [9.0] * 3), (second[0], [1.0, -2.0, 3.0])):
            np.testing.assert_array_equal(client.act(position=array(position)), expected)  # two of four are executed
        client.send("episode_end", {"success": True})
        client.send("episode_start", {"task": {"name": "b"}})
        np.testing.assert_array_equal(client.act(position=array([0.1, 0.2, 0.3])), first[0])
        # other clients at the same port
        other = PolicyClient(f"ws://127.0.0.1:{server.port}", TOKEN, deadline_s=20.0)
        seen = TensorDict({"position": torch.tensor([[0.1, 0.2, 0.3]])}, [1])
        np.testing.assert_array_equal(other.act(seen).actions[0].numpy(), first)


def test_memory_begins_with_the_episode_and_follows_the_chunks():
    torch.manual_seed(0)
    policy = RecurrentConfig(memory=6).build(CONTRACT)
    policy.fit(TensorDict({"position": torch.randn(9, 3), "wind": torch.randn(9, 2)}, [9]), torch.zeros(9, 2))
    torch.nn.init.normal_(policy.gru.initial)
    with PolicyServer(policy, TOKEN, port=0) as server:
        client = Client(server)
        for _ in range(2):
            client.send("episode_start", {})
            memory = Memory(policy, 1)
            for step in range(3):
                seen = TensorDict({"position": torch.full((1, 3), float(step))}, [1])
                decision = policy.act(memory.with_observation(seen), deterministic=True)
                memory.keep([decision])
                for expected in decision.actions[0, :2].numpy():
                    np.testing.assert_array_equal(client.act(position=array([float(step)] * 3)), expected)


def test_mistakes_are_answered_in_one_line_and_the_connection_stays():
    with PolicyServer(mlp(), TOKEN, port=0) as server:
        client = Client(server)
        before = client.ask("observation", {"position": array([0.0] * 3)})
        client.send("episode_start", {})
        mistakes = {
            "expected finite numbers": client.ask("observation", {"position": array([0.0, np.nan, 0.0])}),
            r"position: expected float32 \(3,\)": client.ask("observation", {"position": array([0.0] * 4)}),
            "position: expected an array": client.ask("observation", {}),
            "unknown message type 'dance'": client.ask("dance", {}),
            "protocol_version 1, got 2": client.ask("hello", {"protocol_version": 2}),
            "expected episode_start": before,
        }
        for expected, (kind, payload) in mistakes.items():
            assert kind == "error"
            assert "\n" not in payload["error"]
            with pytest.raises(ValueError, match=expected):
                raise ValueError(payload["error"])
        assert client.act(position=array([0.0] * 3)).shape == (2,)


@pytest.mark.parametrize("token", ["wrong", "", "correct-horse"])
def test_the_token_is_the_password_of_the_address(token: str):
    with PolicyServer(mlp(), TOKEN, port=0) as server:
        with pytest.raises(InvalidStatus) as refused:
            connect(uri(server, token), proxy=None).__enter__()
        assert refused.value.response.status_code == 401


BIG = {"__image__": True, "format": "png", "shape": [2, 2, 3], "data": picture(np.zeros((4, 4, 3), np.uint8))["data"]}


@pytest.mark.parametrize(
    "request_",
    [
        "text",
        b"\xc1garbage",
        msgpack.packb({"type": "observation", "payload": {}}),
        msgpack.packb({"type": "hello", "payload": [], "seq": 1}),
        msgpack.packb({"type": "hello", "payload": {"a": {"__ndarray__": True, "dtype": "|O"}}, "seq": 1}),
        msgpack.packb({"type": "hello", "payload": {"a": array([1.0]) | {"dtype": "|O"}}, "seq": 1}),
        msgpack.packb({"type": "hello", "payload": {"a": array([1.0]) | {"shape": [9]}}, "seq": 1}),
        msgpack.packb({"type": "hello", "payload": {"a": BIG}, "seq": 1}),
        msgpack.packb({"type": "hello", "payload": {"a": BIG | {"data": b"GIF89a"}}, "seq": 1}),
        msgpack.packb({"type": "hello", "payload": {"a": BIG | {"shape": "2"}}, "seq": 1}),
    ],
)
def test_other_bytes_are_refused_in_one_line(request_: bytes | str):
    session = VlaEvalSession(Answerer(mlp(), "cpu"), lambda: None)
    answer = session.answer(request_, 0.0, lambda: False)
    assert isinstance(answer, str)
    assert 0 < len(answer) < 300
    assert "log says why" not in answer
    assert "\n" not in answer


class Recorder:
    """Keeps observations, in place of a policy; its chunk counts the calls."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.seen: list[TensorDict] = []

    def act(self, observation: TensorDict, **_: object):
        self.seen.append(observation)
        actions = torch.zeros(1, self.contract.horizon, *self.contract.action.shape)
        actions[..., -1] = torch.tensor([1.0, 1.0, -1.0])[: self.contract.horizon]
        return type("Decision", (), {"actions": actions, "sample": {}})()


def observe(session: VlaEvalSession, payload: dict, kind: str = "observation") -> dict:
    reply = session.answer(msgpack.packb({"type": kind, "payload": payload, "seq": 1}), 0.0, lambda: False)
    return msgpack.unpackb(reply) if reply else {}


def test_libero_is_observed_as_in_training():
    policy = Recorder(libero_contract(3, 3, image_size=2, joints=False))
    session = VlaEvalSession(Answerer(policy, "cpu"), lambda: Published([]))
    hello = observe(session, {"protocol_version": 1}, "hello")
    assert hello["payload"]["observation_params"] == {"send_state": True, "send_wrist_image": True}
    observe(session, {}, "episode_start")
    rng = np.random.default_rng(0)
    upright = rng.integers(0, 256, (2, 2, 3), np.uint8)
    sent = np.repeat(np.repeat(upright, 2, 0), 2, 1)[:, ::-1]  # twice as large, and left and right exchanged
    images = {"agentview": picture(np.ascontiguousarray(sent)), "wrist": picture(np.zeros((2, 2, 3), np.uint8))}
    quarter = np.pi / 2
    state = [0.1, 0.2, 0.3, 0.0, 0.0, quarter, 0.04, -0.04]
    payload = {"images": images, "states": array(state), "task_description": "pick up the milk"}
    for _ in range(4):
        reply = observe(session, payload)
        assert reply["type"] == "action", reply
    first, second = policy.seen
    np.testing.assert_array_equal(first["agentview_image"][0].numpy(), upright)
    assert first["end_effector_position"][0].tolist() == pytest.approx([0.1, 0.2, 0.3])
    # a quarter turn about z, times the quarter turn back between the hand and the end effector, is none
    assert first["end_effector_rotation"][0].tolist() == pytest.approx([1, 0, 0, 0, 1, 0], abs=1e-6)
    assert first["gripper_position"][0].tolist() == pytest.approx([0.04, -0.04])
    assert first["gripper_command"].item() == -1.0
    assert second["gripper_command"].item() == pytest.approx(gripper_commands(np.array([1, 1, -1, 0]))[-1].item())
    assert bytes(first["instruction"][0].numpy()).rstrip(b"\0") == b"pick up the milk"
    observe(session, {}, "episode_end")
    assert "episode_start" in observe(session, payload)["payload"]["error"]
    observe(session, {}, "episode_start")
    assert "agentview_image: expected" in observe(session, payload | {"images": {}})["payload"]["error"]
    for _ in range(2):  # the first of these episodes is broken off
        observe(session, {}, "episode_start")
        observe(session, payload)
        assert policy.seen[-1]["gripper_command"].item() == -1.0


def test_a_policy_of_published_observations_sees_pictures_and_state_as_they_are_sent():
    convention = Published([], mirrored=False)
    own = libero_contract(3, 3, image_size=2, joints=False)
    policy = Recorder(convention.contract(own))
    session = VlaEvalSession(Answerer(policy, "cpu"), lambda: convention)
    observe(session, {}, "episode_start")
    sent = np.random.default_rng(0).integers(0, 256, (2, 2, 3), np.uint8)
    images = {"agentview": picture(sent), "wrist": picture(sent)}
    state = [0.1, 0.2, 0.3, 3.0, 0.0, 0.1, 0.04, -0.04]
    reply = observe(session, {"images": images, "states": array(state), "task_description": "pick up the milk"})
    assert reply["type"] == "action", reply
    np.testing.assert_array_equal(policy.seen[0]["agentview_image"][0].numpy(), sent)
    np.testing.assert_array_equal(policy.seen[0]["wrist_image"][0].numpy(), sent)
    assert policy.seen[0]["state"][0].tolist() == pytest.approx(state)


def test_what_a_benchmark_does_not_observe_is_named():
    session = VlaEvalSession(Answerer(Recorder(libero_contract(3, 3, image_size=2)), "cpu"), lambda: Published([]))
    observe(session, {}, "episode_start")
    error = observe(session, {"states": array([0.0] * 8)})["payload"]["error"]
    assert "joint_position" in error or "agentview_image" in error


def test_pictures_are_found_by_camera_and_texts_by_the_task():
    specs = {
        "front": TensorSpec((4, 4, 3), "uint8", camera="agentview"),
        "words": text_spec(16),
        "position": TensorSpec((1,)),
    }
    policy = Recorder(Contract(specs, TensorSpec((2,)), 0.1, horizon=1, executed=1))
    session = VlaEvalSession(Answerer(policy, "cpu"), lambda: None)
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    observe(session, {}, "episode_start")
    for images in ({"front": picture(pixels)}, {"agentview": array(pixels, "uint8")}):
        reply = observe(session, {"images": images, "task_description": "go", "position": array([2.0])})
        assert reply["type"] == "action", reply
        np.testing.assert_array_equal(policy.seen[-1]["front"][0].numpy(), pixels)
    np.testing.assert_array_equal(policy.seen[-1]["words"][0].numpy(), encode("go", 16))
    too_large = observe(session, {"images": {"front": picture(np.zeros((6, 6, 3), np.uint8))}})
    assert "front: expected pictures of 4x4, or of a multiple, got 6x6" in too_large["payload"]["error"]


def test_its_own_client_runs_episodes():
    connection = pytest.importorskip("vla_eval.connection")
    policy = mlp()

    async def episodes(address: str) -> list[np.ndarray]:
        actions = []
        async with connection.Connection(address) as client:
            assert client.server_info["model_server"] == "MLPPolicy"
            for _ in range(2):
                await client.start_episode({"task": {"name": "a"}})
                positions = ([0.1, 0.2, 0.3], [0.0] * 3, [1.0, -2.0, 3.0])
                actions += [(await client.act({"position": np.array(position)}))["actions"] for position in positions]
                await client.end_episode({"metrics": {"success": True}})
            await client.start_episode({})
            with pytest.raises(RuntimeError, match="position: expected finite numbers"):
                await client.act({"position": np.full(3, np.nan)})
        return actions

    with PolicyServer(policy, TOKEN, port=0, limits=ServerLimits(clients=1)) as server:
        actions = anyio.run(episodes, uri(server))
    first, second = chunk(policy, [0.1, 0.2, 0.3]), chunk(policy, [1.0, -2.0, 3.0])
    np.testing.assert_array_equal(np.stack(actions), np.stack([first[0], first[1], second[0]] * 2))
