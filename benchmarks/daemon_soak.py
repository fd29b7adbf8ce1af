"""Whether the daemon's memory, file descriptors and threads stay flat over many looks.

python -m benchmarks.daemon_soak --looks 10000

A real embedded server under tunerd's supervisor, real looks, history, guards and API, with a clock that
goes ten seconds on after each look; now and then the server is asked for something or is restarted,
somebody asks the API, and settings change.
"""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import options
from tests.support.api_box import ApiBox, serving
from tests.support.fakes import FakeClock
from tests.support.local_box import deployed
from tunerd.app import Context
from tunerd.machine.net import free_port
from tunerd.units.systemd import Notifier
from tunerd.watch.figures import Event
from tunerd.watch.guarding import Guarding
from tunerd.watch.history import HistoryKeeper, Watcher

TIDY_EVERY = 2160
ASK_EVERY = 500
RESTART_EVERY = 2500
SHOW_EVERY = 1000
VISIT_EVERY = 10
RELOAD_EVERY = 250
PAGES = ("/metrics", "/api/status", "/")


def rss_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


class Daemon:
    """What the daemon does, without its loop."""

    def __init__(self, ctx: Context, api: ApiBox, told: list[Event]) -> None:
        self._ctx, self._api, self._told = ctx, api, told
        self.begin()

    def begin(self) -> None:
        """As at its start, and when settings have changed."""
        self.watcher = Watcher(self._ctx)
        self.keeper = HistoryKeeper(self._ctx, self._told.append)
        self.guarding = Guarding(self._ctx, Notifier({}), self._told.append, self.watcher.server)
        self.keeper.begin()

    def look(self) -> None:
        reading = self.watcher.look()
        self._api.telemetry.add(reading)
        self.keeper.add(reading)
        self.guarding.after(reading)

    def visit(self) -> None:
        """Somebody looks at metrics, API and page."""
        for url in PAGES:
            assert self._api.ask(url).status == 200, url


def soak(ctx: Context, clock: FakeClock, daemon: Daemon, looks: int) -> None:
    """All looks, with a line every thousand."""
    begin_s = time.monotonic()
    for n in range(1, looks + 1):
        daemon.look()
        clock.advance(10.0)
        server = daemon.watcher.server()
        if n % ASK_EVERY == 0 and server is not None:
            server.complete("please go on with code", n_predict=32, timeout_s=60)
        if n % RESTART_EVERY == 0:
            ctx.services.restart(ctx.unit)
        if n % TIDY_EVERY == 0:
            daemon.keeper.tidy()
        if n % VISIT_EVERY == 0:
            daemon.visit()
        if n % RELOAD_EVERY == 0:
            daemon.keeper.close()
            daemon.begin()
        if n % SHOW_EVERY == 0:
            took_ms = 1000 * (time.monotonic() - begin_s) / n
            print(f"{n} looks: {rss_mib():.1f} MiB, {entries('/proc/self/fd')} descriptors, "
                  f"{entries('/proc/self/task')} threads, {len(gc.get_objects())} objects, "
                  f"{took_ms:.1f} ms a look", flush=True)  # fmt: skip


def main() -> None:
    """Print memory, descriptors, threads and what was told."""
    looks = options(__doc__, looks=10_000).looks
    told: list[Event] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(Path(folder), free_port()) as box,
        serving(box=box) as api,
    ):
        clock = FakeClock(now_s=time.time())
        ctx = replace(box.context, clock=clock)
        daemon = Daemon(ctx, api, told)
        soak(ctx, clock, daemon, looks)
        daemon.keeper.close()
        size = box.context.paths.telemetry.stat().st_size
    print(f"told: {[event.kind for event in told]}; telemetry.db has {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
