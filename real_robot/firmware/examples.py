"""Complete example programs for an exported policy: a bare STM32F405, a Crazyflie app and a PX4 module."""

from __future__ import annotations

import shutil
from pathlib import Path

from embodied.contract import Contract, TensorSpec

C = Path(__file__).with_name("c")
STABILIZER_HZ = 1000
ROTORS = 4
WRITTEN = "written"
POSITION = [f"observation[next++] = bounded(state->position[{axis}]);" for axis in range(3)]
VELOCITY = [f"observation[next++] = state->velocity[{axis}];" for axis in range(3)]
ANGULAR_VELOCITY = [f"observation[next++] = state->angular_velocity[{axis}];" for axis in range(3)]
ROTATION = [
    "const float w = state->attitude[0], x = state->attitude[1], y = state->attitude[2], z = state->attitude[3];",
    "observation[next++] = 1.0f - 2.0f * (y * y + z * z);",
    "observation[next++] = 2.0f * (x * y - w * z);",
    "observation[next++] = 2.0f * (x * z + w * y);",
    "observation[next++] = 2.0f * (x * y + w * z);",
    "observation[next++] = 1.0f - 2.0f * (x * x + z * z);",
    "observation[next++] = 2.0f * (y * z - w * x);",
    "observation[next++] = 2.0f * (x * z - w * y);",
    "observation[next++] = 2.0f * (y * z + w * x);",
    "observation[next++] = 1.0f - 2.0f * (x * x + y * y);",
]
STATE = {
    "position": (TensorSpec((3,), unit="m", frame="world"), POSITION),
    "rotation": (TensorSpec((9,), unit="1", frame="world"), ROTATION),
    "velocity": (TensorSpec((3,), unit="m/s", frame="world"), VELOCITY),
    "angular_velocity": (TensorSpec((3,), unit="rad/s", frame="body"), ANGULAR_VELOCITY),
}
"""Entries of firmwares' state estimates: shape, unit, frame, and the C code that fills them in."""
HISTORIES = ("previous_action", "action_history")
"""Observations of past actions, oldest first."""


FLYING = ("crazyflie", "px4")
FILLED = ("flight/flight.c", "crazyflie/src/controller_policy.c")
"""Files with places to fill in."""


def write(contract: Contract, scratch_bytes: int, directory: Path) -> dict[str, str]:
    """Write the examples that fit `contract` into `directory`; returns "written" or the reason for omitting each."""
    shutil.copytree(C / "stm32f405", directory / "stm32f405")
    if reason := _not_flown(contract):
        return {"stm32f405": WRITTEN, **dict.fromkeys(FLYING, reason)}
    for name in ("flight", *FLYING):
        shutil.copytree(C / name, directory / name)
    for name in FILLED:
        text_of_file = (directory / name).read_text(encoding="utf-8")
        for marker, text in _places(contract, scratch_bytes).items():
            text_of_file = text_of_file.replace(f"@{marker}@", text)
        (directory / name).write_text(text_of_file, encoding="utf-8")
    return {"stm32f405": WRITTEN, **dict.fromkeys(FLYING, WRITTEN)}


def _not_flown(contract: Contract) -> str | None:
    """The reason why a flight controller can't fill the observation or apply the action; None if it can."""
    action = contract.action
    steps = contract.control_dt_s * STABILIZER_HZ
    if action.shape != (ROTORS,) or (action.low, action.high) != ((-1.0,) * ROTORS, (1.0,) * ROTORS):
        return f"expected {ROTORS} rotor set-points between -1 and 1, got {action.shape} {action.low} {action.high}"
    if abs(steps - round(steps)) > 1e-6 or round(steps) < 1:
        return f"expected an action every whole number of milliseconds, got one every {contract.control_dt_s} s"
    for key, spec in contract.observation.items():
        if key in HISTORIES and len(spec.shape) == 1 and spec.shape[0] % ROTORS == 0:
            continue
        estimate = STATE[key][0] if key in STATE else None
        if estimate is None or (estimate.shape, estimate.unit, estimate.frame) != (spec.shape, spec.unit, spec.frame):
            return f"the state estimate has no {key} {spec.shape} in {spec.unit} {spec.frame}"
    return None


def _places(contract: Contract, scratch_bytes: int) -> dict[str, str]:
    lines = []
    repair = []
    history = 1
    for key, spec in contract.observation.items():
        if key in STATE:
            lines += STATE[key][1]
            part = f"POLICY_OBSERVATION_{key.upper()}, {spec.shape[0]}"
            repair.append(f"whole = repaired(observation, {part}) && whole;")
            continue
        history = max(history, spec.shape[0] // ROTORS)
        lines += [
            f"for (int i = 0; i < {spec.shape[0]}; i++) {{ /* {key} */",
            f"  observation[next++] = history[@HISTORY@ - {spec.shape[0] // ROTORS} + i / FLIGHT_ROTORS]"
            "[i % FLIGHT_ROTORS];",
            "}",
        ]
    return {
        "OBSERVE": "\n".join(f"  {line}" for line in lines),
        "REPAIR": "\n".join(f"  {line}" for line in repair),
        "STEPS": str(round(contract.control_dt_s * STABILIZER_HZ)),
        "HISTORY": str(history),
        "SCRATCH": str(scratch_bytes),
    }
