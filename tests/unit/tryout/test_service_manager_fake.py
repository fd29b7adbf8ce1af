"""The fakes keep the contracts of what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.clock import ClockContract
from tests.contracts.lease import LeaseContract
from tests.contracts.service_manager import UNIT, SystemdContract
from tests.support.fakes import FakeClock, FakeServiceManager, Life
from tests.support.toy_program import toy_program
from tunerd.errors import ServiceError
from tunerd.machine.clock import SystemClock
from tunerd.tryout.local_service import Ending

TOY = "/usr/bin/toy"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def manager(tmp_path: Path, clock: FakeClock) -> FakeServiceManager:
    return FakeServiceManager(tmp_path, clock, {TOY: toy_program, "/bin/true": toy_program})


@pytest.fixture
def toy() -> str:
    return TOY


class TestFakeServiceManager(SystemdContract):
    @pytest.fixture
    def kill_main(self, manager: FakeServiceManager) -> Callable[[int], None]:
        return lambda number: manager.end_main(UNIT, Ending(signal=number))


class TestLeasesOfTheFake(LeaseContract):
    pass


class TestFakeClock(ClockContract):
    pass


class TestSystemClock(ClockContract):
    @pytest.fixture
    def clock(self) -> SystemClock:
        return SystemClock()


def test_time_passes_for_a_unit_only_when_somebody_sleeps(
    manager: FakeServiceManager, clock: FakeClock
) -> None:
    (manager.unit_dir / UNIT).write_text(f"[Service]\nExecStart={TOY} --end-after 10\n")
    manager.start(UNIT)

    assert manager.state(UNIT).is_active
    clock.advance(9)
    assert manager.state(UNIT).is_active
    clock.advance(2)
    assert not manager.state(UNIT).is_active


def test_a_test_can_let_a_call_fail(manager: FakeServiceManager) -> None:
    manager.errors["restart"] = [ServiceError("broken")]
    (manager.unit_dir / UNIT).write_text(f"[Service]\nExecStart={TOY}\n")

    with pytest.raises(ServiceError, match="broken"):
        manager.restart(UNIT)
    manager.restart(UNIT)

    assert manager.state(UNIT).is_active


def test_a_program_is_told_its_arguments_and_environment_and_when_it_ends(
    manager: FakeServiceManager, clock: FakeClock
) -> None:
    seen: list[object] = []

    def server(invocation: object) -> Life:
        seen.append(invocation)
        return Life(on_end=lambda: seen.append("end"))

    manager.programs["/opt/server"] = server
    (manager.unit_dir / UNIT).write_text(
        '[Service]\nEnvironment="A=b c"\nExecStart=/opt/server "x y" ${A}\n'
    )
    manager.start(UNIT)
    assert manager.argv_of(UNIT) == ("/opt/server", "x y", "b c")
    assert len(manager.pids_in_use) == 1

    manager.stop(UNIT)

    assert seen[-1] == "end"
    assert len(manager.pids_in_use) == 0
    assert clock.monotonic_s() == 5000.0


def test_after_a_reboot_what_is_enabled_runs(manager: FakeServiceManager) -> None:
    text = f"[Service]\nExecStart={TOY}\n[Install]\nWantedBy=multi-user.target\n"
    (manager.unit_dir / "a.service").write_text(text)
    (manager.unit_dir / "b.service").write_text(text)
    (manager.runtime_unit_dir / "c.service").write_text(text)
    manager.enable("a.service")
    manager.start("b.service")
    manager.start("c.service")

    manager.reboot()

    assert manager.state("a.service").is_active
    assert not manager.state("b.service").is_active
    assert not manager.state("c.service").exists
