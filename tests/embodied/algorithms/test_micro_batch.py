"""Bytes that a network keeps per row, and rows that fit, against hand-counted numbers."""

import pytest
import torch
from torch import Tensor, nn

from embodied.algorithms.micro_batch import rows_within, saved_bytes

WIDTH = 8
EACH = 4 * (WIDTH + 1)
"""Bytes of a row: the layer after tanh, kept once for both that need it, and the output, for its square."""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def test_what_is_kept_is_counted_once_and_without_weights_and_inputs() -> None:
    layers = network()
    for rows in (1, 7):
        assert saved_bytes(lambda rows=rows: layers(torch.zeros(rows, 3)).square().sum()) == rows * EACH
    with torch.no_grad():
        assert saved_bytes(lambda: layers(torch.zeros(7, 3)).square().sum()) == 0


@pytest.mark.parametrize(("fit", "piece"), [(20.5, 20), (1.0, 1), (0.3, 1), (99.0, 99), (100.0, 100), (1e6, 100)])
def test_as_many_rows_as_fit(fit: float, piece: int) -> None:
    layers = network()
    asked: list[int] = []

    def forward(rows: int) -> Tensor:
        asked.append(rows)
        constant = torch.zeros(1000, requires_grad=True).exp().square().sum()  # whatever the number of rows
        return layers(torch.zeros(rows, 3)).square().sum() + constant

    assert rows_within(1.0001e-9 * EACH * fit, 100, forward) == piece
    assert max(asked) <= 8


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_few_rows_are_cut_too(rows: int) -> None:
    layers = network()
    budget_gb = 1.0001e-9 * EACH
    assert rows_within(budget_gb, rows, lambda count: layers(torch.zeros(count, 3)).square().sum()) == 1
    assert rows_within(1.0, rows, lambda count: layers(torch.zeros(count, 3)).square().sum()) == rows


def test_without_a_budget_nothing_is_measured() -> None:
    def fail(rows: int) -> None:
        raise AssertionError(rows)

    assert rows_within(None, 100, fail) == 100
    assert rows_within(1.0, 1, fail) == 1


def test_measuring_draws_no_random_numbers() -> None:
    layers = nn.Sequential(nn.Linear(3, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    before = torch.get_rng_state()
    rows_within(1.0, 100, lambda rows: layers(torch.zeros(rows, 3)).sum())
    assert torch.equal(torch.get_rng_state(), before)
