"""What was seen of the server: the seam between whoever watches and whoever shows.

The daemon adds readings; pages, the API and `/metrics` take them. Any thread may read at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tunerd.actions.context import Context
from tunerd.core.telemetry.history import MINUTE_S, Bucket, Event, GpuPoint, Point
from tunerd.core.telemetry.reading import Reading
from tunerd.errors import HostError
from tunerd.system.telemetry_store import DamagedError, TelemetryStore, put_aside

_RETRY_S = 300.0


class Telemetry:
    """The newest reading, and those of the last while.

    Args:
        kept_s: How far back readings are kept [s].
    """

    def __init__(self, *, kept_s: float = 3600.0) -> None:
        self._kept_s = kept_s
        # Replaced as a whole, never changed: a reader in another thread sees one or the other.
        self._readings: tuple[Reading, ...] = ()

    def add(self, reading: Reading) -> None:
        """One more reading; those that are too old, or from a time that the clock has left, go."""
        oldest_s = reading.at_s - self._kept_s
        kept = (one for one in self._readings if oldest_s <= one.at_s <= reading.at_s)
        self._readings = (*kept, reading)

    def latest(self) -> Reading | None:
        """The newest reading; None before the first."""
        found = self._readings
        return found[-1] if found else None

    def readings(self) -> tuple[Reading, ...]:
        """All that are kept, oldest first."""
        return self._readings


@dataclass(frozen=True, slots=True)
class History:
    """What is kept of a stretch of time; `problem` says why there is less than there should be."""

    points: tuple[Point, ...] = ()
    gpus: tuple[GpuPoint, ...] = ()
    events: tuple[Event, ...] = ()
    problem: str | None = None


def history(
    ctx: Context, since_s: float, until_s: float, *, step_s: int = MINUTE_S, events: int = 100
) -> History:
    """The history between two moments, a row for each `step_s`, and the newest events; never raises."""
    if not ctx.paths.telemetry.exists():
        return History()
    try:
        store = TelemetryStore(ctx.paths.telemetry, writable=False)
    except (HostError, DamagedError) as problem:
        return History(problem=str(problem))
    try:
        return History(
            points=store.points(since_s, until_s, step_s),
            gpus=store.gpus(since_s, until_s, step_s),
            events=store.events(limit=events),
        )
    except (HostError, DamagedError) as problem:
        return History(problem=str(problem))
    finally:
        store.close()


class HistoryKeeper:
    """Writes the history; a file that cannot be written costs rows, never the daemon.

    Used by one thread. `problems` gathers what a person should be told once, until `told` takes it.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._bucket = Bucket()
        self._store: TelemetryStore | None = None
        self._not_before_s = 0.0
        self._problem: str | None = None
        self._untold: list[Event] = []

    def begin(self) -> None:
        """See that there is a history that can be written."""
        self._write(lambda _store: None)

    def add(self, reading: Reading) -> None:
        """Take a reading; a whole minute is written when the next begins."""
        done = self._bucket.add(reading)
        if done is not None:
            self._write(lambda store: store.add(*done))

    def add_event(self, event: Event) -> None:
        """Keep something that happened."""
        self._write(lambda store: store.add_event(event))

    def tidy(self) -> None:
        """Look for damage, fold and drop what is old."""
        self._write(lambda store: store.check())
        self._write(lambda store: store.tidy(self._ctx.clock.now_s()))

    def close(self) -> None:
        """Write what was gathered, and let go of the file."""
        done = self._bucket.close()
        if done is not None:
            self._write(lambda store: store.add(*done))
        if self._store is not None:
            self._store.close()
            self._store = None

    def told(self) -> tuple[Event, ...]:
        """What went wrong since the last call, each state once."""
        found, self._untold = tuple(self._untold), []
        return found

    def _write(self, act: Callable[[TelemetryStore], object]) -> None:
        if self._ctx.clock.monotonic_s() < self._not_before_s:
            return
        try:
            try:
                act(self._opened())
            except DamagedError as problem:
                self._put_aside(str(problem))
                act(self._opened())
        except DamagedError as problem:
            self._fail(HostError(f"`{self._ctx.paths.telemetry}` is damaged", cause=str(problem)))
        except HostError as problem:
            self._fail(problem)
        else:
            self._problem = None

    def _opened(self) -> TelemetryStore:
        if self._store is None:
            self._ctx.files.make_folder(self._ctx.paths.state_dir)
            self._store = TelemetryStore(self._ctx.paths.telemetry, writable=True)
        return self._store

    def _put_aside(self, why: str) -> None:
        """A broken file is kept for whoever wants to look, and a new one takes its place."""
        self._let_go()
        stamp = datetime.fromtimestamp(self._ctx.clock.now_s(), UTC).strftime("%Y%m%dT%H%M%SZ")
        target = put_aside(self._ctx.paths.telemetry, stamp)
        text = f"the history of what was watched is damaged ({why}), so a new one was begun"
        self._tell("history-damaged", text, f"the old one is `{target}`")

    def _fail(self, problem: HostError) -> None:
        self._let_go()
        self._not_before_s = self._ctx.clock.monotonic_s() + _RETRY_S
        if problem.message != self._problem:
            cause = f": {problem.cause}" if problem.cause else ""
            self._tell(
                "history-lost", f"what is watched is not kept: {problem.message}{cause}", None
            )
        self._problem = problem.message

    def _let_go(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _tell(self, kind: str, text: str, hint: str | None) -> None:
        self._untold.append(Event(self._ctx.clock.now_s(), kind, "warning", text, hint))
