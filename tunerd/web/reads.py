"""What reading commands say: cheap ones are asked in this process, others in one of their own.

The daemon stays small that way: numpy and the search never enter it. Programs of engines are tried
by jobs alone, because the daemon may not become another account.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.jobs import error_json, read_job, start_job
from tunerd.actions.telemetry import Telemetry
from tunerd.core.job import JobKind, JobRequest
from tunerd.core.result import ActionResult
from tunerd.errors import HostError, TunerdError
from tunerd.system.process import run

_LIMIT_S = 180.0
_POLL_S = 0.1
_MAX_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """An envelope, and the exit code that the command would have had."""

    envelope: Mapping[str, Any]
    exit_code: int = 0

    @property
    def is_error(self) -> bool:
        """Whether there is no payload."""
        return "error" in self.envelope


class Reads:
    """Asks for one thing after another; it blocks, so whoever has an event loop asks in a thread."""

    def __init__(self, ctx: Context, telemetry: Telemetry | None = None) -> None:
        self._ctx = ctx
        self.telemetry = telemetry

    def here(self, read: Callable[[Context], ActionResult], command: str) -> Answer:
        """In this process."""
        try:
            result = read(self._ctx)
        except TunerdError as error:
            return Answer(error_json(error, command), error.exit_code)
        return Answer(result.to_json(), result.exit_code)

    def apart(self, *words: str) -> Answer:
        """In a process of its own: `tunerd WORDS --json`."""
        argv = [sys.executable, "-m", "tunerd", f"--{self._ctx.mode}", *words, "--json"]
        try:
            done = run(
                argv, timeout_s=_LIMIT_S, env=self._ctx.environment, max_output_bytes=_MAX_BYTES
            )
            envelope = json.loads(done.stdout)
        except TunerdError as error:
            return Answer(error_json(error, words[0]), 1)
        except ValueError:
            lost = HostError(
                f"`tunerd {words[0]}` gave no answer", cause=done.stderr[-500:] or None
            )
            return Answer(error_json(lost, words[0]), 1)
        return Answer(envelope, done.returncode if done.returncode is not None else 1)

    def by_job(self, kind: JobKind, arguments: Mapping[str, Any], asked_by: str) -> Answer:
        """As a job that only looks; waits for it."""
        clock = self._ctx.clock
        try:
            request = JobRequest(kind, asked_by, clock.now_s(), arguments)
            number = start_job(self._ctx, request)
            end_s = clock.monotonic_s() + _LIMIT_S
            while not (job := read_job(self._ctx, number)).state.is_over:
                if clock.monotonic_s() > end_s:
                    raise HostError(f"job {number} takes too long", hint=f"/api/jobs/{number}")
                clock.sleep(_POLL_S)
        except TunerdError as error:
            return Answer(error_json(error, str(kind)), error.exit_code)
        if job.end is None:
            lost = HostError(f"job {number} ended without an answer", hint="journalctl says why")
            return Answer(error_json(lost, str(kind)), 1)
        return Answer(job.end["result"], int(job.end["exit_code"]))
