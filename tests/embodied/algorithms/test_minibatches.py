"""Minibatches of several processes are together those of one."""

import torch

from embodied.algorithms.minibatches import Minibatches
from embodied.world import ALONE


class Given:
    """One of three processes, which knows what the others would send."""

    size = 3

    def __init__(self, rank: int, kept: torch.Tensor) -> None:
        self.rank, self.kept = rank, kept

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        assert torch.equal(values[:, self.rank].bool(), self.kept[:, self.rank])
        return self.kept.to(values.dtype)


def test_all_processes_together_take_the_minibatches_of_one() -> None:
    decisions, envs = 7, 4
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(decisions, 3, envs, generator=generator) < 0.5
    kept[:, 2] = False  # the last process has nothing to learn from
    kept[5, 2, 1] = True
    number = torch.arange(decisions * 3 * envs).view(decisions, 3, envs)

    def drawn(world, mask: torch.Tensor, numbers: torch.Tensor) -> list[tuple[list[int], int]]:
        flat = numbers.flatten()
        parts = Minibatches(mask, world).draw(5, torch.Generator().manual_seed(2))
        return [(flat[rows[counted]].tolist(), len(rows)) for rows, counted in parts]

    whole = drawn(ALONE, kept.flatten(1), number.flatten(1))
    each = [drawn(Given(rank, kept), kept[:, rank], number[:, rank]) for rank in range(3)]
    assert len(whole) == len(each[0]) == len(each[1]) == len(each[2]) > 4
    for minibatch, *parts in zip(whole, *each, strict=True):
        assert sorted(minibatch[0]) == sorted(row for rows, _ in parts for row in rows)
        assert len({length for _, length in parts}) == 1  # all make the same passes
    assert any(not rows for rows, _ in each[2])
    assert sorted(row for rows, _ in whole for row in rows) == number[kept].tolist()
