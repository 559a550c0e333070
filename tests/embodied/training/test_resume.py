"""Killed, stopped and extended runs continue with unchanged numbers; other runs are refused."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.on_policy.ppo import PPO, PPOConfig
from embodied.algorithms.on_policy.ranking import Ranking, RankingConfig
from embodied.errors import UserError
from embodied.evaluation import evaluation
from embodied.networks.precision import Precision
from embodied.policy import PolicyConfig
from embodied.rollout.rollout import Collector
from embodied.runtime.interrupt import Stopped
from embodied.saving import checkpoint
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.stages import offline, reinforcement
from policies.flow import FlowConfig
from policies.lerobot.act import ACTConfig
from policies.vla.pi0 import Pi0Config
from policies.vla.smolvla.policy import SmolVLAConfig
from policies.vla.tokens import TokensConfig
from sims.libero.task import LiberoTask
from tests.embodied.training.test_experiment import ITERATIONS, LEARNERS, POLICY, SCRATCH, ReachTask, trainer
from tests.embodied.training.test_experiment import PPO as PPO_CONFIG
from tests.embodied.windy_reach import WindyReach
from tests.policies.vla.checkpoints.test_weights import save
from tests.policies.vla.openvla import prismatic
from tests.policies.vla.smolvla import files as smolvla_files


@pytest.fixture(autouse=True)
def interruptible():
    """A shell's background jobs begin with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def left(directory: Path) -> dict:
    """Everything a run writes except times: report, metrics, and all tensors of its last checkpoint."""
    report = json.loads((directory / "report.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    saved = checkpoint.load(directory)
    tensors = {**saved.policy, **{f"before {name}": value for name, value in saved.state["before"]["policy"].items()}}
    return {
        **{key: report[key] for key in ("evaluations", "gains", "gains_over_better", "env_steps", "episodes")},
        "metrics": [{name: value for name, value in row.items() if not name.startswith("time")} for row in rows],
        "weights": {name: value.numpy().tobytes() for name, value in tensors.items()},
    }


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Frequent checkpoints, and no drawing of curves, which takes most of the time of such a small run."""
    monkeypatch.setattr(offline, "SEGMENT", 10)
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Results of an algorithm's uninterrupted run."""
    found: dict[tuple, dict] = {}

    def get(algorithm: str, iterations: int = ITERATIONS) -> dict:
        if (algorithm, iterations) not in found:
            directory = tmp_path_factory.mktemp("whole")
            trainer(directory, algorithm, iterations=iterations).run()
            found[algorithm, iterations] = left(directory)
        return found[algorithm, iterations]

    return get


def until_done(make) -> int:
    """Run the experiments of `make`, again after every stop; returns the number of stops."""
    stops = 0
    while True:
        try:
            make().run()
        except Stopped:
            stops += 1
        else:
            return stops


@pytest.mark.parametrize("algorithm", [*LEARNERS, *SCRATCH, "ranking, overlap", "td3, overlap"])
def test_stopping_and_continuing_changes_no_number(tmp_path: Path, whole, algorithm: str) -> None:
    class StopsOften(Experiment):
        """Requests a stop after every few checks."""

        looks = 0

        def _keep(self, parts, due):
            self.looks += 1
            self._stop.requested = self.looks == (3 if self.stage == "rl" else 31)
            super()._keep(parts, due)

    assert until_done(lambda: trainer(tmp_path / "parts", algorithm, StopsOften)) >= 1
    assert left(tmp_path / "parts") == whole(algorithm)


class Killed(BaseException):
    """The process was killed."""


class DiesInEveryStage(Experiment):
    """Dies once per stage, between two checkpoints, without saving."""

    died: set[str]

    def _keep(self, parts, due):
        steps = parts["learner"].gradient_steps
        done = {
            "sft": steps == 17,
            "rl": self.counters["iteration"] == 3,
            "sft_control": steps == self.config.sft.steps + 17,
        }
        if done[self.stage] and self.stage not in self.died:
            self.died.add(self.stage)
            raise Killed
        super()._keep(parts, due)


def killed_and_continued(make) -> None:
    DiesInEveryStage.died = set()
    for _ in range(4):
        try:
            make().run()
        except Killed:
            continue
    assert DiesInEveryStage.died >= {"sft", "rl"}


@pytest.mark.parametrize("algorithm", [*LEARNERS, "ppo, overlap"])
def test_a_kill_in_every_stage_changes_no_bit(tmp_path: Path, whole, algorithm: str) -> None:
    killed_and_continued(lambda: trainer(tmp_path / "parts", algorithm, DiesInEveryStage))
    assert left(tmp_path / "parts") == whole(algorithm)


@pytest.fixture
def wide(monkeypatch):
    """LIBERO is evaluated on one distribution."""
    monkeypatch.setattr(LiberoTask, "distributions", ("wide",))
    monkeypatch.setattr(LiberoTask, "variants", ())


def test_a_kill_in_every_stage_changes_no_bit_of_a_ranked_flow_on_libero(tmp_path: Path, wide) -> None:
    def make(directory: Path, kind: type[Experiment]) -> Experiment:
        config = ExperimentConfig(
            num_envs=2,
            env_steps=120,
            checkpoint_every=2,
            evaluation_starts=1,
            evaluation_envs=1,
            video=False,
            sft=SFTConfig(steps=25, batch=8),
        )
        task = LiberoTask(tasks=["0"], assets="stand-in", train_step_limit=12, step_limit=100)
        imitation = SelfImitationConfig(rollout_length=3, rounds=2, gradient_steps=6, sft=SFTConfig(batch=8))
        algorithm = RankingConfig(imitation, warmup=2, epochs=1, gradient_steps=3, minibatch=8, value_minibatch=8)
        return kind(config, task, FlowConfig(width=8, hidden=16), algorithm, directory, record={})

    make(tmp_path / "whole", Experiment).run()
    killed_and_continued(lambda: make(tmp_path / "parts", DiesInEveryStage))
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["pi0 with adapters", "tokens with adapters", "smolvla"])
def test_a_kill_in_every_stage_changes_no_bit_of_models_on_libero_pictures(tmp_path: Path, wide, kind: str) -> None:
    if kind == "tokens with adapters":
        prismatic.save(tmp_path, proprio=False)
        given = {"weights": str(tmp_path), "unnorm_key": "demonstrations", "lora_rank": 2}
        policy: PolicyConfig = TokensConfig(temperature=1.6, hidden=16, **given)
    elif kind == "smolvla":
        files = smolvla_files.save(tmp_path / "published")
        policy = SmolVLAConfig(weights=str(files), unnorm_key="demonstrations", denoising_steps=2, hidden=16)
    else:
        (tmp_path / "base").mkdir()
        save(tmp_path / "base", "transformers")
        given = {"weights": str(tmp_path / "base"), "lora_rank": 2, "gradient_checkpointing": True}
        policy = Pi0Config(denoising_steps=2, hidden=16, precision=Precision.BFLOAT16, **given)

    def make(directory: Path, kind: type[Experiment]) -> Experiment:
        config = ExperimentConfig(
            num_envs=2,
            env_steps=96,
            checkpoint_every=2,
            evaluation_starts=1,
            evaluation_envs=1,
            video=False,
            control=False,
            sft=SFTConfig(steps=18, batch=2),
        )
        task = LiberoTask(
            tasks=["0"], assets="stand-in", step_limit=100, images=["agentview", "robot0_eye_in_hand"], image_size=32
        )
        ppo = PPOConfig(rollout_length=3, epochs=1, minibatch=4, critic_warmup=0)
        return kind(config, task, policy, ppo, directory, record={})

    make(tmp_path / "whole", Experiment).run()
    killed_and_continued(lambda: make(tmp_path / "parts", DiesInEveryStage))
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


def test_a_kill_in_every_stage_changes_no_bit_of_act(tmp_path: Path) -> None:
    """It draws dropout and a latent variable."""
    sizes = {"dim_model": 8, "n_heads": 2, "dim_feedforward": 8, "latent_dim": 2, "n_vae_encoder_layers": 1}

    def make(directory: Path, kind: type[Experiment]) -> Experiment:
        config = ExperimentConfig(
            num_envs=4,
            env_steps=ITERATIONS * 40,
            checkpoint_every=2,
            evaluation_starts=2,
            evaluation_envs=2,
            video=False,
            sft=SFTConfig(steps=24, batch=8),
        )
        algorithm = replace(LEARNERS["self_imitation"], gradient_steps=4, sft=SFTConfig(batch=8))
        policy = ACTConfig(**sizes, n_encoder_layers=1)
        return kind(config, ReachTask(), policy, algorithm, directory, record={})

    make(tmp_path / "whole", Experiment).run()
    killed_and_continued(lambda: make(tmp_path / "parts", DiesInEveryStage))
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


def test_what_building_a_learner_draws_does_not_shift_what_its_updates_draw(tmp_path: Path, monkeypatch) -> None:
    class DrawingConfig(PPOConfig):
        """A learner with its own networks and dropout, which both use torch's global generator."""

        def build(self, *parts):
            learner = super().build(*parts)
            torch.rand(7)
            update = learner.update
            learner.update = lambda *given: update(*given) | {"drawn": float(torch.rand(()))}
            return learner

    monkeypatch.setitem(LEARNERS, "drawing", DrawingConfig(**vars(PPO_CONFIG)))
    trainer(tmp_path / "whole", "drawing").run()
    killed_and_continued(lambda: trainer(tmp_path / "parts", "drawing", DiesInEveryStage))
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


def test_a_kill_before_the_first_checkpoint_of_rl_changes_no_bit(tmp_path: Path) -> None:
    class DiesAtOnce(Experiment):
        died = False

        def _step(self, stage, parts):
            if stage.name == "rl" and not DiesAtOnce.died:
                DiesAtOnce.died = True
                raise Killed
            return super()._step(stage, parts)

    class ToldTask(ReachTask):
        """The critic observes the wind, which is missing in demonstrations and taken from random play."""

        def contract(self, distribution):
            return WindyReach(1).contract

        def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
            return WindyReach(num_envs)

    def make(directory: Path, kind: type[Experiment]) -> Experiment:
        config = ExperimentConfig(
            num_envs=4, env_steps=100, evaluation_starts=2, evaluation_envs=2, video=False, sft=SFTConfig(5, batch=8)
        )
        return kind(config, ToldTask(), POLICY, PPO_CONFIG, directory, record={})

    make(tmp_path / "whole", Experiment).run()
    with pytest.raises(Killed):
        make(tmp_path / "parts", DiesAtOnce).run()
    make(tmp_path / "parts", DiesAtOnce).run()
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


def run_and_kill(directory: Path) -> None:
    class KilledInRL(Experiment):
        def _step(self, stage, parts):
            if self.counters["iteration"] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._step(stage, parts)

    trainer(directory, "self_imitation", KilledInRL).run()


def test_kill_in_the_middle_of_rl_loses_nothing_but_time(tmp_path: Path, whole) -> None:
    process = multiprocessing.get_context("fork").Process(target=run_and_kill, args=(tmp_path / "killed",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    trainer(tmp_path / "killed", "self_imitation").run()
    assert left(tmp_path / "killed") == whole("self_imitation")


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (SFT, "fit", 7),  # of SFT
        (SFT, "fit", 57),  # of the control
        (Collector, "_act", 13),
        (Ranking, "_step", 9),
        (evaluation, "act", 3),  # of SFT
        (evaluation, "act", 20),  # of a later stage
    ],
)
def test_a_signal_is_obeyed_at_once_wherever_it_comes(
    tmp_path: Path, whole, monkeypatch, owner, name: str, call: int
) -> None:
    monkeypatch.setattr(reinforcement, "PATIENCE_S", 0.0)
    original, calls = getattr(owner, name), [0]

    def signals(*arguments, **keywords):
        calls[0] += 1
        result = original(*arguments, **keywords)
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, signals)
    with pytest.raises(Stopped, match="Stopped and saved"):
        trainer(tmp_path / "parts", "ranking").run()
    assert calls == [call]  # nothing more was done
    assert trainer(tmp_path / "parts", "ranking").stage != "done"
    trainer(tmp_path / "parts", "ranking").run()
    assert left(tmp_path / "parts") == whole("ranking")


def test_a_short_iteration_is_waited_for_and_not_lost(tmp_path: Path, whole, monkeypatch) -> None:
    monkeypatch.setattr(reinforcement, "PATIENCE_S", 1e9)
    original, calls = PPO.update, [0]

    def signals(*arguments):
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(PPO, "update", signals)
    with pytest.raises(Stopped):
        trainer(tmp_path / "parts", "ppo").run()
    assert trainer(tmp_path / "parts", "ppo").counters["iteration"] == 3
    trainer(tmp_path / "parts", "ppo").run()
    assert left(tmp_path / "parts") == whole("ppo")


def test_a_second_signal_leaves_the_last_checkpoint(tmp_path: Path, whole, monkeypatch) -> None:
    write = checkpoint._write

    def signals(directory, saved):
        write(directory, saved)
        if saved.counters["iteration"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    class Stops(Experiment):
        def _keep(self, parts, due):
            if self.counters["iteration"] == 3:
                os.kill(os.getpid(), signal.SIGINT)
            super()._keep(parts, due)

    monkeypatch.setattr(checkpoint, "_write", signals)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "parts", "ppo", Stops).run()
    monkeypatch.undo()
    assert not list((tmp_path / "parts" / "checkpoint").glob(".*"))
    assert trainer(tmp_path / "parts", "ppo").counters["iteration"] == 2
    trainer(tmp_path / "parts", "ppo").run()
    assert left(tmp_path / "parts") == whole("ppo")


def test_more_steps_continue_where_rl_ended_and_later_results_are_made_again(tmp_path: Path, whole) -> None:
    trainer(tmp_path / "parts", "ppo", iterations=6).run()
    first = left(tmp_path / "parts")
    until_done(lambda: trainer(tmp_path / "parts", "ppo", iterations=10))
    assert left(tmp_path / "parts") == whole("ppo", 10) != first


@pytest.mark.parametrize("algorithm", [*LEARNERS, *SCRATCH])
def test_every_learner_goes_on_beyond_its_plan(tmp_path: Path, algorithm: str) -> None:
    trainer(tmp_path, algorithm).run()
    run = trainer(tmp_path, algorithm, iterations=8)
    assert run.stage == "rl"
    report = run.run()
    assert report.env_steps >= 8 * 80
    progress = [row["step"] for row in left(tmp_path)["metrics"] if "rollout/success" in row]
    assert progress == sorted(set(progress))


def test_schedules_end_with_the_steps_asked_for_first(tmp_path: Path, monkeypatch) -> None:
    original, seen = PPO.update, []

    def watched(learner, rollout, progress, world):
        seen.append(progress)
        return original(learner, rollout, progress, world)

    monkeypatch.setattr(PPO, "update", watched)
    trainer(tmp_path, "ppo", iterations=2).run()
    planned = len(seen)
    assert 0.0 < seen[0] < seen[-1] == 1.0
    trainer(tmp_path, "ppo", iterations=8).run()
    assert len(seen) > planned + 1
    assert set(seen[planned:]) == {1.0}


def test_what_was_evaluated_before_a_stop_is_not_evaluated_again(tmp_path: Path, monkeypatch) -> None:
    original, done = embodied.training.experiment.evaluate, []

    def evaluates(*parts, progress, **settings):
        if len(done) == 1:
            done.append("a stop")
            os.kill(os.getpid(), signal.SIGTERM)
        result = original(*parts, progress=progress, **settings)
        done.append(progress)
        return result

    monkeypatch.setattr(embodied.training.experiment, "evaluate", evaluates)
    monkeypatch.setattr(ReachTask, "distributions", ("wide", "narrow"))
    with pytest.raises(Stopped):
        trainer(tmp_path, "ppo", iterations=1).run()
    assert done == ["SFT, evaluation on wide", "a stop"]
    report = trainer(tmp_path, "ppo", iterations=1).run()
    assert len(done) == len(set(done))
    assert len(report.results) == 6  # three stages on two distributions


def test_other_options_are_refused_and_those_that_no_result_depends_on_are_not(tmp_path: Path) -> None:
    def resumed(**changes) -> Experiment:
        record = {"values": {"env_steps": 480, "seed": 0, "video": False, "sft": {"steps": 50}} | changes}
        config = replace(trainer(tmp_path / "other", "ppo").config, env_steps=record["values"]["env_steps"])
        return Experiment(config, ReachTask(), POLICY, LEARNERS["ppo"], tmp_path / "run", record=record)

    resumed().run()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for changes, message in (
        ({"seed": 1}, r"has seed=0, got 1; only env_steps may grow"),
        ({"sft": {"steps": 60}}, r"has sft.steps=50, got 60"),
        ({"env_steps": 470}, r"has env_steps=480, got 470"),
        ({"env_steps": 560, "seed": 2}, r"has seed=0, got 2;"),
    ):
        with pytest.raises(UserError, match=message):
            resumed(**changes)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert resumed(video=True).stage == "done"
