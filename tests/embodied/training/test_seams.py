"""Elements in another order than the policy's are refused wherever policies and environments are combined."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract, TensorSpec
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.video import film
from embodied.rollout.rollout import Collector
from embodied.saving.checkpoint import Checkpoint
from embodied.task import Task
from embodied.training.experiment import Experiment, ExperimentConfig
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach


class NamedReach(Reach):
    """Reach whose observation is one tensor of named elements."""

    def __init__(self, *names: str, num_envs: int = 2) -> None:
        super().__init__(num_envs)
        self.contract = replace(self.contract, observation={"state": TensorSpec((len(names),), names=names)})

    def _observation(self) -> TensorDict:
        plain, names = super()._observation(), self.contract.observation["state"].names
        return TensorDict({"state": torch.cat([plain[name] for name in names], -1)}, [self.num_envs])


class NamedTask(Task):
    """A task whose simulator may change between two runs."""

    name, distributions = "reach", ("wide",)

    def __init__(self, *names: str) -> None:
        self.names = names

    def contract(self, distribution: str) -> Contract:
        return NamedReach(*self.names).contract

    def environment(self, num_envs: int, *_: object, **__: object) -> NamedReach:
        return NamedReach(*self.names, num_envs=num_envs)


def policy() -> MLPPolicy:
    found = MLPConfig(hidden=[4]).build(NamedReach("position", "task").contract)
    found.fit(NamedReach("position", "task", num_envs=8).reset(starts=torch.arange(8)), torch.zeros(1, 1))
    return found


def nothing(environments: np.ndarray) -> np.ndarray:
    return np.zeros((len(environments), 4, 4, 3), dtype=np.uint8)


MEET = {
    "collection": lambda policy, env: Collector(env, policy, torch.Generator()).collect(1),
    "evaluation": lambda policy, env: evaluate(env, policy, starts_per_task=1),
    "film": lambda policy, env: film(env, policy, torch.zeros(2, dtype=torch.long), nothing),
    "checkpoint": lambda policy, env: Checkpoint(policy.state_dict(), policy.contract).check(env.contract),
}


@pytest.mark.parametrize("meet", MEET.values(), ids=MEET.keys())
def test_other_orders_are_refused(meet: Callable[[MLPPolicy, NamedReach], object]) -> None:
    meet(policy(), NamedReach("position", "task"))
    for names in (("task", "position"), ("position", "task", "task")):
        with pytest.raises(ValueError, match=r"observation 'state' order: expected \('position', 'task'\)") as error:
            meet(policy(), NamedReach(*names))
        assert "\n" not in str(error.value)


def test_a_run_is_not_resumed_on_another_order(tmp_path: Path) -> None:
    config = ExperimentConfig(2, env_steps=8, evaluation_starts=1, evaluation_envs=2, video=False)

    def run(*names: str) -> None:
        learner = PPOConfig(rollout_length=2, minibatch=8, epochs=1)
        Experiment(config, NamedTask(*names), MLPConfig(hidden=[4]), learner, tmp_path, record={}).run()

    run("position", "task")
    run("position", "task")
    with pytest.raises(ValueError, match=r"trained with another contract .*order: expected"):
        run("task", "position")
