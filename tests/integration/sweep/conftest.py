"""The box of a module's sweeps; a module that needs another has its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.sweep_box import SweepBox, swept
from tunerd.machine.net import free_port


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found
