"""Collectors as threads: the numbers of collectors one after the other, at the same time, and what ends them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.placement.collectors import RemoteCollectors
from embodied.placement.local import Local
from embodied.placement.registry import LocalConfig
from embodied.placement.threads import ThreadCollectors
from embodied.placement.worker import CollectorRecipe, CollectorSpec, Worker, part_of
from embodied.rollout.joining import joined
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector
from embodied.runtime.interrupt import Stopped
from embodied.training.experiment import Experiment, ExperimentConfig
from policies.mlp import MLPConfig, MLPPolicy
from sims.vehicle.task import NavigateTask
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import IMITATION, ReachTask

N, T = 6, 4
ALGORITHM = PPOConfig(rollout_length=T, minibatch=16, critic_warmup=0)


def new_policy() -> MLPPolicy:
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[8]).build(Reach(1).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.rand(100, 1) - 0.5)
    return policy


@contextmanager
def pool_of(make, policy: MLPPolicy, num_envs: int = N) -> Iterator[ThreadCollectors]:
    pool = ThreadCollectors(
        CollectorRecipe(make, Collector, lambda env, generator: None, policy), num_envs, collectors=2
    )
    try:
        yield pool
    finally:
        pool.close()
    assert not collecting()


def collecting() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("collector")]


@pytest.mark.parametrize("simulator", ["reach", "vehicle"])
def test_rollouts_are_those_of_collectors_one_after_the_other(simulator: str) -> None:
    if simulator == "reach":
        policy = new_policy()

        def make(first: int, count: int, seed: int):
            return Reach(count, seed=seed)
    else:
        task = NavigateTask()
        env = part_of(task, "cpu", 0, N, 0)
        policy = MLPConfig(hidden=[8]).build(env.contract)
        policy.fit(*first_decisions(env, torch.Generator().manual_seed(0), 64))

        def make(first: int, count: int, seed: int):
            return part_of(task, "cpu", first, count, seed)

    alone = [(Worker(), CollectorSpec(number, 3 * number, 3)) for number in range(2)]
    state, threads = torch.get_rng_state(), torch.get_num_threads() + 1
    for worker, place in alone:
        worker.build(CollectorRecipe(make, Collector, lambda env, generator: None, policy), place)
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    with pool_of(make, policy) as pool:
        collectors = RemoteCollectors(pool, policy)
        for version in range(3):
            rollout = collectors.collect(T)
            expected = joined([worker.collect(policy.state_dict(), version, T) for worker, _ in alone])
            assert torch.equal(rollout.actions, expected.actions)
            assert torch.equal(rollout.reward, expected.reward)
            assert rollout.policy_version == version
            assert rollout.placement_metrics["staleness"] == 0.0
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.1
            collectors.version += 1
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(threads - 1)


class Meeting(Reach):
    """A simulator whose first step ends only once all simulators are in theirs."""

    together = threading.Barrier(2)

    def step(self, actions):
        self.together.wait(60.0)
        return super().step(actions)


def test_they_work_at_the_same_time() -> None:
    with pool_of(lambda first, count, seed: Meeting(count, seed=seed), policy := new_policy()) as pool:
        assert RemoteCollectors(pool, policy).collect(T).done.shape == (T, N)


def test_an_error_of_a_simulator_ends_the_run_and_all_threads() -> None:
    class Wrong(Reach):
        def step(self, actions):
            if self.num_envs == 2:
                raise UserError("expected another simulator, got this one")
            return super().step(actions)

    with (
        pytest.raises(UserError, match=r"^expected another simulator, got this one$"),
        pool_of(lambda first, count, seed: Wrong(count, seed=seed), policy := new_policy(), 5) as pool,
    ):
        RemoteCollectors(pool, policy).collect(10_000)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_threads_stops_and_goes_on(staleness: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})
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

    def run() -> Experiment:
        with LocalConfig(collectors=2, max_staleness=staleness).start("cpu") as world:
            made = Experiment(
                config, ReachTask(), MLPConfig(hidden=[8]), ALGORITHM, tmp_path / "run", record={}, world=world
            )
            made.run()
        return made

    keep = Experiment._keep

    def stop(run: Experiment, *args) -> None:
        if run.counters["iteration"] == 3:
            run._stop.requested = True
        keep(run, *args)

    monkeypatch.setattr(Experiment, "_keep", stop)
    with pytest.raises(Stopped):
        run()
    assert not collecting()
    monkeypatch.setattr(Experiment, "_keep", keep)
    again = run()
    assert again.counters["env_steps"] >= 400
    assert not collecting()
    assert "Collectors had environments of their own" in (tmp_path / "run" / "report.md").read_text()


def test_what_threads_cannot_collect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"placement\.max_staleness is of several collectors"):
        LocalConfig(max_staleness=1)
    with LocalConfig().start("cpu") as world:
        assert type(world) is Local
    config = ExperimentConfig(num_envs=N, evaluation_envs=4, stages=["rl"])
    with (
        pytest.raises(UserError, match="collectors are for learners of rollouts that stand alone, algorithm=ppo or"),
        LocalConfig(collectors=2).start("cpu") as world,
    ):
        Experiment(config, ReachTask(), MLPConfig(hidden=[8]), IMITATION, tmp_path / "run", record={}, world=world)
