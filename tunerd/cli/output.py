"""Shows results and errors: text for people, or one JSON object for scripts; and what a shell completes.

Data goes to standard output; messages, progress and errors go to standard error.

What comes from files, programs and servers may hold what a terminal obeys. Every text for people
passes `harmless` here: such characters are shown, not sent. JSON stays exact.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click
from click.shell_completion import CompletionItem

from tunerd.errors import TunerdError, UsageError
from tunerd.result import (
    ActionResult,
    Level,
    Message,
    Progress,
    ProgressSink,
    error_json,
    ignore_progress,
)
from tunerd.web.view import Section, Table
from tunerd.words import OBEYED, UNKNOWN, format_duration, harmless

if TYPE_CHECKING:
    from tunerd.app import Context

Render = Callable[[Mapping[str, Any]], Iterable[str]]

_COLOURS = {Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "red"}
_INDENT = "        "
# A column that has less room than this is not folded into it.
_LEAST_WIDTH = 24
# The command line of an engine has fewer characters.
_LONGEST = 4000
_CODE = re.compile("`[^`]*`")
_GLUE = "\x00"
_UNSAFE_IN_JSON = re.compile(f"[{OBEYED}]")  # which escapes what ASCII has itself


def line(form: str) -> Render:
    """Renders one line: the keys of a payload in a form."""
    return lambda payload: [form.format_map(payload)]


def as_written(value: object) -> str:
    """A value as files of settings and profiles have it."""
    if isinstance(value, bool | Mapping | Sequence) and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return "none" if value in {None, ""} else str(value)


def changed(payload: Mapping[str, Any]) -> Iterable[str]:
    """Settings that were written."""
    return [
        f"{key} is no longer set" if value is None else f"{key} = {as_written(value)}"
        for key, value in payload["changed"].items()
    ]


def finish(result: ActionResult, render: Render, *, as_json: bool, is_data: bool = False) -> None:
    """Show a result and leave with its exit code.

    Args:
        result: What an action found or did.
        render: Its payload as lines for people.
        as_json: One JSON object instead.
        is_data: Whether the lines are for programs: anywhere but on a terminal they stay exact.

    Raises:
        OSError: standard output cannot be written, and all that the action did was to look.
    """
    try:
        _print_result(result, render, as_json=as_json, is_data=is_data)
    except OSError as error:
        if not result.has_acted:
            raise
        silence_stdout()
        if error.errno != errno.EPIPE:
            print_unwritable(error, f"done, but the result cannot be shown{_where_kept(result)}")
    if not as_json:
        with contextlib.suppress(OSError):  # a terminal that is gone
            for message in result.messages:
                print_message(message)
    if result.exit_code:
        raise click.exceptions.Exit(result.exit_code)


def _where_kept(result: ActionResult) -> str:
    """How to see a measurement again whose result could not be shown."""
    number = result.payload.get("run", result.payload.get("sweep"))
    return f" (`tunerd results show {number}` shows it)" if isinstance(number, int) else ""


def _print_result(result: ActionResult, render: Render, *, as_json: bool, is_data: bool) -> None:
    if as_json:
        print(_json_text(result.to_json()))
    elif is_data and not sys.stdout.isatty():
        for line in render(result.payload):
            print(line)
    else:
        show(result.payload, render, sys.stdout)
    sys.stdout.flush()


def silence_stdout() -> None:
    """Drop what standard output still holds: Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())


def print_unwritable(error: OSError, what: str) -> None:
    """That standard output takes nothing, on standard error if that does."""
    with contextlib.suppress(OSError):
        label = paint("error:", "red", sys.stderr)
        print(f"{label} {what}: standard output: {error.strerror}", file=sys.stderr)


def show(payload: Mapping[str, Any], render: Render, stream: TextIO) -> None:
    """A payload for people; a line of `render` stays one line, whatever is in it.

    Its texts are made harmless before they are rendered, so that columns stay straight and the
    colours of `render` itself remain.
    """
    for line in harmless_lines(payload, render):
        print(line, file=stream)


def harmless_lines(payload: Mapping[str, Any], render: Render) -> list[str]:
    """The lines of a payload for people, as a terminal may be given them."""
    return [line.replace("\n", "\\n") for line in render(_harmless_payload(payload))]


def _harmless_payload(value: Any) -> Any:
    """Every text in a payload made harmless but for ends of lines, at which texts are split."""
    if isinstance(value, str):
        return harmless(value, keep="\n")
    if isinstance(value, Mapping):
        return {_harmless_payload(key): _harmless_payload(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_harmless_payload(inner) for inner in value]
    return value


def _json_text(body: Mapping[str, Any]) -> str:
    """JSON that reads back as exactly `body`, and holds nothing that a terminal obeys."""
    text = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda c: f"\\u{ord(c[0]):04x}", text)


def print_message(message: Message) -> None:
    """One message, its hint below it."""
    level = f"{message.level}:"
    label = paint(level, _COLOURS[message.level], sys.stderr)
    _print_folded(_brief(message.text), len(level) + 1, f"{label} ")
    for line in (message.hint or "").splitlines():
        _print_folded(line, len(_INDENT), _INDENT)


def print_error(error: TunerdError, *, command: str, as_json: bool) -> None:
    """An error in its four parts: what, why, how the machine is now, what to do."""
    if as_json:
        print(_json_text(error_json(error, command)))
        return
    _print_folded(_brief(error.message), len("error: "), f"{paint('error:', 'red', sys.stderr)} ")
    parts = [("cause", error.cause), ("state", error.state)]
    if any(text for _, text in parts):
        print(file=sys.stderr)
    for name, text in parts:
        for index, line in enumerate((text or "").splitlines()):
            label = f"  {name:<7} " if index == 0 else "          "
            _print_folded(_brief(line), len(label), label)
    for index, line in enumerate((error.hint or "").splitlines()):
        _print_folded(line, len("hint: "), "\nhint: " if index == 0 else "")


def _brief(text: str) -> str:
    """A line that may repeat what somebody typed, or pasted by mistake; a hint, which may be copied, is never cut."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text):,} characters)"


def _print_folded(text: str, indent: int, label: str) -> None:
    """A line for people on standard error behind its label, which takes `indent` columns."""
    first, *rest = folded(harmless(text), sys.stderr, indent)
    print(f"{label}{first}", file=sys.stderr)
    for one in rest:
        print(f"{' ' * indent}{one}", file=sys.stderr)


def folded(text: str, stream: TextIO, indent: int) -> list[str]:
    """Lines that fit on the terminal behind an indentation; the text as it is elsewhere, for programs and files.

    Words stay whole, and so does a `command` that is to be copied.
    """
    if not stream.isatty():
        return [text]
    width = max(shutil.get_terminal_size().columns - indent, _LEAST_WIDTH)
    # What is between backticks has no space at which a line may end.
    whole = _CODE.sub(lambda found: found[0].replace(" ", _GLUE), text)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [one.replace(_GLUE, " ") for one in lines] or [""]


def paint(text: str, colour: str, stream: TextIO) -> str:
    """Coloured on a terminal, plain elsewhere or with NO_COLOR; colour never says anything alone."""
    if os.environ.get("NO_COLOR") or not takes_controls(stream):
        return text
    return click.style(text, fg=colour, bold=True)


def takes_controls(stream: TextIO) -> bool:
    """Whether it is a terminal that knows colours and can change a line; Emacs's shell says that it is dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> Iterable[str]:
    """Rows as aligned columns; None is what is not known."""
    whole = [heads, *rows] if heads else rows
    table = [[UNKNOWN if cell is None else str(cell) for cell in row] for row in whole]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        *before, last = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        indent = sum(len(cell) + 2 for cell in before)
        first, *rest = folded(last.rstrip(), sys.stdout, indent)
        yield "  ".join([*before, first]).rstrip()
        yield from (f"{' ' * indent}{one}" for one in rest)


def table_lines(table: Table) -> Iterable[str]:
    """A table of a view; its totals below it."""
    rows = (*table.rows, *table.foot)
    return columns(rows, [column.title for column in table.columns]) if rows else ()


def section_lines(section: Section) -> Iterable[str]:
    """A section of a view; of what is drawn elsewhere its tables."""
    if section.text:
        yield section.text
    yield from (f"  {remark}" for remark in section.remarks)
    yield from columns(section.facts)
    for table in section.tables:
        yield ""
        yield table.caption
        yield from table_lines(table)


def sections_lines(sections: Iterable[Section]) -> Iterable[str]:
    """Sections of a view below each other, each under its title."""
    for section in sections:
        yield ""
        yield section.title.upper()
        yield from section_lines(section)


def or_unknown(value: float | None, unit: str, digits: int = 0) -> str:
    """A figure with its unit, where there is one."""
    return UNKNOWN if value is None else f"{value:.{digits}f} {unit}"


def away_text(seconds: float | None) -> str:
    """How long the unit did not serve, behind what was measured meanwhile; empty where that is not known."""
    return "" if seconds is None else f"; the unit was away for {format_duration(seconds)}"


class Declined(click.Abort):
    """The answer to a question was no."""


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a change; without a terminal the answer must have been given beforehand.

    Raises:
        UsageError: nobody is there to answer.
        Declined: the answer is no.
        click.Abort: Ctrl-C, or the end of the input.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "cannot ask for confirmation: standard input is not a terminal",
            state="nothing was touched",
            hint="use --yes to go ahead without a question",
        )
    if not click.confirm(harmless(question, keep="\n"), err=True):
        raise Declined


def progress_sink(*, as_json: bool = False) -> ProgressSink:
    """Where progress goes: one changing line on a terminal, one line a step elsewhere."""
    if as_json:
        return ignore_progress
    return _Progress(is_in_place=takes_controls(sys.stderr))


def end_line(sink: ProgressSink) -> None:
    """Let what is printed next begin on a line of its own."""
    if isinstance(sink, _Progress):
        sink.end()


def progress_text(progress: Progress) -> str:
    """A step in words: `[3/8] waiting for the model 42 %, 12 s left`."""
    parts = []
    if progress.step is not None and progress.steps is not None:
        parts.append(f"[{progress.step}/{progress.steps}]")
    parts.append(_brief(progress.text))
    if progress.done_ratio is not None:
        parts.append(f"{progress.done_ratio:.0%}")
    if progress.left_s is not None:
        parts.append(f"(about {format_duration(progress.left_s)} left)")
    return harmless(" ".join(parts))


class _Progress:
    """Steps as they come; one that changes in place stays when the next begins."""

    def __init__(self, *, is_in_place: bool) -> None:
        self._is_in_place = is_in_place
        self._last = ""

    def __call__(self, progress: Progress) -> None:
        last, self._last = self._last, progress.text
        if self._is_in_place:
            end = "\n" if last and progress.text != last else ""
            _tell(f"{end}\r\x1b[K{progress_text(progress)}")
        elif progress.text != last:  # figures alone make no new line
            _tell(f"{progress_text(Progress(progress.text, progress.step, progress.steps))}\n")

    def end(self) -> None:
        """The next step, if there is one, begins a new line."""
        if self._is_in_place and self._last:
            self._last = ""
            _tell("\n")


def _tell(text: str) -> None:
    """Write progress unless that would wait: a swap goes on while Ctrl-S stops its terminal."""
    try:
        is_ready = bool(select.select([], [sys.stderr], [], 0)[1])
    except (OSError, ValueError):  # what has no descriptor, or too high a one
        is_ready = True
    if is_ready:
        sys.stderr.write(text)
        sys.stderr.flush()


# What a shell completes behind an option or argument; where nothing can be read it completes nothing.

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_MODES = ("system", "user", "local")


def names_of(kind: str, *, or_files: bool = False) -> Completer:
    """Names of a kind, by the function below that lists them."""

    def complete(
        ctx: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = (name for name in _listed(ctx, kind) if name.startswith(incomplete))
        files = [CompletionItem(incomplete, type="file")] if or_files else []
        return [*map(CompletionItem, names), *files]

    return complete


def _listed(ctx: click.Context, kind: str) -> Iterable[str]:
    """The names; none where the machine or its settings do not allow to read them."""
    if kind in _EVERYWHERE:
        return _EVERYWHERE[kind]()
    from tunerd.app import build_context

    given = ctx.find_root().params  # no command has run yet, so the mode is not worked out
    mode = next((name for name in _MODES if given.get(name)), None)
    try:
        names = _NAMES[kind](build_context(mode=mode))
    except (TunerdError, OSError, ValueError):  # a message would stand in the middle of the line
        return ()
    return names


# From files and names alone: no engine is started. What lists them is imported when a shell asks.


def _profiles(ctx: Context) -> Iterable[str]:
    from tunerd.profile.files import load_sources

    return load_sources(ctx).names


def _engines(ctx: Context) -> Iterable[str]:
    """Those that can be kept: by their name in the settings, others by path."""
    from tunerd.engine.builds import find_programs

    return (found.name or str(found.program) for found in find_programs(ctx))


def _settings(ctx: Context) -> Iterable[str]:
    from tunerd.settings import sources_of

    return sources_of(ctx.paths, ctx.environment)


def _targets(ctx: Context) -> Iterable[str]:
    """What one can go back to: backups by name, generations by number."""
    from tunerd.production.journal import backups

    return (*(backup.name for backup in backups(ctx)), *_generations(ctx))


def _generations(ctx: Context) -> Iterable[str]:
    return map(str, ctx.generations.numbers())


def _workloads(ctx: Context) -> Iterable[str]:
    from tunerd.measure.learn import workload_names

    return workload_names(ctx)


def _keys() -> Iterable[str]:
    """Of a profile, for `--set KEY=VALUE`."""
    from tunerd.profile.schema import all_keys

    return (f"{key}=" for key in all_keys())


def _shapes() -> Iterable[str]:
    from tunerd.tryout.designed import SHAPES

    return SHAPES


# The same on every machine, whatever its settings and whoever asks.
_EVERYWHERE: Mapping[str, Callable[[], Iterable[str]]] = {"keys": _keys, "shapes": _shapes}
_NAMES: Mapping[str, Callable[[Context], Iterable[str]]] = {
    "profiles": _profiles,
    "engines": _engines,
    "generations": _generations,
    "settings": _settings,
    "targets": _targets,
    "workloads": _workloads,
    "units": lambda ctx: ctx.services.service_units(),
    # What `compare` takes and that has a name.
    "sides": lambda ctx: ("live", *_profiles(ctx), *_generations(ctx), *ctx.settings.engines),
}
