"""robosuite 1.5.2, adapted as it is imported to MuJoCo 4.0 and NumPy 2.4; its files stay as they are."""

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
"""Of robosuite: what is replaced below was read in this one."""


@functools.cache
def robosuite() -> ModuleType:
    """The package, ready to make environments.

    Raises:
        UserError: where it, or what it needs, is not installed, and for another version.
    """
    if find_spec("robosuite") is None:
        raise UserError(f"robosuite is not installed: pip install --no-deps robosuite=={VERSION}")
    before = os.environ.get("MUJOCO_GL")
    log = logging.getLogger("robosuite_logs")
    log.disabled = True  # importing it warns of optional packages, every episode of body parts that a Panda has not
    with needs_extra("robosuite"):
        import mujoco
        import robosuite as package
        from robosuite.controllers.parts import controller
        from robosuite.utils.binding_utils import MjData, MjModel, MjSim
    if before is None:
        os.environ.pop("MUJOCO_GL", None)  # it asks for EGL in the name of the whole process
    if package.__version__ != VERSION:
        raise UserError(f"expected robosuite {VERSION}, got {package.__version__}; pip install robosuite=={VERSION}")
    # MuJoCo's enumerations compare as equal with Python's integers, no longer with NumPy's.
    MjModel.jnt_type = property(lambda self: self._model.jnt_type.tolist())
    # mj_fullM takes MjData, and writes to its last argument, where it took MjData.qM (now M) and wrote to the second.
    MjData.qM = property(lambda self: self._data)
    controller.mujoco = SimpleNamespace(mj_fullM=lambda model, full, data: mujoco.mj_fullM(model, data, full))
    # Room for 5000 contacts is now set aside for each world, 1.3 GB; the fullest scene here uses less than 1 MB.
    load = MjSim.from_xml_string
    MjSim.from_xml_string = lambda xml: load(re.sub(r"<size [^>]*/>", '<size memory="64M"/>', xml))
    return package
