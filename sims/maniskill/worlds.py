"""Scenes of the library by task id, without wrappers, so that no world resets itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embodied.errors import UserError
from sims.maniskill.vulkan import load, need_vulkan

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv

REWARDS = ("normalized_dense", "dense", "sparse")
BATCHED = ("PickCube-v1", "PushCube-v1", "StackCube-v1")
"""Tasks whose initial states consist of poses only, so that a scene of many worlds can restore numbered states."""


@dataclass(frozen=True)
class Options:
    """A task of the library and its settings.

    `control_mode` is one of the robot's own. Cameras take pictures of `images` by `images` pixels; none if None. With
    `film` there is a camera for videos.
    """

    id: str
    control_mode: str = "pd_ee_delta_pose"
    reward: str = "normalized_dense"
    images: int | None = None
    film: bool = False

    def make(self, num_envs: int = 1, device: str = "cpu") -> BaseEnv:
        """Make a scene of `num_envs` worlds, simulated on `device`; on the CPU it has one world.

        Raises:
            UserError: for an unknown task, mode or reward, missing assets, or cameras without Vulkan.
        """
        if self.images or self.film:
            need_vulkan("task.images" if self.images else "a video")
        spec = _spec(self.id)
        arguments: dict[str, Any] = {"render_backend": "none"}
        if self.images or self.film:
            arguments["render_backend"] = "cpu" if device == "cpu" else "gpu"
        if self.images:
            arguments["sensor_configs"] = {"width": self.images, "height": self.images}
        if self.film:
            arguments["render_mode"] = "rgb_array"
        try:
            return spec.cls(
                **spec.default_kwargs
                | arguments
                | {
                    "num_envs": num_envs,
                    "obs_mode": "state_dict+rgb" if self.images else "state_dict",
                    "reward_mode": self.reward,
                    "control_mode": self.control_mode,
                    "sim_backend": "physx_cpu" if device == "cpu" else device.replace("cuda", "physx_cuda"),
                }
            )
        except AssertionError as error:
            if "not in supported modes" not in str(error):
                raise
            raise UserError(f"task.control_mode={self.control_mode}: {error}") from error
        except NotImplementedError as error:
            raise UserError(f"{self.id} has no reward {self.reward!r}; use another task.reward") from error
        except SystemExit as error:
            raise UserError(f"{self.id} needs a robot whose files are not here; {_download(self.id)}") from error

    @property
    def step_limit(self) -> int:
        """Control steps of an episode in the library's evaluations."""
        return _spec(self.id).max_episode_steps or 100


def _spec(task: str) -> Any:  # noqa: ANN401 - the library's
    load()
    from mani_skill.utils.assets import DATA_GROUPS, expand_data_group_into_individual_data_source_ids
    from mani_skill.utils.assets import is_data_source_downloaded as here
    from mani_skill.utils.registration import REGISTERED_ENVS as known  # noqa: N811

    if task not in known:
        raise UserError(f"unknown task.id {task!r}; expected one of {', '.join(sorted(known))}")
    needed = known[task].asset_download_ids or []
    parts = [
        expand_data_group_into_individual_data_source_ids(name) if name in DATA_GROUPS else [name] for name in needed
    ]
    if not all(here(part) for group in parts for part in group):
        raise UserError(f"{task} needs assets that are not here; {_download(task)}")
    return known[task]


def _download(task: str) -> str:
    return f"get them with: python -m mani_skill.utils.download_asset {task}"
