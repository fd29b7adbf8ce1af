"""Programs that the test harness runs on the host; a failure carries what they printed."""

from __future__ import annotations

import subprocess
from pathlib import Path


class ProgramFailed(RuntimeError):
    """A program of the harness ended with an error or did not end."""


def program(
    *argv: str | Path, stdin: bytes = b"", timeout_s: float = 240.0, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run it and return what it printed.

    Raises:
        ProgramFailed: it ended with another status than 0 and `check` holds, is missing, or took
            longer than `timeout_s`.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProgramFailed(f"{' '.join(words)}: {error}") from error
    if check and done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise ProgramFailed(f"{' '.join(words)} ended with {done.returncode}\n{said}")
    return done
