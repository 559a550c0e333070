"""Compiled stepping: native.c, compiled at first use, and its structs for ctypes."""

from __future__ import annotations

import ctypes
import sys
import warnings
from ctypes import POINTER, Structure, c_double, c_int, c_void_p
from functools import cache
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from embodied.native import load
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import Scene

FOLDER = Path(__file__).parent
HEADERS = Path(mujoco.__file__).parent / "include"
# No contraction of a*b+c and no processor-specific instructions: results are the same on every machine. MuJoCo's
# symbols are resolved when the library is loaded.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-pthread")
LINK_FLAGS = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
KINDS = {"in": 0, "on_object": 1, "on_site": 2, "joint": 3}
MAX_ADDRESSES = 8
CONTROLLER = np.dtype(
    [("goal_orientation", "f8", (3, 3)), ("posture", "f8", (7,)), ("gripper", "f8", (2,)), ("fresh", "f8")]
)
"""One simulation's controller memory: goal rotation matrix, null-space joints (rad), finger commands in [-1, 1], and 1
until the first control step, which starts from the arm at rest in its posture."""


class NativePredicate(Structure):
    """Layout of `Predicate` in native.c."""

    _fields_ = (
        *((name, c_int) for name in ("kind", "a", "b", "owner_a", "owner_b", "any_joint", "num_addresses")),
        ("addresses", c_int * MAX_ADDRESSES),
        ("size", c_double * 3),
        ("sign", c_double),
        ("threshold", c_double),
    )

    @classmethod
    def of(cls, predicate: Predicate) -> NativePredicate:
        """Convert one predicate."""
        count = len(predicate.addresses)
        if count > MAX_ADDRESSES:
            raise UserError(f"expected a goal on at most {MAX_ADDRESSES} joints (native_types.h), got {count}")
        return cls(
            *(KINDS[predicate.kind], predicate.a, predicate.b, predicate.owner_a, predicate.owner_b),
            *(int(predicate.any_joint), count, (c_int * MAX_ADDRESSES)(*predicate.addresses)),
            *((c_double * 3)(*predicate.size), predicate.sign, predicate.threshold),
        )


class NativeScene(Structure):
    """Layout of the addresses of a `Scene` and of a goal in native.c."""

    _fields_ = (
        ("arm_qpos", c_int * 7),
        ("arm_dof", c_int * 7),
        ("arm_actuator", c_int * 7),
        ("gripper_actuator", c_int * 2),
        ("grip_site", c_int),
        ("num_goal", c_int),
        ("geom_owner", POINTER(c_int)),
        ("goal", POINTER(NativePredicate)),
    )

    @classmethod
    def of(cls, scene: Scene, aim: tuple[Predicate, ...]) -> NativeScene:
        """Convert one scene with the goal `aim`; the result keeps referenced arrays alive."""
        owner = np.ascontiguousarray(scene.geom_owner, dtype=np.int32)
        goal = (NativePredicate * len(aim))(*map(NativePredicate.of, aim))
        native = cls(
            *((c_int * 7)(*a) for a in (scene.arm_qposadr, scene.arm_dofadr, scene.arm_actuator)),
            *((c_int * 2)(*scene.gripper_actuator), scene.grip_site, len(goal)),
            *(owner.ctypes.data_as(POINTER(c_int)), goal),
        )
        native.keep = (owner, goal)
        return native


class NativeSimulation(Structure):
    """Pointers to one simulation's model, data, scene, controller memory and separations of geoms."""

    _fields_ = (
        ("model", c_void_p),
        ("data", c_void_p),
        ("scene", POINTER(NativeScene)),
        ("controller", c_void_p),
        ("separations", c_void_p),
    )


class Pool:
    """A pool of threads that steps simulations in C; close() stops the threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._handle = library.native_open(threads)
        if not self._handle:
            raise MemoryError("out of memory for a thread pool")

    def step(
        self,
        simulations: ctypes.Array[NativeSimulation],
        ids: NDArray[np.int32],
        actions: NDArray[np.float64],
        stop_on_success: bool,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Step `ids` [n] by `actions` [n, K, 7]: executed [n, K], success [n], diverged [n], as `Simulation.step`."""
        n, steps = actions.shape[:2]
        executed, success, diverged = (np.zeros(shape, dtype=np.bool_) for shape in ((n, steps), n, n))
        pointers = (array.ctypes.data for array in (executed, success, diverged))
        head = (self._handle, simulations, ids.ctypes.data, n, steps, actions.ctypes.data, int(stop_on_success))
        self._library.native_step(*head, *pointers)
        return executed, success, diverged

    def satisfied(self, simulations: ctypes.Array[NativeSimulation], i: int) -> bool:
        """Whether simulation `i` satisfies its goal."""
        return bool(self._library.native_satisfied(simulations, i))

    def close(self) -> None:
        """Stop the threads; further calls do nothing."""
        if self._handle:
            self._library.native_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None, with one warning, if there is no compiler or it fails."""
    try:
        return _load()
    except UserError as error:
        warnings.warn(f"LIBERO runs in numpy, several times slower: {error}", RuntimeWarning, stacklevel=2)
        return None


def _load() -> ctypes.CDLL | None:
    for path in sorted([*HEADERS.parent.glob("libmujoco*.so*"), *HEADERS.parent.glob("libmujoco*.dylib")]):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # native.c's calls into MuJoCo resolve against it
    loaded = load((FOLDER / "native.c").read_text(encoding="utf-8"), FLAGS + LINK_FLAGS, (FOLDER, HEADERS))
    if loaded is None:
        return None
    assert loaded.native_mujoco_version() == mujoco.mj_version(), "headers of another MuJoCo version"
    sizes = [loaded.native_simulation_bytes(), loaded.native_scene_bytes(), loaded.native_predicate_bytes()]
    sizes.append(loaded.native_controller_bytes())
    mirrored = [*map(ctypes.sizeof, (NativeSimulation, NativeScene, NativePredicate)), CONTROLLER.itemsize]
    assert sizes == mirrored, "the structs here differ from native_types.h"
    loaded.native_install()
    loaded.native_open.restype = c_void_p
    loaded.native_open.argtypes = [c_int]
    loaded.native_close.restype = None
    loaded.native_close.argtypes = [c_void_p]
    loaded.native_satisfied.restype = c_int
    loaded.native_satisfied.argtypes = [POINTER(NativeSimulation), c_int]
    loaded.native_step.restype = None
    loaded.native_step.argtypes = [
        *(c_void_p, POINTER(NativeSimulation), c_void_p, c_int, c_int, c_void_p, c_int),
        *(c_void_p, c_void_p, c_void_p),
    ]
    return loaded
