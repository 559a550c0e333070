"""The point of `Reach` on a rail, with a view: odd environments are blue, even ones red."""

import numpy as np

from embodied.scene import shapes
from embodied.scene.viewable import Body, Scene, View
from tests.embodied.reach import Reach

RED, BLUE = (0.9, 0.1, 0.1), (0.1, 0.2, 0.9)


class Rail(Reach):
    def view(self) -> "RailView":
        return RailView(self)


class RailView(View):
    def __init__(self, env: Rail) -> None:
        self._env = env
        self._scenes = [self._scene(colour) for colour in (RED, BLUE)]

    def scene(self, row: int) -> Scene:
        return self._scenes[row % 2]

    def poses(self, row: int) -> np.ndarray:
        return np.array([[float(self._env.position[row]), 0.0, 0.2, 1.0, 0.0, 0.0, 0.0]])

    def push(self, row: int, body: str, change_m_s: np.ndarray) -> None:
        self._env.position[row] += change_m_s[0]

    def _scene(self, colour: tuple[float, float, float]) -> Scene:
        point = Body("point", shapes.box((0.2, 0.2, 0.2)).coloured(colour))
        return Scene((point,), (0.0, -2.0, 1.0), (0.0, 0.0, 0.2), pushable=("point",))
