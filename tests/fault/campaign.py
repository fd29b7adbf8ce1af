"""Long campaigns of faults on real systems, by hand; CI runs a sample of each.

    python -m tests.fault.campaign kills --root sid --count 50 [--daemon] [--seed 1]
    python -m tests.fault.campaign cuts --root host --count 20 [--strict]
    python -m tests.fault.campaign cuts-in-recovery --root host --count 5
    python -m tests.fault.campaign leases --root sid --count 30 [--fault COMMAND] [--cuts 5]
    python -m tests.fault.campaign sweeps --root host --count 20 [--fault COMMAND]
    python -m tests.fault.campaign ports --root host [--production DEPLOYED] [--end COMMAND]
    python -m tests.fault.campaign daemon --root host --count 6 [--fault RAISE]

Needs root. Real engines come from TUNERD_TEST_ENGINES, else Debian's or the embedded one serves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.fault.daemon_victim import DaemonFault, DaemonVictim
from tests.fault.lease_victim import Fault, LeaseVictim
from tests.fault.port_victim import End, PortVictim, Production
from tests.fault.sweep_victim import SweepFault, SweepVictim
from tests.fault.victim import Victim
from tests.support import needs, roots, run_folder
from tests.support.machine import Machine
from tests.support.night import Night
from tests.support.roots import Tunerd
from tunerd.tryout.designed import SHAPES, design, write


@contextlib.contextmanager
def a_machine(
    root_name: str, *, installed: bool, disk_mib: int | None = None, strict: bool = False
) -> Iterator[Machine]:
    """A booted machine with a designed model and engines."""
    run_folder.sweep(roots.cache_folder())
    make = roots.host_root if root_name == "host" else roots.sid_root
    root = make(Tunerd.INSTALLED if installed else Tunerd.FOR_TESTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write(design(SHAPES["tiny"]), folder / "tiny.gguf").path.chmod(0o644)
        binds = {"/srv/models": folder}
        if engines := os.environ.get(needs.ENGINES_VARIABLE):
            binds["/srv/engines"] = Path(engines)
        with Machine(root, disk_mib=disk_mib, strict_disk=strict, binds=binds) as machine:
            version = machine.run("systemctl", "--version").stdout.splitlines()[0]
            say(f"{root_name}: {version}")
            yield machine


@contextlib.contextmanager
def a_victim(
    root_name: str, *, installed: bool, disk_mib: int | None = None, strict: bool = False
) -> Iterator[Victim]:
    """A booted machine with two profiles deployed in turn."""
    with a_machine(root_name, installed=installed, disk_mib=disk_mib, strict=strict) as machine:
        victim = Victim(machine)
        say(f"engine {victim.engine}; apply {victim.swap_s:.1f} s")
        yield victim


def say(text: str) -> None:
    """A line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Count:
    """How the cases ended; one that breaks is told and counted, and the campaign goes on."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self._began_s = time.monotonic()

    @contextlib.contextmanager
    def case(self, told: str) -> Iterator[list[str]]:
        """One case; its body appends how it ended."""
        ends: list[str] = []
        try:
            yield ends
        except AssertionError as error:
            ends = ["BROKEN"]
            told += f": {error}"
        self.ends[ends[-1]] += 1
        say(f"{sum(self.ends.values())}: {told} -> {ends[-1]}")

    def close(self) -> int:
        """Print the counts; the exit code."""
        n_cases, n_broken = sum(self.ends.values()), self.ends["BROKEN"]
        ends = ", ".join(f"{end} {count}" for end, count in sorted(self.ends.items()))
        took_s = time.monotonic() - self._began_s
        say(f"{n_cases - n_broken} of {n_cases} whole ({ends}) in {took_s:.0f} s")
        return 1 if n_broken else 0


def kills(args: argparse.Namespace) -> int:
    """SIGKILL at random moments, then `tunerd recover`, or the daemon by itself."""
    rng, count = random.Random(args.seed), Count()
    with a_victim(args.root, installed=args.daemon) as victim:
        for _ in range(args.count):
            words, blow = victim.some_swap(rng), victim.some_blow(rng)
            before = victim.live
            with count.case(f"tunerd {' '.join(words)}, {blow}") as ends:
                was_in_time = victim.strike(words, blow)["in_time"]
                was_cut = bool(victim.tunerd.journal_files())
                if args.daemon:
                    victim.wait_for_the_daemon()
                else:
                    victim.tunerd("recover")
                end = "old" if victim.check() == before else "new"
                ends.append(_end(end, was_in_time=was_in_time, was_cut=was_cut))
    return count.close()


def _end(end: str, *, was_in_time: bool, was_cut: bool) -> str:
    if not was_in_time:
        return f"{end}, too late"
    return f"{end}, {'with' if was_cut else 'without'} a record"


def cuts(args: argparse.Namespace, *, again: bool = False) -> int:
    """Power cuts on a disk that loses what was not synced, then a boot with the daemon enabled."""
    rng, count = random.Random(args.seed), Count()
    took_s = []
    with a_victim(args.root, installed=True, disk_mib=512, strict=args.strict) as victim:
        while sum(count.ends.values()) < args.count:
            words, before = victim.some_swap(rng), victim.live
            blow, later_s = victim.some_blow(rng), rng.uniform(0, 1.5)
            victim.cut(words, blow)
            was_cut = victim.machine.exists(victim.record)
            if again and not was_cut:
                victim.boot()
                continue
            told = f"tunerd {' '.join(words)}, cut: {blow}"
            with count.case(f"{told}; again {later_s:.2f} s after boot" if again else told) as ends:
                if again:
                    victim.machine.boot()
                    time.sleep(later_s)
                    victim.machine.power_cut()
                    was_cut = victim.machine.exists(victim.record)
                took_s.append(victim.boot())
                victim.wait_for_the_daemon()
                end = "old" if victim.check() == before else "new"
                ends.append(_end(end, was_in_time=True, was_cut=was_cut))
    say(f"from power to the first answer: {min(took_s):.1f} to {max(took_s):.1f} s")
    return count.close()


def cuts_in_recovery(args: argparse.Namespace) -> int:
    """A cut in the middle of a swap that leaves a record, then a cut while that is mended."""
    return cuts(args, again=True)


def _each_fault(
    plan: Iterable[tuple[StrEnum, int]], befall: Callable[[Any], tuple[str, float]], where: str
) -> int:
    """So many cases of every fault; `befall` says what the blow met, and how long it took to be well again [s]."""
    status = 0
    for fault, n_cases in plan:
        count, awaited_s = Count(), [0.0]
        for _ in range(n_cases):
            with count.case(str(fault)) as ends:
                met, after_s = befall(fault)
                awaited_s.append(after_s)
                ends.append(met)
        say(f"{where}, {fault}: all was well again after at most {max(awaited_s):.1f} s")
        status |= count.close()
    return status


def leases(args: argparse.Namespace) -> int:
    """What may befall a measurement in production's place, each at random moments."""
    rng = random.Random(args.seed)
    wanted = [Fault[args.fault]] if args.fault else [fault for fault in Fault if fault != Fault.CUT]
    plan = [*((fault, args.count) for fault in wanted), (Fault.CUT, args.cuts)]
    with a_victim(args.root, installed=False, disk_mib=512 if args.cuts else None) as victim:
        lease = LeaseVictim(victim)

        def befall(fault: Fault) -> tuple[str, float]:
            found = lease.befall(fault, rng)
            lease.check()
            return found.phase, found.awaited_s

        return _each_fault([one for one in plan if one[1]], befall, args.root)


def ports(args: argparse.Namespace) -> int:
    """Every way in which a measurement of ik in mainline's place ends, for every kind of unit."""
    productions = [Production[args.production]] if args.production else list(Production)
    ends = [End[args.end]] if args.end else list(End)
    count = Count()
    with a_machine(args.root, installed=False) as machine:
        victim = PortVictim(machine)
        for production in productions:
            victim.serve(production)
            for end in ends:
                victim.until_free()
                with count.case(f"{production}: {end}") as told:
                    try:
                        case = victim.befall(end)
                    except AssertionError:
                        victim.serve(production)
                        raise
                    told.append(
                        f"{case.time_waits} TIME_WAIT, answered after {case.away_s:.1f} s, "
                        f"{case.restarts} restarts, exit {case.code}"
                    )
    return count.close()


def sweeps(args: argparse.Namespace) -> int:
    """What may befall a night's unit, each at random moments of it."""
    rng = random.Random(args.seed)
    wanted = [SweepFault[args.fault]] if args.fault else list(SweepFault)
    with a_machine(args.root, installed=False, disk_mib=768) as machine:
        victim = SweepVictim(Night(machine, sweep="budget_s = 300.0"))
        machine.sh("journalctl --sync; sync")

        def befall(fault: SweepFault) -> tuple[str, float]:
            found = victim.befall(fault, rng)
            victim.check()
            return found

        return _each_fault([(fault, args.count) for fault in wanted], befall, args.root)


def daemon(args: argparse.Namespace) -> int:
    """SIGKILL of the daemon whatever it does; systemd starts it again."""
    rng = random.Random(args.seed)
    wanted = [DaemonFault[args.fault]] if args.fault else list(DaemonFault)
    with a_machine(args.root, installed=False) as machine:
        victim = DaemonVictim(machine)
        say(f"the daemon is ready after {victim.start_s:.1f} s")

        def befall(fault: DaemonFault) -> tuple[str, float]:
            began_s = time.monotonic()
            met = victim.befall(fault, rng)
            victim.check()
            return met, time.monotonic() - began_s

        return _each_fault([(fault, args.count) for fault in wanted], befall, args.root)


def main() -> int:
    """Run the campaign that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    campaigns = {
        "kills": kills, "cuts": cuts, "cuts-in-recovery": cuts_in_recovery,
        "leases": leases, "ports": ports, "sweeps": sweeps,
        "daemon": daemon,
    }  # fmt: skip
    parser.add_argument("campaign", choices=campaigns)
    parser.add_argument("--root", choices=["host", "sid"], default="host")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--daemon", action="store_true")
    parser.add_argument("--strict", action="store_true")
    faults = {fault.name for fault in (*Fault, *SweepFault, *DaemonFault)}
    parser.add_argument("--fault", choices=sorted(faults))
    parser.add_argument("--production", choices=[one.name for one in Production])
    parser.add_argument("--end", choices=[one.name for one in End])
    parser.add_argument("--cuts", type=int, default=0)
    args = parser.parse_args()
    return campaigns[args.campaign](args)


if __name__ == "__main__":
    sys.exit(main())
