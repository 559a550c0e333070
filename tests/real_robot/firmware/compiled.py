"""An exported policy as a library in this process."""

import ctypes
from pathlib import Path

import numpy as np

from real_robot.firmware.toolchain import COMMON, call, host_compiler


class Compiled:
    """policy_check, policy_reset and policy_act of the export in a folder."""

    def __init__(self, directory: Path, library: Path) -> None:
        call([host_compiler(), *COMMON, "-shared", "-fPIC", directory / "policy.c", "-o", library], directory)
        self.library = ctypes.CDLL(str(library))

    def check(self) -> int:
        return self.library.policy_check()

    def reset(self) -> None:
        self.library.policy_reset()

    def act(self, observation: np.ndarray, outputs: int) -> tuple[int, np.ndarray]:
        observation, action = np.ascontiguousarray(observation, dtype=np.float32), np.full(outputs, 99.0, np.float32)
        status = self.library.policy_act(ctypes.c_void_p(observation.ctypes.data), ctypes.c_void_p(action.ctypes.data))
        return status, action


def damage(directory: Path) -> None:
    """Change the checksum of the weights in the export's source."""
    source = directory / "policy.c"
    text = source.read_text()
    mark = "constants_crc32 = 0x"
    digit = text[text.index(mark) + len(mark)]
    source.write_text(text.replace(mark + digit, mark + ("0" if digit != "0" else "1")))
