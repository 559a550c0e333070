"""Vehicles in their worlds without a task: compiled C on the CPU, torch elsewhere.

Letters in shape comments: N vehicles, C circles, S segments, B beams of the lidar.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.native import choose, pointers
from sims.vehicle import dynamics
from sims.vehicle.compiled import library
from sims.vehicle.geometry import Lidar, cast, noisy, touching
from sims.vehicle.vehicles import PARAMETERS, Model


class Simulator:
    """Steps vehicles and simulates their lidars.

    Args:
        model: the equations of motion.
        lidar: the lidar of every vehicle.
        dt_s: time between commands.
        substeps: integration steps per command, each with a test for contact.
        device: "cpu" or a CUDA device.
        backend: "c" or "torch"; None: the device's default.
    """

    def __init__(
        self,
        model: Model,
        lidar: Lidar,
        *,
        dt_s: float,
        substeps: int,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.model = model
        self.lidar = lidar
        self.dt_s = dt_s
        self.substeps = substeps
        self.device = torch.device(device)
        self.backend = choose(backend, self.device)
        self.angles = lidar.angles().to(self.device)
        self._directions = self.angles.cos(), self.angles.sin()

    def advance(
        self, state: Tensor, command: Tensor, parameters: Tensor, circles: Tensor, segments: Tensor, frozen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """State [N, 7] after one control step with `command` [N, 2], and contact, [N] bool.

        Vehicles in contact stop at that substep; `frozen` [N] ones do not move at all.
        """
        if self.backend == "c":
            return self._advance(state, command, parameters, circles, segments, frozen)
        half = 0.5 * parameters[:, :2]
        stopped = frozen.clone()
        hit = torch.zeros_like(frozen)
        for _ in range(self.substeps):
            moved = dynamics.step(self.model, state, command, parameters, self.dt_s / self.substeps)
            state = torch.where(stopped.unsqueeze(1), state, moved)
            hit = hit | (touching(state[:, :3], half, circles, segments) & ~frozen)
            stopped = frozen | hit
        return state, hit

    def scan(
        self, state: Tensor, parameters: Tensor, circles: Tensor, segments: Tensor, key: Tensor, steps: Tensor
    ) -> Tensor:
        """Ranges [N, B], m, of the lidar; its noise is a function of `key` [N] and `steps` [N] int32."""
        lidar = self.lidar
        if self.backend == "c":
            out = torch.empty(len(state), lidar.beams)
            library().scan(
                len(state),
                lidar.beams,
                float(self.angles[0]),
                lidar.spacing_rad,
                lidar.range_m,
                lidar.noise_m,
                *pointers(*self._directions, state, parameters, key, steps),
                circles.shape[1],
                *pointers(circles),
                segments.shape[1],
                *pointers(segments, out),
            )
            return out
        yaw = state[:, 2:3]
        mounted = parameters[:, PARAMETERS.index("lidar_x_m"), None]
        origin = state[:, :2] + mounted * torch.cat((yaw.cos(), yaw.sin()), 1)
        ranges = cast(origin, yaw + self.angles, circles, segments, lidar.range_m)
        return noisy(ranges, key, steps, lidar) if lidar.noise_m > 0 else ranges

    def _advance(
        self, state: Tensor, command: Tensor, parameters: Tensor, circles: Tensor, segments: Tensor, frozen: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = state.clone(memory_format=torch.contiguous_format)
        hit = torch.empty_like(frozen)
        library().advance(
            len(state),
            self.substeps,
            self.dt_s / self.substeps,
            int(self.model),
            *pointers(frozen, command, parameters),
            circles.shape[1],
            *pointers(circles),
            segments.shape[1],
            *pointers(segments, state, hit),
        )
        return state, hit
