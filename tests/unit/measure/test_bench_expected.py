"""What a command line asks of speculation, and whether a process runs with it."""

from __future__ import annotations

import pytest

from tunerd.measure.trust import Speculation, is_same_command, speculation_of


@pytest.mark.parametrize(
    ("words", "drafts", "always"),
    [
        ("-m x.gguf", None, False),
        ("--spec-type none", False, False),
        ("--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0", True, True),
        ("--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0.75", True, False),
        ("--spec-type draft-mtp --spec-draft-n-max 0", False, False),
        ("--spec-type mtp:n_max=3,p_min=0.0", True, True),
        ("--spec-type mtp:n_max=3,p_min=0.5", True, False),
        ("-mtp --draft-max 3 --draft-p-min 0", True, True),
        ("-no-mtp", False, False),
        ("--model-draft small.gguf", True, False),
    ],
)
def test_whether_it_drafts_is_told_from_every_dialects_flags(
    words: str, drafts: bool | None, always: bool
) -> None:
    assert speculation_of(["llama-server", *words.split()]) == Speculation(drafts, always)


def test_a_process_behind_its_interpreter_runs_the_same_command() -> None:
    argv = ("/usr/bin/llama-server", "-c", "4096")

    assert is_same_command(argv, ("python3", "/x/llama-server", "-c", "4096")) is True
    assert is_same_command(argv, ("/usr/bin/llama-server", "-c", "8192")) is False
    assert is_same_command(argv, ("llama-server", "-c", "4096", "--verbose")) is False
    assert is_same_command(argv, None) is None
