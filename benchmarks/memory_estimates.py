"""Every memory case against what servers report, as the tables of docs/memory.md.

    python -m benchmarks.memory_estimates

Needs root and systemd-nspawn for Debian's server on the software GPU, and TUNERD_TEST_ENGINES for
the builds without a GPU. Ends with 1 if a difference is more than is allowed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import row, say, table
from tests.support import roots
from tests.support.machine import Machine
from tests.support.memory_cases import (
    CASES,
    ENGINES,
    SOFTWARE_GPU,
    Difference,
    can_run,
    differences,
)

_EMBEDDED = (sys.executable, "-m", "tunerd.tryout.embedded")


def on_software_gpu(folder: Path) -> Iterator[Difference]:
    """Each case on Debian's own server in a booted machine, for the device and the host."""
    with Machine(roots.sid_root(), binds={"/srv/hollow": folder}) as machine:
        program = machine.command("llama-server", env=SOFTWARE_GPU)
        for case in CASES:
            yield from differences("mainline-0.7.0", program, case, folder, seen_as="/srv/hollow")


def on_processor(name: str, program: Sequence[str], folder: Path) -> Iterator[Difference]:
    """Each case that this build can run, without a GPU; placement plays no part."""
    for case in CASES:
        if can_run(ENGINES[name], case):
            yield from differences(name, program, case.on_cpu(), folder)


def apart(one: Difference) -> float:
    return one.estimated_mib - one.reported_mib


def gpu_cells(case: str, found: Sequence[Difference]) -> Iterator[str]:
    """Estimate and report of the device, then of the host."""
    yield case
    for one in found:
        if one.case == case:
            yield from (f"{one.estimated_mib:.0f}", f"{one.reported_mib:.0f}", f"{apart(one):+.0f}")


def build_cells(name: str, found: Sequence[Difference]) -> Iterator[str]:
    """How far one build's reports and the estimates are apart at most."""
    worst = max(found, key=lambda one: abs(apart(one)))
    yield name
    yield f"{len(found)}"
    yield f"{apart(worst):+.0f} of {worst.reported_mib:.0f} ({worst.case})"
    yield f"{sum(not one.is_allowed for one in found)}"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tunerd-hollow-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        every = list(on_software_gpu(folder))
        heads = ("case", "GPU estimated", "reported", "", "host estimated", "reported", "")
        cases = dict.fromkeys(one.case for one in every)
        say(table(heads, [[*gpu_cells(case, every)] for case in cases]))
        say(f"\n{table(('build', 'cases', 'largest difference', 'outside'), ())}")
        engines = Path(os.environ["TUNERD_TEST_ENGINES"])
        programs = {name: (str(engines / name),) for name in ENGINES if (engines / name).exists()}
        for build, program in {**programs, "embedded": _EMBEDDED}.items():
            found = list(on_processor(build, program, folder))
            every += found
            say(row(build_cells(build, found)))
    return 0 if all(one.is_allowed for one in every) else 1


if __name__ == "__main__":
    sys.exit(main())
