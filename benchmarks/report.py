"""Time to write a report about 10,000 samples, against one about a usual night's few hundred.

    python -m benchmarks.report [--rounds 5] [--samples 10000]

The samples are made up; storing, reading, adding up and writing them is real. Beside the report
stands the export of the same runs as JSON, which reads all samples and computes nothing.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.measure import (
    TUNERD,
    Case,
    compared,
    conditions,
    cpu_ms,
    note,
    options,
    say,
    take_turns,
)
from tests.support.build_box import BuildBox, build_box
from tests.support.synthetic_runs import made_runs
from tunerd.measure.store import EvidenceStore

_FEW_REPEATS = 3


def fill(box: BuildBox, repeats: int) -> tuple[int, list[str]]:
    """Store made-up runs of every suite; how many samples that was, and the runs' numbers."""
    with EvidenceStore(box.paths.evidence) as store:
        numbers = [run.put(store) for run in made_runs(repeats=repeats)]
        return sum(one.n_samples for one in store.runs()), [str(number) for number in numbers]


def samples_of(repeats: int) -> int:
    return sum(len(one) for run in made_runs(repeats=repeats) for one in run.samples.values())


def peak_mib(box: BuildBox, *words: str) -> int:
    """Largest resident memory [MiB] of a call."""
    timed = ["/usr/bin/env", "python3", "-c", _PEAK, TUNERD, *words]
    done = subprocess.run(timed, env=box.environment, capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1]) // 1024


_PEAK = """
import os, resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def main() -> None:
    given = options(__doc__, rounds=5, samples=10_000)
    per_repeat = samples_of(_FEW_REPEATS + 1) - samples_of(_FEW_REPEATS)
    many = _FEW_REPEATS + round((given.samples - samples_of(_FEW_REPEATS)) / per_repeat)
    with build_box(None, shape="tiny") as small, build_box(None, shape="tiny") as large:
        for box in (small, large):
            box.paths.state_dir.mkdir(exist_ok=True)
        n_few, few = fill(small, _FEW_REPEATS)
        note("storing ...")
        n_many, all_runs = fill(large, many)
        page = Path("report.html")

        def report(box: BuildBox, numbers: list[str]) -> list[str]:
            return [TUNERD, "report", *numbers, "--no-check", "-o", str(box.box.folder / page)]

        base = Case(
            f"`tunerd report`, {n_few:,} samples",
            lambda: cpu_ms(report(small, few), small.environment),
        )
        cases = [
            base,
            Case(
                f"`tunerd report`, {n_many:,} samples",
                lambda: cpu_ms(report(large, all_runs), large.environment),
            ),
            Case(
                f"`tunerd results export`, {n_many:,} samples",
                lambda: cpu_ms([TUNERD, "results", "export", *all_runs], large.environment),
            ),
        ]
        take_turns(cases, given.rounds)
        say(compared(cases, base, unit="CPU ms"))
        sizes = [(box.box.folder / page).stat().st_size / 1e6 for box in (small, large)]
        say(f"\nThe files are {sizes[0]:.2f} MB and {sizes[1]:.2f} MB; peak memory "
            f"{peak_mib(small, *report(small, few)[1:])} MiB and "
            f"{peak_mib(large, *report(large, all_runs)[1:])} MiB.")  # fmt: skip
    say(f"\n{conditions(given.rounds)}")


if __name__ == "__main__":
    main()
