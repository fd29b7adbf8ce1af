"""Jobs on disk, in the runtime folder: the request, what happened so far, and whether one lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunerd.errors import HostError
from tunerd.system.files import is_locked

_MODE = 0o700
_MAX_REQUEST_BYTES = 64 * 1024
_MAX_EVENTS_BYTES = 16 * 1024 * 1024
_MOST_KEPT = 50


class JobFolder:
    """All jobs since the machine was started; whoever writes here is the owner of this tunerd."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def numbers(self) -> tuple[int, ...]:
        """Newest first."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208  names alone are needed
        except FileNotFoundError:
            return ()
        return tuple(sorted((int(name) for name in names if name.isdecimal()), reverse=True))

    def create(self, request: Mapping[str, Any]) -> int:
        """Keep a request under the next number; the oldest that ended make room.

        Raises:
            HostError: it cannot be written.
        """
        try:
            self._folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self._folder.chmod(_MODE)
            number, path = self._next()
            (path / "events.jsonl").touch(mode=0o600)
            (path / "request.json").write_text(json.dumps(request), encoding="utf-8")
        except OSError as error:
            raise HostError(
                f"cannot keep a job in `{self._folder}`", cause=error.strerror or str(error)
            ) from error
        for old in self.numbers()[_MOST_KEPT:]:
            if not self.is_alive(old):
                shutil.rmtree(self._folder / str(old), ignore_errors=True)
        return number

    def _next(self) -> tuple[int, Path]:
        """A number that nobody has, and its folder; others may be looking for one as well."""
        while True:
            number = next(iter(self.numbers()), 0) + 1
            path = self._folder / str(number)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=_MODE)
                return number, path

    def request(self, number: int) -> dict[str, Any] | None:
        """What was asked; None if there is no such job."""
        try:
            with (self._folder / str(number) / "request.json").open(encoding="utf-8") as file:
                found = json.loads(file.read(_MAX_REQUEST_BYTES))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def events(self, number: int) -> tuple[dict[str, Any], ...]:
        """What happened so far, whole lines only."""
        try:
            with (self._folder / str(number) / "events.jsonl").open("rb") as file:
                content = file.read(_MAX_EVENTS_BYTES)
        except OSError:
            return ()
        found = []
        for line in content.split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return tuple(one for one in found if isinstance(one, dict))

    def log(self, number: int) -> Path:
        """Where a job that no service manager looks after writes what it says."""
        return self._folder / str(number) / "log"

    def is_alive(self, number: int) -> bool:
        """Whether the process of the job lives."""
        return is_locked(self._folder / str(number) / "lock")

    def has_begun(self, number: int) -> bool:
        """Whether a process has taken the job on, be it alive or not."""
        return (self._folder / str(number) / "lock").exists()

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator[JobEvents]:
        """The events of a job that this process does; alive until the body, or the process, ends.

        Raises:
            HostError: there is no such job, or another process does it.
        """
        path = self._folder / str(number)
        if self.is_alive(number):
            raise HostError(f"job {number} is being done already")
        try:
            # Locked before it has its name: who finds it unlocked knows that its process is gone.
            lock = os.open(path / "lock.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (path / "lock.new").rename(path / "lock")
        except OSError as error:
            raise HostError(f"job {number} cannot be done", cause=error.strerror) from error
        try:
            with (path / "events.jsonl").open("ab", buffering=0) as file:
                yield JobEvents(file.fileno())
        finally:
            os.close(lock)


class JobEvents:
    """Appends to what happened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def add(self, event: Mapping[str, Any]) -> None:
        """One line; on a full disk it is lost, and the job goes on."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, json.dumps(event).encode() + b"\n")
