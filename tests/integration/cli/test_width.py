"""What people read fits on a terminal of 80 columns; what programs read is one line as ever."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.local_box import Box

WORDS = (("apply", "nothing"), ("doctor",))


def on_a_terminal(box: Box, *words: str, columns: int = 80, terminal: str = "xterm") -> list[str]:
    """Lines of a command whose output and messages go to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tunerd", *words], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**box.environment, "TERM": terminal}, cwd=box.folder,
    )  # fmt: skip
    os.close(theirs)
    told = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # its last process has gone
            break
        told += more
    os.close(ours)
    process.wait(timeout=180)
    text = told.decode().replace("\r\n", "\n")
    for colour in ("\x1b[36m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[0m"):
        text = text.replace(colour, "")
    return [line.rpartition("\r")[2].rpartition("\x1b[K")[2] for line in text.splitlines()]


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_a_result_begins_on_a_line_of_its_own_and_a_dumb_terminal_gets_text_alone(
    tmp_path: Path, terminal: str
) -> None:
    box, path = Box(tmp_path), tmp_path / "x.gguf"
    lines = on_a_terminal(box, "model", "new", str(path), columns=200, terminal=terminal)
    first, second, *_ = filter(None, lines)
    assert first == f"writing {path}"
    assert second.startswith(f"wrote {path}")
    (refused, *_) = on_a_terminal(box, "plan", "nosuch", terminal=terminal)
    assert refused.startswith("error: ")


@pytest.mark.parametrize("words", WORDS)
def test_lines_fit_on_the_terminal_and_have_the_words_that_go_into_a_pipe(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    box = Box(tmp_path)
    lines = on_a_terminal(box, *words)
    assert max(map(len, lines)) > 60, "something was folded"
    whole = [line for line in lines if len(line) > 80]  # a path has no place to be folded at
    assert not whole or words == WORDS[-1]
    done = box.call(*words)
    assert sorted(" ".join(lines).split()) == sorted((done.stderr + done.stdout).split())
    if words == WORDS[0]:  # a command that is to be copied stays on one line
        narrow = on_a_terminal(box, *words, columns=40)
        assert any("`tunerd profiles list`" in line for line in narrow)
