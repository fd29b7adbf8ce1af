"""A machine on which something is measured in production's place, and what befalls that."""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum

from tests.fault.victim import (
    KILL_MEASURE,
    Victim,
    kill_each,
    rest_of,
    start_measuring,
    until_it_answers,
)
from tests.support.deployment import UNIT

PRODUCTION, MEASURED = "one", "two"
# From right before the lease, which takes about half a second, until the third or fourth candidate.
_SPAN_S = (0.0, 3.0)
_ROUNDS = 3
_ENDLESS = 1000
_PATIENCE_S = 60.0
# The longest until a command has noticed and seen production serve, on two busy cores.
_NOTICES_S = 12.0


class Fault(StrEnum):
    """What happens in the middle."""

    COMMAND = "SIGKILL of the command"
    LEASE = "SIGKILL of the lease"
    BOTH = "SIGKILL of both"
    CANDIDATE = "SIGKILL of the candidate"
    START = "somebody starts production"
    TIME_OUT = "time out"
    CUT = "power cut"


_SCRIPTS = {
    Fault.COMMAND: KILL_MEASURE,
    Fault.LEASE: kill_each("tunerd-lease-*"),
    Fault.BOTH: f"{kill_each('tunerd-lease-*')}; {KILL_MEASURE}",
    Fault.CANDIDATE: kill_each("tunerd-candidate-*"),
    Fault.START: f"systemctl start {UNIT}",
}


@dataclass(frozen=True)
class Case:
    """What befell one measurement: how far it had come, and how long production was awaited [s]."""

    phase: str
    code: int | None
    awaited_s: float
    said: str


@dataclass
class LeaseVictim:
    """Profile `one` serves; `two` is measured in its place."""

    victim: Victim
    words: tuple[str, ...] = ()
    """More for the measuring command."""
    span_s: tuple[float, float] = _SPAN_S
    """Within which it is struck, after the command has said `awaits`."""
    awaits: str = "planned"

    def __post_init__(self) -> None:
        if self.victim.live != PRODUCTION:
            self.victim.tunerd("apply", PRODUCTION, "--yes")

    def befall(self, fault: Fault, rng: random.Random) -> Case:
        """Measure, let it happen at a random moment, and wait until production serves again.

        Nothing of tunerd runs between the fault and that, unless the measuring command lives.
        """
        machine = self.victim.machine
        after_s = rng.uniform(*self.span_s)
        budget_s = rng.uniform(1.0, max(4.0, self.span_s[1])) if fault is Fault.TIME_OUT else 600.0
        rounds = str(_ROUNDS if fault is Fault.CANDIDATE else _ENDLESS)
        words = (MEASURED, "--rounds", rounds, "--budget", f"{budget_s:.2f}", *self.words)
        process = start_measuring(machine, *words)
        assert process.stdout is not None
        heard = ""
        while line := process.stdout.readline().decode():
            heard += line
            if line.startswith(self.awaits):
                break
        assert heard.startswith("planned\n"), heard
        if fault is not Fault.TIME_OUT:
            time.sleep(after_s)
        if fault is Fault.CUT:
            machine.power_cut()
        elif fault is not Fault.TIME_OUT:
            machine.sh(_SCRIPTS[fault])
            if fault not in {Fault.COMMAND, Fault.BOTH}:
                self._end_if_untouched(process)
        said = heard + rest_of(process)
        if fault is Fault.CUT:
            machine.boot()
        began_s = time.monotonic()
        until_it_answers(machine, PRODUCTION, limit_s=_PATIENCE_S)
        return Case(_phase(said), process.returncode, time.monotonic() - began_s, said)

    def _end_if_untouched(self, process: subprocess.Popen[bytes]) -> None:
        """What came before there was a lease changed nothing: then Ctrl-C ends the command."""
        end_s = time.monotonic() + _NOTICES_S
        while process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        if process.poll() is None:
            self.victim.machine.sh(KILL_MEASURE.replace("KILL", "INT"))

    def check(self) -> None:
        """Production serves a real generation, as deployed; after `recover` nothing is left."""
        self.victim.tunerd("recover")
        assert self.victim.check() == PRODUCTION
        machine = self.victim.machine
        left = machine.sh("ls -d /run/systemd/system/tunerd-* /run/tunerd/*.json", check=False)
        assert left.stdout == "", f"left over: {left.stdout}"
        # A scope ends when systemd has seen that its last process did; what ended well may stay
        # loaded until the next reload, and is not listed.
        listed = "systemctl list-units --plain --no-legend 'tunerd-*'"
        machine.sh(f'while [ -n "$({listed})" ]; do {listed}; sleep 0.1; done', limit_s=90.0)
        assert machine.show(UNIT, "NRestarts") == "0"
        assert machine.sh("pgrep -f '[s]leep infinity'", check=False).stdout == ""


def _phase(said: str) -> str:
    """How far the measurement had come."""
    words = [line.split(" ")[0] for line in said.splitlines()]
    if "held" not in words:
        return "before it began"
    if "interrupted" in words:
        return "while it ran, untouched"
    if "back" in words:
        return "a candidate fell" if "fault" in words else "after its end"
    return "while it ran"
