"""Two processes on gloo learn what one learns from the same batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodied.placement.local import Local
from tests.placement.processes import run_processes
from tests.placement.worker import CASES, main

TOGETHER = [*CASES, "pi0_sharded"]
GRADIENTLESS = "k_proj.bias"
"""Moves all scores of attention alike, which changes nothing: Adam makes steps of its rounding errors."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the weights that two processes have learned."""
    folder = tmp_path_factory.mktemp("learned")
    run = run_processes(2, main, folder, *TOGETHER)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_learn_what_one_with_the_same_batch_learns(name: str, learned: Path) -> None:
    expected, found = CASES[name.removesuffix("_sharded")](Local()), load_file(learned / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 1e-3 if key.startswith("metric/") else 0.0
        absolute = 1e-5 if not key.endswith(GRADIENTLESS) else 0.1
        torch.testing.assert_close(
            found[key], value, rtol=tolerance, atol=absolute, msg=lambda text, key=key: f"{key}: {text}"
        )
