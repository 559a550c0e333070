"""Generates policy.h and policy.c of an exported network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.export.conditions import Conditions
from embodied.export.network import Network, elements
from real_robot.firmware.constants import literal
from real_robot.firmware.generator import Generator

STATUS = {
    "POLICY_OK": "all is well",
    "POLICY_WEIGHTS_DAMAGED": "policy_check: the constants are not those that were exported",
    "POLICY_OUTPUT_DIFFERS": "policy_check: the stored observation does not give the stored action",
    "POLICY_NOT_FINITE": "policy_act: an observation is infinite or not a number; the action is mid-range",
    "POLICY_FAST_MATH": "policy_check: the compiler removed the tests for infinity and not a number",
}


@dataclass(frozen=True)
class Source:
    """Text of the two files, the checksum of the constants, and memory in bytes."""

    header: str
    code: str
    crc32: int
    constant_bytes: int
    static_bytes: int
    scratch_bytes: int


def write_source(
    network: Network,
    check_input: Tensor,
    check_tolerance: float,
    weights_sha256: str | None = None,
    conditions: Conditions | None = None,
    margins: Mapping[str, str] | None = None,
) -> Source:
    """Generate C of `network`; `check_input` [I] and its action are the pair that is checked at boot.

    They must agree within `check_tolerance` half action ranges. The header records `weights_sha256`, the weights'
    checksum, the `conditions` of training, and measured `margins`.
    """
    generator = Generator(network)
    check_output = first_action(network, check_input)
    generator.constants.floats("check_input", check_input)
    generator.constants.floats("check_output", check_output)
    generator.constants.floats("check_tolerance", check_tolerance * network.limits.half_range)
    if network.initial_memory is not None:
        generator.constants.floats("initial_memory", network.initial_memory)
    memory = 0 if network.initial_memory is None else len(network.initial_memory)
    return Source(
        header="\n".join(_header(network, memory, weights_sha256, conditions, margins or {})) + "\n",
        code="\n".join(_code(generator, memory)) + "\n",
        crc32=generator.constants.crc32,
        constant_bytes=len(generator.constants.bytes),
        static_bytes=4 * memory,
        scratch_bytes=generator.scratch_bytes,
    )


@torch.no_grad()
def first_action(network: Network, observation: Tensor) -> Tensor:
    """Action [A] for `observation` [I] at the start of an episode."""
    initial = network.initial_memory
    result = network(observation.unsqueeze(0), None if initial is None else initial.unsqueeze(0))
    return (result if isinstance(result, Tensor) else result[0]).squeeze(0)


def macro(name: str) -> str:
    """Convert `name` to a part of a C macro's name."""
    return re.sub(r"\W+", "_", name).strip("_").upper()


def _header(
    network: Network, memory: int, weights_sha256: str | None, conditions: Conditions | None, margins: Mapping[str, str]
) -> Iterator[str]:
    """Lines of policy.h."""
    contract = network.contract
    yield "/* A policy as C99, exported by embodied-rl. No heap, no library."
    yield f"   SHA-256 of its weights: {weights_sha256}\n" if weights_sha256 else ""
    yield from _prepared(conditions, margins)
    yield f"   Every {contract.control_dt_s * contract.executed:g} s the action follows from the observation:\n"
    yield from _table("observation", contract.observation)
    yield ""
    yield from _table("action", {"action": contract.action}, contract.executed)
    if contract.executed > 1:
        yield f"\n   It is {contract.executed} actions, one after the other, each for {contract.control_dt_s:g} s."
    yield from _usage(memory)
    yield "#ifndef POLICY_H\n#define POLICY_H\n"
    yield f"#define POLICY_INPUTS {network.inputs}"
    yield f"#define POLICY_OUTPUTS {network.outputs}"
    yield f"#define POLICY_MEMORY {memory} /* floats kept between calls */"
    yield f"#define POLICY_CONTROL_DT_S {literal(contract.control_dt_s)} /* time between actions */"
    yield f"#define POLICY_ACTIONS {contract.executed} /* actions of one call */"
    first = -1.0 if conditions is None else conditions.first_action
    yield f"#define POLICY_FIRST_ACTION {literal(first)} /* of past actions when it begins, as in training */"
    yield "\n/* First element of each part of the observation. */"
    yield from _offsets(contract)
    yield ""
    for value, (name, meaning) in enumerate(STATUS.items()):
        yield f"#define {name} {value} /* {meaning} */"
    yield '\n#ifdef __cplusplus\nextern "C" {\n#endif\n'
    yield "int policy_check(void);"
    yield "void policy_reset(void);"
    yield "int policy_act(const float observation[POLICY_INPUTS], float action[POLICY_OUTPUTS]);"
    yield "\n#ifdef __cplusplus\n}\n#endif\n\n#endif"


def _prepared(conditions: Conditions | None, margins: Mapping[str, str]) -> Iterator[str]:
    """Lines of the header's comment: training conditions, and measured margins."""
    if conditions is not None:
        yield "   Trained for:"
        yield from (f"     {line}" for line in conditions.trained_for)
        yield f"   {conditions.caution.capitalize()}." if conditions.caution else ""
        if margins:
            yield "   At least 95% of simulated episodes succeed:"
        elif conditions.measurable:
            yield "   Margins were not measured: python evaluate.py checkpoint=RUN margins=true, then export again."
    yield from (f"     {name}: {words}" for name, words in margins.items())
    yield ""


def _usage(memory: int) -> Iterator[str]:
    yield "\n   Call policy_check() at boot, and do not start unless it returns POLICY_OK."
    if memory:
        yield "   policy_reset() forgets: call it when an episode begins. policy_check() does so too."
    else:
        yield "   policy_reset() does nothing: this policy remembers nothing."
    yield "   policy_act() is for one task at a time. Its action is always within the limits above. */"


def _table(title: str, specs: dict[str, TensorSpec], repeats: int = 1) -> Iterator[str]:
    """Lines of a comment: index, name, unit, frame and limits of each element."""
    rows = [
        (name if repeats == 1 else f"{name} {repeat}", spec.unit, spec.frame, _limits(spec, column % spec.shape[-1]))
        for repeat in range(repeats)
        for key, spec in specs.items()
        for column, name in enumerate(elements(key, spec))
    ]
    head = (title, "unit", "frame", "limits")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for index, row in enumerate((head, *rows)):
        number = "     " if index == 0 else f"{index - 1:5d}"
        line = "  ".join(map(str.ljust, row, widths)).rstrip()
        yield f"   {number}  {line}".replace("*/", "* /")  # a unit must not end the comment


def _limits(spec: TensorSpec, column: int) -> str:
    return f"{spec.low[column]:g} to {spec.high[column]:g}" if spec.low and spec.high else ""


def _offsets(contract: Contract) -> Iterator[str]:
    start = 0
    for key, spec in contract.observation.items():
        yield f"#define POLICY_OBSERVATION_{macro(key)} {start}"
        start += len(elements(key, spec))


def _code(generator: Generator, memory: int) -> Iterator[str]:
    """Lines of policy.c."""
    constants = generator.constants
    yield '/* Written by embodied-rl; see policy.h. */\n#include "policy.h"\n\n#include "policy_kernels.h"\n'
    yield "/* Everything that was learned. Checked at boot by its checksum. */"
    yield from constants.source()
    yield f"\nstatic const uint32_t constants_crc32 = 0x{constants.crc32:08x}u;\n"
    if memory:
        yield "static float kept[POLICY_MEMORY];\n"
    arguments = "const float *memory, float *next, " if memory else ""
    yield f"static void infer(const float *observation, {arguments}float *action)\n{{"
    yield from _indented([*generator.declarations(), *generator.lines])
    yield "}\n"
    yield _MIDDLE.replace("@MIDDLE@", generator.middle)
    yield _WITH_MEMORY if memory else _WITHOUT_MEMORY
    yield _CHECK.replace("@INFER@", _INFER_WITH_MEMORY if memory else _INFER)


def _indented(lines: list[str]) -> Iterator[str]:
    depth = 1
    for line in lines:
        depth -= line == "}"
        yield "  " * depth + line
        depth += line.endswith("{")


_MIDDLE = """\
static void middle(float *action)
{
  for (int i = 0; i < POLICY_OUTPUTS; i++) {
    action[i] = @MIDDLE@[i];
  }
}
"""
_WITHOUT_MEMORY = """\
void policy_reset(void)
{
}

int policy_act(const float observation[POLICY_INPUTS], float action[POLICY_OUTPUTS])
{
  if (!policy_finite(observation, POLICY_INPUTS)) {
    middle(action);
    return POLICY_NOT_FINITE;
  }
  infer(observation, action);
  return POLICY_OK;
}
"""
_WITH_MEMORY = """\
void policy_reset(void)
{
  for (int i = 0; i < POLICY_MEMORY; i++) {
    kept[i] = constants.initial_memory[i];
  }
}

int policy_act(const float observation[POLICY_INPUTS], float action[POLICY_OUTPUTS])
{
  float next[POLICY_MEMORY];
  if (!policy_finite(observation, POLICY_INPUTS)) { /* and the memory stays as it is */
    middle(action);
    return POLICY_NOT_FINITE;
  }
  infer(observation, kept, next, action);
  for (int i = 0; i < POLICY_MEMORY; i++) {
    kept[i] = next[i];
  }
  return POLICY_OK;
}
"""
_INFER = "  infer(constants.check_input, action);"
_INFER_WITH_MEMORY = """\
  float next[POLICY_MEMORY];
  infer(constants.check_input, constants.initial_memory, next, action);"""
_CHECK = """\
int policy_check(void)
{
  float action[POLICY_OUTPUTS];
  policy_reset();
  if (policy_crc32(&constants, sizeof constants) != constants_crc32) {
    return POLICY_WEIGHTS_DAMAGED;
  }
  for (int i = 0; i < 2; i++) {
    volatile policy_word word = {0.0f}; /* volatile: the compiler does not know what it tests */
    word.bits = i == 0 ? 0x7fc00000u : 0x7f800000u; /* not a number, infinity */
    const float value = word.value;
    if (policy_finite(&value, 1)) {
      return POLICY_FAST_MATH;
    }
  }
@INFER@
  for (int i = 0; i < POLICY_OUTPUTS; i++) {
    const float difference = action[i] - constants.check_output[i];
    if (!(difference <= constants.check_tolerance[i] && -difference <= constants.check_tolerance[i])) {
      return POLICY_OUTPUT_DIFFERS;
    }
  }
  return POLICY_OK;
}"""
