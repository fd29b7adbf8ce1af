"""The history of what was watched: one SQLite file, `telemetry.db`, that may be lost without harm.

The standard library alone: the daemon has no room for more (docs/benchmarks.md). A file that is
damaged, or not ours, is put aside and a new one begun.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tunerd.core.telemetry.history import (
    COARSE_S,
    GPU_COLUMNS,
    KEEP_COARSE_S,
    KEEP_EVENTS_S,
    KEEP_MINUTES_S,
    MINUTE_S,
    POINT_COLUMNS,
    Event,
    GpuPoint,
    Point,
)
from tunerd.errors import HostError
from tunerd.system.files import make_private

VERSION = 1
_APPLICATION = 0x74756E64  # "tund"
_WAIT_S = 5.0
# A minute is written when the next reading comes, which may be two minutes later on a busy server.
_LATE_S = 120.0
_SIDES = ("", "-wal", "-shm")
_TYPES = {"cpu_percent": "REAL", "power_w": "REAL", "prompt_s": "REAL", "predicted_s": "REAL",
          "utilisation_percent": "REAL", "sm_clock_mhz": "REAL", "temperature_c": "REAL"}  # fmt: skip
# How rows of a minute become one of a longer stretch; what is not named is summed.
_FOLD = {"rss_mib": "max", "available_mib": "min", "swap_used_mib": "max", "cpu_percent": "avg",
         "used_mib": "max", "free_mib": "min", "server_mib": "max", "others_mib": "max",
         "utilisation_percent": "avg", "power_w": "avg", "sm_clock_mhz": "avg",
         "temperature_c": "avg"}  # fmt: skip
_KEYS = ("begin_s", "seconds", "index")
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
        DamagedError: it is broken, or belongs to another program or a newer tunerd.
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
        except BaseException:
            self._db.close()
            raise

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
        with self._writing():
            self._db.execute(_insert("points", POINT_COLUMNS), astuple(point))
            self._db.executemany(_insert("gpus", GPU_COLUMNS), [astuple(gpu) for gpu in gpus])

    def add_event(self, event: Event) -> None:
        """Something that happened.

        Raises:
            HostError: it could not be written.
            DamagedError: the file is broken.
        """
        with self._writing():
            self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", astuple(event))

    def tidy(self, now_s: float) -> int:
        """Fold minutes into longer stretches, drop what is too old; how many rows went.

        Raises:
            HostError: it could not be done.
            DamagedError: the file is broken.
        """
        with self._writing():
            for table, columns in (("points", POINT_COLUMNS), ("gpus", GPU_COLUMNS)):
                self._fold(table, columns, now_s)
            gone = 0
            for table, seconds, keep_s in (
                ("points", MINUTE_S, KEEP_MINUTES_S), ("gpus", MINUTE_S, KEEP_MINUTES_S),
                ("points", COARSE_S, KEEP_COARSE_S), ("gpus", COARSE_S, KEEP_COARSE_S),
            ):  # fmt: skip
                done = self._db.execute(
                    f"DELETE FROM {table} WHERE seconds = ? AND begin_s < ?",  # noqa: S608 -- ours
                    (seconds, _whole(now_s - keep_s)),
                )
                gone += done.rowcount
            done = self._db.execute("DELETE FROM events WHERE at_s < ?", (now_s - KEEP_EVENTS_S,))
        with self._translated("write"):
            # It gives back a page at each step, and `execute` makes one step alone.
            self._db.executescript("PRAGMA incremental_vacuum")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return gone + done.rowcount

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

    def points(self, since_s: float, until_s: float, step_s: int = MINUTE_S) -> tuple[Point, ...]:
        """The history between two moments, oldest first, a row for each `step_s` that has any.

        Minutes as far back as there are any, rows of ten minutes before; a step of less than the
        stretch of a row shows that row.

        Raises:
            HostError, DamagedError: it cannot be read.
        """
        return tuple(
            Point(*row) for row in self._rows("points", POINT_COLUMNS, since_s, until_s, step_s)
        )

    def gpus(self, since_s: float, until_s: float, step_s: int = MINUTE_S) -> tuple[GpuPoint, ...]:
        """As `points`, for each card."""
        return tuple(
            GpuPoint(*row) for row in self._rows("gpus", GPU_COLUMNS, since_s, until_s, step_s)
        )

    def events(self, *, limit: int = 100) -> tuple[Event, ...]:
        """What happened, newest first.

        Raises:
            HostError, DamagedError: it cannot be read.
        """
        with self._translated("read"):
            rows = self._db.execute(
                "SELECT at_s, kind, level, text, hint FROM events ORDER BY at_s DESC, rowid DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return tuple(Event(*row) for row in rows)

    def _rows(
        self, table: str, columns: Sequence[str], since_s: float, until_s: float, step_s: int
    ) -> list[tuple[Any, ...]]:
        shown = ", ".join(_folded(column, step_s) for column in columns)
        card = ", card" if "index" in columns else ""
        # Rows of ten minutes only where no minutes are left.
        query = (
            f"SELECT {shown} FROM {table} WHERE begin_s >= ? AND begin_s < ? AND (seconds = ?"  # noqa: S608 -- ours
            f" OR begin_s < coalesce((SELECT min(begin_s) FROM {table} WHERE seconds = ?), ?))"
            f" GROUP BY begin_s / {int(step_s)}{card} ORDER BY 1{card}"
        )
        with self._translated("read"):
            return self._db.execute(
                query, (since_s, until_s, MINUTE_S, MINUTE_S, until_s)
            ).fetchall()

    def _fold(self, table: str, columns: Sequence[str], now_s: float) -> None:
        """Make rows of ten minutes of all whole ones for which there is none yet.

        Rows of a time to come, which a clock that was set wrong has left, are passed over.
        """
        until_s = _whole(now_s - _LATE_S)
        last = self._db.execute(
            f"SELECT max(begin_s) FROM {table} WHERE seconds = ? AND begin_s < ?",  # noqa: S608 -- ours
            (COARSE_S, until_s),
        ).fetchone()[0]
        since_s = -1 if last is None else last + COARSE_S
        shown = ", ".join(_folded(column, COARSE_S) for column in columns)
        card = ", card" if "index" in columns else ""
        self._db.execute(
            f"INSERT INTO {table} ({_listed(columns)}) SELECT {shown} FROM {table}"  # noqa: S608 -- ours
            f" WHERE seconds = ? AND begin_s >= ? AND begin_s < ? GROUP BY begin_s / {COARSE_S}{card}",
            (MINUTE_S, since_s, until_s),
        )

    def _open(self, *, writable: bool) -> None:
        (owner,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (n_tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if n_tables and (owner, version) != (_APPLICATION, VERSION):
            raise DamagedError(f"its schema is {version}, and {VERSION} is known")
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
            for table, columns in (("points", POINT_COLUMNS), ("gpus", GPU_COLUMNS)):
                typed = (f"{_name(one)} {_TYPES.get(one, 'INTEGER')}" for one in columns)
                self._db.execute(f"CREATE TABLE {table} ({', '.join(typed)})")
                self._db.execute(f"CREATE INDEX {table}_by_time ON {table} (seconds, begin_s)")
            self._db.execute(
                "CREATE TABLE events (at_s REAL, kind TEXT, level TEXT, text TEXT, hint TEXT)"
            )
            self._db.execute(f"PRAGMA application_id={_APPLICATION}")
            self._db.execute(f"PRAGMA user_version={VERSION}")

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


def put_aside(path: Path, stamp: str) -> Path:
    """Move a history out of the way, with what SQLite keeps beside it; where it is now.

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
    return target


def _whole(at_s: float) -> int:
    """The beginning of the ten minutes in which that is."""
    return int(at_s // COARSE_S) * COARSE_S


def _folded(column: str, step_s: int) -> str:
    """A column of several rows as one."""
    if column == "begin_s":
        return f"(min(begin_s) / {int(step_s)}) * {int(step_s)}"
    if column == "seconds":
        return f"max({int(step_s)}, max(seconds))"
    if column in _KEYS:
        return _name(column)
    return f"{_FOLD.get(column, 'sum')}({column})"


def _name(column: str) -> str:
    return _NAMES.get(column, column)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(_name(column) for column in columns)


def _insert(table: str, columns: Sequence[str]) -> str:
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({_listed(columns)}) VALUES ({marks})"  # noqa: S608 -- our own names
