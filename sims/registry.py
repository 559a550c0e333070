"""Tasks by the name used in configs/task/."""

from embodied.command_line.listing import Needs
from sims.gym.task import GymTask
from sims.isaac_lab.task import IsaacLabTask
from sims.libero.task import LiberoTask
from sims.maniskill.task import ManiSkillTask
from sims.mjcf.task import MjcfTask
from sims.quadrotor.task import AnyPlatformTask, HoverTask, RaceTask, RecoverTask, TrackTask
from sims.remote.task import in_processes
from sims.robosuite.task import RobosuiteTask
from sims.swarm.task import SwarmTask
from sims.vehicle.task import NavigateTask
from sims.vehicle.task import RaceTask as VehicleRaceTask

__all__ = ["TASKS", "in_processes"]

TASKS: dict[str, type] = {
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
    "mjcf_schema": MjcfTask,
}
SHOWN = "LIBERO, quadrotors, swarms, vehicles and MJCF tasks in the run's own process (task.processes=0)"
"""What `viewer=true` can show."""
NEEDS: dict[str, Needs] = {
    "gym": Needs("gym", ("mujoco",), "environments on MuJoCo"),
    "isaac_lab": Needs("isaac-lab", ("isaaclab",), venv=".venv-isaac", install="make isaac"),
    "libero": Needs("libero", ("mujoco", "mujoco_warp", "warp")),
    "maniskill": Needs("maniskill", ("mani_skill", "sapien")),
    "mjcf": Needs("mjcf", ("mujoco",)),
    "robosuite": Needs("robosuite", ("mujoco", "robosuite", "numba", "termcolor")),
}
"""What simulators need that the smallest install has not."""
