"""Boxes of one class that sweep at the same time, each a process of its own, with one study on a real PostgreSQL.

    python -m benchmarks.shared_study run ROWS.jsonl [--sets "16G chat"] [--sizes 1,2,4,8] [--hours 2] [--how ugly]
    python -m benchmarks.shared_study report ROWS.jsonl

A box is another draw of its card. Clocks are simulated, and processes run about as fast as each other: who is ahead is so by
chance. `ugly`: of the boxes one is killed in the middle, one loses the way to the database, one is twice as noisy, and one
has another build under the same name, which must not be pooled. `best`: the best arm serves already. `apart`: as many boxes, each with nobody to ask.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import Row, grouped, keep, options, rows_of, say, table
from benchmarks.search import Judge, stays
from benchmarks.simulator.box import Noise, SimulatedBox
from tests.support.postgres import Postgres, name_of, postgres_server
from tunerd.app import build_context
from tunerd.fleet.shared import opened
from tunerd.fleet.study import SharedStudy
from tunerd.profile.arm import Boot
from tunerd.sweep.tuner import tune

WITHIN = 0.02
LOUD = Noise(process=0.054, request=0.03, pairing=0.032, text=0.04, drift=0.014)
"""Twice the usual."""
UGLY, BEST, APART = "ugly", "best", "apart"
_ROLES = ("killed", "cut off", "noisy", "other build")
_KILLED_AFTER, _CUT_AFTER = 12, 6
_HELD = "select count(*), count(distinct key) from told where kind = 'arm'"


@dataclass(frozen=True)
class Part:
    """What one process does."""

    set: str
    seed: int
    hours: float
    url: str
    folder: str
    how: str
    role: str


@dataclass
class Cut(SimulatedBox):
    """Something befalls it at its n-th start."""

    at: int = -1
    what: Callable[[], None] = lambda: None

    def restart(self, arm: Any) -> Boot:
        """As any, after what befell it."""
        if self.n_restarts == self.at:
            self.what()
        return super().restart(arm)


def play(part: Part, rows: Any) -> None:
    """A night of one box in its class."""
    judge = Judge.of(*part.set.split(), part.seed)
    one, best = judge.one, judge.best_arm
    serves = best.with_margin(best.fit_mib + 256) if part.how == BEST else one.incumbent
    folder = Path(part.folder) / str(part.seed)
    folder.mkdir()
    ctx = build_context(
        environment={
            "HOME": str(folder), "TUNERD_MODE": "local", "TUNERD_STATE_DIR": str(folder / "state"),
            "TUNERD_CONFIG_DIR": str(folder), "TUNERD_RUNTIME_DIR": str(folder / "run"), "TUNERD_STORE__URL": part.url,
        }
    )  # fmt: skip
    ctx.files.make_folder(ctx.paths.state_dir)
    other = "other " if part.role == "other build" else ""
    builds = {engine: f"{other}{engine}" for engine, _ in one.space.families}
    with contextlib.closing(opened(ctx, writable=True)) as database:
        ours = f"{part.set} {part.seed if part.how == APART else ''}"
        study = SharedStudy(ctx, database, ours, builds, len(one.workload.classes))
        box = Cut(one.card, LOUD if part.role == "noisy" else Noise(), part.seed)
        if part.role == "killed":
            box.at, box.what = _KILLED_AFTER, lambda: os.kill(os.getpid(), signal.SIGKILL)
        elif part.role == "cut off":
            box.at, box.what = _CUT_AFTER, lambda: study.lose(part.hours * 3600)
        study.begin()
        begin = time.process_time()
        try:
            outcome = tune(
                box, one.space, one.workload, serves, part.hours * 3600,
                np.random.default_rng([part.seed, 17]), study=study,
            )  # fmt: skip
        finally:
            study.close()
    path = [judge.point(at.seconds, at.restarts, at.arm) for at in outcome.evidence.path]
    within, arm = stays(path, WITHIN), outcome.arm
    rows.put({
        "role": part.role, "seed": part.seed, "verdict": outcome.verdict, "starts": box.n_restarts,
        "hours": round(box.now() / 3600, 2), "regret": round(judge.regret(arm), 4), "runs": judge.truth.is_feasible(arm),
        "is_worse": judge.regret(arm) > judge.regret(serves) + 1e-9,
        "within": within and (within[1], within[0] / 3600),
        "cpu_s": round(time.process_time() - begin, 1),
    })  # fmt: skip


def fleet(server: Postgres, which: str, n: int, hours: float, how: str) -> list[Row]:
    """Rows of n boxes at once, and what the database holds of them."""
    url, fork = server.database(), multiprocessing.get_context("fork")
    found = fork.Queue()
    with tempfile.TemporaryDirectory(prefix="tunerd-study-") as folder:
        parts = [
            Part(which, seed, hours, url, folder, how,
                 _ROLES[seed - 1] if how == UGLY and seed <= len(_ROLES) else "")
            for seed in range(1, n + 1)
        ]  # fmt: skip
        processes = [fork.Process(target=play, args=(part, found)) for part in parts]
        for process in processes:
            process.start()
        rows = [found.get() for part in parts if part.role != "killed"]
        for process in processes:
            process.join()
    (told,) = server.query(_HELD, name_of(url))
    setting = {"set": which, "boxes": n, "how": how, "told": told}
    return [{**setting, **row} for row in rows]


def report(rows: list[Row]) -> str:
    """A table for the docs: medians over boxes."""
    heads = ("set", "boxes at once", "starts to within 2 %", "hours", "boxes that got there",
             "starts of a night", "regret, median / worst [%]", "promoted to worse")  # fmt: skip
    lines = []
    for (which, n, how), mine in grouped(rows, "set", "boxes", "how").items():
        there = [row["within"] for row in mine if row["within"]]
        starts, hours = (median(column) for column in zip(*there, strict=True)) if there else (0, 0)
        regrets = [100 * row["regret"] for row in mine]
        worse = sum(row["is_worse"] or not row["runs"] for row in mine)
        lines.append(
            [which, f"{n}, {how}" if how else f"{n}", f"{starts:.0f}" if there else "-",
             f"{hours:.1f}" if there else "-", f"{len(there)} of {len(mine)}",
             f"{median(row['starts'] for row in mine):.0f}",
             f"{median(regrets):.1f} / {max(regrets):.1f}", f"{worse} of {len(mine)}"]
        )  # fmt: skip
    return table(heads, lines)


def main() -> None:
    """As the module says."""
    given = options(
        __doc__, what=("run", "report"), rows=Path, sets="16G chat,24G deep", sizes="1,2,4,8",
        hours=2.0, how="",
    )  # fmt: skip
    if given.what == "run":
        sizes = [int(size) for size in given.sizes.split(",")]
        with postgres_server() as server:
            for which, n in product(given.sets.split(","), sizes):
                for row in fleet(server, which, n, given.hours, given.how):
                    keep(given.rows, row)
    say(report(rows_of(given.rows)))


if __name__ == "__main__":
    main()
