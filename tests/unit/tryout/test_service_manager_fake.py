"""The fakes keep the contracts of what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.clock import ClockContract
from tests.contracts.lease import LeaseContract
from tests.contracts.service_manager import UNIT, SystemdContract
from tests.support.fakes import FakeClock, FakeServiceManager
from tests.support.toy_program import toy_program
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
