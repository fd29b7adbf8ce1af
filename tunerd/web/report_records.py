"""Tables of what was found beside samples, under whatever names a suite gave its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunerd.core.bench.depth import Depth
from tunerd.core.evidence import (
    AcceptanceByPosition,
    Crossover,
    RunEvidence,
    SummaryRecord,
    TurnTime,
)
from tunerd.web.report_samples import distinct
from tunerd.web.report_series import Series
from tunerd.web.report_text import counted, joined
from tunerd.web.report_view import Cell, Column, Table

TITLES = {
    "cache": "Prompt cache",
    "concurrency": "Several requests at once",
    "mtp": "Speed by kind of text",
    "quality": "Quality",
    "workload": "Workload",
}
_DRAWN = frozenset({AcceptanceByPosition.NAME, Crossover.NAME, Depth.NAME, TurnTime.NAME})
_UNITS = {"_mib": "MiB", "_tok_s": "tok/s", "_tokens": "tokens", "_ms": "ms", "_s": "s",
          "_letters": "letters", "_ratio": "share"}  # fmt: skip
_CASE = "case"
_NOT_TOLD = "cannot tell"
_EXACT_FROM = 1000
_CONFIGURATION = "configuration"


def record_tables(evidence: Sequence[RunEvidence], series: Sequence[Series]) -> list[Table]:
    """One table for each name under which figures are kept, a row for each record.

    What a record holds as a list of rows becomes a table of its own.
    """
    groups: dict[tuple[str, str], list[tuple[str | None, SummaryRecord]]] = {}
    for run in evidence:
        for record in run.summaries:
            if record.name not in _DRAWN:
                label = label_of(series, run, record.arm)
                groups.setdefault((record.suite, record.name), []).append((label, record))
    return [
        table
        for (suite, name), records in groups.items()
        for table in _tables(_caption(suite, name), records)
    ]


def label_of(series: Sequence[Series], run: RunEvidence, arm: str | None) -> str | None:
    """The label of what a run called by this name; None for none."""
    if arm is None:
        return None
    return next((one.label for one in series if one.has_name(run.run.number, arm)), arm)


def _tables(caption: str, records: Sequence[tuple[str | None, SummaryRecord]]) -> list[Table]:
    rows = [(label, _scalars(record.figures)) for label, record in records]
    found = [_table(caption, rows)] if any(figures for _, figures in rows) else []
    inner = distinct(key for _, record in records for key in _row_keys(record.figures))
    for key in inner:
        parts = [(label, row) for label, record in records for row in record.figures.get(key, ())]
        found.append(_table(f"{caption}, {_head(key)}", parts))
    return found


def _table(caption: str, rows: Sequence[tuple[str | None, Mapping[str, Any]]]) -> Table:
    """Rows by case where they have one, else by configuration."""
    keys = distinct(key for _, figures in rows for key in figures)
    has_case = _CASE in keys
    keys = [key for key in keys if key != _CASE]
    labels = any(label is not None for label, _ in rows)
    columns = [Column(_CASE, is_number=False)] if has_case else []
    columns += [Column(_CONFIGURATION, is_number=False)] if labels or not has_case else []
    numbers = {key: all(_is_number(figures.get(key)) for _, figures in rows) for key in keys}
    columns += [Column(_head(key), is_number=numbers[key]) for key in keys]
    cells = []
    for label, figures in rows:
        row: list[Cell] = [_value(figures.get(_CASE))] if has_case else []
        row += [label or "all"] if labels or not has_case else []
        row += [_value(figures.get(key), is_number=numbers[key]) for key in keys]
        cells.append(tuple(row))
    return Table(caption, tuple(columns), tuple(cells))


def _caption(suite: str, name: str) -> str:
    title = TITLES.get(suite, suite)
    return title if name == suite else f"{title}: {name}"


def _scalars(figures: Mapping[str, Any]) -> dict[str, Any]:
    rows = _row_keys(figures)
    return {key: value for key, value in figures.items() if key not in rows and key != "arm"}


def _row_keys(figures: Mapping[str, Any]) -> list[str]:
    """The keys whose values are lists of rows."""
    return [
        key
        for key, value in figures.items()
        if isinstance(value, list | tuple)
        and value
        and all(isinstance(one, Mapping) for one in value)
    ]


def _head(key: str) -> str:
    """`least_free_mib` as `least free [MiB]`, `n_same` as `same`."""
    unit = next((ending for ending in _UNITS if key.endswith(ending)), None)
    name = key.removesuffix(unit) if unit is not None else key
    words = name.removeprefix("n_").replace("_", " ").replace("ttft", "TTFT")
    return f"{words} [{_UNITS[unit]}]" if unit is not None else words


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _value(value: object, *, is_number: bool = True) -> Cell:
    if value is None:
        return None if is_number else _NOT_TOLD
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < _EXACT_FROM else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return joined([_value(one) or "missing" for one in value]) or counted(0, "entry", "entries")
    return str(value)
