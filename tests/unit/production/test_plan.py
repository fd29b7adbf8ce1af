"""What a plan says of memory goes by the same decision as its command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import World
from tests.support.doctor_facts import HOST
from tests.support.profiles import profile_of
from tunerd.engine.builds import Choice
from tunerd.engine.flags import CommandLine
from tunerd.engine.help import Engine, OffloadDevice
from tunerd.machine.files import Files
from tunerd.model.files import ModelFiles
from tunerd.production.plan import memory_of_plan
from tunerd.result import Level
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.words import MiB


@pytest.mark.parametrize(
    ("memory", "is_placed_by_fit"),
    [
        ({}, True),
        ({"memory.cpu_moe": False}, True),
        ({"memory.override_tensor": []}, True),
        ({"memory.cpu_moe": True}, False),
        ({"memory.n_gpu_layers": 99}, False),
        ({"memory.fit": False}, False),
    ],
)
def test_a_card_that_is_too_small_is_told_by_who_places_the_model(
    world: World, tmp_path: Path, memory: dict[str, object], is_placed_by_fit: bool
) -> None:
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf").path
    program = Path("/bin/true")
    chosen = Choice(
        Engine("mine", program, "test", None, None, None, (), None),
        profile_of({"memory.fit_mib": 64, **memory}), CommandLine(str(program), ()), model,
        devices=(OffloadDevice("CUDA0", "a card", MiB(8), MiB(8)),), has_gpu=True, passed_over=(),
    )  # fmt: skip
    facts = ModelFiles(None, Files()).read_facts(model)

    judged = memory_of_plan(world.context(), chosen, facts, replace(HOST, gpus=()), None)

    (refused,) = [one for one in judged.messages if one.level is Level.ERROR]
    assert ("fit can move no more" in refused.text) is is_placed_by_fit
    assert ("let fit place it" in (refused.hint or "")) is not is_placed_by_fit
