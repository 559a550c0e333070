"""One generator of random numbers: the same bits in Python, NumPy, torch, C and traced programs."""

import ctypes

import numpy as np
import pytest
import torch

from embodied import native
from sims import counter_rng
from sims.counter_rng import mix, uniform, uniforms
from sims.tracer import arithmetic
from sims.tracer.kernels import Kernels
from sims.tracer.program import WORD, Group, Program

KEYS = [(0, 0), (1, 2**32 - 1), (123456789, 987654321), (2**31, 2**31 - 1), (2**32 - 1, 1)]
COUNTERS = [-2, -1, 0, 1, 499, 1_000_000]
INDICES = [0, 1, 7, 63]
CASES = [(a, b, counter, index) for a, b in KEYS for counter in COUNTERS for index in INDICES]
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


def test_mixing_is_the_published_function():
    def reference(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    numbers = [0, 1, 2, 12345, 2**31, 2**32 - 1]
    expected = [reference(x) for x in numbers]
    assert [mix(x) for x in numbers] == expected
    assert mix(torch.tensor(numbers)).tolist() == expected
    assert mix(np.array(numbers)).tolist() == expected


def test_draws_stay_those_of_the_runs_that_were_published():
    # These values may never change: the numbers of initial states must keep their meaning.
    found = [uniform((1, 2), 0, 0), uniform((1, 2), -1, 5), uniform((2**32 - 1, 7), 499, 63)]
    assert [int(u * 2**24) for u in found] == [7161673, 10172855, 16344945]


def test_numpy_and_torch_draw_what_python_draws():
    expected = [uniform(case[:2], *case[2:]) for case in CASES]
    a, b, counter, index = np.array(CASES, dtype=np.int64).T
    assert uniform((a, b), counter, index).tolist() == expected
    assert uniform((a, b), counter.astype(np.float32), index).tolist() == expected
    a, b, counter, index = torch.tensor(CASES).unbind(1)
    assert uniform((a, b), counter, index).tolist() == expected
    assert uniform((a, b), counter.float(), index).tolist() == expected


def test_single_precision_holds_every_draw():
    drawn = uniform((torch.arange(100_000), torch.tensor(5)), 3, 1)
    assert torch.equal(drawn.float().double(), drawn)
    assert ((drawn > 0.0) & (drawn < 1.0)).all()


def test_many_draws_of_a_key_are_the_single_ones():
    key = torch.tensor([[5, -1], [7, 2**31 - 1]], dtype=torch.int32)  # words as kernels keep them
    found = uniforms(key, -2, 4)
    expected = [[uniform((5, 7), -2, i), uniform((2**32 - 1, 2**31 - 1), -2, i)] for i in range(4)]
    assert found.tolist() == expected


@needs_compiler
def test_c_draws_what_python_draws():
    draw = "float draw(uint32_t a, uint32_t b, float c, uint32_t i) { return uniform_(a, b, c, i); }\n"
    library = native.load(counter_rng.C_SOURCE + draw + "uint32_t mixed(uint32_t x) { return mix_(x); }")
    library.draw.restype, library.mixed.restype = ctypes.c_float, ctypes.c_uint32
    library.draw.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_float, ctypes.c_uint32]
    assert [library.draw(*case) for case in CASES] == [uniform(case[:2], *case[2:]) for case in CASES]
    assert [library.mixed(a) for a, *_ in CASES] == [mix(a) for a, *_ in CASES]


@pytest.mark.parametrize("backend", [pytest.param("c", marks=needs_compiler), "torch"])
def test_programs_draw_what_python_draws(backend):
    def draw(key, counter):
        return {"drawn": [arithmetic.uniform(key, counter[0], index) for index in INDICES]}

    program = Program("draw", (Group("key", 2, WORD), Group("counter", 1)), (Group("drawn", len(INDICES)),), draw)
    kernels = Kernels([program], torch.device("cpu"), backend=backend)
    lanes = [(a, b, counter) for a, b in KEYS for counter in COUNTERS]
    given = torch.tensor(lanes + [(0, 0, 0)] * (64 - len(lanes)))
    key = given[:, :2].t().contiguous().numpy().astype(np.uint32).view(np.int32)
    found = kernels("draw", {"key": torch.from_numpy(key), "counter": given[:, 2:].t().float().contiguous()})["drawn"]
    expected = [[uniform((a, b), counter, index) for a, b, counter in lanes] for index in INDICES]
    assert found[:, : len(lanes)].tolist() == expected
