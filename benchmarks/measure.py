"""Fair comparisons on a machine that has other things to do: cases take turns, in random order.

Best and median of each are printed; ratios of cases of one run mean more than either alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
N = TypeVar("N")
TUNERD = str(Path(sys.executable).with_name("tunerd"))
_MS_PER_S = 1000


@dataclass
class Case:
    """One operation; `run` returns what it took, after an untimed `prepare`."""

    name: str
    run: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    figures: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.figures)

    @property
    def median(self) -> float:
        return statistics.median(self.figures)


def take_turns(cases: Sequence[Case], rounds: int, *, seed: int = 1) -> None:
    """Run every case once a round, in random order; a first round is thrown away."""
    order = list(cases)
    rng = random.Random(seed)  # noqa: S311 -- an order, no secret
    for number in range(rounds + 1):
        rng.shuffle(order)
        for case in order:
            case.prepare()
            took = case.run()
            if number:
                case.figures.append(took)


def cpu_ms(
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    codes: Sequence[int] = (0,),
) -> float:
    """CPU time [ms] of a program and of the children that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, capture_output=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in codes:
        raise SystemExit(f"{argv} ended with {done.returncode}:\n{done.stderr.decode()}")
    used_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return used_s * _MS_PER_S


def row(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(map(row, (heads, ["---"] * len(heads), *rows)))


def options(about: str | None, **defaults: float | str) -> argparse.Namespace:
    """What was typed: an option for each default, of its type."""
    parser = argparse.ArgumentParser(description=about)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"[{default}]")
    return parser.parse_args()


def tell_nights(
    about: str,
    heads: Sequence[str],
    scenes: Iterable[T],
    night: Callable[[tuple[T, int]], N],
    cells: Callable[[T, list[N]], Iterable[str]],
) -> None:
    """A table with a line for each scene; how many nights of each, and in how many processes, is typed.

    Args:
        about: What comes after the number of nights.
        heads: Of the table.
        scenes: What is drawn.
        night: One of them, from a scene and a seed.
        cells: Of a scene and all of its nights.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("nights", type=int, nargs="?", default=1000)
    parser.add_argument("processes", type=int, nargs="?", default=2)
    given = parser.parse_args()
    say(f"{given.nights} {about}\n{table(heads, ())}")
    with multiprocessing.Pool(given.processes) as pool:
        for scene in scenes:
            asked = [(scene, seed) for seed in range(given.nights)]
            say(row(cells(scene, pool.map(night, asked, chunksize=10))))


def compared(cases: Sequence[Case], base: Case, *, unit: str, digits: int = 0) -> str:
    """Best, median, and the median as a multiple of that of `base`."""
    rows = [
        (
            case.name,
            f"{case.best:.{digits}f}",
            f"{case.median:.{digits}f}",
            f"{case.median / base.median:.2f}",
        )
        for case in cases
    ]
    heads = ("", f"best [{unit}]", f"median [{unit}]", f"median / {base.name}")
    return table(heads, rows)


def conditions(rounds: int) -> str:
    """Where and when this was measured, and what else the machine had to do."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown processor",
    )
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d')}, {model}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}; "
        f"{rounds} rounds; load average afterwards {load}"
    )


def say(text: str) -> None:
    """A line of the result, at once."""
    print(text, flush=True)


def note(text: str) -> None:
    """What goes on, beside the result."""
    print(text, file=sys.stderr, flush=True)
