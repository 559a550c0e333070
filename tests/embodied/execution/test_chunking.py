"""The arithmetic of overlapping chunks, by hand."""

import math

import pytest
import torch

from embodied.execution.chunking import Execution, Running, check_execution, shifted, steps_until, steps_within
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach

E = math.e


def running(frozen: list[int], overlap: list[int], horizon: int = 8) -> Running:
    return Running(torch.zeros(len(frozen), horizon, 1), torch.tensor(frozen), torch.tensor(overlap))


def test_the_soft_mask_is_that_of_the_paper():
    # H = 8, d = 2, s = 3: i = 2, 3, 4 have c = 3/4, 2/4, 1/4; 5, 6, 7 are new
    c = [3 / 4, 2 / 4, 1 / 4]
    expected = [1, 1, *(x * (E**x - 1) / (E - 1) for x in c), 0, 0, 0]
    mask = running([2, 0], [5, 0]).soft_mask()
    torch.testing.assert_close(mask[0], torch.tensor(expected))
    assert mask[1].tolist() == [0] * 8  # nothing runs


def test_blending_goes_over_linearly_from_what_is_frozen():
    blended = running([2, 0, 8], [5, 0, 8]).blended(torch.ones(3, 8, 1)).squeeze(-1)
    torch.testing.assert_close(blended[0], torch.tensor([0, 0, 1 / 4, 2 / 4, 3 / 4, 1, 1, 1]))
    assert blended[1].tolist() == [1] * 8
    assert blended[2].tolist() == [0] * 8


def test_a_later_time_axis_begins_later():
    chunk = torch.arange(4.0).view(1, 4, 1)
    assert [shifted(chunk, steps).flatten().tolist() for steps in (0, 1, 3, 9)] == [
        [0, 1, 2, 3],
        [1, 2, 3, 3],
        [3, 3, 3, 3],
        [3, 3, 3, 3],
    ]


def test_time_in_control_steps():
    assert [steps_until(s, 0.05) for s in (0.0, 0.05, 0.1, 0.101, 0.3)] == [0, 1, 2, 3, 6]  # 0.3 / 0.05 > 6
    assert [steps_within(s, 0.05) for s in (0.0, 0.036, 0.038, 0.05, 0.087, 0.1)] == [0, 0, 1, 1, 1, 2]


def test_what_cannot_inpaint_says_so():
    with pytest.raises(ValueError, match="MLPPolicy cannot inpaint; use execution=blend"):
        check_execution(MLPConfig().build(Reach(1).contract), Execution.INPAINT)


def test_an_unknown_execution_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown execution 'fast'; expected one of inpaint, blend, naive, synchronous"
    ):
        Execution("fast")
