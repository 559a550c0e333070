"""A robot is learned on, with a scripted person; a run that is stopped or meets a fault loses nothing."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.off_policy.sac import RLPDConfig
from embodied.data.store import EpisodeStore
from embodied.environment import Transition
from embodied.errors import DivergedError
from embodied.policy import Decision
from embodied.rollout.ahead import CollectorAhead
from embodied.rollout.rollout import Collector
from embodied.run_options import ExperimentConfig
from embodied.runtime.interrupt import STOPPING, Stopped
from embodied.saving import checkpoint
from embodied.task import Task
from embodied.training import saved_run
from embodied.training.experiment import Experiment
from embodied.training.loop import train
from policies.squashed import SquashedConfig
from real_robot.learning.environment import RobotEnvironment, Rules
from real_robot.learning.scripted import HelpConfig, ScriptedPerson
from tests.real_robot.learning.test_environment import Script, driven
from tests.real_robot.learning.worlds import Arm, ReachExpert, arm_environment, reaching

LEARNER = RLPDConfig(
    rollout_length=10,
    warmup=30,
    updates=1.0,
    policy_delay=2,
    ensemble=3,
    minibatch=64,
    hidden=[32, 32],
    learning_rate=3e-3,
    value_learning_rate=3e-3,
    discount=0.9,
    initial_temperature=0.02,
)


def episodes_of_training(budget: int, seed: int = 0) -> list[dict[str, float]]:
    """Means of ended episodes over 1,500 steps, with a person who takes over at most `budget` times."""
    help = HelpConfig(patience=4, lasting=6, progress=0.03, budget=budget, per_episode=3)
    env, _ = reaching(lambda toy: ScriptedPerson(ReachExpert(toy), help), executed=2, steps=40, speed=0.06)
    torch.manual_seed(seed)
    policy = SquashedConfig(hidden=[32, 32]).build(env.contract)
    steps = list(train(env, policy, LEARNER, env_steps=1500, seed=seed))
    assert ("interventions" in steps[-1].metrics) == (budget > 0)
    assert "person 0%" in steps[-1].note
    return [step.ended for step in steps if step.ended]


def test_rlpd_learns_from_a_person_who_is_needed_less_and_less() -> None:
    helped, alone = episodes_of_training(40), episodes_of_training(0)
    early, late, without = helped[:5], helped[-8:], alone[-8:]
    mean = lambda ended, name: np.mean([each[name] for each in ended])  # noqa: E731
    assert mean(early, "human") > 4.0
    assert mean(late, "human") == 0.0
    assert mean(late, "success") > 0.9 > 0.8 > mean(without, "success")
    assert mean(late, "episode_steps") < 0.75 * mean(early, "episode_steps")


def test_what_was_written_is_what_is_learned_from_and_a_person_counts_twice() -> None:
    arm, env, _ = driven(None, None, 0.02, 0.04, None, "stop", executed=4)
    policy = SquashedConfig(hidden=[8]).build(env.contract)
    policy.fit(TensorDict({"position": torch.randn(8, 1)}, [8]), torch.zeros(8, 1))
    env.reset()
    learner = replace(LEARNER, warmup=10_000).build(policy, None, env, torch.Generator())
    collector = Collector(env, policy, torch.Generator().manual_seed(0))
    env.control.person.script = [None, None, 0.02, 0.04, None, "stop"]
    written = len(arm.commands)
    rollout = collector.collect(3)
    learner.update(rollout, 0.0)
    store = learner.replay.own
    decisions = store.decisions(torch.arange(store.written))
    actions = decisions["actions"][..., 0][decisions["executed"]]
    moves = [command[0] for command in arm.commands[written:] if command is not None]
    assert actions[:5].tolist() == pytest.approx(moves[:5], abs=1e-6)  # until the stop, whose commands are no steps
    # the take-over from the third step on, cut by the hand-back and the stop that follows at once
    assert decisions["human"][0].tolist() == [False, False, True, True]
    assert decisions["truncated"].tolist()[:2] == [False, True]
    assert learner.replay.interventions.tolist() == [0]
    assert rollout.intervention_counts() == {"takeovers": 1, "human_steps": 2}


class Holding:
    """Commands the position that it observes."""

    def __init__(self, env: RobotEnvironment) -> None:
        self.contract = env.contract

    def act(self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None):
        actions = observation["position"].unsqueeze(1).expand(1, self.contract.horizon, 1)
        return Decision(actions, TensorDict({}, [1]), torch.zeros(1, self.contract.executed, 1))


def test_the_first_decision_after_a_pause_is_from_what_is_observed_then() -> None:
    arm, env, _ = driven()
    collector = Collector(env, Holding(env), torch.Generator())
    before = collector.collect(2)
    reads = []
    measure = env.control.measure
    env.control.measure = lambda: reads.append(arm.ticks) or measure()
    collector.collect(1)
    assert len(reads) == 4  # those of its steps: no time had passed
    arm.sleep(3.0)  # while a learner computes
    arm.position = arm.position + 0.01
    after = collector.collect(2)
    assert before.last_observation["position"].item() == pytest.approx(0.0)
    assert after.observation["position"][0].item() == pytest.approx(0.01)
    assert not after.done.any()
    arm.sleep(3.0)
    arm.fault = lambda reading: None
    ended = collector.collect(1)  # without a measurement the last one stays, and the episode ends
    assert ended.observation["position"][0].item() == pytest.approx(0.01)
    assert ended.truncated.all()


class ArmTask(Task):
    """An arm on which a run is stopped, by the signal of Ctrl-C, once it has moved for a number of periods."""

    name = "hold"
    distributions = ("hold",)

    def __init__(self, stop_after: int | None = None, person: Script | None = None) -> None:
        self.arm = Arm()
        self.person = person
        write = self.arm.write

        def counted(action: np.ndarray) -> None:
            write(action)
            if stop_after is not None and len(self.arm.commands) == stop_after:
                signal.raise_signal(signal.SIGINT)

        self.arm.write = counted
        self.env = arm_environment(self.arm, (lambda: person) if person else None, executed=2)
        self.steps: list[int] = []  # that each chunk took
        step = self.env.step

        def noted(actions: torch.Tensor) -> Transition:
            transition = step(actions)
            self.steps.append(int(transition.executed.sum()))
            return transition

        self.env.step = noted

    def contract(self, distribution: str):
        return self.env.contract

    def environment(self, num_envs, distribution, split, seed=0, device="cpu") -> RobotEnvironment:
        return self.env


def experiment(task: Task, directory: Path, env_steps: int = 200) -> Experiment:
    config = ExperimentConfig(
        num_envs=1,
        env_steps=env_steps,
        evaluation_envs=1,
        evaluation_starts=2,
        stages=["rl"],
        video=False,
        checkpoint_every=100,
    )
    record = {"choices": {}, "values": {}, "arguments": []}
    return Experiment(
        config, task, SquashedConfig(hidden=[8]), replace(LEARNER, warmup=100_000), directory, record=record
    )


def replay(directory: Path) -> EpisodeStore:
    """Stored decisions of the newest checkpoint of reinforcement learning."""
    store = EpisodeStore(LEARNER.capacity)
    newest = checkpoint.load(directory)
    if number := newest.counters["rl_checkpoint"]:
        newest = checkpoint.load(directory / "checkpoint" / f"{number:06d}")
    store.load_state_dict(newest.state["parts"]["learner"]["replay"])
    return store


def test_a_stopped_run_holds_the_robot_and_goes_on_with_every_step_that_it_took(tmp_path: Path) -> None:
    task = ArmTask(stop_after=441)
    with pytest.raises(Stopped):
        experiment(task, tmp_path).run()
    assert task.env.control.safety.state.value == "holding"
    stored = replay(tmp_path)
    # after random play of 128 decisions; the last one was cut by the stop
    assert int(stored.decisions(torch.arange(stored.written))["executed"].sum()) == sum(task.steps[128:]) > 100
    assert bool(stored.decisions(torch.tensor([stored.written - 1]))["truncated"])
    before = stored.decisions(torch.arange(stored.written))
    resumed = ArmTask()
    report = experiment(resumed, tmp_path).run()
    after = replay(tmp_path)
    assert (after.decisions(torch.arange(stored.written)) == before).all()
    assert report.env_steps >= 200


class HelpedTask(Task):
    """The toy as a robot, with a scripted person who takes over once in an episode."""

    name = "reach"
    distributions = ("reach",)

    def __init__(self) -> None:
        help = HelpConfig(patience=1, lasting=1, budget=100, per_episode=1)
        self.env, _ = reaching(lambda toy: ScriptedPerson(ReachExpert(toy), help), speed=0.01)

    def contract(self, distribution: str):
        return self.env.contract

    def environment(self, num_envs, distribution, split, seed=0, device="cpu") -> RobotEnvironment:
        return self.env


def test_a_resumed_run_goes_on_with_what_is_left_of_a_scripted_persons_budget(tmp_path: Path, monkeypatch) -> None:
    task, resumed = HelpedTask(), HelpedTask()
    before = experiment(task, tmp_path, 20).run()
    used = task.env.scripted_help.takeovers  # most of it by random play
    assert before.takeovers < used
    loaded = []
    load = saved_run.load
    monkeypatch.setattr(saved_run, "load", lambda part, *state: loaded.append(type(part)) or load(part, *state))
    after = experiment(resumed, tmp_path, 300).run()
    assert after.takeovers > before.takeovers
    assert resumed.env.scripted_help.takeovers == used + after.takeovers - before.takeovers
    assert loaded.index(ScriptedPerson) < loaded.index(Collector)  # which may go on at once, in its thread


def test_a_fault_in_the_middle_of_training_costs_its_episode_alone(tmp_path: Path) -> None:
    person = Script(*[None] * 300, "stop", *[None] * 30, 0.01, 0.02, OSError("unplugged"))
    task = ArmTask(person=person)
    report = experiment(task, tmp_path).run()
    assert report.env_steps >= 200
    assert report.takeovers == 1
    assert report.human_steps == 2
    assert "A person took over 1 times, for 2.0 steps each" in (tmp_path / "report.md").read_text()
    assert len(person.waited) >= 2


def test_a_learner_that_fails_while_the_robot_waits_for_the_person_does_not_wait_for_them() -> None:
    pressed = threading.Event()

    class Away(Script):
        def wait_for(self, *buttons, sleep):
            self.waited.append(buttons)
            while not pressed.wait(0.01):
                sleep(0.02)
            return buttons[0]

    person = Away()
    arm = Arm()
    env = arm_environment(arm, lambda: person, executed=1, rules=Rules(50, waits=True))
    policy = SquashedConfig(hidden=[8]).build(env.contract)
    policy.fit(TensorDict({"position": torch.randn(9, 1)}, [9]), torch.zeros(9, 1, 1))
    collector = CollectorAhead(Collector(env, policy, torch.Generator()), policy)
    late = threading.Timer(5.0, pressed.set)
    late.start()

    def fail() -> None:
        with collector:
            collector.begin(4)
            deadline = time.monotonic() + 5.0
            while not person.waited and time.monotonic() < deadline:
                time.sleep(0.001)
            raise DivergedError("the loss is not finite")

    with pytest.raises(DivergedError):
        fail()
    assert not pressed.is_set()
    late.cancel()
    assert not arm.commands
    assert not STOPPING.is_set()
    pressed.set()
    env.reset()  # another collection goes on
    assert env.step(torch.zeros(1, 1, 1)).executed.all()
