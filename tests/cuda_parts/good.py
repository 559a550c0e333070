"""A part in which everything is as it should be."""

import torch


def run(record, options):
    record.agree("sum", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0)
    record.figure("steps_per_s", 3.5)
    with record.row("absent"):
        import a_package_that_is_absent  # noqa: F401
