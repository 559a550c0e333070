"""Complete example programs for an exported policy: a bare STM32F405 and a Crazyflie app."""

from __future__ import annotations

import shutil
from pathlib import Path

from embodied.contract import Contract, TensorSpec

C = Path(__file__).with_name("c")
STABILIZER_HZ = 1000
ROTORS = 4
WRITTEN = "written"
POSITION = [f"observation[next++] = bounded(state->position.{axis} - setpoint->position.{axis});" for axis in "xyz"]
VELOCITY = [f"observation[next++] = state->velocity.{axis};" for axis in "xyz"]
ANGULAR_VELOCITY = [f"observation[next++] = sensors->gyro.{axis} * RADIANS_PER_DEGREE;" for axis in "xyz"]
ROTATION = [
    "const quaternion_t q = state->attitudeQuaternion;",
    "observation[next++] = 1.0f - 2.0f * (q.y * q.y + q.z * q.z);",
    "observation[next++] = 2.0f * (q.x * q.y - q.w * q.z);",
    "observation[next++] = 2.0f * (q.x * q.z + q.w * q.y);",
    "observation[next++] = 2.0f * (q.x * q.y + q.w * q.z);",
    "observation[next++] = 1.0f - 2.0f * (q.x * q.x + q.z * q.z);",
    "observation[next++] = 2.0f * (q.y * q.z - q.w * q.x);",
    "observation[next++] = 2.0f * (q.x * q.z - q.w * q.y);",
    "observation[next++] = 2.0f * (q.y * q.z + q.w * q.x);",
    "observation[next++] = 1.0f - 2.0f * (q.x * q.x + q.y * q.y);",
]
STATE = {
    "position": (TensorSpec((3,), unit="m", frame="world"), POSITION),
    "rotation": (TensorSpec((9,), unit="1", frame="world"), ROTATION),
    "velocity": (TensorSpec((3,), unit="m/s", frame="world"), VELOCITY),
    "angular_velocity": (TensorSpec((3,), unit="rad/s", frame="body"), ANGULAR_VELOCITY),
}
"""Entries of the firmware's state estimate: shape, unit, frame, and the C code that fills them in."""
HISTORIES = ("previous_action", "action_history")
"""Observations of past actions, oldest first."""


def write(contract: Contract, scratch_bytes: int, directory: Path) -> dict[str, str]:
    """Write the examples that fit `contract` into `directory`; returns "written" for each, or why it does not fit."""
    shutil.copytree(C / "stm32f405", directory / "stm32f405")
    if reason := _no_crazyflie(contract):
        return {"stm32f405": WRITTEN, "crazyflie": reason}
    shutil.copytree(C / "crazyflie", directory / "crazyflie")
    path = directory / "crazyflie" / "src" / "controller_policy.c"
    filled = path.read_text()
    for name, text in _crazyflie(contract, scratch_bytes).items():
        filled = filled.replace(f"@{name}@", text)
    path.write_text(filled)
    return {"stm32f405": WRITTEN, "crazyflie": WRITTEN}


def _no_crazyflie(contract: Contract) -> str | None:
    """Why the firmware can't fill the observation or apply the action, or None."""
    action, steps = contract.action, contract.control_dt_s * STABILIZER_HZ
    if action.shape != (ROTORS,) or (action.low, action.high) != ((-1.0,) * ROTORS, (1.0,) * ROTORS):
        return f"expected {ROTORS} rotor set-points between -1 and 1, got {action.shape} {action.low} {action.high}"
    if contract.executed != 1 or abs(steps - round(steps)) > 1e-6 or round(steps) < 1:
        return f"expected one action every whole millisecond, got {contract.executed} at {contract.control_dt_s} s"
    for key, spec in contract.observation.items():
        if key in HISTORIES and len(spec.shape) == 1 and spec.shape[0] % ROTORS == 0:
            continue
        known = STATE[key][0] if key in STATE else None
        if known is None or (known.shape, known.unit, known.frame) != (spec.shape, spec.unit, spec.frame):
            return f"the state estimate has no {key} {spec.shape} in {spec.unit} {spec.frame}"
    return None


def _crazyflie(contract: Contract, scratch_bytes: int) -> dict[str, str]:
    lines, repair, history = [], [], 1
    for key, spec in contract.observation.items():
        if key in STATE:
            lines += STATE[key][1]
            part = f"POLICY_OBSERVATION_{key.upper()}, {spec.shape[0]}"
            repair.append(f"whole = repaired(observation, {part}) && whole;")
            continue
        history = max(history, spec.shape[0] // ROTORS)
        lines += [
            f"for (int i = 0; i < {spec.shape[0]}; i++) {{ /* {key} */",
            f"  observation[next++] = history[@HISTORY@ - {spec.shape[0] // ROTORS} + i / POLICY_OUTPUTS]"
            "[i % POLICY_OUTPUTS];",
            "}",
        ]
    return {
        "OBSERVE": "\n".join(f"  {line}" for line in lines),
        "REPAIR": "\n".join(f"  {line}" for line in repair),
        "STEPS": str(round(contract.control_dt_s * STABILIZER_HZ)),
        "HISTORY": str(history),
        "SCRATCH": str(scratch_bytes),
    }
