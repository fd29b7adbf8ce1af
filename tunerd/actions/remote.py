"""Acting on the system's server without being root: through the daemon's socket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tunerd.actions.envelope import error_from_json, progress_of, result_from_json
from tunerd.core.progress import ProgressSink
from tunerd.core.result import ActionResult
from tunerd.errors import HostError
from tunerd.system.api_client import ApiClient
from tunerd.system.clock import SystemClock

# A daemon that is started again, or started by its socket, answers within seconds.
_TRIES = 20
_AGAIN_S = 0.5


class Remote:
    """The commands, as the daemon does them.

    Every method raises TunerdError as the action of that name does, and HostError where the daemon
    does not answer.
    """

    def __init__(self, path: Path, progress: ProgressSink) -> None:
        self._api = ApiClient(path)
        self._progress = progress
        self._clock = SystemClock()

    def read(self, *parts: str, **query: Any) -> ActionResult:
        """What a reading route says, such as `read("history", "14")`."""
        url = "/api/" + "/".join(quote(part, safe="") for part in parts)
        given = {name: _text(value) for name, value in query.items() if value is not None}
        reply = self._api.get(f"{url}?{urlencode(given)}" if given else url)
        return result_from_json(reply.envelope, reply.exit_code, has_acted=False)

    def do(self, route: str, body: Mapping[str, Any]) -> ActionResult:
        """Begin a job, show its progress, and wait for its end; it goes on without us."""
        given = {name: value for name, value in body.items() if value is not None}
        begun = self._api.post(f"/api/{route}", given)
        if "error" in begun.envelope:
            raise error_from_json(begun.envelope)
        number = int(begun.envelope["job"]["job"])
        try:
            return self.follow(number)
        except KeyboardInterrupt as end:
            end.add_note(
                f"job {number} goes on; `tunerd jobs watch {number}` follows it, and "
                f"`tunerd jobs stop {number}` ends a measurement"
            )
            raise

    def follow(self, number: int) -> ActionResult:
        """Show the progress of a job from its beginning, and wait for its end.

        The daemon may go and come back meanwhile: the job is a process of its own.
        """
        seen, tries = 0, 0
        while True:
            problem: HostError | None = None
            try:
                for event in self._api.events(f"/api/jobs/{number}/events", after=seen):
                    seen, tries = seen + 1, 0
                    if event["event"] == "progress":
                        self._progress(progress_of(event))
                    if event["event"] == "end":
                        return _end(number, event)
            except HostError as error:
                problem = error
            tries += 1
            if tries > _TRIES:
                raise problem or _lost(number)
            self._clock.sleep(_AGAIN_S)


def _end(number: int, event: Mapping[str, Any]) -> ActionResult:
    if event["result"] is None:
        raise _lost(number)
    return result_from_json(event["result"], int(event["exit_code"]))


def _lost(number: int) -> HostError:
    return HostError(
        f"job {number} ended without a word",
        cause="its process was killed, or the daemon went away",
        hint="`tunerd status` shows what serves",
    )


def seen(result: ActionResult) -> str:
    """What stands for the difference that a person has just seen and agreed to."""
    from tunerd.actions.job_actions import shown_hash

    return shown_hash(str(result.payload["diff"]))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
