"""A lease held by systemd: PID 1, or a user's manager, brings production back without our help.

    tunerd-run-ID.scope       around this process: it ends when the process does
    tunerd-lease-ID.service   takes production's place, keeps the machine awake, ends with the scope

Where another build than production's was on its port, the lease is over only once that is free: systemd
starts production after the lease's ExecStopPost=, which waits with nothing but a shell and grep.

Source of the pattern: systemd.unit(5), BindsTo=, Conflicts=, OnSuccess=; tried by docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.core.host import Mode
from tunerd.core.lease import PORT_LIMIT_S, LeaseSpec, run_scope
from tunerd.errors import ServiceError
from tunerd.system.files import Files
from tunerd.system.sockets import TABLES, table_pattern

if TYPE_CHECKING:
    from tunerd.system.systemd import Systemd

# Best first. On a user's manager without a session, polkit denies `sleep` in block mode.
_INHIBITORS = ("sleep", "idle")
_LAST = "last"
_STOP_MARGIN_S = 25.0
_SCOPE_LIMIT_S = 15.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SystemdLease:
    """A Lease."""

    spec: LeaseSpec
    inhibits: str | None
    manager: Systemd

    def is_held(self) -> bool:
        """Whether the lease's unit is active."""
        return self.manager.state(self.spec.unit).is_active

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Write the script that the lease runs at its end."""
        folder = _folder(self.manager, self.spec)
        if folder.is_dir():  # else the lease is over
            Files().write(folder / _LAST, _waiting(self.manager, address).encode())

    def end(self, *, timeout_s: float = 120.0) -> None:
        """Stop the lease's unit; systemd does the rest."""
        self.manager.stop(self.spec.unit, timeout_s=timeout_s)


def take_lease(manager: Systemd, spec: LeaseSpec, *, timeout_s: float) -> SystemdLease:
    """Make the units; production is down and the lease stands when this returns.

    Raises:
        ServiceError: systemd refused, or did not answer.
    """
    bound_to = spec.bound_to or _enter_scope(manager, spec)
    inhibits = _inhibitor(manager, spec)
    last = _folder(manager, spec) / _LAST
    argv = ["sleep", "infinity"]
    if inhibits is not None:
        argv = [*_inhibit(inhibits, spec.why), *argv]
    properties = [
        ("Description", f"tunerd measures in the place of {spec.production}: {spec.why}"),
        ("Type", "exec"),
        ("CollectMode", "inactive-or-failed"),
        ("Conflicts", spec.production),
        ("After", f"{spec.production} {bound_to}"),
        ("BindsTo", bound_to),
        ("RuntimeMaxSec", f"{max(1.0, spec.limit_s):.0f}"),
        ("RuntimeDirectory", last.parent.name),
        # A file: what systemd 252 keeps of a transient command that has a `$` is not what was said.
        ("ExecStopPost", f"-/bin/sh {last}"),
        ("TimeoutStopSec", f"{PORT_LIMIT_S + _STOP_MARGIN_S:.0f}"),
    ]
    if spec.restores:
        properties += [("OnSuccess", spec.production), ("OnFailure", spec.production)]
    manager.run_transient(spec.unit, argv, properties, timeout_s=timeout_s)
    lease = SystemdLease(spec, inhibits, manager)
    lease.restore_when_free(None)
    if not lease.is_held():
        raise ServiceError(
            f"{spec.unit} ended as soon as it had begun",
            cause=" ".join(manager.log(spec.unit, max_lines=3)) or None,
        )
    return lease


def _folder(manager: Systemd, spec: LeaseSpec) -> Path:
    """What systemd makes for the lease and removes with it."""
    return manager.runtime_unit_dir.parents[1] / spec.unit.removesuffix(".service")


def _waiting(manager: Systemd, address: tuple[str, int] | None) -> str:
    """A script that ends when the port is free, the time is over, or the machine goes down."""
    if address is None:
        return "# nothing to wait for\n"
    scope = "--user " if manager.mode is Mode.USER else ""
    return f"""\
n=0
while [ $n -lt {PORT_LIMIT_S:.0f} ] && grep -qsE '{table_pattern(*address)}' {" ".join(TABLES)}; do
    [ "$(systemctl {scope}is-system-running 2>&1)" = stopping ] && exit
    sleep 1
    n=$((n+1))
done
"""


def _enter_scope(manager: Systemd, spec: LeaseSpec) -> str:
    """Move this process into a scope of its own, which ends with it."""
    scope = run_scope(spec.id)
    manager.start_scope(scope, os.getpid(), f"tunerd: {spec.why}")
    clock = manager.clock
    end_s = clock.monotonic_s() + _SCOPE_LIMIT_S
    while not manager.state(scope).is_active:
        if clock.monotonic_s() > end_s:
            raise ServiceError(f"{scope} does not start")
        clock.sleep(_POLL_S)
    return scope


def _inhibitor(manager: Systemd, spec: LeaseSpec) -> str | None:
    """What the lease may keep the machine from; asked as a unit, for who asks decides."""
    for number, what in enumerate(_INHIBITORS):
        probe = f"tunerd-probe-{spec.id}-{number}.service"
        with contextlib.suppress(ServiceError):
            if manager.run_and_wait(probe, [*_inhibit(what, "probe"), "true"]):
                return what
    return None


def _inhibit(what: str, why: str) -> list[str]:
    return ["systemd-inhibit", f"--what={what}", "--mode=block", "--who=tunerd", f"--why={why}"]
