"""Keeps the history of what is watched: one SQLite file that may be lost."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tunerd.app import Context
from tunerd.errors import HostError
from tunerd.machine.clock import Steps
from tunerd.machine.files import make_private
from tunerd.watch.figures import FOLD, MINUTE_S, Event, GpuPoint, Point, Reading, summarise
from tunerd.watch.notices import Teller

# Rows of a minute are kept for two weeks, rows of ten minutes for somewhat over a year.
COARSE_S = 600
KEEP_MINUTES_S = 14 * 86400
_KEEP_COARSE_S = 400 * 86400
_KEEP_EVENTS_S = 400 * 86400
_TABLES: Mapping[type, str] = {Point: "points", GpuPoint: "gpus"}
_Row = TypeVar("_Row", Point, GpuPoint)
_VERSION = 1
_APPLICATION = 0x74756E64  # "tund"
_WAIT_S = 5.0
_SIDES = ("", "-wal", "-shm")
# Its name is a word of SQL.
_NAMES = {"index": "card"}
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DamagedError(Exception):
    """The file is no history of ours, or is broken; the text says which."""


class TelemetryStore:
    """One history file, for one thread.

    Args:
        path: The file; its folder exists.
        writable: Whether to create it and write to it.

    Raises:
        DamagedError: it is broken, or of another program or version.
        HostError: it cannot be opened.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        mode = "rwc" if writable else "ro"
        if writable:
            make_private(path, *(Path(f"{path}{side}") for side in _SIDES[1:]))
        with self._translated("open"):
            self._db = sqlite3.connect(
                f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=_WAIT_S,
                isolation_level=None, check_same_thread=False,
            )  # fmt: skip
        try:
            with self._translated("open"):
                self._open(writable=writable)
            self._file = _file_of(path)
        except BaseException:
            self._db.close()
            raise

    @property
    def is_there(self) -> bool:
        """Whether its file still stands where it was opened: STATE may be restored, or its disk mounted, since."""
        return _file_of(self.path) == self._file

    def close(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def add(self, point: Point, gpus: Sequence[GpuPoint]) -> None:
        """One stretch, all of it or nothing.

        Raises:
            HostError: it could not be written.
            DamagedError: the file is broken.
        """
        rows: tuple[Point | GpuPoint, ...] = (point, *gpus)
        with self._writing():
            for row in rows:
                marks = ", ".join("?" * len(fields(row)))
                self._db.execute(f"INSERT INTO {_TABLES[type(row)]} VALUES ({marks})", astuple(row))  # noqa: S608 -- ours

    def add_event(self, event: Event) -> None:
        """Something that happened; what a server said may be half of a character, which is kept as it is written.

        Raises:
            HostError: it could not be written.
            DamagedError: the file is broken.
        """
        at_s, *words = astuple(event)
        texts = (word and word.encode("utf-8", "backslashreplace").decode() for word in words)
        with self._writing():
            self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (at_s, *texts))

    def newest_s(self) -> float | None:
        """When the stretch that was stored last began, for a clock may have been ahead before; None where no minute is kept.

        Raises:
            HostError, DamagedError: it cannot be read.
        """
        with self._translated("read"):
            found = self._db.execute(
                "SELECT begin_s FROM points WHERE seconds = ? ORDER BY rowid DESC LIMIT 1",
                (MINUTE_S,),
            ).fetchone()
        return None if found is None else float(found[0])

    def tidy(self, now_s: float, *, least_s: float = 0.0) -> None:
        """Fold old minutes into longer stretches, and drop what is too old.

        Args:
            now_s: What is too old, is so by this [s since the epoch].
            least_s: Nothing goes where the minutes that stay span less than that [s].

        Raises:
            HostError: it could not be done.
            DamagedError: the file is broken.
        """
        with self._writing():
            (stays_s,) = self._db.execute(  # what the minutes that are not too old span
                "SELECT coalesce(max(begin_s) - min(begin_s), 0) FROM points WHERE seconds = ? AND begin_s >= ?",
                (MINUTE_S, _whole(now_s - KEEP_MINUTES_S)),
            ).fetchone()
            if stays_s >= least_s:
                self._drop(now_s)
        with self._translated("write"):
            # It gives back a page at each step, and `execute` makes one step alone.
            self._db.executescript("PRAGMA incremental_vacuum")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _drop(self, now_s: float) -> None:
        for kind, table in _TABLES.items():
            minutes_s, coarse_s = _whole(now_s - KEEP_MINUTES_S), _whole(now_s - _KEEP_COARSE_S)
            shown, group = _folded(kind, COARSE_S)
            self._db.execute(  # where there are none of that time, which a clock that was set back has
                f"INSERT INTO {table} SELECT {shown} FROM {table} WHERE seconds = ? AND begin_s < ? AND"  # noqa: S608 -- ours
                f" begin_s / {COARSE_S} NOT IN (SELECT begin_s / {COARSE_S} FROM {table} WHERE seconds = ?)"
                f" GROUP BY {group}", (MINUTE_S, minutes_s, COARSE_S),
            )  # fmt: skip
            self._db.execute(
                f"DELETE FROM {table} WHERE seconds = ? AND begin_s < ? OR seconds = ? AND begin_s < ?",  # noqa: S608 -- ours
                (MINUTE_S, minutes_s, COARSE_S, coarse_s),
            )
        self._db.execute("DELETE FROM events WHERE at_s < ?", (now_s - _KEEP_EVENTS_S,))

    def check(self) -> None:
        """Read the whole file once.

        Raises:
            DamagedError: something in it is broken.
            HostError: it cannot be read.
        """
        with self._translated("read"):
            (said,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if said != "ok":
            raise DamagedError(str(said))

    def rows(
        self, kind: type[_Row], since_s: float, until_s: float, step_s: int = MINUTE_S
    ) -> tuple[_Row, ...]:
        """The history between two moments, oldest first, a row for each `step_s` (and card) that has any.

        Minutes as far back as there are any, rows of ten minutes before; a step of less than the
        stretch of a row shows that row.

        Raises:
            HostError, DamagedError: it cannot be read.
        """
        table, (shown, group) = _TABLES[kind], _folded(kind, step_s)
        # Rows of ten minutes only where no minutes are left.
        query = (
            f"SELECT {shown} FROM {table} WHERE begin_s >= ? AND begin_s < ? AND (seconds = ?"  # noqa: S608 -- ours
            f" OR begin_s < coalesce((SELECT min(begin_s) FROM {table} WHERE seconds = ?), ?))"
            f" GROUP BY {group} ORDER BY {group}"
        )
        with self._translated("read"):
            found = self._db.execute(query, (since_s, until_s, MINUTE_S, MINUTE_S, until_s))
            return tuple(kind(*row) for row in found)

    def events(self, *, limit: int = 100) -> tuple[Event, ...]:
        """What happened, newest first.

        Raises:
            HostError, DamagedError: it cannot be read.
        """
        with self._translated("read"):
            rows = self._db.execute(
                "SELECT at_s, kind, level, text, hint FROM events ORDER BY rowid DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return tuple(Event(*row) for row in rows)

    def _open(self, *, writable: bool) -> None:
        (owner,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (n_tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if n_tables and (owner, version) != (_APPLICATION, _VERSION):
            raise DamagedError(f"its schema is {version}, and {_VERSION} is known")
        if not n_tables and not writable:
            raise HostError(f"`{self.path}` has nothing in it yet")
        if not writable:
            return
        if not n_tables:
            self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # which no later change brings in
        self._db.execute("PRAGMA journal_mode=WAL")
        # A power cut may cost the last minutes, never the file.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA cache_size=-512")
        if not n_tables:
            self._create()

    def _create(self) -> None:
        with self._writing():
            for kind, table in _TABLES.items():
                typed = (
                    f"{_NAMES.get(one.name, one.name)} {'REAL' if 'float' in str(one.type) else 'INTEGER'}"
                    for one in fields(kind)
                )
                self._db.execute(f"CREATE TABLE {table} ({', '.join(typed)})")
                self._db.execute(f"CREATE INDEX {table}_by_time ON {table} (seconds, begin_s)")
            events = "at_s REAL, kind TEXT, level TEXT, text TEXT, hint TEXT"
            self._db.execute(f"CREATE TABLE events ({events})")
            self._db.execute(f"PRAGMA application_id={_APPLICATION}")
            self._db.execute(f"PRAGMA user_version={_VERSION}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._translated("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _DAMAGE or "malformed" in str(error) or "no such" in str(error):
                raise DamagedError(str(error)) from error
            raise HostError(f"cannot {verb} `{self.path}`", cause=str(error)) from error


def _file_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def put_aside(path: Path, stamp: str) -> Path:
    """Move a history out of the way, with what SQLite keeps beside it, in place of one before; where it is now.

    Raises:
        HostError: it cannot be moved.
    """
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    for side in _SIDES:
        source = Path(f"{path}{side}")
        try:
            source.replace(f"{target}{side}")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostError(f"cannot move `{source}`", cause=error.strerror) from error
    for one in path.parent.glob(f"{path.name}.damaged-*"):
        if not one.name.startswith(target.name):
            with contextlib.suppress(OSError):
                one.unlink()
    return target


def _whole(at_s: float) -> int:
    """The beginning of the ten minutes in which that is."""
    return int(at_s // COARSE_S) * COARSE_S


def _folded(kind: type, step_s: int) -> tuple[str, str]:
    """The columns of several rows as one, and by what those belong together."""
    by_rule = {
        "begin_s": f"(min(begin_s) / {int(step_s)}) * {int(step_s)}",
        "seconds": f"max({int(step_s)}, max(seconds))",
        **_NAMES,
    }
    names = [one.name for one in fields(kind)]
    shown = (by_rule.get(name) or f"{FOLD.get(name, 'sum')}({name})" for name in names)
    return ", ".join(shown), f"begin_s / {int(step_s)}{', card' if 'index' in names else ''}"


_TOLD = 200
_RETRY_S = 300.0
# History goes only by a clock by which a day was watched, or that nobody has set for a day.
_HELD_S = 86400.0
_KEPT_S = 3600.0


class Telemetry:
    """The readings of the last hour."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed: a reader in another thread sees one or the other.
        self._readings: tuple[Reading, ...] = ()

    def add(self, reading: Reading) -> None:
        """One more reading; those that are too old, or from a time that the clock has left, go."""
        oldest_s = reading.at_s - _KEPT_S
        kept = (one for one in self._readings if oldest_s <= one.at_s <= reading.at_s)
        self._readings = (*kept, reading)

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
        with contextlib.closing(TelemetryStore(ctx.paths.telemetry, writable=False)) as store:
            return History(
                points=store.rows(Point, since_s, until_s, step_s),
                gpus=store.rows(GpuPoint, since_s, until_s, step_s),
                events=store.events(limit=events),
            )
    except (HostError, DamagedError) as problem:
        return History(problem=str(problem))


def newest_told(ctx: Context, *kinds: str) -> Event | None:
    """The newest event of these kinds, by whatever daemon; None where there is none among those that are looked through."""
    told = history(ctx, 0.0, 0.0, events=_TOLD).events
    return next((event for event in told if event.kind in kinds), None)


def _minute_of(reading: Reading) -> int:
    """When that began [s since the epoch]."""
    return int(reading.at_s // MINUTE_S) * MINUTE_S


class HistoryKeeper(Teller):
    """Writes the history; a file that cannot be written costs rows, never the daemon.

    Used by one thread.
    """

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        self._minute: list[Reading] = []
        self._before: Reading | None = None
        self._store: TelemetryStore | None = None
        self._not_before_s = 0.0
        self.newest_s: float | None = None
        self._begun_s = self._held_since_s = ctx.clock.monotonic_s()
        self._steps = Steps(ctx.clock)

    def begin(self) -> None:
        """See that there is a history that can be written."""

        def see(store: TelemetryStore) -> None:
            self.newest_s = store.newest_s()

        self._write(see)

    def add(self, reading: Reading) -> None:
        """Take a reading; a whole minute is written when the next begins."""
        if self._minute and _minute_of(self._minute[0]) != _minute_of(reading):
            self._write_minute()
        self._minute.append(reading)

    def _write_minute(self) -> None:
        if not self._minute:
            return
        readings, self._minute = self._minute, []
        begin_s, before = _minute_of(readings[0]), self._before
        done = summarise(readings, begin_s=begin_s, seconds=MINUTE_S, before=before)
        self._before = readings[-1]
        self._write(lambda store: store.add(*done))

    def add_event(self, event: Event) -> None:
        """Keep something that happened."""
        self._write(lambda store: store.add_event(event))

    def tidy(self) -> None:
        """Look for damage, fold and drop what is old."""
        self._write(lambda store: store.check())
        self._write(self._drop_old)

    def _drop_old(self, store: TelemetryStore) -> None:
        """No one reading of a clock takes a history away."""
        now_s, monotonic_s = self._ctx.clock.now_s(), self._ctx.clock.monotonic_s()
        if self._steps.step_s():
            self._held_since_s = monotonic_s
        has_held = monotonic_s - self._held_since_s >= _HELD_S
        if self.newest_s is not None and not has_held:
            now_s = min(now_s, self.newest_s + monotonic_s - self._begun_s)
        store.tidy(now_s, least_s=0.0 if has_held else _HELD_S)

    def close(self) -> None:
        """Write what was gathered, and let go of the file."""
        self._write_minute()
        self._let_go()

    def _write(self, act: Callable[[TelemetryStore], object]) -> None:
        if self._ctx.clock.monotonic_s() < self._not_before_s:
            return
        try:
            try:
                act(self._opened())
            except DamagedError as problem:
                self._put_aside(problem)
                act(self._opened())
        except DamagedError as problem:
            self._fail(HostError(f"`{self._ctx.paths.telemetry}` is damaged", cause=str(problem)))
        except HostError as problem:
            self._fail(problem)
        else:
            self._said.clear()

    def _opened(self) -> TelemetryStore:
        if self._store is not None and not self._store.is_there:
            self._let_go()
        if self._store is None:
            self._ctx.files.make_folder(self._ctx.paths.state_dir)
            self._store = TelemetryStore(self._ctx.paths.telemetry, writable=True)
        return self._store

    def _put_aside(self, why: DamagedError) -> None:
        """A broken file is kept for whoever wants to look, and a new one takes its place."""
        self._let_go()
        stamp = datetime.fromtimestamp(self._ctx.clock.now_s(), UTC).strftime("%Y%m%dT%H%M%SZ")
        target = put_aside(self._ctx.paths.telemetry, stamp)
        text = f"the history of what was watched cannot be read ({why}), so a new one was begun"
        self._event("history-damaged", "warning", text, f"the old one is `{target}`")

    def _fail(self, problem: HostError) -> None:
        self._let_go()
        self._not_before_s = self._ctx.clock.monotonic_s() + _RETRY_S
        text = f"what is watched cannot be recorded: {problem.words}"
        self._once(problem.message, "history-lost", "warning", text, None)

    def _let_go(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
