"""The process of torchrun that the part `sharding` of the CUDA check starts: DEVICE END FOLDER.

It appends to the record in FOLDER. torchrun starts it in a session of its own, in which the end of the part does not
reach it: it ends itself, with its stacks, shortly before END (s since the epoch).
"""

from __future__ import annotations

import faulthandler
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # instead of this folder

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import embodied.training.experiment  # noqa: E402
from benchmarks.cuda_parts.record import RECORD, Record  # noqa: E402
from embodied import seeding  # noqa: E402
from embodied.algorithms.on_policy.ppo import PPOConfig  # noqa: E402
from embodied.contract import Contract, TensorSpec  # noqa: E402
from embodied.networks.precision import Precision  # noqa: E402
from embodied.placement.local import Local, Processes  # noqa: E402
from embodied.placement.torchrun import Torchrun  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.task import Task  # noqa: E402
from embodied.training.experiment import Experiment, ExperimentConfig  # noqa: E402
from policies.vla.pi0 import Pi0Config  # noqa: E402
from policies.vla.sizes import Size  # noqa: E402
from tests.embodied.reach import Reach  # noqa: E402

HANG_S = 2.0
"""Time before the part's end for torchrun to end and for the part to record the reason, s."""
ENVS, DECISIONS, STOPPED = 8, 8, 2
ITERATION_STEPS = 2 * ENVS * DECISIONS
"""Largest number of control steps of an iteration; a decision is of two, and an episode may end after the first."""
ALGORITHM = PPOConfig(rollout_length=DECISIONS, minibatch=32, epochs=2, discount=0.9, critic_warmup=1)


class PictureReach(Reach):
    """A point on a line that has to reach the origin; its position is also the brightness of a picture."""

    def __init__(self, num_envs: int, **settings: Any) -> None:  # noqa: ANN401 - as Reach
        super().__init__(num_envs, **settings)
        picture = TensorSpec((16, 16, 3), "uint8", camera="front", frame="world")
        self.contract = replace(self.contract, observation=self.contract.observation | {"front": picture})

    def _observation(self) -> TensorDict:
        brightness = (128 + 120 * self.position.clamp(-1.0, 1.0)).to(torch.uint8)
        picture = brightness.view(-1, 1, 1, 1).expand(-1, 16, 16, 3).contiguous()
        return super()._observation().set("front", picture)


class PictureReachTask(Task):
    """Task of `PictureReach`, without demonstrations."""

    name, distributions, asset_kind = "reach", ("wide",), "official"

    def contract(self, distribution: str) -> Contract:
        """Contract of `PictureReach`."""
        return PictureReach(1).contract

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> PictureReach:
        """Environments on `device`."""
        return PictureReach(num_envs, seed=seed, device=device)


class InterruptionError(Exception):
    """Raised to interrupt a run."""


class TimedExperiment(Experiment):
    """Stores the time of each update and the weights after `STOPPED` iterations, after which it ends if `stops`."""

    stops = False

    def _keep(self, parts: dict[str, Any], due: bool) -> None:
        super()._keep(parts, due)
        self.update_s.append(self.timer.seconds["update"] - sum(self.update_s))
        if self.counters["iteration"] == STOPPED:
            self.halfway = self.weights()
            if self.stops:
                raise InterruptionError

    def weights(self) -> dict[str, Tensor]:
        """All weights, on the CPU."""
        with seeding.undisturbed():  # a whole copy of divided weights begins with random ones
            policy = self.world.whole(self.policy)
        return {name: value.detach().cpu().clone() for name, value in policy.state_dict().items()}


def experiment(world: Processes, folder: Path) -> TimedExperiment:
    """Make a run of pi0 in bfloat16, or resume the run in `folder`."""
    tiny = world.device == "cpu"
    env_steps = ITERATION_STEPS * (STOPPED + (0 if tiny else 4)) + 1
    config = ExperimentConfig(
        num_envs=ENVS,
        env_steps=env_steps,
        checkpoint_every=STOPPED,
        evaluation_starts=1,
        evaluation_envs=2,
        evaluate_every_steps=None,
        video=False,
        stages=["rl"],
    )
    policy = Pi0Config(
        size=Size.TINY if tiny else Size.SMALL, hidden=16, denoising_steps=2, precision=Precision.BFLOAT16
    )
    timed = TimedExperiment(
        config,
        PictureReachTask(),
        policy,
        ALGORITHM,
        folder,
        record={"values": {"env_steps": config.env_steps}},
        device=world.device,
        world=world,
    )
    timed.update_s = []
    return timed


def resumed(record: Record, world: Processes, folder: Path) -> TimedExperiment:
    """Compare a stopped and resumed run of sharded weights with an uninterrupted one; return the uninterrupted one."""
    uninterrupted = experiment(world, folder / "whole")
    uninterrupted.run()
    record.figure("sharded_update_s", median(uninterrupted.update_s[1:]))
    with record.row("resumed"):
        stopped = experiment(world, folder / "stopped")
        stopped.stops = True
        with suppress(InterruptionError):
            stopped.run()
        iterations_before = checkpoint.load(folder / "stopped").counters["iteration"]
        record.check("iterations of the checkpoint", abs(iterations_before - STOPPED), 0.0)
        again = experiment(world, folder / "stopped")
        again.run()
        record.check("resumed", difference(uninterrupted.weights(), again.weights()), 0.0)
        saved = {name: value.cpu() for name, value in checkpoint.load(folder / "stopped").policy.items()}
        record.check("checkpoint of the resumed run", difference(uninterrupted.weights(), saved), 0.0)
    return uninterrupted


def sharded(record: Record, divided: TimedExperiment, device: str, folder: Path) -> None:
    """Compare updates of sharded weights with updates of whole weights.

    With one process nothing is sharded, so that only rounding may differ: gradients are copied and clipped in another
    order of sums. Adam turns a relative error of a gradient into one of its step of the learning rate; the tolerance is
    a tenth of all steps until halfway. After that the rollouts differ, too, and the difference is a figure.
    """
    run = experiment(Local(device=device), folder / "unsharded")
    run.stops = device == "cpu"  # the rest is for the time of an update
    with suppress(InterruptionError):
        run.run()
    record.figure("unsharded_update_s", median(run.update_s[1:]))
    steps = (STOPPED - 1) * ALGORITHM.epochs * ENVS * DECISIONS // ALGORITHM.minibatch
    tolerance = 0.1 * steps * ALGORITHM.learning_rate
    record.check("sharded, halfway", difference(run.halfway, divided.halfway), tolerance)
    record.figure("largest_change_after_halfway", difference(divided.halfway, divided.weights()))
    if not run.stops:
        record.figure("sharded_difference_at_the_end", difference(run.weights(), divided.weights()))


def difference(expected: dict[str, Tensor], measured: dict[str, Tensor]) -> float:
    """Largest absolute difference of two sets of weights; infinite if their names differ."""
    if expected.keys() != measured.keys():
        return float("inf")
    return max(float((value.double() - measured[name].double()).abs().max()) for name, value in expected.items())


def main(device: str, end: str, folder: str) -> None:
    """Run all comparisons and record them."""
    faulthandler.dump_traceback_later(max(1.0, float(end) - time.time() - HANG_S), exit=True)
    # A resumed run has the same numbers only if kernels add in the same order: the kernels of attention that save
    # memory do not in the backward pass. What else may not, such as a gather's, adds nothing but zeros here.
    warnings.filterwarnings("ignore", ".*does not have a deterministic implementation.*")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1 if device == "cpu" else 4)
    embodied.training.experiment.CURVES = {}  # their pictures take most of the time
    record = Record(Path(folder) / RECORD)
    attention = sdpa_kernel(SDPBackend.MATH)
    with Torchrun(device, 60.0, shard=True) as world, record.row("sharded run"), attention:
        divided = resumed(record, world, Path(folder))
        sharded(record, divided, world.device, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
