"""Requests to a person with and without a policy that resets: `python benchmarks/reset_free.py OUTPUT.json`.

    OUTPUT.json [--seeds 0 1 2 3 4] [--minutes 60]

A hand carries a mug across a toy table (`tests/real_robot/learning/table.py`), behind the interface of a robot, at
5 Hz; the simulator resets the scene only where a person would be asked to: without the second policy after every
episode. RLPD learns, with ten demonstrations of each direction. Minutes are those in which the robot moves: the time
that a person takes is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402

from embodied import seeding  # noqa: E402
from embodied.algorithms.off_policy.sac import RLPDConfig  # noqa: E402
from embodied.report.repeating import machine  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.loop import train  # noqa: E402
from policies.squashed import SquashedConfig  # noqa: E402
from real_robot.learning.task import Reset  # noqa: E402
from tests.real_robot.learning.table import GOAL, demonstrations, on_robot  # noqa: E402

DEMONSTRATED = 10
LATE_MIN = 10.0
"""Minutes at the end of a run over which its success is averaged."""
POLICY = SquashedConfig(hidden=[64, 64])
ALGORITHM = RLPDConfig(
    rollout_length=8,
    updates=1.0,
    policy_delay=2,
    lookahead=3,
    minibatch=128,
    warmup=100,
    discount=0.95,
    initial_temperature=0.02,
    hidden=[64, 64],
    learning_rate=1e-3,
    value_learning_rate=1e-3,
    ensemble=3,
    capacity=50_000,
)


def measured(reset: Reset, seed: int, minutes: float) -> dict[str, Any]:
    """Requests to a person in `minutes` of motion, and the success of the task in the last of them."""
    seeding.seed_everything(seed)
    task, simulator = on_robot(ALGORITHM, POLICY, seed, DEMONSTRATED, reset=reset)
    env = task.environment(1, "table", "train", seed)
    policy = POLICY.build(env.contract)
    shown = demonstrations(GOAL, DEMONSTRATED, seed)
    began = time.process_time()
    episodes: list[tuple[float, float, int]] = []  # minutes of motion at the end, mean success, number
    for step in train(env, policy, ALGORITHM, env_steps=10**9, seed=seed, demonstrations=shown):
        moved = env.scene_resets.minutes if env.scene_resets else step.env_steps * env.contract.control_dt_s / 60.0
        if step.ended:
            episodes.append((moved, step.ended["success"], step.episodes))
        if moved >= minutes:
            break
    late = [(success * count, count) for at, success, count in episodes if at > minutes - LATE_MIN]
    result = {
        "reset": reset.value,
        "seed": seed,
        "minutes": minutes,
        "requests": sum(count for _, _, count in episodes),  # a person resets after every episode
        "episodes": sum(count for _, _, count in episodes),
        "late_success": sum(each for each, _ in late) / sum(count for _, count in late),
        "cpu_s": round(time.process_time() - began, 1),
    }
    if env.scene_resets:
        record = env.scene_resets.record()
        assert record["requests"] == simulator.tables[0].resets - 1
        result |= {name: record[name] for name in ("requests", "request_minutes", "attempts", "successes")}
    task.close()
    return result


def main() -> None:
    """Measure all seeds, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    header = {"git_commit": git_commit(), "versions": versions(), "machine": machine("cpu"), "rows": []}
    for seed in args.seeds:
        for reset in Reset:
            header["rows"].append(measured(reset, seed, args.minutes))
            print(header["rows"][-1], flush=True)
            with complete_or_absent(args.output) as temporary:
                temporary.write_text(dumps_rows(header))


if __name__ == "__main__":
    main()
