"""Every task with every policy and every algorithm: the parts build, or a one-line error lists the valid ones."""

import os
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.command_line import combinations
from embodied.command_line.config import compose, names
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from train import GROUPS, TrainConfig

TASKS = names("task", GROUPS)
ALL = list(product(names("policy", GROUPS), names("algorithm", GROUPS)))
LACKING = {"isaac_lab", "isaac_lab_cartpole"} if find_spec("isaaclab") is None else set()
"""Tasks of simulators that this interpreter does not have, or whose assets are not here."""
OFFICIAL = {"libero_goal", "libero_spatial"}
if "LIBERO_ASSETS" not in os.environ:
    LACKING |= OFFICIAL
SMALL = {"libero_pick": ["task.assets=stand-in", "task.tasks=[0]"], "isaac_lab": ["task.assets=own"]}
SMALL["libero_pictures"] = SMALL["libero_pick"]
DEMONSTRATED = (
    "libero_goal",
    "libero_pick",
    "libero_pictures",
    "libero_spatial",
    "maniskill_pick_cube",
    "robosuite_lift",
    "vehicle_practice",
)
TOLD = r"policy=(\w+) with algorithm=([\w|]+)"


def composed(task: str, policy: str, algorithm: str) -> TrainConfig:
    options = [f"task={task}", f"policy={policy}", f"algorithm={algorithm}", *SMALL.get(task, [])]
    return compose(TrainConfig, "train", options, GROUPS)[0]


def demonstrations(contract: Contract) -> Episodes:
    """An episode of two steps, all zeros, with known rewards."""
    specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
    observation = {
        key: torch.zeros(2, *(max(1, size) for size in spec.shape), dtype=getattr(torch, spec.dtype))
        for key, spec in specs.items()
    }
    return Episodes.of(TensorDict(observation, [2]), torch.zeros(2, *contract.action.shape), reward=torch.zeros(2))


@pytest.mark.evidence
@pytest.mark.parametrize(
    "task", [pytest.param(name, marks=[pytest.mark.assets] * (name in OFFICIAL)) for name in TASKS]
)
def test_what_a_task_takes_builds_and_its_own_comes_first(task: str):
    own, record = compose(TrainConfig, "train", [f"task={task}", *SMALL.get(task, [])], GROUPS)
    if task == "dataset":
        pytest.skip("it has no simulator: tests/real_robot/recording/test_recorded_task.py builds its policies")
    if task in LACKING:
        pytest.skip("its simulator or its assets are not installed here")
    env = own.task.environment(4, own.task.distributions[0], "train", 0)
    choices = tuple(record["choices"][part] for part in ("task", "policy", "algorithm"))
    assert combinations.chosen([f"task={task}"]) == choices
    for policy, algorithm in combinations.valid_pairs(task):
        config = composed(task, policy, algorithm)
        if config.task != own.task:  # such as with pictures, for policies that see
            env.close()
            own, env = config, config.task.environment(4, config.task.distributions[0], "train", 0)
        needed = task in DEMONSTRATED or algorithm in ("h2o", "self_imitation")
        recorded = demonstrations(env.contract) if needed else None
        built = config.policy.build(env.contract)
        learner = config.algorithm.build(built, recorded, env, seeding.generator(0, "learner"))
        learner.collector(env, built, seeding.generator(0, "noise"), learner.starts)
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_what_a_task_does_not_take_is_one_line_that_names_all_it_takes(task: str):
    refused = [pair for pair in ALL if pair not in combinations.valid_pairs(task)]
    assert refused
    for policy, algorithm in refused:
        with pytest.raises(UserError) as caught:
            composed(task, policy, algorithm)
        first, _, takes = str(caught.value).partition(f" do not go with task={task}, which takes ")
        assert first == f"policy={policy} algorithm={algorithm}"
        assert "\n" not in takes
        message = [entry.replace("policy=", "").split(" with algorithm=") for entry in takes.split("; ")]
        assert [(name, each) for name, listed in message for each in listed.split("|")] == combinations.valid_pairs(
            task
        )


@pytest.mark.parametrize(
    ("chosen", "policy", "algorithm"),
    [
        (["algorithm=sac"], "squashed", "sac"),
        (["policy=recurrent"], "recurrent", "ppo"),
        (["algorithm=td3"], "mlp", "td3"),
        (["policy=flow", "algorithm=grpo"], "flow", "grpo"),
    ],
)
def test_a_choice_that_the_default_does_not_go_with_brings_what_does(chosen, policy, algorithm):
    _, record = compose(TrainConfig, "train", ["task=quadrotor_hover", *chosen], GROUPS)
    assert (record["choices"]["policy"], record["choices"]["algorithm"]) == (policy, algorithm)
    assert record["arguments"] == ["task=quadrotor_hover", *chosen] + ["policy=squashed"] * (policy == "squashed") + [
        "algorithm=ppo"
    ] * (algorithm == "ppo")
    _, resumed = compose(TrainConfig, "train", [], GROUPS, record)
    assert resumed["choices"] == record["choices"]


def test_a_task_of_which_nothing_is_said_says_where():
    with pytest.raises(UserError, match=r"combinations\.yaml does not list task=tea"):
        combinations.chosen(["task=tea"])
