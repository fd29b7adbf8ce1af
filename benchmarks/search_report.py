"""Tables of `benchmarks.search`, from its rows."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import table

HOURS = (1.0, 2.0, 8.0)
STARTS = (30, 60, 120)
NEAR = (0.05, 0.02)

Row = dict[str, Any]


def read(rows: Path) -> list[Row]:
    """Every whole line; a cut one is left out."""
    found: list[Row] = []
    if rows.exists():
        for line in rows.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def key(row: Row) -> tuple[str, str, int, bool]:
    return row["strategy"], row["set"], row["seed"], row["from_best"]


def at_time(row: Row, seconds: float) -> tuple[float, bool]:
    """Regret of what would be recommended then, and whether it would run."""
    return _last(row, lambda point: point[0] <= seconds)


def at_start(row: Row, restarts: int) -> tuple[float, bool]:
    """The same after so many starts of a server."""
    return _last(row, lambda point: point[1] <= restarts)


def _last(row: Row, is_before: Any) -> tuple[float, bool]:
    points = [point for point in row["path"] if is_before(point)]
    return (points[-1][2], points[-1][3]) if points else (row["start"], True)


def starts_to(row: Row, near: float) -> int | None:
    """Starts after which regret stays below; None if it does not."""
    found: int | None = None
    for _, restarts, regret, runs in row["path"]:
        if regret > near or not runs:
            found = None
        elif found is None:
            found = restarts
    return found


def report(path: Path) -> str:
    """Markdown."""
    rows = read(path)
    nights = [row for row in rows if not row["from_best"]]
    sets = list(dict.fromkeys(row["set"] for row in nights))
    lines = ["Regret by time [%], median / 95th percentile", ""]
    heads = [f"{name}: {hours:g} h" for name in sets for hours in HOURS]
    lines.append(table(["strategy", *heads, "would not run"], _by_time(nights, sets)))
    lines += ["", "Regret by starts of a server [%], and starts to come near and stay", ""]
    heads = [f"{name}: {starts}" for name in sets for starts in STARTS]
    heads += [f"starts to {near:.0%}" for near in NEAR]
    lines.append(table(["strategy", *heads], _by_starts(nights, sets)))
    lines += ["", "What serves after the night, and what it cost", ""]
    heads = ["strategy", "set", "boxes", "promoted", "regret [%]", "would run", "regret of those [%]",
             "starts", "hours", "CPU [s]"]  # fmt: skip
    lines.append(table(heads, _by_end(nights)))
    best = [row for row in rows if row["from_best"]]
    if best:
        lines += ["", "With the best arm serving already", ""]
        heads = ["strategy", "set", "boxes", "promoted", "median loss of those [%]"]
        lines.append(table(heads, _false(best)))
    return "\n".join(lines)


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def _by_time(rows: list[Row], sets: Sequence[str]) -> Iterable[list[str]]:
    for (strategy,), members in grouped(rows, "strategy").items():
        cells = []
        for name in sets:
            of_set = [row for row in members if row["set"] == name]
            cells += [_spread([at_time(row, 3600 * h)[0] for row in of_set]) for h in HOURS]
        bad = sum(not at_time(row, 3600 * row["hours"])[1] for row in members)
        yield [strategy, *cells, f"{bad} of {len(members)}"]


def _by_starts(rows: list[Row], sets: Sequence[str]) -> Iterable[list[str]]:
    for (strategy,), members in grouped(rows, "strategy").items():
        cells = []
        for name in sets:
            of_set = [row for row in members if row["set"] == name]
            cells += [_spread([at_start(row, n)[0] for row in of_set]) for n in STARTS]
        for near in NEAR:
            reached = [starts_to(row, near) for row in members]
            there = [starts for starts in reached if starts is not None]
            median = f"{statistics.median(there):.0f}" if there else "-"
            cells.append(f"{median} ({len(there)} of {len(reached)})")
        yield [strategy, *cells]


def _by_end(rows: list[Row]) -> Iterable[list[str]]:
    for (strategy, name), members in grouped(rows, "strategy", "set").items():
        promoted = sum(row["verdict"] == "promote" for row in members)
        running = [row["served"][0] for row in members if row["served"][1]]
        yield [
            strategy, name, str(len(members)), str(promoted),
            _spread([row["served"][0] for row in members]), str(len(running)), _spread(running),
            f"{_median(members, 'restarts'):.0f}", f"{_median(members, 'box_s') / 3600:.1f}",
            f"{_median(members, 'cpu_s'):.1f}",
        ]  # fmt: skip


def _false(rows: list[Row]) -> Iterable[list[str]]:
    for (strategy, name), members in grouped(rows, "strategy", "set").items():
        wrong = [row["served"][0] - row["start"] for row in members if row["verdict"] == "promote"]
        loss = f"{100 * statistics.median(wrong):.1f}" if wrong else "-"
        yield [strategy, name, str(len(members)), f"{len(wrong)} of {len(members)}", loss]


def _median(rows: list[Row], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


def _spread(regrets: list[float]) -> str:
    if not regrets:
        return "-"
    return f"{100 * np.median(regrets):.1f} / {100 * np.percentile(regrets, 95):.0f}"
