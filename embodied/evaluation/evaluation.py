"""Evaluation: every initial state once, deterministic policy, confidence intervals, repeatable.

If the environment does not define success, mean returns replace success rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import ODD_EVENTS, OVERFLOW, Environment, NumberedStarts, Transition, group_size, show_values
from embodied.environments.engine import check_starts, rank
from embodied.errors import UserError
from embodied.evaluation.means import difference_interval, mean_interval
from embodied.evaluation.repeatability import Replay
from embodied.policy import Policy
from embodied.rollout.finite import check_observation, check_transition
from embodied.rollout.memory import Memory
from embodied.runtime.progress import Progress

Z95 = NormalDist().inv_cdf(0.975)
BLOCK, LARGE_BLOCK = 32, 512
"""Block sizes of observations per call of the policy; the larger one if at least that many environments run.

Rounding of matrix products depends on the batch size, and contacts amplify it: with one size, an episode does not
depend on the others.
"""


SUCCESS_AT_RESET = "success_at_reset"
"""Metric of simulators that report success before the first action: 1 where the episode began with it."""


def wilson(successes: float, episodes: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a rate (Wilson 1927, J. Am. Stat. Assoc. 22), valid also near 0 and 1, unlike Wald's.

    Raises:
        ValueError: unless 0 <= successes <= episodes and episodes > 0.
    """
    if not 0 <= successes <= episodes or episodes == 0:
        raise ValueError(f"expected 0 <= successes <= episodes and episodes > 0, got {successes} of {episodes}")
    # centre = (p + z^2 / 2n) / (1 + z^2 / n), spread = z sqrt(p (1 - p) / n + z^2 / 4 n^2) / (1 + z^2 / n)
    rate, weight = successes / episodes, z * z / episodes
    centre = rate + weight / 2
    spread = z * math.sqrt(rate * (1 - rate) / episodes + weight / (4 * episodes))
    return max(0.0, (centre - spread) / (1 + weight)), min(1.0, (centre + spread) / (1 + weight))


def rate_over_seeds(rates: Sequence[float], episodes: int) -> tuple[float, float, float]:
    """Mean of the success rates of several training seeds on the same `episodes`: mean, low, high.

    The interval is for other seeds and other starts. Student's interval over seeds alone is too narrow: all seeds ran
    the same starts, and these may be easy. The distances to Wilson's bounds of one seed's episodes are added in
    quadrature (MOVER, Zou and Donner 2008, Stat. Med. 27), which counts the noise of single episodes twice and is
    therefore rather too wide. The rates of one seed have Wilson's interval, which is for that seed alone.
    """
    values = torch.tensor(list(rates), dtype=torch.float64)
    rate, seeds_low, _ = mean_interval(values)
    low, high = wilson(rate * episodes, episodes)
    if len(values) == 1:
        return rate, low, high
    # MOVER: p -+ sqrt((p - l_Wilson)^2 + (p - l_Student)^2), and likewise above
    over_seeds = rate - seeds_low
    return (
        rate,
        max(0.0, rate - math.hypot(rate - low, over_seeds)),
        min(1.0, rate + math.hypot(high - rate, over_seeds)),
    )


@dataclass(frozen=True)
class Gain:
    """Difference of two success rates, or mean returns, on the same episodes, with its interval."""

    difference: float
    low: float
    high: float
    measure: str = "success"


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Outcome of every episode: `success`, `steps` (its control steps), each of `metrics` are [tasks, starts].

    `metrics` also have the sums of signals, and `events` [tasks, starts] by name whether they happened. Diverged
    episodes failed because the simulation blew up; their returns are the worst of the evaluation, their sums of
    signals are unknown. Without numbered initial states no other evaluation has the same episodes: it is not
    `repeatable`, and has no `step_limit`. Nor is it `repeatable` if the same initial state and actions had different
    consequences in this evaluation. `returns` [tasks, starts] are the sums of rewards if the environment does not
    define success, else None. `failures` [tasks, starts] are flags of failed episodes by reason; each failed episode
    has one reason. Columns are initial states from `first_start` on.
    """

    tasks: tuple[str, ...]
    success: Tensor
    steps: Tensor
    step_limit: int | None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    events: dict[str, Tensor] = field(default_factory=dict)
    repeatable: bool = True
    returns: Tensor | None = None
    failures: dict[str, Tensor] = field(default_factory=dict)
    first_start: int = 0

    @property
    def measure(self) -> str:
        """Measure of episodes: "success" or "return"."""
        return "success" if self.returns is None else "return"

    @property
    def immediate(self) -> int:
        """Number of episodes that succeeded with their first action or before it."""
        before = self.metrics.get(SUCCESS_AT_RESET, torch.zeros(()))
        return int((self.success & ((self.steps <= 1) | (before > 0.0))).sum())

    def remarks(self) -> list[str]:
        """Sentences for reports on conditions that limit the meaning of the numbers."""
        sentences = []
        if self.step_limit is not None and not self.repeatable:
            sentences.append(
                "The same initial state and actions led to something else in one evaluation: the simulator ignores its"
                " seeds, and evaluations do not run the same episodes."
            )
        if self.immediate:
            sentences.append(
                f"{self.immediate:,} of {int(self.success.sum()):,} successful episodes of an evaluation succeeded with"
                " their first action or before it: some initial states are solved already."
            )
        return sentences

    @property
    def outcomes(self) -> Tensor:
        """Success, 1 or 0, or return of every episode, [tasks, starts]."""
        return (self.success if self.returns is None else self.returns).double()

    def summary(self) -> dict[str, Any]:
        """JSON-ready: success or return, low, high, metrics, episodes, step_limit and the same for each task.

        A metric is the mean over the episodes in which it is defined, null if there are none; an event the share of
        the episodes with it. `ODD_EVENTS` and `immediate` are counted, if there are any. `outcomes` are
        the successes (1 or 0), or returns, of a task's episodes by start. Its `failures` are counted by reason, with
        the starts if these are `repeatable`.
        """
        per_task = [
            {
                "task": task,
                **self._measured(row),
                **self._means(row),
                "mean_steps": round(float(self.steps[row].float().mean()), 1),
                **self._failed(row),
                "outcomes": " ".join(f"{value:.6g}" for value in self.outcomes[row].tolist()),
            }
            for row, task in enumerate(self.tasks)
        ]
        counts = {name: self.count(name) for name in ODD_EVENTS} | {"immediate": self.immediate}
        extra: dict[str, Any] = {name: count for name, count in counts.items() if count}
        extra |= {} if self.repeatable else {"repeatable": False}
        extra |= {"first_start": self.first_start} if self.first_start else {}
        return {
            **self._measured(slice(None)),
            **self._means(slice(None)),
            "step_limit": self.step_limit,
            **extra,
            "per_task": per_task,
        }

    def count(self, event: str) -> int:
        """Number of episodes in which `event` happened."""
        return int(self.events[event].sum()) if event in self.events else 0

    def _measured(self, rows: int | slice) -> dict[str, Any]:
        if self.returns is None:
            return _rate(self.success[rows])
        values = self.returns[rows]
        bounds = dict(zip((self.measure, "low", "high"), mean_interval(values), strict=True))
        return {name: x if math.isfinite(x) else None for name, x in bounds.items()} | {"episodes": values.numel()}

    def _failed(self, row: int) -> dict[str, Any]:
        failed = {reason: ended[row].nonzero().flatten() for reason, ended in self.failures.items()}
        counts = {
            reason: {"episodes": len(columns)}
            | ({"starts": (columns + self.first_start).tolist()} if self.repeatable else {})
            for reason, columns in failed.items()
            if len(columns)
        }
        return {"failures": counts} if counts else {}

    def _means(self, rows: int | slice) -> dict[str, float | None]:
        shares = {name: flags.double() for name, flags in self.events.items() if name not in ODD_EVENTS}
        means = {name: float(values[rows].nanmean()) for name, values in (self.metrics | shares).items()}
        return {name: None if math.isnan(mean) else mean for name, mean in means.items()}

    def of_task(self, row: int) -> EvaluationResult:
        """Result of the episodes of one task."""
        only = slice(row, row + 1)
        returns = None if self.returns is None else self.returns[only]
        fields = {"tasks": self.tasks[only], "success": self.success[only], "steps": self.steps[only]}
        return replace(self, **fields, returns=returns, metrics={}, failures={}, events={})

    def first(self, starts: int) -> EvaluationResult:
        """Result of the episodes of each task's first `starts` initial states."""
        truncate = lambda columns: {name: values[:, :starts] for name, values in columns.items()}  # noqa: E731
        returns = None if self.returns is None else self.returns[:, :starts]
        columns = {"success": self.success[:, :starts], "steps": self.steps[:, :starts]}
        columns |= {name: truncate(getattr(self, name)) for name in ("metrics", "failures", "events")}
        return replace(self, **columns, returns=returns)

    def gain_over(self, before: EvaluationResult, z: float = Z95) -> Gain:
        """Gain from `before` to this, with its interval.

        On the episodes that both ran, paired: adjusted Wald interval (Bonett and Price 2012, J. Educ. Behav.
        Stat. 37(4), section 3): one is added to each kind of discordant pair, so the interval keeps its width where few
        or no pairs differ. On different episodes (not `repeatable`), Newcombe's from both Wilson intervals (1998, Stat.
        Med. 17, method 10). For returns, Student's interval of the paired differences; on different episodes Welch's.

        Raises:
            UserError: if the two did not run the same tasks, first start and step limit.
        """
        same = [(each.tasks, each.first_start, each.step_limit) for each in (self, before)]
        if same[0] != same[1]:
            raise UserError("expected two evaluations of the same tasks, first start and step limit to compare")
        paired = self.repeatable and before.repeatable
        shared = min(self.success.shape[1], before.success.shape[1])
        new, old = (self.first(shared), before.first(shared)) if paired else (self, before)
        if new.returns is not None and old.returns is not None:
            both = new.returns, old.returns
            return Gain(*(mean_interval(both[0] - both[1]) if paired else difference_interval(*both)), self.measure)
        if not paired:
            return _independent_gain(new.success, old.success, z)
        won = int((new.success & ~old.success).sum())
        lost = int((old.success & ~new.success).sum())
        pairs = new.success.numel()
        up, down = (won + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
        # adjusted Wald: z sqrt((p12 + p21 - (p12 - p21)^2) / (n + 2)), with p12 = (n12 + 1) / (n + 2)
        spread = z * math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
        return Gain((won - lost) / pairs, max(-1.0, up - down - spread), min(1.0, up - down + spread))


def evaluate(
    env: Environment,
    policy: Policy,
    *,
    starts_per_task: int,
    first_start: int = 0,
    device: torch.device | str = "cpu",
    progress: str | None = None,
    watch: Callable[[Environment, Tensor, Transition], None] | None = None,
) -> EvaluationResult:
    """Run the deterministic policy from `starts_per_task` initial states, `first_start` on, of every task of `env`.

    If a task has fewer, each from there on runs once; if environments share worlds, the last world is filled. The
    outcome does not depend on the order of episodes, nor on the number of environments below `LARGE_BLOCK`. Without
    numbered initial states, the first episodes to begin count, however long they take.

    `device` is the policy's; `progress` labels a bar (None: no bar); `watch` is called after every chunk with the
    environment, the chunk [N, K, A] and its transition, `executed` only where an episode counts. At the end the first
    initial states run once more, to check whether they have the same consequences (`repeatable`).

    Raises:
        UserError: if a task has no environment or no initial state `first_start`, `starts_per_task` < 1, the policy was
            built for other tensors, or an observation or a reward is not finite.
    """
    policy.contract.check(env.contract)
    group = group_size(env)
    rounded_starts = -(-starts_per_task // group) * group
    if isinstance(env, NumberedStarts) and env.num_starts:
        check_starts(first_start, env.num_starts)
        rounded_starts = min(rounded_starts, env.num_starts - first_start)
    starts_per_task = rounded_starts
    if starts_per_task < 1:
        raise UserError(f"expected at least one episode of each task, got {starts_per_task}")
    schedule = _Schedule(env, starts_per_task)
    shape = (len(env.task_names), starts_per_task)
    success, steps = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
    returns, has_success = torch.zeros(shape, dtype=torch.float64), True
    episode_steps = torch.zeros(env.num_envs, dtype=torch.int64)  # control steps of the running episodes
    earned = torch.zeros(env.num_envs, dtype=torch.float64)  # their rewards
    metrics: dict[str, Tensor] = {}
    free = torch.ones(env.num_envs, dtype=torch.bool)
    failures: dict[str, Tensor] = {}
    events: dict[str, Tensor] = {}
    running = _Running(env.num_envs)
    observation: TensorDict | None = None
    memory = Memory(policy, env.num_envs, env.device)
    replay = Replay()
    with Progress(progress or "", success.numel(), "episode", visible=progress is not None) as bar:
        while schedule.assign(free) or bool(schedule.running.any()):
            if observation is None or bool(schedule.fresh.any()):
                mask = None if observation is None else schedule.fresh
                starts = first_start + schedule.start.clamp_min(0)
                reset_mask = None if mask is None else mask.to(env.device)
                numbers = (starts.to(env.device),) if isinstance(env, NumberedStarts) else ()
                observation = env.reset(reset_mask, *numbers)
                check_observation(env, observation)
                memory.restart(mask)
                episode_steps[slice(None) if mask is None else mask] = 0
                earned[slice(None) if mask is None else mask] = 0.0
                running.restart(slice(None) if mask is None else mask)
            actions = act(policy, observation, schedule.running, device, memory)
            chunk = actions[:, : env.contract.executed].to(env.device)
            replay.begin(first_start + schedule.start.clamp_min(0), observation, chunk)
            show_values(env, None, schedule.running.to(env.device))
            transition = env.step(chunk.clone())  # the environment may modify it
            check_transition(env, transition)
            replay.end(transition)
            if watch:  # mask out episodes that do not count
                counts = transition.executed & schedule.running.to(env.device).unsqueeze(1)
                watch(env, chunk, replace(transition, executed=counts))
            observation = transition.observation
            episode_steps += transition.executed.sum(1).cpu()
            earned += transition.reward.detach().sum(1).cpu()
            running.add(transition)
            has_success = transition.has_success
            free = transition.done.cpu() & schedule.running
            rows = free.nonzero().squeeze(1)
            cell = schedule.task_index[rows], schedule.start[rows]
            success[cell], steps[cell] = transition.success.cpu()[rows], episode_steps[rows]
            returns[cell] = earned[rows]
            for name, flags in running.events.items():
                events.setdefault(name, torch.zeros(shape, dtype=torch.bool))[cell] = flags[rows]
            for name, values in (transition.metrics | running.signals()).items():
                metrics.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
                metrics[name][cell] = values.cpu()[rows].double()
            for name, failed in _failures(transition, running.events).items() if has_success else ():
                failures.setdefault(name, torch.zeros(shape, dtype=torch.bool))[cell] = failed[rows]
            bar.update(len(rows))
    limit = env.step_limit if isinstance(env, NumberedStarts) else None
    show_values(env, None, torch.zeros(env.num_envs, dtype=torch.bool, device=env.device))  # the repetition counts none
    repeatable = isinstance(env, NumberedStarts) and replay.repeats(env)
    diverged = events.get("diverged", torch.zeros(shape, dtype=torch.bool))
    final_returns = None if has_success else _with_worst(returns, steps, diverged, limit)
    failures = {name: failed for name, failed in failures.items() if bool(failed.any())}
    return EvaluationResult(
        tuple(env.task_names),
        success,
        steps,
        limit,
        metrics,
        events,
        repeatable,
        final_returns,
        failures,
        first_start,
    )


def compare(
    environment: Callable[[str], Environment],
    distributions: Sequence[str],
    policies: Mapping[str, Policy],
    **options: Any,  # noqa: ANN401 - those of `evaluate`
) -> dict[tuple[str, str], EvaluationResult]:
    """Run `evaluate` for each of `policies` on the same episodes of each of `distributions`, by (policy, name)."""
    return {
        (label, name): evaluate(environment(name), policy, progress=f"{label}, {name}", **options)
        for name in distributions
        for label, policy in policies.items()
    }


class _Running:
    """Sums of the signals of running episodes and their `events` until now, [N] by name."""

    def __init__(self, num_envs: int) -> None:
        self.sums: dict[str, Tensor] = {}
        self.events: dict[str, Tensor] = {}
        self._zero = torch.zeros(num_envs, dtype=torch.float64)

    def restart(self, begins: Tensor | slice) -> None:
        """Reset the totals of episodes that begin, `begins` [N]."""
        for values in (*self.sums.values(), *self.events.values()):
            values[begins] = 0

    def add(self, transition: Transition) -> None:
        """Add the signals and events of one chunk."""
        for name, values in transition.signals.items():
            self.sums[name] = self.sums.get(name, self._zero) + values.detach().sum(1).cpu()
        for name, flags in transition.events.items():
            self.events[name] = self.events.get(name, self._zero > 0) | flags.cpu()

    def signals(self) -> dict[str, Tensor]:
        """Sums of signals, NaN where the simulation diverged: the rest of the episode is unknown."""
        diverged = self.events.get("diverged", self._zero > 0)
        return {name: total.masked_fill(diverged, math.nan) for name, total in self.sums.items()}


class _Schedule:
    """Assignment of every task's initial states to the environments that run it.

    `start` [N] is each environment's initial state (-1: none left), `fresh` [N] marks those just assigned.
    """

    def __init__(self, env: Environment, starts_per_task: int) -> None:
        self.task_index, self.starts_per_task = env.task_index.cpu(), starts_per_task
        self.next = torch.zeros(len(env.task_names), dtype=torch.int64)
        present = set(self.task_index.tolist())
        missing = [name for index, name in enumerate(env.task_names) if index not in present]
        if missing:
            raise UserError(
                f"no environment runs {', '.join(missing)}; use at least one per task: num_envs={len(self.next)}"
            )
        self.start = torch.full((env.num_envs,), -1)
        self.fresh = torch.zeros(env.num_envs, dtype=torch.bool)

    @property
    def running(self) -> Tensor:
        """Whether an environment runs an episode that counts, [N] bool."""
        return self.start >= 0

    def assign(self, free: Tensor) -> bool:
        """Assign the next states to the `free` environments [N]; return whether any got one."""
        rows = free.nonzero().squeeze(1)
        tasks = self.task_index[rows]
        numbers = self.next[tasks] + rank(tasks)
        valid = numbers < self.starts_per_task
        self.fresh = torch.zeros_like(free)
        self.fresh[rows] = valid
        self.start[rows] = torch.where(valid, numbers, -1)
        self.next += torch.bincount(tasks[valid], minlength=len(self.next))
        return bool(self.fresh.any())


def act(
    policy: Policy, observation: TensorDict, running: Tensor, device: torch.device | str, memory: Memory | None = None
) -> Tensor:
    """Deterministic action chunks [N, H, A], zero where not `running`, computed in blocks of one size.

    `memory` is updated; a recurrent policy needs it.
    """
    observation = observation if memory is None else memory.with_observation(observation)
    rows = running.nonzero().squeeze(1)
    size = BLOCK if len(running) < LARGE_BLOCK else LARGE_BLOCK
    # blocks of one size, filled up with the first row: rounding then does not depend on the number of running rows
    padded = torch.cat((rows, rows[:1].expand(-len(rows) % size)))
    obs_device = next(iter(observation.values(include_nested=True, leaves_only=True))).device
    blocks = [
        policy.act(observation[block].to(device), deterministic=True) for block in padded.to(obs_device).split(size)
    ]
    running_actions = torch.cat([decision.actions for decision in blocks])[: len(rows)]
    if memory is not None:
        memory.keep(blocks, rows)
    actions = running_actions.new_zeros(len(running), *running_actions.shape[1:])
    actions[rows.to(device)] = running_actions
    return actions


def _failures(transition: Transition, events: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flags of episodes that failed, [N] bool each, by reason; the first reason that holds is an episode's only one.

    `events` [N] are those of the episodes.
    """
    never = torch.zeros_like(transition.success)
    reasons = {
        "the simulator's process died": events.get("lost", never),
        OVERFLOW: transition.failures.get(OVERFLOW, never),
        "the simulation diverged": events.get("diverged", never),
        **transition.failures,
        "ended early": transition.terminated,
        "time-out": transition.truncated,
    }
    unexplained, failures = (transition.done & ~transition.success).cpu(), {}
    for name, holds in reasons.items():
        failures[name] = unexplained & holds.cpu()
        unexplained = unexplained & ~failures[name]
    return failures


def _with_worst(returns: Tensor, steps: Tensor, diverged: Tensor, limit: int | None) -> Tensor:
    """Returns [tasks, starts], where `diverged` replaced by the worst known of the task: an early end saves no costs.

    That is the lowest return of the other episodes, or the episode's own if its rewards had continued at their mean
    until the step limit (without one, as long as the longest episode), whichever is lower.
    """
    extrapolated = returns * (limit or int(steps.max())) / steps.clamp_min(1)
    lowest = torch.where(diverged, torch.inf, returns).amin(1, keepdim=True)
    return torch.where(diverged, torch.minimum(returns, torch.minimum(extrapolated, lowest)), returns)


def _rate(success: Tensor) -> dict[str, Any]:
    count, episodes = int(success.sum()), success.numel()
    low, high = wilson(count, episodes)
    return {"success": count / episodes, "low": low, "high": high, "episodes": episodes}


def _independent_gain(after: Tensor, before: Tensor, z: float) -> Gain:
    rates = [(float(each.double().mean()), *wilson(int(each.sum()), each.numel(), z)) for each in (after, before)]
    (up, up_low, up_high), (down, down_low, down_high) = rates
    # Newcombe: d - sqrt((p1 - l1)^2 + (u2 - p2)^2), d + sqrt((u1 - p1)^2 + (p2 - l2)^2)
    low = up - down - math.hypot(up - up_low, down_high - down)
    return Gain(up - down, low, up - down + math.hypot(up_high - up, down - down_low))
