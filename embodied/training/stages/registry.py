"""Stages by name."""

from typing import Any

from embodied.training.stages.control import ControlStage
from embodied.training.stages.offline import OfflineStage, SupervisedStage
from embodied.training.stages.reinforcement import ReinforcementStage
from embodied.training.stages.stage import Stage
from embodied.training.stages.start import StartStage

STAGES: dict[str, type[Stage[Any]]] = {
    stage.name: stage for stage in (StartStage, SupervisedStage, OfflineStage, ReinforcementStage, ControlStage)
}
