"""Faults of Python functions: each operator changes one expression or statement.

What tests cannot or need not notice is left out: texts, logs, plots' looks, annotations, assertions, waiting times,
devices, CUDA, the last round of an approximation, and the arguments of calls that delete files or end processes, which
a fault would make dangerous.
"""

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache


def _both_ways(pairs: dict) -> dict:
    return pairs | {second: first for first, second in pairs.items()}


COMPARED = _both_ways({ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn})
BOUNDARY = _both_ways({ast.Lt: ast.LtE, ast.Gt: ast.GtE})
COMPUTED = _both_ways({ast.Add: ast.Sub, ast.Mult: ast.Div, ast.BitAnd: ast.BitOr}) | {
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
EXCHANGED = _both_ways(
    {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "fmin": "fmax", "any": "all"}
    | {"floor": "ceil", "sin": "cos", "zeros": "ones", "zeros_like": "ones_like"}
)

UNTOUCHED_CALLS = frozenset(
    {"print", "warn", "debug", "info", "warning", "error", "exception", "critical", "log", "add_argument", "UserError"}
    | {"simplefilter", "sleep", "wait", "cast", "flush", "synchronize"}
    | {"legend", "grid", "set_title", "rounded_rectangle"}
    | {"kill", "killpg", "terminate", "rmtree", "unlink", "remove", "rmdir"}
)
"""Calls that only write texts, decorate plots, wait, or are dangerous with a fault: neither changed nor deleted."""

UNTOUCHED_ARGUMENTS = frozenset(
    {"device", "non_blocking", "pin_memory", "daemon", "daemon_threads", "timeout", "timeout_s", "strict", "check"}
    | {"encoding", "errors", "name", "stacklevel", "indent", "help", "description", "exist_ok", "parents", "dtype"}
    | {"title", "label", "figsize", "dpi", "alpha", "linewidth", "fontsize", "color"}
    | {"xlabel", "ylabel", "marker", "markersize", "capsize", "linestyle"}
    | {"fused", "memory_map", "sort_keys", "separators", "thread_name_prefix"}
)
"""Keyword arguments that concern speed, layout, texts or devices."""

KERNEL_DECORATORS = frozenset({"kernel", "func", "jit", "njit"})
"""Of Warp, Triton and Numba: Python only compiles these functions, so no test executes them itself."""

OWN_ERRORS = frozenset({"AssertionError", "NotImplementedError"})
"""Errors that only a mistake in the program raises, like an assertion."""

UNTOUCHED_FUNCTIONS = frozenset({"__repr__", "__str__", "__del__", "__hash__"})
DRAWINGS = ("/viewing.py", "/drawing.py", "/page/", "/video/")
"""Parts of paths of files that draw: their numbers are colours, sizes and places that people judge by eye."""

EPSILON = 1e-5
"""Smaller constants only keep a computation finite."""


@dataclass(frozen=True)
class Fault:
    """One fault: in `file`, the bytes from `start` to `end`, which are `before`, become `after`.

    Tests that execute `covered_by`, `file::qualified name`, can notice it.
    """

    file: str
    function: str
    operator: str
    number: int | str
    line: int
    start: int
    end: int
    before: str
    after: str
    covered_by: str

    def __str__(self) -> str:
        """Name of the fault, which stays when lines move."""
        return f"{self.file}::{self.function}::{self.operator} {self.number}"

    @property
    def change(self) -> str:
        """Line, code before and after, on one line."""
        before, after = (" ".join(code.split()) for code in (self.before, self.after))
        return f"line {self.line}: {before} -> {after}"

    def apply(self, text: str) -> str:
        """Return the file's `text` with the fault."""
        data = text.encode()
        assert data[self.start : self.end].decode() == self.before, f"{self} was generated from another text"
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def generate(file: str, text: str) -> list[Fault]:
    """Return all faults of the functions in `text`, the content of `file`, in the order of the source."""
    source = text.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    numbers: Counter[tuple[str, str]] = Counter()
    faults = []
    module = ast.parse(text)
    if _runs_elsewhere(file, module):
        return []
    for function, node in functions(module):
        if _is_left_out(node):
            continue
        is_kernel = any(_last_name(each) in KERNEL_DECORATORS for each in node.decorator_list)
        covered_by = f"{file}::{'<module>' if is_kernel else function}"
        for operator, place, after in _mutations(node):
            if operator in ("constant", "arithmetic", "argument", "sign") and any(part in file for part in DRAWINGS):
                continue
            assert place.end_lineno is not None
            assert place.end_col_offset is not None
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            numbers[function, operator] += 1
            before = source[start:end].decode()
            number = numbers[function, operator]
            line = place.lineno
            faults.append(Fault(file, function, operator, number, line, start, end, before, after, covered_by))
    return faults


def by_hand(file: str, text: str, entry: dict[str, str]) -> Fault:
    """Return a fault that is written by hand.

    `find` of the `entry` must occur once in the code of `function`; `fault` says what `replace` does there.
    In files other than Python's it must occur once in the file, and `covered_by` is a Python function that calls it.
    Raises ValueError if the code has changed.
    """
    name, find = entry["function"], entry["find"]
    area = _code_of(name, text) if file.endswith(".py") else text
    if (count := area.count(find)) != 1:
        raise ValueError(f"{file}::{name}: {entry['fault']}: expected {find!r} once, there are {count}")
    start = text.index(area) + area.index(find)
    line = text.count("\n", 0, start) + 1
    first = len(text[:start].encode())
    covered_by = entry.get("covered_by", f"{file}::{name}")
    fault, last = entry["fault"], first + len(find.encode())
    return Fault(file, name, "by hand:", fault, line, first, last, find, entry["replace"], covered_by)


def _code_of(name: str, text: str) -> str:
    """The code of all functions called `name`, from the first to the last: a property has several."""
    lines = text.splitlines(keepends=True)
    nodes = [node for function, node in functions(ast.parse(text)) if function == name]
    return "".join(lines[nodes[0].lineno - 1 : nodes[-1].end_lineno]) if nodes else ""


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function below `node` with its qualified name, as in `__qualname__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def _is_left_out(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function only makes texts, is abstract, or needs packages that are not installed."""
    abstract = any(_last_name(each) in ("abstractmethod", "overload") for each in function.decorator_list)
    return abstract or function.name in UNTOUCHED_FUNCTIONS or bool(_missing(ast.walk(function)))


def _missing(nodes: Iterable[ast.AST]) -> set[str]:
    """Packages that import statements among `nodes` need and that are not installed."""
    modules = []
    for node in nodes:
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules.append(node.module)
    return {package for package in (module.split(".")[0] for module in modules) if not _is_installed(package)}


def _runs_elsewhere(file: str, module: ast.Module) -> bool:
    """Whether a file needs packages that are not installed: when it is imported, or as a part of their folder."""
    folders = {part.replace("_", "") for part in file.split("/")[:-1]}
    return bool(_missing(ast.iter_child_nodes(module)) or _missing(ast.walk(module)) & folders)


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _last_name(node: ast.expr) -> str:
    """`f` of `f`, `a.f` and `a.f(x)`; empty for anything else."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _mutations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield operator, place and new code of each fault in the body of `function`, but not in functions inside."""
    returns_bool = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    for statement in function.body:
        yield from _visit(statement, returns_bool)


def _visit(node: ast.AST, returns_bool: bool) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    if _needs_gpu(node):
        return
    if isinstance(node, ast.stmt):
        yield from _statement(node, returns_bool)
    elif isinstance(node, ast.expr):
        yield from ((operator, node, f"({ast.unparse(after)})") for operator, after in _expression(node))
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield from _condition(test)
    for child in _children(node):
        yield from _visit(child, returns_bool)


def _needs_gpu(node: ast.AST) -> bool:
    """Whether `node` is about CUDA, in the code before any block inside: an `if` on it is left out as a whole."""
    head = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else node
    if isinstance(head, ast.For | ast.With | ast.Try | ast.Match):
        return False
    return any(
        (isinstance(part, ast.Attribute) and part.attr == "cuda")
        or (isinstance(part, ast.Constant) and part.value == "cuda")
        for part in ast.walk(head)
    )


def _children(node: ast.AST) -> list[ast.AST]:
    """Parts of `node` in which faults are sought."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Assert() | ast.Raise() | ast.JoinedStr():
            return []
        case ast.Call(func=func) if _last_name(func) in UNTOUCHED_CALLS:
            return []
        case ast.Call(func=func, args=arguments, keywords=keywords):
            # The last argument of a range has an operator of its own.
            arguments = arguments[:0] if _last_name(func) == "range" and len(arguments) < 2 else arguments
            if _last_name(func) == "expand":  # -1 and 1 are the same where a dimension has one element, else 1 fails
                arguments = [each for each in arguments if not _is_integer(each)]
            if _last_name(func) == "reshape":  # NumPy infers the length of a dimension from any negative number
                arguments = [each for each in arguments if not isinstance(each, ast.UnaryOp)]
            values = [each.value for each in keywords if each.arg not in UNTOUCHED_ARGUMENTS]
            return [func, *arguments, *values]
        case ast.For(target=ast.Name("_"), iter=ast.Call(ast.Name("range"), [ast.Name(rounds)])) if rounds.isupper():
            # `for _ in range(HALVINGS)` approximates: one round fewer is less exact, but not wrong
            return [*node.body, *node.orelse]
        case ast.AnnAssign(target=target, value=value):
            return [target, *([value] if value else [])]
        case ast.Subscript(value=value, slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return [value, *(part for part in parts if not _is_integer(part))]
        case ast.UnaryOp(operand=operand) if _is_integer(node):
            return [operand]
        case _:
            return list(ast.iter_child_nodes(node))


def _statement(node: ast.stmt, returns_bool: bool) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.Expr(value=ast.Call(func=func)) if _last_name(func) not in UNTOUCHED_CALLS:
            yield "delete", node, "pass"
        case ast.Raise(exc=ast.Call() | ast.Name() as error) if _last_name(error) in OWN_ERRORS:
            pass
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield "delete", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "delete", node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            if not returns_bool:
                yield "return", node, "return None"
            elif not isinstance(value, ast.Compare | ast.UnaryOp):
                yield "return", node, f"return not ({ast.unparse(value)})"
        case ast.If(test=test) | ast.While(test=test):
            yield from _condition(test)


def _condition(test: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    """Negate a condition, unless another operator does so already."""
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    is_comparison = isinstance(test, ast.Compare) and len(test.ops) == 1
    if not (is_not or is_comparison or isinstance(test, ast.Constant)):
        yield "condition", test, f"(not ({ast.unparse(test)}))"


def _expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield operator and new expression of each fault at `node` itself."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "compare", ast.Compare(left, [COMPARED[type(op)]()], [right])
            if type(op) in BOUNDARY and (_is_count(left) or _is_count(right)):
                yield "boundary", ast.Compare(left, [BOUNDARY[type(op)]()], [right])
        case ast.BoolOp(op=op, values=values):
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED and not (
            _is_text(left) or _is_text(right)
        ):
            yield "arithmetic", ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "sign" if isinstance(node.op, ast.USub) else "condition", operand
        case ast.IfExp(test=test):
            for operator, _, _ in _condition(test):
                yield operator, ast.IfExp(test, node.orelse, node.body)
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float() as value) if value == 0.0 or abs(value) >= EPSILON:
            yield "constant", ast.Constant(2.0 * value if value else 1.0)
        case ast.Subscript(value=value, slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            for number, part in enumerate(parts):
                if _is_integer(part):
                    shifted = [*parts[:number], _shifted(part), *parts[number + 1 :]]
                    yield "index", ast.Subscript(value, ast.Tuple(shifted) if len(parts) > 1 else shifted[0])
        case ast.Call():
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = _last_name(node.func)
    if name in UNTOUCHED_CALLS:
        return
    # zeros(0) and ones(0) have no elements
    is_empty = name in ("zeros", "ones") and [ast.unparse(each) for each in node.args] == ["0"]
    if name in EXCHANGED and not is_empty and isinstance(node.func, ast.Name | ast.Attribute):
        other = EXCHANGED[name]
        func = ast.Name(other) if isinstance(node.func, ast.Name) else ast.Attribute(node.func.value, other)
        yield "exchange", ast.Call(func, node.args, node.keywords)
    if name == "range" and node.args:
        last = min(len(node.args) - 1, 1)
        arguments = [*node.args]
        arguments[last] = ast.BinOp(node.args[last], ast.Sub(), ast.Constant(1))
        yield "range", ast.Call(node.func, arguments, [])
    for number, keyword in enumerate(node.keywords):
        if keyword.arg and keyword.arg not in UNTOUCHED_ARGUMENTS:
            yield "argument", ast.Call(node.func, node.args, [*node.keywords[:number], *node.keywords[number + 1 :]])


def _is_integer(node: ast.AST) -> bool:
    """Whether `node` is a literal integer, perhaps with a minus."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def _shifted(node: ast.expr) -> ast.expr:
    """The literal integer `node`, one further from the start, or from the end if it is negative."""
    value = ast.literal_eval(node)
    return ast.Constant(value - 1 if value < 0 else value + 1)


def _is_count(node: ast.expr) -> bool:
    """Whether `node` is a whole number for sure, so that it may equal what it is compared with.

    0 is left out: where `> 0` guards a loop, a noise or a delay, nothing happens at 0 either way.
    """
    if _is_integer(node):
        return ast.literal_eval(node) != 0
    return isinstance(node, ast.Call) and _last_name(node) == "len"


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr | ast.Constant) and isinstance(getattr(node, "value", ""), str) for node in nodes
    )
