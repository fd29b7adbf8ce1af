"""Which boxes are of one class."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.sweep_box import SweepBox, swept
from tunerd.fleet.study import class_of
from tunerd.machine.net import free_port
from tunerd.sweep.plan import SweepRequest, prepare


@pytest.fixture
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as made:
        yield made


def test_the_same_model_is_one_whenever_each_box_got_it(box: SweepBox) -> None:
    model = box.box.folder / "tiny.gguf"

    def found() -> str:
        box.call("apply", "night", "--yes", code=None)
        return class_of(prepare(box.box.context, SweepRequest(budget_s=3600.0), proves=False))

    first = found()
    os.utime(model, (1_700_000_000, 1_700_000_000))
    assert found() == first
    with model.open("ab") as file:
        file.write(b"\0")
    assert found() != first
