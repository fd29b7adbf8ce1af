"""What tests of several packages share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import nvml_stub
from tests.support.folders import open_folder
from tests.support.local_box import Box
from tests.support.postgres import Postgres
from tests.support.supervised import end_supervisor, processes_with, wait_until_gone
from tunerd.tryout.local import Local


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVML's C stub, compiled once."""
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other accounts may enter."""
    with open_folder() as made:
        yield made


@pytest.fixture
def url(postgres: Postgres) -> str:
    """A database of its own."""
    return postgres.database()


@contextmanager
def started_by_hand(box: Box, command: str) -> Iterator[Local]:
    """A unit that somebody wrote, under tunerd's own supervisor; all of it ends with the block."""
    box.put_unit(f"[Service]\nType=exec\nExecStart={command}\n")
    manager = Local(box.context.paths, may_start=True)
    try:
        manager.reload()
        manager.start(box.unit.name)
        yield manager
    finally:
        started = processes_with(str(box.folder))
        end_supervisor(box.context.paths)
        wait_until_gone(*started)
