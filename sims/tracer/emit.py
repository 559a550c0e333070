"""Generates C from traces, whose loop over lanes the compiler vectorises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sims import counter_rng
from sims.tracer.graph import Node
from sims.tracer.program import UNIFORM, WORD, Group, Trace

LANES = 64
"""Lanes of one block of the C kernels; tensors are padded to a multiple, so that every lane runs the same code."""
BLOCKS = 2
"""Number of blocks that repeat steps together, so that their states stay in the fastest cache."""
FUNCTIONS = Path(__file__).with_name("functions.h")
FORMS = {
    "neg": "-{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "sqrt": "sqrtf({0})",
    "log": "log_({0})",
    "sin": "sin_({0})",
    "cos": "cos_({0})",
    "less": "{0} < {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "not": "{0} ^ 1",
    "where": "{0} ? {1} : {2}",
}
TRUTH = ("less", "and", "or", "not")
HEAD = f"#include <math.h>\n#include <string.h>\n#define INLINE static inline\n{counter_rng.C_SOURCE}"


def c_source(traces: list[Trace]) -> str:
    """C code of several programs; each has a block function and an entry point, see `_entry`."""
    head = f"{HEAD}#define LANES {LANES}\n{FUNCTIONS.read_text(encoding='utf-8')}"
    parts = [_block(trace) + _entry(trace) + (_repeated_entry(trace) if trace.repeat else "") for trace in traces]
    return "\n".join([head, *parts])


def _repetition(trace: Trace) -> tuple[str, str, int, int]:
    """Names of the carried tensor and of the one that advances, and their numbers of rows."""
    assert trace.repeat is not None
    rows = {group.name: group.rows for group in trace.inputs}
    return *trace.repeat, *(rows[name] for name in trace.repeat)


def _block(trace: Trace) -> str:
    """C function that runs `blocks` times LANES lanes.

    Every tensor has a pointer to its first lane and a row stride.
    """
    arguments = ", ".join(f"{kind}{name}, int64_t {name}_step" for kind, name, _ in _tensors(trace))
    head = "\n".join(_body(trace, uniform=True))
    body = "\n".join(f"    {line}" for line in _body(trace, uniform=False))
    return f"""static __attribute__((noinline)) void {trace.name}_block(int64_t blocks, {arguments})
{{
{head}
    for (int64_t block = 0; block < blocks; block++)
#pragma GCC ivdep
    for (int64_t i = block * LANES; i < (block + 1) * LANES; i++) {{
{body}
    }}
}}"""


def _entry(trace: Trace) -> str:
    """C function that runs lanes [first, last), multiples of LANES.

    `p` and `steps` are the tensors' pointers and strides.
    """
    arguments = []
    for index, (kind, _, group) in enumerate(_tensors(trace)):
        shift = "" if group.kind == UNIFORM else " + first"
        arguments.append(f"({kind})p[{index}]{shift}, steps[{index}]")
    return f"""
void {trace.name}(int64_t first, int64_t last, void *const *p, const int64_t *steps)
{{
    {trace.name}_block((last - first) / LANES, {", ".join(arguments)});
}}"""


def _repeated_entry(trace: Trace) -> str:
    """C function like that of `_entry`, which runs each block `count` times, with the carried tensor in the cache."""
    carried, sequence, rows, advance = _repetition(trace)
    arguments = []
    position = {}
    for index, (kind, name, group) in enumerate(_tensors(trace)):
        position[name] = index
        shift = "" if group.kind == UNIFORM else " + i"
        if name == sequence:
            shift += f" + k * {advance} * steps[{index}]"
        is_carried = name in (carried, f"out_{carried}")
        arguments.append("kept, WIDE" if is_carried else f"({kind})p[{index}]{shift}, steps[{index}]")
    source = position[carried]
    target = position[f"out_{carried}"]
    return f"""
void {trace.name}_repeated(int64_t first, int64_t last, int64_t count, void *const *p, const int64_t *steps)
{{
    enum {{ WIDE = {BLOCKS} * LANES }};
    float kept[{rows} * WIDE];
    for (int64_t i = first; i < last; i += WIDE) {{
        const int64_t blocks = (last - i < WIDE ? last - i : WIDE) / LANES, bytes = sizeof(float) * blocks * LANES;
        for (int row = 0; row < {rows}; row++)
            memcpy(kept + row * WIDE, (const float *)p[{source}] + row * steps[{source}] + i, bytes);
        for (int64_t k = 0; k < count; k++)
            {trace.name}_block(blocks, {", ".join(arguments)});
        for (int row = 0; row < {rows}; row++)
            memcpy((float *)p[{target}] + row * steps[{target}] + i, kept + row * WIDE, bytes);
    }}
}}"""


def _body(trace: Trace, uniform: bool) -> Iterator[str]:
    """Statements for values shared by the batch (`uniform`), or for all others, outputs at the end."""
    needed = _reachable(trace)
    for node in needed:
        if node.op != "constant" and node.lane != uniform:
            kind = "int" if node.op in TRUTH else "uint32_t" if _is_word(trace, node) else "float"
            yield f"    const {kind} t{node.index} = {_expression(trace, node)};"
    if not uniform:
        for group in trace.outputs:
            name = f"out_{group.name}"
            for row, node in enumerate(trace.results[group.name]):
                yield f"    {name}[{row} * {name}_step + i] = {_operand(node)};"


def _reachable(trace: Trace) -> list[Node]:
    """Nodes on which the outputs depend, in recorded order."""
    reachable: set[Node] = set()
    stack = [node for group in trace.outputs for node in trace.results[group.name]]
    while stack:
        node = stack.pop()
        if node not in reachable:
            reachable.add(node)
            stack += node.args
    return sorted(reachable, key=lambda node: node.index)


def _expression(trace: Trace, node: Node) -> str:
    if node.op == "input":
        name, row = node.data
        group = next(group for group in trace.inputs if group.name == name)
        where = f"{row}" if group.kind == UNIFORM else f"{row} * {name}_step + i"
        return f"{name}[{where}]"
    operands = [_operand(arg) for arg in node.args]
    if node.op == "uniform":
        return f"uniform_({', '.join(operands)}, {node.data[0]}u)"
    return FORMS[node.op].format(*operands)


def _operand(node: Node) -> str:
    if node.constant is None:
        return f"t{node.index}"
    text = repr(node.constant)
    return f"({text}f)" if "." in text or "e" in text else f"({text}.0f)"


def _is_word(trace: Trace, node: Node) -> bool:
    return node.op == "input" and any(g.name == node.data[0] and g.kind == WORD for g in trace.inputs)


def _tensors(trace: Trace) -> list[tuple[str, str, Group]]:
    """C type, name and group of every tensor; an output may have the name of an input."""
    inputs = [("const uint32_t *" if g.kind == WORD else "const float *", g.name, g) for g in trace.inputs]
    return inputs + [("float *", f"out_{g.name}", g) for g in trace.outputs]
