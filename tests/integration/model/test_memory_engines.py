"""Estimates against what real servers without a GPU report."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.memory_cases import (
    CASES,
    ENGINES,
    LLAMA,
    MemoryCase,
    can_run,
    differences,
    file_name,
    said_by,
)
from tests.support.model_headers import facts_of_shape
from tests.support.shapes import write_hollow
from tunerd.machine.host import read_memory
from tunerd.model.memory import MemorySettings, context_that_fits

# Placement plays no part here, so that cases which differ in it alone would be the same.
ON_CPU = (
    "dense-64k-mtp6-q4",
    "dense-8k-ub2048-mtp6",
    "dense-32k-4slots-unified",
    "moe-64k-ncmoe8-mtp2-q8",
    "llama-16k-draft4",
    "gemma-32k-4slots",
)
CASES_HERE = tuple(case.on_cpu() for case in CASES if case.name in ON_CPU)

BUILDS = tuple(name for name in ENGINES if name not in ("embedded", "mainline-0.7.0"))
RUNS = [(name, case) for name in BUILDS for case in CASES_HERE if can_run(ENGINES[name], case)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models: headers, and holes of half a gigabyte."""
    return tmp_path_factory.mktemp("hollow")


def check(name: str, program: Sequence[str], case: MemoryCase, folder: Path) -> None:
    found = differences(name, program, case, folder)

    for one in found:
        print(one)  # noqa: T201 -- `pytest -rP` shows the table
    assert all(one.is_allowed for one in found), "\n".join(map(str, found))


@pytest.mark.llama
@pytest.mark.parametrize("case", CASES_HERE, ids=lambda case: case.name)
def test_the_embedded_engine_agrees(case: MemoryCase, folder: Path) -> None:
    check("embedded", [sys.executable, "-m", "tunerd.tryout.embedded"], case, folder)


@pytest.mark.engine
@pytest.mark.parametrize(("name", "case"), RUNS, ids=[f"{name}-{case.name}" for name, case in RUNS])
def test_builds_of_every_family_agree(name: str, case: MemoryCase, folder: Path) -> None:
    check(name, [str(needs.engine(name))], case, folder)


# Of all RAM, which counts without a card.
ROOM_MIB = 1500
_REDUCED = re.compile(r"context size reduced from (\d+) to (\d+)")


def check_context(name: str, program: Sequence[str], folder: Path, n_slots: int) -> None:
    """A context that nobody set is within 3 % of what is told; slots have caches of their own."""
    model = folder / file_name(LLAMA)
    if not model.exists():
        write_hollow(model, LLAMA)
    total = read_memory().total_mib
    assert total is not None
    slots = ("-np", str(n_slots), "--no-kv-unified")
    words = ("-m", str(model), "-fitt", str(total - ROOM_MIB), *slots, "-lv", "5", "--no-warmup")
    lines = said_by([*program, *words], folder, until=_REDUCED)
    said = _REDUCED.search(lines[-1])
    assert said is not None, lines[-1]
    asked = MemorySettings(has_gpu=False, n_parallel=n_slots, laws=ENGINES[name].laws)
    told = context_that_fits(facts_of_shape(LLAMA), asked, ROOM_MIB)

    assert told is not None
    assert told[1] == int(said[1])
    assert told[0] == pytest.approx(int(said[2]), rel=0.03)


@pytest.mark.llama
@pytest.mark.parametrize("n_slots", [1, 4])
def test_the_embedded_engine_makes_the_context_that_is_told(folder: Path, n_slots: int) -> None:
    check_context("embedded", [sys.executable, "-m", "tunerd.tryout.embedded"], folder, n_slots)


@pytest.mark.engine
@pytest.mark.parametrize("name", [one for one in BUILDS if not one.startswith("ik")])
def test_builds_make_the_context_that_is_told(name: str, folder: Path) -> None:
    check_context(name, [str(needs.engine(name))], folder, 4)
