"""Speed of reading minibatches from a LeRobot dataset: our reader and lerobot's own loader, on the same files.

    python benchmarks/dataset_speed.py --python LEROBOT_PYTHON [--json benchmarks/results/dataset_speed.json]

LEROBOT_PYTHON is an interpreter with lerobot 0.4 (which needs an older torch than ours, and therefore a virtual
environment of its own). The dataset is made first: a few of the expert's episodes with two cameras, exported with
images and with videos. A row is an observation with both pictures, the state and the next `HORIZON` actions; rows are
drawn at random, and the loop does nothing else. Readings alternate; the median counts. Files of this size are in the
system's cache. Our reader uses decoded episodes in a cache; the time to make them, once, is reported, too.
lerobot's rows are float32 in [0, 1], ours uint8, which policies scale on their device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.data.cache import VARIABLE  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from real_robot.recording import lerobot_dataset  # noqa: E402
from real_robot.recording.demonstrations import demonstrations  # noqa: E402
from sims.libero.task import LiberoTask  # noqa: E402

SIZE, EPISODES, HORIZON, BATCH, BATCHES, REPEATS = 128, 3, 8, 64, 8, 3
THEIRS = """
import sys, time, torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, workers, horizon, batch, batches, rate = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
data = LeRobotDataset("own/dataset", root=root, delta_timestamps={"action": [k / rate for k in range(horizon)]})
sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=batch * (batches + 1))
loader = iter(torch.utils.data.DataLoader(data, batch, sampler=sampler, num_workers=workers))
next(loader)  # workers have begun
begin = time.perf_counter()
for found in loader:
    pass
print(batch * batches / (time.perf_counter() - begin))
"""


def main() -> None:
    """Make the datasets, read them alternately, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has lerobot")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = f"{folder}/cache"
        task = LiberoTask(
            tasks=["6"],
            assets="stand-in",
            images=["agentview", "robot0_eye_in_hand"],
            image_size=SIZE,
            episodes=EPISODES,
            executed=1,
        )
        task.demonstrations(Path(folder) / "made", 0)
        for store in lerobot_dataset.Store:
            data = Path(folder) / store.value
            lerobot_dataset.write_episodes(Path(folder) / "made/demonstrations", data, pictures=store)
            rows.append(measured(store.value, data, task, options.python))
            print(rows[-1])
    if options.json:
        record = {"commit": git_commit(), "versions": versions(), "lerobot": lerobot_version(options.python)}
        record |= {"pixels": SIZE, "cameras": 2, "batch": BATCH, "batches": BATCHES, "repeats": REPEATS}
        options.json.write_text(dumps_rows(record | {"horizon": HORIZON, "rows": rows}))


def lerobot_version(python: str) -> str:
    """Versions of lerobot and torch in the interpreter `python`."""
    command = [python, "-c", "import importlib.metadata as m; print(m.version('lerobot'), m.version('torch'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measured(store: str, data: Path, task: LiberoTask, python: str) -> dict[str, float | str]:
    """Rows per second of each reader: the median over alternating readings."""
    contract = task.contract("wide")
    begin = time.perf_counter()
    episodes = demonstrations(data, contract, data.with_name(f"run_{store}"), task)
    made_s = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(0)
    rates_by_reader: dict[str, list[float]] = {"ours": [], "lerobot, 0 workers": [], "lerobot, 2 workers": []}
    for _ in range(REPEATS):
        episodes.sample(BATCH, HORIZON, generator)
        begin = time.perf_counter()
        for _ in range(BATCHES):
            episodes.sample(BATCH, HORIZON, generator)
        rates_by_reader["ours"].append(BATCH * BATCHES / (time.perf_counter() - begin))
        for workers in (0, 2):
            arguments = [
                str(each) for each in (data, workers, HORIZON, BATCH, BATCHES, round(1.0 / contract.control_dt_s))
            ]
            process = subprocess.run([python, "-c", THEIRS, *arguments], capture_output=True, text=True, check=True)
            rates_by_reader[f"lerobot, {workers} workers"].append(float(process.stdout.split()[-1]))
    rates = {f"{name}, rows/s": round(statistics.median(each), 1) for name, each in rates_by_reader.items()}
    best = max(rates["lerobot, 0 workers, rows/s"], rates["lerobot, 2 workers, rows/s"])
    ratio = round(rates["ours, rows/s"] / best, 2)
    return {"pictures": store, "rows": len(episodes), "made_s": round(made_s, 2), **rates, "ours/lerobot": ratio}


if __name__ == "__main__":
    main()
