"""Exports to C, made once for all tests of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from real_robot.firmware.exporting import Export, Target, Weights, export
from tests.real_robot.firmware.policies import make


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Callable[..., Path]:
    """Folder of an export by kind of policy and weights; copy it before changing it."""
    done: dict[tuple[str, Weights], Path] = {}

    def get(kind: str, weights: Weights = Weights.float32) -> Path:
        if (kind, weights) not in done:
            directory = tmp_path_factory.mktemp("exports") / f"{kind}_{weights.value}"
            export(make(kind), Export(Target.c, weights), directory)
            done[kind, weights] = directory
        return done[kind, weights]

    return get
