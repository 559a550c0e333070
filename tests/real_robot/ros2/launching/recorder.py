"""Runs launch files without ROS's `launch`, which is not on PyPI: a small recorder replaces it.

It records a launch file's actions and makes the command lines that launch_ros would make. `test_real_launch.py` runs
the files with the real ones, where they are.
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

PACKAGE = Path(__file__).parents[4] / "real_robot" / "ros2"
"""With the package embodied_ros2, as colcon sees it."""
LAUNCH = PACKAGE / "launch"
RECORDED = {
    "launch": ("LaunchContext", "LaunchDescription"),
    "launch.actions": ("DeclareLaunchArgument", "ExecuteProcess", "OpaqueFunction", "Shutdown"),
    "launch_ros": (),
    "launch_ros.actions": ("Node",),
}
"""Names that launch files may import, by module."""


class Recorded:
    """What was constructed: `given` in order, and by name as attributes."""

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        self.given = given
        self.__dict__.update(kwargs)


@contextmanager
def recorder() -> Iterator[None]:
    """In place of launch and launch_ros while the body runs; embodied_ros2 is installed, as by colcon."""

    def ours(name: str) -> bool:
        return name.split(".")[0] in ("launch", "launch_ros", "embodied_ros2")

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    for name, classes in RECORDED.items():
        module = ModuleType(name)
        module.__dict__.update({each: type(each, (Recorded,), {}) for each in classes})
        sys.modules[name] = module
    sys.path.insert(0, str(PACKAGE))
    try:
        yield
    finally:
        sys.path.remove(str(PACKAGE))
        for name in [name for name in sys.modules if ours(name)]:
            sys.modules.pop(name)
        sys.modules.update(before)


@dataclass
class Started:
    """The result of launching."""

    arguments: dict[str, str]
    nodes: list[Any]


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
    nodes = []
    for entity in entities:
        if kind(entity) == "OpaqueFunction":
            nodes += entity.function(context, *entity.args)
    return Started(arguments, nodes)


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
