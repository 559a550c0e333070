"""The first signal requests a stop, the second stops at once."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from embodied.runtime.interrupt import STOPPING, Abandoned, GracefulStop, waiting_ended


@pytest.fixture(autouse=True)
def interruptible():
    """A shell's background jobs begin with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_sets_a_flag(number):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_at_once():
    with GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_says_so_at_once(capfd):
    with GracefulStop("Stopping: saving ..."):
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == "Stopping: saving ...; again to quit at once\n"


def test_a_signal_ends_what_may_be_abandoned_wherever_it_is():
    with GracefulStop() as stop:
        with stop.abandonable():
            pass
        done = []
        with pytest.raises(Abandoned), stop.abandonable():  # noqa: PT012
            try:
                os.kill(os.getpid(), signal.SIGINT)
                done.append("the rest")
            except Exception:
                done.append("held up")
        assert not done
        assert stop.requested
        with pytest.raises(Abandoned), stop.abandonable():
            done.append("begun after a stop was requested")
        assert not done


def test_what_catches_the_abandonment_does_not_hide_it():
    with GracefulStop() as stop, pytest.raises(Abandoned), stop.abandonable(), suppress(BaseException):
        os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_may_enter_it():
    def body() -> None:
        with GracefulStop() as stop:
            seen.append(stop.requested)

    seen: list[bool] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_signal_counts_while_code_that_waits_is_made_to_stop_waiting():
    with GracefulStop():
        with waiting_ended():
            assert STOPPING.is_set()
        assert not STOPPING.is_set()
        with waiting_ended():
            signal.raise_signal(signal.SIGTERM)
        assert STOPPING.is_set()
        with waiting_ended():
            pass
        assert STOPPING.is_set()
    assert not STOPPING.is_set()
