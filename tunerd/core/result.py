"""What an action returns: a value that is rendered once, for people or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Level(StrEnum):
    """How much a message matters."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Message:
    """Something a person should know beside the payload; `code` is stable for scripts."""

    level: Level
    code: str
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The outcome of one action.

    `payload` holds JSON values only, under the keys that scripts read. `exit_code` differs from 0
    where a script would act differently. `has_acted` says that it was more than looking: the exit
    code then tells how that ended, even where the result cannot be shown.
    """

    command: str
    payload: Mapping[str, Any]
    messages: tuple[Message, ...] = ()
    exit_code: int = 0
    has_acted: bool = False

    @property
    def ok(self) -> bool:
        """Whether the action did what was asked."""
        return self.exit_code == 0

    def to_json(self) -> dict[str, Any]:
        """The envelope that every `--json` prints."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "ok": self.ok,
            "messages": [
                {"level": str(m.level), "code": m.code, "text": m.text, "hint": m.hint}
                for m in self.messages
            ],
            **self.payload,
        }


def note(code: str, text: str, hint: str | None = None) -> Message:
    """A message that asks nothing of anybody."""
    return Message(Level.NOTE, code, text, hint)


def warning(code: str, text: str, hint: str | None = None) -> Message:
    """A message about something that may hurt."""
    return Message(Level.WARNING, code, text, hint)


def error(code: str, text: str, hint: str | None = None) -> Message:
    """A message about something that stands in the way."""
    return Message(Level.ERROR, code, text, hint)
