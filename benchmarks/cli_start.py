"""CPU time of short commands, against Python alone and against the packages that they stand on.

python -m benchmarks.cli_start [--rounds 15]
"""

from __future__ import annotations

import itertools
import sys

from benchmarks.measure import TUNERD, Case, compared, conditions, cpu_ms, options, say, take_turns
from tests.support.build_box import build_box


def main() -> None:
    rounds = options(__doc__, rounds=15).rounds
    python = [sys.executable, "-c"]
    with build_box(None, shape="tiny") as idle, build_box(None, shape="tiny") as busy:
        for name in ("plain", "other"):
            busy.profile(name)
        busy.apply("plain")
        turns = itertools.cycle(["other", "plain"])
        packages = "import click, pydantic_settings"
        base = Case(f"`{packages}`", lambda: cpu_ms([*python, packages]))
        cases = [
            Case("`pass`", lambda: cpu_ms([*python, "pass"])),
            base,
            Case(f"`{packages}, httpx`", lambda: cpu_ms([*python, f"{packages}, httpx"])),
            Case("`tunerd --help`", lambda: cpu_ms([TUNERD, "--help"], idle.environment)),
            Case(
                "`tunerd status`, nothing deployed",
                lambda: cpu_ms([TUNERD, "status"], idle.environment),
            ),
            Case(
                "`tunerd status`, a live unit, its server answers",
                lambda: cpu_ms([TUNERD, "status"], busy.environment),
            ),
            Case("`tunerd plan`", lambda: cpu_ms([TUNERD, "plan", "other"], busy.environment)),
            Case(
                "`tunerd apply`, a swap until the new server has answered",
                lambda: cpu_ms([TUNERD, "apply", next(turns), "--yes"], busy.environment),
            ),
        ]
        take_turns(cases, rounds)
        assert busy.json("status")["healthy"] is True
        assert idle.json("status")["active"] == "inactive"
    say(compared(cases, base, unit="CPU ms"))
    say(f"\n{conditions(rounds)}")


if __name__ == "__main__":
    main()
