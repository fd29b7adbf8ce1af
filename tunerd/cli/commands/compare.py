"""`tunerd compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.complete import keys, names_of
from tunerd.cli.output import (
    ask_or_tell,
    columns,
    finish,
    json_option,
    print_message,
    progress_sink,
)
from tunerd.core.quantity import format_duration

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared

_PARTS = ("prefill", "reasoning", "decode")


@click.command(name="compare", short_help="Which of two is faster on your kind of work.")
@click.argument("sides", nargs=-1, metavar="[A [B]]", shell_complete=names_of("sides"))
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", shell_complete=keys,
              help="Set a key for B alone.")  # fmt: skip
@click.option(
    "--profile",
    "base",
    shell_complete=names_of("profiles"),
    help="What engines and single settings change [default: what serves].",
)
@click.option("--workload", shell_complete=names_of("workloads"),
              help="The mix of requests [default: the profile's own].")  # fmt: skip
@click.option("--budget", default="30m", show_default=True, help="The longest it may take.")
@click.option("--pairs", "max_pairs", type=click.IntRange(3, 1000), default=60, show_default=True,
              help="The most pairs of fresh servers.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(0.1, 50.0), default=1.5, show_default=True,
              help="A difference in percent that does not matter.")  # fmt: skip
@click.option("--seed", type=int, help="Of texts and order, to repeat a comparison.")
@click.option(
    "--start-after", is_flag=True, help="Start the unit afterwards, even if it is down now."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def command(  # one option each
    mode: str | None,
    sides: tuple[str, ...],
    options: tuple[str, ...],
    base: str | None,
    workload: str | None,
    budget: str,
    max_pairs: int,
    tolerance: float,
    seed: int | None,
    start_after: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Which of two is faster: pairs of fresh servers, asked the same, until it is sure or time is up.

    A and B are profiles, numbers of generations, engines, single settings (KEY=VALUE), or `live`,
    what serves now. Without A it is `live`; without B it is A with --set. The unit is stopped
    meanwhile, and candidates answer in its place; afterwards it serves again, whatever happened.
    Where B may answer otherwise (another engine, model, template, KV type, reasoning, sampling), both are
    asked the same questions first, and a B that answers otherwise is not recommended.
    Exit code 0 whatever the verdict, 1 if it could not be measured.

    \b
    Example:
      tunerd compare --set speculation.n_max=2
      tunerd compare rtx-3090-ti-24gb rtx-3090-ti-24gb-dflash --workload coding-agent
      tunerd compare speculation.type=off speculation.n_max=3 --budget 2h
      tunerd compare 13 14
    """  # noqa: D301
    from tunerd.actions.compare import CompareRequest, check_limits, run_compare
    from tunerd.actions.context import build_context
    from tunerd.cli.remote import by_daemon, options_for_daemon
    from tunerd.core.time_span import parse_time_span

    if len(sides) > 2:  # noqa: PLR2004 -- A and B
        raise click.UsageError("two sides can be compared, not more")
    request = CompareRequest(
        words=sides,
        base=base,
        options=options,
        workload=workload,
        limits=check_limits(parse_time_span(budget), max_pairs, tolerance / 100),
        seed=seed,
        start_after=start_after,
    )

    body = {
        "sides": list(sides), "base": base, "set": options_for_daemon(options, mode),
        "workload": workload, "budget_s": request.limits.budget_s, "max_pairs": max_pairs,
        "tolerance": tolerance / 100, "seed": seed, "start_after": start_after,
    }  # fmt: skip
    done = by_daemon(mode, "compare", body, as_json=as_json, yes=yes)
    if done is not None:
        finish(done, render, as_json=as_json)
        return

    def ask(prepared: Prepared) -> None:
        if not yes:  # what speaks against it is said before, and not only with the result
            for message in prepared.messages:
                print_message(message)
        ask_or_tell(prepared.question, yes=yes)

    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=True
    )
    result = run_compare(context, request, confirm=ask)
    finish(result, render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["sentence"]
    yield from (f"  {reason}" for reason in payload["reasons"])
    if payload["changes"]:
        from tunerd.cli.commands.bench_view import quality_lines

        yield ""
        yield "what may change answers:"
        yield from (f"  {change['text']}" for change in payload["changes"])
        yield from quality_lines(payload["quality"], "B", "A")
    if payload["parts"]:
        yield ""
        rows = [
            (
                row["class"] or row["part"],
                f"{row['a_s']:.3f}",
                f"{row['b_s']:.3f}",
                f"{100 * row['gain']:+.1f} %",
                _interval(row),
            )
            for row in payload["parts"]
        ]
        yield from columns(rows, ("", "A [s]", "B [s]", "B faster by", "95 % interval"))
    yield from _bars(payload["turns"])
    yield ""
    took = format_duration(payload["elapsed_s"])
    away_s = payload["without_service_s"]
    away = "" if away_s is None else f"; the unit was away for {format_duration(away_s)}"
    yield f"run {payload['run']}: {payload['pairs']} pairs in {took}{away}"


def _interval(row: Mapping[str, Any]) -> str:
    if row["gain_low"] is None or row["gain_high"] is None:
        return "too few pairs"
    return f"{100 * row['gain_low']:+.1f} to {100 * row['gain_high']:+.1f}"


def _bars(turns: list[Mapping[str, Any]]) -> Iterator[str]:
    from tunerd.cli.bars import bar, legend

    whole = [row for row in turns if row["request_class"] is None]
    if not whole:
        return
    drawn = [(row["arm"], [(part, row[f"{part}_s"] or 0.0) for part in _PARTS]) for row in whole]
    largest = max(sum(size for _, size in parts) for _, parts in drawn)
    yield ""
    yield f"expected turn   {legend(_PARTS)}"
    for name, parts in drawn:
        total = sum(size for _, size in parts)
        yield f"  {name}  {bar(parts, largest=largest)}  {total:.3f} s"
