"""`tunerd doctor`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from tunerd.cli.output import finish, json_option

_HEADS = {"error": "errors", "warning": "warnings", "note": "notes"}
_WIDTH = 100


@click.command(name="doctor", short_help="What may be wrong on this box, and what to do.")
@json_option
@click.pass_obj
def command(mode: str | None, as_json: bool) -> None:
    """What may be wrong on this box, and what to do about it.

    Looks at the machine, the driver, the unit that serves, its build, model and log, and at what was
    measured. Changes nothing, and works without a GPU and without a server: what could not be told is
    listed with what was missing. `docs/reference/doctor.md` has every rule.

    Exit code 0 for nothing or notes, 6 for warnings, 7 for errors.

    \b
    Example:
      tunerd doctor
      tunerd doctor --json | jq -r '.findings[] | [.severity, .code, .do] | @tsv'
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.doctor import doctor

    finish(doctor(build_context(mode=mode)), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: the worst first."""
    for severity, head in _HEADS.items():
        found = [one for one in payload["findings"] if one["severity"] == severity]
        if found:
            yield f"{head} ({len(found)})"
        for finding in found:
            yield from _finding(finding)
    if not payload["findings"]:
        yield "nothing was found"
    yield from _not_checked(payload["not_checked"])
    yield from _wrapped("passed: ", ", ".join(payload["passed"]) or "none", "  ")


def _finding(finding: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrapped(f"  {finding['code']}: ", finding["seen"], "    ")
    for name in ("why", "do", "source"):
        yield from _wrapped(f"    {name:<7} ", finding[name], " " * 12)
    yield ""


def _not_checked(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rules that could not tell, by what they lack."""
    by_missing: dict[str, list[str]] = {}
    for row in rows:
        for missing in row["missing"]:
            by_missing.setdefault(missing, []).append(row["code"])
    if rows:
        yield f"not checked ({len(rows)}), for want of"
    for missing, codes in by_missing.items():
        yield from _wrapped(f"  {missing}: ", ", ".join(codes), "    ")
    if rows:
        yield ""


def _wrapped(first: str, text: str, indent: str) -> list[str]:
    """Lines of at most 100 characters; a command or a path is never cut."""
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
