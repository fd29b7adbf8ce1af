"""What systemd's tools print, read into values; the texts were captured from 252 and 262."""

from __future__ import annotations

import json
from pathlib import Path

from tunerd.engine.health import FailureKind, classify
from tunerd.machine.process import Completed
from tunerd.units.manager import log_lines, mark
from tunerd.units.systemd import (
    complaints,
    gave_way,
    journal_entries,
    journal_lines,
    reads,
    to_unit_state,
    unreached,
    why_it_failed,
)


def test_only_what_starts_at_boot_is_enabled() -> None:
    for said in ("enabled", "enabled-runtime", "linked", "linked-runtime", "static"):
        state = to_unit_state("x.service", {"UnitFileState": said}, boot_s=0)
        assert state.is_enabled is (said == "enabled")


def test_drop_ins_are_found_whatever_they_and_their_unit_are_called() -> None:
    shown = r'''/d/plain.conf "/d/foo\\x2dbar.service.d/\$dollar.conf" "/d/with space.conf" "/d/q\"t\`(x).conf"'''

    found = to_unit_state("x.service", {"DropInPaths": shown}, boot_s=0).drop_ins

    names = (r"plain.conf", r"foo\x2dbar.service.d/$dollar.conf", "with space.conf", 'q"t`(x).conf')
    assert found == tuple(Path("/d", name) for name in names)


def lines_of(text: str, max_lines: int = 99, of: str | None = None) -> tuple[str, ...]:
    return journal_lines(journal_entries(text), max_lines, invocation_id=of)


def test_journal_entries_of_every_shape() -> None:
    text = """\
{"MESSAGE":"one line"}
{"MESSAGE":"two\\nlines"}
{"MESSAGE":[114,97,119,32,255]}
{"MESSAGE":["several",[97,98],"fields"]}
{"MESSAGE":null}
-- no entries --
{"MESSAGE":"cut o"""

    lines = ("one line", "two", "lines", "raw \ufffd", "several", "ab", "fields")
    assert lines_of("\n".join(reversed(text.split("\n")))) == lines


def test_the_newest_lines_come_last_and_are_kept_and_long_ones_are_cut() -> None:
    text = '{"MESSAGE":"3"}\n{"MESSAGE":"2a\\n2b"}\n{"MESSAGE":"1"}\n{"MESS'

    assert lines_of(text, 3) == ("2a", "2b", "3")
    assert lines_of(text) == ("1", "2a", "2b", "3")
    assert lines_of("") == ()
    for message in ("x" * 48_000, list(b"x" * 48_000), ["a", "x" * 48_000]):
        assert lines_of(json.dumps({"MESSAGE": message}))[-1] == "x" * 2000


def test_a_journal_that_is_too_long_to_be_read_has_as_many_lines_as_were_asked_for() -> None:
    """Of some hundred long lines those of a client's grammar were all, and what its load took was read from them."""
    entries = [{"MESSAGE": "2"}, {"MESSAGE": "3"}]
    assert journal_lines(entries, 3, is_cut=True) == ("", "2", "3")
    assert journal_lines(entries, 1, is_cut=True) == ("3",)
    assert journal_lines([], 3, is_cut=True) == ()


def test_what_a_program_says_in_its_managers_name_is_not_heard() -> None:
    """A client's grammar, which builds print as it is, hid that VRAM had run out: no guard raised the margin."""
    said = "u.service: Failed with result 'oom-kill'."
    words = f"parse: error\n{said}\nCUDA error: out of memory"
    of_program = {"_SYSTEMD_INVOCATION_ID": "1", "MESSAGE": words}
    entries = [of_program, {"INVOCATION_ID": "1", "MESSAGE": said}]

    assert journal_lines(entries, 99) == ("parse: error", "", "CUDA error: out of memory", said)
    assert classify(journal_lines(entries[:1], 99)).kind is FailureKind.OUT_OF_VRAM
    text = f"{said}\n" + mark("t", "1" * 32, "Started")
    assert log_lines(text, unit="u.service") == ("", "u.service: Started"), "counted all the same"


def test_the_folders_that_a_manager_reads_are_found_behind_their_quotes(tmp_path: Path) -> None:
    """As systemd 252 prints `UnitPath`."""
    said = (
        f'/run/user/1/systemd/transient "{tmp_path}/my 100% home/.config/systemd/user" /usr/lib\n'
    )
    assert reads(said, tmp_path / "my 100% home/.config/systemd/user")
    assert reads(said, Path("/usr/lib"))
    assert not reads(said, tmp_path / "cfg/systemd/user")
    assert reads("\n", tmp_path), "what is not told forbids nothing"


def test_only_lines_about_the_unit_are_complaints() -> None:
    stderr = (
        "/run/verify-x/a.service:2: Unknown key 'Restrat' in section [Service], ignoring.\n"
        "/etc/systemd/system/broken.service:1: Invalid section header\n"
        "a.service: Command /nonexistent is not executable: No such file or directory\n"
    )

    assert complaints(stderr, "a.service", "/run/verify-x") == (
        "a.service:2: Unknown key 'Restrat' in section [Service], ignoring.",
        "a.service: Command /nonexistent is not executable: No such file or directory",
    )


def test_where_no_manager_was_reached_it_is_said_what_to_do() -> None:
    for stderr, is_user, expected in (
        ("Failed to connect to bus: No medium found\n", True, "enable-linger"),
        ("Failed to connect to user scope bus via local transport: No such file", True, "linger"),
        ("Failed to connect to bus: No such file or directory\n", False, "systemctl status"),
        ("System has not been booted with systemd as init system.\nFailed to connect to bus\n", False, "has no systemd"),
    ):  # fmt: skip
        assert expected in (unreached(stderr, is_user=is_user) or "")


def test_a_job_that_gave_way_to_somebody_else_or_to_a_shutdown_did_not_fail() -> None:
    assert gave_way("Job for x.service canceled.")
    assert gave_way(
        "Failed to start x.service: Transaction for x.service/start is destructive "
        "(systemd-remount-fs.service has 'stop' job queued, but 'start' is included in transaction)."
    ), "252, of a start while the machine goes down"
    said = "Job for x.service failed because the control process exited with error code."
    assert not gave_way(said)


def test_a_tool_that_says_nothing_is_told_by_how_it_ended() -> None:
    def why(stderr: str, returncode: int | None) -> str:
        done = Completed(("systemctl",), returncode, None, "", stderr, timed_out=False, truncated=False, took_s=0.1)  # fmt: skip
        return why_it_failed(done)

    assert why("Unit x.service not found.\n", 5) == "Unit x.service not found."
    assert (why("", 1), why("", None)) == ("exit 1", "a signal ended `systemctl`")


OLD, NEW = "a" * 32, "b" * 32


# As `journalctl --reverse --output=json` prints them: newest first.
WRITTEN = "\n".join(
    json.dumps({"MESSAGE": text, **ids})
    for text, ids in (
        ("Failed again", {"USER_INVOCATION_ID": NEW}),
        ("new last words", {}),
        ("Starting again", {"INVOCATION_ID": NEW}),
        ("Failed", {"INVOCATION_ID": OLD}),
        ("old last words", {}),
        ("old words", {"_SYSTEMD_INVOCATION_ID": OLD}),
        ("Starting", {"INVOCATION_ID": OLD}),
    )
)


def test_a_line_without_an_invocation_belongs_to_the_last_one_named_before_it() -> None:
    assert lines_of(WRITTEN, of=NEW) == ("Starting again", "new last words", "Failed again")
    assert lines_of(WRITTEN, of=OLD) == ("Starting", "old words", "old last words", "Failed")
    assert lines_of(WRITTEN, 2, of=OLD) == ("old last words", "Failed")
    assert lines_of(WRITTEN, of="c" * 32) == ()
    assert lines_of("half an ent", of=OLD) == ()
