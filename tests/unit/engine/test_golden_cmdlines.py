"""Each shipped profile on each dialect is exactly one command line, or a refusal with its reason.

`TUNERD_TEST_UPDATE_GOLDEN=1` rewrites the files; the review reads the diff.
"""

from __future__ import annotations

import os

import pytest

from tests.support.builders import (
    HELP_OF,
    capabilities_of,
    recorded_context,
    resolved,
    shipped_sources,
)
from tests.support.folders import DATA
from tunerd.engine.commandline import CommandLine, render

GOLDEN = DATA / "golden" / "cmdline"


def rendered(profile_name: str, dialect: str) -> str:
    capabilities = capabilities_of(dialect)
    profile = resolved(profile_name, capabilities.family)
    result = render(profile, capabilities, recorded_context(profile))
    if isinstance(result, CommandLine):
        lines = [" ".join(argument.words) for argument in result.arguments]
        notes = [f"# {note.key}: {note.text}" for note in result.notes]
        return "\n".join([*lines, *notes]) + "\n"
    return "".join(f"REFUSED {refusal}\n" for refusal in result)


@pytest.mark.parametrize("dialect", HELP_OF)
@pytest.mark.parametrize("profile_name", shipped_sources().names)
def test_a_shipped_profile_renders_to_its_golden_line(profile_name: str, dialect: str) -> None:
    path = GOLDEN / dialect / f"{profile_name}.txt"
    text = rendered(profile_name, dialect)
    if os.environ.get("TUNERD_TEST_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_no_golden_file_without_a_profile_and_a_dialect() -> None:
    expected = {f"{dialect}/{name}.txt" for dialect in HELP_OF for name in shipped_sources().names}
    assert {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.txt")} == expected
