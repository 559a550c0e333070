"""A recording replayed through the policy: equal actions bit for bit, and differences are found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.contract import Contract, TensorSpec
from embodied.execution.chunking import Execution, Running
from embodied.policy import Policy
from embodied.rollout.memory import Memory
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig, RecurrentPolicy
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Gap, Recording, Tick
from real_robot.recording.replay import replay
from real_robot.robots.control_loop import Controller
from real_robot.robots.robot import Array, Reading, SimulatedRobot
from real_robot.safety.limits import Limits
from real_robot.safety.safety import Safety, State, Verdict
from real_robot.serving.chunk_executor import ChunkExecutor
from tests.embodied.reach import Reach
from tests.policies import observations as objects

STEPS, EPISODES = 12, 3


def recurrent() -> RecurrentPolicy:
    torch.manual_seed(0)
    env = Reach(1, executed=1, horizon=4, tasks=1)
    policy = RecurrentConfig(memory=8).build(env.contract)
    observation = TensorDict({"position": torch.randn(64, 1), "task": torch.zeros(64, 1)}, batch_size=[64])
    policy.fit(observation, torch.zeros(64, 1))
    torch.nn.init.normal_(policy.gru.initial)
    return policy


class Chunks:
    """The simplest executor: K actions of a chunk, then the next one."""

    def __init__(self, policy: Policy, executed: int, sampled: bool) -> None:
        self.policy, self.executed, self.sampled = policy, executed, sampled
        self.memory = Memory(policy, 1)
        self.generator = seeding.generator(3, "robot")
        self.reset()

    def reset(self) -> None:
        self.memory.restart(None)
        self.chunk: Array | None = None
        self.phase = 0

    def observe(self, reading: Reading) -> None:
        if self.chunk is not None and self.phase < self.executed:
            return
        batch = {key: torch.from_numpy(value).unsqueeze(0) for key, value in reading.observation.items()}
        observation = self.memory.with_observation(TensorDict(batch, batch_size=[1]))
        decision = self.policy.act(observation, deterministic=not self.sampled, generator=self.generator)
        self.memory.keep([decision])
        self.chunk, self.phase = decision.actions[0].numpy(), 0

    def action(self, now_s: float) -> Array | None:
        assert self.chunk is not None
        self.phase += 1
        return self.chunk[self.phase - 1]


def fly(path: Path, policy: Policy, executed: int, *, sampled: bool, gap_in: int | None = None) -> None:
    robot = SimulatedRobot(Reach(1, executed=1, horizon=4, tasks=1, step_limit=99), lambda _: np.zeros(1))
    with Recorder(path, robot.contract, clock=robot.clock) as recorder:
        executor = Chunks(recorder.watch(policy), executed, sampled)
        for episode in range(EPISODES):
            robot.reset()
            recorder.begin_episode(f"episode {episode}")
            executor.reset()
            for step in range(STEPS):
                reading = robot.read()
                assert reading is not None
                executor.observe(reading)
                now_s = robot.clock()
                asked = executor.action(now_s)
                robot.write(asked)
                recorder.write(now_s, reading, asked, Verdict(State.ACTIVE, asked))
                if (episode, step) == (gap_in, 5):
                    recorder._put(Gap(1))


@pytest.mark.parametrize("executed", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_same_actions_bit_for_bit(tmp_path: Path, executed: int, sampled: bool):
    policy = recurrent()
    fly(tmp_path / "a.mcap", policy, executed, sampled=sampled)
    recording = Recording(tmp_path / "a.mcap")
    result = replay(recording, policy)
    assert result.exact
    assert (result.compared, result.largest_difference) == (EPISODES * STEPS // executed, 0.0)
    assert (
        len({item.proposed_action.tobytes() for item in recording if isinstance(item, Tick)}) > STEPS
    )  # memory and noise act


@pytest.mark.parametrize("latency_s", [0.0, 0.15])
def test_decisions_of_a_controlled_robot_are_replayed(tmp_path: Path, latency_s: float):
    """Controller, executor and safety as on a robot: chunks blended where they overlap, limits, memory."""
    policy = recurrent()
    policy.contract = replace(policy.contract, executed=2)
    robot = SimulatedRobot(Reach(1, executed=1, horizon=4, tasks=1, step_limit=99), lambda _: np.zeros(1))
    options = {"execution": Execution.BLEND, "asynchronous": False, "latency_s": latency_s}
    with Recorder(tmp_path / "a.mcap", robot.contract, clock=robot.clock) as recorder:
        executor = ChunkExecutor(recorder.watch(policy), robot.contract, clock=robot.clock, **options)
        safety = Safety(robot, Limits(observation_timeout_s=1.0), robot.clock)
        controller = Controller(robot, executor, safety, robot.clock, recorder.write)
        for _ in range(EPISODES):
            robot.reset()
            recorder.begin_episode()
            executor.reset()
            for _ in range(STEPS):
                controller.tick()
    recording = Recording(tmp_path / "a.mcap")
    assert replay(recording, policy).exact
    asked = [item.proposed_action for item in recording if isinstance(item, Tick) and item.proposed_action is not None]
    assert len({action.tobytes() for action in asked}) > STEPS


@pytest.mark.parametrize("part", ["actor.0.weight", "gru.initial"])
def test_one_bit_of_a_weight_is_found(tmp_path: Path, part: str):
    policy = recurrent()
    fly(tmp_path / "a.mcap", policy, 3, sampled=False)
    with torch.no_grad():
        weight = policy.get_parameter(part).view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    result = replay(Recording(tmp_path / "a.mcap"), policy)
    assert not result.exact
    assert 0.0 < result.largest_difference < 1e-5


def test_what_follows_a_gap_is_not_compared(tmp_path: Path):
    policy = recurrent()
    fly(tmp_path / "a.mcap", policy, 3, sampled=True, gap_in=1)
    result = replay(Recording(tmp_path / "a.mcap"), policy)
    assert result.compared == result.identical == EPISODES * STEPS // 3 - result.skipped
    assert result.skipped == 2
    assert not result.exact


def test_continued_chunks_of_a_flow_policy_are_replayed(tmp_path: Path):
    torch.manual_seed(0)
    contract = objects.contract()
    policy = FlowConfig(width=16, turn_rad=0.0).build(contract)
    policy.fit(objects.observations(64), torch.randn(64, 2))
    with Recorder(tmp_path / "a.mcap", contract) as recorder:
        watched = recorder.watch(policy)
        recorder.begin_episode()
        generator = torch.Generator().manual_seed(1)
        first = watched.act(objects.observations(1, 1), deterministic=False, generator=generator)
        running = Running(first.actions, torch.tensor([1]), torch.tensor([3]))
        second = watched.inpaint(objects.observations(1, 2), running, deterministic=False, generator=generator)
    recording = Recording(tmp_path / "a.mcap")
    assert torch.equal(first.actions[:, 0], second.actions[:, 0])
    assert replay(recording, policy).exact
    other = MLPConfig().build(replace(contract, observation={"gripper_position": TensorSpec((2,))}))
    other.fit(objects.observations(64), torch.zeros(64, 2))
    with pytest.raises(ValueError, match="continued running chunks, MLPPolicy cannot"):
        replay(recording, other)


def test_another_policy_or_nothing_recorded_is_reported(tmp_path: Path):
    policy = recurrent()
    fly(tmp_path / "a.mcap", policy, 3, sampled=False)
    contract = Contract({"range": TensorSpec((4,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), 0.1)
    other = MLPConfig().build(contract)
    other.fit(TensorDict({"range": torch.randn(9, 4)}, batch_size=[9]), torch.zeros(9, 1))
    with pytest.raises(ValueError, match="the recorded one read position, task"):
        replay(Recording(tmp_path / "a.mcap"), other)
    with Recorder(tmp_path / "empty.mcap", contract) as recorder:
        recorder.begin_episode()
    with pytest.raises(ValueError, match="holds no decisions"):
        replay(Recording(tmp_path / "empty.mcap"), policy)
