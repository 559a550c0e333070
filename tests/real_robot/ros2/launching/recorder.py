"""Runs launch files without ROS's `launch`, which is not on PyPI: a small recorder replaces it.

It records a launch file's actions and makes the command lines that launch_ros would make.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

LAUNCH = Path(__file__).parents[4] / "launch"
RECORDED = {
    "launch": ("LaunchContext", "LaunchDescription"),
    "launch.actions": ("DeclareLaunchArgument", "EmitEvent", "OpaqueFunction", "RegisterEventHandler"),
    "launch.events": ("matches_action",),
    "launch_ros": (),
    "launch_ros.actions": ("LifecycleNode",),
    "launch_ros.event_handlers": ("OnStateTransition",),
    "launch_ros.events": (),
    "launch_ros.events.lifecycle": ("ChangeState",),
}
"""Names that launch files may import, by module."""


class Recorded:
    """What was constructed: `given` in order, and by name as attributes."""

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        self.given = given
        self.__dict__.update(kwargs)


@contextmanager
def recorder() -> Iterator[None]:
    """In place of launch and launch_ros while the body runs."""
    hidden = [name for name in sys.modules if name.split(".")[0] in ("launch", "launch_ros")]
    hidden.append("real_robot.ros2.launching")  # it imported them
    before = {name: sys.modules.pop(name) for name in hidden if name in sys.modules}
    for name, classes in RECORDED.items():
        module = ModuleType(name)
        module.__dict__.update({each: type(each, (Recorded,), {}) for each in classes})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in (*RECORDED, "real_robot.ros2.launching"):
            sys.modules.pop(name, None)
        sys.modules.update(before)


@dataclass
class Started:
    """The result of launching."""

    arguments: dict[str, str]
    nodes: list[Any]
    others: list[Any]


def launched(name: str, given: Mapping[str, str]) -> Started:
    """`ros2 launch <name>.launch.py key:=value ...`, up to the processes.

    Raises:
        ValueError: for an argument that the file does not declare.
    """
    with recorder():
        spec = spec_from_file_location(f"{name}_launch", LAUNCH / f"{name}.launch.py")
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        (entities,) = module.generate_launch_description().given
    arguments = {
        entity.given[0]: entity.default_value for entity in entities if kind(entity) == "DeclareLaunchArgument"
    }
    if unknown := set(given) - set(arguments):
        raise ValueError(f"{name} declares {list(arguments)}, got {sorted(unknown)}")
    context = SimpleNamespace(launch_configurations=arguments | dict(given))
    actions = []
    for entity in entities:
        if kind(entity) == "OpaqueFunction":
            actions += entity.function(context, *entity.args)
    nodes = [action for action in actions if kind(action) == "LifecycleNode"]
    return Started(arguments, nodes, [action for action in actions if action not in nodes])


def kind(entity: Any) -> str:
    return type(entity).__name__


def argv(node: Any, directory: Path) -> list[str]:
    """The command line that launch_ros makes of `node`; parameters by name go into a file in `directory`."""
    line = [sys.executable, "-m", f"real_robot.ros2.{node.package}.{node.executable}", "--ros-args"]
    line += ["-r", f"__node:={node.name}"]
    line += ["-r", f"__ns:=/{node.namespace}"] if node.namespace else []
    for index, parameters in enumerate(node.parameters):
        if isinstance(parameters, dict):
            file = directory / f"{node.name}_{index}.yaml"
            file.write_text(yaml.safe_dump({"/**": {"ros__parameters": parameters}}))
            parameters = str(file)
        line += ["--params-file", parameters]
    return line
