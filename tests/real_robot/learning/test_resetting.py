"""A second policy brings the scene back, a person is asked only after it has failed, and a resumed run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.command_line.config import compose
from embodied.command_line.train_options import GROUPS, TrainConfig, opened_task
from embodied.environment import own_resets
from embodied.errors import UserError
from embodied.report.headline import reset_sentence
from embodied.report.report import Report
from embodied.run_options import ExperimentConfig
from embodied.runtime.interrupt import STOPPING
from embodied.saving import checkpoint
from embodied.task import Task
from embodied.training.experiment import Experiment
from embodied.training.loop import train
from policies.mlp import MLPConfig
from policies.squashed import SquashedConfig
from real_robot.learning.continuing import ContinuingSimulation
from real_robot.learning.environment import RobotEnvironment, Rules
from real_robot.learning.judging import Judge
from real_robot.learning.resetting import BackwardConfig, BackwardEnvironment, PolicyResets
from real_robot.learning.task import Reset, RobotConfig
from tests.embodied.reach import Reach
from tests.real_robot.learning.table import GOAL, START, Table, TableTask, demonstrations, on_robot
from tests.real_robot.learning.test_environment import Script
from tests.real_robot.learning.test_learning import LEARNER
from tests.real_robot.learning.worlds import Arm, arm_environment

POLICY = SquashedConfig(hidden=[8])
IDLE = replace(LEARNER, warmup=100_000, rollout_length=4)


class Attempts:
    """Resets whose attempts have the outcomes of a list; counts what they cost."""

    task_steps = 0

    def __init__(self, *outcomes: bool) -> None:
        self.outcomes = list(outcomes)

    def bring_back(self, training: bool) -> bool:
        return self.outcomes.pop(0)


def scripted(outcomes: list[bool], tries: int = 2) -> PolicyResets:
    """Resets whose attempts have these outcomes, without a robot; each takes 10 steps, the task none."""
    arm = arm_environment(Arm())
    env = BackwardEnvironment(arm.control, arm.contract, ("reset", "reset"), Rules(5, waits=False))
    resets = PolicyResets(env, BackwardConfig(POLICY, IDLE), tries)

    def attempt() -> bool:
        resets.steps += 10
        return outcomes.pop(0)

    resets._start = lambda: None
    resets._attempt = attempt
    return resets


def test_a_person_is_asked_after_so_many_failures_in_a_row_and_their_times_are_counted() -> None:
    resets = scripted([True, False, True, False, False, False, False])
    assert [resets.bring_back(True) for _ in range(7)] == [True, True, True, True, False, True, False]
    assert resets.request_steps == [50, 70]
    minute = 60.0 / resets.env.contract.control_dt_s
    assert resets.record() == {
        "requests": 2,
        "request_minutes": [round(50 / minute, 3), round(70 / minute, 3)],
        "minutes": round(70 / minute, 3),
        "minutes_between_requests": 35 / minute,
        "attempts": 7,
        "successes": 2,
        "steps": 70,
    }
    assert resets.metrics()["success"] == 2 / 7
    assert "success" not in resets.metrics()  # no attempt since
    assert resets.note == "person asked 2 times, last 0 min ago"


def test_an_evaluated_episode_begins_at_a_start_or_a_person_is_asked() -> None:
    resets = scripted([False, True, False, False, False])
    assert [resets.bring_back(False) for _ in range(2)] == [True, False]
    assert resets.attempts == 4
    assert resets.requests == 1


def test_without_a_request_the_time_between_them_is_unknown() -> None:
    resets = scripted([True])
    resets.bring_back(True)
    assert "minutes_between_requests" not in resets.metrics()
    assert resets.record()["minutes_between_requests"] is None
    assert resets.note == "nobody asked for 0 min"
    assert "a person was never asked" in reset_sentence(resets.record())


def test_the_person_of_the_run_is_there_for_the_first_scene_and_later_only_if_asked() -> None:
    person = Script()
    env = arm_environment(Arm(), lambda: person, rules=Rules(50, waits=True), resets=Attempts(True, False, True))
    put_back = []
    env.control.station = replace(env.control.station, put_back=lambda: put_back.append(len(person.waited)))
    for _ in range(4):
        env.reset()
    assert person.waited == [("success", "go")] * 2  # the first scene, and the third episode's
    assert put_back == [1, 2]


def test_episodes_go_on_where_the_last_one_ended_until_the_scene_is_put_back() -> None:
    table = Table()
    env = ContinuingSimulation(table)
    env.reset()
    table.mug = torch.tensor(GOAL)
    still = torch.zeros(1, 1, 3)
    assert env.step(still).terminated.all()
    assert env.step(still).executed.all()  # its simulation does not freeze
    env.reset()
    assert table.within(GOAL)
    env.put_back()
    env.reset()
    assert table.within(START)
    assert table.resets == 2


def test_a_simulator_that_cannot_go_on_is_refused() -> None:
    with pytest.raises(UserError, match=r"robot\.reset=policy needs a simulator"):
        ContinuingSimulation(Reach(1, executed=1, horizon=1))


def test_an_attempt_is_one_episode_whose_rollout_executes_nothing_more() -> None:
    task, simulator = on_robot(IDLE, POLICY)
    env = task.environment(1, "table", "train")
    env.reset()
    resets = env.scene_resets
    resets._start()
    table = simulator.tables[0]
    table.mug = torch.tensor(GOAL)
    steps = resets.steps
    assert not resets._attempt()
    assert resets.steps - steps == 50  # the step limit, which the last rollout of four decisions does not end at
    store = resets._learner.replay.own
    assert int(store.decisions(torch.arange(len(store)))["executed"].sum()) == 50
    table.mug = torch.tensor(START)
    assert resets._attempt()
    assert resets.steps - steps == 51
    assert store.decisions(torch.tensor([50]))["reward"].item() == 1.0
    assert table.resets == 1


def test_a_fault_during_an_attempt_is_waited_for_before_the_task_goes_on() -> None:
    arm, person = Arm(), Script()
    env = arm_environment(arm, lambda: person)
    backward = BackwardEnvironment(env.control, env.contract, ("reset", "reset"), Rules(8, waits=False))
    resets = env.scene_resets = PolicyResets(backward, BackwardConfig(POLICY, IDLE), tries=3)
    env.reset()
    resets._start()
    person.script = [None, None, "stop"]
    env.reset()
    assert person.waited == [("success", "go")]
    assert env.control.fault == ""
    assert resets.attempts == 1
    assert env.step(torch.zeros(1, 4, 1)).executed.all()


def test_a_key_or_a_classifier_says_that_the_scene_is_back() -> None:
    arm, person = Arm(), Script()
    env = arm_environment(arm, lambda: person)
    probability = [0.0]
    judge = Judge(lambda observation: probability[0])
    backward = BackwardEnvironment(env.control, env.contract, ("reset", "reset"), Rules(8, judge, waits=False))
    backward.is_back = lambda: True  # the classifier decides in place of the simulated task
    resets = PolicyResets(backward, BackwardConfig(POLICY, IDLE), tries=3)
    env.reset()
    resets._start()
    assert not resets._attempt()
    person.script = [None, None, "success"]
    assert resets._attempt()
    probability[0] = 0.9
    assert resets._attempt()


def test_a_requested_stop_ends_the_attempt_and_asks_nobody() -> None:
    task, _ = on_robot(IDLE, POLICY)
    env = task.environment(1, "table", "train")
    env.reset()
    env.scene_resets._start()
    STOPPING.set()
    try:
        assert env.scene_resets.bring_back(True)
        env.reset()
        assert not env.step(torch.zeros(1, 1, 3)).executed.any()
    finally:
        STOPPING.clear()
    assert env.scene_resets.attempts == env.scene_resets.requests == 0


@pytest.mark.evidence
def test_two_policies_learn_to_undo_each_other() -> None:
    algorithm = replace(LEARNER, updates=1.0, lookahead=3, minibatch=128, warmup=100, discount=0.95, rollout_length=8)
    algorithm = replace(algorithm, hidden=[64, 64], learning_rate=1e-3, value_learning_rate=1e-3)
    policy = SquashedConfig(hidden=[64, 64])
    task, simulator = on_robot(algorithm, policy)
    env = task.environment(1, "table", "train")
    torch.manual_seed(0)
    ended = []
    trained = policy.build(env.contract)
    for step in train(env, trained, algorithm, env_steps=3_000, demonstrations=demonstrations(GOAL, 10)):
        ended += [(step.ended["success"], env.scene_resets.attempts, env.scene_resets.successes)] if step.ended else []
    late = ended[-20:]
    assert np.mean([success for success, _, _ in late]) > 0.9
    assert (late[-1][2] - late[0][2]) / (late[-1][1] - late[0][1]) > 0.8
    assert simulator.tables[0].resets == 1 + env.scene_resets.requests
    assert 0 < env.scene_resets.requests < 10 < env.scene_resets.attempts


def test_both_learners_have_their_own_weights_and_noise() -> None:
    task, _ = on_robot(IDLE, POLICY, seed=3)
    env = task.environment(1, "table", "train")
    before = torch.get_rng_state()
    env.reset()
    env.scene_resets._start()
    assert torch.equal(torch.get_rng_state(), before)  # the run's other numbers are those without a second policy
    torch.manual_seed(3)
    own = POLICY.build(env.contract)
    weights = zip(own.parameters(), env.scene_resets._policy.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in weights if a.dim() > 1)


def run(directory: Path, task: Task, *, overlap: bool) -> Report:
    config = ExperimentConfig(
        num_envs=1,
        overlap=overlap,
        env_steps=120,
        evaluation_envs=1,
        evaluation_starts=2,
        stages=["rl"],
        video=False,
        control=False,
        checkpoint_every=2,
    )
    record = {"choices": {}, "values": {}, "arguments": []}
    return Experiment(
        config, task, POLICY, replace(LEARNER, warmup=20, demonstration_share=0.0), directory, record=record
    ).run()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_reports_its_requests_and_a_checkpoint_continues_the_second_learner(
    overlap: bool, tmp_path: Path
) -> None:
    algorithm = replace(LEARNER, warmup=20)
    task, _ = on_robot(algorithm, POLICY)
    report = run(tmp_path, task, overlap=overlap)
    record = report.to_dict()["resets"]
    assert record["attempts"] > 2
    assert record["requests"] == len(record["request_minutes"])
    assert "A second policy brought the scene back" in (tmp_path / "report.md").read_text()
    assert "resets/steps" in (tmp_path / "metrics.jsonl").read_text()
    resets = own_resets(task._open)
    saved = checkpoint.load(tmp_path).state
    assert saved["report"]["resets"] == record
    state = resets.state_dict()
    other, _ = on_robot(algorithm, POLICY)
    continued = other.environment(1, "table", "train").scene_resets
    continued.load_state_dict(state)
    assert continued.record() == resets.record()
    again = continued.state_dict()
    assert equal(again, state)
    for each in (resets, continued):  # the same next update
        each._metrics = each._learner._step()
    first, second = (each._learner.q.state_dict() for each in (resets, continued))
    assert equal(first, second)


def equal(a: object, b: object) -> bool:
    """Whether two trees have the same values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool((a == b).all()) if hasattr(a, "all") else a == b


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backward": None}, "set algorithm=rlpd"),
        ({"backward": BackwardConfig(MLPConfig(hidden=[8]), PPOConfig())}, "replay"),
    ],
)
def test_a_run_that_cannot_learn_the_way_back_is_refused(change: dict, message: str) -> None:
    task, _ = on_robot(IDLE, POLICY)
    vars(task).update(change)

    def begin() -> None:
        env = task.environment(1, "table", "train")
        for _ in range(2):
            env.reset()

    with pytest.raises(UserError, match=message):
        begin()


def test_somebody_has_to_know_when_the_scene_is_back() -> None:
    task, simulator = on_robot(IDLE, POLICY)
    with (
        patch.object(TableTask, "start_condition", Task.start_condition),
        pytest.raises(UserError, match="nobody knows"),
    ):
        task.environment(1, "table", "train")
    assert simulator.tables


def test_train_gives_the_second_policy_the_configs_of_the_run_and_demonstrations_of_its_own(tmp_path: Path) -> None:
    options = [
        "task=libero_pick",
        "policy=squashed",
        "algorithm=rlpd",
        "robot=simulation",
        "robot.reset=policy",
        "seed=3",
    ]
    for shown in ([], ["robot.reset_demonstrations=way_back"]):
        config, _ = compose(TrainConfig, "train", [*options, *shown], GROUPS)
        with opened_task(config, lambda task: task, tmp_path, {}) as task:
            assert task.backward.policy is config.policy
            assert task.backward.algorithm is config.algorithm
            assert task.backward.seed == 3
            assert (task.backward.demonstrations is None) == (not shown)
            if shown:
                with pytest.raises(UserError, match="way_back"):
                    task.backward.demonstrations(task.contract("wide"))


def test_options_of_a_second_policy_need_one() -> None:
    with pytest.raises(UserError, match=r"robot\.reset=policy"):
        RobotConfig(reset_classifier="folder")
    assert RobotConfig().reset is Reset.PERSON


def test_a_robot_without_a_second_policy_has_none() -> None:
    assert own_resets(arm_environment(Arm())) is None
    assert isinstance(arm_environment(Arm()), RobotEnvironment)
