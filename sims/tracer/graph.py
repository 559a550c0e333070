"""A graph of scalar operations, recorded from a function.

Calling a function on `Node`s records its operations. Equal operations become one node, constants are folded, and
multiplications by zero or one are removed, so that effects that are off cost nothing in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Union

Operand = Union["Node", float, int]
Key = tuple[object, ...]

UNARY: dict[str, Callable[[float], float]] = {
    "neg": lambda a: -a,
    "sqrt": math.sqrt,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
}
BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


class Node:
    """One value of a graph: an input, a constant or an operation on earlier nodes.

    `lane` is False if the value is the same for the whole batch: kernels compute it once, outside their loop.
    """

    __slots__ = ("args", "data", "graph", "index", "lane", "op")

    def __init__(self, graph: Graph, op: str, args: tuple[Node, ...], data: tuple[object, ...], lane: bool) -> None:
        self.graph = graph
        self.op = op
        self.args = args
        self.data = data
        self.lane = lane
        self.index = len(graph.nodes)
        graph.nodes.append(self)

    @property
    def constant(self) -> float | None:
        """Value of a constant node; None for others."""
        return float(self.data[0]) if self.op == "constant" else None  # type: ignore[arg-type]

    def __add__(self, other: Operand) -> Node:
        return self.graph.binary("add", self, other)

    def __radd__(self, other: Operand) -> Node:
        return self.graph.binary("add", other, self)

    def __sub__(self, other: Operand) -> Node:
        return self.graph.binary("sub", self, other)

    def __rsub__(self, other: Operand) -> Node:
        return self.graph.binary("sub", other, self)

    def __mul__(self, other: Operand) -> Node:
        return self.graph.binary("mul", self, other)

    def __rmul__(self, other: Operand) -> Node:
        return self.graph.binary("mul", other, self)

    def __truediv__(self, other: Operand) -> Node:
        return self.graph.binary("div", self, other)

    def __rtruediv__(self, other: Operand) -> Node:
        return self.graph.binary("div", other, self)

    def __pow__(self, power: float) -> Node:
        if power != 0.5:
            raise ValueError(f"expected the power 0.5, got {power}; write products out")
        return self.sqrt()

    def __neg__(self) -> Node:
        return self.graph.unary("neg", self)

    def __lt__(self, other: Operand) -> Node:
        return self.graph.node("less", self, self.graph.wrap(other))

    def __gt__(self, other: Operand) -> Node:
        return self.graph.node("less", self.graph.wrap(other), self)

    def __ge__(self, other: Operand) -> Node:
        return ~(self < other)

    def __le__(self, other: Operand) -> Node:
        return ~(self > other)

    def __and__(self, other: Node) -> Node:
        return self.graph.node("and", self, other)

    def __or__(self, other: Node) -> Node:
        return self.graph.node("or", self, other)

    def __invert__(self) -> Node:
        return self.graph.node("not", self)

    def sqrt(self) -> Node:
        """Square root."""
        return self.graph.unary("sqrt", self)

    def log(self) -> Node:
        """Natural logarithm."""
        return self.graph.unary("log", self)

    def sin(self) -> Node:
        """Sine of an angle in rad."""
        return self.graph.unary("sin", self)

    def cos(self) -> Node:
        """Cosine of an angle in rad."""
        return self.graph.unary("cos", self)


class Graph:
    """Nodes in an order in which they can be computed."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._nodes_by_key: dict[Key, Node] = {}

    def input(self, group: str, row: int, lane: bool) -> Node:
        """Row `row` of the input tensor `group`."""
        return self._make("input", (), (group, row), lane)

    def wrap(self, value: Operand) -> Node:
        """`value` as a node of this graph."""
        return value if isinstance(value, Node) else self._make("constant", (), (float(value),), False)

    def node(self, op: str, *args: Node, data: tuple[object, ...] = ()) -> Node:
        """Node of operation `op` on `args`, reused if it exists."""
        return self._make(op, args, data, any(arg.lane for arg in args))

    def unary(self, op: str, value: Operand) -> Node:
        """Node of `op` of one value, folded if it is constant."""
        a = self.wrap(value)
        if a.constant is not None:
            return self.wrap(UNARY[op](a.constant))
        if op == "neg" and a.op == "neg":
            return a.args[0]
        return self.node(op, a)

    def binary(self, op: str, first: Operand, second: Operand) -> Node:
        """Node of `op` of two values, simplified if one of them is constant."""
        a = self.wrap(first)
        b = self.wrap(second)
        if a.constant is not None and b.constant is not None:
            return self.wrap(BINARY[op](a.constant, b.constant))
        return {"add": self._add, "sub": self._sub, "mul": self._mul, "div": self._div}[op](a, b)

    def where(self, condition: Node, first: Operand, second: Operand) -> Node:
        """`first` where `condition` holds, else `second`."""
        a = self.wrap(first)
        b = self.wrap(second)
        return a if a is b else self.node("where", condition, a, b)

    def uniform(self, first: Node, second: Node, counter: Operand, index: int) -> Node:
        """A number in (0, 1); see `arithmetic.uniform`."""
        return self.node("uniform", first, second, self.wrap(counter), data=(index,))

    def _make(self, op: str, args: tuple[Node, ...], data: tuple[object, ...], lane: bool) -> Node:
        key = (op, *(arg.index for arg in args), *map(repr, data))  # repr, because 0.0 and -0.0 are equal as numbers
        if key not in self._nodes_by_key:
            self._nodes_by_key[key] = Node(self, op, args, data, lane)
        return self._nodes_by_key[key]

    def _add(self, a: Node, b: Node) -> Node:
        if a.constant == 0.0:
            return b
        if b.constant == 0.0:
            return a
        if b.op == "neg":
            return self._sub(a, b.args[0])
        if a.op == "neg":
            return self._sub(b, a.args[0])
        return self.node("add", *_ordered(a, b))

    def _sub(self, a: Node, b: Node) -> Node:
        if b.constant == 0.0:
            return a
        if a.constant == 0.0:
            return self.unary("neg", b)
        if b.op == "neg":
            return self._add(a, b.args[0])
        return self.wrap(0.0) if a is b else self.node("sub", a, b)

    def _mul(self, a: Node, b: Node) -> Node:
        a, b = (b, a) if b.constant is not None else (a, b)
        if a.constant == 0.0 or a.constant == 1.0:
            return b if a.constant else a
        if a.constant == -1.0:
            return self.unary("neg", b)
        if a.op == "neg":
            return self.unary("neg", self._mul(a.args[0], b))
        if b.op == "neg":
            return self.unary("neg", self._mul(a, b.args[0]))
        if a.constant is not None and b.op == "mul" and b.args[0].constant is not None:
            return self.binary("mul", a.constant * b.args[0].constant, b.args[1])
        return self.node("mul", *((a, b) if a.constant is not None else _ordered(a, b)))

    def _div(self, a: Node, b: Node) -> Node:
        if a.constant == 0.0 or b.constant == 1.0:
            return a
        if b.constant is not None:
            return self._mul(self.wrap(1.0 / b.constant), a)
        if a.lane and not b.lane:  # the reciprocal is computed once for the whole batch
            return self._mul(a, self.node("div", self.wrap(1.0), b))
        return self.node("div", a, b)


def _ordered(a: Node, b: Node) -> tuple[Node, Node]:
    """Arguments of a commutative operation in a fixed order, so that a + b and b + a are one node."""
    return (a, b) if a.index <= b.index else (b, a)


def gradients(outputs: list[Node], seeds: list[Node], inputs: list[Node]) -> list[Node]:
    """Reverse mode: the derivative of sum(seeds * outputs) by each of `inputs`, as nodes of the same graph."""
    graph = inputs[0].graph
    adjoint: dict[Node, Node] = {}

    def add(node: Node, value: Node) -> None:
        adjoint[node] = adjoint[node] + value if node in adjoint else value

    for output, seed in zip(outputs, seeds, strict=True):
        add(output, seed)
    for node in reversed(graph.nodes[: max(output.index for output in outputs) + 1]):
        if node in adjoint and node.args:
            for arg, value in _pull_back(node, adjoint[node]):
                add(arg, value)
    return [adjoint.get(node, graph.wrap(0.0)) for node in inputs]


def _pull_back(node: Node, g: Node) -> list[tuple[Node, Node]]:
    """Contributions of `node`, with adjoint `g`, to the adjoints of its arguments."""
    a, b = (*node.args, node)[:2]
    if node.op == "where":
        condition, first, second = node.args
        zero = node.graph.wrap(0.0)
        where = node.graph.where
        return [(first, where(condition, g, zero)), (second, where(condition, zero, g))]
    rules: dict[str, Callable[[], list[tuple[Node, Node]]]] = {
        "neg": lambda: [(a, -g)],
        "add": lambda: [(a, g), (b, g)],
        "sub": lambda: [(a, g), (b, -g)],
        "mul": lambda: [(a, g * b), (b, g * a)],
        "div": lambda: [(a, g / b), (b, -(g / b) * node)],
        "sqrt": lambda: [(a, g * 0.5 / node)],
        "log": lambda: [(a, g / a)],
        "sin": lambda: [(a, g * a.cos())],
        "cos": lambda: [(a, -(g * a.sin()))],
    }
    return rules[node.op]() if node.op in rules else []  # comparisons and draws have no derivatives
