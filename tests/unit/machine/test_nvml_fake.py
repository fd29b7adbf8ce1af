"""The GPU fake behaves as the real reader does."""

from __future__ import annotations

import pytest

from tests.contracts.gpu import GpuReaderContract
from tests.support.fake_gpu import FakeGpuReader
from tunerd.machine.facts import Gpu


class FakeWorld:
    """The fake steers itself."""

    def __init__(self) -> None:
        self.reader = FakeGpuReader()

    def show(self, *gpus: Gpu) -> None:
        self.reader.show(*gpus)

    def hide(self) -> None:
        self.reader.hide("the NVIDIA kernel driver is not loaded")

    def lose(self, index: int) -> None:
        self.reader.lose(index)


class TestFakeGpuReader(GpuReaderContract):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld()
