"""A bar on a terminal, occasional lines in a log."""

import io
import sys

import pytest

from embodied.runtime import progress
from embodied.runtime.console import setup_console
from embodied.runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_a_period_and_no_bar(monkeypatch, capsys):
    now = iter([0.0, 30.0, 61.0, 61.0, 90.0, 130.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    setup_console()
    with Progress("RL", 20_000, "step", initial=1000) as bar:
        for _ in range(4):
            bar.update(2500, "success 5%")
    written = capsys.readouterr()
    assert written.err == ""
    assert written.out.splitlines() == [
        "RL: 6,000 of 20,000 steps, success 5%, about 3 min left",
        "RL: 11,000 of 20,000 steps, success 5%, about 2 min left",
    ]


@pytest.mark.parametrize("shown", [True, False])
def test_a_terminal_gets_a_bar_where_one_is_wanted(monkeypatch, shown):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("RL", 3, "step", visible=shown) as bar:
        for _ in range(3):
            bar.update()
    assert ("3/3" in terminal.getvalue()) == shown
    assert bar.done == 3
