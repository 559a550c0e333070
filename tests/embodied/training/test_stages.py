"""The list of stages: learners from outside the package, what follows what, and resumption inside each stage."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.off_policy.residual import ResidualConfig
from embodied.algorithms.off_policy.sac import WSRLConfig
from embodied.algorithms.offline.calql import CalQLConfig
from embodied.algorithms.offline.off_policy_evaluation import Estimator, OffPolicyEvaluationConfig
from embodied.algorithms.offline.rebrac import ReBRACConfig
from embodied.algorithms.offline.rounds import RoundsConfig
from embodied.algorithms.parts import Composite
from embodied.errors import DivergedError, UserError
from embodied.policy import Steering
from embodied.saving import checkpoint
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.plan import plan
from embodied.training.stages import offline
from embodied.training.stages.registry import STAGES
from policies.flow import FlowConfig
from policies.generation.steering import SteeringConfig
from policies.squashed import SquashedConfig
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same
from tests.embodied.training.test_experiment import POLICY, PPO, SFT_CONFIG, ReachTask, ScratchTask, trainer

STEPS = 30


class Imitation(SFT):
    """SFT that logs two metrics."""

    def fit(self, episodes, steps, world) -> dict[str, float]:
        return super().fit(episodes, steps, world) | {"steps": float(self.gradient_steps)}


@dataclass
class ImitationConfig(SFTConfig):
    """An offline learner from outside the package."""

    steps: int = STEPS
    batch: int = 16
    kind: type = field(default=Imitation)

    def build(self, policy, generator):
        return self.kind(policy, self, generator)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Frequent checkpoints, and no drawing of curves, which takes most of the time of such a small run."""
    monkeypatch.setattr(offline, "SEGMENT", 10)
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


def make(
    directory: Path,
    stages: list[str],
    kind: type[Experiment] = Experiment,
    learner: object = None,
    task: ReachTask | None = None,
    **options,
) -> Experiment:
    config = ExperimentConfig(
        num_envs=8,
        env_steps=240,
        checkpoint_every=2,
        evaluation_starts=4,
        evaluation_envs=4,
        video=False,
        stages=stages,
        sft=replace(SFT_CONFIG, steps=20),
        **options,
    )
    learner = learner or ImitationConfig() if "offline" in stages else None
    algorithm = PPO if "rl" in stages else None
    return kind(config, task or ReachTask(), POLICY, algorithm, directory, record={"values": {}}, offline=learner)


def rows(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time")} for line in lines]


def report(directory: Path) -> dict:
    return json.loads((directory / "report.json").read_text())


def test_one_stage_is_trained_evaluated_and_reported(tmp_path: Path) -> None:
    run = make(tmp_path, ["offline"])
    assert run.stages == ["offline", "done"]
    run.run()
    assert [row["offline/steps"] for row in rows(tmp_path)] == [10.0, 20.0, 30.0]
    assert [row["stage"] for row in report(tmp_path)["evaluations"]] == ["offline"]
    assert report(tmp_path)["headline"].startswith("Offline learning reached ")
    assert run.policy.fitted
    assert make(tmp_path, ["offline"]).stage == "done"


def test_three_stages_follow_each_other_and_the_control_takes_the_steps_of_both_later_ones(tmp_path: Path) -> None:
    run = make(tmp_path, ["sft", "offline", "rl"])
    assert run.stages == ["sft", "offline", "rl", "sft_control", "done"]
    run.run()
    saved = checkpoint.load(tmp_path).counters
    assert (saved["stage"], saved["offline_gradient_steps"]) == ("done", STEPS)
    control = [row["step"] for row in rows(tmp_path) if "sft_control/loss" in row]
    assert control[-1] == 20 + STEPS + saved["rl_gradient_steps"]
    made = report(tmp_path)
    assert [row["stage"] for row in made["evaluations"]] == ["sft", "sft_control", "offline", "rl"]
    assert [gain["over"] for gain in made["gains"]] == ["sft", "sft_control", "offline"]
    assert {each["over"] for each in made["regressions"]} <= {"offline"}
    assert saved["rl_gradient_steps"] > 0


def test_a_second_run_distils_the_small_actor_of_the_first_one(tmp_path: Path) -> None:
    config = make(tmp_path / "other", ["rl"]).config
    policy = FlowConfig(
        width=8, hidden=8, turn_rad=0.0, denoising_steps=1, steering=SteeringConfig(Steering.RESIDUAL, hidden=[8])
    )
    learners = {
        "residual": ResidualConfig(rollout_length=8, warmup=1, hidden=[8], updates=0.1),
        "distilled": SelfImitationConfig(rollout_length=8, rounds=1, gradient_steps=2, sft=SFTConfig(batch=8)),
    }
    steers = []
    for name, learner in learners.items():
        run = Experiment(config, ReachTask(), policy, learner, tmp_path / name, record={"values": {}})
        run.run()
        steers.append(bool(run.policy.steers))
        config = replace(config, start_from=str(tmp_path / name))
    assert steers == [True, False]
    assert [row["stage"] for row in report(tmp_path / "distilled")["evaluations"]] == ["start", "rl"]


def test_offline_learning_is_compared_with_sft_and_its_control(tmp_path: Path) -> None:
    make(tmp_path, ["sft", "offline"]).run()
    made = report(tmp_path)
    assert [gain["over"] for gain in made["gains"]] == ["sft", "sft_control"]
    assert made["headline"].startswith("Offline learning ")
    assert "environment steps" not in made["headline"]
    assert "offline over SFT on wide" in (tmp_path / "report.md").read_text()
    assert '<th scope="col">gain of offline</th>' in (tmp_path / "report.html").read_text()


def test_a_plan_counts_offline_learning_and_the_state_that_sft_leaves(tmp_path: Path) -> None:
    config, parts = make(tmp_path, ["sft", "offline"]).config, (ReachTask(), POLICY, None)
    stages = plan(config, *parts, offline=ImitationConfig()).stages
    assert list(stages) == ["SFT", "offline", "control"]
    assert stages["offline"]["optimiser", "cpu"] == stages["SFT"]["optimiser", "cpu"] > 0
    assert ("SFT's state, for the control", "cpu") in stages["offline"]
    with pytest.raises(UserError, match="no learner for offline"):
        plan(config, *parts)


class Killed(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_kill_inside_every_stage_changes_no_number(tmp_path: Path, evaluating: bool) -> None:
    class Dies(Experiment):
        """Dies once per stage, between two checkpoints or before the evaluation."""

        def _keep(self, parts, due):
            part = parts["learner"].gradient_steps if self.stage != "rl" else self.counters["iteration"] + 14
            if not evaluating and part % 20 == 17 and self.stage not in died:
                died.append(self.stage)
                raise Killed
            super()._keep(parts, due)

        def _evaluate(self, stage, parts):
            if evaluating and self.stage not in died:
                died.append(self.stage)
                raise Killed
            super()._evaluate(stage, parts)

    stages, died = ["sft", "offline", "rl"], []
    start = tmp_path / "start"
    make(start, ["offline"]).run()
    make(tmp_path / "whole", stages, start_from=str(start)).run()
    for _ in range(6):
        try:
            make(tmp_path / "parts", stages, Dies, start_from=str(start)).run()
        except Killed:
            continue
    expected = ["sft", "offline", "rl", "sft_control"]
    assert died == (["start"] * evaluating + expected)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert report(tmp_path / "parts")["evaluations"] == report(tmp_path / "whole")["evaluations"]
    first, second = (checkpoint.load(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(value, second.policy[name]) for name, value in first.policy.items())


class RecordedTask(ReachTask):
    """ReachTask with recorded episodes that have rewards, of which the last have `unknown` actions."""

    unknown = 0

    def demonstrations(self, directory, seed):
        episodes = recorded()
        episodes.actions[episodes.steps - self.unknown :] = torch.nan
        return episodes


def test_reinforcement_learning_goes_on_with_the_critics_of_an_offline_learner(tmp_path: Path) -> None:
    config = ExperimentConfig(
        num_envs=8, env_steps=64, evaluation_starts=4, evaluation_envs=4, video=False, stages=["offline", "rl"]
    )
    critics = {"hidden": [16], "layer_norm": True}
    online = WSRLConfig(warmup=1000, rollout_length=4, **critics)  # no step changes the critics
    offline_config = CalQLConfig(steps=3, batch=16, sampled_actions=2, **critics)
    run = Experiment(
        config, RecordedTask(), SquashedConfig(hidden=[16]), online, tmp_path, record={}, offline=offline_config
    )
    run.run()
    state = checkpoint.load(tmp_path / checkpoint.FOLDER / f"{run.counters['rl_checkpoint']:06d}").state
    assert same(state["parts"]["learner"]["critics"], state["before"]["values"]["critics"])
    assert "Reinforcement learning took no gradient step" in (tmp_path / "report.md").read_text()
    with pytest.raises(UserError, match="have other layers"):
        Experiment(
            config,
            RecordedTask(),
            SquashedConfig(hidden=[16]),
            replace(online, hidden=[8]),
            tmp_path / "other",
            record={},
            offline=offline_config,
        )
    assert not (tmp_path / "other").exists()


def test_unknown_actions_of_demonstrations_are_predicted_once_or_refused(tmp_path: Path) -> None:
    task = RecordedTask()
    task.unknown = 30
    config = ExperimentConfig(num_envs=8, evaluation_envs=4, stages=["sft"], label_actions=5)
    made = [Experiment(config, task, POLICY, None, tmp_path / "run", record={}) for _ in range(2)]
    actions = [each.demonstrations.actions for each in made if each.demonstrations is not None]
    assert actions[0].isfinite().all()
    assert torch.equal(*actions)
    assert any("Actions of 30 of" in note for note in made[1].report.notes)
    with pytest.raises(UserError, match="actions are unknown in 5 of 60 episodes: add label_actions"):
        Experiment(replace(config, label_actions=0), task, POLICY, None, tmp_path / "other", record={})


def test_gated_rounds_are_reported_and_resumed(tmp_path: Path) -> None:
    class Dies(Experiment):
        """Dies once, in the second round."""

        def _keep(self, parts, due):
            if not died and parts["learner"].gradient_steps == 27:
                died.append(True)
                raise Killed
            super()._keep(parts, due)

    died = []
    evaluation = OffPolicyEvaluationConfig(hidden=[16], steps=5, batch=16)
    rounds = RoundsConfig(count=2, gate=Estimator.FQE, collected=1, evaluation=evaluation)
    learner = ReBRACConfig(steps=20, batch=16, hidden=[16])
    for name, kind in (("whole", Experiment), ("parts", Dies), ("parts", Dies)):
        try:
            make(tmp_path / name, ["offline"], kind, learner, rounds=rounds, task=RecordedTask()).run()
        except Killed:
            continue
    made = report(tmp_path / "whole")
    assert [(each["round"], each["episodes"]) for each in made["rounds"]] == [(1, 60), (2, 68)]
    assert made["rounds"][1]["collected"] == {"episodes": 8, "env_steps": made["env_steps"]}
    assert made["episodes"] == 8 < made["env_steps"]
    assert f"{made['env_steps']:,} environment steps in 8 episodes" in (tmp_path / "whole" / "report.md").read_text()
    assert "present" not in made["rounds"][0]
    assert made["rounds"][1]["present"] != made["rounds"][1]["estimate"]
    sentences = [each["sentence"] for each in made["rounds"]]
    assert sentences == [note for note in made["notes"] if note.startswith("Offline round")]
    assert all(each in (tmp_path / "whole" / "report.html").read_text() for each in sentences)
    assert report(tmp_path / "parts")["rounds"] == made["rounds"]
    assert report(tmp_path / "parts")["evaluations"] == made["evaluations"]
    assert checkpoint.load(tmp_path / "whole").counters["offline_gradient_steps"] == 40
    with pytest.raises(UserError, match=r"rounds are those of the stage offline.*stages=\[sft,offline\]"):
        make(tmp_path / "other", ["sft"], rounds=rounds)


def test_learners_and_stages_must_go_together(tmp_path: Path) -> None:
    config = ExperimentConfig(num_envs=8, evaluation_envs=4)
    for stages, task, algorithm, learner, message in (
        (["offline"], ReachTask(), PPO, None, "no learner for offline; set offline=NAME"),
        (["sft", "rl"], ReachTask(), None, None, r"no learner for rl; set algorithm=NAME"),
        (["sft"], ReachTask(), PPO, ImitationConfig(), r"offline= is not used by stages=\['sft'\]"),
        (["offline"], ScratchTask(), None, ImitationConfig(), r"no demonstrations for stages=\[offline\]"),
    ):
        with pytest.raises(UserError, match=message):
            Experiment(
                replace(config, stages=stages), task, POLICY, algorithm, tmp_path / "run", record={}, offline=learner
            )
    for stages in (["rl", "offline"], ["sft", "sft"], ["model"], []):
        with pytest.raises(UserError, match="expected stages of sft, offline, rl in this order"):
            ExperimentConfig(stages=stages)
    assert not (tmp_path / "run").exists()


class Idle(Imitation):
    """Takes no steps."""

    def fit(self, episodes, steps, world) -> dict[str, float]:
        return {"loss": 0.0}


class Diverging(Imitation):
    """Its second metric is a loss that is not finite."""

    def fit(self, episodes, steps, world) -> dict[str, float]:
        return super().fit(episodes, steps, world) | {"value_loss": float("nan") if self.gradient_steps > 12 else 0.0}


class Holder:
    """An object that is no composite."""


class Hiding(Composite):
    """Steps an optimiser that it does not list."""

    gradient_steps = 0

    def __init__(self, policy, config, generator) -> None:
        self.policy, self.holder = policy, Holder()
        self.holder.optimiser = torch.optim.SGD(policy.parameters())

    def fit(self, episodes, steps, world) -> dict[str, float]:
        self.holder.optimiser.step()
        return {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Idle, r"Idle.fit\(episodes, 1\) did not count a step in gradient_steps"),
        (Diverging, r"^value loss became nan at gradient step 13; .* the last good checkpoint is .*000001"),
        (Hiding, r"Hiding steps an optimiser \(SGD\) that is none of its parts"),
    ],
)
def test_a_learner_that_breaks_its_promises_ends_the_run_in_one_line(tmp_path: Path, kind: type, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path, ["offline"], learner=ImitationConfig(kind=kind)).run()
    assert "\n" not in str(error.value)
    assert isinstance(error.value, DivergedError) == (kind is Diverging)


def test_every_stage_has_a_title_in_the_report(tmp_path: Path) -> None:
    run = trainer(tmp_path, "ppo")
    titles = {name: stage(run).title for name, stage in STAGES.items()}
    assert titles == {"start": "start", "sft": "SFT", "offline": "offline", "rl": "RL", "sft_control": "SFT control"}
