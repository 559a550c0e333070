"""Learners on the device: two updates compared with the CPU, resumed training, rollouts, bfloat16, evaluation.

Environments, policies and learners come from the tests. A row "ppo, env on the CPU" has its policy on the device and
its environments on the CPU, as with simulators on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_parts.draws import CpuDraws
from benchmarks.cuda_parts.record import Options, Record
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.evaluation.evaluation import evaluate
from embodied.networks.precision import Precision
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.storage import Storage
from embodied.saving.tree import load_tree, save_tree
from embodied.training.loop import build, iterations, train
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig

ENVS = 8
ROUNDING = 1e-4
"""Tolerance of the first rollout: a few float32 layers, sums in another order."""
MOVED = 0.05
"""Tolerance of weights after two updates, as a share of the distance that they moved. Adam's first steps go by the sign
of a gradient, so that elements whose gradient is rounding alone may move elsewhere; they are few."""
METRICS = 0.02
"""Tolerance of a learner's metrics, which are means over steps of such weights."""
PPO = PPOConfig(rollout_length=6, minibatch=16, critic_warmup=0)
GRPO = GRPOConfig(rollout_length=16, group=4, minibatch=16)
SMALL = {
    "mlp": MLPConfig(hidden=[8]),
    "recurrent": RecurrentConfig(hidden=[8]),
    "flow": FlowConfig(width=8, hidden=8),
    "diffusion": DiffusionConfig(width=8, hidden=8, tuned_steps=3),
}


@dataclass
class Training:
    """A learner in its environment, with its initial weights."""

    policy: Any
    learner: Any
    collector: Collector
    decisions: int
    began: Tensor

    def update(self, progress: float) -> tuple[Rollout, dict[str, float]]:
        """Collect a rollout and learn from it."""
        rollout = self.collector.collect(self.decisions)
        return rollout, self.learner.update(rollout, progress)

    def weights(self) -> Tensor:
        """All numbers of the policy's state, on the CPU."""
        return _weights(self.policy)


def rows(record: Record, options: Options) -> dict[str, Callable[[], None]]:
    """Comparisons of learners by name."""
    device, names = options.device, []
    with record.row("learners of the tests"):
        from tests.conformance.test_device import LEARNERS

        names = [*LEARNERS, "grpo"]
    comparisons: dict[str, Callable[[], None]] = {
        f"learner {name}": partial(_compare, record, name, name, device, device) for name in names
    }
    resumed = options.size(names, [name for name in names if "," not in name])
    comparisons |= {f"resumed {name}": partial(_resume, record, name, options) for name in resumed}
    for storage in Storage:
        title = f"storage {storage.value}"
        comparisons[title] = partial(_compare, record, "ppo", title, device, device, storage)
    for name in SMALL:
        comparisons[f"bfloat16 {name}"] = partial(_bfloat16, record, name, device)
        comparisons[f"evaluation {name}"] = partial(_evaluate, record, name, device)
    comparisons["training from scratch"] = partial(_train, record, device)
    for name in names if device != "cpu" else ():
        title = f"{name}, env on the CPU"
        comparisons[f"learner {title}"] = partial(_compare, record, name, title, device, "cpu")
    return comparisons


def made(name: str, device: str, env_device: str) -> Training:
    """Make a new training of the tests' learner `name`."""
    from tests.conformance.test_device import LEARNERS, demonstrations
    from tests.embodied.reach import Reach

    kind, config, algorithm = (LEARNERS | {"grpo": (Reach, SMALL["mlp"], GRPO)})[name]
    torch.manual_seed(0)
    env = kind(ENVS, device=env_device)
    if name == "bptt, by steps":
        env.unroll = None
    policy = config.build(env.contract)
    policy.fit(kind(64).reset(starts=torch.arange(64)), torch.zeros(8, 1))
    policy.to(device)
    learner, collector = build(env, policy, algorithm, demonstrations(), 0)
    return Training(policy, learner, collector, algorithm.rollout_length, _weights(policy))


def _compare(
    record: Record, name: str, title: str, device: str, env_device: str, storage: Storage = Storage.DEVICE
) -> None:
    """Compare two updates on the CPU and on the device with the same draws: rollouts, metrics and weights."""
    with CpuDraws():
        host, remote = made(name, "cpu", "cpu"), made(name, device, env_device)
        remote.collector.storage = storage
        for number, progress in enumerate((0.5, 1.0)):  # self-imitation changes the policy at the end of its rounds
            torch.manual_seed(number)
            rollout, metrics = host.update(progress)
            torch.manual_seed(number)
            moved, measured = remote.update(progress)
            if number == 0:
                _compare_rollouts(record, title, rollout, moved)
    errors = {name: abs(measured[name] - value) / max(1.0, abs(value)) for name, value in metrics.items()}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    record.check(f"{title}: metrics", errors[worst], METRICS)
    if not errors[worst] <= METRICS:
        record.figure(
            f"{title}: metrics on the CPU and the device", {name: [metrics[name], measured[name]] for name in errors}
        )
    distance = float((host.weights() - host.began).norm())
    record.check(f"{title}: weights", _relative(host.weights(), remote.weights(), distance), MOVED)


def _compare_rollouts(record: Record, title: str, expected: Rollout, measured: Rollout) -> None:
    """Compare the policy's decisions and the environment's transitions."""
    for name in ("actions", "reward", "log_prob", "value", "executed"):
        pair = [getattr(rollout, name) for rollout in (expected, measured)]
        if name == "log_prob" and pair[0].isnan().all() and pair[1].isnan().all():
            continue  # samples of a small actor that steers a policy have none
        if all(each is not None for each in pair):
            record.agree(f"{title}: {name}", *pair, ROUNDING)


def _resume(record: Record, name: str, options: Options) -> None:
    """Compare a saved and resumed training with the uninterrupted one, with the device's own generators."""
    device, folder = options.device, options.folder / f"resumed-{name.replace(', ', '-')}"
    first, second = made(name, device, device), made(name, device, device)
    first.update(0.5)
    save_tree(folder, {"learner": first.learner.state_dict(), "collector": first.collector.state_dict()})
    second.policy.load_state_dict(first.policy.state_dict())
    state = load_tree(folder)
    second.learner.load_state_dict(state["learner"])
    second.collector.load_state_dict(state["collector"])
    for training in (first, second):
        torch.manual_seed(5)  # the global generator is saved by the program, not by the learner
        training.update(1.0)
    distance = float((first.weights() - first.began).norm())
    record.check(f"resumed {name}: weights", _relative(first.weights(), second.weights(), distance), MOVED)


def _bfloat16(record: Record, name: str, device: str) -> None:
    """Run two iterations of PPO in bfloat16: weights stay finite; the divergence of the policy is a figure."""
    from tests.embodied.reach import Reach

    torch.manual_seed(0)
    env = Reach(ENVS, device=device)
    policy = SMALL[name].build(env.contract)
    policy.fit(Reach(64).reset(starts=torch.arange(64)), torch.zeros(8, 1))
    policy.to(device)
    initial_weights = _weights(policy)
    learner, collector = build(env, policy, PPO, None, 0)
    steps = ENVS * PPO.rollout_length * env.contract.executed
    results = list(iterations(learner, collector, PPO.rollout_length, 2 * steps, precision=Precision.BFLOAT16))
    record.figure(f"bfloat16 {name}: kl", results[-1].metrics["kl"])
    distance = float((_weights(policy) - initial_weights).norm())
    record.check(
        f"bfloat16 {name}: weights are finite and move", float(not (math.isfinite(distance) and distance > 0)), 0.0
    )


def _train(record: Record, device: str) -> None:
    """Run the first iteration of a training from scratch, whose statistics come from random actions."""
    from tests.embodied.reach import Reach

    env = Reach(64, device=device)
    policy = SMALL["mlp"].build(env.contract).to(device)
    record.figure("env_steps_of_an_iteration", next(train(env, policy, PPO, env_steps=1)).env_steps)


def _evaluate(record: Record, name: str, device: str) -> None:
    """Check that an evaluation is repeatable, and has the same episodes as an evaluation on the CPU."""
    from tests.embodied.reach import Reach

    torch.manual_seed(0)
    policy = SMALL[name].build(Reach(1).contract)
    policy.fit(Reach(64).reset(starts=torch.arange(64)), torch.tensor([[-0.25], [0.25]]))
    expected = evaluate(Reach(4), policy, starts_per_task=8).steps.float()
    policy.to(device)
    for env_device in dict.fromkeys((device, "cpu")):
        first, again = (
            evaluate(Reach(4, device=env_device), policy, starts_per_task=8, device=device).steps.float()
            for _ in range(2)
        )
        title = f"evaluation {name}, env on {env_device}"
        record.agree(f"{title}: repeated", first, again, 0.0)
        if name in ("mlp", "recurrent"):
            record.agree(title, expected, first, 0.0)
        else:  # their noise is drawn from the bytes of the observation, so that rounding changes whole chunks
            record.figure(f"{title}: share_of_equal_episodes", float((expected == first).float().mean()))


def _weights(policy: Any) -> Tensor:  # noqa: ANN401 - a policy that is a module
    return torch.cat([value.detach().cpu().double().flatten() for value in policy.state_dict().values()])


def _relative(expected: Tensor, measured: Tensor, distance: float) -> float:
    """Distance of `measured` from `expected` as a share of `distance`; NaN if nothing moved."""
    return float((expected - measured).norm()) / distance if distance else math.nan
