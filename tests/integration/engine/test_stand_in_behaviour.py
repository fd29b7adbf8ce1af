"""The stand-in takes the command lines of the dialect that it plays, and of no other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.support.builders import HELP_OF
from tests.support.fake_llama.arguments import ArgumentError, Arguments
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.golden import golden_lines
from tests.support.stand_in import install


@pytest.mark.parametrize("dialect", HELP_OF)
def test_every_golden_command_line_is_taken_by_its_dialect(dialect: str, tmp_path: Path) -> None:
    made = install(tmp_path, dialect=dialect)
    behaviour = Behaviour(**json.loads(made.settings.read_text()))
    for name, words in golden_lines(dialect).items():
        facts = Arguments(words, behaviour).facts
        told = dict(itertools.pairwise(words))
        assert facts["model"] == told["--model"], name
        assert facts["port"] == told["--port"], name
        drafts = "baseline" not in name
        assert facts["speculative"] == ("on" if drafts else "off"), name


@pytest.mark.parametrize(
    ("dialect", "spoken", "flag"),
    [
        ("main-old", "main-0x", "--load-mode"),
        ("main-0x", "main-mid", "--no-mmap"),
        ("ik-now", "main-mid", "--log-verbosity"),
    ],
)
def test_a_golden_command_line_of_another_dialect_is_refused(
    dialect: str, spoken: str, flag: str, tmp_path: Path
) -> None:
    made = install(tmp_path, dialect=dialect)
    behaviour = Behaviour(**json.loads(made.settings.read_text()))

    with pytest.raises(ArgumentError, match=f"argument: {flag}"):
        Arguments(golden_lines(spoken)["rtx-5060-ti-16gb-baseline"], behaviour)
