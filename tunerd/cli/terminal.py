"""Commands as they are typed: done here, or by the daemon for who is no root, with questions asked here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.cli.output import (
    ask_or_tell,
    confirm,
    finish,
    harmless,
    print_message,
    progress_sink,
    show,
)
from tunerd.operations import MAY, ONLY_ROOT, Call, Operation, argv_typed, kind_of, operation_of
from tunerd.paths import paths_for
from tunerd.result import Progress, ProgressSink, ignore_progress
from tunerd.words import Mode

if TYPE_CHECKING:
    import click

    from tunerd.app import Context
    from tunerd.cli.client import Remote
    from tunerd.result import ActionResult, Message

_SOCKET = "tunerd.sock"
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
        sink = _print_line if made.tells_lines else progress_sink(as_json=as_json)
        remote = self._remote_of(ctx, sink)
        typed = Typed(self.mode, made, sink, yes=params.get("yes", True))

        def perform() -> ActionResult:
            if remote is None:
                return made.do(typed, params)
            return _asked(remote, made, argv_typed(ctx, kind_of(ctx)), params)

        if made.show is not None:
            made.named(made.show)(perform, params, as_json)
        else:
            finish(perform(), made.named(made.render), as_json=as_json)

    def _remote_of(self, ctx: click.Context, sink: ProgressSink) -> Remote | None:
        kind = kind_of(ctx)
        if kind not in MAY and kind not in ONLY_ROOT:
            return None
        remote = self.remote(sink)
        if remote is None or kind in MAY:
            return remote
        if kind == _HERE_WITHOUT_A_MODE and self.mode is None:
            return None
        from tunerd.errors import HostError

        raise HostError(
            f"`tunerd {kind}` needs root",
            cause=ONLY_ROOT[kind],
            state="nothing was touched",
            hint="use sudo, or `--user` for a unit of your own",
        )

    def remote(self, sink: ProgressSink) -> Remote | None:
        """The daemon, for who acts through it; None for root, and for one's own units."""
        path = socket_for(self.mode, os.environ)
        if path is None:
            return None
        from tunerd.cli.client import Remote

        return Remote(path, sink)


def socket_for(mode: str | None, environment: Mapping[str, str]) -> Path | None:
    """The daemon's socket, for who should act through it; None for who acts by themselves.

    Root never does. Others do with `--system`, and without a mode where the socket lets them in:
    then root made them members of the group for just that.
    """
    wanted = mode or environment.get("TUNERD_MODE") or None
    if os.geteuid() == 0 or wanted not in {None, str(Mode.SYSTEM)}:
        return None
    path = paths_for(Mode.SYSTEM, environment).runtime_dir / _SOCKET
    if wanted is None:
        return path if os.access(path, os.R_OK | os.W_OK) else None
    return path if path.exists() else None


@dataclass
class Typed(Call):
    """An operation that somebody at this terminal asked for."""

    mode: str | None
    operation: Operation
    sink: ProgressSink

    def context(
        self, *, acts: bool = False, tells: bool = False, needs_settings: bool = True
    ) -> Context:
        """The context of this process."""
        from tunerd.app import build_context

        if self.ctx is None:
            self.ctx = build_context(
                mode=self.mode,
                progress=self.sink if acts or tells else ignore_progress,
                start_supervisor=acts,
                needs_settings=needs_settings,
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
        if not self.yes:
            _preview(self.operation, shown, messages)
        ask_or_tell(question, yes=self.yes)


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
        confirm(found.payload["question"], yes=False)
        if "diff" in found.payload:
            from tunerd.units.text import shown_hash

            more = [f"--shown={shown_hash(found.payload['diff'])}"]
    end = next((at for at, word in enumerate(argv) if word.startswith("-")), len(argv))
    return remote.run([*argv[:end], "--yes", *more, *argv[end:]])


def _preview(made: Operation, shown: Mapping[str, Any] | None, messages: Sequence[Message]) -> None:
    if made.preview is not None and shown is not None:
        show(shown, made.named(made.preview), sys.stderr)
    for message in messages:
        print_message(message)


def _print_line(progress: Progress) -> None:
    print(harmless(progress.text), flush=True)
