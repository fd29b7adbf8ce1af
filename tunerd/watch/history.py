"""Takes readings, one look at everything that is watched, and keeps their history: one SQLite file that may be lost."""

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
from tunerd.engine.health import HttpState
from tunerd.engine.server import Address, LlamaServer
from tunerd.engine.serving import address_now, read_live_unit
from tunerd.errors import HostError, TunerdError
from tunerd.machine.facts import Gpu
from tunerd.machine.files import make_private, stamp_of
from tunerd.machine.host import CpuSeconds, cpu_seconds, memory_of, process_cpu_s, read_memory
from tunerd.machine.process import descends_from, may_use_nvidia
from tunerd.measure.answer import Counters, read_counters
from tunerd.production.measurement import read_measurement
from tunerd.result import ActionResult, Message, warning
from tunerd.units.generations import Outcome
from tunerd.units.manager import LogSpan, UnitState
from tunerd.watch.figures import (
    FOLD,
    MINUTE_S,
    Answers,
    Bucket,
    EngineNow,
    Event,
    GpuNow,
    GpuPoint,
    HostNow,
    Point,
    Reading,
    Served,
    gpu_now,
    served_between,
    values_of,
)
from tunerd.watch.notices import Teller

_ASK_S = 2.0
# Each look at its counters is work for a llama-server, and takes its turn among the requests.
# Source: ggml-org/llama.cpp#29104, a server that stalls when it is asked every second.
_LEAST_SCRAPE_S = 5.0
# More processor time than two questions cost, and less than a short answer.
_QUESTIONS_S = 0.05
_LOG_LINES = 3000


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a life of the server is reached, and whether it sleeps when nobody asks."""

    key: object
    address: Address
    sleeps: bool


@dataclass(frozen=True, slots=True)
class _Scrape:
    """Counters as they were seen, and those to hold the next against."""

    at_s: float
    life: str | None
    counters: Counters
    known: Counters


class Watcher:
    """Looks; what grows between two looks is told in the later one.

    A look never raises. It starts one process (`systemctl show`), reads files below /proc, asks NVML,
    and puts three short questions to a server that serves. One that sleeps is asked nothing that wakes
    it, and one that may fall asleep nothing that puts that off.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._scrape: _Scrape | None = None
        self._cpu: CpuSeconds | None = None
        self._worked: tuple[str | None, float] | None = None
        self._found: _Found | None = None

    def look(self) -> Reading:
        """Everything now."""
        ctx = self._ctx
        state = self._state()
        asked = self._ask(state)
        at_s = ctx.clock.now_s()  # just after the counters, as near to them as can be
        gpu = ctx.gpu.read()
        pid = None if state is None else state.main_pid
        measurement = read_measurement(ctx)
        return Reading(
            at_s=at_s,
            gpus=None if gpu.gpus is None else _gpus(gpu.gpus, pid),
            gpu_problem=gpu.problem,
            driver_version=gpu.driver_version,
            host=self._host(),
            engine=_engine(ctx.unit, state, asked, is_expected=self._is_expected(state)),
            measuring=None if measurement is None else measurement.purpose,
            awaits_reboot=gpu.awaits_reboot is not None and (pid is None or may_use_nvidia(pid)),
        )

    def server(self) -> LlamaServer | None:
        """The server as the last look reached it; None where it did not."""
        return None if self._found is None else LlamaServer(self._found.address, self._ctx.clock)

    def _state(self) -> UnitState | None:
        with contextlib.suppress(TunerdError):
            return self._ctx.services.state(self._ctx.unit)
        return None

    def _is_expected(self, state: UnitState | None) -> bool:
        if state is None or state.is_enabled:
            return True
        try:
            newest = next(self._ctx.generations.entries(), None)
        except TunerdError:
            return True
        return newest is not None and newest.ending.outcome is not Outcome.REMOVED

    def _host(self) -> HostNow:
        memory = read_memory()
        before, self._cpu = self._cpu, cpu_seconds()
        return HostNow(**values_of(memory), cpu_percent=_cpu_percent(before, self._cpu))

    def _ask(self, state: UnitState | None) -> Answers:
        if state is None or not state.is_active:
            self._scrape = None
            return Answers()
        rests = self._rests(state)
        found = self._reached(state)
        if found is None:
            return Answers()
        server = LlamaServer(found.address, self._ctx.clock)
        health = server.health(timeout_s=_ASK_S)
        if health is not HttpState.READY:
            return Answers(health)
        props = server.props(timeout_s=_ASK_S)
        is_asleep = props is not None and props.is_asleep
        total = None if props is None else props.n_slots
        if is_asleep:
            return Answers(health, total, 0, self._counted(state), is_asleep=True)
        counters, served = self._count(server, state, spare=found.sleeps and rests)
        busy = None if counters is None else counters.n_processing
        if (total is None or busy is None) and not found.sleeps:
            slots = server.slots(timeout_s=_ASK_S)
            total, busy = (total, busy) if slots is None else (slots.total, slots.busy)
        return Answers(health, total, busy, counters, served, False if found.sleeps else None)

    def _rests(self, state: UnitState) -> bool:
        """Whether the process has computed no more since the look before than that look cost it."""
        life, cpu_s = life_of(state), None
        if state.main_pid is not None:
            cpu_s = process_cpu_s(state.main_pid)
        before, self._worked = self._worked, None if cpu_s is None else (life, cpu_s)
        if before is None or cpu_s is None or before[0] != life:
            return False
        return cpu_s - before[1] <= _QUESTIONS_S

    def _reached(self, state: UnitState) -> _Found | None:
        """Where this life of the server is reached; found out once for each."""
        ctx = self._ctx
        key = (
            state.invocation_id,
            state.main_pid,
            state.fragment_path and stamp_of(state.fragment_path),
        )
        if self._found is None or self._found.key != key:
            self._found = None
            with contextlib.suppress(TunerdError):
                live = read_live_unit(ctx)
                address = address_now(ctx, live, state)
                if address is not None:
                    self._found = _Found(key, address, live.serving.sleeps)
        return self._found

    def _counted(self, state: UnitState) -> Counters | None:
        """The counters of this life, as they were seen last."""
        seen = self._scrape
        return seen.counters if seen is not None and seen.life == life_of(state) else None

    def _count(
        self, server: LlamaServer, state: UnitState, *, spare: bool
    ) -> tuple[Counters | None, Served | None]:
        """Its counters and what they grew by.

        With `spare` it is asked only where it worked when it was asked last, or never was.
        """
        clock, life = self._ctx.clock, life_of(state)
        counted, before = self._counted(state), self._scrape
        if counted is not None and before is not None:
            is_known = spare and not counted.n_at_work
            if is_known or clock.monotonic_s() - before.at_s < _LEAST_SCRAPE_S:
                return counted, None
        text = server.metrics_text(timeout_s=_ASK_S)
        if text is None:
            return None, None
        now_s, counters = clock.monotonic_s(), read_counters(text)
        served, known = None, counters
        if before is not None and before.life == life:
            served, known = served_between(before.known, counters, now_s - before.at_s)
        self._scrape = _Scrape(now_s, life, counters, known)
        return counters, served


def _gpus(gpus: Sequence[Gpu], server_pid: int | None) -> tuple[GpuNow, ...]:
    """The cards, with what the server and its children hold told apart."""
    found = []
    for gpu in gpus:
        pids = [process.pid for process in gpu.processes or ()]
        mine = [pid for pid in pids if server_pid is not None and descends_from(pid, server_pid)]
        found.append(gpu_now(gpu, mine))
    return tuple(found)


def _engine(unit: str, state: UnitState | None, asked: Answers, *, is_expected: bool) -> EngineNow:
    said = values_of(asked)
    if state is None:
        return EngineNow(unit=unit, **said, is_expected=is_expected)
    pid = state.main_pid
    memory = None if pid is None else memory_of(pid)
    return EngineNow(
        unit=unit,
        **said,
        active_state=state.active_state,
        sub_state=state.sub_state,
        result=state.result,
        n_restarts=state.n_restarts,
        life=life_of(state),
        since_s=state.active_since_s,
        pid=pid,
        rss_mib=None if memory is None else memory.rss_mib,
        cpu_s=None if pid is None else process_cpu_s(pid),
        is_expected=is_expected,
        anonymous_mib=None if memory is None else memory.anonymous_mib,
    )


def life_of(state: UnitState) -> str | None:
    """What names this run of its process; None while nothing runs."""
    return state.invocation_id or (None if state.main_pid is None else str(state.main_pid))


def server_log(ctx: Context) -> Callable[[float], LogSpan]:
    """Reads what the server wrote since a time [s since the epoch]."""
    return lambda since_s: ctx.services.log_since(ctx.unit, since_s, max_lines=_LOG_LINES)


def _cpu_percent(before: CpuSeconds | None, after: CpuSeconds | None) -> float | None:
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    share = (after.busy_s - before.busy_s) / (after.total_s - before.total_s)
    return 100 * min(1.0, max(0.0, share))


# Rows of a minute are kept for two weeks, rows of ten minutes for somewhat over a year.
COARSE_S = 600
KEEP_MINUTES_S = 14 * 86400
_KEEP_COARSE_S = 400 * 86400
_KEEP_EVENTS_S = 400 * 86400
_TABLES: Mapping[type, str] = {Point: "points", GpuPoint: "gpus"}
_Row = TypeVar("_Row", Point, GpuPoint)
VERSION = 1
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
        """When the newest stretch began; None where there is none.

        Raises:
            HostError, DamagedError: it cannot be read.
        """
        with self._translated("read"):
            (found,) = self._db.execute("SELECT max(begin_s) FROM points").fetchone()
        return None if found is None else float(found)

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
            if self._stays_s(now_s) >= least_s:
                self._drop(now_s)
        with self._translated("write"):
            # It gives back a page at each step, and `execute` makes one step alone.
            self._db.executescript("PRAGMA incremental_vacuum")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _stays_s(self, now_s: float) -> float:
        """What the minutes that are not too old span."""
        (found,) = self._db.execute(
            "SELECT coalesce(max(begin_s) - min(begin_s), 0) FROM points WHERE seconds = ? AND begin_s >= ?",
            (MINUTE_S, _whole(now_s - KEEP_MINUTES_S)),
        ).fetchone()
        return float(found)

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
            for kind, table in _TABLES.items():
                typed = (
                    f"{_NAMES.get(one.name, one.name)} {'REAL' if 'float' in str(one.type) else 'INTEGER'}"
                    for one in fields(kind)
                )
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
    """Move a history out of the way, with what SQLite keeps beside it, in place of one before; where it is now.

    Raises:
        HostError: it cannot be moved.
    """
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    _move(path, target)
    for one in path.parent.glob(f"{path.name}.damaged-*"):
        if not one.name.startswith(target.name):
            with contextlib.suppress(OSError):
                one.unlink()
    return target


def _move(path: Path, target: Path) -> None:
    for side in _SIDES:
        source = Path(f"{path}{side}")
        try:
            source.replace(f"{target}{side}")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostError(f"cannot move `{source}`", cause=error.strerror) from error


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


_RETRY_S = 300.0
# History goes only by a clock by which a day was watched, or that nobody has set for a day.
_HELD_S = 86400.0
_SET_S = 60.0


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
        with contextlib.closing(TelemetryStore(ctx.paths.telemetry, writable=False)) as store:
            return History(
                points=store.rows(Point, since_s, until_s, step_s),
                gpus=store.rows(GpuPoint, since_s, until_s, step_s),
                events=store.events(limit=events),
            )
    except (HostError, DamagedError) as problem:
        return History(problem=str(problem))


class HistoryKeeper(Teller):
    """Writes the history; a file that cannot be written costs rows, never the daemon.

    Used by one thread.
    """

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        self._bucket = Bucket()
        self._store: TelemetryStore | None = None
        self._not_before_s = 0.0
        self.newest_s: float | None = None
        self._begun_s = self._held_since_s = ctx.clock.monotonic_s()
        self._ahead_s = ctx.clock.now_s() - self._begun_s

    def begin(self) -> None:
        """See that there is a history that can be written."""

        def see(store: TelemetryStore) -> None:
            self.newest_s = store.newest_s()

        self._write(see)

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
        self._write(self._drop_old)

    def _drop_old(self, store: TelemetryStore) -> None:
        """No one reading of a clock takes a history away."""
        now_s, monotonic_s = self._ctx.clock.now_s(), self._ctx.clock.monotonic_s()
        if abs(now_s - monotonic_s - self._ahead_s) > _SET_S:
            self._ahead_s, self._held_since_s = now_s - monotonic_s, monotonic_s
        has_held = monotonic_s - self._held_since_s >= _HELD_S
        if self.newest_s is not None and not has_held:
            now_s = min(now_s, self.newest_s + monotonic_s - self._begun_s)
        store.tidy(now_s, least_s=0.0 if has_held else _HELD_S)

    def close(self) -> None:
        """Write what was gathered, and let go of the file."""
        done = self._bucket.close()
        if done is not None:
            self._write(lambda store: store.add(*done))
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
        text = f"what is watched is not kept: {problem.words}"
        self._once(problem.message, "history-lost", "warning", text, None)

    def _let_go(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


_RECENT_S = 900


class Top:
    """Looks, one after the other; speeds of the last quarter of an hour come from the history."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._watcher = Watcher(ctx)
        self._last: Served | None = None

    def look(self) -> ActionResult:
        """One look.

        The payload has the reading, and `speeds`: of the work between the last two looks that saw any,
        else of the last quarter of an hour that the daemon kept, else null.
        """
        reading = self._watcher.look()
        self._last = _worked((reading,)) or self._last
        return _shown(self._ctx, reading, self._last)


def top(ctx: Context, readings: Sequence[Reading]) -> ActionResult:
    """The newest of the daemon's own looks, oldest first, as `Top.look` shows it; else one look."""
    if not readings:
        return Top(ctx).look()
    newest = readings[-1]
    recent = [one for one in readings if one.at_s >= newest.at_s - _RECENT_S]
    return _shown(ctx, newest, _worked(recent))


def _worked(readings: Sequence[Reading]) -> Served | None:
    """The last work that was seen between two looks."""
    found = (one.engine.served for one in reversed(readings))
    return next((one for one in found if one is not None and one.n_predicted), None)


def _shown(ctx: Context, reading: Reading, known: Served | None) -> ActionResult:
    since = "between two looks"
    if known is None:
        since, known = "in the last 15 min", _kept(ctx, reading.at_s)
    speeds = None
    if known is not None:
        speeds = {"since": since, **known.rates(), "n_predicted": known.n_predicted}
    return ActionResult("top", {**reading.to_json(), "speeds": speeds}, _messages(reading))


def _kept(ctx: Context, now_s: float) -> Served | None:
    kept = history(ctx, now_s - _RECENT_S, now_s, step_s=_RECENT_S, events=0)
    worked = [point for point in kept.points if point.n_predicted]
    return worked[-1] if worked else None


def _messages(reading: Reading) -> tuple[Message, ...]:
    found = []
    if reading.gpu_problem is not None:
        found.append(warning("gpu", reading.gpu_problem, "`tunerd doctor`"))
    if reading.engine.active_state == "failed":
        found.append(
            warning("failed", f"the unit has failed ({reading.engine.result})", "`tunerd doctor`")
        )
    return tuple(found)
