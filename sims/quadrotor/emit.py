"""Source code from traces: C whose loop over lanes the compiler vectorises, and the same body as a CUDA kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sims.quadrotor.graph import Node
from sims.quadrotor.program import UNIFORM, WORD, Group, Trace

LANES = 64
"""Lanes of one block of the C kernels; tensors are padded to a multiple, so that every lane runs the same code."""
THREADS = 128
"""Threads of a CUDA block."""
FUNCTIONS = Path(__file__).with_name("functions.h")
FORMS = {
    "neg": "-{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "sqrt": "sqrtf({0})", "log": "log_({0})", "sin": "sin_({0})", "cos": "cos_({0})", "less": "{0} < {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "not": "{0} ^ 1", "where": "{0} ? {1} : {2}",
}  # fmt: skip
TRUTH = ("less", "and", "or", "not")
DEVICE = "#define INLINE __device__ __forceinline__\n"
HOST = "#include <math.h>\n#include <stdint.h>\n#include <string.h>\n#define INLINE static inline\n"


def c_source(traces: list[Trace]) -> str:
    """C of several programs. Each gets a block function, and one to be called: see `_entry`."""
    head = f"{HOST}#define LANES {LANES}\n{FUNCTIONS.read_text()}"
    return "\n".join([head, *(f"{_block(trace)}\n{_entry(trace)}" for trace in traces)])


def cuda_source(trace: Trace) -> str:
    """One CUDA kernel: lane i is thread i, `step` the row stride of all tensors, pointers in the program's order."""
    arguments = ", ".join(kind + name for kind, name, _ in _tensors(trace))
    lines = "\n".join(_body(trace, uniform=False, stride="step"))
    head = "\n".join(_body(trace, uniform=True, stride="step"))
    return f"""{DEVICE}typedef unsigned int uint32_t;
typedef int int32_t;
{FUNCTIONS.read_text()}
extern "C" __global__ void {trace.name}({arguments}, int lanes)
{{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, step = lanes;
    if (i >= lanes) return;
{head}
{lines}
}}
"""


def _block(trace: Trace) -> str:
    """Runs LANES lanes; every tensor has a pointer to its first lane and a row stride."""
    arguments = ", ".join(f"{kind}{name}, int64_t {name}_step" for kind, name, _ in _tensors(trace))
    head = "\n".join(_body(trace, uniform=True))
    body = "\n".join(f"    {line}" for line in _body(trace, uniform=False))
    return f"""static __attribute__((noinline)) void {trace.name}_block({arguments})
{{
{head}
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) {{
{body}
    }}
}}"""


def _entry(trace: Trace) -> str:
    """Runs lanes [first, last), multiples of LANES; `p` and `steps` hold pointers and row strides of all tensors."""
    arguments = []
    for index, (kind, _, group) in enumerate(_tensors(trace)):
        shift = "" if group.kind == UNIFORM else " + i"
        arguments.append(f"({kind})p[{index}]{shift}, steps[{index}]")
    return f"""void {trace.name}(int64_t first, int64_t last, void *const *p, const int64_t *steps)
{{
    for (int64_t i = first; i < last; i += LANES)
        {trace.name}_block({", ".join(arguments)});
}}"""


def _body(trace: Trace, uniform: bool, stride: str = "") -> Iterator[str]:
    """Statements for what is the same for the batch (`uniform`), or for everything else, outputs at the end."""
    needed = _reachable(trace)
    for node in needed:
        if node.op != "constant" and node.lane != uniform:
            kind = "int" if node.op in TRUTH else "uint32_t" if _is_word(trace, node) else "float"
            yield f"    const {kind} t{node.index} = {_expression(trace, node, stride)};"
    if not uniform:
        for group in trace.outputs:
            name = f"out_{group.name}"
            for row, node in enumerate(trace.results[group.name]):
                yield f"    {name}[{row} * {stride or f'{name}_step'} + i] = {_operand(node)};"


def _reachable(trace: Trace) -> list[Node]:
    """What the outputs need, in the order in which it was recorded."""
    found: set[Node] = set()
    stack = [node for group in trace.outputs for node in trace.results[group.name]]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.args
    return sorted(found, key=lambda node: node.index)


def _expression(trace: Trace, node: Node, stride: str) -> str:
    if node.op == "input":
        name, row = node.data
        group = next(group for group in trace.inputs if group.name == name)
        where = f"{row}" if group.kind == UNIFORM else f"{row} * {stride or f'{name}_step'} + i"
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
    given = [("const uint32_t *" if g.kind == WORD else "const float *", g.name, g) for g in trace.inputs]
    return given + [("float *", f"out_{g.name}", g) for g in trace.outputs]
