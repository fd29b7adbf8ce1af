"""tunerd's own supervisor keeps the contract of a service manager, with real processes."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contracts.lease import LeaseContract
from tests.contracts.service_manager import UNIT, SlowJobsContract
from tests.support.supervised import supervised
from tunerd.system.clock import SystemClock
from tunerd.system.local import Local
from tunerd.system.seams import ServiceManager

TOY = Path(__file__).parents[1] / "support/toy_service.sh"


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Local]:
    with supervised(tmp_path) as paths:
        yield Local(paths, may_start=True)


@pytest.fixture
def toy(tmp_path: Path) -> str:
    """A copy, so that what is left of it after a test can be told by its path."""
    return str(shutil.copy(TOY, tmp_path / "toy"))


class TestLeasesOfLocal(LeaseContract):
    pass


class TestLocal(SlowJobsContract):
    @pytest.fixture
    def kill_main(self, manager: Local) -> Callable[[int], None]:
        def kill(number: int) -> None:
            pid = manager.state(UNIT).main_pid
            assert pid is not None
            os.kill(pid, number)

        return kill

    def _pause(self) -> None:
        time.sleep(0.02)

    def _restart_while_another_stops(self, manager: ServiceManager) -> None:
        stopper = threading.Timer(0.5, manager.stop, [UNIT])
        stopper.start()
        try:
            manager.restart(UNIT)
        finally:
            stopper.join()
