"""A part of which one row raises, one disagrees and one passes, and whose process then dies."""

import os

import torch


def run(record, options):
    with record.row("broken"):
        raise RuntimeError("a kernel is missing")
    record.agree("mean", torch.tensor([1.0]), torch.tensor([float("nan")]), 1e-3)
    record.figure("after", 1)
    print("segmentation fault", flush=True)
    os._exit(11)
