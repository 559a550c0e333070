"""A small run with all stages, as train.py makes one, in this process of torchrun or alone: FOLDER STEPS KIND.

KIND is "mlp", "a2c" or "awr" for the learners of docs/own_algorithm.md and docs/own_offline_learner.md, or "pi0" for a
model whose weights are divided. "die" after it: the last process kills itself in RL.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

import embodied.training.experiment
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.command_line import program
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.placement.local import Local
from embodied.placement.registry import started_by_torchrun
from embodied.training.experiment import Experiment, ExperimentConfig
from policies.mlp import MLPConfig
from policies.vla.pi0 import Pi0Config
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import ReachTask
from tests.placement.own_algorithm import documented
from tests.placement.worker import Seen

PPO = PPOConfig(rollout_length=8, minibatch=32, epochs=2, discount=0.9, critic_warmup=1)


class SeenTask(ReachTask):
    """With a picture, and without demonstrations."""

    def contract(self, distribution: str) -> Contract:
        """Of `Seen`."""
        return Seen(1).contract

    def environment(self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu") -> Reach:
        """`Seen`."""
        return Seen(num_envs, seed=seed)

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """None."""
        return None


class RewardedTask(ReachTask):
    """Its demonstrations have rewards, which advantages need."""

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Small actions earn more."""
        episodes = super().demonstrations(directory, seed)
        return replace(episodes, reward=-episodes.actions.square().sum(-1))


class Dying(Experiment):
    """Its last process is killed in the third iteration."""

    def _step(self, stage, parts):
        if self.counters["iteration"] == 3 and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(stage, parts)


def run(arguments: list[str]) -> None:
    """One run."""
    folder, steps, kind, *more = arguments
    torch.set_num_threads(1)
    embodied.training.experiment.CURVES = {}  # drawing them takes most of the time
    config = ExperimentConfig(
        num_envs=8,
        env_steps=int(steps),
        checkpoint_every=2,
        evaluation_starts=2,
        evaluation_envs=4,
        evaluate_every_steps=None,
        video=False,
        sft=SFTConfig(6, batch=16, learning_rate=3e-3),
        stages={"mlp": None, "awr": ["offline"]}.get(kind, ["rl"]),
    )
    place = nullcontext(Local())
    if started_by_torchrun():
        from embodied.placement.torchrun import Torchrun

        place = Torchrun("cpu", 60.0, shard=kind == "pi0")
    with place as world:
        made = (Dying if "die" in more else Experiment)(
            config,
            {"pi0": SeenTask, "awr": RewardedTask}.get(kind, ReachTask)(),
            Pi0Config(hidden=16, denoising_steps=2) if kind == "pi0" else MLPConfig(hidden=[16]),
            {"a2c": documented()["A2CConfig"](), "awr": None}.get(kind, PPO),
            Path(folder),
            record={"values": {"env_steps": config.env_steps}},
            offline=documented("own_offline_learner")["AWRConfig"](steps=20, batch=16) if kind == "awr" else None,
            world=world,
        )
        made.run()


def main(arguments: list[str]) -> int:
    """Exit status of one run."""
    return program.main(run, lambda _: "", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
