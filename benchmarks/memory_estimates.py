"""Every memory case against what servers report, as the tables of docs/memory.md.

Needs root and systemd-nspawn for Debian's server on the software GPU, and TUNERD_TEST_ENGINES for
the builds without a GPU. Call it as `python -m benchmarks.memory_estimates`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def gpu_rows(found: Sequence[Difference]) -> Iterator[str]:
    """One row for each case: estimate and report of the device, then of the host."""
    yield "| case | GPU estimated | reported | | host estimated | reported | |"
    yield "|---|---|---|---|---|---|---|"
    for case in dict.fromkeys(one.case for one in found):
        cells = [
            f"{one.estimated_mib:.0f} | {one.reported_mib:.0f} |"
            f" {one.estimated_mib - one.reported_mib:+.0f}"
            for one in found
            if one.case == case
        ]
        yield f"| {case} | {' | '.join(cells)} |"


def build_row(name: str, found: Sequence[Difference]) -> str:
    """How far one build's reports and the estimates are apart at most."""
    worst = max(found, key=lambda one: abs(one.estimated_mib - one.reported_mib))
    far = worst.estimated_mib - worst.reported_mib
    outside = [one for one in found if not one.is_allowed]
    return (
        f"| {name} | {len(found)} | {far:+.0f} of {worst.reported_mib:.0f} ({worst.case}) |"
        f" {len(outside)} |"
    )


def main() -> int:
    """Print both tables; 1 if a difference is more than is allowed."""
    with tempfile.TemporaryDirectory(prefix="tunerd-hollow-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        every = list(on_software_gpu(folder))
        print("\n".join(gpu_rows(every)), flush=True)
        print("\n| build | cases | largest difference | outside |\n|---|---|---|---|")
        engines = Path(os.environ["TUNERD_TEST_ENGINES"])
        programs = {name: (str(engines / name),) for name in ENGINES if (engines / name).exists()}
        for build, program in {**programs, "embedded": _EMBEDDED}.items():
            found = list(on_processor(build, program, folder))
            every += found
            print(build_row(build, found), flush=True)
    return 0 if all(one.is_allowed for one in every) else 1


if __name__ == "__main__":
    sys.exit(main())
