"""Fair comparisons on a machine that has other things to do: cases take turns, in random order.

Best and median of each are printed; ratios of cases of one run mean more than either alone.
"""

from __future__ import annotations

import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
