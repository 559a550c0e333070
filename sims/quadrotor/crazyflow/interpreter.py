"""Crazyflow's virtual environment: created once, in the user's cache."""

from __future__ import annotations

from pathlib import Path

from sims.interpreter import own_python

CRAZYFLOW = (
    *("crazyflow==0.4.0", "jax==0.10.1", "jaxlib==0.10.1", "flax==0.12.8", "casadi==3.8.2", "mujoco==3.17.0"),
    *("mujoco-mjx==3.17.0", "gymnasium==1.4.0", "ml_collections==1.1.0", "array-api-compat==1.16.0"),
    "array-api-extra==0.11.5",
)
"""Crazyflow and its dependencies, pinned; mujoco-mjx has no release for our MuJoCo."""
SHARED = ("numpy", "torch")
"""Packages that crazyflow shares with our environment."""


def crazyflow_python() -> Path:
    """The interpreter of crazyflow's virtual environment; see `own_python`."""
    return own_python("crazyflow", "crazyflow", "830 MB", SHARED, (), CRAZYFLOW)
