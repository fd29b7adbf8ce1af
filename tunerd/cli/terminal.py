"""Commands as they are typed: done here, or by the daemon for who is no root, with questions asked here."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.cli import output
from tunerd.errors import HostError
from tunerd.machine.clock import SystemClock
from tunerd.machine.http import HttpRequest, NoAnswerError, NoAnswerInTimeError
from tunerd.machine.process import Interrupts
from tunerd.operations import MAY, ONLY_ROOT, Call, Operation, argv_typed, kind_of, operation_of
from tunerd.paths import paths_for
from tunerd.result import (
    ActionResult,
    Progress,
    ProgressSink,
    error_from_json,
    ignore_progress,
    result_from_json,
)
from tunerd.words import Mode, harmless, is_profile_file

if TYPE_CHECKING:
    import click

    from tunerd.app import Context
    from tunerd.result import Message

# The other end of the daemon's socket: commands of somebody who is not root

_LIMIT_S = 240.0
_HEADERS = {"Content-Type": "application/json", "X-Tunerd": "1"}
# A daemon that is started again, or started by its socket, answers within seconds.
_TRIES = 20
_AGAIN_S = 0.5
_BEGUN = 202
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
            with HttpRequest(self._path, timeout_s=_LIMIT_S, clock=self._clock) as request:
                if body is None:
                    status = request.send("GET", url, {}, None)
                else:
                    status = request.send("POST", url, _HEADERS, json.dumps(body).encode())
                envelope = json.loads(b"".join(request.pieces()))
                return status, int(request.header("x-tunerd-exit-code") or 1), envelope
        except (NoAnswerError, NoAnswerInTimeError, ValueError) as error:
            raise AwayError(
                "tunerd's daemon does not answer",
                cause=f"`{self._path}`: {str(error) or 'no answer in time'}",
                hint="only root and members of group tunerd may connect; `systemctl status tunerd` shows the daemon",
            ) from error

    def _news(self, number: int, offset: int) -> Mapping[str, Any]:
        """What a job told since an offset; a daemon that is away is asked again for a while."""
        for _ in range(_TRIES):
            with contextlib.suppress(AwayError):
                return self._told(number, offset)
            self._clock.sleep(_AGAIN_S)
        return self._told(number, offset)

    def _told(self, number: int, offset: int) -> Mapping[str, Any]:
        status, code, envelope = self.ask(f"/api/jobs/{number}/events?offset={offset}")
        if status >= _SERVER_ERRORS:
            problem = error_from_json(envelope)
            raise AwayError(problem.message, cause=problem.cause, hint=problem.hint)
        return result_from_json(envelope, code, has_acted=False).payload

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
        from tunerd.jobs import follow

        try:
            return follow(number, partial(self._news, number), self._progress, self._clock)
        except (KeyboardInterrupt, SystemExit) as end:
            end.add_note(
                f"job {number} keeps running; `tunerd jobs watch {number}` follows it, and "
                f"`tunerd jobs stop {number}` ends a measurement"
            )
            raise


# Done here by a member who does not ask for the system's server.
_HERE_WITHOUT_A_MODE = "bench --url"


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where a command line was typed; `mode` is as given there."""

    mode: str | None

    def run(self, ctx: click.Context) -> None:
        """Do what a parsed command does, and show it.

        Raises:
            TunerdError: it failed, or is left to root.
        """
        made = operation_of(ctx.command)
        params = dict(ctx.params)
        as_json = params.pop("as_json")
        if made.goes_ahead and not sys.stdin.isatty():
            params["yes"] = True
        sink = _print_line if made.tells_lines else output.progress_sink(as_json=as_json)
        remote = self._remote_of(ctx, sink)
        typed = Typed(self.mode, made, sink, yes=params.get("yes", True))

        def perform() -> ActionResult:
            try:
                if remote is None:
                    return made.do(typed, params)
                return _asked(remote, made, argv_typed(ctx, kind_of(ctx)), params)
            finally:
                output.end_line(sink)

        with Interrupts(may_pause=True):
            if made.show is not None:
                made.named(made.show)(perform, params, as_json)
            else:
                output.finish(perform(), made.named(made.render), as_json=as_json)

    def _remote_of(self, ctx: click.Context, sink: ProgressSink) -> Remote | None:
        kind = kind_of(ctx)
        if kind not in MAY and kind not in ONLY_ROOT:
            return None
        if kind == "profiles check" and is_profile_file(ctx.params["profile"]):
            return None  # read by whoever may read it
        remote = self.remote(sink)
        if remote is None or kind in MAY:
            return remote
        if kind == _HERE_WITHOUT_A_MODE and self.mode is None:
            return None
        raise HostError(
            f"`tunerd {kind}` needs root",
            cause=ONLY_ROOT[kind],
            state="nothing was touched",
            hint="use sudo, or `--user` for a unit of your own",
        )

    def remote(self, sink: ProgressSink) -> Remote | None:
        """The daemon, for who acts through it; None for root, and for one's own units."""
        path = socket_for(self.mode, os.environ)
        return None if path is None else Remote(path, sink)


def socket_for(mode: str | None, environment: Mapping[str, str]) -> Path | None:
    """The daemon's socket, for who should act through it; None for who acts by themselves.

    Root never does. Others do with `--system`, and without a mode where the socket lets them in:
    then root made them members of the group for just that.
    """
    wanted = mode or environment.get("TUNERD_MODE") or None
    if os.geteuid() == 0 or wanted not in {None, str(Mode.SYSTEM)}:
        return None
    path = paths_for(Mode.SYSTEM, environment).socket
    may = os.access(path, os.R_OK | os.W_OK) if wanted is None else path.exists()
    return path if may else None


@dataclass
class Typed(Call):
    """An operation that somebody at this terminal asked for."""

    mode: str | None
    operation: Operation
    sink: ProgressSink

    def context(self, *, acts: bool = False, tells: bool = False) -> Context:
        """The context of this process."""
        from tunerd.app import build_context

        if self.ctx is None:
            self.ctx = build_context(
                mode=self.mode,
                progress=self.sink if acts or tells else ignore_progress,
                start_supervisor=acts,
                needs_settings=self.operation.needs_settings,
            )
        made: Context = self.ctx
        return made

    def ask(
        self,
        question: str,
        messages: Sequence[Message] = (),
        shown: Mapping[str, Any] | None = None,
    ) -> None:
        """Show what would be done and ask, unless the answer was given; then what is asked is told."""
        output.end_line(self.sink)
        if self.yes:
            print(harmless(question.removesuffix(" Go on?"), keep="\n"), file=sys.stderr)
        else:
            _preview(self.operation, shown, messages)
            output.confirm(question, yes=False)


def _asked(
    remote: Remote, made: Operation, argv: list[str], params: Mapping[str, Any]
) -> ActionResult:
    """What the daemon does by these words; its question is found out first, and asked here."""
    if "yes" not in params:
        return remote.run(argv)
    more = []
    if not params["yes"] and made.asks(params):
        found = remote.run(argv)
        if "question" not in found.payload:
            return found
        _preview(made, found.payload, found.messages)
        output.confirm(found.payload["question"], yes=False)
        if "diff" in found.payload:
            from tunerd.units.text import shown_hash

            more = [f"--shown={shown_hash(found.payload['diff'])}"]
    end = next((at for at, word in enumerate(argv) if word.startswith("-")), len(argv))
    return remote.run([*argv[:end], "--yes", *more, *argv[end:]])


def _preview(made: Operation, shown: Mapping[str, Any] | None, messages: Sequence[Message]) -> None:
    if made.preview is not None and shown is not None:
        output.show(shown, made.named(made.preview), sys.stderr)
    for message in messages:
        output.print_message(message)


def _print_line(progress: Progress) -> None:
    print(harmless(progress.text), flush=True)
