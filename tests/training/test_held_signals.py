"""When SIGINT and SIGTERM wait, and when they do not."""

from __future__ import annotations

import signal
from threading import Thread

import pytest

from minillm.training.held_signals import HELD, held_signals


@pytest.fixture(autouse=True)
def handlers():
    """Both signals raise `KeyboardInterrupt`, and do so after the test, too."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in HELD}
    yield
    after = {number: signal.getsignal(number) for number in HELD}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert set(after.values()) == {signal.default_int_handler}


@pytest.mark.parametrize("number", HELD)
def test_a_signal_waits_until_it_is_delivered(number):
    reached = []
    with pytest.raises(KeyboardInterrupt), held_signals() as deliver:
        deliver()
        signal.raise_signal(number)
        reached.append("behind the signal")
        deliver()
        reached.append("behind its delivery")
    assert reached == ["behind the signal"]


@pytest.mark.parametrize("number", HELD)
def test_a_signal_that_nobody_delivers_comes_at_the_end_of_the_block(number):
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with held_signals():
            signal.raise_signal(number)
            reached.append("in the block")
        reached.append("behind the block")
    assert reached == ["in the block"]


def test_a_second_signal_does_not_wait():
    reached = []
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the first")
        signal.raise_signal(signal.SIGTERM)
        reached.append("behind the second")
    assert reached == ["behind the first"]


def test_an_error_is_raised_in_place_of_a_signal_that_waits():
    """It says why the run ended; an interrupt would hide that."""
    with pytest.raises(LookupError), held_signals():
        signal.raise_signal(signal.SIGINT)
        raise LookupError


def test_one_behind_a_delivered_signal_waits_again():
    """So the state that the first one leaves is saved in peace."""
    reached = []
    with pytest.raises(KeyboardInterrupt), held_signals() as deliver:
        signal.raise_signal(signal.SIGINT)
        try:
            deliver()
        finally:
            signal.raise_signal(signal.SIGINT)
            reached.append("saved")
    assert reached == ["saved"]


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_holds_nothing_back():
    found = []

    def run():
        with held_signals() as deliver:
            deliver()
            found.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
