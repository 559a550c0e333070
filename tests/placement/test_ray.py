"""Collectors on a real Ray cluster of two nodes, all of them on this machine.

Other runs skip this file, as its tests wait on time limits; with CI_RAY=required nothing is skipped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

if os.environ.get("CI_RAY") != "required":
    pytest.skip("clusters have a command of their own: make test-ray", allow_module_level=True)

import ray
from ray.cluster_utils import Cluster

import embodied.placement.ray
import embodied.training.experiment
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.placement.collectors import RemoteCollectors
from embodied.placement.ray import RayCollectors, RayConfig, RayPlacement, cluster
from embodied.placement.worker import CollectorRecipe, CollectorSpec, Worker
from embodied.rollout.joining import joined
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.storage import Storage
from embodied.saving import checkpoint
from embodied.saving.metrics import read_metrics
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.loop import build
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import IMITATION, POLICY, ReachTask
from tests.placement.test_threads import new_policy
from tests.placement.watched_reach import WatchedReach, processes

N, T = 6, 4
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
ALGORITHM = PPOConfig(rollout_length=T, minibatch=16, critic_warmup=0)


def node() -> dict[str, int]:
    """Options of a node with one CPU: given its ports, Ray does not wait for them, for 15 s at most."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in PORTS]
        for each in taken:
            each.bind(("", 0))
        ports = {name: each.getsockname()[1] for name, each in zip(PORTS, taken, strict=True)}
    return ports | {"num_cpus": 1, "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A cluster of two nodes with one CPU each, to which this process is connected as a run would be."""
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes that no test needs
    embodied.placement.ray.library()  # and its patience
    made = Cluster(initialize_head=True, head_node_args=node() | {"include_dashboard": False})
    made.add_node(**node())
    before = signal.getsignal(signal.SIGTERM)
    with cluster(RayConfig(address=made.address)):
        assert signal.getsignal(signal.SIGTERM) is before  # which saves a run
        yield made
    made.shutdown()


def no_starts(env: Any, generator: torch.Generator) -> None:
    return None


@contextmanager
def collecting(folder: Path, policy: MLPPolicy, num_envs: int = N, **options: Any) -> Iterator[RemoteCollectors]:
    config = RayConfig(**{"cpus": 1.0, "patience_s": 240.0} | options)
    pool = RayCollectors(config, CollectorRecipe(partial(WatchedReach, folder), Collector, no_starts, policy), num_envs)
    collectors = RemoteCollectors(pool, policy, max_staleness=config.max_staleness, patience_s=config.patience_s)
    try:
        yield collectors
    finally:
        pool.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 240.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def collect_until(collectors: RemoteCollectors, condition: Any) -> list[Rollout]:
    """Rollouts up to the first one of which `condition` holds, which may take minutes on a busy machine."""
    rollouts, end = [collectors.collect(T)], time.monotonic() + 240.0
    while not condition(rollouts[-1]):
        assert time.monotonic() < end
        rollouts.append(collectors.collect(T))
    return rollouts


def test_a_run_on_two_nodes_survives_kills_a_hanging_simulator_and_the_loss_of_a_node(
    nodes: Cluster, tmp_path: Path
) -> None:
    policy, same = new_policy(), new_policy()
    learner, _ = build(Reach(N), policy, ALGORITHM, None, 0)
    expecting, _ = build(Reach(N), same, ALGORITHM, None, 0)
    recipe = CollectorRecipe(lambda first, count, seed: Reach(count, seed=seed), Collector, no_starts, same)
    local = [(Worker(), CollectorSpec(0, 0, 3)), (Worker(), CollectorSpec(1, 3, 3))]
    for worker, place in local:
        worker.build(recipe, place)
    with collecting(tmp_path, policy, timeout_s=5.0) as collectors:
        pool = collectors.pool

        # The same data and the same weights as collectors in this process have.
        for version in range(3):
            rollout = collectors.collect(T)
            expected = joined([worker.collect(same.state_dict(), version, T) for worker, _ in local])
            assert torch.equal(rollout.sample["raw"], expected.sample["raw"])
            assert torch.equal(rollout.observation["position"], expected.observation["position"])
            assert torch.equal(rollout.start, expected.start)
            assert rollout.policy_version == version
            assert rollout.placement_metrics["received_mb"] > 0.0
            learner.update(rollout, 0.0)
            expecting.update(expected, 0.0)
            for name, value in policy.state_dict().items():
                assert torch.equal(value, same.state_dict()[name]), name
            collectors.version += 1
        where = {ray.get(handle.actor.__ray_call__.remote(node_of)) for handle in pool.handles}
        assert len(where) == 2  # spread over the nodes
        assert sorted(processes(tmp_path).values()) == ["0-3", "3-3"]

        # A process is killed.
        victim = next(pid for pid, part in processes(tmp_path).items() if part == "0-3")
        os.kill(victim, signal.SIGKILL)
        rollouts = collect_until(collectors, lambda each: each.placement_metrics["lost_collectors"] > 0)
        rollouts += collect_until(
            collectors, lambda each: each.placement_metrics["collectors"] == 2 and each.done.shape[1] == N
        )
        assert sum(each.odd_episodes()["lost"] for each in rollouts) == 3
        assert sum(each.placement_metrics["lost_collectors"] for each in rollouts) == 1
        assert all(each.odd_episodes()["lost"] <= each.odd_episodes()["diverged"] for each in rollouts)
        assert list(processes(tmp_path).values()).count("0-3") == 2

        # A simulator hangs.
        (tmp_path / "hang").touch()
        rollouts = collect_until(collectors, lambda each: each.placement_metrics["lost_collectors"] > 0)
        assert sum(each.odd_episodes()["lost"] for each in rollouts) == 3
        collect_until(collectors, lambda each: each.done.shape[1] == N)

        # A node goes, and another one comes.
        second = next(node for node in nodes.worker_nodes)
        nodes.remove_node(second, allow_graceful=False)
        rollouts = collect_until(collectors, lambda each: each.placement_metrics["lost_collectors"] > 0)
        assert rollouts[-1].done.shape[1] == N // 2  # no room for two: it goes on with one
        nodes.add_node(**node())
        collect_until(collectors, lambda each: each.done.shape[1] == N)
        alive = [pid for pid in processes(tmp_path) if not gone(pid)]
    wait_for(lambda: all(gone(pid) for pid in alive))


def node_of(worker: Worker) -> str:
    return ray.get_runtime_context().get_node_id()


def test_collectors_go_on_while_the_learner_updates(nodes: Cluster, tmp_path: Path) -> None:
    with collecting(tmp_path, new_policy(), max_staleness=2) as collectors:
        for _ in range(4):
            rollout = collectors.collect(T)
            assert 0 <= collectors.version - rollout.policy_version <= 2
            collectors.version += 1
        assert rollout.policy_version > 0
        assert rollout.done.shape == (T, N)
        wait_for(lambda: collectors.pool.receive())  # what was begun before the last update


class WatchedTask(ReachTask):
    """Whose training processes a test knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu") -> Reach:
        known = split == "train" and os.getpid() != int((self.folder / "learner").read_text())
        return WatchedReach(self.folder, 0, num_envs, seed) if known else Reach(num_envs, seed=seed)


def test_a_killed_run_goes_on_with_its_weights_and_counters_and_reports_what_died(
    nodes: Cluster, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})
    (tmp_path / "learner").write_text(str(os.getpid()))
    world = RayPlacement(config=RayConfig(patience_s=240.0))
    config = ExperimentConfig(
        num_envs=N,
        env_steps=400,
        checkpoint_every=1,
        evaluation_starts=4,
        evaluation_envs=4,
        stages=["rl"],
        video=False,
        evaluate_every_steps=None,
    )

    def experiment() -> Experiment:
        task, policy = WatchedTask(tmp_path), MLPConfig(hidden=[8])
        return Experiment(config, task, policy, ALGORITHM, tmp_path / "run", record={}, world=world)

    class Killed(BaseException):
        pass

    def kill(run: Experiment, *args: Any) -> None:
        save(run, *args)
        if run.counters["iteration"] == 2 and len(processes(tmp_path)) == 2:
            os.kill(next(iter(processes(tmp_path))), signal.SIGKILL)  # the first collector
        if run.counters["lost_collectors"]:
            raise Killed  # and then the learner

    save = Experiment._keep
    monkeypatch.setattr(Experiment, "_keep", kill)
    first = experiment()
    with pytest.raises(Killed):
        first.run()
    monkeypatch.setattr(Experiment, "_keep", save)
    done, weights = first.counters["env_steps"], first.policy.state_dict()
    known = set(processes(tmp_path))

    again = experiment()
    assert again.counters == first.counters
    assert again.counters["lost_collectors"] == 1
    assert again.counters["lost"] == N // 2
    for name, value in again.policy.state_dict().items():
        assert torch.equal(value, weights[name])
    report = again.run()
    assert report.env_steps >= 400 > done
    assert report.lost_collectors == 1
    assert report.cpu_s > 0.0
    text = (tmp_path / "run" / "report.md").read_text()
    assert "1 collectors died and were replaced" in text
    assert "a resumed run goes on with its weights and counters" in text
    assert len(set(processes(tmp_path)) - known) >= 2  # collectors of its own
    rows = read_metrics(tmp_path / "run")
    assert [row["placement/staleness"] for row in rows if "placement/staleness" in row] == [0.0] * len(rows)


def test_a_job_that_is_killed_whole_leaves_nothing_running_and_is_resumed(tmp_path: Path) -> None:
    run, root = tmp_path / "run", Path(__file__).parents[2]
    options = ["task=mjcf_cartpole", "num_envs=8", "env_steps=30000", "algorithm.rollout_length=16"]
    options += [
        "checkpoint_every=1",
        "evaluation_starts=4",
        "evaluation_envs=4",
        "evaluate_every_steps=null",
        "video=false",
    ]
    options += ["placement=ray", "placement.cpus=0.5", "placement.patience_s=240"]
    environment = os.environ | {"PYTHONPATH": str(root)}

    def started(*given: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, root / "train.py", *given], cwd=tmp_path, env=environment)

    with started(*options, f"output={run}") as first:
        wait_for(lambda: len(list((run / "checkpoint").glob("[0-9]*"))) > 1)
        others = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    assert any("ray::" in name for name in map(name_of, others))
    wait_for(lambda: all(gone(each.pid) for each in others))

    saved = checkpoint.load(run).counters
    done = saved["env_steps"]
    assert 0 < done < 30_000
    with started(f"resume={run}") as second:
        assert second.wait() == 0
    report = json.loads((run / "report.json").read_text())
    assert report["env_steps"] >= 30_000
    assert report["episodes"] >= saved["episodes"]
    rows = [row for row in read_metrics(run) if "placement/collectors" in row]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))  # each update once, those before the kill and those after it
    assert steps[0] <= done < steps[-1]


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return ""


def test_what_cannot_be_collected_elsewhere_is_refused_before_anything_runs(nodes: Cluster, tmp_path: Path) -> None:
    (tmp_path / "learner").write_text(str(os.getpid()))

    def refuse(algorithm: Any, told: str, storage: Storage = Storage.DEVICE, **options: Any) -> None:
        config = ExperimentConfig(num_envs=N, evaluation_envs=4, stages=["rl"], storage=storage)
        with pytest.raises(UserError, match=told):
            Experiment(
                config,
                WatchedTask(tmp_path),
                POLICY,
                algorithm,
                tmp_path / "run",
                record={},
                world=RayPlacement(config=RayConfig(**options)),
            )
        assert not (tmp_path / "run").exists()

    refuse(IMITATION, "collectors are for learners of rollouts that stand alone, algorithm=ppo or grpo")
    refuse(ALGORITHM, r"placement\.max_staleness=5 is more than the algorithm takes, 4", max_staleness=5)
    refuse(GRPOConfig(group=2), r"placement\.max_staleness=1 is more than the algorithm takes, 0", max_staleness=1)
    refuse(ALGORITHM, "storage=disk is for the learner's own environments", storage=Storage.DISK)
    refuse(ALGORITHM, "expected num_envs of at least 7, one per collector; got 6", collectors=7)
    refuse(
        replace(ALGORITHM, curriculum=0.5),
        r"algorithm\.curriculum needs environments in the learner's process; use curriculum=0",
    )


def test_a_run_ends_when_no_collector_can_be_had_and_says_why(nodes: Cluster, tmp_path: Path) -> None:
    with (
        collecting(tmp_path, new_policy(), cpus=64.0, patience_s=1.0) as collectors,
        pytest.raises(UserError, match=r"no collector could be had .* each needs 64 CPUs and 0 GPUs, the cluster"),
    ):
        collectors.collect(T)
    (tmp_path / "crash").touch()
    with (
        collecting(tmp_path, new_policy(), collectors=1, patience_s=45.0) as collectors,
        pytest.raises(UserError, match=r"no collector could be had for placement\.patience_s=45: The actor died"),
    ):
        collectors.collect(T)


def test_what_a_user_can_mend_is_told_as_such(nodes: Cluster, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "refuse").touch()
    with (
        collecting(tmp_path, new_policy()) as collectors,
        pytest.raises(UserError, match=r"^expected another simulator, got this one$"),
    ):
        collectors.collect(T)
    (tmp_path / "refuse").unlink()
    monkeypatch.setattr(embodied.placement.ray, "software", lambda: {"torch": "1.0", "python": "2.7"})
    with (
        collecting(tmp_path, new_policy(), collectors=1) as collectors,
        pytest.raises(UserError, match=r"^placement=ray: node .* has .*python 3.* where the learner has 2.7.*same"),
    ):
        collectors.collect(T)
    with pytest.raises(UserError, match="expected num_envs of at least 7, one per collector; got 6"):
        RayCollectors(RayConfig(collectors=7), CollectorRecipe(Reach, Collector, no_starts, new_policy()), 6)


def test_a_head_node_that_is_not_there_is_one_line_and_no_hang() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"no Ray head node at placement\.address={address} \(.*refused"):
            embodied.placement.ray.reach(address)
    with pytest.raises(UserError, match=r"expected placement\.address=null, auto or HOST:PORT, got head"):
        embodied.placement.ray.reach("head")
