"""Learning a reflex: episodes of a policy in its simulator, a risk critic, and the choice of its threshold.

Letters: N environments, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import Episodes
from embodied.data.recording import record_episodes
from embodied.environment import Environment
from embodied.environments.reflex import CUT
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult, evaluate
from embodied.execution.reflex import Reflex
from embodied.policy import Policy
from embodied.rollout.memory import RecurrentPolicy

THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Thresholds of the risk to choose from."""
FIRST_START = 4_194_304
"""First initial state of the validation, where initial states are unlimited: no training runs it."""


class _Actions(NamedTuple):
    actions: Tensor  # [N, 1, A]


class Stepwise:
    """Actor that executes the chunks of `policy` one action at a time, each of N environments in the same step.

    Of a share `varied` of the chunks half are scaled towards the braking action of `reflex`, by random factors, and
    half are one random action: the critic also has to know the risk of what the reflex does and the policy avoids.

    Raises:
        UserError: for a policy with memory.
    """

    def __init__(self, policy: Policy, reflex: Reflex, varied: float) -> None:
        if isinstance(policy, RecurrentPolicy):
            raise UserError("episodes of a policy with memory cannot be collected here; name recorded ones")
        self.policy = policy
        self.reflex = reflex
        self.varied = varied
        self.spec = policy.contract.action
        self.executed = policy.contract.executed
        self.steps = 0

    def act(self, observation: TensorDict, *, generator: torch.Generator) -> _Actions:
        """The next action of the running chunks; new chunks every K steps."""
        number = self.steps % self.executed
        if number == 0:
            self.chunk = self._vary(self.policy.act(observation, generator=generator).actions, generator)
        self.steps += 1
        return _Actions(self.chunk[:, number : number + 1])

    def _vary(self, actions: Tensor, generator: torch.Generator) -> Tensor:
        shape, device = (len(actions), 1, 1), actions.device
        kind, factor = torch.rand(2, *shape, generator=generator, device=generator.device).to(device)
        low, high = (torch.tensor(limits, device=device) for limits in (self.spec.low, self.spec.high))
        # one action u of a chunk, uniform within the limits
        uniform = torch.rand(len(actions), 1, len(low), generator=generator, device=generator.device).to(device)
        braking = torch.stack([self.reflex.candidates(each)[0] for each in actions.unbind(1)], 1)
        varied = torch.where(
            kind < 0.5 * self.varied, low + (high - low) * uniform, torch.lerp(braking, actions, factor)
        )
        return torch.where(kind < self.varied, varied, actions)


def collect(
    env: Environment,
    policy: Policy,
    reflex: Reflex,
    *,
    episodes: int,
    varied: float,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Episodes:
    """At least `episodes` episodes of `policy`, which explores, in `env`, whose chunks have one action."""
    rounds = -(-episodes // env.num_envs)
    actors = [Stepwise(policy, reflex, varied) for _ in range(rounds)]
    return Episodes.join(
        [record_episodes(env, actor, generator, number, device) for number, actor in enumerate(actors)]
    )


@dataclass(frozen=True)
class Validation:
    """Figures of one threshold: `score` is the success rate, or the mean return where success is not defined.

    `failed` is the share of episodes with a failure, `time_out` that of truncated ones without success, and `reflex`
    that in which the reflex acted.
    """

    threshold: float | None  # None: without a reflex
    score: float
    failed: float
    time_out: float
    reflex: float
    episodes: int

    @staticmethod
    def of(result: EvaluationResult, threshold: float | None, signals: Sequence[str]) -> Validation:
        """Figures of `result`; `signals` mark failures where their sum over an episode is above 0."""
        none = torch.zeros_like(result.success)
        time_out = result.failures.get("time-out", none)
        failed = failed_episodes(result, signals)
        score = result.success.float().mean() if result.returns is None else result.returns.mean()
        acted = result.events.get(CUT, none)
        shares = [float(each.float().mean()) for each in (failed, time_out, acted)]
        return Validation(threshold, float(score), *shares, episodes=result.success.numel())


def failed_episodes(result: EvaluationResult, signals: Sequence[str] = ()) -> Tensor:
    """Episodes [tasks, starts] that end in a failure other than a time-out, or in which one of `signals` is above 0.

    Raises:
        UserError: for signals that the simulator does not have.
    """
    failed = torch.zeros_like(result.success)
    for reason, flags in result.failures.items():
        failed = failed | flags if reason != "time-out" else failed
    for name in signals:
        if name not in result.metrics:
            raise UserError(f"the simulator has no signal {name!r}; choose the threshold by hand: threshold=0.3")
        failed = failed | ~(result.metrics[name] <= 0.0)  # unknown is not zero
    return failed


def validate(
    environment: Callable[[float | None], Environment],
    policy: Policy,
    *,
    starts_per_task: int,
    signals: Sequence[str] = (),
    thresholds: Sequence[float] = THRESHOLDS,
    device: torch.device | str = "cpu",
) -> list[Validation]:
    """Figures of `policy` without a reflex, and with each of `thresholds`, on the same episodes.

    `environment` makes environments with a reflex of a threshold, None: without.
    """
    results = []
    for threshold in (None, *thresholds):
        env = environment(threshold)
        limited = getattr(env, "num_starts", None) is not None
        label = "without reflex" if threshold is None else f"threshold {threshold:g}"
        options = {"first_start": 0 if limited else FIRST_START, "device": device, "progress": label}
        result = evaluate(env, policy, starts_per_task=starts_per_task, **options)
        env.close()
        results.append(Validation.of(result, threshold, signals))
    return results


def chosen_threshold(results: Sequence[Validation]) -> float:
    """Threshold with the fewest failures among those whose score is not below that without a reflex.

    Of equal ones it is the largest, whose reflex acts least.

    Raises:
        UserError: if no threshold has fewer failures at that score.
    """
    before = next(each for each in results if each.threshold is None)
    options = [(each.failed, -each.threshold) for each in results if each.threshold and each.score >= before.score]
    failed, threshold = min(options, default=(before.failed, 0.0))
    if failed >= before.failed:
        raise UserError(
            f"no threshold has fewer failures than {before.failed:.1%} and a score of {before.score:.3g} or more, which"
            " are those without a reflex; collect more episodes, or choose one by hand, such as threshold=0.5"
        )
    return -threshold


def rows(results: Sequence[Validation]) -> list[dict[str, float | int | None]]:
    """JSON-ready form of `results`."""
    return [asdict(each) for each in results]
