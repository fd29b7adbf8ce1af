"""Real searches against the full grid, on this machine's CPU with a designed model of 12 x 1056.

    python -m benchmarks.real_grid grid|sweep|finals --folder FOLDER --engines FOLDER
    python -m benchmarks.real_grid report

Every cell of the grid is a fresh process, started as a sweep starts it; a cell in which anybody else used
the CPU is measured again. `grid` goes on where it was ended; `sweep` lets `tunerd sweep run` search the
same space in a share of the time that the grid took. Since a machine's own speed may move while a grid
is measured, `finals` measures the grid's best and what the sweeps chose once more, in turns; `report`
compares. The folder is where the box is, and is kept; the other has the builds.

No cell begins after `--minutes`. A sweep has that `--share` of the grid's time but for `--spare` seconds, which go to
all but its search; `--count` are sweeps of each workload, or rounds of finals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks.measure import Row, keep, options, rows_of, say, table
from tests.support.local_box import Box
from tests.support.supervised import end_supervisor
from tunerd.machine.net import free_port
from tunerd.measure.life import Texts, prompt_book
from tunerd.production.lease import hold
from tunerd.profile.arm import OFF, Arm, Request
from tunerd.sweep.box import House, LeaseBox
from tunerd.sweep.plan import PreparedSweep, SweepRequest, plan_arm, prepare
from tunerd.tryout.designed import SHAPES, design, write

ROWS = Path(__file__).parent / "data" / "real_grid.jsonl"
ENGINES = ("mainline-2026-08-18", "ik-2026-08")
WORKLOADS = ("code", "creative")
_TEXTS = 4  # of each workload in a cell
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 96
_MOST_OTHERS = 0.08  # cores; more makes a cell void
_TRIES = 4
_FINALISTS = 4  # of each workload, by the grid

_WORKLOAD = """
[[classes]]
name = "ask"
kind = "{kind}"
prompt_tokens = {prompt}
answer_tokens = {answer}
"""
_PROFILE = """
extends = "cpu-embedded"
workload = "code"
[model]
path = "{model}"
[engine]
prefer = ["{engine}"]
[serving]
port = {port}
ctx_size = 1024
threads = 1
threads_batch = "default"
n_ubatch = 512
metrics = true
[speculation]
type = "mtp"
n_max = 3
p_min = 0.75
[sweep]
"engine.prefer" = {engines}
"speculation.n_max" = [1, 2, 3, 4, 6]
"speculation.p_min" = [0.0, 0.75]
"serving.threads" = [1, 2]
"serving.n_ubatch" = [128, 512]
"""


def tunerd(box: Box, *words: str) -> Any:
    """What `tunerd WORDS --json` says, for as long as it takes."""
    process = box.begin(*words, "--json")
    out, err = process.communicate()
    if process.returncode not in {0, 1} or not out:
        raise SystemExit(f"tunerd {' '.join(words)}: {process.returncode}\n{err}")
    return json.loads(out)


def make(place: Box, engines: Path) -> None:
    """The folder with its model and profile, served by what a search begins with."""
    config = place.folder / "config"
    if not config.exists():
        (config / "profiles/workloads").mkdir(parents=True)
        model = place.folder / "medium.gguf"
        write(design(SHAPES["medium"]), model)
        for kind in WORKLOADS:
            text = _WORKLOAD.format(kind=kind, prompt=_PROMPT_TOKENS, answer=_ANSWER_TOKENS)
            (config / f"profiles/workloads/{kind}.toml").write_text(text)
        names = {"model": model, "engine": ENGINES[0], "engines": json.dumps(ENGINES)}
        (config / "profiles/grid.toml").write_text(_PROFILE.format(port=free_port(), **names))
        listed = "".join(
            f'[engines.{one}]\npath = "{engines / one}"\nallow_writable = true\n' for one in ENGINES
        )
        (config / "tunerd.toml").write_text(
            f"{listed}[service]\nsettle_s = 0.1\ndrain_s = 0.0\n[sweep]\npromote = 'never'\n"
        )
    tunerd(place, "apply", "grid", "--yes")


# The grid


def arms_of(prepared: PreparedSweep) -> list[Arm]:
    """Every configuration of the space, once; what the engines share is together."""
    found: dict[Arm, None] = {}
    for (engine, spec), family in prepared.space.space.families.items():
        depths = family.n_max if spec != OFF else (0,)
        gates = family.p_min if spec != OFF else (0.0,)
        rest = product(family.fit_mib, family.kv, family.ubatch, family.batch, family.threads)
        for fit, kv, ubatch, batch, threads in rest:
            for n_max, p_min in product(depths, gates):
                arm = Arm(engine, spec, n_max, p_min, fit, kv, ubatch, batch, threads)
                found[arm.canonical()] = None
    return list(found)


def busy_s() -> float:
    """CPU time that this machine spent on anything so far [core s]."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def own_s(folder: Path) -> float:
    """CPU time of this program and of whatever runs in the folder [core s]."""
    total = 0.0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if process.pid == os.getpid() or any(str(folder) in word for word in words):
                used = process.cpu_times()
                total += used.user + used.system
    return total


def cell(box: LeaseBox, arm: Arm, folder: Path) -> Row:
    """One configuration for every workload: a fresh process, then the same texts as all others."""
    began_s, began_busy, began_own = time.monotonic(), busy_s(), own_s(folder)
    boot = box.restart(arm)
    row: Row = {"arm": asdict(replace(arm, extra=frozenset())), "ok": boot.ok}
    row["arm"].pop("extra")
    row["start_s"], row["failure"] = round(time.monotonic() - began_s, 2), boot.failure
    for kind in WORKLOADS if boot.ok else ():
        from_s = time.monotonic()
        told = [
            box.measure(Request(kind, f"grid {kind} {at}", 0, _PROMPT_TOKENS, _ANSWER_TOKENS))
            for at in range(_TEXTS)
        ]
        # With answers of the length that was asked for, as the sweep counts them.
        answers = [
            {**one, "wall_ms": one["wall_ms"] + one.get("decode_left_ms", 0.0)} for one in told
        ]
        keys = ("wall_ms", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n",
                "draft_n_accepted")  # fmt: skip
        row[kind] = {
            "seconds": round(time.monotonic() - from_s, 2),
            **{key: [one.get(key) and round(one[key], 2) for one in answers] for key in keys},
        }
    took_s = time.monotonic() - began_s
    others = (busy_s() - began_busy) - (own_s(folder) - began_own)
    box.close()
    row["others_cores"] = round(max(0.0, others) / took_s, 3)
    row["seconds"] = round(time.monotonic() - began_s, 2)
    return row


def undisturbed(box: LeaseBox, arm: Arm, folder: Path) -> Row:
    """A cell during which nobody else used the CPU; the last try counts as it is, and says so."""
    for _ in range(_TRIES):
        row = cell(box, arm, folder)
        rates = [f"{kind} {turn_ms(row, kind):.0f} ms" for kind in WORKLOADS if kind in row]
        say(f"{arm}: {', '.join(rates) or row['failure']}, others used {row['others_cores']} cores")
        if row["others_cores"] <= _MOST_OTHERS:
            break
    return row


def measure(given: argparse.Namespace, place: Box) -> None:
    """Cells that are left, or in turns the grid's best, what sweeps chose and what served before."""
    ctx, rows = place.context, given.rows
    request = SweepRequest(budget_s=7200, workload=WORKLOADS[0], seed=1)
    prepared = prepare(ctx, request, proves=True)
    if given.what == "grid":
        measured = {text_of(row) for row in told(rows, "cell")}
        turns = [[arm for arm in arms_of(prepared) if str(arm) not in measured]]
    else:
        arms = [arm for arm in arms_of(prepared) if str(arm) in finalists(rows)]
        rng = random.Random(len(told(rows, "final")))  # noqa: S311 -- an order
        turns = [rng.sample(arms, len(arms)) for _ in range(given.count)]
    say(f"{sum(map(len, turns))} cells")
    end_s = time.monotonic() + given.minutes * 60
    with (
        hold(ctx, purpose="grid", budget_s=given.minutes * 60 + 180) as held,
        closing(LeaseBox(
            ctx=ctx, held=held, plan_arm=lambda arm: plan_arm(ctx, prepared, arm),
            texts=Texts(prompt_book(ctx), 1), per_request=(), on_arm=lambda _arm, _record: None,
            on_samples=lambda _arm, _samples: None, tell=ctx.say, patience_s=60.0,
            house=House(ctx), incumbent=prepared.base.arm,
        )) as box,
    ):  # fmt: skip
        for number, arms in enumerate(turns):
            for arm in arms:
                if time.monotonic() > end_s:
                    return
                row = undisturbed(box, arm, place.folder)
                what = "cell" if given.what == "grid" else "final"
                keep(rows, {"at": _now(), "what": what, "round": number, **row})


def finalists(path: Path) -> set[str]:
    """Cells that are hardly slower than the best, and every arm that a sweep began with or chose."""
    names = {row[key] for row in told(path, "sweep") for key in ("arm", "incumbent")}
    for kind in WORKLOADS:
        turns = turns_of(path, "cell", kind)
        names |= set(sorted(turns, key=lambda name: turns[name])[:_FINALISTS])
    return names


# The sweep


def sweep(given: argparse.Namespace, place: Box) -> None:
    """The product itself, as a user calls it, on a store that knows nothing yet."""
    seeds = range(given.first, given.first + given.count)
    for kind, seed in product(given.workloads.split(","), seeds):
        budget_s = int(grid_s(given.rows, kind) * given.share - given.spare)
        place.context.paths.evidence.unlink(missing_ok=True)
        began_s = time.monotonic()
        words = ("--workload", kind, "--budget", f"{budget_s}s", "--seed", str(seed), "--yes")
        said = tunerd(place, "sweep", "run", *words)
        row = {
            "at": _now(), "what": "sweep", "workload": kind, "seed": seed, "budget_s": budget_s,
            "seconds": round(time.monotonic() - began_s, 1),
            **{key: said[key] for key in ("verdict", "sentence", "reasons", "incumbent", "arm",
                                          "arms_measured", "restarts", "elapsed_s", "known_before")},
        }  # fmt: skip
        shown = tunerd(place, "sweep", "show")
        (place.folder / f"{kind}-{seed}.json").write_text(json.dumps(shown))
        keep(given.rows, row)
        say(json.dumps(row))


# Rows


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def told(path: Path, what: str) -> list[Row]:
    return [row for row in rows_of(path) if row["what"] == what]


def turn_ms(row: Row, kind: str) -> float:
    """Mean wall time of one request [ms]."""
    return float(fmean(row[kind]["wall_ms"]))


def grid_s(path: Path, kind: str) -> float:
    """What the grid of one workload took: every start, and the requests of this workload."""
    return sum(
        float(row["start_s"]) + float(row[kind]["seconds"] if kind in row else 0.0)
        for row in told(path, "cell")
    )


def text_of(row: Row) -> str:
    """Its arm, as `Arm` writes itself."""
    return str(Arm(**row["arm"]))


def turns_of(path: Path, what: str, kind: str) -> dict[str, float]:
    """Turn times by arm [ms], medians over rounds."""
    found: dict[str, list[float]] = {}
    for row in told(path, what):
        if kind in row:
            found.setdefault(text_of(row), []).append(turn_ms(row, kind))
    return {name: median(times) for name, times in found.items()}


def _lines(path: Path) -> Iterator[list[str]]:
    for kind in WORKLOADS:
        once = turns_of(path, "cell", kind)
        turns = turns_of(path, "final", kind) or once
        whole_s = grid_s(path, kind)
        for one in told(path, "sweep") if once else ():
            if one["workload"] != kind:
                continue
            slower = [
                f"{found[one['arm']] / min(found.values()) - 1:.1%}" if one["arm"] in found else "-"
                for found in (once, turns)
            ]
            best, best_ms = min(turns.items(), key=lambda item: item[1])
            before_ms = turns.get(one["incumbent"], once[one["incumbent"]])
            yield [
                kind, str(len(once)), f"{whole_s:.0f} s", f"{best}: {best_ms:.0f} ms",
                str(one["seed"]), f"{one['seconds']:.0f} s", f"{one['seconds'] / whole_s:.0%}",
                one["verdict"], one["arm"], *slower, f"{before_ms / best_ms - 1:.1%}",
            ]  # fmt: skip


def report(path: Path) -> str:
    heads = ("workload", "cells", "grid", "best in turns", "seed", "sweep", "share",
             "verdict", "chosen", "slower than the grid's best", "than the best in turns",
             "was before")  # fmt: skip
    return table(heads, _lines(path))


def main() -> None:
    given = options(
        __doc__, what=("grid", "sweep", "finals", "report"), folder="", engines="", rows=ROWS,
        minutes=60.0, workloads=",".join(WORKLOADS), share=0.1, spare=8.0, count=1, first=1,
    )  # fmt: skip
    if given.what == "report":
        say(report(given.rows))
        return
    place = Box(Path(given.folder).resolve())
    try:
        make(place, Path(given.engines))
        (sweep if given.what == "sweep" else measure)(given, place)
    finally:
        end_supervisor(place.context.paths)


if __name__ == "__main__":
    main()
