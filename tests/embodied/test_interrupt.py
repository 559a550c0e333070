"""The first signal asks, the second insists."""

import os
import signal
import threading

import pytest

from embodied.interrupt import GracefulStop


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


def test_other_threads_may_enter_it():
    def body() -> None:
        with GracefulStop() as stop:
            seen.append(stop.requested)

    seen: list[bool] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
