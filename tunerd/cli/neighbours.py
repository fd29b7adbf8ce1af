"""Commands for programs beside tunerd, and for several models on one card: emit, fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.complete import names_of
from tunerd.cli.deploy import set_option, untuned_option
from tunerd.cli.output import columns, finish
from tunerd.operations import IMAGE, NUMBER, PROFILE, Call, operation
from tunerd.words import format_mib

if TYPE_CHECKING:
    from tunerd.result import ActionResult

TARGETS = ("llama-swap", "models-ini", "compose", "quadlet", "shell")


@click.command(name="emit", short_help="Write a plan for other programs.")
@click.argument("target", type=click.Choice(TARGETS))
@click.argument("profile", type=PROFILE, nargs=-1, shell_complete=names_of("profiles"))
@set_option
@untuned_option
@click.option("--image", type=IMAGE, metavar="IMAGE",
              help="Container image [default: llama.cpp's own].")  # fmt: skip
@click.option(
    "--output", "-o", metavar="FILE", help="Where to write it [default: standard output]."
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@operation(show="show_emitted")
def emit_command(
    call: Call,
    target: str,
    profile: tuple[str, ...],
    options: tuple[str, ...],
    untuned: bool,
    image: str | None,
    output: str | None,
    force: bool,
) -> ActionResult:
    """Write the command line of a plan, or without PROFILE of what serves now, for others.

    It is the one that `tunerd plan` shows. llama-swap and models-ini take several profiles. What a target
    cannot carry is said, on standard error and in the text; API keys are never written. Nothing is started.

    \b
    Example:
      tunerd emit llama-swap rtx-3090-ti-24gb
      tunerd emit compose -o compose.yaml
      tunerd emit shell rtx-5060-ti-16gb --set speculation.n_max=3
    """  # noqa: D301
    from tunerd.engine.builds import PlanRequest
    from tunerd.engine.emit import Target
    from tunerd.errors import UsageError
    from tunerd.production.emit import write_down
    from tunerd.profile.files import parse_options

    del output, force  # where it is typed
    if not profile and (options or untuned):
        raise UsageError("--set and --untuned need a PROFILE: what serves now is as it is")
    given = parse_options(options)
    requests = [PlanRequest(one, given, with_tuned=not untuned) for one in profile]
    return write_down(call.context(), Target(target), requests, image=image)


def show_emitted(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """On standard output, or into the file that was named."""
    from tunerd.production.emit import demand_free, write_text

    path = Path(params["output"]) if params["output"] not in {None, "-"} else None
    if path is not None and not params["force"]:
        demand_free(path)
    made = perform()
    if path is not None:
        made = write_text(path, made, replace_it=params["force"])
    finish(made, render, as_json=as_json, is_data=True)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people and programs: the text itself, or where it is."""
    if payload["path"] is None:
        yield payload["text"].removesuffix("\n")
    else:
        yield f"wrote {payload['path']}"


@click.command(name="fits", short_help="Whether several models fit on the card at once.")
@click.argument(
    "profile", type=PROFILE, nargs=-1, required=True, shell_complete=names_of("profiles")
)
@click.option("--budget-mib", type=NUMBER, metavar="MIB",
              help="What all of them may take [default: what is free, with what serves now].")  # fmt: skip
@operation("render_fits")
def fits_command(call: Call, profile: tuple[str, ...], budget_mib: int | None) -> ActionResult:
    """Whether the servers of these profiles can be loaded at once, by their estimates and margin.

    Exit code 1 if they cannot, or if that cannot be told. Nothing is touched.

    \b
    Example:
      tunerd fits coder chat embeddings
      tunerd fits coder chat --budget-mib 20000
    """  # noqa: D301
    from tunerd.engine.builds import PlanRequest
    from tunerd.production.emit import fits
    from tunerd.words import MiB

    requests = [PlanRequest(one, {}) for one in profile]
    return fits(
        call.context(), requests, budget_mib=None if budget_mib is None else MiB(budget_mib)
    )


def render_fits(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: what each needs, and what is left."""
    rows = [
        ("held by others", payload["held_mib"]),
        ("may be taken", payload["budget_mib"]),
        *((one["profile"], one["mib"]) for one in payload["needs"]),
        ("margin", payload["margin_mib"]),
    ]
    left = payload["left_mib"]
    sign = "-" if left is not None and left < 0 else ""
    yield from columns(
        [
            *((name, format_mib(mib)) for name, mib in rows),
            ("left", sign + format_mib(None if left is None else abs(left))),
        ],
        (payload["device"], "memory"),
    )
