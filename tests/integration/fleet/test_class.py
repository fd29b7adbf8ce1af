"""Which boxes are of one class."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.sweep_box import SweepBox, swept
from tunerd.fleet.study import class_of, drafts_of, meet
from tunerd.machine.net import free_port
from tunerd.profile.arm import DRAFT_MODEL, Space
from tunerd.sweep.known import Study
from tunerd.sweep.plan import SweepRequest, prepare


@pytest.fixture
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as made:
        yield made


def test_a_class_is_what_can_learn_from_each_other_whenever_each_box_got_its_files(
    box: SweepBox,
) -> None:
    model = box.box.folder / "tiny.gguf"

    def found() -> str:
        box.call("apply", "night", "--yes", code=None)
        return class_of(prepare(box.box.context, SweepRequest(budget_s=3600.0), proves=False))

    prepared = prepare(box.box.context, SweepRequest(budget_s=3600.0), proves=False)
    wider = replace(prepared, policy=replace(prepared.policy, at_least_tok_s=20.0))
    assert class_of(wider) != class_of(prepared), "its arms differ in context"
    family = next(iter(prepared.space.space.families.values()))

    def drafted(name: object) -> dict[str, str]:
        pair = frozenset({(DRAFT_MODEL, str(name))})
        drafts = Space({("fake", "draft"): replace(family, extra=(pair,))})
        drafting = replace(prepared, space=replace(prepared.space, space=drafts))
        return drafts_of(box.box.context, drafting)

    shutil.copy(model, copy := model.with_name("elsewhere.gguf"))
    assert drafts_of(box.box.context, prepared) == {}
    assert list(drafted(copy).values()) == list(drafted(model).values())
    assert class_of(prepared, drafted(copy).values()) != class_of(prepared)
    assert drafted("/a/small.gguf") == {"/a/small.gguf": "small.gguf"}

    host = replace(prepared.base_plan.host, gpus=None)
    blind = replace(prepared, base_plan=replace(prepared.base_plan, host=host))
    said: list[str] = []
    ctx = replace(box.box.context, progress=lambda progress: said.append(progress.text))
    with meet(ctx, blind) as study:
        assert type(study) is Study, "what is unknown is no class"
    assert said == ["this box sweeps alone: what card it has cannot be told"]

    first = found()
    os.utime(model, (1_700_000_000, 1_700_000_000))
    assert found() == first
    with model.open("ab") as file:
        file.write(b"\0")
    assert found() != first
