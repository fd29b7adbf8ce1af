"""Leases under tunerd's own supervisor: a connection that is held, and what happens when it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunerd.core.lease import PORT_LIMIT_S, lease_of
from tunerd.errors import ServiceError
from tunerd.system.ports import can_bind
from tunerd.system.supervisor_calls import Connection
from tunerd.system.unit_source import check_name

_MAX_S = 31 * 86400.0
_MAX_PORT = 65535


@dataclass(slots=True, eq=False)
class HeldLease:
    """Production's place, held by whoever is at the other end of `connection`.

    `is_granted` once production is down; `is_ending` while what is bound to it still stops.
    `waiting` are callers that asked for its end. `ends_at_s` is on the monotonic clock. Production
    does not start before `address` is free, or `free_by_s`, known once the rest has ended.
    """

    unit: str
    production: str
    restores: bool
    ends_at_s: float
    connection: Connection | None
    is_granted: bool = False
    is_ending: bool = False
    waiting: list[Connection] = field(default_factory=list)
    address: tuple[str, int] | None = None
    free_by_s: float | None = None

    @property
    def stands(self) -> bool:
        """Whether something may be bound to it."""
        return self.is_granted and not self.is_ending

    def properties(self) -> dict[str, str]:
        """As `systemctl show` would print it."""
        active = "active" if self.stands else "deactivating" if self.is_ending else "activating"
        sub = "running" if self.stands else "stop-sigterm" if self.is_ending else "start"
        return {"Id": self.unit, "LoadState": "loaded", "ActiveState": active, "SubState": sub,
                "Result": "success", "MainPID": "0"}  # fmt: skip


def read_address(request: Mapping[str, Any]) -> tuple[str, int] | None:
    """The address that must be free before production starts; None for none.

    Raises:
        ServiceError: The request makes no sense.
    """
    host, port = request.get("host"), request.get("port")
    if host is None and port is None:
        return None
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port <= _MAX_PORT:
        raise ServiceError("not an address")
    return host, port


def read_lease(request: Mapping[str, Any], connection: Connection, now_s: float) -> HeldLease:
    """The lease that is asked for.

    Raises:
        ServiceError: The request makes no sense.
    """
    unit = check_name(str(request.get("unit", "")))
    limit_s, restores = request.get("limit_s"), request.get("restores")
    is_limit = isinstance(limit_s, int | float) and 0 < limit_s <= _MAX_S
    if lease_of(unit) is None or not is_limit or not isinstance(restores, bool):
        raise ServiceError("not a request for a lease")
    production = check_name(str(request.get("production", "")))
    return HeldLease(unit, production, restores, now_s + float(limit_s or 0), connection)


class Leases:
    """All leases that are held or ending.

    Args:
        is_down: Whether nothing of a unit runs or is about to.
        bound_to: Units that are bound to a lease's unit.
        stop: Begins to stop a unit.
        restore: Starts production.
        granted: Tells the holder.
        lost: Tells the holder that its place is gone.
        over: Tells those who wait for its end.
    """

    def __init__(
        self,
        *,
        is_down: Callable[[str], bool],
        bound_to: Callable[[str], list[str]],
        stop: Callable[[str], None],
        restore: Callable[[str], None],
        granted: Callable[[HeldLease], None],
        lost: Callable[[HeldLease], None],
        over: Callable[[HeldLease], None],
    ) -> None:
        self._leases: dict[str, HeldLease] = {}
        self._is_down = is_down
        self._bound_to = bound_to
        self._stop = stop
        self._restore = restore
        self._granted = granted
        self._lost = lost
        self._over = over

    def take(self, lease: HeldLease) -> None:
        """Begin one.

        Raises:
            ServiceError: The place is taken, or the name was used before.
        """
        if lease.unit in self._leases or self.of(lease.production):
            raise ServiceError(f"the place of {lease.production} is held already")
        self._leases[lease.unit] = lease

    def find(self, unit: str) -> HeldLease | None:
        """The lease with this unit."""
        return self._leases.get(unit)

    def of(self, production: str) -> list[HeldLease]:
        """Those that keep this unit down."""
        return [lease for lease in self._leases.values() if lease.production == production]

    def held_by(self, connection: Connection) -> HeldLease | None:
        """The lease of this caller."""
        found = (lease for lease in self._leases.values() if lease.connection is connection)
        return next(found, None)

    @property
    def names(self) -> list[str]:
        """Their units."""
        return list(self._leases)

    def due_s(self) -> float | None:
        """When the next one ends by itself."""
        return min((x.ends_at_s for x in self._leases.values() if not x.is_ending), default=None)

    def begin_end(self, lease: HeldLease, *, restores: bool | None = None) -> None:
        """Stop what is bound to it; `turn` does the rest."""
        if restores is not None:
            lease.restores = restores
        if lease.is_ending:
            return
        lease.is_ending = True
        for unit in self._bound_to(lease.unit):
            self._stop(unit)

    def turn(self, now_s: float) -> None:
        """Go on as far as things are."""
        for lease in tuple(self._leases.values()):
            if not lease.is_ending and now_s >= lease.ends_at_s:
                self.begin_end(lease)
            if lease.is_ending:
                down = all(self._is_down(unit) for unit in self._bound_to(lease.unit))
                if down:
                    self._lost(lease)
                if down and _is_free(lease, now_s):
                    del self._leases[lease.unit]
                    self._over(lease)
                    if lease.restores:
                        self._restore(lease.production)
            elif not lease.is_granted and self._is_down(lease.production):
                lease.is_granted = True
                self._granted(lease)


def _is_free(lease: HeldLease, now_s: float) -> bool:
    """Whether production can have its port, or it has been waited for long enough."""
    if lease.address is None or can_bind(*lease.address):
        return True
    if lease.free_by_s is None:
        lease.free_by_s = now_s + PORT_LIMIT_S
    return now_s >= lease.free_by_s
