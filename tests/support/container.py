"""A booted systemd-nspawn container: starting it, getting into it, ending it.

It is not registered with the host's systemd-machined and sits in a control group of its own, so
it leaves no trace in the host's service manager, and does without one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EMPTY_WITHIN_S = 120.0
_SYSTEMD_POWEROFF = signal.SIGRTMIN + 4  # systemd(1), SIGNALS
# Becomes a member of a control group, then the command.
_JOIN = 'echo 0 > "$1" || exit 125; shift; exec "$@"'
# The container is set to die with the thread that started it, so that a killed test run leaves
# none running; this thread lives as long as the run does, whichever thread boots.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="containers")


class MachineError(AssertionError):
    """A machine did not start, end, or do what was asked of it."""


def group_of(name: str) -> Path:
    """The control group of the machine of this name: so nothing of it outlives it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith(
            "cgroup2 "
        ):  # at /sys/fs/cgroup, or in a folder of it on hybrid machines
            return Path(left.split()[4]) / f"tunerd-{name}"
    raise RuntimeError("no cgroup v2 hierarchy is mounted")


def remove_group(group: Path) -> None:
    """Kill everything in the group and remove it; a missing group is no error."""
    deadline_s = time.monotonic() + _EMPTY_WITHIN_S
    with suppress(FileNotFoundError):  # an ending container removes its group as well
        while "populated 1" in (group / "cgroup.events").read_text():
            for procs in group.rglob("cgroup.procs"):
                with suppress(OSError):
                    for pid in procs.read_text().split():
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{group} does not become empty")
            time.sleep(0.005)
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()


class Container:
    """One boot of a root; a container that has ended is not started again."""

    def __init__(
        self,
        name: str,
        root: Path,
        *,
        console: Path,
        binds: Mapping[str, Path],
        options: Sequence[str] = (),
    ) -> None:
        self.leader = 0
        """Pid of its systemd, as this host counts."""
        self._group = group_of(name)
        remove_group(self._group)  # with what an earlier life of the machine left in it
        self._group.mkdir()
        self._console = console
        argv = [
            *self._joining(self._group),
            *("setpriv", "--pdeathsig", "KILL"),
            *("systemd-nspawn", "--quiet", "--settings=no", "--register=no", "--keep-unit"),
            *("--directory", str(root), "--machine", name, "--boot"),
            *("--console=read-only", "--notify-ready=yes", "--resolv-conf=copy-host"),
            *("--timezone=off", "--link-journal=no"),
            "--capability=CAP_SYS_RESOURCE",  # else LimitMEMLOCK= cannot be raised inside
            "--private-network",
            *options,
            *(f"--bind-ro={source}:{place}" for place, source in binds.items()),
        ]
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(f"\0tunerd-{name}")
        env = {
            "PATH": PATH,
            "NOTIFY_SOCKET": f"@tunerd-{name}",
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        }
        with console.open("ab") as log:
            self._nspawn = _SPAWNER.submit(
                subprocess.Popen[bytes],
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).result()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._nspawn.poll() is None

    def wait_ready(self, limit_s: float) -> None:
        """Wait until its systemd has reached the default target.

        Raises:
            MachineError: it ended or took longer; the text has its console.
        """
        deadline_s = time.monotonic() + limit_s
        self._notify.settimeout(0.2)
        while True:
            words: list[str] = []
            with suppress(TimeoutError):
                words = self._notify.recv(8192).decode().splitlines()
            for word in words:
                if word.startswith("X_NSPAWN_LEADER_PID="):
                    self.leader = int(word.partition("=")[2])
            if "READY=1" in words:
                # Its systemd goes on telling of reloads, and would stop for good once nobody reads.
                self._notify.close()
                return
            if not self.is_alive:
                raise MachineError(f"the container ended while booting\n{self.console()}")
            if time.monotonic() > deadline_s:
                raise MachineError(f"not ready after {limit_s:g} s\n{self.console()}")

    def entering(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside.

        The command becomes a member of PID 1's group: logind and polkit refuse a caller whose
        group they cannot see.
        """
        group = self._group / "payload" / "init.scope"
        namespaces = ["-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        nsenter = ["nsenter", "--target", str(self.leader), *namespaces, "--"]
        return [*self._joining(group), *nsenter, *argv]

    def poweroff(self, limit_s: float) -> None:
        """Shut down in order."""
        os.kill(self.leader, _SYSTEMD_POWEROFF)
        try:
            self._nspawn.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise MachineError(f"no poweroff in {limit_s:g} s\n{self.console()}") from None
        self._remove()

    def kill(self) -> None:
        """End everything in it at once; nothing in it is told."""
        self._nspawn.kill()  # first, so that nobody hears of the death of the rest
        if self.leader:
            with suppress(ProcessLookupError):
                os.kill(self.leader, signal.SIGKILL)  # PID 1: the kernel kills all others
        self._nspawn.wait()
        self._remove()

    def console(self) -> str:
        """The end of what was written on its console."""
        return "\n".join(self._console.read_text(errors="replace").splitlines()[-60:])

    def _remove(self) -> None:
        self._notify.close()
        remove_group(self._group)

    @staticmethod
    def _joining(group: Path) -> list[str]:
        return ["sh", "-c", _JOIN, "sh", str(group / "cgroup.procs")]
