"""What `systemctl show`, `journalctl -o json` and `systemd-analyze verify` print, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.core.service import UnitState

STATE_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "NRestarts",
    "InvocationID",
    "FragmentPath",
    "DropInPaths",
    "NeedDaemonReload",
    "UnitFileState",
    "ActiveEnterTimestampMonotonic",
)
# waitid(2): si_code of a child, as systemd prints it.
_EXIT_KINDS = {"1": "exited", "2": "killed", "3": "dumped"}
_PER_SECOND = 1_000_000


def parse_show(text: str, names: Sequence[str]) -> Mapping[str, str]:
    """Properties by name; a line that begins none of `names` belongs to the value before it."""
    wanted = set(names)
    found: dict[str, str] = {}
    current: str | None = None
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if equals and name in wanted:
            current = name
            found[name] = value
        elif current is not None and line:
            found[current] += f"\n{line}"
    return found


def to_unit_state(unit: str, shown: Mapping[str, str], *, boot_s: float) -> UnitState:
    """The state that these properties describe.

    Args:
        unit: Its name.
        shown: `STATE_PROPERTIES` as `systemctl show` prints them.
        boot_s: Wall-clock time at which CLOCK_MONOTONIC was 0.
    """
    pid = _number(shown.get("MainPID"))
    kind = _EXIT_KINDS.get(shown.get("ExecMainCode", "0"))
    entered_us = _number(shown.get("ActiveEnterTimestampMonotonic"))
    fragment = shown.get("FragmentPath")
    return UnitState(
        unit=unit,
        load_state=shown.get("LoadState", ""),
        active_state=shown.get("ActiveState", ""),
        sub_state=shown.get("SubState", ""),
        result=shown.get("Result", ""),
        main_pid=pid or None,
        exit_kind=kind,
        exit_status=_number(shown.get("ExecMainStatus")) if kind is not None else None,
        n_restarts=_number(shown.get("NRestarts")),
        invocation_id=shown.get("InvocationID") or None,
        fragment_path=Path(fragment) if fragment else None,
        drop_ins=tuple(Path(path) for path in shown.get("DropInPaths", "").split()),
        needs_reload=shown.get("NeedDaemonReload") == "yes",
        unit_file_state=shown.get("UnitFileState") or None,
        active_since_s=boot_s + entered_us / _PER_SECOND if entered_us else None,
    )


# What a process wrote; what the system's and a user's manager say of a unit.
INVOCATION_FIELDS = ("_SYSTEMD_INVOCATION_ID", "INVOCATION_ID", "USER_INVOCATION_ID")


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def journal_messages(text: str) -> tuple[str, ...]:
    """Lines of the messages in `journalctl -o json` output, in the order given.

    A message is text, or a list of byte values where it is not printable UTF-8, or a list of these
    where an entry has several; null stands for one too long to print. What is cut off at the end
    (an incomplete last entry) is left out.
    """
    lines: list[str] = []
    for entry in text.split("\n"):
        if not entry.startswith("{"):
            continue
        try:
            fields = json.loads(entry)
        except ValueError:
            continue
        lines.extend(_message_lines(fields.get("MESSAGE")))
    return tuple(lines)


def newest_first_messages(text: str, max_lines: int) -> tuple[str, ...]:
    """As `journal_messages` for `--reverse` output: the newest lines, oldest first."""
    entries = [line for line in text.split("\n") if line.startswith("{")]
    lines = journal_messages("\n".join(reversed(entries)))
    return lines[max(0, len(lines) - max_lines) :]


def oldest_entry_s(text: str) -> float | None:
    """When the last whole entry of `--reverse` output was written [seconds since the epoch]."""
    for line in reversed(text.split("\n")):
        try:
            return int(json.loads(line)["__REALTIME_TIMESTAMP"]) / _PER_SECOND
        except (ValueError, KeyError, TypeError):
            continue
    return None


def messages_of_invocation(text: str, invocation_id: str, max_lines: int) -> tuple[str, ...]:
    """As `newest_first_messages`, of one invocation among all that a unit wrote.

    The journal does not always know the invocation of a process that ended at once (2 of 45 on a
    busy machine); such a line belongs to the invocation that was last named before it.
    """
    current = None
    kept: list[str] = []
    for line in reversed(text.split("\n")):
        try:
            fields = json.loads(line) if line.startswith("{") else {}
        except ValueError:
            continue
        named = next((fields[name] for name in INVOCATION_FIELDS if fields.get(name)), None)
        current = named or current
        if current == invocation_id:
            kept.extend(_message_lines(fields.get("MESSAGE")))
    return tuple(kept[max(0, len(kept) - max_lines) :])


def _message_lines(message: Any) -> list[str]:
    if isinstance(message, str):
        return message.split("\n")
    if isinstance(message, list) and message and all(isinstance(part, int) for part in message):
        data = bytes(part & 0xFF for part in message)
        return data.decode("utf-8", errors="replace").split("\n")
    if isinstance(message, list):
        return [line for part in message for line in _message_lines(part)]
    return []


def unreached(stderr: str, *, is_user: bool) -> str | None:
    """What to do where `systemctl` reached no manager at all; None if that is not what it says."""
    if "not been booted with systemd" in stderr:
        return "this machine has no systemd: leave the option out, or use --local"
    if "Failed to connect to bus" in stderr or "Failed to connect to user scope bus" in stderr:
        if is_user:
            return (
                "no service manager of this user runs, or XDG_RUNTIME_DIR does not lead to it: log in "
                "as the user (not with su or sudo), or once `loginctl enable-linger USER`; or --local"
            )
        return "systemd does not answer; `systemctl status` must work first; or --local"
    return None


def complaints(stderr: str, unit: str, folder: str) -> tuple[str, ...]:
    """Lines of `systemd-analyze verify` that are about `unit`, without the folder it stood in.

    Other lines are about other units: a broken link anywhere prints one too.
    """
    found = [line.strip() for line in stderr.split("\n") if unit in line]
    return tuple(line.replace(f"{folder}/", "") for line in found)
