"""Writes docs/reference/ from the code: Markdown, and the manual page; a test fails when they are stale.

python docs/generate_reference.py          rewrites the files
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from tunerd import __version__, errors
from tunerd.cli.main import EXIT_CODES, cli
from tunerd.cli.output import as_written
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine.flags import FLAG_ROWS, RENDERED_ELSEWHERE, SECRET_FLAGS, ngram_flags
from tunerd.measure.results import Bundle
from tunerd.profile.layers import default_layer
from tunerd.profile.schema import SECTIONS, ProfileFile, flatten
from tunerd.profile.workload import ClassShape, WorkloadTable
from tunerd.settings import EngineSettings, Settings

FOLDER = Path(__file__).parent / "reference"
SCHEMA = "results-bundle.schema.json"
_WRITTEN = "Written by docs/generate_reference.py; do not edit."
_HEADS = {".md": f"<!-- {_WRITTEN} -->\n\n", ".1": f'.\\" {_WRITTEN}\n'}

_NGRAM_KINDS = ("ngram-mod", "ngram-simple", "ngram-map-k", "ngram-map-k4v")  # others have no sizes


def spellings_of_keys() -> dict[str, tuple[str, ...]]:
    """The flags by which builds take a key, or that it stands for."""
    found: dict[str, dict[str, None]] = {}
    for row in (*FLAG_ROWS, *(row for kind in _NGRAM_KINDS for row in ngram_flags(kind))):
        found.setdefault(row.key, {}).update(dict.fromkeys(row.spellings))
    for key, words in RENDERED_ELSEWHERE.items():
        names = (word for word in words.split() if word not in SECRET_FLAGS)
        found.setdefault(key, {}).update(dict.fromkeys(names))
    return {key: tuple(spellings) for key, spellings in found.items()}


def every_command(
    command: click.Command = cli, context: click.Context | None = None
) -> Iterator[click.Context]:
    """The program and each of its commands, in the order of its help."""
    name = "tunerd" if context is None else command.name
    # As it is called: click keeps the help option of a command by the names of its first context.
    given = {**command.context_settings, "max_content_width": 100, "terminal_width": 100}
    here = click.Context(command, info_name=name, parent=context, **given)
    yield here
    if isinstance(command, click.Group):
        for inner_name in command.list_commands(here):
            inner = command.get_command(here, inner_name)
            if inner is not None:
                yield from every_command(inner, here)


def commands() -> Iterator[str]:
    """Help texts of every command."""
    yield "# Commands\n"
    for context in every_command():
        yield f"## {context.command_path}\n\n```\n{context.get_help()}\n```\n"


def manual_page() -> Iterator[str]:
    """tunerd(1), in the macros of man(7)."""
    program, *others = every_command()
    yield f'.TH TUNERD 1 "" "tunerd {__version__}" "User Commands"'
    yield from (
        ".SH NAME",
        r"tunerd \- tune and safely deploy llama.cpp's llama\-server on one GPU",
    )
    yield from (".SH SYNOPSIS", _synopsis(program), ".SH DESCRIPTION")
    yield from [*_man_text(program.command.help or "")][1:]
    yield from (".SH OPTIONS", *_man_options(program), ".SH COMMANDS")
    for context in others:
        yield f'.SS "{_man(context.command_path.removeprefix("tunerd "))}"'
        yield _synopsis(context)
        yield from _man_text(context.command.help or "")
        yield from _man_options(context)
    yield from (".SH EXIT STATUS", *[*_man_text(EXIT_CODES)][1:], ".SH FILES")
    for path, meaning in _FILES.items():
        yield from (".TP", f".I {_man(path)}", _man(meaning))
    yield from (
        ".SH SEE ALSO",
        ".BR systemctl (1),",
        ".BR journalctl (1),",
        r".BR llama\-server (1)",
    )


_FILES = {
    "/etc/tunerd/tunerd.toml": "Settings; `tunerd settings` shows each, and docs/reference/settings.md explains them.",
    "/etc/tunerd/profiles/": "Profiles of this site.",
    "/var/lib/tunerd/": "Generations, what was measured, kept engines.",
    "/etc/systemd/system/*.service.pre-*": "Backups of units that were replaced: plain copies, which systemd ignores.",
    "~/.config/tunerd/, ~/.local/state/tunerd/, ~/.config/systemd/user/": "The same in user mode.",
}


def _synopsis(context: click.Context) -> str:
    pieces = " ".join(context.command.collect_usage_pieces(context))
    return f"\\fB{_man(context.command_path)}\\fP {_man(pieces)}"


def _man_options(context: click.Context) -> Iterator[str]:
    for param in context.command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None and (context.parent is None or "--help" not in param.opts):
            yield from (".TP", rf"\fB{_man(record[0])}\fP", _man(record[1]))


def _man_text(text: str) -> Iterator[str]:
    """The paragraphs of a help text; click's mark at the beginning of one keeps its lines as they are."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = [_man(line) for line in paragraph.splitlines()]
        yield from (".PP", ".nf", *lines[1:], ".fi") if paragraph[0] == "\b" else (".PP", *lines)


# A dash, a caret, a tilde and a straight quote print as typed by these names alone.
_ROFF = str.maketrans({"\\": r"\e", "-": r"\-", "^": r"\(ha", "~": r"\(ti", "'": r"\(aq"})


def _man(text: str) -> str:
    """A line as roff prints it: words in backticks are bold, and nothing is a request."""
    bold = re.sub(r"`([^`]+)`", r"\\fB\1\\fP", text.translate(_ROFF))
    return rf"\&{bold}" if bold.startswith(".") else bold


def settings_page() -> Iterator[str]:
    """Every setting."""
    yield "# Settings\n"
    yield (
        "Set them in `tunerd.toml`, or as environment variables: `TUNERD_` and the name in capitals, with `__` for "
        "the dot (`TUNERD_SERVICE__DRAIN_S`). The environment wins. A misspelt name is an error. "
        "`TUNERD_CONFIG_DIR`, `_STATE_DIR`, `_RUNTIME_DIR` and `_UNIT_DIR` move folders; `tunerd settings` shows "
        "the folders in its last lines. `TUNERD_LOG_LEVEL` sets the daemon's log level.\n"
    )
    for name, field in Settings.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            yield f"## [{name}]\n"
            yield inspect.cleandoc(table.__doc__ or "") + "\n"
            yield from _rows(table)
        elif name == "engines":
            yield "## [engines.NAME]\n"
            yield inspect.cleandoc(EngineSettings.__doc__ or "") + "\n"
            yield from _rows(EngineSettings)
        else:
            yield f"`{name}`: {meanings(Settings)[name]} (default `{as_written(field.default)}`)\n"


def profiles_page() -> Iterator[str]:
    """Every key of a profile, and the flag behind it."""
    yield "# Profile keys\n"
    yield (
        'Every key is optional in a file. The value `"default"` leaves a key to the engine. `[engines.NAME]` may have '
        "`model`, `serving`, `speculation`, `memory`, `environment` and `extra_args` for one engine family "
        "or one named engine.\n"
    )
    yield "| beside the tables below | meaning |\n|---|---|"
    for name, field in ProfileFile.model_fields.items():
        if name not in {*SECTIONS, "workload"}:
            yield f"| `{name}` | {_text(field.description or inspect.getdoc(field.annotation))} |"
    yield ""
    defaults = {
        key: (value, default_layer().reasons.get(key, ""))
        for key, value in flatten(default_layer().data).items()
    }
    flags = {
        key: ", ".join(f"`{word}`" for word in words) for key, words in spellings_of_keys().items()
    }
    for section in SECTIONS:
        table = ProfileFile.model_fields[section].annotation
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            continue
        yield f"## [{section}]\n"
        yield inspect.cleandoc(table.__doc__ or "") + "\n"
        told = meanings(table)
        yield "| key | meaning | flag | tunerd's default |\n|---|---|---|---|"
        for name in table.model_fields:
            key = f"{section}.{name}"
            value, reason = defaults.get(key, ("", ""))
            default = f"`{as_written(value)}`: {reason}" if reason else ""
            yield f"| `{name}` | {_text(told[name])} | {flags.get(key, '')} | {default} |"
        yield ""
    yield "## [workload]\n"
    yield (
        '`workload = "NAME"` names a workload of `tunerd workload list`; a table defines one here. A workload file has '
        "the same keys.\n"
    )
    yield from _rows(WorkloadTable)
    yield "### [[workload.classes]]\n"
    yield from _rows(ClassShape)


def errors_page() -> Iterator[str]:
    """Every error, its code and exit status."""
    yield "# Errors\n"
    yield "With `--json` an error is the object `error` with `code`, `message`, `cause`, `state` and `hint`.\n"
    yield "| code | exit status | meaning |\n|---|---|---|"
    classes: list[type[errors.TunerdError]] = [
        found
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, errors.TunerdError)
    ]
    for found in classes:
        meaning = inspect.cleandoc(found.__doc__ or "").splitlines()[0]
        yield f"| `{found.code}` | {found.exit_code} | {meaning} |"
    yield ""
    yield "Other exit statuses: `verify` 6 for drift; `doctor` 6 for warnings, 7 for errors. A command that is ended by Ctrl-C or the answer no exits with 130, by SIGTERM with 143, by SIGHUP with 129, each with code `interrupted`."


def doctor_page() -> Iterator[str]:
    """Every rule of `tunerd doctor`."""
    yield "# Rules of `tunerd doctor`\n"
    yield (
        "A rule finds something, passes, or cannot be checked; the last are listed with what is missing. "
        "With `--json` a finding has `code`, `severity`, `seen`, `why`, `do` and `source`.\n"
    )
    yield "| code | looks for | why it matters | source |\n|---|---|---|---|"
    for rule in ALL_RULES:
        cells = (_text(rule.looks_for), _text(rule.why), _text(rule.source))
        yield f"| `{rule.code}` | {' | '.join(cells)} |"
    yield ""


def meanings(table: type[BaseModel]) -> dict[str, str]:
    """What stands below each field of a table, or in it."""
    tree = ast.parse(inspect.getsource(table))
    nodes = [node for made in tree.body if isinstance(made, ast.ClassDef) for node in made.body]
    found = {name: field.description or "" for name, field in table.model_fields.items()}
    for field, below in itertools.pairwise(nodes):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def _rows(table: type[BaseModel]) -> Iterator[str]:
    told = meanings(table)
    yield "| name | meaning | default |\n|---|---|---|"
    for name, field in table.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else f"`{as_written(field.get_default(call_default_factory=True))}`"
        )
        yield f"| `{name}` | {_text(told[name])} | {default} |"
    yield ""


def _text(description: str | None) -> str:
    return (description or "").replace("|", "\\|")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": commands,
    "tunerd.1": manual_page,
    "settings.md": settings_page,
    "profiles.md": profiles_page,
    "errors.md": errors_page,
    "doctor.md": doctor_page,
}


def page(name: str) -> str:
    """The text of one page."""
    return _HEADS[Path(name).suffix] + "\n".join(PAGES[name]()).rstrip() + "\n"


def schema() -> str:
    """What a bundle of results may hold, as JSON Schema."""
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Bundle.model_json_schema()}
    return json.dumps(made, indent=2) + "\n"


def main() -> None:
    """Rewrite every page."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / SCHEMA).write_text(schema(), encoding="utf-8")
    for name in PAGES:
        (FOLDER / name).write_text(page(name), encoding="utf-8")
        sys.stdout.write(f"wrote {FOLDER / name}\n")


if __name__ == "__main__":
    main()
