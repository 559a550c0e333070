"""The lights of a scene: how much of each a table gets, and which one casts shadows in films."""

from __future__ import annotations

import mujoco
import numpy as np


def on_table(model: mujoco.MjModel, light: int) -> float:
    """Share of a light that a horizontal surface at the world's origin receives."""
    position, direction = model.light_pos[light], model.light_dir[light]
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
