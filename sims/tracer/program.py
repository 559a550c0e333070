"""Programs: functions on named groups of rows, run by torch or traced for the kernels.

Every tensor of a program is [rows, N], a structure of arrays: lane i of a batch reads its values from column i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sims.tracer.arithmetic import Rows
from sims.tracer.graph import Graph, Node, gradients

LANE = "lane"
UNIFORM = "uniform"
WORD = "word"


@dataclass(frozen=True)
class Group:
    """A named tensor of a program.

    Attributes:
        name: the function's keyword, or the key in the dictionary that it returns.
        rows: number of values.
        kind: "lane" ([rows, N] floating point), "uniform" ([rows, 1], the same for the batch) or "word" ([rows, N]
            int32, random keys).
        differentiable: whether gradients flow through it.
    """

    name: str
    rows: int
    kind: str = LANE
    differentiable: bool = False


@dataclass(frozen=True)
class Program:
    """A function from groups of input rows, by keyword, to a dictionary of groups of output rows.

    Attributes:
        name: name of its kernels.
        inputs, outputs: groups of rows.
        function: function from input rows to output rows.
        repeat: names of an input that the output of the same name replaces, and of one with a new value in every
            repetition: adds a kernel that runs many repetitions with the former in registers or cache.
    """

    name: str
    inputs: tuple[Group, ...]
    outputs: tuple[Group, ...]
    function: Callable[..., Mapping[str, Rows]]
    repeat: tuple[str, str] | None = None

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run in plain torch, one operation at a time: the reference of the kernels, also used without a compiler.

        The result has the floating point type of the first "lane" group; autograd sees every operation.
        """
        lanes = [inputs[group.name] for group in self.inputs if group.kind != UNIFORM]
        like = next((inputs[group.name] for group in self.inputs if group.kind == LANE), torch.empty(0))
        rows = {group.name: _rows(group, inputs[group.name]) for group in self.inputs}
        results = self.function(**rows)
        options = {"dtype": like.dtype, "device": lanes[0].device}
        return {
            group.name: torch.stack(
                [torch.as_tensor(value).to(**options).expand(lanes[0].shape[1:]) for value in results[group.name]]
            )
            for group in self.outputs
        }


@dataclass(frozen=True)
class Trace:
    """A program as a graph: output nodes by group, ready for code generation."""

    name: str
    inputs: tuple[Group, ...]
    outputs: tuple[Group, ...]
    results: Mapping[str, list[Node]]
    repeat: tuple[str, str] | None = None


def trace(program: Program) -> Trace:
    """Record the operations of the program's function.

    Raises:
        ValueError: if the function returns other numbers of rows than the program's outputs have.
    """
    graph = Graph()
    rows = {group.name: _nodes(graph, group) for group in program.inputs}
    outputs = program.function(**rows)
    results = {group.name: [graph.wrap(value) for value in outputs[group.name]] for group in program.outputs}
    for group in program.outputs:  # the compiled program would write past the end of its tensor
        if len(results[group.name]) != group.rows:
            raise ValueError(
                f"program {program.name} gives {len(results[group.name])} rows of {group.name}; expected {group.rows}"
            )
    return Trace(program.name, program.inputs, program.outputs, results, program.repeat)


def trace_vjp(program: Program) -> Trace:
    """The vector-Jacobian product of a program.

    Besides the program's inputs it takes `grad_<output>` for each differentiable output; it returns `grad_<input>` for
    each differentiable input.
    """
    forward = trace(program)
    graph = next(iter(forward.results.values()))[0].graph
    differentiable_inputs = [group for group in program.inputs if group.differentiable]
    differentiable_outputs = [group for group in program.outputs if group.differentiable]
    seeds = tuple(replace(group, name=f"grad_{group.name}", differentiable=False) for group in differentiable_outputs)
    inputs = [node for group in differentiable_inputs for node in _nodes(graph, group)]
    outputs = [node for group in differentiable_outputs for node in forward.results[group.name]]
    adjoint = gradients(outputs, [node for group in seeds for node in _nodes(graph, group)], inputs)
    results = {}
    for group in differentiable_inputs:
        results[f"grad_{group.name}"] = adjoint[: group.rows]
        adjoint = adjoint[group.rows :]
    returned = tuple(replace(group, name=f"grad_{group.name}", differentiable=False) for group in differentiable_inputs)
    return Trace(f"{program.name}_vjp", (*program.inputs, *seeds), returned, results)


def _nodes(graph: Graph, group: Group) -> list[Node]:
    return [graph.input(group.name, row, group.kind != UNIFORM) for row in range(group.rows)]


def _rows(group: Group, tensor: Tensor) -> list[Tensor]:
    if group.kind == WORD:
        tensor = tensor.long() & 0xFFFFFFFF
    return list(tensor.unbind(0))
