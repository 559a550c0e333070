"""robosuite 1.5.2, adapted at import to MuJoCo 4.0 and NumPy 2.4, without changes to its files."""

from __future__ import annotations

import functools
import logging
import os
import re
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

from embodied.errors import UserError
from embodied.extras import needs_extra

VERSION = "1.5.2"
"""Version of robosuite for which the replacements below are written."""


@functools.cache
def robosuite() -> ModuleType:
    """Import the package, ready to make environments.

    Raises:
        UserError: if it or a dependency is not installed, and for another version.
    """
    if find_spec("robosuite") is None:
        raise UserError(f"robosuite is not installed: pip install --no-deps robosuite=={VERSION}")
    before = os.environ.get("MUJOCO_GL")
    log = logging.getLogger("robosuite_logs")
    log.disabled = True  # it warns of optional packages at import, and of missing body parts in every episode
    with needs_extra("robosuite"):
        import mujoco
        import robosuite as package
        from robosuite.controllers.parts import controller
        from robosuite.utils.binding_utils import MjData, MjModel, MjSim
    if before is None:
        os.environ.pop("MUJOCO_GL", None)  # robosuite sets EGL for the whole process
    if package.__version__ != VERSION:
        raise UserError(f"expected robosuite {VERSION}, got {package.__version__}; pip install robosuite=={VERSION}")
    # MuJoCo's enumerations compare as equal with Python's integers, no longer with NumPy's.
    MjModel.jnt_type = property(lambda self: self._model.jnt_type.tolist())
    # mj_fullM takes MjData, and writes to its last argument, where it took MjData.qM (now M) and wrote to the second.
    MjData.qM = property(lambda self: self._data)
    controller.mujoco = SimpleNamespace(mj_fullM=lambda model, full, data: mujoco.mj_fullM(model, data, full))
    # MuJoCo now allocates memory for 5000 contacts in each world, 1.3 GB; the fullest scene here uses less than 1 MB.
    load = MjSim.from_xml_string
    MjSim.from_xml_string = lambda xml: load(re.sub(r"<size [^>]*/>", '<size memory="64M"/>', xml))
    return package
