"""Part of the CUDA check: agreement of policies and learners on the device with the CPU, and their speed.

Every policy in the variants of the tests: statistics, acting, scores, losses and their gradients. Every learner of the
tests: two updates in a small environment, see `learners`. Then milliseconds of acting, collecting and updating with
4,096 environments and the networks' usual sizes, see `learning_speed`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.cuda_parts import learners, learning_speed
from benchmarks.cuda_parts.draws import CpuDraws
from benchmarks.cuda_parts.record import Options, Record
from embodied import seeding
from embodied.execution.chunking import InpaintingPolicy, Running
from embodied.policy import Evaluation, RankingPolicy
from embodied.saving import checkpoint

TestedPolicy: TypeAlias = Any
"""A `TrainablePolicy` that is also a torch module."""
Scored: TypeAlias = tuple[TestedPolicy, TensorDict, Evaluation]
"""A policy, observations and the scores of samples there."""
TOLERANCE = 1e-3
"""Float32 sums in another order differ by 1e-7 of each term; some layers, denoising steps and divisions by a deviation
of 0.1 make 1e-5 to 1e-4 of that. A wrong input, weight or statistic makes more than 1e-2."""
PRODUCTS = 1e-2
"""Tolerance of gradients of one parameter: they may be small differences of large sums."""
END_S = 5.0
"""Time at the end of the part in which no measurement begins."""


def run(record: Record, options: Options) -> None:
    """Compare, then measure in the remaining time."""
    deadline = time.monotonic() + options.seconds - END_S
    # By default cuDNN computes convolutions in TF32; what that changes is a row of its own.
    previous_setting, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    _run(record, _rows(record, options) | learners.rows(record, options), deadline)
    torch.backends.cudnn.allow_tf32 = previous_setting
    tf32 = {"TF32": partial(_tf32, record, options)}
    _run(record, tf32 | learning_speed.rows(record, options), deadline)


def _run(record: Record, rows: Mapping[str, Callable[[], None]], deadline: float) -> None:
    """Run `rows` until the deadline; the others are skipped."""
    for name, row in rows.items():
        if time.monotonic() > deadline:
            record.skip(name, "the time of the part was over")
            continue
        with record.row(name):
            row()


def _rows(record: Record, options: Options) -> dict[str, Callable[[], None]]:
    """Comparisons of every policy in the variants of the tests."""
    with record.row("variants of the policies"):
        from tests.conformance.test_policies import CONFIGS

        of_each_kind = list({type(config): name for name, config in CONFIGS.items()}.values())
        names = options.size(list(CONFIGS), of_each_kind)
        return {f"policy {name}": partial(_compare, record, name, options) for name in names}
    return {}


def reference(name: str) -> TestedPolicy:
    """Make the tests' policy `name` on the CPU, with statistics and without the special weights of new layers."""
    from tests.conformance.test_policies import CONFIGS, CONTRACT, observations

    torch.manual_seed(0)
    policy = CONFIGS[name].build(CONTRACT)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    policy.fit(observations(64), torch.rand(64, 4, 7) - 0.3)
    if isinstance(policy, RankingPolicy) and "ranking" in name:
        policy.start_ranking()
    return policy


def _compare(record: Record, name: str, options: Options) -> None:
    """Record the differences of a policy's results on the device from those on the CPU."""
    from tests.conformance.test_policies import observations

    device, host = options.device, reference(name)
    remote, inputs = copy.deepcopy(host).to(device), observations(options.size(64, 8), seed=1)
    device_inputs = inputs.to(device)

    def agree(what: str, expected: Tensor, measured: Tensor, tolerance: float = TOLERANCE) -> None:
        record.agree(f"{name}: {what}", expected, measured, tolerance)

    _compare_statistics(record, name, host, remote, device)
    expected, measured = host.act(inputs, deterministic=True), remote.act(device_inputs, deterministic=True)
    agree("deterministic actions", expected.actions, measured.actions)
    with CpuDraws():
        decision = host.act(inputs, generator=seeding.generator(0, "noise"))
        repeated = remote.act(device_inputs, generator=seeding.generator(0, "noise", device=device))
    for what in ("actions", "log_prob", "value"):
        agree(f"sampled {what}", getattr(decision, what), getattr(repeated, what))
    scored, there_scored = (
        host.evaluate(inputs, decision.sample),
        remote.evaluate(device_inputs, decision.sample.to(device)),
    )
    for what in ("log_prob", "entropy", "value"):
        agree(f"evaluated {what}", getattr(scored, what), getattr(there_scored, what))
    _compare_gradients(record, name, (host, inputs, scored), (remote, device_inputs, there_scored))
    _check_own_draws(record, name, remote, device_inputs)
    _check_copies(record, name, host, remote, options)
    if isinstance(host, InpaintingPolicy):
        actions_so_far = 0.1 * torch.ones(len(inputs), 4, 7)
        running = [torch.full((len(inputs),), count) for count in (1, 3)]
        expected = host.inpaint(inputs, Running(actions_so_far, *running), deterministic=True).actions
        moved_chunk = Running(actions_so_far.to(device), *(count.to(device) for count in running))
        agree("inpainted actions", expected, remote.inpaint(device_inputs, moved_chunk, deterministic=True).actions)


def _compare_statistics(record: Record, name: str, here: TestedPolicy, there: TestedPolicy, device: str) -> None:
    """Compare the statistics of `fit` on the device with those of `fit` on the CPU."""
    from tests.conformance.test_policies import observations

    refitted, actions = copy.deepcopy(there), 0.2 * torch.randn(48, 4, 7, generator=torch.Generator().manual_seed(5))
    expected = copy.deepcopy(here)
    expected.fit(observations(48, 7), actions)
    refitted.fit(observations(48, 7).to(device), actions.to(device))
    buffers = [_joined(dict(policy.named_buffers()).values()) for policy in (expected, refitted)]
    record.agree(f"{name}: statistics", *buffers, TOLERANCE)


def _compare_gradients(
    record: Record,
    name: str,
    here: tuple[TestedPolicy, TensorDict, Evaluation],
    there: tuple[TestedPolicy, TensorDict, Evaluation],
) -> None:
    """Compare the supervised loss, and the gradients of the loss, the scores and the value."""
    results = []
    for policy, inputs, evaluation in (here, there):
        count, generator = len(inputs), torch.Generator().manual_seed(2)
        actions = (0.3 * torch.randn(count, 4, 7, generator=generator)).to(policy.device)
        valid = (torch.rand(count, 4, generator=generator) < 0.8).to(policy.device)
        torch.manual_seed(1)
        with CpuDraws():
            loss = policy.loss(inputs, actions, valid)
            total = loss + evaluation.log_prob.mean() + evaluation.entropy.mean() + evaluation.value.square().mean()
            if isinstance(policy, RankingPolicy):
                total = total + policy.advantage_loss(inputs, actions, actions[:, 0, 0])
        total.backward()
        results.append((loss, [parameter.grad for parameter in policy.parameters()]))
    (expected, gradients), (measured, moved) = results
    record.agree(f"{name}: loss", expected, measured, TOLERANCE)
    record.check(f"{name}: gradients", _gradient_error(gradients, moved), PRODUCTS)


def _gradient_error(expected: list[Tensor | None], measured: list[Tensor | None]) -> float:
    """Largest relative error of a parameter's gradient; its norm counts as at least a thousandth of the total norm."""
    if [gradient is None for gradient in expected] != [gradient is None for gradient in measured]:
        return float("nan")
    pairs = [
        (a.double(), b.cpu().double())
        for a, b in zip(expected, measured, strict=True)
        if a is not None and b is not None
    ]
    # |g - g'| / max(|g|, 1e-3 |all g|)
    total_norm = float(torch.stack([a.norm() for a, _ in pairs]).norm())
    return max(float((a - b).norm()) / max(float(a.norm()), 1e-3 * total_norm) for a, b in pairs)


def _check_own_draws(record: Record, name: str, policy: TestedPolicy, seen: TensorDict) -> None:
    """Check that samples of the device's own generator are repeatable, differ by seed, and have the drawn scores."""
    first, again, other = (
        policy.act(seen, generator=torch.Generator(device=policy.device).manual_seed(seed)) for seed in (3, 3, 4)
    )
    record.agree(f"{name}: same seed", first.actions, again.actions, TOLERANCE)
    differs = float((first.actions - other.actions).abs().max())
    record.check(f"{name}: another seed gives other actions", 0.0 if differs > 1e-3 else 1.0, 0.0)
    rows = torch.arange(0, len(seen), 2, device=policy.device)  # as minibatches are drawn
    with torch.no_grad():
        scored = policy.evaluate(seen[rows], first.sample[rows]).log_prob
    ratio = (scored - first.log_prob[rows]).exp()  # PPO's, before its first step
    record.agree(f"{name}: ratio", torch.ones_like(ratio), ratio, TOLERANCE)


def _check_copies(record: Record, name: str, here: TestedPolicy, there: TestedPolicy, options: Options) -> None:
    """Compare the policy with a checkpoint that was saved on the device and read on the CPU, and with its export."""
    folder = options.folder / name.replace(", ", "-")
    generator = torch.Generator(device=options.device).manual_seed(1)
    saved = checkpoint.Checkpoint(there.state_dict(), here.contract, state={"generator": generator.get_state()})
    checkpoint.save(folder, saved)
    restored, draws = here.with_new_weights(), torch.Generator(device=options.device)
    read = checkpoint.load(folder)
    read.restore(restored)
    draws.set_state(read.state["generator"])
    pairs = zip(here.state_dict().values(), restored.state_dict().values(), strict=True)
    record.check(f"{name}: checkpoint", float(not all(torch.equal(*pair) for pair in pairs)), 0.0)
    expected, measured = (torch.rand(3, device=options.device, generator=each) for each in (generator, draws))
    record.check(f"{name}: generator of the checkpoint", float(not torch.equal(expected, measured)), 0.0)
    if hasattr(here, "deployable"):
        deployed = [_joined(policy.deployable().state_dict().values()) for policy in (here, there)]
        record.agree(f"{name}: deployed weights", *deployed, 1e-6)


def _tf32(record: Record, options: Options) -> None:
    """Record the errors of policies with convolutions."""
    names = options.size(["diffusion, unet", "pi0", "tokens"], ["diffusion, unet"])
    record.figure("error_of_tf32_convolutions", {name: _error_of_tf32(name, options.device) for name in names})


def _error_of_tf32(name: str, device: str) -> dict[str, float]:
    """Errors of actions and of PPO's first ratio if convolutions compute in TF32, as is torch's default."""
    from tests.conformance.test_policies import observations

    host, inputs = reference(name), observations(64, seed=1)
    remote, device_inputs = copy.deepcopy(host).to(device), inputs.to(device)
    expected, measured = host.act(inputs, deterministic=True), remote.act(device_inputs, deterministic=True)
    decision = remote.act(device_inputs, generator=torch.Generator(device=device).manual_seed(3))
    with torch.no_grad():
        scored = remote.evaluate(device_inputs[:24], decision.sample[:24]).log_prob
    return {
        "actions": float((expected.actions - measured.actions.cpu()).abs().max()),
        "ratio": float(((scored - decision.log_prob[:24]).exp() - 1.0).abs().max()),
    }


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of `tensors`, on the CPU."""
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])
