"""LIBERO on mujoco_warp: agreement with MuJoCo in grasps and whole episodes, control steps and pictures per second."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.cuda_parts.record import Options, Record, seconds_per_call
from benchmarks.cuda_parts.sweep import sweep

if TYPE_CHECKING:
    from sims.libero.scene.scene import Scene

WORLDS = (256, 512, 1024, 2048, 4096, 8192)
PICTURED = (256, 1024, 4096, 8192)
EPISODES, STATES, SIZE = 24, 256, 128
MEDIAN, P99 = 1e-3, 1e-2
"""Errors of qpos (m, rad) after one control step with a grasped object. On the CPU warp's single precision differs from
MuJoCo by 1e-6 to 2e-4 in the median and by up to 4e-3 in the 99th percentile (results/libero_warp.json); contacts that
slip at slightly different times make the rest."""
FAILED = 0.1
"""Share of complete episodes that may end differently than in MuJoCo; on the CPU none of 297 does."""
LEVELS = 1.0
"""Mean difference of pictures, of 255 levels. Rays and the rasteriser differ in a few pixels along edges."""


def run(record: Record, options: Options) -> None:
    """Run the agreement, then the pictures, then the longest measurements."""
    ends = time.perf_counter() + options.seconds
    with record.row("compilation"):
        compilation(record, options)
    with record.row("agreement"):
        agreement(record, options)
    with record.row("pictures"):
        pictures(record, options)
    remaining_s = 0.9 * (ends - time.perf_counter())  # the rest is a reserve for the last measurement
    with record.row("control steps per second"):
        control_steps(record, options, 0.4 * remaining_s)
    with record.row("pictures per second"):
        picture_rates(record, options, 0.6 * remaining_s)


def compilation(record: Record, options: Options) -> None:
    """Measure the seconds of the first control step, which compiles kernels unless they are cached, and of a second.

    The second step is of new worlds, and captures their graph.
    """
    from sims.libero.physics.backend import LiberoSim, simulate

    scene = _scene()
    for name in ("first_worlds_s", "next_worlds_s"):
        start_s = time.perf_counter()
        simulation = simulate(LiberoSim.mjwarp, [scene], device=options.device)
        simulation.step([0], np.zeros((1, 1, 7)))
        simulation.qpos(np.array([0]))
        record.figure(name, time.perf_counter() - start_s)


def agreement(record: Record, options: Options) -> None:
    """Compare one control step from MuJoCo's states with a grasped object, and replays of complete episodes."""
    from benchmarks import libero_warp
    from sims.libero.physics.backend import LiberoSim, simulate
    from sims.libero.physics.simulation import Simulation
    from sims.libero.suite import step_limit_of

    scene, starts = _scene(), np.arange(options.size(EPISODES, 1))
    start_s = time.perf_counter()
    actions, success, grasp_states = libero_warp.record(scene, starts, step_limit_of([scene.task]))
    record.figure("recording_in_mujoco_s", time.perf_counter() - start_s)
    grasp_states = grasp_states[: options.size(STATES, 2)]
    device = _device(options)
    errors = libero_warp.step_errors(scene, grasp_states, device)
    record.figure("grasped_states", len(grasp_states))
    record.check("grasped_step_median", float(np.median(errors)), MEDIAN)
    record.check("grasped_step_p99", float(np.quantile(errors, 0.99)), P99)

    starts, actions = starts[success], actions[success][:, : options.size(None, 3)]
    sides = (
        Simulation([scene] * len(starts), sleep=False),
        simulate(LiberoSim.mjwarp, [scene] * len(starts), device=options.device),
    )
    expected, actual = (libero_warp.replay(scene, side, starts, actions) for side in sides)
    ids = np.arange(len(starts))
    record.figure("replayed_control_steps", actions.shape[1])
    record.figure("replay_error_median", float(np.median(np.abs(sides[0].qpos(ids) - sides[1].qpos(ids)).max(1))))
    record.figure("replay_success", {"mujoco": float(expected.mean()), "mjwarp": float(actual.mean())})
    record.check("replays_that_end_otherwise", float((expected != actual).mean()), FAILED)


def pictures(record: Record, options: Options) -> None:
    """Compare pictures on the device with the rasteriser's pictures of the same states on the CPU."""
    from sims.libero.environment import LiberoEnvironment
    from sims.libero.observation import IMAGES
    from sims.libero.physics.backend import LiberoSim
    from sims.libero.rendering import rasteriser
    from sims.libero.rendering.cameras import Cameras

    size = options.size(SIZE, 32)
    start_s = time.perf_counter()
    env = LiberoEnvironment(
        [_scene().task], options.size(4, 1), image_size=size, sim=LiberoSim.mjwarp, device=options.device
    )
    observation = env.reset(starts=torch.arange(env.num_envs))
    traced = torch.stack([observation[name] for name in IMAGES], 1)
    varied = float(traced.float().std())  # waits for the device
    record.figure("first_pictures_s", time.perf_counter() - start_s)
    record.check("pictures_elsewhere", float(traced.device.type != torch.device(options.device).type), 0.0)
    record.figure("levels_std", varied)
    if rasteriser.library() is None:
        record.skip("pictures beside the CPU's", "no C compiler for the rasteriser")
        return
    rasterised = Cameras(env.simulation, tuple(IMAGES.values()), size, size, backend="raster").render()
    difference = np.abs(traced.cpu().numpy().astype(int) - rasterised.astype(int))
    record.check("mean_difference_levels", float(difference.mean()), LEVELS)
    record.figure("differing_pixels_share", float((difference.max(-1) > 4).mean()))
    env.close()


def control_steps(record: Record, options: Options, seconds: float) -> None:
    """Measure control steps per second by number of worlds, with state observations."""
    from benchmarks import libero_warp
    from sims.libero.assets import find_assets

    task, assets = _scene().task, find_assets()
    timed = {"executed": options.size(libero_warp.EXECUTED, 1), "timed": options.size(3, 1)}

    def measure(worlds: int) -> float:
        return libero_warp.speed(task, assets, worlds, options.device, None, **timed)

    sweep(record, "control_steps_per_s", options.size(WORLDS, (1,)), measure, seconds)


def picture_rates(record: Record, options: Options, seconds: float) -> None:
    """Measure pictures per second of the ray tracer alone by number of worlds, with two cameras each."""
    from sims.libero.environment import LiberoEnvironment
    from sims.libero.observation import CAMERAS
    from sims.libero.physics.backend import LiberoSim
    from sims.libero.rendering.cameras import cameras_of

    def measure(worlds: int) -> float:
        env = LiberoEnvironment([_scene().task], worlds, sim=LiberoSim.mjwarp, device=options.device)
        env.reset(starts=torch.arange(worlds) % 64)
        cameras = cameras_of(env.simulation, CAMERAS, options.size(SIZE, 32))
        took = seconds_per_call(cameras.pictures, options.device, seconds=options.size(1.0, 0.1))
        env.close()
        return worlds * len(CAMERAS) / took

    sweep(record, "pictures_per_s", options.size(PICTURED, (1,)), measure, seconds)


@cache
def _scene() -> Scene:
    """Scene of the first task of libero_object."""
    from sims.libero.assets import find_assets
    from sims.libero.scene.scene import build_scene
    from sims.libero.suite import load_tasks

    return build_scene(load_tasks("libero_object", [0])[0], find_assets())


def _device(options: Options) -> str:
    """Warp's name of the device."""
    from sims.warp_order import warp_device

    return str(warp_device(options.device))
