"""A signal and an event that a simulator adds by one line each arrive, by name, wherever episodes are used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract
from embodied.data.episodes import Episodes, EpisodeWriter, read
from embodied.data.store import EpisodeStore
from embodied.environment import NumberedStarts, Transition
from embodied.environments.engine import Outcome
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.placement.worker import on_cpu
from embodied.policy import Decision
from embodied.rollout.finite import check_transition
from embodied.rollout.joining import joined
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.storage import Storage
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.loop import Iteration, iterations
from embodied.world import ALONE
from policies.mlp import MLPConfig
from tests.embodied.counter import Costly
from tests.embodied.training.test_loop import Twin, Watcher
from tests.sims.remote.made import MadeTask, in_children

SLOW, FAST, BREAKING = -0.25, 1.0, 50.0
"""Actions of episodes of 7 steps until the limit, of 5 steps until success, and of one that diverges at once."""
CHUNKS = [
    [[0.0625, 0.0625, 0.0625], [1.0, 1.0, 1.0]],
    [[0.0625, 0.0625, 0.0625], [1.0, 1.0, 0.0]],
    [[0.0625, 0.0, 0.0], [0.0625, 0.0625, 0.0625]],
]
"""Costs of three decisions of two environments from start 0, slow, and start 1, fast; then start 2, slow."""


class Scripted:
    """Acts by the number of the episode's initial state."""

    def __init__(self, contract: Contract, actions: Sequence[float] = (SLOW, FAST)) -> None:
        self.contract, self.actions = contract, torch.tensor(actions)

    def act(self, observation: TensorDict, *, deterministic: bool = False, generator: object = None) -> Decision:
        count = len(observation)
        action = self.actions[observation["start"][:, 0].long() % len(self.actions)]
        empty = TensorDict({}, [count])
        return Decision(action.view(-1, 1, 1).expand(-1, 3, 1), empty, torch.zeros(count, 3, 1))

    def renormalise(self, observation: TensorDict, world: object) -> None:
        """It has no statistics of observations."""


def collector(env: NumberedStarts, storage: Storage = Storage.DEVICE, folder: Path | None = None) -> Collector:
    return Collector(env, Scripted(env.contract), torch.Generator(), None, storage, folder)


def assert_by_hand(rollout: Rollout) -> None:
    """The first three decisions of two environments."""
    assert rollout.signals["cost"].tolist() == CHUNKS
    assert rollout.events["hasty"].tolist() == [[False, True], [False, False], [False, False]]
    assert rollout.episode_totals["cost"].tolist() == [[0.1875, 3.0], [0.375, 5.0], [0.4375, 0.1875]]
    ended = rollout.ended()
    assert rollout.episode_totals["below"].tolist() == [[1, 0], [2, 0], [3, 1]]
    assert (ended["cost"], ended["success"]) == ((0.4375 + 5.0) / 2, 0.5)
    assert (ended["hasty"], ended["below"]) == (0.5, 0.5)  # in the first decision, and in every one


def test_costs_of_an_episode_that_diverged_are_not_known() -> None:
    env = Costly(2, tasks=1)
    policy = Scripted(env.contract, (BREAKING, FAST))
    rollout = Collector(env, policy, torch.Generator()).collect(2)
    ended = rollout.ended()  # starts 0 and 2 diverged, start 1 succeeded
    assert rollout.odd_episodes() == {"diverged": 2, "lost": 0, "pushed": 0}
    assert (ended["cost"], ended["hasty"], ended["success"]) == (5.0, 1.0, pytest.approx(1 / 3))


@pytest.mark.parametrize("storage", list(Storage))
def test_a_rollout_has_them_wherever_it_is_stored(storage: Storage, tmp_path: Path) -> None:
    collecting = collector(Costly(2, tasks=1), storage, tmp_path)
    assert_by_hand(collecting.collect(3))
    following = collecting.collect(2)  # an episode that began in the rollout before ends in this one
    assert following.episode_totals["cost"].tolist() == [[3.0, 0.375], [5.0, 0.4375]]
    assert following.ended()["cost"] == (5.0 + 0.4375) / 2


def test_a_rollout_through_two_processes_has_them() -> None:
    task = in_children(MadeTask(kind="costly", processes=2, tasks=1, step_limit=7))
    env = task.environment(2, "anywhere", "train")
    assert_by_hand(collector(env).collect(3))
    env.close()


def test_a_process_that_died_gives_no_costs_and_no_events() -> None:
    env = in_children(MadeTask(kind="costly", processes=2, tasks=1, step_limit=7)).environment(2, "anywhere", "train")
    env.reset()
    before = env.step(torch.full((2, 3, 1), FAST))
    assert before.signals["cost"].tolist() == [[1.0] * 3] * 2
    assert before.events["hasty"].tolist() == [True, True]
    process = env._children[1].process
    process.kill()
    process.wait()
    after = env.step(torch.full((2, 3, 1), SLOW))
    assert after.events["lost"].tolist() == [False, True]
    assert after.signals["cost"].tolist() == [[0.0625] * 3, [0.0] * 3]
    assert not after.events["hasty"].any()
    env.close()


class Late(Costly):
    """A Costly that does not know the costs of its first step."""

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        outcome = super().advance(actions, remaining_steps)
        if int(self.steps.max()) == 0:
            outcome.signals.clear()
        return outcome


def test_what_some_decisions_lack_is_unknown() -> None:
    collecting = collector(Late(2, tasks=1))
    rollout = collecting.collect(2)
    assert rollout.signals == {}
    assert "cost" not in rollout.ended()
    following = collecting.collect(2)  # one episode began before the costs were known, the other after
    assert following.done.sum() == 1
    assert following.signals["cost"].shape == (2, 2, 3)
    assert "cost" not in following.ended()


def test_a_collector_goes_on_with_the_sums_of_running_episodes() -> None:
    whole, part, later = (collector(Costly(2, tasks=1)) for _ in range(3))
    part.collect(1)
    later.load_state_dict(part.state_dict())
    assert later.collect(2).episode_totals["cost"].tolist() == whole.collect(3).episode_totals["cost"][1:].tolist()
    unknown = collector(Costly(2, tasks=1))
    unknown.load_state_dict({name: value for name, value in part.state_dict().items() if name != "named_totals"})
    assert "cost" not in unknown.collect(1).ended()  # of an earlier release: the first costs are not known


def test_rollouts_of_several_collectors_have_what_all_of_them_have() -> None:
    both = collector(Costly(2, tasks=1)).collect(3)
    one, other = (on_cpu(part(both, column)) for column in range(2))
    assert_by_hand(joined([one, other]))
    assert joined([one, replace(other, signals={})]).signals == {}


def part(rollout: Rollout, column: int) -> Rollout:
    """One environment of `rollout`."""
    rows = slice(column, column + 1)
    tensors = {name: value for name, value in vars(rollout).items() if getattr(value, "ndim", 0) >= 2}
    cut = {name: value[:, rows] for name, value in tensors.items()}
    for name in ("signals", "events", "episode_totals"):
        cut[name] = {key: value[:, rows] for key, value in getattr(rollout, name).items()}
    last, index = rollout.last_observation[rows], rollout.task_index[rows]
    return replace(rollout, **cut, last_observation=last, task_index=index, final_rows=None, final_observation=None)


def test_iterations_have_the_means_of_all_processes() -> None:
    steps: list[Iteration] = [
        next(iterations(Watcher(), collector(Costly(2, tasks=1)), 3, 1, world=world)) for world in (ALONE, Twin())
    ]
    for step in steps:
        assert (step.ended["cost"], step.ended["hasty"]) == (2.71875, 0.5)
        assert step.logged["rollout/cost"] == 2.71875
    assert [step.episodes for step in steps] == [2, 4]
    for world in (ALONE, Twin()):
        env = Costly(2, tasks=1)
        breaking = Collector(env, Scripted(env.contract, (BREAKING, FAST)), torch.Generator())
        step = next(iterations(Watcher(), breaking, 2, 1, world=world))
        assert (step.ended["cost"], step.ended["success"]) == (
            5.0,
            pytest.approx(1 / 3),
        )  # costs of one episode of three


def test_stored_episodes_have_the_costs_of_their_steps(tmp_path: Path) -> None:
    env = Costly(2, tasks=1)
    store = EpisodeStore(100)
    store.add(collector(env).collect(3))
    decisions = store.decisions(store.succeeded())
    cost = decisions["signals", "cost"][decisions["executed"]]
    assert cost.tolist() == [1.0] * 5
    assert decisions["events", "hasty"].tolist() == [True, False]
    episodes = Episodes.of(TensorDict({"start": torch.zeros(5, 1)}, [5]), torch.zeros(5, 1))
    episodes = replace(episodes, signals=TensorDict({"cost": cost}, [5]))
    with EpisodeWriter(tmp_path / "stored", env.contract) as writer:
        writer.add(episodes)
    stored, _, _ = read(tmp_path / "stored")
    twice = Episodes.join([stored, stored])
    assert twice.part(1, 2).signals["cost"].tolist() == [1.0] * 5
    without = replace(episodes, signals=None)
    assert Episodes.join([stored, without]).signals is None
    for first, second in ((episodes, without), (without, episodes)):
        store = EpisodeStore(100)
        store.add_episodes(first)
        assert ("signals", "cost") in store.decisions(torch.arange(5)).keys(True) or first is without
        store.add_episodes(second)
        assert not store.decisions(torch.arange(10))["signals"].keys()


def test_an_evaluation_has_sums_and_shares() -> None:
    env = Costly(3, tasks=1)
    result = evaluate(env, Scripted(env.contract, (SLOW, FAST, BREAKING)), starts_per_task=3)
    assert result.metrics["cost"][0, :2].tolist() == [0.4375, 5.0]
    summary = result.summary()
    for row in (summary, summary["per_task"][0]):
        assert row["cost"] == 2.71875  # the costs of the episode that diverged are not known
        assert (row["hasty"], row["below"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert summary["diverged"] == 1
    assert "lost" not in summary


def test_a_run_writes_them_into_its_metrics_and_its_report(tmp_path: Path) -> None:
    task = in_children(MadeTask(kind="costly", processes=2, tasks=1, step_limit=7))
    config = ExperimentConfig(num_envs=4, env_steps=200, evaluation_starts=4, evaluation_envs=4, video=False)
    learner = PPOConfig(rollout_length=4, minibatch=16)
    Experiment(config, task, MLPConfig(hidden=[8]), learner, tmp_path, record={}).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ended = [row for row in rows if "rollout/episode_steps" in row]
    assert ended
    assert all(row["rollout/cost"] > 0.0 and 0.0 <= row["rollout/hasty"] <= 1.0 for row in ended)
    report = json.loads((tmp_path / "report.json").read_text())
    for evaluation in report["evaluations"]:
        assert evaluation["cost"] >= 0.0
        assert evaluation["hasty"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert "cost" in (tmp_path / "report.md").read_text()


class Wrong(Costly):
    """A Costly with another signal or event."""

    def __init__(self, signals: dict[str, Tensor], events: dict[str, Tensor]) -> None:
        super().__init__(2, tasks=1)
        self.others = signals, events

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        outcome = super().advance(actions, remaining_steps)
        outcome.signals |= self.others[0]
        outcome.events |= self.others[1]
        return outcome


@pytest.mark.parametrize(
    ("signals", "events", "message"),
    [
        ({"energy": torch.full((2, 3), torch.nan)}, {}, "signal 'energy' became nan in environment 0"),
        ({"energy": torch.zeros(2)}, {}, r"expected signal 'energy' of shape \[2, 3\], got \[2\]"),
        ({}, {"fell": torch.zeros(2)}, r"expected event 'fell' as bool \[2\], got torch.float32"),
        ({"success": torch.zeros(2, 3)}, {}, "a name of its own .* got 'success'"),
        ({"x": torch.zeros(2, 3)}, {}, "a name of its own .* got 'x'"),  # a metric
        ({"hasty": torch.zeros(2, 3)}, {}, "a name of its own .* got 'hasty'"),  # an event
        ({"the cost": torch.zeros(2, 3)}, {}, "an identifier, got 'the cost'"),
    ],
)
def test_what_no_report_could_show_is_refused(signals: dict, events: dict, message: str) -> None:
    env = Wrong(signals, events)
    env.reset()
    transition: Transition = env.step(torch.zeros(2, 3, 1))
    with pytest.raises(UserError, match=message):
        check_transition(env, transition)
