"""Stock LIBERO's virtual environment: created once, in the user's cache."""

from __future__ import annotations

from pathlib import Path

from sims.interpreter import own_python

STOCK = ("robosuite==1.4.0", "hf-libero==0.1.4", "bddl==1.0.1")
"""Packages that are installed without their dependencies, which pin old versions."""
DEPENDENCIES = (
    *("scipy", "numba", "opencv-python-headless", "pillow", "termcolor", "pyyaml", "matplotlib", "h5py", "gymnasium"),
    *("gym==0.26.2", "easydict==1.13", "future==1.0.0", "cloudpickle", "networkx"),
)
SHARED = ("mujoco", "numpy", "torch")
"""Packages that stock shares with our environment."""


def stock_python() -> Path:
    """The interpreter of stock LIBERO's virtual environment; see `own_python`."""
    return own_python("stock LIBERO", "stock_libero", "600 MB", SHARED, STOCK, DEPENDENCIES)
