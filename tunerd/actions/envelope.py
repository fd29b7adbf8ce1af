"""Envelopes read back: what `--json` prints, as the result or the error that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.core.progress import Progress
from tunerd.core.result import ActionResult, Level, Message
from tunerd.errors import HostError, TunerdError


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


def progress_of(event: Mapping[str, Any]) -> Progress:
    """The progress that a job's event tells of."""
    return Progress(
        str(event["text"]), event["step"], event["steps"], event["done_ratio"], event["left_s"]
    )


def _kinds() -> dict[str, type[TunerdError]]:
    """Every class of error by its code."""
    found: dict[str, type[TunerdError]] = {}
    queue: list[type[TunerdError]] = [TunerdError]
    while queue:
        kind = queue.pop(0)
        found.setdefault(kind.code, kind)
        queue += kind.__subclasses__()
    return found
