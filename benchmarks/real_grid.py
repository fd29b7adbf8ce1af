"""Real searches against the full grid, on this machine's CPU with a designed model of 12 x 1024.

Every cell of the grid is a fresh process, started as a sweep starts it; a cell in which anybody else used
the CPU is measured again. `grid` goes on where it was ended; `sweep` lets `tunerd sweep run` search the
same space in a share of the time that the grid took. Since a machine's own speed may move while a grid
is measured, `finals` measures the grid's best and what the sweeps chose once more, in turns; `report`
compares.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import table
from tests.support.local_box import Box
from tests.support.supervised import end_supervisor
from tunerd.app import Context
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


class Place(Box):
    """A folder in which tunerd serves, in local mode, for as long as it takes."""

    def tunerd(self, *words: str) -> Any:
        """What `tunerd WORDS --json` says."""
        command = [sys.executable, "-m", "tunerd", *words, "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, check=False
        )
        if done.returncode not in {0, 1} or not done.stdout:
            raise SystemExit(f"tunerd {' '.join(words)}: {done.returncode}\n{done.stderr}")
        return json.loads(done.stdout)


def make(folder: Path, engines: Path) -> Place:
    """The folder with its model and profile, served by what a search begins with."""
    place = Place(folder)
    if not place.folder.exists():
        profiles = place.folder / "config" / "profiles"
        (profiles / "workloads").mkdir(parents=True)
        model = place.folder / "medium.gguf"
        write(design(SHAPES["medium"]), model)
        for kind in WORKLOADS:
            text = _WORKLOAD.format(kind=kind, prompt=_PROMPT_TOKENS, answer=_ANSWER_TOKENS)
            (profiles / "workloads" / f"{kind}.toml").write_text(text)
        (profiles / "grid.toml").write_text(
            _PROFILE.format(
                model=model, engine=ENGINES[0], port=free_port(), engines=json.dumps(ENGINES)
            )
        )
        listed = "".join(
            f'[engines.{one}]\npath = "{engines / one}"\nallow_writable = true\n' for one in ENGINES
        )
        (place.folder / "config" / "tunerd.toml").write_text(
            f"{listed}[service]\nsettle_s = 0.1\ndrain_s = 0.0\n[sweep]\npromote = 'never'\n"
        )
    place.tunerd("apply", "grid", "--yes")
    return place


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


def cell(box: LeaseBox, arm: Arm, place: Place) -> dict[str, Any]:
    """One configuration for every workload: a fresh process, then the same texts as all others."""
    began_s, began_busy, began_own = time.monotonic(), busy_s(), own_s(place.folder)
    boot = box.restart(arm)
    row: dict[str, Any] = {"arm": asdict(replace(arm, extra=frozenset())), "ok": boot.ok}
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
    others = (busy_s() - began_busy) - (own_s(place.folder) - began_own)
    box.close()
    row["others_cores"] = round(max(0.0, others) / took_s, 3)
    row["seconds"] = round(time.monotonic() - began_s, 2)
    return row


def prepared_in(place: Place) -> tuple[Context, PreparedSweep]:
    """The sweep whose space is measured."""
    ctx = place.context
    request = SweepRequest(budget_s=7200, workload=WORKLOADS[0], seed=1)
    return ctx, prepare(ctx, request, proves=True)


def grid(given: argparse.Namespace) -> None:
    place = make(Path(given.folder), Path(given.engines))
    ctx, prepared = prepared_in(place)
    measured = {text_of(row["arm"]) for row in rows_of(given.rows, "cell")}
    left = [arm for arm in arms_of(prepared) if str(arm) not in measured]
    print(f"{len(left)} of {len(arms_of(prepared))} cells are left", flush=True)
    if not left:
        return
    end_s = time.monotonic() + given.minutes * 60
    with opened(ctx, prepared, given.minutes) as box:
        for at, arm in enumerate(left):
            if time.monotonic() > end_s:
                break
            row = undisturbed(box, arm, place)
            keep(given.rows, {"what": "cell", **row})
            print(f"{at + 1}/{len(left)} {arm}: {_told(row)}", flush=True)


@contextmanager
def opened(ctx: Context, prepared: PreparedSweep, minutes: float) -> Iterator[LeaseBox]:
    """A box on the lease, as a sweep has it."""
    with hold(ctx, purpose="grid", budget_s=minutes * 60 + 180) as held:
        box = LeaseBox(
            ctx=ctx, held=held, plan_arm=lambda arm: plan_arm(ctx, prepared, arm),
            texts=Texts(prompt_book(ctx), 1), per_request=(), on_arm=lambda _arm, _record: None,
            on_samples=lambda _arm, _samples: None, tell=ctx.say, patience_s=60.0,
            house=House(ctx),
        )  # fmt: skip
        try:
            yield box
        finally:
            box.close()


def finals(given: argparse.Namespace) -> None:
    """The grid's best cells, what sweeps chose and what served before, in turns."""
    place = make(Path(given.folder), Path(given.engines))
    ctx, prepared = prepared_in(place)
    names = finalists(given.rows)
    arms = [arm for arm in arms_of(prepared) if str(arm) in names]
    print(f"{len(arms)} finalists", flush=True)
    rng = random.Random(len(rows_of(given.rows, "final")))  # noqa: S311 -- an order
    with opened(ctx, prepared, given.minutes) as box:
        for number in range(given.count):
            for arm in rng.sample(arms, len(arms)):
                row = undisturbed(box, arm, place)
                keep(given.rows, {"what": "final", "round": number, **row})
                print(f"{number} {arm}: {_told(row)}", flush=True)


def finalists(path: str) -> set[str]:
    """Cells that are hardly slower than the best, and every arm that a sweep began with or chose."""
    cells = rows_of(path, "cell")
    names = {row[key] for row in rows_of(path, "sweep") for key in ("arm", "incumbent")}
    for kind in WORKLOADS:
        turns = {text_of(row["arm"]): turn_ms(row, kind) for row in cells if kind in row}
        names |= set(sorted(turns, key=lambda name: turns[name])[:_FINALISTS])
    return names


def undisturbed(box: LeaseBox, arm: Arm, place: Place) -> dict[str, Any]:
    """A cell during which nobody else used the CPU; the last try counts as it is, and says so."""
    for _ in range(_TRIES):
        row = cell(box, arm, place)
        if row["others_cores"] <= _MOST_OTHERS:
            break
        print(f"again: others used {row['others_cores']} cores", flush=True)
    return row


def _told(row: Mapping[str, Any]) -> str:
    rates = [f"{kind} {turn_ms(row, kind):.0f} ms" for kind in WORKLOADS if kind in row]
    return f"{', '.join(rates) or row['failure']}, others {row['others_cores']}"


# The sweep


def sweep(given: argparse.Namespace) -> None:
    """The product itself, as a user calls it, on a store that knows nothing yet."""
    place = make(Path(given.folder), Path(given.engines))
    for kind in given.workloads.split(","):
        budget_s = int(grid_s(given.rows, kind) * given.share - given.spare)
        for seed in range(given.first, given.first + given.count):
            place.context.paths.evidence.unlink(missing_ok=True)
            began_s, began_busy, began_own = time.monotonic(), busy_s(), own_s(place.folder)
            words = ("--workload", kind, "--budget", f"{budget_s}s", "--seed", str(seed), "--yes")
            children_s = sum(os.times()[2:4])
            said = place.tunerd("sweep", "run", *words)
            took_s = time.monotonic() - began_s
            shown = place.tunerd("sweep", "show")
            row = {
                "what": "sweep", "workload": kind, "seed": seed,
                "budget_s": budget_s, "seconds": round(took_s, 1),
                "own_cpu_s": round(own_s(place.folder) - began_own + sum(os.times()[2:4]) - children_s, 1),
                "busy_cpu_s": round(busy_s() - began_busy, 1),
                **{key: said[key] for key in ("verdict", "sentence", "reasons", "incumbent", "arm",
                                              "arms_measured", "restarts", "elapsed_s", "known_before")},
            }  # fmt: skip
            Path(given.folder, f"{kind}-{seed}.json").write_text(json.dumps(shown))
            keep(given.rows, row)
            print(json.dumps(row), flush=True)


# Rows


def rows_of(path: str, what: str) -> list[dict[str, Any]]:
    if not Path(path).exists():
        return []
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["what"] == what]


def keep(path: str, row: Mapping[str, Any]) -> None:
    head = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **row}
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(head) + "\n")


def turn_ms(row: Mapping[str, Any], kind: str) -> float:
    """Mean wall time of one request [ms]."""
    return statistics.fmean(row[kind]["wall_ms"])


def grid_s(path: str, kind: str) -> float:
    """What the grid of one workload took: every start, and the requests of this workload."""
    rows = rows_of(path, "cell")
    return sum(
        float(row["start_s"]) + float(row[kind]["seconds"] if kind in row else 0.0) for row in rows
    )


def text_of(arm: Mapping[str, Any]) -> str:
    """As `Arm` writes itself."""
    return str(Arm(**arm))


def report(given: argparse.Namespace) -> None:
    heads = ("workload", "cells", "grid", "best in turns", "seed", "sweep", "share",
             "verdict", "chosen", "slower than the grid's best", "than the best in turns",
             "was before")  # fmt: skip
    print(table(heads, _lines(given.rows)))


def in_turns(path: str, kind: str) -> dict[str, float]:
    """Turn times of the finalists [ms]: medians of what each round says, levelled by its own mean."""
    rounds: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows_of(path, "final"):
        if kind in row:
            one = rounds.setdefault((row["at"][:10], row["round"]), {})
            one[text_of(row["arm"])] = turn_ms(row, kind)
    if not rounds:
        return {}
    everywhere = set.intersection(*(set(one) for one in rounds.values()))
    levels = {at: statistics.fmean(one[name] for name in everywhere) for at, one in rounds.items()}
    usual = statistics.fmean(levels.values())
    names = {name for one in rounds.values() for name in one}
    return {
        name: statistics.median(one[name] * usual / levels[at] for at, one in rounds.items() if name in one)
        for name in names
    }  # fmt: skip


def _lines(path: str) -> Iterator[list[str]]:
    for kind in WORKLOADS:
        rows = [row for row in rows_of(path, "cell") if kind in row]
        if not rows:
            continue
        once = {text_of(row["arm"]): turn_ms(row, kind) for row in rows}
        turns = in_turns(path, kind) or once
        best = min(turns, key=lambda name: turns[name])
        whole_s = grid_s(path, kind)
        for one in rows_of(path, "sweep"):
            if one["workload"] != kind:
                continue
            slower = [
                f"{found[one['arm']] / min(found.values()) - 1:.1%}" if one["arm"] in found else "-"
                for found in (once, turns)
            ]
            yield [
                kind, str(len(rows)), f"{whole_s:.0f} s", f"{best}: {turns[best]:.0f} ms",
                str(one["seed"]), f"{one['seconds']:.0f} s", f"{one['seconds'] / whole_s:.0%}",
                one["verdict"], one["arm"], *slower,
                f"{turns.get(one['incumbent'], once[one['incumbent']]) / turns[best] - 1:.1%}",
            ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=str(ROWS))
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("grid", grid), ("sweep", sweep), ("finals", finals)):
        one = commands.add_parser(name)
        one.add_argument("folder", help="where the box is; it is kept")
        one.add_argument("engines", help="folder of the builds")
        one.add_argument("--minutes", type=float, default=60.0, help="begin no cell after that")
        one.add_argument("--workloads", default=",".join(WORKLOADS))
        one.add_argument(
            "--count", type=int, default=1, help="sweeps of each workload, rounds of finals"
        )
        one.add_argument("--first", type=int, default=1, help="seed of the first")
        one.add_argument("--share", type=float, default=0.1, help="of the grid's time, for a sweep")
        one.add_argument(
            "--spare", type=float, default=8.0, help="seconds kept for all but the search"
        )
        one.set_defaults(run=run)
    commands.add_parser("report").set_defaults(run=report)
    given = parser.parse_args()
    try:
        given.run(given)
    finally:
        if hasattr(given, "folder"):
            end_supervisor(Place(Path(given.folder)).context.paths)


if __name__ == "__main__":
    main()
