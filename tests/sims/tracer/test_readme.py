"""The tracer's README: its example runs as it stands."""

from pathlib import Path

import torch

from sims import tracer


def test_the_example_runs_and_carries_gradients():
    text = (Path(tracer.__path__[0]) / "README.md").read_text()
    names: dict = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert names["after"].shape == (2, 64)
    assert torch.isfinite(names["state"].grad).all()
