"""What an operation returns, and how far it is: values that are rendered once, for people or as JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from tunerd.errors import HostError, TunerdError

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

    def to_json(self) -> dict[str, Any]:
        """The envelope that every `--json` prints."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "ok": self.exit_code == 0,
            "messages": [asdict(one) for one in self.messages],
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


def rows_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as scripts read them in a payload, where their level says nothing."""
    return [{"code": one.code, "text": one.text, "hint": one.hint} for one in messages]


def error_json(error: TunerdError, command: str, *, code: str | None = None) -> dict[str, Any]:
    """The envelope of an error, as every `--json` prints it."""
    return {
        "schema": SCHEMA,
        "command": command,
        "ok": False,
        "messages": [],
        "error": {
            "code": code or error.code,
            "message": error.message,
            "cause": error.cause,
            "state": error.state,
            "hint": error.hint,
        },
    }


def result_from_json(
    envelope: Mapping[str, Any], exit_code: int, *, has_acted: bool = True
) -> ActionResult:
    """The result in an envelope.

    Raises:
        TunerdError: it tells of an error, which is raised as what it was.
    """
    body = dict(envelope)
    if "error" in body:
        raise error_from_json(body)
    messages = tuple(
        Message(Level(one["level"]), one["code"], one["text"], one["hint"])
        for one in body.pop("messages")
    )
    command = body.pop("command")
    payload = {key: value for key, value in body.items() if key not in {"schema", "ok"}}
    return ActionResult(command, payload, messages, exit_code, has_acted)


def error_from_json(envelope: Mapping[str, Any]) -> TunerdError:
    """The error that an envelope tells of."""
    told = envelope["error"]
    kind = _kinds().get(told["code"], HostError)
    return kind(told["message"], cause=told["cause"], state=told["state"], hint=told["hint"])


def _kinds(kind: type[TunerdError] = TunerdError) -> dict[str, type[TunerdError]]:
    """Every class of error by its code; of those that share one the class that they are of."""
    below = (_kinds(one).items() for one in kind.__subclasses__())
    return {**dict(chain.from_iterable(below)), kind.code: kind}


@dataclass(frozen=True, slots=True)
class Progress:
    """One step under way.

    `done_ratio` is 0 to 1, None where nothing can be told; `left_s` is the time left [s], None
    where unknown.
    """

    text: str
    step: int | None = None
    steps: int | None = None
    done_ratio: float | None = None
    left_s: float | None = None


ProgressSink = Callable[[Progress], None]


def ignore_progress(_progress: Progress) -> None:
    """Nobody is looking."""


class Muted:
    """Progress that can be held back: the steps of a hundred starts would hide that of the whole."""

    def __init__(self, sink: ProgressSink) -> None:
        self._sink = sink
        self._is_muted = False

    def __call__(self, progress: Progress) -> None:
        """Pass it on, or not."""
        if not self._is_muted:
            self._sink(progress)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing is passed on meanwhile."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False
