"""What the daemon costs while nothing happens: its memory, its processor time, and the server's.

python -m benchmarks.daemon_idle --minutes 10      as root, with what the end-to-end tests need

A machine with a real systemd runs the shipped unit with its own settings beside the embedded
llama.cpp server. The server's processor time is taken once with and once without the daemon.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.measure import options
from tests.support import roots
from tests.support.deployment import Deployment, profile
from tests.support.machine import Machine
from tests.support.roots import SOURCES_INSIDE
from tunerd.tryout.designed import SHAPES, design, write

TICKS_S = 100.0
SETTLE_S = 90.0
PLAIN = profile("embedded", serving__alias="plain", serving__metrics=True)


def cpu_s(box: Deployment, pid: str) -> float:
    """Processor time of a process and of the children that it has waited for [s]."""
    fields = box.machine.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS_S


def rss_mib(box: Deployment, pid: str) -> float:
    lines = box.machine.read(f"/proc/{pid}/status").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def watch(box: Deployment, seconds: float, *, has_daemon: bool) -> dict[str, float]:
    """Figures over a stretch of time in which nobody asks the server for anything."""
    server = box.show("MainPID")
    daemon = box.show("MainPID", "tunerd.service") if has_daemon else None
    begin_s = time.monotonic()
    before = cpu_s(box, server), cpu_s(box, daemon) if daemon else 0.0
    most_mib = 0.0
    while time.monotonic() - begin_s < seconds:
        time.sleep(5)
        most_mib = max(most_mib, rss_mib(box, daemon) if daemon else 0.0)
    took_s = time.monotonic() - begin_s
    after = cpu_s(box, server), cpu_s(box, daemon) if daemon else 0.0
    found = {"seconds": took_s, "server_cpu_percent": 100 * (after[0] - before[0]) / took_s}
    if daemon:
        found["daemon_cpu_percent"] = 100 * (after[1] - before[1]) / took_s
        found["daemon_most_rss_mib"] = most_mib
        found["daemon_fds"] = float(len(box.machine.files(f"/proc/{daemon}/fd")))
    return found


def main() -> None:
    """Print the figures."""
    minutes = options(__doc__, minutes=10.0).minutes
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        model = write(design(SHAPES["tiny"]), Path(folder) / "tiny.gguf").path
        model.chmod(0o644)
        with Machine(roots.host_root(), binds={"/srv/models": Path(folder)}) as machine:
            box = Deployment(
                machine, profiles={"plain": PLAIN}, settings="[probation]\nenabled = false\n"
            )
            box.apply("plain")
            machine.run("cp", SOURCES_INSIDE / "units/tunerd.service", "/etc/systemd/system/")
            box.systemctl("daemon-reload")
            without = watch(box, minutes * 30, has_daemon=False)
            box.systemctl("start", "tunerd.service")
            time.sleep(SETTLE_S)  # its check of the evidence is over, and its first housekeeping
            beside = watch(box, minutes * 60, has_daemon=True)
    for name, found in (("without the daemon", without), ("with the daemon", beside)):
        print(name, {key: round(value, 3) for key, value in found.items()})


if __name__ == "__main__":
    main()
