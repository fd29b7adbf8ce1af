"""`tunerd` without its start: a process that has loaded it already forks for every call.

Five sixths of what `tunerd status` takes are Python's start and its imports. What a call does is the same, in a process
of its own; tests of the start itself, and of what /proc says of a command, begin `python -m tunerd` themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.folders import ROOT

_CLIENT = Path(__file__).with_name("preloaded_client.py")
_LARGEST = 1 << 20
_PACKAGES = ("cli", "engine", "machine", "model", "production", "profile", "units")
_MODULES = ("tunerd.fleet.shared", "tunerd.measure.store", "tunerd.tryout.local")
# What the dynamic linker, or Python as it starts, reads of an environment.
_OF_A_START = ("LANG", "LC_", "LD_", "PYTHON")


def tunerd(environment: Mapping[str, str]) -> list[str]:
    """What to run as `tunerd` in this environment; its words come behind."""
    if of_a_start(environment) != {"PYTHONPATH": str(ROOT)}:
        return [sys.executable, "-m", "tunerd"]
    return client(_server())


def client(name: str) -> list[str]:
    """What to run as `tunerd`, where `begin` began a process by this name."""
    return [sys.executable, "-I", "-S", str(_CLIENT), name]


def of_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables that say something to the loader, or to Python as it starts."""
    return {name: text for name, text in environment.items() if name.startswith(_OF_A_START)}


def begin(name: str, *argv: str, **environment: str) -> subprocess.Popen[bytes]:
    """Begin what forks for calls by the socket of this name, until its standard input ends: `argv`, then a descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        return subprocess.Popen(
            [*argv, str(listener.fileno())],
            pass_fds=[listener.fileno()], stdin=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **environment},
        )  # fmt: skip


@functools.cache
def _server() -> str:
    """The name of the socket of the process that forks, which ends with this one."""
    name = f"tunerd-test-{os.getpid()}"
    server = begin(name, sys.executable, "-m", __name__, PYTHONPATH=str(ROOT))
    atexit.register(server.communicate)
    return name


def _serve(listener: socket.socket) -> None:
    """Fork for each call; returns only in a process that is to be `tunerd`."""
    loads = [
        module.name
        for package in _PACKAGES
        for module in pkgutil.iter_modules([str(ROOT / "tunerd" / package)], f"tunerd.{package}.")
    ]
    for name in (*loads, *_MODULES):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for who waits for a call
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            os._exit(0)
        way, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _begin(way)
        way.close()


def _begin(way: socket.socket) -> None:
    """Be the command that comes this way, beside a process that waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(way, _LARGEST, 3)
    if not text:
        os._exit(0)
    command = os.fork()
    if command:
        for descriptor in streams:
            os.close(descriptor)
        _wait_for(command, way)
        os._exit(0)
    way.close()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  as Python makes it
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    _be(text.split(b"\0"))


def _be(told: Sequence[bytes]) -> None:
    """Have the folder, the words and the environment that were told."""
    count = int(told[0])
    os.chdir(told[1])
    sys.argv = ["tunerd", *map(os.fsdecode, told[2 : 2 + count])]
    os.environb.clear()
    for name, _, value in (each.partition(b"=") for each in told[2 + count :]):
        os.environb[name] = value


def _wait_for(command: int, way: socket.socket) -> None:
    """Tell how it ended; it gets the signals of who called it, and dies with that."""
    descriptor = os.pidfd_open(command)
    while True:
        ended, _, _ = select.select([descriptor, way.fileno()], [], [])
        if descriptor in ended:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, int(way.recv(8) or signal.SIGKILL))
    _, status = os.waitpid(command, 0)
    with contextlib.suppress(OSError):
        way.send(b"%d" % os.waitstatus_to_exitcode(status))


def main() -> None:
    """Be what forks, then what was forked."""
    _serve(socket.socket(fileno=int(sys.argv[1])))
    from tunerd.__main__ import main as call  # noqa: PLC0415  as late as by itself

    call()


if __name__ == "__main__":
    main()
