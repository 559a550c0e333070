"""Importing ManiSkill where there may be no Vulkan device: state needs none, cameras do.

The library makes materials of its objects even if nothing is drawn, and SAPIEN cannot make them without a Vulkan
device. Without one, a dummy class replaces the material before the library is imported; every import of the library in
this package therefore calls `load` first.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from embodied.errors import UserError
from embodied.extras import needs_extra


class Colourless:
    """Dummy of SAPIEN's material, for scenes that are not drawn."""

    def __init__(self, **_: Any) -> None: ...  # noqa: ANN401 - any argument of a material

    def set_base_color(self, _: object) -> None:
        """No-op."""


@cache
def has_vulkan() -> bool:
    """Whether SAPIEN finds a Vulkan device, of a GPU or in software.

    Raises:
        UserError: if SAPIEN is not installed.
    """
    with needs_extra("maniskill"), warnings.catch_warnings():
        # The next lines report it where it matters.
        warnings.filterwarnings("ignore", "Failed to find system libvulkan")
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
        UserError: if it is not installed.
    """
    if not has_vulkan():
        import sapien

        sapien.render.RenderMaterial = sapien.pysapien.render.RenderMaterial = Colourless
    with needs_extra("maniskill"):
        import mani_skill.envs  # noqa: F401


def need_vulkan(what: str) -> None:
    """Raise UserError without a Vulkan device, which `what` needs."""
    if not has_vulkan():
        raise UserError(
            f"{what} needs Vulkan, and no Vulkan device was found; install a driver (a GPU's, or Mesa >= 25)"
        )
