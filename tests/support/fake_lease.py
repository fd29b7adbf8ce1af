"""Leases of the service manager's fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tunerd.machine.net import can_bind
from tunerd.units.manager import PORT_LIMIT_S, LeaseSpec


class _Units(Protocol):
    """What the fake manager does for its leases."""

    def bound_to(self, lease: str) -> list[str]: ...
    def stop_bound(self, unit: str) -> None: ...
    def is_down(self, unit: str) -> bool: ...
    def start_production(self, unit: str) -> None: ...
    def monotonic_s(self) -> float: ...


@dataclass
class FakeLease:
    """A Lease; `is_ending` while what is bound to it still stops."""

    spec: LeaseSpec
    ends_at_s: float
    stop: Callable[[str], None]
    catch_up: Callable[[], None]
    inhibits: str | None = "sleep"
    is_over: bool = False
    is_ending: bool = False
    restores: bool = field(default=False)
    address: tuple[str, int] | None = None
    free_by_s: float | None = None

    def is_held(self) -> bool:
        """Whether it stands."""
        self.catch_up()
        return self.stands

    @property
    def stands(self) -> bool:
        """As of the last look."""
        return not (self.is_over or self.is_ending)

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Note the address."""
        self.address = address

    def is_port_taken(self, now_s: float) -> bool:
        """Whether production still waits for its port."""
        if self.address is None or can_bind(*self.address):
            return False
        if self.free_by_s is None:
            self.free_by_s = now_s + PORT_LIMIT_S
        return now_s < self.free_by_s

    def end(self, *, timeout_s: float = 120.0) -> None:
        """End it."""
        del timeout_s
        self.stop(self.spec.unit)


class Leases:
    """All leases that were taken."""

    def __init__(self, units: _Units) -> None:
        self._units = units
        self._leases: list[FakeLease] = []

    def add(self, lease: FakeLease) -> None:
        """One more."""
        lease.restores = lease.spec.restores
        self._leases.append(lease)

    def find(self, unit: str) -> FakeLease | None:
        """The lease with this unit, while it is not over."""
        found = (lease for lease in self._leases if lease.spec.unit == unit and not lease.is_over)
        return next(found, None)

    def of(self, production: str) -> list[FakeLease]:
        """Those that keep this unit down."""
        return [x for x in self._leases if x.spec.production == production and not x.is_over]

    @property
    def due_s(self) -> float:
        """When the next one ends by itself."""
        return min((x.ends_at_s for x in self._leases if x.stands), default=float("inf"))

    def expire(self, now_s: float) -> None:
        """End those whose time is over."""
        for lease in self._leases:
            if lease.stands and lease.ends_at_s <= now_s:
                self.begin_end(lease, restores=lease.restores)

    def begin_end(self, lease: FakeLease, *, restores: bool) -> None:
        """Stop what is bound to it."""
        lease.is_ending, lease.restores = True, restores
        for unit in self._units.bound_to(lease.spec.unit):
            self._units.stop_bound(unit)
        self.settle()

    def settle(self) -> None:
        """Production starts where all that was bound is down."""
        for lease in self._leases:
            bound = self._units.bound_to(lease.spec.unit)
            down = all(self._units.is_down(unit) for unit in bound)
            if lease.is_ending and down and not lease.is_port_taken(self._units.monotonic_s()):
                lease.is_ending, lease.is_over = False, True
                if lease.restores:
                    self._units.start_production(lease.spec.production)
