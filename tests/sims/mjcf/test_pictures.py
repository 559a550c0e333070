"""Films of tasks on MJCF models: shadows, soft edges, and what a bare model lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.contract import TensorSpec
from embodied.evaluation.video import averaged
from sims.mjcf.environment import MjcfEnvironment
from sims.mjcf.mdp import Draws, Mdp, Moment, Start
from sims.mjcf.pictures import SIZE, Studio, camera
from sims.opengl import opengl

pytestmark = pytest.mark.skipif(opengl() is None, reason="OpenGL does not work here")


@dataclass(frozen=True)
class Box(Mdp):
    """A black box above a bright ground, at `x_m`; nothing else is described."""

    x_m: float = 0.0
    above_m: float = 1.0

    MODEL = """
    <mujoco>
      <worldbody>
        <geom type="plane" size="40 40 0.1" rgba="0.9 0.9 0.9 1"/>
        <body>
          <freejoint/>
          <geom type="box" size="0.3 0.3 0.1" rgba="0 0 0 1"/>
          <body pos="0 0 0.1"><joint name="j"/><geom size="0.05" rgba="0 0 0 1"/></body>
        </body>
      </worldbody>
      <actuator><motor joint="j" ctrllimited="true" ctrlrange="-1 1"/></actuator>
    </mujoco>"""
    INSTRUCTION = "stay"
    SUBSTEPS = 1
    STEP_LIMIT = 5
    OBSERVED: ClassVar = {"position": TensorSpec((3,), unit="m", frame="world")}

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        count = len(draws.uniform(0.0, 1.0, 1))
        return Start({"qpos": torch.tensor([[self.x_m, 0.0, self.above_m, 0.9, 0.1, 0.2, 0.3, 0.0]]).repeat(count, 1)})

    def observe(self, now: Moment) -> dict[str, Tensor]:
        return {"position": now.qpos[:, :3]}

    def reward(self, now: Moment) -> Tensor:
        return now.qpos[:, 0]

    def success(self, now: Moment) -> Tensor:
        return now.steps > 0


def picture(mdp: Mdp) -> np.ndarray:
    env = MjcfEnvironment(1, mdp=mdp)
    env.reset(starts=torch.tensor([0]))
    return Studio(env).render(np.arange(1))[0].astype(int)


def test_a_model_without_a_camera_is_followed() -> None:
    pictures = [picture(Box(x_m)) for x_m in (0.0, 7.0)]
    for seen in pictures:
        black = seen.sum(-1) < 30
        rows, columns = np.nonzero(black)
        assert black.mean() > 0.02
        assert abs(columns.mean() - SIZE / 2) < 0.1 * SIZE
        assert abs(rows.mean() - SIZE / 2) < 0.15 * SIZE
    assert np.abs(pictures[0] - pictures[1]).mean() < 10


def test_a_model_without_a_sky_has_one_and_its_sun_casts_shadows() -> None:
    seen, high = picture(Box()), picture(Box(above_m=6.0))
    top = seen[0]
    assert (top[:, 2] > top[:, 0] + 20).all()  # blue
    ground = seen[-SIZE // 4 :].sum(-1)
    assert (ground > 300).any()  # lit
    shadow = (seen.sum(-1) < 0.6 * np.median(ground)) & (seen.sum(-1) > 60)  # neither ground nor the box
    assert shadow.mean() > 0.01
    below = high[-SIZE // 4 :].sum(-1)  # so far below the box that its shadow is elsewhere
    assert (below < 0.6 * np.median(below)).mean() < 0.001


def test_edges_are_soft() -> None:
    seen = picture(Box()).sum(-1)
    against_sky = seen[: SIZE // 2]
    edge = (against_sky > 40) & (against_sky < 200)  # between the black of the box and the blue of the sky
    assert edge.sum() > 20


def test_a_models_own_camera_light_and_sky_are_taken() -> None:
    text = Box.MODEL.replace(
        "<worldbody>",
        """<asset><texture type="skybox" builtin="flat" rgb1="1 0 0" width="16" height="16"/></asset>
        <worldbody><camera name="film" pos="0 -3 1" xyaxes="1 0 0 0 0 1"/><light pos="0 0 4" diffuse="0.1 0.1 0.1"/>""",
    )
    own = type("Own", (Box,), {"MODEL": text})
    model = own().load()
    assert camera(model, "film").fixedcamid == model.camera("film").id
    seen = picture(own())
    assert seen[0, :, 0].min() > 200
    assert seen[0, :, 2].max() < 50


def test_pixels_are_averages_of_squares() -> None:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[:2, 1] = 255
    pixels[2:, 4:] = 100
    found = averaged(pixels, 2)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found[..., 0], [[128, 0, 0], [0, 0, 100]])
    assert averaged(pixels, 1) is pixels
