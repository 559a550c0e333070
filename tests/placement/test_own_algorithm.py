"""An algorithm from outside the package trains in two processes: the A2C of docs/own_algorithm.md, and broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from embodied.algorithms.parts import Composite, check_equal_weights, iter_parts
from embodied.errors import UserError
from embodied.saving import checkpoint
from embodied.training.loop import build, train
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach
from tests.placement import own_algorithm
from tests.placement.own_algorithm import documented
from tests.placement.processes import run_processes
from tests.placement.run import main

A2C, A2CConfig = (documented()[name] for name in ("A2C", "A2CConfig"))


def test_train_gives_two_processes_the_same_weights_and_counts_the_steps_of_both(tmp_path: Path) -> None:
    made = run_processes(2, own_algorithm.main, tmp_path)
    assert made.returncode == 0, made.stderr
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    for name in ("before", "position"):
        assert not torch.equal(one.pop(name), other.pop(name))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert 1_000 <= one["env_steps"] < 1_000 + 2 * 4 * 8  # an iteration of both


def test_a_run_that_two_processes_saved_goes_on_in_one(tmp_path: Path) -> None:
    together = run_processes(2, main, tmp_path, 160, "a2c")
    assert together.returncode == 0, together.stderr
    before = checkpoint.load(tmp_path)
    alone = run_processes(1, main, tmp_path, 320, "a2c")
    assert alone.returncode == 0, alone.stderr
    after = checkpoint.load(tmp_path)
    assert (before.counters["processes"], after.counters["processes"]) == (2, 1)
    assert after.counters["env_steps"] >= 320 > before.counters["env_steps"] >= 160
    for saved in (before, after):  # one step in each iteration, which the learner that was saved counts on
        assert saved.counters["rl_gradient_steps"] == saved.counters["iteration"]
    assert after.counters["iteration"] > before.counters["iteration"]


def test_an_offline_learner_gives_two_processes_the_weights_of_one(tmp_path: Path) -> None:
    """Each step's weights, drawn rows and losses are of the minibatch of both processes."""
    saved = []
    for count in (1, 2):
        made = run_processes(count, main, tmp_path / str(count), 0, "awr")
        assert made.returncode == 0, made.stderr
        saved.append(checkpoint.load(tmp_path / str(count)))
    alone, together = saved
    assert (alone.counters["stage"], together.counters["processes"]) == ("done", 2)
    for name, value in together.policy.items():
        torch.testing.assert_close(value, alone.policy[name], rtol=0.0, atol=1e-5, msg=name)


def policy(env: Reach) -> MLPPolicy:
    torch.manual_seed(0)
    return MLPConfig(hidden=[8]).build(env.contract)


class Holder:
    """An object of the learner that is no composite."""

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser


class Hiding(A2C):
    """Keeps its optimiser where it is not listed."""

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        return self.holder.optimiser

    @optimiser.setter
    def optimiser(self, value: torch.optim.Optimizer) -> None:
        self.holder = Holder(value)


class Listing(Hiding):
    """Lists it."""

    def parts(self) -> dict[str, Any]:
        return super().parts() | {"optimiser": self.holder.optimiser}


class PolicyHiding(A2C):
    """Does not list its policy."""

    def parts(self) -> dict[str, Any]:
        return {"optimiser": self.optimiser}


def config(kind: type) -> Any:
    made = A2CConfig()
    made.build = lambda policy, *_: kind(policy, made)
    return made


def test_an_optimiser_that_is_not_listed_ends_the_training_before_its_first_step() -> None:
    env = Reach(4)
    learned = policy(env)
    steps = train(env, learned, config(Hiding), env_steps=100)
    before = {name: value.clone() for name, value in learned.named_parameters()}
    with pytest.raises(UserError, match=r"Hiding steps an optimiser \(Adam\) that is none of its parts: derive"):
        next(steps)
    assert all(torch.equal(value, before[name]) for name, value in learned.named_parameters())
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()  # others may step outside of updates again
    listed = train(env, policy(env), config(Listing), env_steps=100)
    assert next(listed).metrics["critic_loss"] > 0.0


class Twin:
    """One of two processes; the other computes `factor` times the numbers of this one."""

    rank, size = 0, 2

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + (self.factor * values).to(values.dtype)


def test_a_policy_that_is_not_listed_is_refused_in_several_processes() -> None:
    env = Reach(4)
    build(env, policy(env), config(PolicyHiding), None, 0)
    build(env, policy(env), config(Hiding), None, 0, Twin())
    with pytest.raises(UserError, match="PolicyHiding does not list its policy, so that each process would train"):
        build(env, policy(env), config(PolicyHiding), None, 0, Twin())


def test_weights_that_differ_between_processes_end_the_training() -> None:
    learner = A2C(policy(Reach(4)), A2CConfig())
    check_equal_weights(learner, Twin())
    with pytest.raises(UserError, match=r"A2C left different weights in 2 processes after its first update"):
        check_equal_weights(learner, Twin(1.0001))


def test_parts_are_listed_in_lists_mappings_and_composites_and_each_once() -> None:
    class Inner(Composite):
        def __init__(self) -> None:
            self.network, self.steps = nn.Linear(1, 1), 3

    class Outer(Composite):
        def __init__(self) -> None:
            self.inner, self.holder = Inner(), Holder(torch.optim.SGD(nn.Linear(1, 1).parameters()))
            self.critics = [nn.Linear(2, 1), {"second": nn.Linear(2, 1)}]
            self.policy, self.rates = self.inner.network, [0.1]

    learner = Outer()
    assert list(learner.parts()) == ["inner", "critics", "policy"]
    assert list(learner.inner.parts()) == ["network"]
    networks = [learner.inner.network, learner.critics[0], learner.critics[1]["second"]]
    assert list(iter_parts(learner, (nn.Module,))) == networks
    assert not list(iter_parts(learner, (torch.optim.Optimizer,)))
