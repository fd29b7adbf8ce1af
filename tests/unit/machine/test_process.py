"""Why a measurement ended, in words that a list of them can show."""

from __future__ import annotations

import signal

import pytest

from tunerd.errors import LeaseEnded
from tunerd.machine.process import Interrupts, words_of

WORDS: dict[BaseException, str] = {
    SystemExit(128 + signal.SIGTERM): "ended from outside (SIGTERM)",
    SystemExit(128 + signal.SIGHUP): "ended from outside (SIGHUP)",
    SystemExit(3): "3",
    KeyboardInterrupt(): "ended by Ctrl-C",
    LeaseEnded("somebody started it"): "somebody started it",
    MemoryError(): "MemoryError",
}


def test_an_end_is_told_by_what_brought_it() -> None:
    assert {error: words_of(error) for error in WORDS} == WORDS


def test_a_signal_that_came_before_it_is_heard_ends_what_hears_it_before_it_begins() -> None:
    with Interrupts() as interrupts, interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"), interrupts.heard():
            pytest.fail("it began")
