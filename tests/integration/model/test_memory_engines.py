"""Estimates against what real servers without a GPU report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.memory_cases import (
    CASES,
    ENGINES,
    MemoryCase,
    can_run,
    differences,
)

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
