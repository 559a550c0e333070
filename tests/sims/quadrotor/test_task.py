"""The options of each task reach its environments; others are refused."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from embodied.command_line.config import compose
from embodied.errors import UserError
from embodied.export.conditions import Conditions
from sims.quadrotor.physics.airframes import CRAZYFLIE_21
from sims.quadrotor.physics.own_airframe import write_airframe
from sims.quadrotor.task import AnyPlatformTask, HoverTask, QuadrotorTask, RaceTask, RecoverTask, TrackTask
from sims.swarm.task import SwarmTask
from train import GROUPS, TrainConfig

PROCESSES = {"processes", "python", "timeout_s"}
COMMON, CHOSEN = (
    {"name", "history", "executed", "step_limit", "reward"} | PROCESSES,
    {"airframe", "airframes", "randomisation"},
)
GOALS = {
    "hover": (HoverTask, COMMON | CHOSEN | {"sim", "nominal", "training_steps"}),
    "track": (TrackTask, COMMON | CHOSEN),
    "recover": (RecoverTask, COMMON | CHOSEN),
    "race": (RaceTask, COMMON | CHOSEN),
    "any": (AnyPlatformTask, COMMON | {"platforms", "training_steps"}),
    "swarm": (SwarmTask, {"name", "step_limit", "reward", "airframe", "airframes"} | PROCESSES),
}


def first_reward(task: QuadrotorTask) -> torch.Tensor:
    env = task.environment(8, task.distributions[0], "train")
    env.reset()
    return env.step(torch.zeros(8, 1, 4)).reward


def test_reward_weights_are_those_of_the_task() -> None:
    plain, richer = HoverTask(), HoverTask(reward={"reward_alive": 4.0})
    assert torch.allclose(first_reward(richer) - first_reward(plain), torch.tensor(3.0))


@pytest.mark.parametrize("kind", [HoverTask, TrackTask, AnyPlatformTask])
def test_chunks_are_of_as_many_actions_as_the_task_says(kind) -> None:
    task = kind(executed=3)
    for distribution in (*task.distributions, *list(task.variants)[:2]):
        env = task.environment(4, distribution, "eval")
        assert env.contract == task.contract(distribution)
        assert env.contract.executed == env.contract.horizon == 3
    env.reset()
    assert env.step(torch.zeros(4, 3, 4)).executed.sum(1).tolist() == [3] * 4


@pytest.mark.parametrize("task", [HoverTask, SwarmTask])
def test_unknown_reward_weight_is_refused(task) -> None:
    with pytest.raises(ValueError, match="unknown number 'position'"):
        task(reward={"position": 1.0})


@pytest.mark.parametrize("goal", GOALS)
def test_a_goal_takes_what_it_has_with_its_own_defaults(goal: str) -> None:
    kind, options = GOALS[goal]
    assert {field.name for field in fields(kind)} == options
    task = kind()
    assert task.name == f"quadrotor_{goal}"
    for mdp in task.MDPS.values():
        own = {name: getattr(mdp, name) for name in vars(mdp) if name.startswith(("reward_", "weight_"))}
        assert task.reward == own
        assert None not in own.values()


@pytest.mark.parametrize(
    ("goal", "option"),
    [
        ("any", "airframe=racer_5_inch"),
        ("any", "randomisation=0.1"),
        ("swarm", "randomisation=0.1"),
        ("swarm", "history=4"),
        ("hover", "reward.weight_neighbour=1"),
        ("hover", "goal=race"),
    ],
)
def test_what_another_goal_takes_is_refused_by_name(goal: str, option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=rf"^unknown option 'task\.{name}'; expected one of "):
        compose(TrainConfig, "train", [f"task=quadrotor_{goal}", f"task.{option}"], GROUPS)


@pytest.mark.parametrize("task", [HoverTask, SwarmTask])
def test_an_unknown_airframe_is_refused(task) -> None:
    with pytest.raises(ValueError, match="unknown airframe 'nope'; expected one of crazyflie, "):
        task(airframe="nope")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mass: 0.03", "own.yaml: unknown parameter 'mass'; did you mean mass_kg"),
        ("mass_kg: heavy", "own.yaml: mass_kg is 'heavy'; expected a number"),
        ("mass_kg: .nan", "own.yaml: mass_kg is nan; expected a number"),
        ("mass_kg: 26", "own.yaml: expected a thrust-to-weight ratio above 1"),
        ("", r"own.yaml lacks mass_kg \(kg, all-up mass\)$"),
        ("mass_kg: [", "own.yaml is not YAML"),
    ],
)
def test_a_wrong_airframe_file_is_one_line(tmp_path: Path, line: str, message: str):
    path = tmp_path / "own.yaml"
    write_airframe(path, CRAZYFLIE_21, "a test", {})
    task = HoverTask(airframe=str(path))
    assert task.environment(1, "robust", "train").airframe == CRAZYFLIE_21
    assert (task.recorded()["airframe"], list(task.recorded()["airframes"])) == ("own", ["own"])
    path.write_text(re.sub(r"mass_kg.*", line, path.read_text(), count=1))
    with pytest.raises(UserError, match=message) as raised:
        HoverTask(airframe=str(path))
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"no airframe file .*gone\.yaml"):
        HoverTask(airframe=str(tmp_path / "gone.yaml"))
    known = tmp_path / "crazyflie.yaml"
    write_airframe(known, CRAZYFLIE_21, "a test", {})
    with pytest.raises(UserError, match=r"crazyflie\.yaml has the name of a known airframe"):
        HoverTask(airframe=str(known))


def test_environments_run_where_they_are_asked_to() -> None:
    assert HoverTask().environment(2, "disturbed", "train", device="cpu:0").device == torch.device("cpu:0")


@pytest.mark.parametrize("kind", [HoverTask, TrackTask])
def test_an_impossible_step_limit_is_named(kind: type):
    with pytest.raises(UserError, match="step_limit=0: expected a number of at least 1"):
        kind(step_limit=0)


def test_conditions_name_what_training_did_not_vary() -> None:
    varied = TrackTask(randomisation=0.1).conditions
    assert varied == Conditions(("crazyflie, parameters within 10%",), ("latency",), first_action=0.0)
    assert TrackTask().conditions.missing == ("latency", "randomisation")
