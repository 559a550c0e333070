"""Wrappers of tasks and environments keep every capability of what they wrap, and invent none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import embodied.environment
import embodied.task
from embodied.environment import Environment, NumberedStarts, group_size
from embodied.environments.classified import ClassifiedEnvironment, ClassifiedTask
from embodied.environments.delay import DelayEnvironment, DelayTask
from embodied.environments.engine import Unnumbered
from embodied.environments.latency import LatencyConfig, LatencyEnvironment, LatencyTask, with_latency
from embodied.environments.reflex import ReflexEnvironment, ReflexTask
from embodied.environments.wrapping import OPTIONAL_MEMBERS, WrappedEnvironment, WrappedTask
from embodied.task import Task
from embodied.viewer.watching import WatchedEnvironment, WatchedTask
from real_robot.learning.continuing import ContinuingSimulation
from real_robot.learning.task import RobotTask
from sims.libero.task import LiberoTask
from sims.quadrotor.task import HoverTask
from sims.remote.task import RemoteTask
from tests.embodied.environments.test_classified import Above
from tests.embodied.nameless import Nameless
from tests.embodied.reach import Reach

LATENCY = LatencyConfig(action_s=[0.0, 0.1])
TASKS: dict[str, Callable[[Any], Any]] = {
    "WrappedTask": WrappedTask,
    "ClassifiedTask": lambda task: ClassifiedTask(task, Above(0.5)),
    "DelayTask": lambda task: DelayTask(task, 2),
    "LatencyTask": lambda task: LatencyTask(task, LATENCY),
    "ReflexTask": lambda task: ReflexTask(task, task, Mock()),
    "WatchedTask": lambda task: WatchedTask(task, None, "none"),
    "RemoteTask": lambda task: RemoteTask(task, task),
}


class Screen:
    row = 0

    def before(self, watched: object) -> list[Any]:
        return []

    def after(self, watched: object, seconds: float) -> None: ...


ENVIRONMENTS: dict[str, Callable[[Any], Any]] = {
    "WrappedEnvironment": WrappedEnvironment,
    "ClassifiedEnvironment": lambda env: ClassifiedEnvironment(env, Above(0.5), true_success=False),
    "DelayEnvironment": lambda env: DelayEnvironment(env, 2),
    "LatencyEnvironment": lambda env: LatencyEnvironment(env, LATENCY),
    "WatchedEnvironment": lambda env: WatchedEnvironment(env, None, Screen(), "train"),
    "Unnumbered": Unnumbered,
}


def capabilities(module: object, base: type) -> set[type]:
    """Optional capabilities that `module` declares: its runtime protocols but for `base`."""
    kinds = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    return {kind for kind in kinds if getattr(kind, "_is_runtime_protocol", False)} - {base}


def names(wrapper: type) -> set[str]:
    """Names of `wrapper` and the packages' classes that inherit from it."""
    kinds = [wrapper, *wrapper.__subclasses__()]
    return {kind.__name__ for kind in kinds if not kind.__module__.startswith("tests.")}


def capable(base: type) -> type:
    """`base` with every optional member that it lacks."""
    added = {name: len(name) for name in OPTIONAL_MEMBERS if not hasattr(base, name)} | {"notes": ["a note"]}
    return type(f"Capable{base.__name__}", (base,), added)


def members(kind: type) -> set[str]:
    return {name for name in (*vars(kind), *kind.__annotations__) if not name.startswith("_")}


def test_every_capability_is_listed_and_every_wrapper_is_tested() -> None:
    kinds = capabilities(embodied.environment, Environment) - {NumberedStarts}
    assert {"state_dict", "load_state_dict", "switch", "detach"} == set().union(*map(members, kinds))
    others = {"go_on", "group", "show_values", "view", "notes"}
    assert set().union(*map(members, kinds)) | others == set(OPTIONAL_MEMBERS)
    # a robot has one scene, no variants and no planners, whatever its task has in a simulator
    assert names(WrappedTask) == TASKS.keys() | {RobotTask.__name__}
    # a reflex takes environments of single actions, and a continuing simulation one that goes on: they have own tests
    others = {ReflexEnvironment.__name__, ContinuingSimulation.__name__}
    assert names(WrappedEnvironment) | {"Unnumbered"} == ENVIRONMENTS.keys() | others


MEMBERS = {name: member for name, member in vars(Task).items() if not name.startswith("_")}
METHODS = {name for name, member in MEMBERS.items() if inspect.isfunction(member)}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_wrapped_task_forwards(name: str) -> None:
    task = Mock()
    member, original = getattr(WrappedTask(task), name), getattr(task, name)
    if name not in METHODS:
        assert member is original
        return
    arguments = list(inspect.signature(member).parameters)
    assert member(*arguments) is (None if name == "video" else original.return_value)
    original.assert_called_once_with(*arguments)


@pytest.mark.parametrize("wrapper", TASKS)
@pytest.mark.parametrize("base", [LiberoTask, HoverTask])
def test_wrapped_tasks_have_the_properties_of_the_task(wrapper: str, base: type[Task]) -> None:
    wrapped = TASKS[wrapper](base())
    for name in ("name", "distributions", *(MEMBERS.keys() - METHODS)):
        assert getattr(wrapped, name) == getattr(base(), name), name


def test_latency_leaves_libero_its_files_its_datasets_and_its_simulators(tmp_path: Path) -> None:
    task = LiberoTask()
    delayed = with_latency(task, LATENCY)
    assert delayed.convention().names == task.convention().names
    (tmp_path / "pick_demo.hdf5").touch()
    assert delayed.demonstration_files(tmp_path) == [tmp_path / "pick_demo.hdf5"]
    embodied.task.check_sims(delayed, task.sims)


@pytest.mark.parametrize("wrapper", ENVIRONMENTS)
@pytest.mark.parametrize("base", [Reach, Nameless])
def test_wrapped_environments_have_every_capability_of_the_environment(wrapper: str, base: type) -> None:
    for kind in (base, capable(base)):
        env = kind(4)
        if wrapper == "ClassifiedEnvironment":
            env.group = 1  # it ends each episode by itself
        wrapped = ENVIRONMENTS[wrapper](env)
        numbered = isinstance(env, NumberedStarts) and wrapper != "Unnumbered"  # that is what it takes away
        assert isinstance(wrapped, NumberedStarts) == numbered
        for name in OPTIONAL_MEMBERS:
            adds = (wrapper, name) in (("WatchedEnvironment", "show_values"), ("ClassifiedEnvironment", "notes"))
            takes = (wrapper, name) == ("ClassifiedEnvironment", "detach")  # a classified reward has no gradient
            assert hasattr(wrapped, name) == ((hasattr(env, name) or adds) and not takes), name
    assert group_size(wrapped) == group_size(env)
    assert wrapped.notes[:1] == ["a note"]
    assert callable(wrapped.show_values) == (wrapper == "WatchedEnvironment")  # which takes it for itself
    if numbered:
        starts = torch.arange(4)
        assert torch.equal(wrapped.reset(starts=starts)["position"], env.reset(starts=starts)["position"])
