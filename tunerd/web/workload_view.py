"""A workload: the mean request of each class, and the time that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.web.charts import Bar, Bars, Part
from tunerd.web.view import Chart, Section, Table, heads, percent, tokens

_TOKENS = (("cached_tokens", "cached prompt", "waiting"), ("new_tokens", "new prompt", "prefill"),
           ("reasoning_tokens", "reasoning", "reasoning"), ("answer_tokens", "answer", "decode"))  # fmt: skip
_TIMES = (("prefill_s", "prefill", "prefill"), ("reasoning_s", "reasoning", "reasoning"),
          ("decode_s", "decode", "decode"))  # fmt: skip
_Parts = tuple[tuple[str, str, str], ...]


def workload_section(workload: Mapping[str, Any]) -> Section:
    """Its classes; with the speed that the live server had, what their turns take."""
    classes = workload["classes"]
    charts = [
        _chart("tokens", "Tokens of one request", _TOKENS, "tokens",
               [(one["name"], one["mean"]) for one in classes])
    ]  # fmt: skip
    rates = workload["rates"]
    if workload["turn"] is not None:
        title = (
            f"Turn time at {rates['prompt_tok_s']:.0f} tok/s of prompt and "
            f"{rates['decode_tok_s']:.1f} tok/s of answer"
        )
        turns = [*((one["name"], one["turn"]) for one in classes), ("expected", workload["turn"])]
        charts.append(_chart("turns", title, _TIMES, "seconds", turns))
        text = ""
    else:
        text = "turn times: unknown, since no log shows how fast the live server is"
    return Section("workload", workload["name"], text, tuple(charts), (_classes(workload),))


def _chart(
    name: str, title: str, parts: _Parts, unit: str, rows: list[tuple[str, Mapping[str, Any]]]
) -> Chart:
    groups = tuple((of, (_bar(of, parts, sizes),)) for of, sizes in rows)
    plot = Bars(groups, unit, is_stacked=True, digits=0 if unit == "tokens" else 1)
    return Chart(name, title, plot)


def _bar(name: str, parts: _Parts, sizes: Mapping[str, Any]) -> Bar:
    """What a workload does not have takes nothing; it is not missing."""
    found = tuple(Part(label, colour, float(sizes[key] or 0)) for key, label, colour in parts)
    return Bar(name, found, sum(part.value or 0.0 for part in found))


def _classes(workload: Mapping[str, Any]) -> Table:
    columns = heads("~class", "share", "~kind", "cached [tok]", "new [tok]", "reasoning [tok]",
                    "answer [tok]", "at once")  # fmt: skip
    rows = tuple(
        (
            one["name"],
            percent(one["share"], 0),
            one["kind"],
            tokens(one["mean"]["cached_tokens"]),
            tokens(one["mean"]["new_tokens"]),
            "in the answer"
            if one["mean"]["reasoning_tokens"] is None
            else tokens(one["mean"]["reasoning_tokens"]),
            tokens(one["mean"]["answer_tokens"]),
            str(one["concurrency"]),
        )
        for one in workload["classes"]
    )
    return Table("Mean request of each class", columns, rows)
