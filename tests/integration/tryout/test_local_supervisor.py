"""tunerd's own supervisor keeps the contract of a service manager, with real processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.lease import LeaseContract
from tests.contracts.service_manager import RealProcessesContract
from tests.support.folders import SUPPORT
from tests.support.supervised import supervised
from tunerd.machine.clock import SystemClock
from tunerd.tryout.local import Local

TOY = SUPPORT / "toy_service.sh"


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


class TestLocal(RealProcessesContract):
    pass


def test_a_stranger_who_locks_the_state_folder_keeps_no_supervisor_from_starting(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path) as paths:
        paths.state_dir.mkdir(parents=True)
        folder = os.open(paths.state_dir, os.O_RDONLY)  # as everybody may, for it is readable
        try:
            fcntl.flock(folder, fcntl.LOCK_SH)
            Local(paths, may_start=True).reload()
        finally:
            os.close(folder)
        assert (paths.state_dir / "supervise.lock").stat().st_mode & 0o077 == 0
