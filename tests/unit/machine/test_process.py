"""Why a measurement ended, in words that a list of them can show."""

from __future__ import annotations

import signal

import pytest

from tunerd.errors import LeaseEnded
from tunerd.machine.process import words_of


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(128 + signal.SIGTERM), "ended from outside (SIGTERM)"),
        (SystemExit(128 + signal.SIGHUP), "ended from outside (SIGHUP)"),
        (SystemExit(3), "3"),
        (KeyboardInterrupt(), "ended by Ctrl-C"),
        (LeaseEnded("somebody started it"), "somebody started it"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_end_is_told_by_what_brought_it(error: BaseException, words: str) -> None:
    assert words_of(error) == words
