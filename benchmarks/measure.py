"""Fair comparisons on a machine that has other things to do: cases take turns, in random order.

Best and median of each are printed; ratios of cases of one run mean more than either alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
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


def options(about: str | None, **told: Any) -> argparse.Namespace:
    """What was typed: by name the choices or the type of a word that is asked for, or an option's default, whose type it has."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, one in told.items():
        if isinstance(one, tuple):
            parser.add_argument(name, choices=one)
        elif isinstance(one, type):
            parser.add_argument(name, type=one)
        elif one is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(one), default=one, help=f"[{one}]")
    return parser.parse_args()


def rows_of(path: Path) -> list[Row]:
    """Every whole line of a file of JSON; a cut one is left out."""
    found: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def keep(path: Path, row: Row) -> None:
    """One more line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what they have under these names."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for one in rows:
        found[tuple(one[name] for name in names)].append(one)
    return found


def compared(cases: Sequence[Case], base: Case, *, unit: str, digits: int = 0) -> str:
    """Best, median, and the median as a multiple of that of `base`."""
    rows = [
        (
            case.name,
            f"{min(case.figures):.{digits}f}",
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
