"""The training loop learns, counts its steps, and only needs the minimal simulator protocol."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import embodied.training.experiment
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.environment import Environment, NumberedStarts, Restorable, SwitchableEnvironment
from embodied.errors import DivergedError, UserError
from embodied.evaluation.evaluation import evaluate
from embodied.networks.precision import Precision
from embodied.rollout.rollout import Collector
from embodied.rollout.storage import Storage
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.loop import build, iterations, train
from embodied.world import ALONE, OneProcess
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.nameless import Nameless, Single
from tests.embodied.reach import FixedStarts, Reach
from tests.embodied.rollout.test_rollout import Constant
from tests.embodied.training.test_experiment import ReachTask

QUICK = PPOConfig(rollout_length=16, minibatch=256, learning_rate=3e-3, target_kl=1.0, discount=0.9)


def policy(env: Environment, seed: int = 0) -> MLPPolicy:
    torch.manual_seed(seed)
    return MLPConfig(hidden=[32]).build(env.contract)


@pytest.mark.parametrize("kind", [Reach, Nameless])
def test_it_learns(kind: type) -> None:
    env = kind(64)
    learned = policy(env)
    steps = list(train(env, learned, QUICK, env_steps=40_000))
    assert steps[0].ended["success"] < 0.6
    assert steps[-1].ended["success"] > 0.9
    assert steps[-1].env_steps >= 40_000 > steps[-2].env_steps
    assert all(step.episodes > 0 and step.simulation_s > 0.0 and step.policy_s > 0.0 for step in steps)
    result = evaluate(kind(16), learned, starts_per_task=20)
    assert result.summary()["success"] > 0.9
    assert result.repeatable == (kind is Reach)


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    def run(seed: int) -> list[dict[str, float]]:
        env = Reach(8)
        return [step.metrics for step in train(env, policy(env), PPOConfig(rollout_length=4), env_steps=200, seed=seed)]

    first = run(0)
    assert run(0) == first
    assert run(1) != first


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    env = Reach(8)
    learned = policy(env)
    learned.fit(env.reset(), torch.zeros(1, 1))
    learner, collector = build(env, learned, QUICK, None, seed=0)
    learner.update = lambda *_: {"kl": float("inf"), "value_loss": 1.0}
    next(iterations(learner, collector, 4, 100))
    learner.update = lambda *_: {"kl": 1.0, "value_loss": float("inf")}
    with pytest.raises(DivergedError, match=r"^value loss became inf at gradient step 0; try a lower"):
        next(iterations(learner, collector, 4, 100))


class Watcher:
    """A learner that learns nothing."""

    gradient_steps = 0
    starts = None

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, float]] = []

    def update(self, rollout, progress, world) -> dict[str, float]:
        self.updates.append((rollout.policy_version, rollout.env_steps, progress))
        return {"seen": float(len(self.updates))}


def test_progress_runs_over_what_was_planned_and_ends_with_it() -> None:
    env, learner = Reach(5, step_limit=100), Watcher()
    collector = Collector(env, Constant(env, 0.001), torch.Generator())
    found = list(iterations(learner, collector, 2, 100, done=40, planned=80))
    assert [step.env_steps for step in found] == [60, 80, 100]
    assert learner.updates == [(0, 20, 0.75), (1, 20, 1.0), (2, 20, 1.0)]
    assert [step.metrics for step in found] == [{"seen": 1.0}, {"seen": 2.0}, {"seen": 3.0}]
    assert not list(iterations(learner, collector, 2, 100, done=100))
    assert next(iterations(learner, collector, 2, 200, done=100)).env_steps == 120
    assert learner.updates[-1] == (3, 20, 0.6)


def test_all_that_ended_is_counted() -> None:
    env = Reach(2, tasks=1)
    collector = Collector(env, Constant(env, -0.1), torch.Generator(), FixedStarts([0, 1]))
    step = next(iterations(Watcher(), collector, 4, 1))
    assert (step.episodes, step.ended["success"], step.odd_episodes["diverged"]) == (3, pytest.approx(2 / 3), 0)


class Twin:
    """One of two identical processes."""

    rank, size = 1, 2

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    def mean(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


def test_steps_of_all_processes_count_together() -> None:
    env, learner = Reach(5, step_limit=100), Watcher()
    collector = Collector(env, Constant(env, 0.001), torch.Generator())
    assert [step.env_steps for step in iterations(learner, collector, 2, 80, world=Twin())] == [40, 80]
    assert [progress for *_, progress in learner.updates] == [0.5, 1.0]


def test_processes_explore_by_their_own_noise() -> None:
    def actions(world) -> torch.Tensor:
        env = Reach(8)
        made = policy(env)
        made.fit(env.reset(starts=torch.arange(8)), torch.zeros(1, 1))
        _, collector = build(Reach(8), made, QUICK, None, 0, world)
        return collector.collect(1).actions

    assert torch.equal(actions(ALONE), actions(OneProcess()))
    assert not torch.isclose(actions(ALONE), actions(Twin())).any()


def test_another_seed_explores_with_other_noise() -> None:
    made = policy(Reach(8))
    made.fit(Reach(8).reset(starts=torch.arange(8)), torch.zeros(1, 1))

    def actions(seed: int) -> torch.Tensor:
        return build(Reach(8), made, QUICK, None, seed)[1].collect(1).actions

    assert torch.equal(actions(0), actions(0))
    assert not torch.isclose(actions(0), actions(1)).any()


def test_episodes_begin_where_the_learner_chooses() -> None:
    class Chooses(Watcher):
        starts, collector = FixedStarts([5, 9]), Collector

    class Config:
        def build(self, *_: object) -> Chooses:
            return Chooses()

    made = policy(Reach(2))
    made.fit(Reach(8).reset(starts=torch.arange(8)), torch.zeros(1, 1))
    _, collector = build(Reach(2), made, Config(), None, 0)
    assert collector.collect(1).start.tolist() == [[5, 9]]


def test_bfloat16_computes_in_it_and_keeps_weights_advantages_and_losses_in_float32() -> None:
    env, kinds = Reach(32), {}
    learned = policy(env)
    learned.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    learned.actor[0].register_forward_hook(lambda *given: kinds.update(layer=given[2].dtype))
    learner, collector = build(env, learned, QUICK, None, 0)
    original = learner._losses

    def losses(batch: TensorDict, count: int):
        loss, sums = original(batch, count)
        kinds.update(loss=loss.dtype, **{name: batch[name].dtype for name in ("advantage", "return", "log_prob")})
        return loss, sums

    learner._losses = losses
    before = learned.actor[0].weight.clone()
    steps = list(iterations(learner, collector, 8, 2000, precision=Precision.BFLOAT16))
    assert kinds.pop("layer") == torch.bfloat16
    assert set(kinds.values()) == {torch.float32}, kinds
    assert {parameter.dtype for parameter in learned.parameters()} == {torch.float32}
    assert not torch.equal(learned.actor[0].weight, before)
    assert all(torch.isfinite(torch.tensor(list(step.metrics.values()))).all() for step in steps)
    list(iterations(learner, collector, 8, 100, precision=Precision.FLOAT32))
    with Precision.FLOAT32.on("cpu"):
        assert not torch.is_autocast_enabled("cpu")


def test_in_bfloat16_a_step_of_the_optimiser_is_seen_at_once() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with Precision.BFLOAT16.on("cpu"):
        before = layer(x)
        with torch.no_grad():
            layer.weight += 1.0
        assert not torch.equal(layer(x), before)


def test_imitation_computes_in_bfloat16_too(tmp_path: Path) -> None:
    kinds = set()

    class Watched(MLPPolicy):
        def loss(self, *given: object) -> torch.Tensor:
            kinds.add(self.actor[0](torch.zeros(1, self.actor[0].in_features)).dtype)
            return super().loss(*given)

    config = ExperimentConfig(
        num_envs=4,
        evaluation_starts=1,
        evaluation_envs=2,
        video=False,
        precision=Precision.BFLOAT16,
        stages=["sft"],
        sft=SFTConfig(steps=2, batch=4),
    )
    made = MLPConfig(hidden=[8])
    made.build = lambda contract: Watched(contract, made)
    Experiment(config, ReachTask(), made, QUICK, tmp_path, record={"values": {}}).run()
    assert kinds == {torch.bfloat16}


def test_a_simulator_that_can_do_little_is_what_it_says() -> None:
    env = Nameless(4)
    assert isinstance(env, Environment)
    assert not isinstance(env, NumberedStarts | Restorable | SwitchableEnvironment)
    assert isinstance(Single(4), SwitchableEnvironment)
    assert not isinstance(Reach(4), SwitchableEnvironment)


def test_starts_cannot_be_chosen_without_numbers() -> None:
    env = Nameless(4)
    with pytest.raises(UserError, match="an environment with numbered initial states"):
        Collector(env, Constant(env._reach, 0.1), torch.Generator(), FixedStarts([0, 0, 0, 0]))
    demonstrations = ReachTask().demonstrations(Path(), 0)
    learned = policy(env)
    config = SelfImitationConfig(rollout_length=4, gradient_steps=2, capacity=100)
    steps = list(train(env, learned, config, env_steps=100, demonstrations=demonstrations))
    assert "first_attempts_success" not in steps[-1].metrics


class NamelessTask(ReachTask):
    """On simulators without numbered initial states."""

    def __init__(self) -> None:
        self.made: list[Nameless] = []

    def environment(self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu") -> Nameless:
        self.made.append(Nameless(num_envs, seed=seed + 10 * (split == "eval")))
        return self.made[-1]


class SingleTask(NamelessTask):
    """With a simulator that can exist once per process."""

    distributions = ("wide", "narrow")

    def environment(self, num_envs, distribution, split, seed=0, device="cpu") -> Nameless:
        assert not self.made, "another one is made"
        self.made.append(Single(num_envs))
        return self.made[-1]


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing curves takes most of the time of such a small run."""
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


def trainer(task: ReachTask, directory: Path, env_steps: int = 300, kind: type[Experiment] = Experiment) -> Experiment:
    config = ExperimentConfig(
        8, env_steps=env_steps, checkpoint_every=1, evaluation_starts=6, evaluation_envs=8, video=False
    )
    config.sft.steps, config.sft.batch = 20, 16
    learner = PPOConfig(rollout_length=4, minibatch=64, epochs=1)
    return kind(config, task, MLPConfig(hidden=[8]), learner, directory, record={"values": {"env_steps": env_steps}})


def test_a_report_says_what_the_simulator_could_not_do(tmp_path: Path) -> None:
    trainer(NamelessTask(), tmp_path).run()
    report, page = json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.md").read_text()
    assert len(report["notes"]) == 2
    for note, part in zip(report["notes"], ("no numbered initial states", "cannot be restored"), strict=True):
        assert part in note
        assert note in page
    assert [row["repeatable"] for row in report["evaluations"]] == [False] * 3
    assert [row["step_limit"] for row in report["evaluations"]] == [None] * 3
    assert "paired on the same episodes" not in page
    assert "RL over SFT on wide" in page
    for gain in report["gains"]:  # Newcombe's interval of two rates is never as narrow as that of no differing pair
        assert gain["high"] - gain["low"] > 0.3


def test_a_report_on_a_simulator_that_can_do_it_all_has_no_notes(tmp_path: Path) -> None:
    trainer(ReachTask(), tmp_path).run()
    assert json.loads((tmp_path / "report.json").read_text())["notes"] == []
    assert "paired on the same episodes" in (tmp_path / "report.md").read_text()


class Killed(BaseException):
    """The process was killed."""


def dies(after: int) -> type[Experiment]:
    class Dies(Experiment):
        def _step(self, stage, parts):
            if stage.name == "rl" and self.counters["iteration"] == after:
                raise Killed
            return super()._step(stage, parts)

    return Dies


@pytest.mark.parametrize("task", [NamelessTask, SingleTask])
def test_a_run_that_cannot_be_put_back_goes_on_with_new_episodes(tmp_path: Path, task: type[NamelessTask]) -> None:
    with pytest.raises(Killed):
        trainer(task(), tmp_path, kind=dies(2)).run()
    resumed = trainer(task(), tmp_path)
    assert resumed.counters["iteration"] == 2
    resumed.run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "rl/value_loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] >= 300


def test_one_simulation_serves_training_and_all_evaluations(tmp_path: Path) -> None:
    task = SingleTask()
    report = trainer(task, tmp_path).run()
    assert len(task.made) == 1
    seen = task.made[0].visits
    visits = [place for place, before in zip(seen, [None, *seen], strict=False) if place != before]
    both = [("wide", "eval"), ("narrow", "eval")]
    assert visits == [*both, ("wide", "train"), *both, *both]  # SFT; RL, its evaluation; the control's
    assert task.made[0].asked == ("wide", "train")
    assert set(report.results) == {
        (stage, name) for stage in ("sft", "rl", "sft_control") for name in task.distributions
    }


def test_episodes_restart_after_an_evaluation_in_the_same_simulation(tmp_path: Path) -> None:
    task = SingleTask()
    run = trainer(task, tmp_path)
    run.policy.fit(run.demonstrations.observation, run.demonstrations.actions)
    _, collector = run.learner_and_collector(run.env, run.policy, run.demonstrations)
    collector.collect(1)
    with run._evaluation_env("narrow", {"collector": collector}) as env:
        evaluate(env, run.policy, starts_per_task=2)
        assert env.place == ("narrow", "eval")
    rollout = collector.collect(1)
    assert task.made[0].place == ("wide", "train")
    assert torch.equal(rollout.episode_steps[0], rollout.executed[0].sum(-1).float())


def test_a_run_keeps_its_rollouts_where_it_is_asked_to(tmp_path: Path) -> None:
    class OnDisk(Experiment):
        def learner_and_collector(self, *parts):
            learner, collector = super().learner_and_collector(*parts)
            assert (collector.storage, collector.folder) == (Storage.DISK, tmp_path / "disk")
            return learner, collector

    config = trainer(ReachTask(), tmp_path / "device").config
    parts = (ReachTask(), MLPConfig(hidden=[8]), PPOConfig(rollout_length=4, minibatch=64, epochs=1))
    found = [
        kind(replace(config, storage=storage, stages=["rl"]), *parts, tmp_path / storage.value, record={}).run()
        for kind, storage in ((Experiment, Storage.DEVICE), (OnDisk, Storage.DISK))
    ]
    assert found[0].to_dict()["evaluations"] == found[1].to_dict()["evaluations"]
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {
        path.name for path in (tmp_path / "device").iterdir()
    }
