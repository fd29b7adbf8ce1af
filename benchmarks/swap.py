"""How long a server gives no token: `apply` and `rollback` against a bare restart of its unit.

    python -m benchmarks.swap local [--rounds 8]
    sudo python -m benchmarks.swap systemd [--rounds 8]

What counts is the time from the first refused connection to the first token that a client gets
(prober.py); beside it stands what tunerd itself counts, from the stop until its own first
generation was whole, for which the server's one slot is taken. `systemd` boots this
host's root in a container, as the tests do, and restarts with `systemctl restart`; `local` has
tunerd's own supervisor restart the unit. The embedded engine serves a designed model. Swaps go
between two profiles that differ in the model's alias only, so all three load the same.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import (
    Case,
    compared,
    conditions,
    note,
    options,
    say,
    table,
    take_turns,
)
from tests.support import roots, run_folder
from tests.support.build_box import build_box
from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine
from tests.support.roots import PREFIX
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.tryout.local import Local

PROFILES = ("one", "two")
_PROBER = Path(__file__).with_name("prober.py")


class Prober:
    """The client; see prober.py."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert self._line() == "ready"

    def gone_s(self) -> float:
        """How long the server was gone since this was last asked for."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()


@dataclass
class Target:
    """A deployed server: how to call tunerd, how to restart, who watches."""

    tunerd: Callable[..., Any]
    restart: Callable[[], object]
    prober: Prober
    live: int = 0
    walls_s: dict[str, list[float]] = field(default_factory=dict)
    told_s: dict[str, list[float]] = field(default_factory=dict)
    """What tunerd says of how long nothing served."""

    def case(self, name: str, act: Callable[[], object]) -> Case:
        def run() -> float:
            self.prober.gone_s()
            began_s = time.monotonic()
            act()
            self.walls_s.setdefault(name, []).append(time.monotonic() - began_s)
            return self.prober.gone_s()

        return Case(name, run)

    def swap(self, name: str) -> None:
        self.live = 1 - self.live
        to = [PROFILES[self.live]] if name == "apply" else []
        done = self.tunerd(name, *to, "--yes", "--now")
        self.told_s.setdefault(name, []).append(done["without_service_s"])


@contextmanager
def systemd_target(shape: str) -> Iterator[Target]:
    run_folder.sweep(roots.cache_folder())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write(design(SHAPES[shape]), folder / "tiny.gguf").chmod(0o644)
        with Machine(roots.host_root(), binds={"/srv/models": folder}) as machine:
            note(machine.run("systemctl", "--version").stdout.splitlines()[0])
            texts = {one: profile("embedded", serving__alias=one) for one in PROFILES}
            tunerd = Deployment(machine, profiles=texts)
            for one in (*reversed(PROFILES), PROFILES[0]):
                tunerd("apply", one, "--yes")
            machine.write("/srv/prober.py", _PROBER.read_bytes())
            prober = Prober(
                machine.start(PREFIX / "bin/python", "-S", "-E", "/srv/prober.py", "8080")
            )
            yield Target(tunerd.json, lambda: machine.systemctl("restart", UNIT), prober)
            prober.close()


@contextmanager
def local_target(shape: str) -> Iterator[Target]:
    with build_box(None, shape=shape) as box:
        for name in PROFILES:
            box.profile(name)
        for name in (*reversed(PROFILES), PROFILES[0]):
            box.apply(name)
        pipe = subprocess.PIPE
        argv = [sys.executable, "-S", "-E", str(_PROBER), str(box.port)]
        prober = Prober(subprocess.Popen(argv, stdin=pipe, stdout=pipe))
        manager = Local(box.paths, environment=box.environment)
        yield Target(box.json, lambda: manager.restart(UNIT), prober)
        prober.close()


def main() -> None:
    given = options(__doc__, where=("systemd", "local"), rounds=8, shape="medium")
    is_systemd = given.where == "systemd"
    with (systemd_target if is_systemd else local_target)(given.shape) as target:
        how = "systemctl restart" if is_systemd else "the supervisor's restart"
        bare = target.case(how, target.restart)
        swaps = [target.case(name, partial(target.swap, name)) for name in ("apply", "rollback")]
        cases = [bare, *swaps]
        take_turns(cases, given.rounds)
    say(compared(cases, bare, unit="s without a token", digits=2))
    rows = []
    for case in swaps:
        more = [took - restart for took, restart in zip(case.figures, bare.figures, strict=True)]
        rows.append((
            case.name, f"{median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})",
            f"{median(target.told_s[case.name][1:]):.2f}", f"{median(target.walls_s[case.name][1:]):.1f}",
        ))  # fmt: skip
    heads = ("", "against the restart of its round [s]", "as tunerd counts [s]", "whole command [s]")  # fmt: skip
    say(f"\n{table(heads, rows)}\n\n{given.where}, embedded engine, designed model `{given.shape}`; "
        f"{conditions(given.rounds)}")  # fmt: skip


if __name__ == "__main__":
    main()
