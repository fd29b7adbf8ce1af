"""A sweep on one page of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunerd.cli.bars import bar
from tunerd.cli.output import columns
from tunerd.core.quantity import format_duration
from tunerd.core.sweep.page import arm_text

_MOST_ARMS = 15
_SHADES = " ░▒▓█"


def render_head(payload: Mapping[str, Any]) -> Iterator[str]:
    """What, when, and the verdict."""
    plan = payload["plan"]
    yield (
        f"sweep {payload['sweep']} of {payload['profile']} on {payload['workload']}, "
        f"{payload['started']} UTC: {payload['state']}"
    )
    yield f"starts from: {plan.get('incumbent_text', 'unknown')}"
    yield payload["sentence"] or f"no verdict: {payload['reason'] or 'it did not come to its end'}"
    if payload["decided"]:
        yield f"then: {payload['decided'].get('text', payload['decided'].get('what'))}"


def render_arms(payload: Mapping[str, Any]) -> Iterator[str]:
    """Measured arms, the fastest first."""
    rows = [
        (arm_text(one["arm"]), str(one["n_processes"]), _s(one["measured_s"]), _s(one["predicted_s"]),
         _s(one["believed_s"]), one["reason"])
        for one in payload["arms"][:_MOST_ARMS]
    ]  # fmt: skip
    if rows:
        heads = (
            "arm",
            "starts",
            "measured [s]",
            "predicted",
            "believed",
            "not recommended because",
        )
        yield from columns(rows, heads)
    left = len(payload["arms"]) - _MOST_ARMS
    if left > 0:
        yield f"and {left} slower ones (--json has all)"


def render_report(payload: Mapping[str, Any]) -> Iterator[str]:
    """The whole page."""
    page = payload["page"]
    yield from render_head(payload)
    yield ""
    yield from render_arms(payload)
    yield from _pairs(page["pairs"])
    yield from _heat(page["heat"])
    yield from _margins(page["margins"])
    yield from _classes(page["classes"])
    yield from _failures(page["failures"])
    yield from _time(payload["time_s"])
    yield from _left_out(payload)


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in pairs:
        yield ""
        yield f"challenge: {one['candidate']}: {one['outcome']}"
        yield from (f"  {reason}" for reason in one["reasons"])
        if one["gain"] is not None:
            yield f"  {_gain('all', one['gain'])}"
        yield from (f"  {_gain(kind['kind'], kind['gain'])}" for kind in one["by_kind"])
        ratios = ", ".join(f"{math.expm1(ratio):+.1%}" for ratio in one["log_ratios"])
        yield f"  pairs: {ratios or 'none'}"


def _gain(name: str, gain: Mapping[str, Any]) -> str:
    interval = "too few pairs for an interval"
    if gain["lower"] is not None and gain["upper"] is not None:
        interval = f"95 % interval {gain['lower']:+.1%} to {gain['upper']:+.1%}"
    return f"{name}: {gain['estimate']:+.1%} faster, {interval}"


def _heat(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    families = dict.fromkeys((one["engine"], one["spec"]) for one in cells if one["spec"] != "off")
    for engine, spec in families:
        own = {(one["n_max"], one["p_min"]): one["believed_s"] for one in cells
               if (one["engine"], one["spec"]) == (engine, spec)}  # fmt: skip
        depths = sorted({n_max for n_max, _ in own})
        gates = sorted({p_min for _, p_min in own})
        yield ""
        yield f"turn time [s] by n-max (down) and p-min (across): {engine}, {spec}"
        rows = [(f"  {n_max}", *(_cell(own.get((n_max, p_min)), own.values()) for p_min in gates))
                for n_max in depths]  # fmt: skip
        yield from columns(rows, ("", *(f"{p_min:g}" for p_min in gates)))


def _cell(value: float | None, others: Any) -> str:
    if value is None:
        return "."
    known = list(others)
    low, high = min(known), max(known)
    share = 0.0 if high <= low else (value - low) / (high - low)
    return f"{value:.3f} {_SHADES[round(share * (len(_SHADES) - 1))]}"


def _margins(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not steps:
        return
    yield ""
    yield "VRAM left with the context full, by margin [MiB]"
    rows = sorted(steps, key=lambda one: one["fit_mib"])
    yield from columns(
        [(f"  {one['fit_mib']}", "out of memory" if one["oom"] else f"{one['free_mib']:.0f}",
          arm_text(one["arm"])) for one in rows],
        ("  margin", "left", "arm"),
    )  # fmt: skip


def _classes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield "wall time by kind of request [s]"
    largest = max(one["wall_s"] for one in rows)
    shown = sorted(rows, key=lambda one: (one["kind"], one["wall_s"]))
    by_kind: dict[str, int] = {}
    for one in shown:
        by_kind[one["kind"]] = by_kind.get(one["kind"], 0) + 1
        if by_kind[one["kind"]] > 5:  # noqa: PLR2004 -- the fastest few
            continue
        drawn = bar([("", one["wall_s"])], largest=largest)
        yield f"  {one['kind']:<9} {drawn} {one['wall_s']:.3f}  {one['arm']} ({one['n']})"


def _failures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        yield ""
        yield "failures"
        yield from columns([(f"  {one['failure']}", f"{one['n']} x", one["arm"]) for one in rows])


def _time(spent: Mapping[str, float]) -> Iterator[str]:
    if spent:
        ordered = sorted(spent.items(), key=lambda one: -one[1])
        yield ""
        yield "time: " + ", ".join(f"{name} {format_duration(s)}" for name, s in ordered)


def _left_out(payload: Mapping[str, Any]) -> Iterator[str]:
    if payload["best_untried"] is not None:
        yield f"next time: what was not tried is believed to gain {payload['best_untried']:.1%} at most"
    if payload["left_out"]:
        yield ""
        yield "not tried, or given up"
        yield from columns([(f"  {one['what']}", one["reason"]) for one in payload["left_out"]])


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
