"""Tokens in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied.errors import UserError
from real_robot.serving.credentials import token


def test_an_empty_file_is_no_token_that_every_stranger_has(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    with pytest.raises(UserError, match="there is no token in"):
        token(path)
    path.unlink()
    assert len(token(path)) > 30
    assert token(path) == token(path)
