"""Runs a program and sends it a signal at a chosen moment; needs the standard library alone.

The first argument is a JSON object:
    argv: the program; signal: its name without SIG; with_children: whether its descendants get it too
    after_s: so long after its start, or
    watch: a path, and after_s so long after that came, went or became another file
    again_s: if there, the signal is sent once more so long after the first one
It prints one: whether the signal was in time, exit status, output, and when it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.0005
_LIMIT_S = 120.0


def main() -> None:
    """Do what the first argument says."""
    told = json.loads(sys.argv[1])
    number = getattr(signal, f"SIG{told['signal']}")
    began_s = time.monotonic()
    before = _inode(told.get("watch"))
    process = subprocess.Popen(
        told["argv"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    if told.get("watch"):
        while _inode(told["watch"]) == before and process.poll() is None:
            time.sleep(_POLL_S)
        began_s = time.monotonic()
    _wait(process, began_s + told["after_s"])
    was_in_time = process.poll() is None
    sent_s = time.monotonic()
    if was_in_time:
        victims = _descendants(process.pid) if told.get("with_children") else []
        for pid in [process.pid, *victims]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    if told.get("again_s") is not None:
        _wait(process, sent_s + told["again_s"])
        if process.poll() is None:
            process.send_signal(number)
    out, err = process.communicate(timeout=_LIMIT_S)
    print(
        json.dumps(
            {
                "in_time": was_in_time,
                "code": process.returncode,
                "out": out.decode(errors="replace"),
                "err": err.decode(errors="replace"),
                "took_s": time.monotonic() - began_s,
                "until_end_s": time.monotonic() - sent_s,
            }
        )
    )


def _wait(process: subprocess.Popen[bytes], until_s: float) -> None:
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def _inode(path: str | None) -> int | None:
    try:
        return Path(path).stat().st_ino if path else None
    except OSError:
        return None


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields: Any = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


if __name__ == "__main__":
    main()
