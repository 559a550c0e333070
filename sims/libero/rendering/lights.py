"""Lights of a scene: their share on the table, their dimming, and the light that casts shadows in films."""

from __future__ import annotations

import mujoco
import numpy as np


def on_table(model: mujoco.MjModel, light: int) -> float:
    """Share of a light that a horizontal surface at the world's origin receives."""
    position = model.light_pos[light]
    direction = model.light_dir[light]
    if model.light_type[light] == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL:
        return max(0.0, -direction[2])
    to_light = position / np.linalg.norm(position)
    along = max(0.0, -to_light @ direction)
    if model.light_type[light] == mujoco.mjtLightType.mjLIGHT_SPOT:
        inside = along >= np.cos(np.deg2rad(model.light_cutoff[light]))
        return max(0.0, to_light[2]) * along ** model.light_exponent[light] * inside
    return max(0.0, to_light[2])


def cast_shadows(model: mujoco.MjModel) -> None:
    """Let the light that is brightest on the table cast shadows; LIBERO's own lights cast none."""
    received = [float(model.light_diffuse[i].max()) * on_table(model, i) for i in range(model.nlight)]
    model.light_castshadow[:] = np.arange(model.nlight) == np.argmax(received or [0.0])


def dim(model: mujoco.MjModel) -> float:
    """Dim the lights so that a white table, seen at 45 degrees, is just below overexposure; returns the factor.

    OpenGL clips the light on a surface before multiplying by the colour, our renderers clip the product: LIBERO's
    brighter scenes, designed with OpenGL, would be overexposed.
    """
    headlight = model.vis.headlight
    # 0.7 is about cos(45 degrees), the headlight's share at that angle.
    fixed = float(np.max(headlight.ambient + 0.7 * headlight.diffuse + model.light_ambient.sum(0)))
    light = sum((float(model.light_diffuse[i].max()) * on_table(model, i) for i in range(model.nlight)), 1e-6)
    scale = min(1.0, max(0.0, 1.0 - fixed) / light)
    model.light_diffuse *= scale
    model.light_specular *= scale
    return scale
