"""Compiled kernels against the dynamics in double precision."""

import pytest
import torch

from embodied import native
from sims.quadrotor.physics.airframes import AIRFRAMES, CRAZYFLIE
from sims.quadrotor.physics.dynamics import Options
from sims.quadrotor.physics.simulator import Simulator
from sims.tracer.emit import c_source
from sims.tracer.kernels import split
from sims.tracer.program import trace
from tests.sims.quadrotor.flights import FULL, commands, disturbances, oracle, states

CASES = {
    **{name: (frame, Options()) for name, frame in AIRFRAMES.items()},
    "all effects": (AIRFRAMES["racer_5_inch"], FULL),
}
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


@pytest.fixture(params=CASES)
def case(request):
    frame, options = CASES[request.param]
    return frame, options, Simulator(frame, options)


def relative(found, expected):
    """Largest difference, relative to numbers above 1."""
    return float(((found - expected).abs() / expected.abs().clamp_min(1.0)).max())


@needs_compiler
def test_after_100_steps_c_agrees_with_double_precision(case):
    frame, options, simulator = case
    state, actions, disturbance = states(frame, options), commands(100, frame), disturbances(frame, options)
    found = simulator.steps(state.float(), actions.float(), disturbance.float())
    assert simulator.kernels.backend == "c"
    expected = state.float().double()
    for action in actions.float().double():
        expected = oracle(expected, action, disturbance.float().double(), frame, options)
    assert relative(found, expected) < 1e-5


@needs_compiler
def test_gradients_agree_with_autograd_in_double_precision(case):
    frame, options, simulator = case
    state, (action,), disturbance = states(frame, options), commands(1, frame), disturbances(frame, options)
    seeds = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    single = [tensor.float().requires_grad_() for tensor in (state, action)]
    found = torch.autograd.grad(simulator.step(*single, disturbance.float()), single, seeds.float())
    double = [tensor.detach().double().requires_grad_() for tensor in single]
    after = oracle(*double, disturbance.float().double(), frame, options)
    expected = torch.autograd.grad(after, double, seeds)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-6


@pytest.mark.parametrize("options", [Options(), FULL], ids=["plain", "all effects"])
def test_gradients_agree_with_finite_differences(options):
    frame = AIRFRAMES["racer_5_inch"]
    state, (action,), disturbance = states(frame, options), commands(1, frame), disturbances(frame, options)
    inputs = torch.cat((state, action))
    seeds = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def total(rows):
        return (seeds * oracle(rows[: len(state)], rows[len(state) :], disturbance, frame, options)).sum(0)

    simulator = Simulator(frame, options)
    rows = [part.float().requires_grad_() for part in (state, action)]
    found = torch.cat(torch.autograd.grad(simulator.step(*rows, disturbance.float()), rows, seeds.float()))
    for row in range(len(inputs)):
        width = torch.zeros_like(inputs)
        width[row] = 1e-6
        slope = (total(inputs + width) - total(inputs - width)) / 2e-6
        assert relative(found[row], slope) < 2e-4, row


@needs_compiler
def test_many_steps_in_a_call_are_single_steps_bit_for_bit():
    simulator = Simulator(CRAZYFLIE)
    state, actions, disturbance = states().float(), commands(7).float(), disturbances().float()
    found = simulator.steps(state, actions, disturbance)
    for action in actions:
        state = simulator.step(state, action, disturbance)
    assert torch.equal(found, state)


@needs_compiler
def test_threads_change_nothing():
    lanes, simulator = 1 << 16, Simulator(CRAZYFLIE)
    given = states(lanes=lanes).float(), commands(2, lanes=lanes).float(), disturbances(lanes=lanes).float()
    alone = simulator.steps(*given)
    torch.set_num_threads(3)
    try:
        together = simulator.steps(*given)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together)


def test_parts_of_a_batch_cover_it_once():
    torch.set_num_threads(3)
    try:
        for lanes in (64, 128, 192, 64 * 1000):
            parts = []
            split(lambda first, last, parts=parts: parts.append((first, last)), lanes, share=64)
            covered = sorted(i for first, last in parts for i in range(first, last, 64))
            assert covered == list(range(0, lanes, 64))
    finally:
        torch.set_num_threads(1)


def test_what_is_off_is_not_in_the_kernels():
    sizes = {}
    for options in (Options(), Options(drag=True), FULL):
        (program,) = Simulator(CRAZYFLIE, options, backend="torch").kernels.programs.values()
        sizes[options] = c_source([trace(program)]).count("\n")
    assert len(set(sizes.values())) == 3
    assert min(sizes, key=sizes.get) == Options()


def test_plain_torch_runs_the_same_programs_with_gradients():
    fast, plain = (Simulator(CRAZYFLIE, FULL, backend=backend) for backend in (None, "torch"))
    given = states(options=FULL).float(), commands(3).float(), disturbances(options=FULL).float()
    assert relative(fast.steps(*given), plain.steps(*given)) < 1e-6
    found = []
    for simulator in (fast, plain):
        state, actions = (tensor.clone().requires_grad_() for tensor in given[:2])
        for action in actions:
            state_after = simulator.step(state, action, given[2])
        found.append(torch.autograd.grad(state_after.square().sum(), (state, actions)))
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_without_a_compiler_it_warns_once_and_flies_in_torch(monkeypatch, recwarn):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native.forget()
    try:
        made = [Simulator(CRAZYFLIE) for _ in range(2)]
    finally:
        native.forget()
    assert [simulator.kernels.backend for simulator in made] == ["torch", "torch"]
    assert [str(warning.message).split(":")[0] for warning in recwarn].count(
        "no C compiler found (cc, gcc, clang or $CC)"
    ) == 1
