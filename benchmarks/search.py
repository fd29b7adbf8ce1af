"""Regret of the sweep and its peers on simulated boxes: what would serve after 1, 2 and 8 hours.

    python -m benchmarks.search run ROWS.jsonl [--boxes 20] [--strategies physics,random] [--best]
    python -m benchmarks.search report ROWS.jsonl

Rows are appended as they come; what is in the file is not run again. `--best` starts every box from
its best arm: whatever is promoted then is promoted wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import Row, grouped, keep, options, rows_of, say, table
from benchmarks.search_peers import PEERS, Bench, Over
from benchmarks.simulator.box import Truth
from benchmarks.simulator.tasks import Task, best, task
from tunerd.profile.arm import Arm
from tunerd.sweep.tuner import tune

SETS = "12G agent,16G chat,24G deep"
OURS = "physics"
_KEY = ("strategy", "set", "seed", "from_best")
# The incumbent of a night in which nothing may be promoted: the best arm that has room to spare.
_SPARE_MIB = 160.0
_HOURS, _STARTS, _NEAR = (1.0, 2.0, 8.0), (30, 60, 120), (0.05, 0.02)


@dataclass(frozen=True)
class Judge:
    """Knows the truth about one box, and the best that can be had on it."""

    one: Task
    truth: Truth
    best_arm: Arm
    best_ms: float

    @staticmethod
    @lru_cache(maxsize=8)
    def of(card: str, workload: str, seed: int) -> Judge:
        one = task(card, workload, seed)
        return Judge(one, Truth(one.card), *best(one))

    def regret(self, arm: Arm) -> float:
        return self.truth.turn_ms(arm, self.one.workload) / self.best_ms - 1

    def point(self, seconds: float, restarts: int, arm: Arm) -> list[Any]:
        runs = self.truth.is_feasible(arm)
        return [round(seconds), restarts, round(self.regret(arm), 5), runs]

    def spared(self) -> Arm:
        """The best arm at a margin that has room to spare."""
        arm = self.best_arm
        while self.truth.headroom_mib(arm) < _SPARE_MIB:
            arm = arm.with_margin(arm.fit_mib + 128)
        return arm


def night(strategy: str, judge: Judge, one: Task, seed: int, hours: float) -> Row:
    """What is found on one box, and when."""
    box, rng = one.box(seed), np.random.default_rng([seed, 17])
    begin = time.process_time()
    path: list[tuple[float, int, Arm]]
    if strategy == OURS:
        outcome = tune(box, one.space, one.workload, one.incumbent, hours * 3600, rng)
        path = [(at.seconds, at.restarts, at.arm) for at in outcome.evidence.path]
        verdict, arm = outcome.verdict, outcome.arm
    else:
        bench = Bench(one, box, hours * 3600)
        with contextlib.suppress(Over):
            PEERS[strategy](one, bench, rng)
        path, arm = bench.path, bench.path[-1][2]
        verdict = "keep" if arm == one.incumbent else "promote"
    return {
        "start": round(judge.regret(one.incumbent), 5), "path": [judge.point(*at) for at in path],
        "verdict": verdict, "served": judge.point(0, 0, arm)[2:], "arm": str(arm),
        "restarts": box.n_restarts, "failures": box.n_failures, "box_s": round(box.now()),
        "cpu_s": round(time.process_time() - begin, 1),
    }  # fmt: skip


def stays(path: list[Any], near: float) -> list[Any] | None:
    """The point from which on what is recommended runs and has less regret; None if there is none."""
    found = None
    for point in path:
        found = (found or point) if point[2] <= near and point[3] else None
    return found


def run(given: argparse.Namespace) -> None:
    git = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    known = set(grouped(rows_of(given.rows), *_KEY))
    seeds = range(given.first, given.first + given.boxes)
    for seed, name, strategy in product(seeds, given.sets.split(","), given.strategies.split(",")):
        key = strategy, name, seed, given.best
        if key in known:
            continue
        judge = Judge.of(*name.split(), seed)
        one = replace(judge.one, incumbent=judge.spared()) if given.best else judge.one
        found = night(strategy, judge, one, seed, given.hours)
        head = dict(zip(_KEY, key, strict=True))
        keep(given.rows, {**head, "hours": given.hours, "commit": commit, **found})
        say(
            f"{strategy}, {name}, box {seed}: {found['served'][0]:.1%} after {found['cpu_s']} s of CPU"
        )


# Tables


def report(given: argparse.Namespace) -> None:
    rows = rows_of(given.rows)
    nights = [row for row in rows if not row["from_best"]]
    sets = list(dict.fromkeys(row["set"] for row in nights))
    by_strategy = {name: members for (name,), members in grouped(nights, "strategy").items()}
    say("Regret by time [%], median / 95th percentile\n")
    heads = [f"{name}: {hours:g} h" for name, hours in product(sets, _HOURS)]
    say(table(
        ("strategy", *heads, "would not run"),
        [[name, *_course(members, sets, 0, [3600 * hours for hours in _HOURS]), _unfit(members)]
         for name, members in by_strategy.items()],
    ))  # fmt: skip
    say("\nRegret by starts of a server [%], and starts to come near and stay\n")
    heads = [f"{name}: {starts}" for name, starts in product(sets, _STARTS)]
    heads += [f"starts to {near:.0%}" for near in _NEAR]
    say(table(
        ("strategy", *heads),
        [[name, *_course(members, sets, 1, _STARTS), *(_starts_to(members, near) for near in _NEAR)]
         for name, members in by_strategy.items()],
    ))  # fmt: skip
    say("\nWhat serves after the night, and what it cost\n")
    heads = ["strategy", "set", "boxes", "promoted", "regret [%]", "would run", "regret of those [%]",
             "starts", "hours", "CPU [s]"]  # fmt: skip
    say(table(heads, _by_end(nights)))
    if best := [row for row in rows if row["from_best"]]:
        say("\nWith the best arm serving already\n")
        heads = ["strategy", "set", "boxes", "promoted", "median loss of those [%]"]
        say(table(heads, _false(best)))


def _at(row: Row, column: int, most: float) -> tuple[float, bool]:
    """Regret of what would be recommended so late (0) or after so many starts (1), and whether it would run."""
    points = [point for point in row["path"] if point[column] <= most]
    return (points[-1][2], points[-1][3]) if points else (row["start"], True)


def _course(rows: list[Row], sets: list[str], column: int, limits: Sequence[float]) -> list[str]:
    return [
        _spread([_at(row, column, most)[0] for row in rows if row["set"] == name])
        for name, most in product(sets, limits)
    ]


def _unfit(rows: list[Row]) -> str:
    return f"{sum(not _at(row, 0, 3600 * row['hours'])[1] for row in rows)} of {len(rows)}"


def _starts_to(rows: list[Row], near: float) -> str:
    """Starts after which regret stays below, and of how many boxes it does."""
    there = [point[1] for row in rows if (point := stays(row["path"], near))]
    usual = f"{median(there):.0f}" if there else "-"
    return f"{usual} ({len(there)} of {len(rows)})"


def _by_end(rows: list[Row]) -> Iterator[list[str]]:
    for (strategy, name), members in grouped(rows, "strategy", "set").items():
        promoted = sum(row["verdict"] == "promote" for row in members)
        running = [row["served"][0] for row in members if row["served"][1]]
        starts, box_s, cpu_s = (
            median(row[key] for row in members) for key in ("restarts", "box_s", "cpu_s")
        )
        yield [
            strategy, name, str(len(members)), str(promoted),
            _spread([row["served"][0] for row in members]), str(len(running)), _spread(running),
            f"{starts:.0f}", f"{box_s / 3600:.1f}", f"{cpu_s:.1f}",
        ]  # fmt: skip


def _false(rows: list[Row]) -> Iterator[list[str]]:
    for (strategy, name), members in grouped(rows, "strategy", "set").items():
        wrong = [row["served"][0] - row["start"] for row in members if row["verdict"] == "promote"]
        loss = f"{100 * median(wrong):.1f}" if wrong else "-"
        yield [strategy, name, str(len(members)), f"{len(wrong)} of {len(members)}", loss]


def _spread(regrets: list[float]) -> str:
    if not regrets:
        return "-"
    return f"{100 * np.median(regrets):.1f} / {100 * np.percentile(regrets, 95):.0f}"


def main() -> None:
    given = options(
        __doc__, what=("run", "report"), rows=Path, boxes=20, first=1, sets=SETS,
        strategies=",".join((OURS, *PEERS)), hours=8.0, best=False,
    )  # fmt: skip
    (run if given.what == "run" else report)(given)


if __name__ == "__main__":
    main()
