"""Tasks by the name that `task=` builds on."""

from sims.libero.task import LiberoTask
from sims.quadrotor.task import QuadrotorTask
from sims.vehicle.task import VehicleTask

TASKS: dict[str, type] = {"libero": LiberoTask, "quadrotor": QuadrotorTask, "vehicle": VehicleTask}
