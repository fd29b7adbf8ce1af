"""The envelope that every `--json` prints."""

from __future__ import annotations

import json

from tunerd.result import ActionResult, error, note, warning


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
