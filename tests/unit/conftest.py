"""A small world in which units are swapped, for every test of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.world import World, a_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One in which nothing stands yet."""
    with a_world(tmp_path / "world") as made:
        yield made
