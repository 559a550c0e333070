"""Rollouts of a robot at another computer, on disk: which of them are deleted, and what is known of them then."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied.errors import UserError
from real_robot.learning.remote.journal import Journal

ONE, OTHER = "0" * 16, "1" * 16


def filled(folder: Path) -> Journal:
    """Five rollouts, two of one actor's program, then three of another."""
    journal = Journal(folder)
    for number, (session, sequence) in enumerate([(ONE, 0), (ONE, 1), (OTHER, 0), (OTHER, 1), (OTHER, 2)]):
        journal.add(session, sequence, bytes([number]))
    return journal


def test_the_newest_rollout_of_each_session_stays_so_that_their_number_is_known(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.prune(4)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["00000001", "00000004"]
    for each in (journal, Journal(tmp_path)):
        assert each.total == 5
        assert (each.stored(ONE), each.stored(OTHER)) == (2, 3)
        assert each.read(4) == b"\x04"
        with pytest.raises(UserError, match="rollout 3 is missing"):
            each.read(3)
    journal.prune(99)
    journal.add(OTHER, 3, b"\x05")
    assert (Journal(tmp_path).total, Journal(tmp_path).stored(OTHER)) == (6, 4)


def test_what_a_checkpoint_still_needs_stays_and_what_a_kill_left_goes(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    (tmp_path / ".00000005-0-0.msgpack.77.tmp").write_bytes(b"half")
    journal.prune(0)
    assert [journal.read(number) for number in range(5)] == [bytes([number]) for number in range(5)]
    assert len(list(tmp_path.iterdir())) == 5
    journal.prune(2)
    assert [journal.read(number) for number in (2, 3, 4)] == [b"\x02", b"\x03", b"\x04"]
