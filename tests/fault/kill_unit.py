"""Sends SIGKILL to a unit's main process right after files have changed; the standard library alone.

The first argument is a JSON object:
    unit: whose main process
    watch: a pattern of paths; after_s: so long after one of them came, went or was written
    limit_s: give up after so long
It prints one: whether anything changed, and the process that was killed, null for none.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_POLL_S = 0.001


def main() -> None:
    """Do what the first argument says."""
    told = json.loads(sys.argv[1])
    before, end_s = _stamps(told["watch"]), time.monotonic() + told["limit_s"]
    print("ready", flush=True)
    has_changed = False
    while not has_changed and time.monotonic() < end_s:
        has_changed = _stamps(told["watch"]) != before
        if not has_changed:
            time.sleep(_POLL_S)
    if has_changed:
        time.sleep(told["after_s"])
    pid = _main_pid(told["unit"]) if has_changed else 0
    if pid:
        os.kill(pid, signal.SIGKILL)
    print(json.dumps({"changed": has_changed, "pid": pid or None}), flush=True)


def _stamps(pattern: str) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in glob.glob(pattern):  # noqa: PTH207 -- a whole pattern, from the root
        try:
            status = Path(name).stat()
        except OSError:
            continue
        found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _main_pid(unit: str) -> int:
    words = ["systemctl", "show", "--value", "--property=MainPID", unit]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
