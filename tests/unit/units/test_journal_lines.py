"""Which lines of a unit's journal are of one start of it."""

from __future__ import annotations

import json

from tunerd.units.systemd import messages_of_invocation

OLD, NEW = "a" * 32, "b" * 32


def journal(*entries: tuple[str, dict[str, str]]) -> str:
    """As `journalctl --reverse --output=json` prints them: newest first."""
    return "\n".join(json.dumps({"MESSAGE": text, **ids}) for text, ids in reversed(entries))


WRITTEN = journal(
    ("Starting", {"INVOCATION_ID": OLD}),
    ("old words", {"_SYSTEMD_INVOCATION_ID": OLD}),
    ("old last words", {}),
    ("Failed", {"INVOCATION_ID": OLD}),
    ("Starting again", {"INVOCATION_ID": NEW}),
    ("new last words", {}),
    ("Failed again", {"USER_INVOCATION_ID": NEW}),
)


def test_a_line_without_an_invocation_belongs_to_the_last_one_named_before_it() -> None:
    assert messages_of_invocation(WRITTEN, NEW, 99) == (
        "Starting again",
        "new last words",
        "Failed again",
    )
    assert messages_of_invocation(WRITTEN, OLD, 99) == (
        "Starting",
        "old words",
        "old last words",
        "Failed",
    )


def test_the_newest_lines_are_kept() -> None:
    assert messages_of_invocation(WRITTEN, OLD, 2) == ("old last words", "Failed")


def test_an_invocation_that_is_not_there_has_no_lines() -> None:
    assert messages_of_invocation(WRITTEN, "c" * 32, 99) == ()
    assert messages_of_invocation("half an ent", OLD, 99) == ()
