"""What a lease of every service manager must do: systemd's, the supervisor's, and the fake's."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contracts.service_manager import UNIT, Contract
from tunerd.errors import ServiceError
from tunerd.units.manager import Lease, LeaseSpec, UnitState, candidate_unit

Take = Callable[[LeaseSpec], Lease]
LONG_S = 300.0


def spec(*, restores: bool = True, limit_s: float = LONG_S) -> LeaseSpec:
    """A lease on UNIT with a name of its own."""
    return LeaseSpec(secrets.token_hex(6), UNIT, restores, limit_s, "contract $HOME 100%")


class LeaseContract(Contract):
    """Tests of any service manager's leases.

    A subclass gives the fixtures `manager`, `clock` and `toy` (see ServiceManagerContract), and sees
    to it that UNIT and what is in the runtime folder are gone after each test.
    """

    def put(self, folder: Path, unit: str, text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / unit).write_text(text)
        (folder / unit).chmod(0o644)

    @pytest.fixture
    def production(self) -> UnitState:
        """UNIT, running."""
        text = f"[Service]\nType=exec\nExecStart={self.program} --print up\nRestart=on-failure\n"
        self.put(self.units.unit_dir, UNIT, text)
        self.units.reload()
        self.units.start(UNIT)
        return self.units.state(UNIT)

    @pytest.fixture
    def take(self) -> Iterator[Take]:
        """Takes leases that end with the test at the latest."""
        taken: list[Lease] = []

        def take(wanted: LeaseSpec) -> Lease:
            taken.append(self.units.lease(wanted))
            return taken[-1]

        yield take
        for lease in taken:
            lease.end()

    def candidate(self, lease: Lease, options: str = "") -> str:
        """Start a unit that is bound to a lease."""
        unit = candidate_unit(lease.spec.id, 1)
        text = (
            f"[Unit]\nBindsTo={lease.spec.unit}\nAfter={lease.spec.unit} {UNIT}\n"
            f"[Service]\nType=exec\nExecStart={self.program} --print up {options}\n"
        )
        self.put(self.units.runtime_unit_dir, unit, text)
        self.units.reload()
        self.units.start_bound(unit)
        return unit

    def is_back(self, before: UnitState) -> None:
        """Production runs, as another process."""
        self.until(lambda: self.units.state(UNIT).is_active, "production is not back")
        assert self.units.state(UNIT).invocation_id != before.invocation_id

    def test_a_lease_takes_the_place_of_the_unit_and_its_end_gives_it_back(
        self, take: Take, production: UnitState
    ) -> None:
        lease = take(spec())

        assert self.units.state(UNIT).active_state == "inactive"
        assert lease.is_held()
        assert self.units.state(lease.spec.unit).is_active

        lease.end()

        assert not lease.is_held()
        assert not self.units.state(lease.spec.unit).is_active
        self.is_back(production)
        lease.end()  # once more is no error

    def test_a_lease_that_restores_nothing_leaves_the_unit_stopped_and_one_that_does_starts_it(
        self, take: Take, production: UnitState
    ) -> None:
        lease = take(spec(restores=False))

        lease.end()

        self.time.sleep(0.5)
        assert self.units.state(UNIT).active_state == "inactive"

        take(spec(restores=True)).end()

        self.is_back(production)

    def test_what_is_bound_is_down_before_the_unit_starts_again(
        self, take: Take, production: UnitState
    ) -> None:
        lease = take(spec())
        unit = self.candidate(lease, "--slow-term 1")
        self.until(lambda: "up" in self.units.log(unit), "the candidate is silent")
        assert self.units.state(unit).is_active
        began_s = self.time.monotonic_s()

        lease.end()

        assert self.time.monotonic_s() - began_s > 0.9
        assert not self.units.state(unit).is_active
        self.is_back(production)
        since_s = self.units.state(UNIT).active_since_s
        assert since_s is not None
        assert since_s - (self.time.now_s() - self.time.monotonic_s() + began_s) > 0.9

    def test_production_starts_once_its_port_is_free_where_it_is_to_wait_for_one(
        self, take: Take, production: UnitState
    ) -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            waits_no_more = take(spec())
            waits_no_more.restore_when_free(holder.getsockname())
            waits_no_more.restore_when_free(None)
            waits_no_more.end()
            self.is_back(production)

            production = self.units.state(UNIT)
            lease = take(spec(limit_s=3.0))
            lease.restore_when_free(holder.getsockname())
            self.until(lambda: not lease.is_held(), "its time is not over")
            self.time.sleep(2.0)
            assert not self.units.state(UNIT).is_active, "its port is taken"
        self.is_back(production)

    @pytest.mark.parametrize("end", ["the unit is started", "its own is stopped", "time is over"])
    def test_a_lease_ends_with_all_that_is_bound_and_the_unit_is_back(
        self, take: Take, production: UnitState, end: str
    ) -> None:
        lease = take(spec(limit_s=4 if end == "time is over" else LONG_S))
        unit = self.candidate(lease)

        if end == "the unit is started":
            self.units.start(UNIT)
        elif end == "its own is stopped":
            self.units.stop(lease.spec.unit)
        else:
            self.until(lambda: not lease.is_held(), "the lease outlives its time")

        assert not lease.is_held()
        self.is_back(production)
        assert not self.units.state(unit).is_active

    def test_a_lease_that_ends_is_held_no_more_while_what_is_bound_still_stops(
        self, take: Take, production: UnitState
    ) -> None:
        lease = take(spec())
        unit = self.candidate(lease, "--slow-term 3")
        self.until(lambda: "up" in self.units.log(unit), "the candidate is silent")

        def begins() -> bool:
            """A busy machine may not come to ask for it in that time."""
            with pytest.raises(ServiceError):
                self.units.start(UNIT, timeout_s=0.5)
            return not lease.is_held()

        self.until(begins, "the lease is still held")
        assert self.units.state(unit).main_pid is not None
        self.is_back(production)

    def test_a_candidate_that_ends_leaves_the_lease_standing_and_none_is_bound_to_one_that_is_gone(
        self, take: Take, production: UnitState
    ) -> None:
        lease = take(spec())
        unit = self.candidate(lease, "--end-after 0.2 --status 7")

        self.until(lambda: self.units.state(unit).has_failed, "it does not fail")

        assert self.units.state(unit).exit_status == 7
        assert lease.is_held()
        assert self.units.state(UNIT).active_state == "inactive"
        lease.end()
        self.is_back(production)

        with pytest.raises(ServiceError):
            self.candidate(lease)

        assert not self.units.state(unit).is_active
        assert not lease.is_held()
        assert self.units.state(UNIT).is_active
