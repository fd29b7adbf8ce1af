"""Starts the supervisor as a process that outlives its caller."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import tunerd
from tunerd.core.paths import Paths
from tunerd.errors import HostError, NoSupervisor, ServiceError, TunerdError
from tunerd.system import supervisor_wire as wire
from tunerd.system.clock import SystemClock
from tunerd.system.process import MINIMAL_ENVIRONMENT, run
from tunerd.system.unit_start import passed_on

LOG_NAME = "supervise.log"
_START_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 15.0
_RIVAL_TIMEOUT_S = 5.0
_POLL_S = 0.05
_KEPT_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "XDG_RUNTIME_DIR")


def ensure_supervisor(paths: Paths, environment: Mapping[str, str]) -> None:
    """Start a supervisor that outlives this process, unless one answers already.

    Raises:
        NoSupervisor: It does not start.
        ServiceError: It does not answer.
    """
    clock = SystemClock()
    own = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    # The package may not be installed where the interpreter looks.
    found_at = str(Path(tunerd.__file__).parents[1])
    env = {**MINIMAL_ENVIRONMENT, **own, **passed_on(environment), "PYTHONPATH": found_at}
    argv = [sys.executable, "-P", "-m", "tunerd.system.supervisor_start", paths_to_json(paths)]
    try:
        done = run(argv, timeout_s=_START_TIMEOUT_S, env=env)
    except HostError as error:
        raise ServiceError(error.message, cause=error.cause) from error
    # Where another one was faster it holds the lock, and answers in a moment.
    deadline_s = clock.monotonic_s() + _RIVAL_TIMEOUT_S
    while True:
        try:
            wire.request(paths.runtime_dir, {"op": "ping"}, timeout_s=_ANSWER_TIMEOUT_S)
        except NoSupervisor as error:
            if clock.monotonic_s() < deadline_s and "already runs" in done.stderr:
                clock.sleep(_POLL_S)
                continue
            raise NoSupervisor(
                "tunerd's supervisor does not start",
                cause=done.stderr.strip() or None,
                hint=f"its log is {paths.log_dir / LOG_NAME}",
            ) from error
        return


def paths_to_json(paths: Paths) -> str:
    """For a supervisor in a process of its own."""
    return json.dumps({name: str(path) for name, path in asdict(paths).items()})


def main(argv: list[str]) -> int:
    """`python -m tunerd.system.supervisor_start PATHS`: detach, and return when it can be talked to."""
    from tunerd.system.supervisor import supervise  # its callers do not pay for it

    paths = Paths(**{name: Path(path) for name, path in json.loads(argv[0]).items()})
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        sys.stderr.write(text.removeprefix("ready"))
        return 0 if text == "ready" else 1
    os.close(read)
    os.setsid()
    os.chdir("/")
    try:
        paths.log_dir.mkdir(parents=True, exist_ok=True)
        _redirect(paths.log_dir / LOG_NAME)
        supervise(paths, dict(os.environ), ready=lambda: _tell_parent(write, "ready"))
    except TunerdError as error:
        _tell_parent(write, f"{error.message}: {error.cause}" if error.cause else error.message)
        return 1
    except OSError as error:
        _tell_parent(write, str(error))
        return 1
    return 0


def _redirect(log: Path) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    target = os.open(log, flags, 0o640)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(nothing)
    os.close(target)


def _tell_parent(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
