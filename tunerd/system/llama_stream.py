"""Server-sent events of a completion, with the time at which each arrived.

While a stream runs nothing is done but to note time and bytes: what is measured must not wait for the
one who measures. Everything is parsed when it has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_STREAM_BYTES = 64 * 1024 * 1024
_DATA = b"data:"
_ERROR = b"error:"
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer.

    `events` are JSON objects with the milliseconds since the request was sent; `wall_ms` is the whole
    time. `is_whole` says that the stream came to its own end; `problem` why there is no answer, or
    only a part of one.
    """

    status: int | None
    events: tuple[tuple[float, dict[str, Any]], ...]
    wall_ms: float
    is_whole: bool
    problem: str | None = None
    timed_out: bool = False


@dataclass
class Arrivals:
    """Pieces of a body as they came, with their times [ms]."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    n_bytes: int = 0

    def add(self, at_ms: float, piece: bytes) -> bool:
        """Note a piece; False where the answer has grown too large to be one."""
        self.pieces.append((at_ms, piece))
        self.n_bytes += len(piece)
        return self.n_bytes <= MAX_STREAM_BYTES

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    def lines(self) -> Iterator[tuple[float, bytes]]:
        """Whole lines, each with the time of the piece that ended it."""
        rest = b""
        for at_ms, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield at_ms, line.rstrip(b"\r")
        if rest and self.pieces:
            yield self.pieces[-1][0], rest


def read_events(
    arrivals: Arrivals,
) -> tuple[tuple[tuple[float, dict[str, Any]], ...], str | None]:
    """The objects in a stream, and the error that the server told in it."""
    found: list[tuple[float, dict[str, Any]]] = []
    problem = None
    for at_ms, line in arrivals.lines():
        is_error = line.startswith(_ERROR)
        if not is_error and not line.startswith(_DATA):
            continue  # comments keep the connection open, other fields are of no use here
        payload = line.partition(b":")[2].strip()
        if payload == _DONE:
            continue
        event = _object(payload)
        if event is None:
            problem = problem or "an event is no JSON object"
        elif is_error or "error" in event:
            problem = problem or _told(event)
        else:
            found.append((at_ms, event))
    return tuple(found), problem


def read_plain(arrivals: Arrivals, status: int) -> tuple[dict[str, Any] | None, str | None]:
    """The object that came instead of a stream, or what it says of an error."""
    event = _object(arrivals.body)
    if event is None:
        return None, f"status {status} without valid JSON"
    return (None, f"status {status}: {_told(event)}") if "error" in event else (event, None)


def _object(payload: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _told(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:300] if message else "an error without a message"
