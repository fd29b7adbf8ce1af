"""The other end of the daemon's socket: commands of somebody who is not root."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.errors import HostError, TunerdError
from tunerd.machine.clock import SystemClock
from tunerd.machine.http import HttpRequest, NoAnswerError, NoAnswerInTimeError
from tunerd.result import ActionResult, ProgressSink, error_from_json, progress_of, result_from_json

_LIMIT_S = 240.0
_OK = 200
_HEADERS = {"Content-Type": "application/json", "X-Tunerd": "1"}


@dataclass(frozen=True, slots=True)
class ApiReply:
    """An envelope, with the exit code that the command would have had."""

    status: int
    exit_code: int
    envelope: Mapping[str, Any]


class ApiRefusalError(Exception):
    """The API answered that it does not do that; the envelope says why."""

    def __init__(self, status: int, envelope: Mapping[str, Any]) -> None:
        super().__init__(status)
        self.status = status
        self.envelope = envelope


class ApiClient:
    """The daemon behind a socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, url: str, body: Mapping[str, Any] | None = None) -> ApiReply:
        """What a route says; with a body it is asked for a change.

        Raises:
            HostError: nobody answers, or not in this language.
        """
        try:
            with self._request() as request:
                if body is None:
                    status = request.send("GET", url, {}, None)
                else:
                    status = request.send("POST", url, _HEADERS, json.dumps(body).encode())
                envelope = _envelope(request)
                code = int(request.header("x-tunerd-exit-code") or 1)
        except (NoAnswerError, NoAnswerInTimeError, ValueError) as error:
            raise self._silent(error) from error
        return ApiReply(status, code, envelope)

    def events(self, url: str, *, after: int = 0) -> Iterator[Mapping[str, Any]]:
        """Server-sent events until the stream ends.

        Args:
            url: Of the stream.
            after: So many were seen before.

        Raises:
            ApiRefusalError: there is no such stream, or not for us.
            HostError: as `ask`; or the daemon went away, which the job outlives.
        """
        try:
            with self._request() as request:
                status = request.send("GET", url, {"Last-Event-ID": str(after)})
                if status != _OK:
                    raise ApiRefusalError(status, _envelope(request))
                for line in request.lines(silence_s=_LIMIT_S):
                    if line.startswith(b"data: "):
                        yield json.loads(line.removeprefix(b"data: "))
        except (NoAnswerError, NoAnswerInTimeError, ValueError) as error:
            raise self._silent(error) from error

    def _request(self) -> HttpRequest:
        return HttpRequest(self._path, timeout_s=_LIMIT_S, clock=SystemClock())

    def _silent(self, error: Exception) -> HostError:
        return HostError(
            "tunerd's daemon does not answer",
            cause=f"`{self._path}`: {str(error) or 'no answer in time'}",
            hint="only root and members of group tunerd get in; `systemctl status tunerd` says more",
        )


def _envelope(request: HttpRequest) -> Mapping[str, Any]:
    envelope: Mapping[str, Any] = json.loads(b"".join(request.pieces()))
    return envelope


# A daemon that is started again, or started by its socket, answers within seconds.
_TRIES = 20
_AGAIN_S = 0.5
# Of the server, and perhaps over soon; what is below is its answer.
_SERVER_ERRORS = 500
_BEGUN = 202


class Remote:
    """Operations, as the daemon does them.

    Every method raises TunerdError as the operation does, and HostError where the daemon does not answer.
    """

    def __init__(self, path: Path, progress: ProgressSink) -> None:
        self._api = ApiClient(path)
        self._progress = progress
        self._clock = SystemClock()

    def job(self, number: int) -> Mapping[str, Any]:
        """A job as it stands."""
        reply = self._api.ask(f"/api/jobs/{number}")
        found = result_from_json(reply.envelope, reply.exit_code, has_acted=False)
        job: Mapping[str, Any] = found.payload["job"]
        return job

    def run(self, argv: Sequence[str]) -> ActionResult:
        """What these words come to; a job goes on without us."""
        reply = self._api.ask("/api/run", {"argv": list(argv)})
        if reply.status != _BEGUN:
            return result_from_json(reply.envelope, reply.exit_code, has_acted=False)
        number = int(reply.envelope["job"]["job"])
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
            problem: TunerdError | None = None
            try:
                for event in self._api.events(f"/api/jobs/{number}/events", after=seen):
                    seen, tries = seen + 1, 0
                    if event["event"] == "progress":
                        self._progress(progress_of(event))
                    if event["event"] == "end":
                        return _end(number, event)
            except ApiRefusalError as refusal:
                problem = error_from_json(refusal.envelope)
                if refusal.status < _SERVER_ERRORS:
                    raise problem from refusal
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
