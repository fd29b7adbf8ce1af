"""Kills a program, or a unit's main process, at a chosen moment; needs the standard library alone.

The first argument is a JSON object:
    argv: the program, which is started; or unit: whose main process
    watch: a pattern of paths, if there: the moment is when one of them comes, goes or is written
    after_s: so long after that, or after the program's start
    with_children: whether its descendants are killed too
    spares: whether nothing is killed, and the moment is but told, by `now`; the program may have ended
    limit_s: give up watching after so long
It prints `ready`, and then one: whether anything changed, which process was killed (null for none),
and what the program wrote to its standard error.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.0005
_LIMIT_S = 360.0


def main() -> None:
    """Do what the first argument says."""
    told = json.loads(sys.argv[1])
    watch, before = told.get("watch"), _stamps(told.get("watch"))
    print("ready", flush=True)
    process = None
    if told.get("argv"):
        process = subprocess.Popen(
            told["argv"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )  # fmt: skip
    has_changed, spares = watch is None, told.get("spares", False)
    end_s = time.monotonic() + told.get("limit_s", _LIMIT_S)
    while not has_changed and _runs(process) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        has_changed = _stamps(watch) != before
    end_s = time.monotonic() + told["after_s"]
    while (spares or (has_changed and _runs(process))) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    pid = None
    if spares:
        print("now", flush=True)
    elif has_changed and _runs(process):
        pid = process.pid if process is not None else _main_pid(told["unit"])
    for one in [pid, *(_descendants(pid) if told.get("with_children") else [])] if pid else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    err = b"" if process is None else process.communicate(timeout=_LIMIT_S)[1]
    found = {"changed": has_changed, "pid": pid, "err": err.decode(errors="replace")}
    print(json.dumps(found), flush=True)


def _runs(process: subprocess.Popen[bytes] | None) -> bool:
    return process is None or process.poll() is None


def _stamps(pattern: str | None) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in glob.glob(pattern or ""):  # noqa: PTH207 -- a whole pattern, from the root
        with contextlib.suppress(OSError):
            status = Path(name).stat()
            found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _main_pid(unit: str) -> int | None:
    words = ["systemctl", "show", "--value", "--property=MainPID", unit]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) or None


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
