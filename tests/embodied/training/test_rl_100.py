"""RL-100 as one run: rounds of offline learning and imitation anew, RL, and a one-step actor that learns along."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.imitation.one_step import OfflineOneStepConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.offline.bppo import BPPOConfig
from embodied.algorithms.offline.iql import IQLConfig
from embodied.algorithms.offline.off_policy_evaluation import Estimator, OffPolicyEvaluationConfig
from embodied.algorithms.offline.rounds import RoundsConfig
from embodied.algorithms.on_policy.ppo import PPO, PPOConfig
from embodied.errors import UserError
from embodied.policy import Steering
from embodied.rollout.rollout import Collector
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.plan import plan
from embodied.training.stages import offline
from policies.diffusion import DiffusionConfig
from policies.generation.steering import SteeringConfig
from tests.embodied.algorithms.imitation.test_one_step import distance
from tests.embodied.algorithms.off_policy.test_steering import steered
from tests.embodied.reach import Reach
from tests.embodied.saving.test_tree import same
from tests.embodied.training.test_stages import Killed, RecordedTask, report

HEAD = SteeringConfig(Steering.ONE_STEP, hidden=[16])
POLICY = DiffusionConfig(width=8, hidden=16, turn_rad=0.0, denoising_steps=3, tuned_steps=3, steering=HEAD)
BPPO = BPPOConfig(steps=20, batch=16, critics=CriticConfig(hidden=[16]), one_step=True)
ONLINE = PPOConfig(rollout_length=8, minibatch=64, epochs=2, critic_warmup=0, one_step=True)
ROUNDS = RoundsConfig(
    count=2,
    gate=Estimator.FQE,
    collected=1,
    imitate_anew=True,
    evaluation=OffPolicyEvaluationConfig(hidden=[16], steps=5, batch=16),
)
CONFIG = ExperimentConfig(
    num_envs=8,
    env_steps=240,
    evaluation_starts=4,
    evaluation_envs=4,
    video=False,
    stages=["sft", "offline", "rl"],
    sft=SFTConfig(steps=10, batch=16),
    rounds=ROUNDS,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent checkpoints, and no drawing of curves."""
    monkeypatch.setattr(offline, "SEGMENT", 10)
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


def make(directory: Path, kind: type[Experiment] = Experiment, learner: object = BPPO, **options) -> Experiment:
    config = replace(CONFIG, **options)
    online = ONLINE if "rl" in config.stages else None
    learner = learner if "offline" in config.stages else None
    return kind(config, RecordedTask(), POLICY, online, directory, record={"values": {}}, offline=learner)


def test_rl_100_is_one_run_that_is_resumed_in_imitation_anew(tmp_path: Path) -> None:
    class Dies(Experiment):
        """Dies once, between two checkpoints of the second round."""

        def _keep(self, parts, due):
            if self.stage == "offline" and not died and parts["learner"].gradient_steps == 27:
                died.append(parts["learner"].imitation is not None)
                raise Killed
            super()._keep(parts, due)

    died = []
    whole = make(tmp_path / "whole")
    whole.run()
    for _ in range(2):
        try:
            make(tmp_path / "parts", Dies).run()
        except Killed:
            continue
    assert died == [True]
    made, parts = (report(tmp_path / name) for name in ("whole", "parts"))
    assert made["evaluations"] == parts["evaluations"]
    assert made["rounds"] == parts["rounds"]
    assert [each["stage"] for each in made["evaluations"]] == ["sft", "sft_control", "offline", "rl", "one_step"]
    assert [each["title"] for each in made["evaluations"]][-1] == "one-step actor"
    assert [gain["over"] for gain in made["gains"]] == ["sft", "sft_control", "offline", "one_step"]
    assert {each["over"] for each in made["gains_over_better"]} <= {"sft", "sft_control", "offline"}
    assert "one-step actor" in (tmp_path / "whole" / "report.html").read_text()
    assert whole.counters["offline_gradient_steps"] == 2 * 20 + 10
    collected = made["rounds"][1]["collected"]
    assert made["env_steps"] == whole.counters["env_steps"] + collected["env_steps"]
    assert made["episodes"] == whole.counters["episodes"] + 8
    assert not whole.policy.steers
    # the one-step actor acts from the next run on, without further training
    actor = make(
        tmp_path / "actor",
        learner=OfflineOneStepConfig(steps=0),
        stages=["offline"],
        rounds=RoundsConfig(),
        start_from=str(tmp_path / "whole"),
    )
    actor.run()
    assert actor.policy.steers
    alone, before = report(tmp_path / "actor")["evaluations"][-1], made["evaluations"][-1]
    assert (alone["stage"], before["stage"]) == ("offline", "one_step")
    assert alone["success"] == before["success"]
    # imitation would train the policy in whose place it acts
    for stages, learner in ((["sft"], None), (["offline"], IQLConfig(steps=2, batch=16))):
        options = {"stages": stages, "rounds": RoundsConfig(), "start_from": str(tmp_path / "actor")}
        with pytest.raises(UserError, match=r"acts in place of the policy .* algorithm=self_imitation"):
            make(tmp_path / "refused", learner=learner, **options).run()


def test_the_one_step_actor_follows_a_policy_that_ppo_trains_and_is_resumed() -> None:
    def made(seed: int) -> tuple[PPO, Collector]:
        policy = steered(Steering.ONE_STEP, seed, diffusion=True)
        config = replace(ONLINE, minibatch=300, epochs=20, target_kl=100.0)
        generator = torch.Generator().manual_seed(seed)
        return config.build(policy, None, Reach(16), generator), Collector(Reach(16), policy, generator)

    learner, collector = made(0)
    before = distance(learner.policy)
    for progress in (0.0, 0.2, 0.4, 0.6):
        metrics = learner.update(collector.collect(24), progress)
    assert metrics["one_step_distance"] < 0.3 * before
    assert distance(learner.policy) < 0.3 * before
    assert not learner.policy.steers
    rollout = collector.collect(8)
    other, _ = made(1)
    other.policy.load_state_dict(learner.policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learner.update(rollout, 0.8) == other.update(rollout, 0.8)
    assert same(other.state_dict(), learner.state_dict())
    assert same(dict(other.policy.state_dict()), dict(learner.policy.state_dict()))


def test_a_plan_counts_it_and_policies_without_such_an_actor_are_refused(tmp_path: Path) -> None:
    task = RecordedTask()
    stages = plan(CONFIG, task, POLICY, ONLINE, offline=BPPO).stages
    without = plan(CONFIG, task, POLICY, replace(ONLINE, one_step=False), offline=replace(BPPO, one_step=False)).stages
    for name in ("offline", "RL"):
        sizes = [sum(each[name].values()) for each in (stages, without)]
        assert sizes[0] > sizes[1] > 0
    policy = replace(POLICY, steering=SteeringConfig())
    with pytest.raises(UserError, match=r"offline\.one_step=true; use policy=flow policy\.steering\.kind=one_step"):
        Experiment(CONFIG, task, policy, ONLINE, tmp_path, record={}, offline=BPPO)
    with pytest.raises(UserError, match=r"algorithm\.one_step=true; use policy=flow"):
        Experiment(replace(CONFIG, stages=["rl"], rounds=RoundsConfig()), task, policy, ONLINE, tmp_path, record={})
    assert not any(tmp_path.iterdir())
