"""Importing ManiSkill where there may be no Vulkan device: state needs none, cameras do.

The library makes materials of its objects even where nothing is ever drawn, and SAPIEN makes none without a Vulkan
device. There they are made of nothing, which has to be arranged before the library is imported: whatever of this
package imports it calls `load` first.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from embodied.errors import UserError
from embodied.extras import needs_extra


class Colourless:
    """In place of SAPIEN's material, for scenes that nobody sees."""

    def __init__(self, **_: Any) -> None: ...  # noqa: ANN401 - whatever a material is made with

    def set_base_color(self, _: object) -> None:
        """Nobody sees it."""


@cache
def has_vulkan() -> bool:
    """Whether SAPIEN finds a Vulkan device, of a GPU or in software.

    Raises:
        UserError: where SAPIEN is not installed.
    """
    with needs_extra("maniskill"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to find system libvulkan")  # the next lines tell what matters of it
        import sapien.render
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


@cache
def load() -> None:
    """Import the library, which registers its environments.

    Raises:
        UserError: where it is not installed.
    """
    if not has_vulkan():
        import sapien

        sapien.render.RenderMaterial = sapien.pysapien.render.RenderMaterial = Colourless
    with needs_extra("maniskill"):
        import mani_skill.envs  # noqa: F401


def need_vulkan(what: str) -> None:
    """Raise UserError, saying that `what` needs a Vulkan device, where there is none."""
    if not has_vulkan():
        raise UserError(
            f"{what} needs Vulkan, and no Vulkan device was found; install a driver (a GPU's, or Mesa >= 25)"
        )
