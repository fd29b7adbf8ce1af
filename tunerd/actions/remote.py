"""Acting on the system's server without being root: through the daemon's socket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tunerd.core.progress import Progress, ProgressSink
from tunerd.core.result import ActionResult, Level, Message
from tunerd.errors import HostError, TunerdError
from tunerd.system.api_client import ApiClient, ApiReply


class Remote:
    """The commands, as the daemon does them.

    Every method raises TunerdError as the action of that name does, and HostError where the daemon
    does not answer.
    """

    def __init__(self, path: Path, progress: ProgressSink) -> None:
        self._api = ApiClient(path)
        self._progress = progress

    def read(self, *parts: str, **query: Any) -> ActionResult:
        """What a reading route says, such as `read("history", "14")`."""
        url = "/api/" + "/".join(quote(part, safe="") for part in parts)
        given = {name: _text(value) for name, value in query.items() if value is not None}
        return _result(self._api.get(f"{url}?{urlencode(given)}" if given else url))

    def do(self, route: str, body: Mapping[str, Any]) -> ActionResult:
        """Begin a job, show its progress, and wait for its end; it goes on without us."""
        begun = self._api.post(f"/api/{route}", body)
        if "error" in begun.envelope:
            raise _error(begun.envelope)
        number = begun.envelope["job"]["job"]
        for event in self._api.events(f"/api/jobs/{number}/events"):
            if event["event"] == "progress":
                self._progress(_progress_of(event))
            if event["event"] == "end" and event["result"] is not None:
                code = int(event["exit_code"])
                return _result(ApiReply(200, code, event["result"]), has_acted=True)
        raise HostError(
            f"job {number} ended without a word",
            cause="its process was killed, or the daemon went away",
            hint="`tunerd status` shows what serves",
        )


def seen(result: ActionResult) -> str:
    """What stands for the difference that a person has just seen and agreed to."""
    from tunerd.actions.jobs import shown_hash

    return shown_hash(str(result.payload["diff"]))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _progress_of(event: Mapping[str, Any]) -> Progress:
    return Progress(
        str(event["text"]), event["step"], event["steps"], event["done_ratio"], event["left_s"]
    )


def _result(reply: ApiReply, *, has_acted: bool = False) -> ActionResult:
    envelope = dict(reply.envelope)
    if "error" in envelope:
        raise _error(envelope)
    messages = tuple(
        Message(Level(one["level"]), one["code"], one["text"], one["hint"])
        for one in envelope.pop("messages")
    )
    command = envelope.pop("command")
    payload = {key: value for key, value in envelope.items() if key not in {"schema", "ok"}}
    return ActionResult(command, payload, messages, reply.exit_code, has_acted)


def _error(envelope: Mapping[str, Any]) -> TunerdError:
    told = envelope["error"]
    kind = _kinds().get(told["code"], HostError)
    return kind(told["message"], cause=told["cause"], state=told["state"], hint=told["hint"])


def _kinds() -> dict[str, type[TunerdError]]:
    """Every class of error by its code."""
    found: dict[str, type[TunerdError]] = {}
    queue: list[type[TunerdError]] = [TunerdError]
    while queue:
        kind = queue.pop()
        found[kind.code] = kind
        queue += kind.__subclasses__()
    return found
