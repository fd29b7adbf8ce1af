"""Time of the page with thousands of trials behind it, against the same page with a few.

    TMPDIR=/dev/shm python -m benchmarks.pages [--rounds 15] [--trials 10000]

A trial is a start of a configuration. The trials are those of a night on a simulated box, stored
again and again by the calls by which a real sweep stores them; two weeks of looks lie beside them.
Server, requests and whatever a page asks for are real. A static file of the same server stands
beside the pages: what a request costs at all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.measure import Case, compared, conditions, note, options, say, take_turns
from tests.support.api_box import ApiBox, serving
from tests.support.local_box import Box, deployed
from tests.support.made_sweep import put_night
from tests.support.readings import a_reading, served
from tunerd.machine.net import free_port
from tunerd.measure.store import EvidenceStore
from tunerd.watch.figures import MINUTE_S, summarise
from tunerd.watch.history import TelemetryStore

_DAY_S = 86400.0
_DAYS = 14
_BARE = "/static/page.css"
_PLACES = (_BARE, "/", "/?hours=168", "/live?hours=1", "/sweeps", "/sweeps/1", "/api/results")


def put_nights(box: Box, n: int) -> tuple[int, int]:
    """Store so many nights, the newest last; how many trials and requests there are then."""
    ctx = box.context
    ctx.files.make_folder(ctx.paths.evidence.parent)
    now_s = ctx.clock.now_s()
    with EvidenceStore(ctx.paths.evidence) as store:
        for number in range(n):
            put_night(ctx, store, now_s - (n - number) * _DAY_S, hours=4.0)
        events = [store.sweep_events(run.number) for run in store.runs(with_arms=False)]
    boots = [event["event"] == "boot" for one in events for event in one]
    return sum(boots), len(boots) - sum(boots)


def put_looks(box: Box, minutes: int) -> None:
    """A row for each of the last minutes, summed up from six looks as the daemon does."""
    ctx = box.context
    now_s = int(ctx.clock.now_s() // MINUTE_S) * MINUTE_S
    store = TelemetryStore(ctx.paths.telemetry, writable=True)
    for minute in range(minutes, 0, -1):
        begin_s = now_s - minute * MINUTE_S
        work = served(600, 48.0 + minute % 7, n_drafted=900, n_accepted=600 + minute % 50)
        looks = [a_reading(begin_s + 10.0 * at, served=work) for at in range(6)]
        store.add(*summarise(looks, begin_s=begin_s, seconds=MINUTE_S))
    store.close()


@contextmanager
def page(box: Box) -> Iterator[ApiBox]:
    """The page of a box of which the daemon keeps the last hour."""
    with serving(box=box) as api:
        now_s = box.context.clock.now_s()
        for at in range(360, 0, -1):
            api.telemetry.add(a_reading(now_s - 10.0 * at, served=served(600, 50.0)))
        yield api


def asked_ms(api: ApiBox, place: str) -> float:
    """Wall time [ms] until a place is shown."""
    begin_s = time.perf_counter()
    said = api.ask(place, tcp=True)
    took_ms = 1000 * (time.perf_counter() - begin_s)
    if said.status != 200:
        raise SystemExit(f"{place}: {said.status}\n{said.text[-500:]}")
    return took_ms


def main() -> None:
    """Print a table for each place."""
    given = options(__doc__, rounds=15, trials=10_000)
    with (
        tempfile.TemporaryDirectory() as short,
        tempfile.TemporaryDirectory() as long,
        deployed(Path(short), free_port()) as little,
        deployed(Path(long), free_port()) as much,
    ):
        n_few, _ = put_nights(little, 1)
        nights = -(-given.trials // n_few)
        note(f"storing {nights} nights and {_DAYS} days of looks ...")
        n_trials, n_requests = put_nights(much, nights)
        put_looks(little, 10)
        put_looks(much, _DAYS * 24 * 60)
        size = much.context.paths.evidence.stat().st_size / 1e6
        say(f"{n_trials:,} trials and {n_requests:,} requests in {nights} sweeps, {size:.0f} MB; "
            f"beside them one sweep of {n_few} trials\n")  # fmt: skip
        with page(little) as small, page(much) as large:
            apis = {"little": small, "much": large}
            found = [
                [
                    Case(f"`{place}`, {name}", partial(asked_ms, api, place))
                    for name, api in apis.items()
                ]
                for place in _PLACES
            ]
            take_turns([case for pair in found for case in pair], given.rounds)
    for pair in found:
        say(compared(pair, pair[0], unit="ms", digits=1) + "\n")
    say(conditions(given.rounds))


if __name__ == "__main__":
    main()
