"""What is said and seen comes back from everywhere: rollouts, recordings, datasets, checkpoints, the server, ROS."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import Decision
from embodied.rollout.rollout import Collector
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.text import decode, encode, encode_as, text_spec
from policies.mlp import MLPConfig
from real_robot.recording import lerobot_dataset
from real_robot.recording.data_sets import data_set_reading
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording, Tick
from real_robot.robots.robot import Reading
from real_robot.ros2.messages import codecs
from real_robot.safety.safety import State, Verdict
from real_robot.serving.policy_client import PolicyClient
from real_robot.serving.policy_server import PolicyServer
from tests.embodied.reach import Reach
from tests.real_robot.ros2.messages.definitions import on_the_wire, types

TOKEN = "a token of sixteen characters or more"
SAID = ("put the milk into the basket", "stell die große Schüssel neben den Käse", "把牛奶放进篮子里。谢谢 🥛")
THINGS = ["milk_1", "Käse", "篮子"]
PICTURE = TensorSpec((4, 6, 3), "uint8", frame="world", names=("red", "green", "blue"), camera="front")
SPECS = {"instruction": text_spec(64), "things": text_spec(16, -1), "front_image": PICTURE}


class Spoken(Reach):
    """Reach with an instruction, in another language per environment, and camera images."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, executed=1, horizon=1)
        self.contract = replace(self.contract, observation=self.contract.observation | SPECS)

    def _observation(self) -> TensorDict:
        said = [seen(env) for env in range(self.num_envs)]
        stacked = {key: torch.from_numpy(np.stack([each[key] for each in said])) for key in SPECS}
        return super()._observation().update(stacked)


def seen(number: int) -> dict[str, np.ndarray]:
    picture = np.random.default_rng(number).integers(0, 256, PICTURE.shape, np.uint8)
    return {
        "instruction": encode(SAID[number % 3], 64),
        "things": encode_as(THINGS, (-1, 16)),
        "front_image": picture,
    }


def check(found: TensorDict | dict, number: int) -> None:
    """That one observation is `seen`."""
    for key, value in seen(number).items():
        array = np.asarray(found[key])
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, value)
    assert decode(np.asarray(found["instruction"])) == SAID[number % 3]
    assert [decode(thing) for thing in np.asarray(found["things"])] == THINGS


def policy(contract: Contract):
    torch.manual_seed(0)
    made = MLPConfig(hidden=[8]).build(contract)
    made.fit(TensorDict({"position": torch.randn(9, 1), "task": torch.randn(9, 1)}, [9]), torch.zeros(9, 1))
    return made


def test_a_rollout_and_a_checkpoint_keep_what_was_said(tmp_path: Path) -> None:
    env = Spoken(3)
    collector = Collector(env, policy(env.contract), torch.Generator().manual_seed(0))
    rollout = collector.collect(4)
    for step, number in ((0, 0), (3, 1), (2, 2)):
        check(rollout.observation[step, number], number)
    state = {"collector": collector.state_dict()}
    weights = dict(collector.policy.state_dict())
    checkpoint.save(tmp_path, Checkpoint(weights, env.contract, state=state))
    saved = checkpoint.load(tmp_path)
    assert saved.contract == env.contract
    assert saved.contract.observation["front_image"].camera == "front"
    saved.contract.check(env.contract)
    check(saved.state["collector"]["observation"][2], 2)


def test_a_recording_and_a_dataset_keep_what_was_said(tmp_path: Path) -> None:
    contract = Spoken(1).contract
    with Recorder(tmp_path / "a.mcap", contract) as recorder:
        for number in range(3):
            recorder.begin_episode(SAID[number])
            observation = seen(number) | {"position": np.zeros(1, np.float32), "task": np.zeros(1, np.float32)}
            reading = Reading(observation, 0.0, number)
            recorder.write(0.0, reading, np.zeros(1), Verdict(State.ACTIVE, np.zeros(1)))
    recording = Recording(tmp_path / "a.mcap")
    ticks = [item for item in recording if isinstance(item, Tick)]
    for number, tick in enumerate(ticks):
        check(tick.reading.observation, number)
    assert recording.contract == contract
    lerobot_dataset.write([recording], tmp_path / "data")
    info = json.loads((tmp_path / "data/meta/info.json").read_text())
    assert "observation.instruction" not in info["features"]  # it is the frame's task, as LeRobot has it
    assert "observation.things" in info["features"]
    table = pq.read_table(tmp_path / "data/meta/tasks.parquet").to_pydict()
    assert table == {"task_index": [0, 1, 2], "__index_level_0__": list(SAID)}
    episodes = list(data_set_reading.read(tmp_path / "data", contract))
    for number, episode in enumerate(episodes):
        first = episode.chunks(torch.zeros(1).long(), 1)["observation"][0]
        found = {key: first[key].numpy() for key in SPECS}
        video, found["front_image"] = found["front_image"], seen(number)["front_image"]
        assert video.shape == PICTURE.shape  # the only thing that loses anything: H.264
        check(found, number)


def test_an_instruction_is_read_from_the_tasks_of_who_has_no_text(tmp_path: Path) -> None:
    silent = replace(Spoken(1).contract, observation={"joint_position": TensorSpec((2,), names=("elbow", "wrist"))})
    with Recorder(tmp_path / "a.mcap", silent) as recorder:
        for number in range(3):
            recorder.begin_episode(SAID[number])
            reading = Reading({"joint_position": np.zeros(2, np.float32)}, 0.0, number)
            recorder.write(0.0, reading, np.zeros(1), Verdict(State.ACTIVE, np.zeros(1)))
    lerobot_dataset.write([Recording(tmp_path / "a.mcap")], tmp_path / "data")
    (tmp_path / "data/meta/contract.json").unlink()  # as others write them
    spoken = replace(silent, observation=silent.observation | {"instruction": text_spec(64)})
    episodes = data_set_reading.read(tmp_path / "data", spoken)
    assert [decode(episode.observation["instruction"][0].numpy()) for episode in episodes] == list(SAID)
    lines = [json.dumps({"task_index": number, "task": said}) for number, said in enumerate(SAID)]
    (tmp_path / "data/meta/tasks.jsonl").write_text("\n".join(lines) + "\n")  # as before v3
    (tmp_path / "data/meta/tasks.parquet").unlink()
    again = data_set_reading.read(tmp_path / "data", spoken)
    assert [decode(episode.observation["instruction"][0].numpy()) for episode in again] == list(SAID)
    short = replace(silent, observation=silent.observation | {"instruction": text_spec(20)})
    with pytest.raises(UserError, match="expected text of at most 20 bytes of UTF-8"):
        list(data_set_reading.read(tmp_path / "data", short))


class Listener:
    """Commands nothing and records its observations."""

    def __init__(self, contract: Contract) -> None:
        self.contract, self.heard = contract, []

    def act(self, observation: TensorDict, *, deterministic: bool = False, generator=None) -> Decision:
        self.heard.append(observation)
        return Decision(torch.zeros(1, 1, 1), TensorDict({}, [1]), torch.zeros(1, 1, 1))


@pytest.mark.parametrize("as_text", [False, True])
def test_a_server_hears_what_was_said(as_text: bool) -> None:
    env = Spoken(3)
    observation = env.reset()
    listener = Listener(env.contract)
    with PolicyServer(listener, TOKEN, port=0) as server:
        for number in range(3):
            constants = {"instruction": SAID[number]} if as_text else {}
            client = PolicyClient(f"ws://127.0.0.1:{server.port}", TOKEN, deadline_s=5.0, constants=constants)
            assert client.contract == env.contract
            client.act(observation[number : number + 1].exclude(*constants))
            client.close()
    for number, heard in enumerate(listener.heard):
        check(heard[0], number)


def test_ros_carries_what_was_said() -> None:
    codec = codecs.LabelledArrays(SPECS)
    for number in range(3):
        check(codec.decode(on_the_wire(codec.encode(seen(number), types, 1.5))), number)


@pytest.mark.parametrize(
    ("key", "spec", "message"),
    [
        ("front_image", replace(PICTURE, camera="wrist"), "'front_image' camera: expected 'front', got 'wrist'"),
        ("front_image", replace(PICTURE, frame="base"), "'front_image' frame: expected 'world', got 'base'"),
        ("front_image", TensorSpec((4, 6, 3)), "'front_image' dtype: expected 'uint8', got 'float32'"),
        ("instruction", text_spec(32), r"'instruction' shape: expected \(64,\), got \(32,\)"),
        ("instruction", TensorSpec((64,), "uint8"), "'instruction' unit: expected 'utf-8', got ''"),
        ("front_image", replace(PICTURE, names=("blue", "green", "red")), "'front_image' order: expected"),
    ],
)
def test_another_camera_or_text_is_refused_in_words(key: str, spec: TensorSpec, message: str) -> None:
    ours = Spoken(1).contract
    theirs = replace(ours, observation=ours.observation | {key: spec})
    with pytest.raises(UserError, match=message):
        ours.check(theirs)
    again = Contract.from_dict(json.loads(theirs.to_json()))
    assert again == theirs


def test_a_camera_takes_pictures() -> None:
    with pytest.raises(UserError, match=r"camera 'front': expected pictures, uint8 \(height, width, 3\)"):
        TensorSpec((3, 4, 6), "uint8", camera="front")
