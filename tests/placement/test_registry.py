"""Which placement a run has, and what several processes refuse, each on one line."""

from dataclasses import replace

import pytest
import torch

from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.command_line.config import compose
from embodied.errors import UserError
from embodied.placement.local import Local
from embodied.placement.registry import VARIABLES, LocalConfig, TorchrunConfig, with_placement
from embodied.saving.resume import check_continues
from embodied.training.loop import build
from embodied.world import OneProcess
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach
from train import GROUPS, TrainConfig


def test_torchrun_is_found_by_its_variables_unless_another_placement_is_named(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert with_placement(["task=a"]) == ["task=a"]
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    assert with_placement(["task=a"]) == ["task=a", "placement=torchrun"]
    assert with_placement(["placement=local"]) == ["placement=local"]


def test_a_resumed_run_stays_where_it_was_unless_told_otherwise(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def placed(given: list[str], saved: dict | None = None) -> tuple[object, dict]:
        config, record = compose(TrainConfig, "train", with_placement(given, saved), GROUPS, saved)
        return config.placement, record

    ray, saved = placed(["task=vehicle_navigate", "placement=ray", "placement.collectors=3"])
    assert placed([], saved)[0] == ray
    assert placed(["placement.collectors=4"], saved)[0] == replace(ray, collectors=4)
    assert placed(["placement=local"], saved)[0] == LocalConfig()
    assert placed([], saved)[1]["arguments"] == saved["arguments"]  # which are told as the command that repeats it
    torchrun, saved = placed(["task=vehicle_navigate", "placement=torchrun", "placement.timeout_s=5"])
    assert placed([], saved)[0] == LocalConfig()
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    assert type(placed([], saved)[0]) is type(torchrun)
    assert type(placed(["placement=local"], saved)[0]) is LocalConfig


def test_a_run_goes_on_elsewhere_whatever_that_calls_its_options() -> None:
    of_ray, here = ({"values": {"seed": 0, "placement": {"collectors": count}}} for count in (2, 1))
    check_continues(of_ray, here, set())
    with pytest.raises(UserError, match="has seed=0, got 1"):
        check_continues(of_ray, {"values": {"seed": 1}}, set())


def test_without_torchrun_its_command_is_told(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(UserError, match=r"needs torchrun's RANK, .*: torchrun --nproc-per-node=2 .* task=\.\.\."),
        TorchrunConfig().start("cpu"),
    ):
        pass
    with pytest.raises(UserError, match="timeout_s=0: expected a number of at least 1"):
        TorchrunConfig(timeout_s=0)


def test_environments_are_divided_evenly_or_not_at_all() -> None:
    processes = Local(size=3)
    assert processes.own_envs(9) == 3
    with pytest.raises(UserError, match="num_envs=7 does not divide among 3 processes; use num_envs=6"):
        processes.own_envs(7)
    with pytest.raises(UserError, match="num_envs=2 does not divide among 3 processes; use num_envs=3"):
        processes.own_envs(2)


def test_a_learner_beside_collectors_has_few_environments_of_its_own() -> None:
    with LocalConfig(collectors=2, max_staleness=3).start("cpu") as processes:
        assert [processes.own_envs(count) for count in (8, 5_000)] == [8, 100]
        assert processes.remark.startswith("Collectors had environments of their own")
        assert (processes.max_staleness, processes.collectors) == (3, 2)
    with LocalConfig().start("cpu") as processes:
        assert processes.own_envs(5_000) == 5_000
        assert processes.remark == ""


def test_a_learner_with_a_replay_is_refused() -> None:
    env = Reach(4)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(env.reset(), torch.zeros(4, 2, 1))
    with pytest.raises(UserError, match="learns from a replay, of which each of 2 processes would have a part only"):
        build(env, policy, TD3Config(), None, 0, OneProcess(size=2))
