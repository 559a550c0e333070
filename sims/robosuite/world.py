"""One robosuite environment: numbered episodes, sensors read once a chunk, pictures, and states to save and restore."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied import seeding
from embodied.errors import UserError
from sims.robosuite.adapted import robosuite
from sims.robosuite.catalogue import entry

Array = NDArray[np.float64]
CONTROLLERS = ("OSC_POSE", "OSC_POSITION", "JOINT_POSITION")
"""Controllers of an arm whose only state beyond an action is the episode's first pose, so that it can be restored."""
MEASURED = ("joint_pos", "joint_vel", "eef_pos", "eef_quat", "gripper_qpos", "gripper_qvel")
"""Proprioception of an arm; robosuite's other sensors are accelerations, or the same quantities in other forms."""
STATE = mujoco.mjtState.mjSTATE_INTEGRATION
BLOWN_UP = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
"""Warnings of divergence, after which MuJoCo resets itself to its default state."""


@dataclass(frozen=True)
class Options:
    """Options of a robosuite environment: a `task` of the catalogue, and one robot for each of its arms."""

    task: str
    robots: tuple[str, ...] = field(default=())
    controller: str = CONTROLLERS[0]
    shaped: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for unknown tasks and controllers, a wrong number of robots, and a missing shaped reward."""
        about = entry(self.task)
        object.__setattr__(self, "robots", tuple(self.robots) or ("Panda",) * about.arms)
        if len(self.robots) != about.arms:
            raise UserError(f"{self.task} has {about.arms} arms, got task.robots={list(self.robots)}")
        if self.controller not in CONTROLLERS:
            raise UserError(f"expected task.controller as one of {', '.join(CONTROLLERS)}, got {self.controller!r}")
        if self.shaped and not about.shaped:
            raise UserError(f"robosuite has no shaped reward for {self.task}; use task.shaped=false")


class World:
    """One environment of robosuite, `env`.

    Objects whose size robosuite draws when it builds a model (the cube, the peg, the hammer) have the size of seed 0 in
    all worlds, because building a model takes longer than most episodes.
    """

    def __init__(self, options: Options) -> None:
        package = robosuite()
        if unknown := set(options.robots) - set(package.ALL_ROBOTS):
            raise UserError(f"unknown robots {sorted(unknown)}; expected {', '.join(sorted(package.ALL_ROBOTS))}")
        self.env = package.make(
            options.task,
            robots=list(options.robots),
            has_offscreen_renderer=False,
            use_camera_obs=False,
            controller_configs=[_controller(name, options.controller) for name in options.robots],
            reward_shaping=options.shaped,
            hard_reset=False,
            ignore_done=True,
            seed=0,
        )
        self.env.reset()
        single = getattr(self.env, "single_object_mode", 0) == 1  # the object changes with the episode
        proprioception = [f"robot{i}_{name}" for i in range(len(options.robots)) for name in MEASURED]
        sensors = self.env._observables.items()
        self.objects = tuple(
            name
            for name, sensor in sensors
            if sensor.modality == "object" and (sensor.is_active() or single) and "world_pose" not in name
        )
        self.proprioception = tuple(name for name, _ in sensors if name in proprioception)
        # Poses in the gripper are computed from two other sensors, so that they have to be read last.
        poses = [name for name, _ in sensors if "world_pose" in name]
        self._order = sorted((*self.proprioception, *poses, *self.objects), key=lambda name: "_to_robot" in name)

    def begin(self, task: str, split: str, start: int) -> None:
        """Set robot and objects to initial state `start` of `split`."""
        generator = np.random.default_rng(seeding.derive(start, "robosuite", task, split))
        self.env.rng.bit_generator.state = generator.bit_generator.state  # placement samplers share this generator
        self.env.reset()
        for gripper in self._grippers():
            gripper.format_action(np.zeros(gripper.dof))  # a zero command gives `current_action` its final shape

    def step(self, action: Array) -> tuple[float, bool, bool]:
        """One control step; returns reward, success and whether the physics diverged."""
        # `observe` reads them, once a chunk
        sensors = self.env._observables
        self.env._observables = {}
        reward = self.env.step(action)[1]
        self.env._observables = sensors
        warnings = self.env.sim.data.warning
        diverged = any(warnings[int(kind)].number for kind in BLOWN_UP)
        return float(reward), bool(self.env._check_success()), diverged

    def observe(self) -> dict[str, Array]:
        """Present readings of robosuite's sensors, by its names.

        Robosuite itself computes poses of nuts and other objects in the gripper from readings of the last step and of
        this one.
        """
        read: dict[str, Any] = {}
        for name in self._order:
            read[name] = self.env._observables[name]._sensor(read)
        return {name: np.atleast_1d(read[name]) for name in (*self.proprioception, *self.objects)}

    def picture(self, camera: str, size: int) -> NDArray[np.uint8]:
        """Picture of `camera`, uint8 [size, size, 3].

        Raises:
            UserError: for an unknown camera, and if OpenGL does not work.
        """
        sim = self.env.sim
        if camera not in sim.model.camera_names:
            raise UserError(f"unknown camera {camera!r}; expected one of {', '.join(sim.model.camera_names)}")
        if sim._render_context_offscreen is None:
            from robosuite.utils.binding_utils import MjRenderContextOffscreen

            try:
                view = MjRenderContextOffscreen(sim, device_id=-1).vopt
            except (ImportError, AttributeError, RuntimeError) as error:
                raise UserError(f"no OpenGL ({error}): install EGL, or use task.images=[] video=false") from error
            view.geomgroup[:2] = 0, 1  # visual geoms, not collision geoms
        return sim.render(size, size, camera_name=camera)[::-1]  # OpenGL's first row is the lowest

    def save(self) -> dict[str, Array]:
        """State of the physics, and the present command of each gripper."""
        model = self.env.sim.model._model
        data = self.env.sim.data._data
        state = np.empty(mujoco.mj_stateSize(model, STATE))
        mujoco.mj_getState(model, data, state, STATE)
        return {"physics": state, "grippers": np.concatenate([gripper.current_action for gripper in self._grippers()])}

    def restore(self, state: dict[str, Array]) -> None:
        """Restore what `save` returned, after `begin` of the same episode."""
        model = self.env.sim.model._model
        data = self.env.sim.data._data
        mujoco.mj_setState(model, data, state["physics"], STATE)
        ends = np.cumsum([len(gripper.current_action) for gripper in self._grippers()])
        for gripper, command in zip(self._grippers(), np.split(state["grippers"], ends[:-1]), strict=True):
            gripper.current_action = command.copy()
        for robot in self.env.robots:
            for controller in robot.composite_controller.part_controllers.values():
                controller.new_update = True  # the controller has to read the arm's state again
        mujoco.mj_step1(model, data)  # recomputes poses

    def _grippers(self) -> list[Any]:
        pairs = [(robot, arm) for robot in self.env.robots for arm in robot.arms]
        return [robot.gripper[arm] for robot, arm in pairs if robot.has_gripper[arm]]


def _controller(robot: str, arms: str) -> dict[str, Any]:
    """Configuration of the composite controller of `robot`, with the controller `arms` for its arms."""
    from robosuite.controllers import load_composite_controller_config, load_part_controller_config

    config = load_composite_controller_config(robot=robot)
    for part, settings in config["body_parts"].items():
        if "gripper" in settings and settings["type"] != arms:
            chosen = load_part_controller_config(default_controller=arms)
            config["body_parts"][part] = chosen | {"gripper": settings["gripper"]}
    return config
