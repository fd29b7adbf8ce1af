"""What a sweep found, as a section of the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunerd.core.evidence import RunEvidence
from tunerd.web import report_charts as charts
from tunerd.web.report_view import Chart, Column, Key, Section, Table

PAGE, EVIDENCE = "sweep page", "sweep evidence"
_MOST_ARMS = 30


def sweep_sections(evidence: Sequence[RunEvidence]) -> Iterator[Section]:
    """A section for each sweep that came to its end."""
    for one in evidence:
        kept = {summary.name: summary.figures for summary in one.summaries}
        if PAGE in kept and EVIDENCE in kept:
            yield sweep_section(one.run.number, kept[PAGE], kept[EVIDENCE])


def sweep_section(number: int, page: Mapping[str, Any], evidence: Mapping[str, Any]) -> Section:
    """One sweep, by what `core/sweep/page` gathered and what it came to."""
    tables = (
        _arms(page),
        _pairs(page),
        _margins(page),
        _classes(page),
        _failures(page),
        _time(evidence),
        _left_out(evidence),
    )
    untried = evidence.get("best_untried")
    text = f"{page['n_starts']} starts and {page['n_requests']} requests."
    if untried is not None:
        text += f" What was not tried is believed to gain {untried:.1%} at most."
    return Section(
        name=f"sweep-{number}",
        title=f"Sweep {number}: what was tried, and why it came out so",
        text=text,
        charts=(*_heat(number, page), *_cliff(number, page)),
        tables=tuple(table for table in tables if table.rows),
    )


def _heat(number: int, page: Mapping[str, Any]) -> Iterator[Chart]:
    cells = [one for one in page["heat"] if one["spec"] != "off"]
    for at, (engine, spec) in enumerate(
        dict.fromkeys((one["engine"], one["spec"]) for one in cells)
    ):
        own = {(one["n_max"], one["p_min"]): one["believed_s"] for one in cells
               if (one["engine"], one["spec"]) == (engine, spec)}  # fmt: skip
        depths = sorted({n_max for n_max, _ in own})
        gates = sorted({p_min for _, p_min in own})
        best = min(own, key=lambda key: own[key])
        yield Chart(
            name=f"sweep-{number}-heat-{at}",
            title=f"Turn time by n-max and p-min: {engine}, {spec}",
            figure=charts.heat(
                [f"{n_max}" for n_max in depths],
                [f"{p_min:g}" for p_min in gates],
                [[own.get((n_max, p_min)) for p_min in gates] for n_max in depths],
                x_title="p-min", y_title="n-max", unit="s",
            ),
            alternative=f"Turn time in seconds by n-max and p-min; the least is {own[best]:.3f} s at "
            f"n-max {best[0]} and p-min {best[1]:g}.",
            legend=(),
        )  # fmt: skip


def _cliff(number: int, page: Mapping[str, Any]) -> Iterator[Chart]:
    steps = page["margins"]
    if len({one["fit_mib"] for one in steps}) < 2:  # noqa: PLR2004 -- a curve needs two
        return
    points = [(one["fit_mib"], None if one["oom"] else one["free_mib"]) for one in steps]
    out = sorted(x for x, y in points if y is None)
    least = min((x for x, y in points if y is not None), default=None)
    words = f"It ran out of memory at {', '.join(f'{x} MiB' for x in out)}. " if out else ""
    words += "" if least is None else f"The least margin that held was {least} MiB."
    yield Chart(
        name=f"sweep-{number}-margins",
        title="VRAM left with the context full, by margin",
        figure=charts.cliff(points, x_title="margin (fit_mib)", y_title="MiB left"),
        alternative=words,
        legend=(Key("left", "mainline"), Key("out of memory", "bad")),
    )


def _arms(page: Mapping[str, Any]) -> Table:
    return Table(
        "Turn time by configuration [s]",
        (Column("Configuration", is_number=False), Column("Starts"), Column("Measured"),
         Column("Predicted"), Column("Believed"), Column("Not recommended because", is_number=False)),
        tuple(
            (one["text"], str(one["n_processes"]), _s(one["measured_s"]), _s(one["predicted_s"]),
             _s(one["believed_s"]), one["reason"])
            for one in page["arms"][:_MOST_ARMS]
        ),
    )  # fmt: skip


def _pairs(page: Mapping[str, Any]) -> Table:
    rows = [
        (one["candidate"], name, f"{gain['estimate']:+.1%}", _bound(gain["lower"]),
         _bound(gain["upper"]), ", ".join(f"{math.expm1(ratio):+.1%}" for ratio in ratios))
        for one in page["pairs"]
        for name, gain, ratios in [
            *([("all", one["gain"], one["log_ratios"])] if one["gain"] else []),
            *((kind["kind"], kind["gain"], []) for kind in one["by_kind"]),
        ]
    ]  # fmt: skip
    columns = (Column("Challenger", is_number=False), Column("Text", is_number=False),
               Column("Faster by"), Column("From"), Column("To"), Column("Pair by pair"))  # fmt: skip
    return Table("Paired differences from what serves, 95 % interval", columns, tuple(rows))


def _margins(page: Mapping[str, Any]) -> Table:
    steps = sorted(page["margins"], key=lambda one: one["fit_mib"])
    return Table(
        "VRAM left with the context full [MiB]",
        (Column("Margin"), Column("Left")),
        tuple(
            (str(one["fit_mib"]), "out of memory" if one["oom"] else f"{one['free_mib']:.0f}")
            for one in steps
        ),
    )


def _classes(page: Mapping[str, Any]) -> Table:
    rows = sorted(page["classes"], key=lambda one: (one["kind"], one["wall_s"]))
    return Table(
        "Wall time by kind of request [s]",
        (Column("Configuration", is_number=False), Column("Text", is_number=False),
         Column("Wall time"), Column("Requests")),
        tuple((one["arm"], one["kind"], _s(one["wall_s"]), str(one["n"])) for one in rows),
    )  # fmt: skip


def _failures(page: Mapping[str, Any]) -> Table:
    columns = (Column("Configuration", is_number=False), Column("Failure", is_number=False),
               Column("Times"))  # fmt: skip
    rows = tuple((one["arm"], one["failure"], str(one["n"])) for one in page["failures"])
    return Table("Failures", columns, rows)


def _time(evidence: Mapping[str, Any]) -> Table:
    spent = sorted(evidence.get("time_s", {}).items(), key=lambda one: -one[1])
    columns = (Column("For", is_number=False), Column("Seconds"))
    return Table("Where the time went", columns, tuple((name, f"{s:.0f}") for name, s in spent))


def _left_out(evidence: Mapping[str, Any]) -> Table:
    rows = tuple((one["what"], one["reason"]) for one in evidence.get("left_out", []))
    columns = (Column("What", is_number=False), Column("Why", is_number=False))
    return Table("Not tried, or given up", columns, rows)


def _s(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _bound(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"
