"""Cost of the training loop without simulator and network, and memory of a rollout: `python benchmarks/core_speed.py`.

    [--runs 9] [--decisions 40] [--output FILE]

CPU time of one thread for one decision of all environments, with a small MLP (actor and critic, two layers of 64 each)
in the tests' Reach, whose episodes take 7 steps at most, so that some restart at every decision. Rows at 256 and 4,096
environments alternate; the median of `runs` counts. "network" is the policy's forward and backward passes, whose cost
grows with the environments; "environment" is Reach; "own" is the rest. "retry" restarts by RetryStarts and puts
rollouts in an EpisodeStore. An update is one epoch of PPO in four minibatches, divided by the decisions. An
evaluation runs as many episodes as there are environments.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from embodied.algorithms.on_policy.ppo import PPOConfig  # noqa: E402
from embodied.contract import Contract, TensorSpec  # noqa: E402
from embodied.data.store import EpisodeStore  # noqa: E402
from embodied.environments.engine import EpisodeEngine, Outcome  # noqa: E402
from embodied.evaluation.evaluation import evaluate  # noqa: E402
from embodied.policy import Decision  # noqa: E402
from embodied.rollout.rollout import Collector, Rollout  # noqa: E402
from embodied.rollout.starts import RetryStarts  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from policies.mlp import MLPConfig, MLPPolicy  # noqa: E402
from tests.embodied.reach import Reach  # noqa: E402

FEW, MANY = 256, 4096
SIDE = 128
Measured = Callable[[], dict[str, float]]
"""Runs once; returns CPU milliseconds per decision of all environments, by part."""


def policy_of(env: Reach) -> MLPPolicy:
    """A new policy with fitted statistics."""
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[64, 64]).build(env.contract)
    policy.fit(Reach(FEW).reset(), torch.zeros(1, 1))
    return policy


class Clock:
    """Counts CPU seconds within calls of chosen functions, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inside = False  # a call within a counted one is part of it

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time inside the context as `part`'s."""
        if self.inside:
            yield
            return
        self.inside, start_s = True, time.process_time()
        try:
            yield
        finally:
            self.inside = False
            self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start_s

    def counting(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its time counts as `part`'s."""

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
            with self(part):
                return function(*args, **kwargs)

        return counted

    def parts(self, env: Reach, policy: MLPPolicy) -> None:
        """Count calls of `env` and `policy` from now on, and all backward passes."""
        for name in ("reset", "step"):
            setattr(env, name, self.counting("environment", getattr(env, name)))
        for name in ("act", "evaluate", "value"):
            setattr(policy, name, self.counting("network", getattr(policy, name)))

    def measure(self, steps: Callable[[], int]) -> dict[str, float]:
        """Milliseconds per step of a call that returns its number of steps: total, and by part."""
        self.seconds = {}
        start_s = time.process_time()
        count = steps()
        total = time.process_time() - start_s
        parts = {"all": total, **self.seconds, "own": total - sum(self.seconds.values())}
        return {name: 1e3 * each / count for name, each in parts.items()}


def collecting(envs: int, decisions: int, retry: bool) -> Measured:
    """Time one rollout of `decisions`."""
    env, clock = Reach(envs), Clock()
    generator = torch.Generator().manual_seed(0)
    starts = RetryStarts(env.task_index, retry=0.5, attempts=4, generator=generator) if retry else None
    store, policy = EpisodeStore(envs * decisions), policy_of(env)
    collector = Collector(env, policy, torch.Generator().manual_seed(0), starts)
    clock.parts(env, policy)

    def run() -> int:
        rollout = collector.collect(decisions)
        if retry:
            store.add(rollout)
        return decisions

    return lambda: clock.measure(run)


def updating(envs: int, decisions: int) -> Measured:
    """Time one update by the same rollout."""
    env, clock = Reach(envs), Clock()
    policy = policy_of(env)
    config = PPOConfig(epochs=1, minibatch=decisions * envs // 4, target_kl=float("inf"), critic_warmup=0)
    learner = config.build(policy, None, env, torch.Generator().manual_seed(0))
    rollout = Collector(env, policy, torch.Generator().manual_seed(0)).collect(decisions)
    clock.parts(env, policy)

    def run() -> int:
        learner.update(rollout, 0.0)
        return decisions

    def measured() -> dict[str, float]:
        backward = torch.Tensor.backward
        torch.Tensor.backward = clock.counting("network", backward)
        try:
            return clock.measure(run)
        finally:
            torch.Tensor.backward = backward

    return measured


def evaluating(envs: int) -> Measured:
    """Time one evaluation of as many episodes as environments; steps are the control decisions of the longest one."""
    env, clock = Reach(envs), Clock()
    policy = policy_of(env)
    clock.parts(env, policy)

    def run() -> int:
        return -(-int(evaluate(env, policy, starts_per_task=envs // 2).steps.max()) // env.contract.executed)

    return lambda: clock.measure(run)


class Cameras(EpisodeEngine):
    """An engine with two all-zero images per decision."""

    def __init__(self, num_envs: int) -> None:
        picture = TensorSpec((SIDE, SIDE, 3), dtype="uint8")
        contract = Contract({"front": picture, "wrist": picture}, TensorSpec((1,)), 0.1)
        super().__init__(contract, num_envs, 50, task_names=("look",))

    def begin(self, ids: torch.Tensor, starts: torch.Tensor) -> None:
        """No-op."""

    def advance(self, actions: torch.Tensor, remaining_steps: torch.Tensor) -> Outcome:
        """Return zero rewards."""
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return Outcome((remaining_steps > 0).float().unsqueeze(1), (remaining_steps > 0).unsqueeze(1), never, never)

    def observe(self) -> TensorDict:
        """Return new images."""
        shape = (self.num_envs, SIDE, SIDE, 3)
        pictures = {name: torch.zeros(shape, dtype=torch.uint8) for name in ("front", "wrist")}
        return TensorDict(pictures, [self.num_envs])


class Still:
    """A policy of zero actions."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Return zero actions."""
        n = len(observation)
        return Decision(torch.zeros(n, 1, 1), TensorDict({}, [n]), torch.zeros(n, 1, 1))


def pictures(envs: int = 8, decisions: int = 35) -> dict[str, Any]:
    """MB of a rollout, and of one that also stores every next observation, as an earlier version did."""
    env = Cameras(envs)
    rollout = Collector(env, Still(env.contract), torch.Generator()).collect(decisions)
    bytes_stored, bytes_next = _bytes(rollout), rollout.next_observation().bytes()
    bytes_with_next = bytes_stored - rollout.last_observation.bytes() + bytes_next
    return {
        "envs": envs,
        "decisions": decisions,
        "cameras": 2,
        "side": SIDE,
        "MB": round(bytes_stored / 1e6, 1),
        "MB with next_observation": round(bytes_with_next / 1e6, 1),
        "share": round(bytes_stored / bytes_with_next, 3),
    }


def _bytes(rollout: Rollout) -> int:
    parts = [each for each in vars(rollout).values() if isinstance(each, torch.Tensor | TensorDict)]
    return sum(each.bytes() if isinstance(each, TensorDict) else each.nbytes for each in parts)


def median(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median over runs of every part."""
    return {name: round(statistics.median(run[name] for run in found), 3) for name in found[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, print the table, and write the JSON."""
    options = _options(arguments)
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = []
    for name, make in {
        "collect": lambda envs: collecting(envs, options.decisions, retry=False),
        "collect, retry": lambda envs: collecting(envs, options.decisions, retry=True),
        "update": lambda envs: updating(envs, options.decisions),
        "evaluate": evaluating,
    }.items():
        few, many = make(FEW), make(MANY)
        few(), many()  # warm up
        pairs = [(few(), many()) for _ in range(options.runs)]
        for envs, measurements in zip((FEW, MANY), zip(*pairs, strict=True), strict=True):
            rows.append({"what": name, "envs": envs, "cpu_ms_per_step": median(measurements)})
        rows[-1]["over_few"] = {
            part: round(statistics.median(two[part] / one[part] for one, two in pairs), 2) for part in pairs[0][0]
        }
    report = {
        "git_commit": git_commit(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "runs": options.runs,
        "decisions": options.decisions,
        "load": [round(each, 1) for each in (load_before, os.getloadavg()[0])],
        "versions": versions(),
        "rows": rows,
        "pictures": pictures(),
    }
    with complete_or_absent(options.output) as temporary:
        temporary.write_text(dumps_rows(report))
    sys.stdout.write(table(report))


def table(report: dict[str, Any]) -> str:
    """Format the rows as Markdown."""
    lines = ["| what | environments | CPU ms a step | of it | over 256 |", "| --- | --- | --- | --- | --- |"]
    for row in report["rows"]:
        parts = ", ".join(f"{name} {each:.2f}" for name, each in row["cpu_ms_per_step"].items() if name != "all")
        over = ", ".join(f"{name} {each:.2f}x" for name, each in row.get("over_few", {}).items())
        lines.append(f"| {row['what']} | {row['envs']:,} | {row['cpu_ms_per_step']['all']:.2f} | {parts} | {over} |")
    rollout = report["pictures"]
    lines.append(
        f"\nA rollout of {rollout['decisions']} decisions of {rollout['envs']} environments, two cameras of {SIDE} x "
        f"{SIDE}: {rollout['MB']} MB; with next_observation stored too {rollout['MB with next_observation']} MB."
    )
    return "\n".join(lines) + f"\nLoad {report['load'][0]} to {report['load'][1]} on {report['cores']} cores.\n"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--decisions", type=int, default=40, help="of a rollout")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "core_speed.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
