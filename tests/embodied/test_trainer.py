"""A whole run on a small task: stages, control, report, and that an interrupted run ends with the same numbers."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.algorithms.bptt import BPTTConfig
from embodied.algorithms.distillation import DistillationConfig
from embodied.algorithms.ppo import PPOConfig
from embodied.algorithms.ranking import RankingConfig
from embodied.algorithms.self_imitation import SelfImitationConfig
from embodied.algorithms.sft import SFTConfig, cut_chunks
from embodied.algorithms.td3 import TD3Config
from embodied.environment import Transition
from embodied.rollout import first_decisions
from embodied.trainer import Stopped, Trainer, TrainerConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from tests.embodied.ranking_mlp import RankingMLPConfig
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach


class ReachTask:
    """Demonstrations push half of the way at most, so that SFT alone often misses the step limit."""

    name, distributions, asset_kind = "reach", ("wide",), "official"

    def environment(self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu") -> Reach:
        return Reach(num_envs)

    def demonstrations(self, directory: Path, seed: int) -> TensorDict:
        episodes = []
        for start in range(4):
            position = (1.0 - 2.0 * (start % 2)) * (0.3 + 0.05 * start) * torch.linspace(1.0, 0.2, 6)
            seen = TensorDict({"position": position[:5, None], "task": torch.full((5, 1), start % 2.0)}, [5])
            episodes.append(cut_chunks(seen, position.diff()[:, None], 2))
        return torch.cat(episodes)

    def video(self, path: Path, policies: dict, device: str) -> None:
        raise AssertionError("video=false")


class ScratchTask(ReachTask):
    """Without demonstrations."""

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> SmoothReach:
        return SmoothReach(num_envs)

    def demonstrations(self, directory: Path, seed: int) -> None:
        return None


PPO = PPOConfig(decisions=8, minibatch=64, epochs=2, discount=0.9, learning_rate=1e-3)
IMITATION = SelfImitationConfig(decisions=8, gradient_steps=10, capacity=1000)
LEARNERS = {
    "ppo": PPO,
    "self_imitation": IMITATION,
    "ranking": RankingConfig(IMITATION, gradient_steps=5, minibatch=64, value_minibatch=64, warmup=3),
}
SCRATCH = {
    "bptt": BPTTConfig(decisions=5, critic=True, discount=0.9),
    "td3": TD3Config(decisions=10, warmup=100, gradient_steps=4, minibatch=32),
    "distillation": DistillationConfig(
        MLPConfig(hidden=[8]), BPTTConfig(decisions=5), teacher_steps=100, decisions=10, minibatch=4
    ),
}
POLICY = RankingMLPConfig(hidden=[16])
STUDENT = RecurrentConfig(hidden=[8], encoder=4, memory=4)
ITERATIONS = 6
SFT_STEPS = 50
SFT_CONFIG = SFTConfig(SFT_STEPS, batch=16, learning_rate=3e-3)


def trainer(directory: Path, algorithm: str, kind: type[Trainer] = Trainer) -> Trainer:
    config = TrainerConfig(
        num_envs=8, env_steps=ITERATIONS * 80, checkpoint_every=2, evaluation_starts=6, evaluation_envs=4, video=False,
        sft=SFT_CONFIG,
    )  # fmt: skip
    task = ScratchTask() if algorithm in SCRATCH else ReachTask()
    policy = STUDENT if algorithm == "distillation" else POLICY
    return kind(config, task, policy, (LEARNERS | SCRATCH)[algorithm], directory, record={"made by": "test"})


def numbers(directory: Path) -> dict:
    report = json.loads((directory / "report.json").read_text())
    return {key: report[key] for key in ("evaluations", "gains", "env_steps", "episodes")}


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


def test_the_control_is_supervised_training_that_never_stopped(tmp_path: Path) -> None:
    class Watched(Trainer):
        """Keeps the weights of what is evaluated."""

        def _evaluate(self, policy, stage=None):
            weights[self.stage.value] = {name: value.clone() for name, value in policy.state_dict().items()}
            super()._evaluate(policy, stage)

    weights: dict[str, dict] = {}
    run = trainer(tmp_path, "ppo", Watched)
    policy = copy.deepcopy(run.policy)
    run.run()
    chunks = ReachTask().demonstrations(tmp_path, 0)
    policy.fit(chunks["observation"], chunks["actions"][chunks["valid"]])
    learner = SFT_CONFIG.build(policy, seeding.generator(0, "sft"))
    for stage, steps in (("sft", SFT_STEPS), ("sft_control", run.counters["rl_gradient_steps"])):
        learner.fit(chunks, steps)
        assert all(torch.equal(weights[stage][name], value) for name, value in policy.state_dict().items())
    assert learner.optimiser.param_groups[0]["lr"] == SFT_CONFIG.final_learning_rate


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


def test_every_environment_is_asked_to_be_where_the_policy_is(tmp_path: Path) -> None:
    asked = []

    class Placed(ScratchTask):
        def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
            asked.append((split, device))
            return super().environment(num_envs, distribution, split)

    config = TrainerConfig(num_envs=8, env_steps=80, evaluation_starts=2, evaluation_envs=2, video=False)
    Trainer(config, Placed(), POLICY, SCRATCH["td3"], tmp_path, record={}, device="cpu:0").run()
    assert asked == [("train", "cpu:0"), ("eval", "cpu:0")]


def test_success_and_return_are_told_where_an_episode_ended(tmp_path: Path) -> None:
    """Episodes of at most seven steps, two decisions of one step an iteration: none ends in the first."""

    class Away(SmoothReach):
        """Nothing succeeds."""

        def step(self, actions: torch.Tensor) -> Transition:
            return super().step(torch.full_like(actions, 0.25) * self.position.sign().view(-1, 1, 1))

    class AwayTask(ScratchTask):
        def environment(self, num_envs: int, *_: object, **__: object) -> SmoothReach:
            return Away(num_envs)

    config = TrainerConfig(4, env_steps=4 * 14, evaluation_starts=2, evaluation_envs=2, video=False)
    learner = PPOConfig(decisions=2, minibatch=8, epochs=1)
    Trainer(config, AwayTask(), POLICY, learner, tmp_path, record={}).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [{key: value for key, value in row.items() if key.startswith("rollout/")} for row in rows]
    assert [set(row) for row in told[:3]] == [set()] * 3
    assert (told[3]["rollout/success"], told[3]["rollout/episode_steps"]) == (0.0, 7.0)
    assert told[3]["rollout/episode_return"] < -7 * 0.3**2  # the reward is -x^2 after each step


def test_a_task_with_a_baseline_has_it_measured_on_the_same_episodes(tmp_path: Path) -> None:
    class Compared(ScratchTask):
        def baselines(self) -> dict:
            policy = MLPConfig(hidden=[4]).build(self.environment(1, "wide", "eval").contract)
            policy.fit(*first_decisions(self.environment(1, "wide", "eval"), torch.Generator()))
            return {"beginner": policy}

    config = TrainerConfig(num_envs=8, env_steps=200, evaluation_starts=4, evaluation_envs=8, video=False)
    algorithm = PPOConfig(decisions=4, epochs=1, minibatch=16)
    Trainer(config, Compared(), MLPConfig(hidden=[8]), algorithm, tmp_path, record={}).run()
    assert [row["stage"] for row in numbers(tmp_path)["evaluations"]] == ["baseline beginner", "rl"]


def test_a_learner_that_imitates_needs_demonstrations(tmp_path: Path) -> None:
    run = Trainer(TrainerConfig(num_envs=8), ScratchTask(), POLICY, IMITATION, tmp_path, record={})
    with pytest.raises(ValueError, match="imitation needs demonstrations, which this task has not"):
        run.run()


@pytest.mark.parametrize("algorithm", [*LEARNERS, *SCRATCH])
def test_stopping_and_continuing_changes_no_number(tmp_path: Path, algorithm: str) -> None:
    class StopsOften(Trainer):
        """Asked to stop after every few looks."""

        looks = 0

        def _keep(self, parts, due):
            self.looks += 1
            self._stop.requested = self.looks == 3
            super()._keep(parts, due)

    trainer(tmp_path / "whole", algorithm).run()
    stops = 0
    while True:
        try:
            trainer(tmp_path / "parts", algorithm, StopsOften).run()
            break
        except Stopped:
            stops += 1
    assert stops >= 2
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.embodied.test_trainer import Trainer, trainer

class Killed(Trainer):
    def _iterate(self, learner, collector):
        if self.counters["iteration"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._iterate(learner, collector)

trainer(Path({directory!r}), "self_imitation", Killed).run()
"""


def test_kill_in_the_middle_of_rl_loses_nothing_but_time(tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent.parent)
    program = KILLED.format(root=root, directory=str(tmp_path / "killed"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    trainer(tmp_path / "killed", "self_imitation").run()
    trainer(tmp_path / "whole", "self_imitation").run()
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


def test_a_policy_of_another_contract_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "ppo").run()

    class OtherTask(ReachTask):
        def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
            env = Reach(num_envs, executed=1, horizon=1)
            env.contract = type(env.contract)(
                env.contract.observation, env.contract.action, control_dt_s=0.2, horizon=1, executed=1
            )
            return env

    with pytest.raises(ValueError, match=r"trained under another contract .*control_dt_s"):
        Trainer(TrainerConfig(num_envs=8), OtherTask(), POLICY, LEARNERS["ppo"], tmp_path, record={})
