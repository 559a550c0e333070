"""A whole run on a small task: stages and their report, incompatible parts, start and end."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import embodied.training.experiment
from embodied import seeding
from embodied.algorithms.imitation.distillation import DistillationConfig
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.on_policy import ppo
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.algorithms.on_policy.ranking import RankingConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.rollout.random_play import first_decisions
from embodied.saving import checkpoint
from embodied.task import Task
from embodied.training.built_run import check_first_start
from embodied.training.experiment import Experiment, ExperimentConfig
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig, Sampler
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from sims.libero.task import LiberoTask
from tests.embodied.counter import Counter
from tests.embodied.ranking_mlp import RankingMLPConfig
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach


class ReachTask(Task):
    """Demonstrations push half of the way at most, so that SFT alone often misses the step limit."""

    name, distributions, asset_kind = "reach", ("wide",), "official"

    def contract(self, distribution: str) -> Contract:
        return Reach(1).contract

    def environment(self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu") -> Reach:
        return Reach(num_envs, seed=seed)

    def demonstrations(self, directory: Path, seed: int) -> Episodes:
        episodes = []
        for start in range(4):
            position = (1.0 - 2.0 * (start % 2)) * (0.3 + 0.05 * start) * torch.linspace(1.0, 0.2, 6)
            seen = TensorDict({"position": position[:5, None], "task": torch.full((5, 1), start % 2.0)}, [5])
            episodes.append(Episodes.of(seen, position.diff()[:, None]))
        return Episodes.join(episodes)

    def video(self, path: Path, policies: dict, device: str) -> None:
        raise AssertionError("video=false")


class ScratchTask(ReachTask):
    """Without demonstrations."""

    def contract(self, distribution: str) -> Contract:
        return SmoothReach(1).contract

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> SmoothReach:
        return SmoothReach(num_envs)

    def demonstrations(self, directory: Path, seed: int) -> None:
        return None


PPO = PPOConfig(rollout_length=8, minibatch=64, epochs=2, discount=0.9, learning_rate=1e-3)
IMITATION = SelfImitationConfig(rollout_length=8, gradient_steps=10, capacity=1000)
LEARNERS = {
    "ppo": PPO,
    "self_imitation": IMITATION,
    "ranking": RankingConfig(IMITATION, gradient_steps=5, minibatch=64, value_minibatch=64, warmup=3),
}
SCRATCH = {
    "bptt": BPTTConfig(rollout_length=5, critic=True, discount=0.9),
    "td3": TD3Config(rollout_length=10, warmup=100, gradient_steps=4, minibatch=32),
    "distillation": DistillationConfig(
        MLPConfig(hidden=[8]), BPTTConfig(rollout_length=5), teacher_steps=100, rollout_length=10, minibatch=4
    ),
}
POLICY = RankingMLPConfig(hidden=[16])
STUDENT = RecurrentConfig(hidden=[8], encoder=4, memory=4)
ITERATIONS = 6
SFT_STEPS = 50
SFT_CONFIG = SFTConfig(SFT_STEPS, batch=16, learning_rate=3e-3)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing curves takes most of the time of such a small run."""
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


def trainer(
    directory: Path, algorithm: str, kind: type[Experiment] = Experiment, *, iterations: int = ITERATIONS, seed: int = 0
) -> Experiment:
    algorithm, _, beside = algorithm.partition(", ")
    config = ExperimentConfig(
        num_envs=8,
        env_steps=iterations * 80,
        checkpoint_every=2,
        evaluation_starts=6,
        evaluation_envs=4,
        video=False,
        sft=SFT_CONFIG,
        overlap=beside == "overlap",
    )
    task = ScratchTask() if algorithm in SCRATCH else ReachTask()
    policy = STUDENT if algorithm == "distillation" else POLICY
    record = {"values": {"env_steps": config.env_steps, "seed": seed, "video": False}}
    return kind(config, task, policy, (LEARNERS | SCRATCH)[algorithm], directory, record=record, seed=seed)


class TriedTask(ReachTask):
    """As many demonstrations that push away from the origin, and failed."""

    alone = False

    def demonstrations(self, directory: Path, seed: int) -> Episodes:
        shown = super().demonstrations(directory, seed)
        actions = 0.25 * shown.observation["position"].sign()
        away = replace(shown, actions=actions, success=torch.zeros(4, dtype=torch.int8))
        return away if self.alone else Episodes.join([shown, away])


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_failed_demonstrations_are_counted_and_not_imitated(tmp_path: Path, algorithm: str) -> None:
    """The run is that with the successes alone, bit for bit: SFT, its control and self-imitation."""
    records = []
    for task in (ReachTask(), TriedTask()):
        config, learner = trainer(tmp_path / "config", algorithm).config, LEARNERS[algorithm]
        run = Experiment(config, task, POLICY, learner, tmp_path / type(task).__name__, record={"values": {}})
        records.append(run.run().to_dict())
    alone, both = records
    assert both["evaluations"] == alone["evaluations"]
    assert "Of 8 demonstrations 4 failed and are not imitated." in both["notes"]
    assert not any("demonstrations" in note for note in alone["notes"])
    assert "4 failed and are not imitated" in (tmp_path / "TriedTask/report.md").read_text()


def test_demonstrations_that_all_failed_are_refused(tmp_path: Path) -> None:
    task = TriedTask()
    task.alone = True
    config = trainer(tmp_path / "config", "ppo").config
    with pytest.raises(UserError, match="all 4 episodes of the demonstrations failed; imitation needs others"):
        Experiment(config, task, POLICY, PPO, tmp_path / "run", record={"values": {}})


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_run_reports_every_stage(tmp_path: Path, algorithm: str) -> None:
    run = trainer(tmp_path, algorithm)
    run.run()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["stage"] for row in report["evaluations"]] == ["sft", "sft_control", "rl"]
    assert report["env_steps"] >= ITERATIONS * 80
    assert {"simulation", "policy", "update", "evaluation"} <= set(report["wall_s"])
    assert all(row["episodes"] == 12 for row in report["evaluations"])
    # the control took the gradient steps of RL
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    control = [row["step"] for row in rows if "sft_control/loss" in row]
    assert control[-1] - SFT_STEPS == run.counters["rl_gradient_steps"] > 0
    assert trainer(tmp_path, algorithm).run().to_dict()["evaluations"] == report["evaluations"]


def test_distributions_other_than_that_of_training_may_run_fewer_starts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ReachTask, "variants", ("wide:held_out",), raising=False)
    run = trainer(tmp_path, "ppo")
    run.config.comparison_starts = 2
    record = run.run().to_dict()
    assert {(row["stage"], row["distribution"]): row["episodes"] for row in record["evaluations"]} == {
        ("sft", "wide"): 12,
        ("sft_control", "wide"): 12,
        ("rl", "wide"): 12,
        ("rl", "wide:held_out"): 4,
    }
    run.config.comparison_starts = 7  # more than all
    assert run._starts("rl", "wide:held_out", "rl") == run.config.evaluation_starts == 6


def test_evaluations_may_begin_with_another_start_on_one_distribution(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ReachTask, "variants", ("wide:held_out",), raising=False)
    usual = trainer(tmp_path / "usual", "ppo").run().results
    run = trainer(tmp_path / "later", "ppo")
    run.config.evaluation_first_start = 3
    run.config.comparison_starts = 0
    report = run.run()
    assert {distribution for _, distribution in report.results} == {"wide"}
    later = report.results["rl", "wide"]
    assert (later.first_start, later.summary()["first_start"]) == (3, 3)
    # the first three of them are the last three of six
    assert torch.equal(later.steps[:, :3], usual["rl", "wide"].steps[:, 3:])
    assert not torch.equal(later.steps, usual["rl", "wide"].steps)


def test_a_first_start_that_does_not_exist_is_refused_before_training() -> None:
    with pytest.raises(UserError, match="each task has 60, numbered 0 to 59"):
        check_first_start(Counter(num_envs=4, num_starts=60), 60)
    check_first_start(Counter(num_envs=4, num_starts=61), 60)
    with pytest.raises(UserError, match="needs numbered initial states"):
        check_first_start(object(), 60)
    with pytest.raises(UserError, match="expected at most 8388558"):
        ExperimentConfig(evaluation_first_start=1 << 23)


def test_a_run_that_diverges_is_one_line_that_names_its_last_good_checkpoint(tmp_path: Path, monkeypatch) -> None:
    losses = ppo.PPO._losses

    def broken(self: ppo.PPO, batch: TensorDict, count: float) -> tuple:
        loss, sums = losses(self, batch, count)
        factor = torch.nan if self.gradient_steps >= 9 else 1.0
        return factor * loss, {name: factor * value if name == "value_loss" else value for name, value in sums.items()}

    monkeypatch.setattr(ppo.PPO, "_losses", broken)
    run = trainer(tmp_path, "ppo")
    with pytest.raises(UserError, match=r"^value loss became nan at gradient step 10; try a lower learning") as error:
        run.run()
    assert "\n" not in str(error.value)
    assert all(weights.isfinite().all() for weights in run.policy.parameters())
    last = max((tmp_path / "checkpoint").iterdir())
    assert str(error.value).endswith(f"; the last good checkpoint is {last}: start_from={last}")
    monkeypatch.undo()
    config = replace(run.config, start_from=str(last), stages=["rl"])
    again = Experiment(config, run.task, POLICY, PPO, tmp_path / "again", record={})
    good = checkpoint.load(last).policy
    assert all(torch.equal(weights, good[name]) for name, weights in again.policy.state_dict().items())


def test_supervised_training_that_diverges_says_that_nothing_was_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path, "ppo")
    run.config.sft = replace(SFT_CONFIG, learning_rate=1e30)
    with pytest.raises(UserError, match=r"^(supervised loss|gradient) became .* gradient step \d; .*; no checkpoint"):
        run.run()


def test_the_control_is_supervised_training_that_never_stopped(tmp_path: Path) -> None:
    class Watched(Experiment):
        """Records the weights of evaluated policies."""

        def _evaluate(self, stage, parts):
            weights[stage.name] = {name: value.clone() for name, value in stage.policy.state_dict().items()}
            super()._evaluate(stage, parts)

    weights: dict[str, dict] = {}
    run = trainer(tmp_path, "ppo", Watched)
    policy = copy.deepcopy(run.policy)
    run.run()
    shown = ReachTask().demonstrations(tmp_path, 0)
    policy.fit(shown.observation, shown.actions)
    learner = SFT_CONFIG.build(policy, seeding.generator(0, "sft"))
    for stage, steps in (("sft", SFT_STEPS), ("sft_control", run.counters["rl_gradient_steps"])):
        learner.fit(shown, steps)
        assert all(torch.equal(weights[stage][name], value) for name, value in policy.state_dict().items())
    assert learner.optimiser.param_groups[0]["lr"] == SFT_CONFIG.final_learning_rate


def test_every_stage_is_evaluated_on_all_distributions_and_rl_on_their_variants(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ReachTask, "distributions", ("wide", "narrow"))
    monkeypatch.setattr(ReachTask, "variants", ("narrow:held_out",), raising=False)
    trainer(tmp_path, "ppo", iterations=1).run()
    rows = json.loads((tmp_path / "report.json").read_text())["evaluations"]
    assert sorted((row["stage"], row["distribution"]) for row in rows) == [
        *[("rl", "narrow"), ("rl", "narrow:held_out"), ("rl", "wide")],
        *[("sft", "narrow"), ("sft", "wide"), ("sft_control", "narrow"), ("sft_control", "wide")],
    ]


def test_what_is_filmed_is_what_sft_and_rl_ended_with(tmp_path: Path) -> None:
    class Watched(Experiment):
        def _evaluate(self, stage, parts):
            ended[stage.name] = copy.deepcopy(stage.policy.state_dict())
            super()._evaluate(stage, parts)

    def film(path: Path, policies: dict, device: str) -> None:
        filmed.update({name: copy.deepcopy(policy.state_dict()) for name, policy in policies.items()})

    ended: dict[str, dict] = {}
    filmed: dict[str, dict] = {}
    run = trainer(tmp_path, "ppo", Watched)
    run.config, run.task.video = replace(run.config, video=True), film
    run.run()
    assert list(filmed) == ["before: SFT", "after: RL"]
    torch.testing.assert_close(filmed["before: SFT"], ended["sft"], rtol=0.0, atol=0.0)
    torch.testing.assert_close(filmed["after: RL"], ended["rl"], rtol=0.0, atol=0.0)
    actor = "actor.0.weight"
    assert not torch.equal(ended["sft"][actor], ended["rl"][actor])


def test_a_run_that_cannot_be_filmed_is_complete_and_its_report_says_why(tmp_path: Path) -> None:
    def film(path: Path, policies: dict, device: str) -> None:
        raise UserError("films need OpenGL")

    run = trainer(tmp_path, "ppo")
    run.config, run.task.video = replace(run.config, video=True), film
    run.run()
    assert json.loads((tmp_path / "report.json").read_text())["notes"] == ["No video: films need OpenGL."]
    assert "No video: films need OpenGL." in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("algorithm", SCRATCH)
def test_without_demonstrations_a_run_is_reinforcement_learning_alone(tmp_path: Path, algorithm: str) -> None:
    run = trainer(tmp_path, algorithm)
    run.run()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["stage"] for row in report["evaluations"]] == ["rl"]
    row = report["evaluations"][0]
    assert 0 < row["distance_m"] < 2  # the environment's own metric
    assert len([each["distance_m"] for each in row["per_task"]]) == 2
    assert report["cpu_s"] > 0
    assert run.policy.fitted
    page = (tmp_path / "report.md").read_text()
    assert "| stage | distribution | success [95% interval] | distance_m |" in page


def test_a_run_from_scratch_has_a_measured_before_if_its_evaluation_is_cheap(tmp_path: Path) -> None:
    run = trainer(tmp_path, "td3")
    run.run()
    assert ("untrained", "wide") not in run.report.results  # unknown: it would cost more than 5% of 80 steps
    result, name = run.report.results["rl", "wide"], run.task.distributions[0]
    cost = len(result.tasks) * result.step_limit
    for env_steps, starts in ((100 * cost - 1, 0), (100 * cost, 5), (150 * cost, 6)):
        run.counters["env_steps"] = env_steps
        run.config = replace(run.config, evaluation_starts=6)
        assert run._starts("untrained", name, "rl") == starts
    run._evaluate_in_first_process(run._policy_before(), {}, "untrained")
    assert run.report.results["untrained", name].success.shape[1] == 6
    assert run.report.gains()["untrained", name].low is not None
    initial = run._policy_before().state_dict()
    assert any(not torch.equal(value, run.policy.state_dict()[key]) for key, value in initial.items())


def test_every_environment_is_asked_to_be_where_the_policy_is(tmp_path: Path) -> None:
    asked = []

    class Placed(ScratchTask):
        def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
            asked.append((split, device))
            return super().environment(num_envs, distribution, split)

    config = ExperimentConfig(num_envs=8, env_steps=80, evaluation_starts=2, evaluation_envs=2, video=False)
    Experiment(config, Placed(), POLICY, SCRATCH["td3"], tmp_path, record={}, device="cpu:0").run()
    assert asked == [("train", "cpu:0"), ("eval", "cpu:0"), ("train", "cpu:0")]  # the last for random play


def test_success_and_return_are_reported_where_an_episode_ended(tmp_path: Path) -> None:
    """Episodes of up to seven steps, two decisions of one step per iteration: none ends in the first."""

    class Away(SmoothReach):
        """Nothing succeeds."""

        def step(self, actions: torch.Tensor) -> Transition:
            return super().step(torch.full_like(actions, 0.25) * self.position.sign().view(-1, 1, 1))

    class AwayTask(ScratchTask):
        def environment(self, num_envs: int, *_: object, **__: object) -> SmoothReach:
            return Away(num_envs)

    config = ExperimentConfig(4, env_steps=4 * 14, evaluation_starts=2, evaluation_envs=2, video=False)
    learner = PPOConfig(rollout_length=2, minibatch=8, epochs=1)
    Experiment(config, AwayTask(), POLICY, learner, tmp_path, record={}).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    message = [{key: value for key, value in row.items() if key.startswith("rollout/")} for row in rows]
    assert [set(row) for row in message[:3]] == [set()] * 3
    assert (message[3]["rollout/success"], message[3]["rollout/episode_steps"]) == (0.0, 7.0)
    assert message[3]["rollout/episode_return"] < -7 * 0.3**2  # the reward is -x^2 after each step


def test_a_task_with_a_baseline_has_it_measured_on_the_same_episodes(tmp_path: Path) -> None:
    class Compared(ScratchTask):
        def baselines(self) -> dict:
            policy = MLPConfig(hidden=[4]).build(self.contract("wide"))
            policy.fit(*first_decisions(self.environment(1, "wide", "eval"), torch.Generator()))
            return {"beginner": policy}

    config = ExperimentConfig(num_envs=8, env_steps=200, evaluation_starts=4, evaluation_envs=8, video=False)
    algorithm = PPOConfig(rollout_length=4, epochs=1, minibatch=16)
    Experiment(config, Compared(), MLPConfig(hidden=[8]), algorithm, tmp_path, record={}).run()
    assert [row["stage"] for row in json.loads((tmp_path / "report.json").read_text())["evaluations"]] == [
        "baseline beginner",
        "rl",
    ]


class Seen(Reach):
    """Reach with a camera."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        front = TensorSpec((8, 8, 3), "uint8")
        self.contract = replace(self.contract, observation=self.contract.observation | {"front": front})

    def _observation(self) -> TensorDict:
        return super()._observation().set("front", torch.zeros(self.num_envs, 8, 8, 3, dtype=torch.uint8))


def test_pictures_that_the_policy_ignores_are_in_the_log_and_in_the_report(tmp_path: Path, caplog) -> None:
    class SeenTask(ScratchTask):
        def contract(self, distribution: str) -> Contract:
            return Seen(1).contract

        def environment(self, num_envs: int, *given: object, **more: object) -> Seen:
            return Seen(num_envs)

    config = ExperimentConfig(num_envs=8, env_steps=8, evaluation_starts=4, evaluation_envs=8, video=False)
    algorithm = PPOConfig(rollout_length=1, epochs=1)
    Experiment(config, SeenTask(), MLPConfig(hidden=[4]), algorithm, tmp_path / "blind", record={}).run()
    assert "The policy does not read these observations: front (picture)." in (tmp_path / "blind/report.md").read_text()
    assert "the policy does not read front (picture)" in caplog.text
    caplog.clear()
    policy = FlowConfig(width=8, hidden=8, encoder=EncoderKind.PICTURES)
    seeing = Experiment(config, SeenTask(), policy, algorithm, tmp_path / "seeing", record={})
    assert "does not read" not in caplog.text + "".join(seeing.report.notes)


def test_what_cannot_work_says_so_before_anything_runs(tmp_path: Path) -> None:
    class Undemonstrated(ReachTask):
        def demonstrations(self, directory, seed):
            raise AssertionError("demonstrations were made")

    directory, config = tmp_path / "run", ExperimentConfig(num_envs=8, evaluation_envs=8)
    with pytest.raises(UserError, match="expected a differentiable simulator for algorithm=bptt"):
        Experiment(config, Undemonstrated(), POLICY, SCRATCH["bptt"], directory, record={})
    with pytest.raises(UserError, match="imitation needs demonstrations, but this task has none"):
        Experiment(config, ScratchTask(), POLICY, IMITATION, directory, record={})
    with pytest.raises(UserError, match="expected num_envs of at least 2, one per task; got 1"):
        Experiment(ExperimentConfig(evaluation_envs=1), Undemonstrated(), POLICY, PPO, directory, record={})
    assert not directory.exists()


def test_a_flow_without_likelihood_is_refused_by_ppo_before_anything_runs(tmp_path: Path) -> None:
    task = LiberoTask(tasks=["0"], assets="stand-in")
    config = ExperimentConfig(num_envs=1, evaluation_envs=1)
    policy = FlowConfig(width=8, hidden=8, sampler=Sampler.ODE)
    with pytest.raises(
        UserError,
        match="whose samples have a log-probability for algorithm=ppo",
    ):
        Experiment(config, task, policy, PPO, tmp_path / "run", record={})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["ppo", "ranking"])
def test_another_seed_trains_from_other_starts(tmp_path: Path, algorithm: str) -> None:
    def starts(seed: int) -> set[int]:
        class Watched(Experiment):
            def learner_and_collector(self, env, policy, demonstrations):
                learner, collector = super().learner_and_collector(env, policy, demonstrations)
                collect = collector.collect

                def watched(decisions):
                    rollout = collect(decisions)
                    found.update(rollout.start.flatten().tolist())
                    return rollout

                collector.collect = watched
                return learner, collector

        found: set[int] = set()
        trainer(tmp_path / str(seed), algorithm, Watched, seed=seed).run()
        return found

    first, second = starts(0), starts(1)
    assert len(first) > 10
    assert not first & second


def test_another_seed_explores_with_other_noise(tmp_path: Path) -> None:
    def actions(run: Experiment) -> torch.Tensor:
        """Of the same policy in the same initial states."""
        _, collector = run.learner_and_collector(Reach(8), copy.deepcopy(first.policy), first.demonstrations)
        return collector.collect(1).actions

    first, second = (trainer(tmp_path / str(seed), "ppo", seed=seed) for seed in (0, 1))
    first.policy.fit(Reach(64).reset(), torch.zeros(64, 2, 1))
    assert torch.equal(actions(first), actions(first))
    assert not torch.isclose(actions(first), actions(second)).any()


def test_time_limits_are_no_terminations_in_what_learners_get(tmp_path: Path) -> None:
    class Watched(Experiment):
        def learner_and_collector(self, env, policy, demonstrations):
            learner, collector = super().learner_and_collector(env, policy, demonstrations)
            update = learner.update

            def watched(rollout, progress, world):
                rollouts.append(rollout)
                return update(rollout, progress, world)

            learner.update = watched
            return learner, collector

    rollouts: list = []
    run = trainer(tmp_path, "ppo", Watched)
    run.run()
    position = torch.stack([rollout.next_observation()["position"].squeeze(-1) for rollout in rollouts])
    terminated, truncated = (
        torch.stack([getattr(each, name) for each in rollouts]) for name in ("terminated", "truncated")
    )
    assert torch.equal(terminated, position.abs() < 0.1)
    assert truncated.any()
    assert not (terminated & truncated).any()
    assert run.report.episodes == int((terminated | truncated).sum())
    assert run.report.env_steps == sum(rollout.env_steps for rollout in rollouts)


def test_a_policy_of_another_contract_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "ppo").run()

    class OtherTask(ReachTask):
        def contract(self, distribution: str) -> Contract:
            return replace(SmoothReach(1).contract, control_dt_s=0.2)

        def environment(self, *_: object, **__: object) -> Reach:
            raise AssertionError("an environment was made first")

    with pytest.raises(ValueError, match=r"trained with another contract .*control_dt_s"):
        Experiment(ExperimentConfig(num_envs=8), OtherTask(), POLICY, LEARNERS["ppo"], tmp_path, record={})
