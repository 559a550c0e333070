"""Programs start without Dynamo, and what compiles has what tensordict told it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def said(code: str) -> list[str]:
    """The lines that `code` prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_compiles_nothing_does_not_wait_for_the_compiler():
    """Programs: `test_openmp`."""
    modules = "embodied.command_line.program, policies.flow"
    code = f"import {modules}\nprint('tensordict' in sys.modules, 'torch._dynamo' in sys.modules)"
    assert said(code) == ["True False"]


@pytest.mark.parametrize(("first", "late"), [("embodied", True), ("tensordict", False), ("torch._dynamo", False)])
def test_tensordict_marks_its_functions_for_the_compiler(first: str, late: bool):
    code = f"""
import torch
own = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
import {first}
from embodied import without_dynamo
from tensordict import TensorDict, base, utils
print('torch._dynamo' in sys.modules)
assert own == (torch.compiler.allow_in_graph, torch.compiler.assume_constant_result)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
from torch._dynamo import trace_rules
print(trace_rules.is_callable_allowed(base._foreach_copy_compiled), utils._lock_warn._dynamo_marked_constant)
@torch.compile(backend="eager", fullgraph=True)
def twice(tree):
    return tree.apply(lambda leaf: 2 * leaf)
print(twice(TensorDict({{"a": torch.ones(3)}}, batch_size=[3]))["a"].tolist())
"""
    assert said(code) == [str(not late), "True True", "[2.0, 2.0, 2.0]"]


def test_an_import_that_fails_is_the_one_that_fails():
    code = """
from embodied import without_dynamo
sys.modules["torch"] = None
try:
    import tensordict
except ImportError as error:
    print(error)
"""
    assert said(code) == ["import of torch halted; None in sys.modules"]
