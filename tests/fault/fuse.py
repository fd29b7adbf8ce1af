"""A fuse for every effect of a swap: it ends the process, or lets the effect fail.

Every effect of a swap is announced: those on the disk by `Files(before=...)`, those on units by
`fused_services`. The fuse counts them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, cast

from tunerd.errors import ServiceError
from tunerd.units.manager import ServiceManager

_PATIENCE_S = 60.0


class Kind(Enum):
    """Who has the effect."""

    DISK = auto()
    UNITS = auto()


@dataclass(frozen=True)
class Step:
    """One effect, about to happen."""

    kind: Kind
    text: str


Burn = Callable[[Step], None]
"""What happens at the fuse's effect: it raises, or never returns."""


def full_disk(step: Step) -> None:
    """The effect fails as on a full disk, or as with a service manager that refuses."""
    if step.kind is Kind.DISK:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise ServiceError(f"refused: {step.text}", cause="the fuse")


def ctrl_c(_step: Step) -> None:
    """Somebody presses Ctrl-C; the swap must run in the main thread."""
    signal.raise_signal(signal.SIGINT)


class Fuse:
    """Counts effects and burns at number `at`, and at those up to `until` (both from 0).

    `of` limits it to effects of one kind, counted by themselves. `steps` are all that were
    announced.
    """

    def __init__(
        self,
        at: int | None = None,
        burn: Burn | None = None,
        *,
        until: int | None = None,
        of: Kind | None = None,
    ) -> None:
        self.steps: list[Step] = []
        self.burnt: list[Step] = []
        self._at = at
        self._until = at if until is None else until
        self._burn = burn
        self._of = of
        self._count = 0

    def burns_in(self, n: int, burn: Burn) -> None:
        """Burn once more, after so many effects from now on."""
        self._at = self._until = self._count + n
        self._burn = burn

    def disk(self, text: str) -> None:
        """For `Files(before=...)`."""
        self._announce(Step(Kind.DISK, text))

    def units(self, text: str) -> None:
        """For `fused_services`."""
        self._announce(Step(Kind.UNITS, text))

    def _announce(self, step: Step) -> None:
        self.steps.append(step)
        if self._of is not None and step.kind is not self._of:
            return
        number = self._count
        self._count += 1
        if self._at is None or self._until is None or self._burn is None:
            return
        if self._at <= number <= self._until:
            self.burnt.append(step)
            self._burn(step)


_CHANGES = frozenset({
    "reload", "start", "run_transient", "stop", "restart", "reset_failed", "enable", "disable",
    "start_bound", "lease",
})  # fmt: skip
_QUESTIONS = frozenset({
    "state", "properties", "check_ready", "log", "log_since", "was_stopped", "ended_well",
})  # fmt: skip


class _FusedServices:
    """A service manager that announces some of its methods before they happen."""

    def __init__(self, real: ServiceManager, fuse: Fuse, announced: frozenset[str]) -> None:
        self._real = real
        self._fuse = fuse
        self._announced = announced

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in self._announced:
            return found

        def announced(*args: Any, **options: Any) -> Any:
            self._fuse.units(name)
            return found(*args, **options)

        return announced


def fused_services(real: ServiceManager, fuse: Fuse, *, asks: bool = False) -> ServiceManager:
    """A service manager whose every change is announced; with `asks`, questions are too."""
    announced = _CHANGES | _QUESTIONS if asks else _CHANGES
    return cast("ServiceManager", _FusedServices(real, fuse, announced))


class Life:
    """One run of an action in a thread that can be killed in the middle.

    The thread is stopped where it stands and never goes on: no `except` and no `finally` of the
    code under test runs, as after SIGKILL. What the kernel does at the death of a process is done
    here: its locks are released.
    """

    def __init__(self, lock: Path) -> None:
        self.died_before: Step | None = None
        self.error: BaseException | None = None
        self.over = threading.Event()
        self._lock = lock
        self._others = {fd for fd, path in open_files().items() if _is_let_go(path, lock)}

    def die(self, step: Step) -> None:
        """For a fuse: the process is dead from here on."""
        self.died_before = step
        self.over.set()
        threading.Event().wait()

    def live(self, action: Callable[[], object]) -> None:
        """Run until the action ends, or its process dies."""

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 -- told to the test
                self.error = error
            self.over.set()

        threading.Thread(target=run, daemon=True).start()
        assert self.over.wait(_PATIENCE_S), "it hangs"
        if self.died_before is not None:
            let_go(self._lock, but=self._others)


def open_files() -> dict[int, Path]:
    """Of this process, by descriptor."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(link.name)] = link.readlink()
    return found


def let_go(*locks: Path, but: Collection[int] = ()) -> None:
    """Let go of the lock files, and of what was being written, but for descriptors of others."""
    for descriptor, path in open_files().items():
        if descriptor in but or not _is_let_go(path, *locks):
            continue
        if path in locks:
            os.close(descriptor)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _is_let_go(path: Path, *locks: Path) -> bool:
    return path in locks or path.suffix == ".tmp"


def let_go_of_names(begin: str) -> None:
    """Let go of names of this machine, which are abstract sockets."""
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()]
    held = {f"socket:[{row[6]}]" for row in rows if row[7:] and row[7].startswith(f"@{begin}")}
    for descriptor, path in open_files().items():
        if str(path) in held:
            os.close(descriptor)
