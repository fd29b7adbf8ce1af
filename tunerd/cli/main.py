"""The entry point: which commands there are, and what becomes of their results and errors.

Commands are imported when they are called: `tunerd --help` must not pay for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tunerd import __version__
from tunerd.errors import Interrupted, TunerdError, UsageError

# Name: module of this package, and the line that `tunerd --help` shows.
COMMANDS: dict[str, tuple[str, str]] = {
    "detect": ("setup", "Show what this machine has: GPUs, memory, engines, units."),
    "engines": ("setup", "List engines and what each can do; keep a copy of one."),
    "profiles": ("setup", "List, show, check and write profiles."),
    "workload": ("measure", "Show or learn the mix of requests that tuning is for."),
    "bench": ("measure", "Measure how fast a server is."),
    "compare": ("measure", "Measure which of two configurations is faster for your work."),
    "sweep": ("sweep", "Search for faster settings, and prove them."),
    "schedule": ("sweep", "Set when sweeps begin by themselves."),
    "promote": ("deploy", "Deploy what a sweep proved, and watch it."),
    "decline": ("deploy", "Turn down what a sweep proposes."),
    "plan": ("deploy", "Show what apply would do; nothing is touched."),
    "apply": ("deploy", "Deploy a profile; go back if the new server does not answer."),
    "emit": ("deploy", "Write a plan for llama-swap, compose, quadlet or a shell."),
    "fits": ("deploy", "Check whether several models fit on the card at once."),
    "probation": ("deploy", "Show how a new server is watched after a swap."),
    "guard": ("watch", "Show what watches over the server, and set what it may do."),
    "notify": ("watch", "Send notices to a webhook."),
    "rollback": ("deploy", "Go back to the unit that served before."),
    "status": ("deploy", "Show what serves now, since when, and how well."),
    "top": ("watch", "Watch server, GPU and host live."),
    "history": ("deploy", "List every swap: when, what, why, and how it ended."),
    "verify": ("deploy", "Check that the machine is as deployed."),
    "doctor": ("setup", "Find what may be wrong on this machine, and what to do."),
    "support-bundle": ("setup", "Collect what to attach when you ask for help."),
    "results": ("measure", "Show what was measured, and whether it still holds."),
    "report": ("measure", "Write one HTML file with conditions, tables and charts."),
    "fleet": ("fleet", "Change several boxes one after the other; share evidence."),
    "jobs": ("watch", "List, follow and stop jobs."),
    "recover": ("deploy", "Finish or undo an interrupted swap."),
    "model": ("setup", "Write a small designed model whose answers are known."),
    "settings": ("setup", "Show every setting and where it comes from; change one."),
    "daemon": ("watch", "Run the daemon; systemd starts it."),
    "supervise": ("watch", "Run units on a machine without a service manager."),
    "completion": ("setup", "Print the completion script of a shell."),
}

# Started by tunerd itself; nobody types them.
# `overview` is what `tunerd` alone says.
INTERNAL: dict[str, str] = {"job": "watch", "look": "watch", "overview": "setup", "web": "watch"}
_MODES = ("--system", "--user", "--local")

# Longer ones first: a name of click's may begin with another.
_PLAIN_WORDS = {
    "a valid integer range": "a whole number",
    "a valid float range": "a number",
    "a valid integer": "a whole number",
}
_INTERRUPTED = 130
_SIGNALLED = 128
_ALLOCATIONS_PER_COLLECTION = 50_000

EXIT_CODES = """\b
Exit codes: 0 done, 1 failed and the machine is as before unless the message says otherwise,
2 wrong usage, 3 failed and rolled back, 4 failed and could not go back,
6 verify found drift or doctor found warnings,
7 doctor found errors, 75 another tunerd is at work."""


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and lists them without importing any."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """All names, in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in {*COMMANDS, *INTERNAL}:
            return None
        module_name, line = COMMANDS.get(cmd_name) or (INTERNAL[cmd_name], None)
        module = importlib.import_module(f"tunerd.cli.{module_name}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        command.short_help = line
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; without a command, what is here and what comes next."""
        # What a shell asks about, to complete it, is not alone: the rest is still being typed.
        is_alone = not ctx.resilient_parsing and all(word in _MODES for word in args)
        return super().parse_args(ctx, [*args, "overview"] if is_alone else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest name for a misspelt one."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in {*COMMANDS, *INTERNAL}:
            from tunerd.words import nearest_name

            nearest = nearest_name(name, [*COMMANDS])
            hint = f" Did you mean `{nearest}`?" if nearest else ""
            ctx.fail(f"No such command `{name}`.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, "--version", message="tunerd %(version)s")
@click.option("--system", is_flag=True, help="Act on system units (root).")
@click.option("--user", is_flag=True, help="Act on your own units.")
@click.option("--local", is_flag=True, help="Act without a service manager.")
@click.pass_context
def cli(ctx: click.Context, system: bool, user: bool, local: bool) -> None:
    """Tune and safely deploy llama.cpp's llama-server on one GPU.

    `tunerd` alone shows what this machine has and which command comes next.

    \b
    Example:
      tunerd detect
      tunerd plan rtx-3090-ti-24gb --explain
      tunerd apply rtx-3090-ti-24gb
      tunerd rollback
    """  # noqa: D301 -- \b is click's mark for text that is not to be wrapped
    asked = [name for name, on in (("system", system), ("user", user), ("local", local)) if on]
    if len(asked) > 1:
        raise click.UsageError(f"--{' and --'.join(asked)} exclude each other: give one.")
    from tunerd.cli.terminal import Terminal
    from tunerd.operations import entered_by

    entered_by(ctx.command)
    ctx.obj = Terminal(asked[0] if asked else None)


def main() -> None:
    """Run the command line of this process and exit."""
    # Walking through pydantic's and click's objects while they are imported, and again at the end,
    # takes a fifth of the CPU time of `tunerd status` (docs/benchmarks.md).
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION, 10, 10)
    atexit.register(gc.freeze)
    # numpy's threads wait in circles: the matrices of a night are small. With two threads on a busy
    # machine of two processors it took 2.5 times the CPU time, and 2.3 times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Streams that the caller closed take everything and keep nothing, and nobody answers there.
    sys.stdin = sys.stdin or Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In every locale, as Python itself from 3.15 on: figures, JSON and names have more than ASCII.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        code = _main()
        sys.stdout.flush()
    except OSError as error:
        # Without a file name it comes from a stream of ours; the reader of a pipe may have gone.
        if error.filename is not None:
            raise
        code = _unwritable(error, 1)
    sys.exit(code)


def _unwritable(error: OSError, code: int) -> int:
    from tunerd.cli.output import print_unwritable, silence_stdout

    silence_stdout()
    if error.errno != errno.EPIPE:
        print_unwritable(error, "the result cannot be shown")
    return code


def _main() -> int:
    """The exit code."""
    wants_json = "--json" in sys.argv[1:]
    try:
        # click turns a requested exit into a returned code here.
        code = cli.main(standalone_mode=False, prog_name="tunerd")
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _told(_as_ours(error), error.exit_code, as_json=wants_json)
    except (click.Abort, KeyboardInterrupt) as end:
        return _ended_by_hand(end, _INTERRUPTED, as_json=wants_json)
    except SystemExit as end:  # a signal that asked a measurement or a swap to end
        if not isinstance(end.code, int) or end.code <= _SIGNALLED:
            raise
        return _ended_by_hand(end, end.code, as_json=wants_json)
    except TunerdError as error:
        return _told(error, error.exit_code, as_json=wants_json)
    return code if isinstance(code, int) else 0


def _ended_by_hand(end: BaseException, code: int, *, as_json: bool) -> int:
    """The exit code of what a person, or a signal, ended; its notes say how the machine is."""
    from tunerd.cli.output import Declined

    error = Interrupted.by(end.__cause__ or end)  # click makes an exception of its own of Ctrl-C
    if isinstance(end, Declined):
        error = Interrupted("the answer was no", state="nothing was touched")
    return _told(error, code, as_json=as_json)


def named(words: Sequence[str]) -> str:
    """The command that is named by these words, as its results name it."""
    path: list[str] = []
    command: click.Command = cli
    ctx = click.Context(cli)
    for word in words:
        inner = command.get_command(ctx, word) if isinstance(command, click.Group) else None
        if inner is not None:
            path, command = [*path, word], inner
    return " ".join(path) or "tunerd"


def _told(error: TunerdError, code: int, *, as_json: bool) -> int:
    """The exit code of an error, which says how the machine is, even where nothing can be shown."""
    from tunerd.cli.output import print_error

    try:
        print_error(error, command=named(sys.argv[1:]), as_json=as_json)
        sys.stdout.flush()
    except OSError as problem:
        with contextlib.suppress(OSError):
            if as_json:
                print_error(error, command="", as_json=False)
        return _unwritable(problem, code)
    return code


def _as_ours(error: click.ClickException) -> TunerdError:
    """What click found wrong with a call, as an error of ours."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    where = ctx.command_path if ctx is not None else f"tunerd {named(sys.argv[1:])}"
    kind = UsageError if isinstance(error, click.UsageError) else TunerdError
    hint: str | None = f"`{where} --help`"
    if isinstance(error, click.MissingParameter) and error.param is not None and error.ctx:
        from tunerd.operations import PROFILE

        if error.param.type is PROFILE:
            from tunerd.cli.setup import profiles_for_here

            with contextlib.suppress(TunerdError):  # which a whole call tells of
                cause, hint = profiles_for_here(error.ctx.find_root().obj, where)
                return kind("no profile was named", cause=cause, hint=hint)
    if isinstance(error, click.NoSuchOption) and error.option_name == "--json":
        hint = "put `--json` after a command that shows something: `tunerd status --json`"
        return kind(f"no such option of `{where}`: '--json'", hint=hint)
    text = " ".join(error.format_message().split()).rstrip(".")  # choices are on lines of their own
    for ranged, plain in _PLAIN_WORDS.items():
        text = text.replace(ranged, plain)
    return kind(text[:1].lower() + text[1:], hint=hint)
