"""Tasks by the name used in configs/task/."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied.command_line.listing import Needs
from embodied.errors import UserError
from embodied.export.conditions import Conditions
from embodied.task import Task
from sims.gym.task import GymTask
from sims.isaac_lab.task import IsaacLabTask
from sims.libero.task import LiberoTask
from sims.maniskill.task import ManiSkillTask
from sims.mjcf.task import MjcfTask
from sims.quadrotor.task import AnyPlatformTask, HoverTask, RaceTask, RecoverTask, TrackTask
from sims.remote.task import in_processes
from sims.robosuite.task import RobosuiteTask
from sims.swarm.task import SwarmTask
from sims.vehicle.task import NavigateTask, PracticeTask
from sims.vehicle.task import RaceTask as VehicleRaceTask

__all__ = ["TASKS", "conditions", "in_processes"]

TASKS: dict[str, type[Task]] = {
    "libero": LiberoTask,
    "gym_schema": GymTask,
    "isaac_lab_schema": IsaacLabTask,
    "maniskill_schema": ManiSkillTask,
    "quadrotor_hover_schema": HoverTask,
    "quadrotor_track_schema": TrackTask,
    "quadrotor_recover_schema": RecoverTask,
    "quadrotor_race_schema": RaceTask,
    "quadrotor_any_schema": AnyPlatformTask,
    "quadrotor_swarm_schema": SwarmTask,
    "robosuite_schema": RobosuiteTask,
    "vehicle_navigate_schema": NavigateTask,
    "vehicle_race_schema": VehicleRaceTask,
    "vehicle_practice_schema": PracticeTask,
    "mjcf_schema": MjcfTask,
}


def conditions(config: Mapping[str, Any]) -> Conditions | None:
    """Training conditions of the task of a checkpoint's `config`; None if the task defines none.

    Raises:
        UserError: if the task is of another version.
    """
    values = config.get("values", {})
    kind = TASKS.get(f"{values.get('task', {}).get('name')}_schema")
    if kind is None or kind.conditions is Task.conditions:  # a task without conditions may be of another version
        return None
    try:
        task = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values["task"]))
    except OmegaConfBaseException as error:
        raise UserError(f"the checkpoint's task is of another version ({error}); train again") from error
    trained = cast(Task, task).conditions
    latency = values.get("latency") or {}
    if not any(max(latency.get(name, [0.0])) > 0.0 for name in ("observation_s", "action_s")):
        return trained
    description = f"measurements {latency['observation_s']} s and commands {latency['action_s']} s late (latency.)"
    return replace(
        trained, trained_for=(*trained.trained_for, description), missing=tuple(set(trained.missing) - {"latency"})
    )


VIEWABLE = "LIBERO, quadrotors, swarms, vehicles and MJCF tasks in the run's own process (task.processes=0)"
"""Tasks that `viewer=true` supports, in words."""
NEEDS: dict[str, Needs] = {
    "gym": Needs("gym", ("mujoco",), "environments on MuJoCo"),
    "isaac_lab": Needs("isaac-lab", ("isaaclab",), venv=".venv-isaac", install="make isaac"),
    "libero": Needs("libero", ("mujoco", "mujoco_warp", "warp")),
    "maniskill": Needs("maniskill", ("mani_skill", "sapien")),
    "mjcf": Needs("mjcf", ("mujoco",)),
    "robosuite": Needs("robosuite", ("mujoco", "robosuite", "numba", "termcolor")),
}
"""Packages of simulators that are not part of the smallest installation."""
