"""Regret of the sweep and its peers on simulated boxes: what would serve after 1, 2 and 8 hours.

python -m benchmarks.search run ROWS.jsonl [--boxes 20] [--strategies physics,random] [--best]
python -m benchmarks.search report ROWS.jsonl

Rows are appended as they come; what is in the file is not run again. `--best` starts every box from
its best arm: whatever is promoted then is promoted wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import search_report
from benchmarks.search_peers import PEERS, Bench, Over
from benchmarks.simulator.box import SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, best, task
from tunerd.profile.arm import Arm
from tunerd.sweep.tuner import tune

HOURS = 8.0
SETS = ("12G agent", "16G chat", "24G deep")
OURS = "physics"
# The incumbent of a night in which nothing may be promoted: the best arm that has room to spare.
_SPARE_MIB = 160.0


@dataclass(frozen=True)
class Judge:
    """Knows the truth about one box, and the best that can be had on it."""

    one: Task
    truth: Truth
    best_ms: float

    def regret(self, arm: Arm) -> float:
        return self.truth.turn_ms(arm, self.one.workload) / self.best_ms - 1

    def point(self, seconds: float, restarts: int, arm: Arm) -> list[Any]:
        runs = self.truth.is_feasible(arm)
        return [round(seconds), restarts, round(self.regret(arm), 5), runs]


@lru_cache(maxsize=8)
def known_best(card: str, workload: str, seed: int) -> tuple[Arm, float]:
    return best(task(card, workload, seed))


def row(strategy: str, one: Task, best_ms: float, seed: int, hours: float) -> dict[str, Any]:
    judge = Judge(one, Truth(one.card), best_ms)
    box = one.box(seed)
    rng = np.random.default_rng([seed, 17])
    begin = time.process_time()
    if strategy == OURS:
        found = _ours(judge, box, rng, hours)
    else:
        found = _peer(strategy, judge, box, rng, hours)
    return {
        "start": round(judge.regret(one.incumbent), 5), "cpu_s": round(time.process_time() - begin, 1),
        "restarts": box.n_restarts, "failures": box.n_failures, "box_s": round(box.now()), **found,
    }  # fmt: skip


def _ours(
    judge: Judge, box: SimulatedBox, rng: np.random.Generator, hours: float
) -> dict[str, Any]:
    one = judge.one
    outcome = tune(box, one.space, one.workload, one.incumbent, hours * 3600, rng)
    path = [judge.point(at.seconds, at.restarts, at.arm) for at in outcome.evidence.path]
    pairs, arm = [len(result.pairs) for result in outcome.evidence.challenges], outcome.arm
    return {
        "path": path, "verdict": outcome.verdict, "pairs": pairs,
        "served": judge.point(box.now(), box.n_restarts, arm)[2:], "arm": str(arm),
    }  # fmt: skip


def _peer(
    strategy: str, judge: Judge, box: SimulatedBox, rng: np.random.Generator, hours: float
) -> dict[str, Any]:
    bench = Bench(judge.one, box, hours * 3600)
    bench.recommend(judge.one.incumbent)
    with contextlib.suppress(Over):
        PEERS[strategy](judge.one, bench, rng)
    last = bench.path[-1][2]
    return {
        "path": [judge.point(*at) for at in bench.path],
        "verdict": "keep" if last == judge.one.incumbent else "promote",
        "served": judge.point(0, 0, last)[2:], "arm": str(last),
    }  # fmt: skip


def from_best(one: Task, arm: Arm) -> Task:
    """The same box with its best arm serving already, at a margin that has room to spare."""
    truth = Truth(one.card)
    while truth.headroom_mib(arm) < _SPARE_MIB:
        arm = arm.with_margin(arm.fit_mib + 128)
    return replace(one, incumbent=arm)


def jobs(given: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    for seed in range(given.first, given.first + given.boxes):
        for name in given.sets.split(","):
            for strategy in given.strategies.split(","):
                yield strategy, name, seed


def run(given: argparse.Namespace) -> None:
    rows = Path(given.rows)
    known = {search_report.key(one) for one in search_report.read(rows)}
    git = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    for strategy, name, seed in jobs(given):
        head = {"strategy": strategy, "set": name, "seed": seed, "from_best": given.best}
        if search_report.key(head) in known:
            continue
        card, workload = name.split()
        one = task(card, workload, seed)
        arm, best_ms = known_best(card, workload, seed)
        if given.best:
            one = from_best(one, arm)
        found = row(strategy, one, best_ms, seed, given.hours)
        done = {**head, "hours": given.hours, "commit": commit, **found}
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done) + "\n")
        print(
            f"{strategy}, {name}, box {seed}: {done['served'][0]:.1%} after {done['cpu_s']} s of CPU"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("rows")
    runs.add_argument("--boxes", type=int, default=20, help="boxes of each class")
    runs.add_argument("--first", type=int, default=1, help="number of the first box")
    runs.add_argument("--sets", default=",".join(SETS))
    runs.add_argument("--strategies", default=",".join((OURS, *PEERS)))
    runs.add_argument("--hours", type=float, default=HOURS)
    runs.add_argument("--best", action="store_true", help="the best arm serves already")
    runs.set_defaults(run=run)
    reports = commands.add_parser("report")
    reports.add_argument("rows")
    reports.set_defaults(run=lambda given: print(search_report.report(Path(given.rows))))
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
