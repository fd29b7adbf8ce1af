"""Writes docs/reference/*.md from the code; a test fails when they are stale.

python docs/generate_reference.py          rewrites the files
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from tunerd import errors
from tunerd.cli.main import cli
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine.flags import ALL_FLAGS, SwitchFlag
from tunerd.profile.layers import default_layer
from tunerd.profile.schema import SECTIONS, ProfileFile, flatten
from tunerd.profile.workload import ClassTable, WorkloadTable
from tunerd.settings import EngineSettings, Settings

FOLDER = Path(__file__).parent / "reference"
_HEAD = "<!-- Written by docs/generate_reference.py; do not edit. -->\n\n"


def commands() -> Iterator[str]:
    """Help texts of every command."""
    yield "# Commands\n"
    yield _help(cli, "tunerd", None)
    context = click.Context(cli, info_name="tunerd")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None:
            yield from _command(command, f"tunerd {name}", context)


def _command(command: click.Command, path: str, parent: click.Context) -> Iterator[str]:
    yield _help(command, path, parent)
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _command(inner, f"{path} {name}", context)


def _help(command: click.Command, path: str, parent: click.Context | None) -> str:
    context = click.Context(
        command, info_name=path.rpartition(" ")[2], parent=parent, max_content_width=100,
        terminal_width=100,
    )  # fmt: skip
    return f"## {path}\n\n```\n{command.get_help(context)}\n```\n"


def settings_page() -> Iterator[str]:
    """Every setting."""
    yield "# Settings\n"
    yield (
        "In `tunerd.toml`, or in the environment as `TUNERD_` and the name in capitals with `__` for "
        "the dot (`TUNERD_SERVICE__DRAIN_S`). The environment wins. A misspelt name is an error.\n"
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
            yield f"`{name}`: {field.description} (default `{field.default}`)\n"


def profiles_page() -> Iterator[str]:
    """Every key of a profile, and the flag behind it."""
    yield "# Profile keys\n"
    yield (
        'The value `"default"` leaves a key to the engine. `[engines.NAME]` may hold `model`, '
        "`serving`, `speculation`, `memory`, `environment` and `extra_args` for one engine family "
        "or one named engine.\n"
    )
    defaults = {
        key: (value, default_layer().reasons.get(key, ""))
        for key, value in flatten(default_layer().data).items()
    }
    flags = {row.key: _spellings(row) for row in ALL_FLAGS}
    for section in SECTIONS:
        table = ProfileFile.model_fields[section].annotation
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            continue
        yield f"## [{section}]\n"
        yield inspect.cleandoc(table.__doc__ or "") + "\n"
        yield "| key | meaning | flag | tunerd's default |\n|---|---|---|---|"
        for name, field in table.model_fields.items():
            key = f"{section}.{name}"
            value, reason = defaults.get(key, ("", ""))
            default = f"`{value}`: {reason}" if reason else ""
            yield f"| `{name}` | {_text(field.description)} | {flags.get(key, '')} | {default} |"
        yield ""
    yield "## [workload]\n"
    yield (
        '`workload = "NAME"` names one of `tunerd workload list`; a table is one of its own. The same keys '
        "stand in a workload file.\n"
    )
    yield from _rows(WorkloadTable)
    yield "### [[workload.classes]]\n"
    yield from _rows(ClassTable)


def _spellings(row: object) -> str:
    if isinstance(row, SwitchFlag):
        return ", ".join(f"`{word}`" for word in (*row.on, *row.off))
    spellings: tuple[str, ...] = getattr(row, "spellings", ())
    return ", ".join(f"`{word}`" for word in spellings)


def errors_page() -> Iterator[str]:
    """Every error, its code and exit status."""
    yield "# Errors\n"
    yield "With `--json` an error is the object `error` with `code`, `message`, `cause`, `state`, `hint`.\n"
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
    yield "Other exit statuses: `verify` 6 for drift; `doctor` 6 for warnings, 7 for errors; 130 ended by Ctrl-C or the answer no, 143 by SIGTERM and 129 by SIGHUP, each with `interrupted`."


def doctor_page() -> Iterator[str]:
    """Every rule of `tunerd doctor`."""
    yield "# Rules of `tunerd doctor`\n"
    yield (
        "A rule finds something, passes, or cannot tell; then it is listed as not checked, with what "
        "was missing. With `--json` a finding has `code`, `severity`, `seen`, `why`, `do` and `source`.\n"
    )
    yield "| code | looks for | why it matters | source |\n|---|---|---|---|"
    for rule in ALL_RULES:
        cells = (_text(rule.looks_for), _text(rule.why), _text(rule.source))
        yield f"| `{rule.code}` | {' | '.join(cells)} |"
    yield ""


def _rows(table: type[BaseModel]) -> Iterator[str]:
    yield "| name | meaning | default |\n|---|---|---|"
    for name, field in table.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else f"`{_plain(field.get_default(call_default_factory=True))}`"
        )
        yield f"| `{name}` | {_text(field.description)} | {default} |"
    yield ""


def _plain(value: object) -> object:
    return "none" if value is None else value


def _text(description: str | None) -> str:
    return (description or "").replace("|", "\\|")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": commands,
    "settings.md": settings_page,
    "profiles.md": profiles_page,
    "errors.md": errors_page,
    "doctor.md": doctor_page,
}


def page(name: str) -> str:
    """The text of one page."""
    return _HEAD + "\n".join(PAGES[name]()).rstrip() + "\n"


def main() -> None:
    """Rewrite every page."""
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / name).write_text(page(name), encoding="utf-8")
        sys.stdout.write(f"wrote {FOLDER / name}\n")


if __name__ == "__main__":
    main()
