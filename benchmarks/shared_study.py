"""Boxes of one class that sweep at the same time, each a process of its own, with one study on a real PostgreSQL.

python -m benchmarks.shared_study run ROWS.jsonl [--sets "16G chat"] [--sizes 1,2,4,8] [--hours 2] [--how ugly]
python -m benchmarks.shared_study report ROWS.jsonl

A box is another draw of its card. Clocks are simulated, and processes run about as fast as each other: who is ahead is so by
chance. `ugly`: of the boxes one is killed in the middle, one loses the way to the database, one is twice as noisy, and one
has another build under the same name, which must not be pooled. `best`: the best arm serves already. `apart`: as many boxes, each with nobody to ask.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import table
from benchmarks.search import Judge, known_best
from benchmarks.search_report import grouped
from benchmarks.simulator.box import Noise, SimulatedBox, Truth
from benchmarks.simulator.tasks import task
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


@dataclass(frozen=True)
class Part:
    """What one process does."""

    card: str
    workload: str
    seed: int
    hours: float
    url: str
    folder: str
    how: str
    role: str


class Cut(SimulatedBox):
    """Something befalls it at its n-th start."""

    at: int
    what: Callable[[], None]

    def restart(self, arm: Any) -> Boot:
        """As any, after what befell it."""
        if self.n_restarts == self.at:
            self.what()
        return super().restart(arm)


def play(part: Part) -> dict[str, Any]:
    """A night of one box in its class."""
    one = task(part.card, part.workload, part.seed)
    best_arm, best_ms = known_best(part.card, part.workload, part.seed)
    serves = (
        replace(best_arm, fit_mib=best_arm.fit_mib + 256) if part.how == BEST else one.incumbent
    )
    judge = Judge(one, Truth(one.card), best_ms)
    folder = Path(part.folder) / str(part.seed)
    folder.mkdir()
    ctx = build_context(
        environment={
            "HOME": str(folder), "TUNERD_MODE": "local", "TUNERD_STATE_DIR": str(folder / "state"),
            "TUNERD_CONFIG_DIR": str(folder), "TUNERD_RUNTIME_DIR": str(folder / "run"), "TUNERD_STORE__URL": part.url,
        }
    )  # fmt: skip
    ctx.files.make_folder(ctx.paths.state_dir)
    builds = {
        engine: (f"other {engine}" if part.role == "other build" else engine)
        for engine, _ in one.space.families
    }
    with contextlib.closing(opened(ctx, writable=True)) as database:
        ours = f"{part.card} {part.workload} {part.seed if part.how == APART else ''}"
        study = SharedStudy(ctx, database, ours, builds, len(one.workload.classes))
        box = Cut(one.card, LOUD if part.role == "noisy" else Noise(), part.seed)
        box.at, box.what = {
            "killed": (_KILLED_AFTER, lambda: os.kill(os.getpid(), signal.SIGKILL)),
            "cut off": (_CUT_AFTER, lambda: study.lose(part.hours * 3600)),
        }.get(part.role, (-1, lambda: None))  # fmt: skip
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
    reached = None
    for seconds, starts, regret, runs in path:
        reached = (reached or (starts, seconds / 3600)) if regret <= WITHIN and runs else None
    arm = outcome.arm
    return {
        "role": part.role, "seed": part.seed, "verdict": outcome.verdict, "starts": box.n_restarts,
        "hours": round(box.now() / 3600, 2), "regret": round(judge.regret(arm), 4), "runs": judge.truth.is_feasible(arm),
        "is_worse": judge.regret(arm) > judge.regret(serves) + 1e-9, "within": reached,
        "cpu_s": round(time.process_time() - begin, 1),
    }  # fmt: skip


def _into(part: Part, rows: Any) -> None:
    rows.put(play(part))


def fleet(server: Postgres, which: str, n: int, hours: float, how: str) -> list[dict[str, Any]]:
    """Rows of n boxes at once, and what the database holds of them."""
    card, workload = which.split()
    url, fork = server.database(), multiprocessing.get_context("fork")
    found = fork.Queue()
    with tempfile.TemporaryDirectory(prefix="tunerd-study-") as folder:
        parts = [
            Part(card, workload, seed, hours, url, folder, how,
                 _ROLES[seed - 1] if how == UGLY and seed <= len(_ROLES) else "")
            for seed in range(1, n + 1)
        ]  # fmt: skip
        processes = [fork.Process(target=_into, args=(part, found)) for part in parts]
        for process in processes:
            process.start()
        rows = [found.get() for part in parts if part.role != "killed"]
        for process in processes:
            process.join()
    told = server.query(
        "select count(*), count(distinct key) from told where kind = 'arm'", name_of(url)
    )[0]
    claims = server.query(
        "select count(*) from claim where until > clock_timestamp()", name_of(url)
    )[0]
    setting = {"set": which, "boxes": n, "how": how, "told": told, "claims_left": int(claims)}
    return [{**setting, **row} for row in rows]


def report(rows: list[dict[str, Any]]) -> str:
    """A table for the docs: medians over boxes."""
    heads = ("set", "boxes at once", "starts to within 2 %", "hours", "boxes that got there",
             "starts of a night", "regret, median / worst [%]", "promoted to worse")  # fmt: skip
    lines = []
    for (which, n, how), mine in grouped(rows, "set", "boxes", "how").items():
        there = [row["within"] for row in mine if row["within"]]
        starts = f"{median(one[0] for one in there):.0f}" if there else "-"
        hours = f"{median(one[1] for one in there):.1f}" if there else "-"
        regrets = [100 * row["regret"] for row in mine]
        worse = sum(row["is_worse"] or not row["runs"] for row in mine)
        lines.append(
            [which, f"{n}, {how}" if how else f"{n}", starts, hours, f"{len(there)} of {len(mine)}",
             f"{median(row['starts'] for row in mine):.0f}",
             f"{median(regrets):.1f} / {max(regrets):.1f}", f"{worse} of {len(mine)}"]
        )  # fmt: skip
    return table(heads, lines)


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--sets", default="16G chat,24G deep")
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--how", choices=["", UGLY, BEST, APART], default="")
    given = parser.parse_args()
    if given.what == "run":
        with postgres_server() as server, given.rows.open("a", encoding="utf-8") as file:
            for which in given.sets.split(","):
                for n in map(int, given.sizes.split(",")):
                    for row in fleet(server, which, n, given.hours, given.how):
                        file.write(json.dumps(row) + "\n")
                        file.flush()
    print(report([json.loads(line) for line in given.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
