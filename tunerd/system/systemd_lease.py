"""A lease held by systemd: PID 1, or a user's manager, brings production back without our help.

    tunerd-run-ID.scope       around this process: it ends when the process does
    tunerd-lease-ID.service   takes production's place, keeps the machine awake, ends with the scope

Source of the pattern: systemd.unit(5), BindsTo=, Conflicts=, OnSuccess=; tried by docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd.core.lease import LeaseSpec, run_scope
from tunerd.errors import ServiceError

if TYPE_CHECKING:
    from tunerd.system.systemd import Systemd

# Best first. On a user's manager without a session, polkit denies `sleep` in block mode.
_INHIBITORS = ("sleep", "idle")
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
    ]
    if spec.restores:
        properties += [("OnSuccess", spec.production), ("OnFailure", spec.production)]
    manager.run_transient(spec.unit, argv, properties, timeout_s=timeout_s)
    lease = SystemdLease(spec, inhibits, manager)
    if not lease.is_held():
        raise ServiceError(
            f"{spec.unit} ended as soon as it had begun",
            cause=" ".join(manager.log(spec.unit, max_lines=3)) or None,
        )
    return lease


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
