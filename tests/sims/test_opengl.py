"""Whether OpenGL runs on a graphics card."""

from pathlib import Path

import pytest

from sims import opengl


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        (True, "NVIDIA H100", True),
        (True, "llvmpipe (LLVM 15.0.6, 256 bits)", False),
        (True, None, False),
        (False, "NVIDIA H100", False),
    ],
)
def test_graphics_card(monkeypatch: pytest.MonkeyPatch, device: bool, name: str | None, expected: bool) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self] * device))
    monkeypatch.setattr(opengl, "opengl", lambda: name)
    assert opengl.graphics_card() is expected
