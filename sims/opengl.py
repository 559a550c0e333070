"""OpenGL for MuJoCo's renderer: EGL, which also works without a graphics card, or the library named by MUJOCO_GL."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

SOFTWARE = ("llvmpipe", "softpipe", "swrast", "software")
"""Parts of the names of OpenGL implementations that run on the CPU."""


def graphics_card() -> bool:
    """Whether OpenGL runs on a graphics card."""
    if not any(Path("/dev/dri").glob("renderD*")):
        return False
    name = opengl()
    return name is not None and not any(word in name.lower() for word in SOFTWARE)


def opengl() -> str | None:
    """Name of the OpenGL implementation; None if OpenGL does not work."""
    try:
        return context()[1]
    except Exception:  # a missing library, driver or display each raises another error
        return None


@functools.cache
def context() -> tuple[Any, str]:
    """The OpenGL context of this process, which lives until the process ends, and the name of its implementation."""
    if os.environ.get("MUJOCO_GL"):
        from mujoco.gl_context import GLContext
    else:
        from mujoco.egl import GLContext
    gl_context = GLContext(64, 64)
    gl_context.make_current()
    from OpenGL import GL

    return gl_context, GL.glGetString(GL.GL_RENDERER).decode()


def make_current() -> None:
    """Make the context of this process current: another renderer may have replaced it, and then have closed its own."""
    context()[0].make_current()
