"""What the daemon costs: at rest, over many looks, and a server at work.

    python -m benchmarks.daemon idle [--minutes 10]     as root, with what the end-to-end tests need
    python -m benchmarks.daemon soak [--looks 10000]
    python -m benchmarks.daemon watched [--rounds 6] [--shape medium]

`idle`: a machine with a real systemd runs the shipped unit with its own settings beside the embedded server, whose
processor time is taken once without the daemon and once with it.
`soak`: whether memory, file descriptors and threads stay flat. The daemon and the API in this process, beside a real
embedded server under tunerd's supervisor, with a clock that goes ten seconds on after each look; now and then the
server is asked for something or is restarted, somebody asks the API, and settings change.
`watched`: a server on all cores, so that whatever the daemon does is taken from it. Blocks of requests with the
daemon and without it take turns; of each the server's own time per token counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.measure import Case, compared, options, say, take_turns
from tests.support import roots
from tests.support.api_box import ApiBox, serving
from tests.support.build_box import BuildBox, build_box
from tests.support.deployment import UNIT, Deployment, place_units, profile
from tests.support.fakes import FakeClock
from tests.support.machine import Machine
from tests.support.waiting import until
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.watch.daemon import Daemon
from tunerd.watch.history import history

TICKS_S, PAGES_IN_MIB = 100.0, 256
SETTLE_S = 90.0
OWN_UNIT = "tunerd.service"
PLAIN = profile("embedded", serving__alias="plain", serving__metrics=True)
TIDY_EVERY, ASK_EVERY, RESTART_EVERY, RELOAD_EVERY = 2160, 500, 2500, 250
VISIT_EVERY, SHOW_EVERY = 10, 1000
PAGES = ("/metrics", "/api/status", "/")
ANSWER_TOKENS = 128


def cpu_s(box: Deployment, pid: str) -> float:
    """Processor time of a process and of the children that it has waited for [s]."""
    fields = box.machine.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS_S


def at_rest(box: Deployment, seconds: float, *units: str) -> None:
    """What these take in a time in which nobody asks the server for anything."""
    pids = {unit: box.show("MainPID", unit) for unit in units}
    before_s = {unit: cpu_s(box, pid) for unit, pid in pids.items()}
    begin_s, most_mib = time.monotonic(), dict.fromkeys(units, 0.0)
    while (took_s := time.monotonic() - begin_s) < seconds:
        time.sleep(5)
        for unit, pid in pids.items():
            has_mib = int(box.machine.read(f"/proc/{pid}/statm").split()[1]) / PAGES_IN_MIB
            most_mib[unit] = max(most_mib[unit], has_mib)
    for unit, pid in pids.items():
        share = (cpu_s(box, pid) - before_s[unit]) / took_s
        n_open = len(box.machine.files(f"/proc/{pid}/fd"))
        say(
            f"{unit}: {share:.3%} of a core, {most_mib[unit]:.1f} MiB at most, {n_open} descriptors"
        )


def idle(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        write(design(SHAPES["tiny"]), Path(folder) / "tiny.gguf").chmod(0o644)
        with Machine(roots.host_root(), binds={"/srv/models": Path(folder)}) as machine:
            box = Deployment(machine, profiles={"plain": PLAIN})
            box.apply("plain")
            place_units(machine, OWN_UNIT)
            say("without the daemon")
            at_rest(box, given.minutes * 30, UNIT)
            box.systemctl("start", OWN_UNIT)
            time.sleep(SETTLE_S)  # its check of the evidence is over, and its first housekeeping
            say("with it")
            at_rest(box, given.minutes * 60, UNIT, OWN_UNIT)


def soak(given: argparse.Namespace) -> None:
    with build_box(None, shape="tiny") as box:
        box.profile("plain", serving__metrics=True)
        box.apply("plain")
        clock = FakeClock(now_s=time.time())
        ctx = replace(box.box.context, clock=clock)
        daemon = Daemon(ctx)
        with serving(box=box.box, telemetry=daemon.telemetry) as api:
            own, begin_s = psutil.Process(), time.monotonic()
            for n in range(1, given.looks + 1):
                daemon.look()
                clock.advance(10.0)
                happens(n, box, daemon, api)
                if n % SHOW_EVERY == 0:
                    took_ms = 1000 * (time.monotonic() - begin_s) / n
                    say(f"{n} looks: {own.memory_info().rss / 2**20:.1f} MiB, {own.num_fds()} descriptors, "
                        f"{own.num_threads()} threads, {len(gc.get_objects())} objects, {took_ms:.1f} ms a look")  # fmt: skip
        told = [event.kind for event in history(ctx, 0.0, 0.0).events]
        say(f"told: {told}; telemetry.db has {ctx.paths.telemetry.stat().st_size / 1e6:.2f} MB")


def happens(n: int, box: BuildBox, daemon: Daemon, api: ApiBox) -> None:
    """What comes between two looks."""
    if n % ASK_EVERY == 0:
        box.ask("please go on with code", 32)
    if n % RESTART_EVERY == 0:
        box.box.context.services.restart(UNIT)
    if n % TIDY_EVERY == 0:
        daemon._tidy()  # noqa: SLF001 -- the loop calls it, by real time
    for url in PAGES if n % VISIT_EVERY == 0 else ():
        assert api.ask(url).status == 200, url
    if n % RELOAD_EVERY == 0:
        box.paths.settings_file.write_text(f"[daemon]\nevery_s = {10 + n // RELOAD_EVERY % 2}\n")
        daemon.alive()


def watched(given: argparse.Namespace) -> None:
    cores = os.cpu_count() or 1

    def block() -> float:
        """Mean time per token over some seconds [ms]."""
        found = list[float]()
        end_s = time.monotonic() + given.seconds
        while time.monotonic() < end_s:
            told = box.ask(f"request {len(found)}", ANSWER_TOKENS)["timings"]
            found.append(told["predicted_ms"] / told["predicted_n"])
        return fmean(found)

    def beside_daemon() -> float:
        """From its first look on."""
        seen = box.paths.state_dir / "guards.json"
        seen.unlink(missing_ok=True)
        process = box.box.begin("daemon")
        try:
            until(seen.exists, "the daemon looked")
            return block()
        finally:
            process.terminate()
            process.communicate()

    cases = [Case("without the daemon", block), Case("with it", beside_daemon)]
    with build_box(None, shape=given.shape) as box:
        box.profile("plain", serving__threads=cores, serving__threads_batch=cores)
        box.apply("plain")
        take_turns(cases, given.rounds)
    say(compared(cases, cases[0], unit="ms a token", digits=2))
    without, beside = (case.figures for case in cases)
    ratios = [one / other for one, other in zip(beside, without, strict=True)]
    rng = random.Random(1)  # noqa: S311 -- no secret
    means = sorted(fmean(rng.choices(ratios, k=len(ratios))) - 1 for _ in range(4000))
    say(
        f"slower by {fmean(ratios) - 1:+.2%}, 95 % interval {means[100]:+.2%} to {means[3900]:+.2%}"
    )


def main() -> None:
    measured = {"idle": idle, "soak": soak, "watched": watched}
    given = options(
        __doc__, what=tuple(measured), minutes=10.0, looks=10_000, rounds=6, seconds=15.0, shape="medium"
    )  # fmt: skip
    measured[given.what](given)


if __name__ == "__main__":
    main()
