"""Interface, in tensors, of simulations that run on the host: MuJoCo's and stock LIBERO's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sims.libero.scene.placement import InitialState


class HostSimulation(ABC):
    """N simulations in numpy, with an interface in tensors."""

    num: int
    torch_device = torch.device("cpu")
    overflow: Tensor | None = None  # MuJoCo's arena grows

    @abstractmethod
    def write(
        self,
        i: int,
        qpos: ArrayLike,
        qvel: ArrayLike,
        *,
        body_pos: ArrayLike,
        body_quat: ArrayLike,
        model_fields: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Restart simulation `i`."""

    @abstractmethod
    def step(
        self, ids: ArrayLike, actions: ArrayLike, *, stop_on_success: bool = True
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Run the chunk `actions` [n, K, 7] in `ids` [n]: (executed [n, K], success [n], diverged [n])."""

    @abstractmethod
    def qpos(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Positions [n, nq]."""

    @abstractmethod
    def placed(self, ids: NDArray[np.int64], bodies: Sequence[int]) -> NDArray[np.float64]:
        """Poses in which `bodies` are attached [n, bodies, 7]: positions and quaternions."""

    def varied_fields(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Fields of the model that are randomised: name -> [n, ...], of simulations `ids` [n] of one scene."""
        return {}

    @abstractmethod
    def gripper(self) -> NDArray[np.float64]:
        """Commands [N, 2] of the fingers."""

    @abstractmethod
    def achieved(self, i: int) -> list[bool]:
        """Whether simulation `i` satisfies each part of its goal, in their order."""

    def begin(self, ids: Tensor, starts: Tensor, initial: Callable[[int, int], InitialState]) -> None:
        """Restart simulations `ids` [M] from the numbered `starts` [M], whose states are `initial(i, start)`."""
        for i, start in zip(ids.tolist(), starts.tolist(), strict=True):
            self.write(i, **initial(i, start)._asdict())

    def run(
        self, actions: Tensor, remaining_steps: Tensor, *, stop_on_success: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the first `remaining_steps` [N] actions of the chunk `actions` [N, K, 7].

        Returns the tuple of `step` for all N simulations.
        """
        chunk = actions.numpy()
        widths = remaining_steps.numpy()
        executed = np.zeros(chunk.shape[:2], dtype=bool)
        success, diverged = np.zeros((2, self.num), dtype=bool)
        for width in np.unique(widths[widths > 0]):
            ids = np.flatnonzero(widths == width)
            executed[ids, :width], success[ids], diverged[ids] = self.step(
                ids, chunk[ids, :width], stop_on_success=stop_on_success
            )
        return torch.from_numpy(executed), torch.from_numpy(success), torch.from_numpy(diverged)

    def observed_state(self, ids: NDArray[np.int64], bodies: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State that observations are computed from, of simulations `ids` [n] of one scene.

        It is positions [n, nq], poses in which `bodies` are attached [n, bodies, 7], and commands of fingers [n, 2].
        """
        arrays = self.qpos(ids), self.placed(ids, bodies), self.gripper()[ids]
        return tuple(torch.from_numpy(values) for values in arrays)
