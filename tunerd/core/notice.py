"""What somebody who wants to be told is sent: as JSON, or as ntfy takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum

from tunerd.core.telemetry.history import Event

LEVELS = ("note", "warning", "error")
# Source: docs.ntfy.sh/publish, message priority (1 to 5) and tags.
_NTFY_PRIORITY = {"note": "2", "warning": "3", "error": "4"}
_NTFY_TAG = {"note": "information_source", "warning": "warning", "error": "rotating_light"}


class Format(StrEnum):
    """How a webhook wants it."""

    JSON = "json"
    NTFY = "ntfy"


@dataclass(frozen=True, slots=True)
class Post:
    """Body and headers of one request."""

    body: bytes
    headers: Mapping[str, str]


def is_wanted(event: Event, least: str) -> bool:
    """Whether it is at least as grave as that."""
    return LEVELS.index(event.level) >= LEVELS.index(least)


def post_of(event: Event, *, host: str, unit: str, how: Format) -> Post:
    """The request for an event.

    Args:
        event: What happened.
        host: Name of the machine.
        unit: The unit that it is about.
        how: What the receiver takes.
    """
    if how is Format.NTFY:
        text = event.text if event.hint is None else f"{event.text}\n\n{event.hint}"
        return Post(
            text.encode("utf-8", "replace"),
            {
                "Content-Type": "text/plain; charset=utf-8",
                "Title": _plain(f"{host}: {unit}: {event.kind}"),
                "Priority": _NTFY_PRIORITY[event.level],
                "Tags": _NTFY_TAG[event.level],
            },
        )
    at = datetime.fromtimestamp(event.at_s, UTC).isoformat(timespec="seconds")
    data = {"source": "tunerd", "host": host, "unit": unit, "at": at, **asdict(event)}
    return Post(
        json.dumps(data).encode(), {"Content-Type": "application/json", "User-Agent": "tunerd"}
    )


def _plain(text: str) -> str:
    """Text for a header, which has one line of ASCII."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)[:200]
