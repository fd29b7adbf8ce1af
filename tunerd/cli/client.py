"""The other end of the daemon's socket: commands of somebody who is not root."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.errors import HostError
from tunerd.machine.clock import SystemClock
from tunerd.machine.http import HttpRequest, NoAnswerError, NoAnswerInTimeError
from tunerd.result import ActionResult, ProgressSink, error_from_json, progress_of, result_from_json

_LIMIT_S = 240.0
_HEADERS = {"Content-Type": "application/json", "X-Tunerd": "1"}
# A daemon that is started again, or started by its socket, answers within seconds.
_TRIES = 20
_AGAIN_S = 0.5
_OK, _BEGUN = 200, 202
# Of the server, and perhaps over soon; what is below is its answer.
_SERVER_ERRORS = 500


class AwayError(HostError):
    """The daemon does not answer, or not now."""


class Remote:
    """Operations, as the daemon does them.

    Every method raises TunerdError as the operation does, and HostError where the daemon does not answer.
    """

    def __init__(self, path: Path, progress: ProgressSink) -> None:
        self._path = path
        self._progress = progress
        self._clock = SystemClock()

    def ask(
        self, url: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, int, Mapping[str, Any]]:
        """What a route says; with a body it is asked for a change: status, exit code, envelope."""
        try:
            with self._request() as request:
                if body is None:
                    status = request.send("GET", url, {}, None)
                else:
                    status = request.send("POST", url, _HEADERS, json.dumps(body).encode())
                envelope = json.loads(b"".join(request.pieces()))
                return status, int(request.header("x-tunerd-exit-code") or 1), envelope
        except (NoAnswerError, NoAnswerInTimeError, ValueError) as error:
            raise self._silent(error) from error

    def _events(self, number: int, after: int) -> Iterator[Mapping[str, Any]]:
        """What a job tells until the stream ends, without the first ones that were seen before."""
        try:
            with self._request() as request:
                url = f"/api/jobs/{number}/events"
                status = request.send("GET", url, {"Last-Event-ID": str(after)})
                if status != _OK:
                    told = error_from_json(json.loads(b"".join(request.pieces())))
                    if status < _SERVER_ERRORS:
                        raise told
                    raise AwayError(told.message, cause=told.cause, hint=told.hint)
                for line in request.lines(silence_s=_LIMIT_S):
                    if line.startswith(b"data: "):
                        yield json.loads(line.removeprefix(b"data: "))
        except (NoAnswerError, NoAnswerInTimeError, ValueError) as error:
            raise self._silent(error) from error

    def _request(self) -> HttpRequest:
        return HttpRequest(self._path, timeout_s=_LIMIT_S, clock=self._clock)

    def _silent(self, error: Exception) -> AwayError:
        return AwayError(
            "tunerd's daemon does not answer",
            cause=f"`{self._path}`: {str(error) or 'no answer in time'}",
            hint="only root and members of group tunerd get in; `systemctl status tunerd` says more",
        )

    def job(self, number: int) -> Mapping[str, Any]:
        """A job as it stands."""
        _, code, envelope = self.ask(f"/api/jobs/{number}")
        job: Mapping[str, Any] = result_from_json(envelope, code, has_acted=False).payload["job"]
        return job

    def run(self, argv: Sequence[str]) -> ActionResult:
        """What these words come to; a job goes on without us."""
        status, code, envelope = self.ask("/api/run", {"argv": list(argv)})
        if status != _BEGUN:
            return result_from_json(envelope, code, has_acted=False)
        return self.follow(int(envelope["job"]["job"]))

    def follow(self, number: int) -> ActionResult:
        """Show the progress of a job from its beginning, and wait for its end.

        The daemon may go and come back meanwhile: the job is a process of its own.
        """
        try:
            return self._follow(number)
        except KeyboardInterrupt as end:
            end.add_note(
                f"job {number} goes on; `tunerd jobs watch {number}` follows it, and "
                f"`tunerd jobs stop {number}` ends a measurement"
            )
            raise

    def _follow(self, number: int) -> ActionResult:
        seen, tries = 0, 0
        while True:
            away = _lost(number)
            try:
                for event in self._events(number, seen):
                    seen, tries = seen + 1, 0
                    if event["event"] == "progress":
                        self._progress(progress_of(event))
                    if event["event"] == "end":
                        return _end(number, event)
            except AwayError as error:
                away = error
            tries += 1
            if tries > _TRIES:
                raise away
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
