"""The fakes keep the contracts of what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.clock import ClockContract
from tests.contracts.lease import LeaseContract
from tests.contracts.service_manager import UNIT, SystemdContract
from tests.support.fakes import FakeClock, FakeServiceManager, Invocation, Life
from tunerd.machine.clock import SystemClock
from tunerd.tryout.local_service import Ending

TOY = "/usr/bin/toy"
_NEVER = float("inf")
_FLAGS = frozenset({"--ignore-term"})


def toy_program(invocation: Invocation) -> Life:
    """Lives as tests/support/toy_service.sh does when given the same options."""
    options: dict[str, str] = {}
    words = list(invocation.argv[1:])
    while words:
        name = words.pop(0)
        options[name] = "" if name in _FLAGS else words.pop(0)
    text = options.get("--print")
    obeys_after_s = _NEVER if "--ignore-term" in options else float(options.get("--slow-term", 0))
    return Life(
        prints=() if text is None else (text,),
        ends_after_s=float(options.get("--end-after", _NEVER)),
        ending=Ending(code=int(options.get("--status", 0))),
        obeys_after_s=obeys_after_s,
        term_ending=Ending(code=int(options.get("--term-status", 0))),
    )


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
