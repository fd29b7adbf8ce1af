"""Whether the daemon's memory and file descriptors stay flat over many looks.

python -m benchmarks.daemon_soak --looks 10000

A real embedded server under tunerd's supervisor, real looks, history and guards, with a clock that
goes ten seconds on after each look; now and then the server is asked for something or is restarted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.fakes import FakeClock
from tests.support.local_box import deployed
from tunerd.actions.telemetry import Telemetry
from tunerd.core.telemetry.history import Event
from tunerd.daemon.guarding import Guarding
from tunerd.daemon.watching import Watching
from tunerd.system.notify import Notifier
from tunerd.system.ports import free_port

TIDY_EVERY = 2160
ASK_EVERY = 500
RESTART_EVERY = 2500
SHOW_EVERY = 1000


def rss_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    """Print memory, descriptors and what was told, a line every thousand looks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=10_000)
    looks = parser.parse_args().looks
    told: list[Event] = []
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder), free_port()) as box:
        clock = FakeClock(now_s=time.time())
        ctx = replace(box.context, clock=clock)
        telemetry = Telemetry()
        watching = Watching(ctx, telemetry, told.append)
        guarding = Guarding(ctx, Notifier({}), told.append, watching.server)
        watching.begin()
        begin_s = time.monotonic()
        for n in range(1, looks + 1):
            guarding.after(watching.look())
            clock.advance(10.0)
            server = watching.server()
            if n % ASK_EVERY == 0 and server is not None:
                server.complete("please go on with code", n_predict=32, timeout_s=60)
            if n % RESTART_EVERY == 0:
                ctx.services.restart(ctx.unit)
            if n % TIDY_EVERY == 0:
                watching.tidy()
            if n % SHOW_EVERY == 0:
                fds = len(list(Path("/proc/self/fd").iterdir()))
                took_ms = 1000 * (time.monotonic() - begin_s) / n
                print(f"{n} looks: {rss_mib():.1f} MiB, {fds} descriptors, {took_ms:.1f} ms a look, "
                      f"{len(telemetry.readings())} readings kept", flush=True)  # fmt: skip
        watching.close()
        size = box.context.paths.telemetry.stat().st_size
    print(f"told: {[event.kind for event in told]}; telemetry.db has {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
