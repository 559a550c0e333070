"""Recording, simplifying and differentiating scalar operations."""

import math

import pytest
import torch

from sims.tracer.arithmetic import clip, gaussians, sqrt, uniform, where
from sims.tracer.graph import Graph, gradients
from sims.tracer.program import Group, Program, trace, trace_vjp


def inputs(count):
    graph = Graph()
    return [graph.input("x", row, True) for row in range(count)]


def test_equal_operations_are_one_node():
    a, b = inputs(2)
    assert a * b is b * a
    assert (a + b) - a is (b + a) - a
    assert a - b is not b - a


def test_constants_fold_and_neutral_operations_vanish():
    (a,) = inputs(1)
    graph = a.graph
    assert a * 1.0 is a
    assert a + 0.0 is a
    assert 0.0 - (-a) is a
    assert (a * 0.0).constant == 0.0
    assert (graph.wrap(3.0) * 2.0 - 1.0).constant == 5.0
    assert 2.0 * (3.0 * a) is 6.0 * a
    assert a / 4.0 is 0.25 * a
    assert a + (-a * 2.0) is a - 2.0 * a
    assert where(a < 1.0, a, a) is a


def test_what_is_the_same_for_the_batch_is_known():
    graph = Graph()
    lane, shared = graph.input("x", 0, True), graph.input("p", 0, False)
    assert not (1.0 / (shared * shared)).lane
    assert (lane * shared).lane
    quotient = lane / shared  # by a reciprocal that is taken once
    assert quotient.op == "mul"
    assert any(not arg.lane and arg.op == "div" for arg in quotient.args)


def everything(a, b):
    """A function of every differentiable operation."""
    c = a * b - sqrt(a * a + 1.0) / (b * b + 2.0)
    d = (1.0 + a * a).log() + a.sin() * b.cos() - (-c)
    return [clip(d, -0.5, 0.7), where(a < b, d * c, a / (3.0 - b.sin()))]


def test_gradients_of_all_operations_equal_autograd():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 300, dtype=torch.float64, generator=g, requires_grad=True)
    seeds = torch.randn(2, 300, dtype=torch.float64, generator=g)
    (expected,) = torch.autograd.grad(torch.stack(everything(*x)), x, seeds)

    def backward(x, seeds):
        nodes = [node.graph for node in x]
        found = gradients(everything(*x), seeds, x)
        assert nodes[0] is found[0].graph
        return {"grad": found}

    # The gradient's nodes, computed one after the other in double precision.
    program = Program("gradient", (Group("x", 2), Group("seeds", 2)), (Group("grad", 2),), backward)
    recorded = trace(program)
    values = {}
    given = {"x": x.detach(), "seeds": seeds}
    for node in recorded.results["grad"][0].graph.nodes:
        args = [values[arg.index] for arg in node.args]
        values[node.index] = evaluate(node, args, given)
    found = torch.stack([values[node.index].expand(300) for node in recorded.results["grad"]])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def evaluate(node, args, given):
    if node.op == "input":
        return given[node.data[0]][node.data[1]]
    if node.op == "constant":
        return torch.tensor(node.constant, dtype=torch.float64)
    if node.op in ("add", "sub", "mul", "div", "neg", "sqrt", "log", "sin", "cos"):
        return getattr(torch, node.op)(*args)
    return {"less": torch.lt, "where": torch.where}[node.op](*args)


def test_a_product_has_its_inputs_for_gradients():
    program = Program(
        "square",
        (Group("x", 1, differentiable=True),),
        (Group("y", 1, differentiable=True),),
        lambda x: {"y": [x[0] * x[0]]},
    )
    vjp = trace_vjp(program)
    assert [group.name for group in vjp.inputs] == ["x", "grad_y"]
    assert [group.name for group in vjp.outputs] == ["grad_x"]


def test_other_powers_are_refused():
    (a,) = inputs(1)
    with pytest.raises(ValueError, match=r"expected the power 0.5, got 2"):
        a**2


def test_draws_are_uniform_and_normal_and_independent():
    key = list(torch.arange(1, 20001).repeat(2, 1))
    counter = torch.full((20000,), 7)
    u = torch.stack([uniform(key, counter, index) for index in range(4)])
    assert ((u > 0) & (u < 1)).all()
    assert u.mean(1) == pytest.approx([0.5] * 4, abs=4 * math.sqrt(1 / 12 / 20000))
    z = torch.stack(gaussians(key, counter, 4, 5))
    assert z.shape == (5, 20000)
    assert z.mean(1) == pytest.approx([0.0] * 5, abs=4 / math.sqrt(20000))
    assert z.std(1) == pytest.approx([1.0] * 5, abs=4 / math.sqrt(40000))
    assert z.pow(4).mean(1) == pytest.approx([3.0] * 5, abs=4 * math.sqrt(96 / 20000))
    following = torch.stack(gaussians(key, counter + 1, 4, 5))
    correlation = torch.corrcoef(torch.cat((u, z, following))) - torch.eye(14, dtype=torch.float64)
    assert correlation.abs().max() < 5 / math.sqrt(20000)
