"""The envelope that every `--json` prints."""

from __future__ import annotations

import json

from tunerd.result import SCHEMA, ActionResult, Level, error, note, warning


def test_the_envelope_holds_what_scripts_rely_on() -> None:
    messages = (note("a", "one"), warning("b", "two", "do this"), error("c", "three"))
    result = ActionResult("plan", {"argv": ["/bin/x"], "unit": None}, messages, exit_code=1)
    assert json.loads(json.dumps(result.to_json())) == {
        "schema": 1,
        "command": "plan",
        "ok": False,
        "messages": [
            {"level": "note", "code": "a", "text": "one", "hint": None},
            {"level": "warning", "code": "b", "text": "two", "hint": "do this"},
            {"level": "error", "code": "c", "text": "three", "hint": None},
        ],
        "argv": ["/bin/x"],
        "unit": None,
    }


def test_only_exit_code_0_is_ok() -> None:
    assert ActionResult("status", {}).ok
    assert not ActionResult("verify", {}, exit_code=6).ok


def test_the_schema_and_the_levels_are_those_that_scripts_know() -> None:
    assert SCHEMA == 1
    assert [str(level) for level in Level] == ["note", "warning", "error"]
