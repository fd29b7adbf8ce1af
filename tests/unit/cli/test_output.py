"""What reaches a terminal: nothing that it would obey, whoever wrote the text."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import click
import pytest

from tunerd.cli.output import columns, finish, print_error, print_message, show
from tunerd.cli.watch import render_jobs
from tunerd.errors import EngineError
from tunerd.result import ActionResult, warning
from tunerd.words import harmless

EVIL = "a\n\x1b[31mEVIL\x9b2J\u202e\r\udcff\x07"
SHOWN = r"a\n\x1b[31mEVIL\x9b2J\u202e\r\udcff\x07"


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    yield from columns([(payload["name"], "end")])
    yield from payload["text"].splitlines()


def obeyed(text: str) -> set[str]:
    """Characters of a text that are not simply shown."""
    return {char for char in text if not char.isprintable()} - {"\n", "\t"}


def test_what_a_terminal_obeys_is_shown() -> None:
    assert harmless(EVIL) == SHOWN
    assert harmless("größer, 日本, 👍, a\tb") == "größer, 日本, 👍, a\tb"


def test_a_value_stays_on_its_line_a_text_keeps_its_lines_and_colours_of_our_own_stay() -> None:
    stream, coloured = io.StringIO(), io.StringIO()
    show({"name": EVIL, "text": "one\ntwo\x1b[2J\n"}, render, stream)
    show({"name": EVIL}, lambda p: [click.style(p["name"], fg="red")], coloured)
    assert stream.getvalue().splitlines() == [f"{SHOWN}  end", "one", "two\\x1b[2J"]
    assert coloured.getvalue() == click.style(SHOWN, fg="red") + "\n"


def test_messages_and_errors_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    print_message(warning("x", EVIL, f"first {EVIL}\nsecond"))
    error = EngineError(EVIL, cause=EVIL, state=EVIL, hint=EVIL)
    print_error(error, command="plan", as_json=False)
    said = capsys.readouterr().err
    assert not obeyed(said)
    assert f"warning: {SHOWN}" in said
    assert "        second" in said
    assert f"error: {SHOWN}" in said


def test_json_is_exact_and_holds_nothing_that_a_terminal_obeys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    finish(ActionResult("x", {"name": EVIL, EVIL: [EVIL]}), render, as_json=True)
    print_error(EngineError(EVIL, hint=EVIL), command="plan", as_json=True)
    said = capsys.readouterr().out
    assert not obeyed(said)
    first, second = said.split("\n}\n", 1)
    assert json.loads(first + "}")[EVIL] == [EVIL]
    assert json.loads(second)["error"]["hint"] == EVIL


def test_data_for_programs_is_exact_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = ActionResult("x", {"name": "a\x1bb", "text": "c\rd"})
    finish(result, lambda p: [p["name"], p["text"]], as_json=False, is_data=True)
    assert capsys.readouterr().out == "a\x1bb\nc\rd\n"


def test_what_json_does_not_know_is_never_printed_as_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        finish(ActionResult("plan", {"tok_s": float("nan")}), lambda _: [], as_json=True)


def test_what_somebody_pasted_is_not_told_in_whole_and_what_may_be_copied_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pasted, command = "x" * 100_000, f"`rm -r {'y' * 5000}`"
    print_message(warning("x", pasted, command))
    print_error(EngineError(pasted, cause=f"first\n{pasted}"), command="plan", as_json=False)
    said = capsys.readouterr().err
    assert len(said) < 20_000
    assert said.count("(100,000 characters)") == 3
    assert command in said


def test_a_list_of_jobs_says_what_each_came_to() -> None:
    results = {"apply": {"summary": "it serves"}, "recover": {"text": "it was undone"}, "sweep run": {"sentence": "no winner"},
               "bench": {"error": {"message": "it fails"}}, "decline": None, "emit": {"text": "#!/bin/sh\nexec a\n"}}  # fmt: skip
    rows = [{"job": 1, "asked_s": 0.0, "asked_by": "alice", "kind": kind, "state": "done", "progress": None,
             "result": result} for kind, result in results.items()]  # fmt: skip
    _, *lines = render_jobs({"jobs": rows})
    said = [line.partition("done")[2].strip() for line in lines]
    assert said == ["it serves", "it was undone", "no winner", "it fails", "", ""]
