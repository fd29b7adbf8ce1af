"""A small world in which units are swapped, for every test of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.world import World, a_world, in_memory


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """One in which nothing has to last."""
    with in_memory(tmp_path) as made:
        yield made


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """One in which nothing stands yet."""
    with a_world(folder / "world") as made:
        yield made
