"""The generated reference is what the code says today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
GENERATOR = runpy.run_path(str(DOCS / "generate_reference.py"), run_name="generator")


@pytest.mark.parametrize("name", GENERATOR["PAGES"])
def test_a_page_of_the_reference_is_fresh(name: str) -> None:
    text = GENERATOR["page"](name)
    stored = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert stored == text, "run `python docs/generate_reference.py`"


def test_every_page_of_the_reference_is_generated() -> None:
    stored = {path.name for path in (DOCS / "reference").iterdir()}
    assert stored == set(GENERATOR["PAGES"])
