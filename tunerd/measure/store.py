"""The evidence store: runs, their arms and samples, figures and verdicts, in one SQLite file or a database."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.flags import compared_environment, without_secrets
from tunerd.errors import Busy, HostError, TunerdError
from tunerd.machine.clock import SystemClock, polls
from tunerd.machine.files import Files, demand_writable, make_private, stamp_of
from tunerd.machine.process import undisturbed
from tunerd.measure.answer import ClientTimes, Sample, Timings, summarise
from tunerd.measure.evidence import (
    ArmRecord,
    Damage,
    Dropped,
    RunEvidence,
    RunOutcome,
    RunRecord,
    StoredRun,
    SummaryRecord,
    VerdictRecord,
    without_text,
)
from tunerd.profile.arm import Sample as SweepSample
from tunerd.records import Unreadable, plain, read

_RETRY_S = 0.05
_WRITES = "tunerd_writes"
# What SQLite keeps beside the file while somebody has it open, or was killed.
_SIDES = ("-wal", "-shm")
_MUCH = 0.25  # of a file's pages
_AS_BEFORE = "nothing in it was changed, and what serves does not depend on it"


class EntryKind(StrEnum):
    """What an entry of a run is."""

    ARM = "arm"
    SAMPLE = "sample"
    SUMMARY = "summary"
    VERDICT = "verdict"
    EVENT = "event"


class ForeignText(sa.types.TypeDecorator[str]):
    """Text from outside, such as paths: what no database takes in a text is replaced."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        """Bytes that are no UTF-8 (surrogates, in Python) and NUL become marks."""
        del dialect
        if value is None:
            return None
        clean = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return clean.replace("\0", "\ufffd")


METADATA = sa.MetaData()
# SQLite numbers rows by itself only where the type is spelled INTEGER.
_Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
schema_versions = sa.Table(
    "schema_versions",
    METADATA,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("written_by", sa.Text, nullable=False),
)
# `head` is the record of a run without its arms.
run = sa.Table(
    "run",
    METADATA,
    sa.Column("id", _Key, sa.Identity(), primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("started_s", sa.Double, nullable=False, index=True),
    sa.Column("ended_s", sa.Double),
    sa.Column("outcome", sa.Text),
    sa.Column("reason", ForeignText),
    sa.Column("head", sa.JSON, nullable=False),
)
# `name` is that of an arm (its own, or whose sample it is), or of figures.
entry = sa.Table(
    "entry",
    METADATA,
    sa.Column("id", _Key, sa.Identity(), primary_key=True),
    sa.Column("run_id", _Key, sa.ForeignKey(run.c.id, ondelete="CASCADE"), nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", ForeignText),
    sa.Column("is_usable", sa.Boolean, nullable=False),
    sa.Column("body", sa.JSON, nullable=False),
    sa.Index("ix_entry_run", "run_id", "kind", "id"),
)


class StoreIsOld(HostError):
    """The store has to be brought up to date, and was opened to be read only."""


class StoreIsEmpty(HostError):
    """Nothing was stored, not even of what form the store is."""


class Backend(Protocol):
    """Where a store's tables are; `name` is for people.

    Calls raise HostError where it takes nothing or is damaged, and Busy where others keep it too long.
    """

    name: str

    def reading(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """A connection that sees the store as it was when the body began."""

    def writing(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """A connection whose changes are all there, and durable, when the body has ended.

        Nobody else writes meanwhile; an exception in the body undoes everything.
        """

    def close(self) -> None:
        """Let go of it."""


class StoreFile:
    """One evidence file.

    Args:
        path: The file; its folder is made where it is missing and `writable` holds.
        writable: Whether to create it, bring it up to date, and write to it.
        check: Whether to look for damage first, which reads the whole file once.
        wait_s: How long to wait for another process that writes.

    Raises:
        HostError: it cannot be opened, is damaged, or belongs to another program or a newer tunerd.
        Busy: another process keeps it locked for longer than that.
    """

    def __init__(self, path: Path, *, writable: bool, check: bool, wait_s: float) -> None:
        self.path = path
        self.name = f"the evidence store `{path}`"
        self.writable = writable
        self._wait_s = wait_s
        if writable:
            Files().make_folder(path.parent)
            demand_writable(path)
            make_private(path, *(self._side(side) for side in _SIDES))
        self.engine = self._engine(immutable=False)
        try:
            with self.translated("open"):
                self._open(check=check)
        except TunerdError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file; the last one to do so folds its log into it."""
        self.engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection that sees the store as it was when the body began."""
        with self.translated("read"), self.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A connection whose changes are all there, and durable, when the body has ended.

        Nobody else writes meanwhile; an exception in the body undoes everything. Signals wait for its
        end: an exception amid SQLite's BEGIN leaves a lock that nobody knows of (1 of 430 writes).
        """
        options = {_WRITES: True}
        with (
            undisturbed(),
            self.translated("write"),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection

    def give_back(self) -> None:
        """Copy what is left into a smaller file, where much of it is free, and the disks have room for copy and log.

        Cut short, the file stays as it is.
        """
        with (
            undisturbed(),
            self.translated("write"),
            contextlib.suppress(sqlite3.Error, OSError),
            contextlib.closing(self.engine.raw_connection()) as connection,
            contextlib.closing(connection.cursor()) as cursor,
        ):
            (free,) = cursor.execute("PRAGMA freelist_count").fetchone()
            (pages,) = cursor.execute("PRAGMA page_count").fetchone()
            # SQLite makes the copy among temporary files, and the log beside the file.
            places = (self.path.parent, Path(tempfile.gettempdir()), Path("/var/tmp"))  # noqa: S108
            room = min(shutil.disk_usage(place).free for place in places)
            if room > 2 * self.path.stat().st_size and free >= pages * _MUCH:
                cursor.execute("VACUUM")

    @contextlib.contextmanager
    def translated(self, verb: str) -> Iterator[None]:
        """Errors of the database in the body become ours.

        Raises:
            HostError: the disk is full, read-only or damaged, or the file is.
            Busy: somebody else keeps the file locked.
        """
        try:
            yield
        except DBAPIError as error:
            raise self._error(verb, error) from error
        except UnicodeDecodeError as error:  # Python cannot read how SQLite calls what is damaged
            raise self._damaged(f"its tables have names that are not text: {error}") from error

    def _engine(self, *, immutable: bool) -> sa.Engine:
        def connect() -> sqlite3.Connection:
            options = "mode=rwc" if self.writable else "mode=ro"
            options += "&immutable=1" if immutable else ""
            return sqlite3.connect(
                f"file:{quote(str(self.path))}?{options}",
                uri=True,
                timeout=self._wait_s,
                isolation_level=None,  # transactions begin where we say, not at the first INSERT
                check_same_thread=False,
            )

        engine = sa.create_engine(
            "sqlite://",
            creator=connect,
            poolclass=sa.QueuePool,
            json_serializer=json_text,
            json_deserializer=json_value,
        )
        sa.event.listen(engine, "connect", self._set_up)
        sa.event.listen(engine, "begin", _begin)
        return engine

    def _set_up(self, connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys=ON")
        connection.text_factory = _text
        if not self.writable:
            return
        connection.execute("PRAGMA synchronous=FULL")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            self._become_wal(connection)

    def _become_wal(self, connection: sqlite3.Connection) -> None:
        """Change to write-ahead logging; SQLite does not wait for others who do the same."""
        for left_s in polls(SystemClock(), self._wait_s, every_s=_RETRY_S):
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                is_busy = (error.sqlite_errorcode & 0xFF) == sqlite3.SQLITE_BUSY
                if not is_busy or not left_s:
                    raise
            else:
                return

    def _open(self, *, check: bool) -> None:
        try:
            self._check_and_migrate(check=check)
        except DBAPIError as error:
            # A file that was closed well can be read without the files beside it, which a reader
            # who may not write in its folder cannot make.
            is_whole = not any(self._side(side).exists() for side in _SIDES)
            if self.writable or not is_whole or _code(error) not in _FORBIDDEN:
                raise
            self.engine.dispose()
            self.engine = self._engine(immutable=True)
            self._check_and_migrate(check=check)

    def _check_and_migrate(self, *, check: bool) -> None:
        with self.engine.connect() as connection:
            page = connection.exec_driver_sql("PRAGMA page_size").scalar() or 1
            # What is missing of a last page SQLite takes for zeros, unless its log has that page.
            if self.path.stat().st_size % page and not (stamp_of(self._side("-wal")) or [0])[0]:
                raise self._damaged("it was cut within its last page")
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar() if check else "ok"
        if found != "ok":
            raise self._damaged(str(found))
        bring_up_to_date(
            self.name, STEPS, self.engine.connect, self.writing, writable=self.writable
        )

    def _side(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def _damaged(self, cause: str) -> HostError:
        aside = shlex.quote(str(self.path.with_name(f"damaged-{self.path.name}")))
        return HostError(
            f"the evidence store is damaged: `{self.path}`",
            cause=cause,
            state=_AS_BEFORE,
            hint=f"move it aside with the files beside it, and tunerd begins a new one:\n"
            f"  mkdir {aside} && mv {shlex.quote(str(self.path))}* {aside}/",
        )

    def _error(self, verb: str, error: DBAPIError) -> TunerdError:
        """What an error of SQLite means; the numbers are its primary result codes."""
        code, cause = _code(error), str(error.orig)
        name = self.name
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
            return self._damaged(cause)
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            return Busy(
                f"cannot {verb} {name}: another process keeps it locked",
                cause=f"waited {self._wait_s:g} s: {cause}",
                hint="wait for that process to end, then try again",
            )
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and self._is_disk_full()):
            return HostError(
                f"cannot {verb} {name}: the disk is full",
                cause=cause,
                state="what was stored before is intact, and nothing of this was stored",
                hint=f"free some space on the file system of {self.path.parent}",
            )
        hint = "run it as the owner, or as root" if code in _FORBIDDEN else None
        if hint and not self.writable and any(self._side(side).exists() for side in _SIDES):
            hint += ": the program that wrote it last was interrupted"
        return HostError(f"cannot {verb} {name}", cause=cause, state=_AS_BEFORE, hint=hint)

    def _is_disk_full(self) -> bool:
        try:
            return os.statvfs(self.path.parent).f_bavail == 0
        except OSError:
            return False


# What SQLite says of a place where this account may not write.
_FORBIDDEN = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})


def json_text(value: Any) -> str:
    """A document as it is kept."""
    return json.dumps(_known(value))


def json_value(text: Any) -> Any:
    """A document; None, which is none, where there is nothing that can be used."""
    try:
        return json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_count)
    except (ValueError, TypeError, RecursionError):
        return None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number")
    return value


def _count(text: str) -> int:
    _number(text)
    return int(text)


def _known(value: Any) -> Any:
    """JSON values in which a number that is none is missing: databases differ in what they make of it."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(raw: bytes) -> str:
    """A text of the file; bytes that are none become marks, so that the other rows can be read."""
    return raw.decode("utf-8", "replace")


def _code(error: DBAPIError) -> int | None:
    """The primary result code; None where the error is not from the database."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def _begin(connection: sa.Connection) -> None:
    """Writers queue up at the beginning, where waiting is possible, instead of failing midway."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


Step = Callable[[sa.Connection], None]
"""What brings a store to a version from the one before."""
Opened = Callable[[], contextlib.AbstractContextManager[sa.Connection]]


def bring_up_to_date(
    name: str, steps: Mapping[int, Step], reading: Opened, writing: Opened, *, writable: bool
) -> None:
    """See that a store is of the newest version, and bring it there from whichever it is of.

    Args:
        name: Of the store, for people.
        steps: What brings it to each version from the one before; the last is what this tunerd reads and writes.
        reading: Opens it to ask.
        writing: Opens it for changes that are all there when its body has ended, or none; nobody else writes meanwhile.
        writable: Whether the caller may change it.

    Raises:
        StoreIsEmpty, StoreIsOld: it may not be changed.
        HostError: a newer tunerd wrote it, or another program.
    """
    newest = max(steps)
    with reading() as connection:
        version = _version_of(connection)
    _check_version(version, newest, name, writable=writable)
    if version == newest:
        return
    with writing() as connection:
        # Asked again: somebody else may have done it before the lock was ours.
        version = _version_of(connection)
        _check_version(version, newest, name, writable=True)
        for number in sorted(one for one in steps if version is None or one > version):
            steps[number](connection)
            row = {"version": number, "written_by": f"tunerd {__version__}"}
            connection.execute(schema_versions.insert(), row)


def _version_of(connection: sa.Connection) -> int | None:
    """The version of the tables; None where there are none.

    Raises:
        HostError: the tables are of some other program.
    """
    names = set(sa.inspect(connection).get_table_names())
    if schema_versions.name in names:
        newest = connection.execute(sa.select(sa.func.max(schema_versions.c.version))).scalar()
        return None if newest is None else int(newest)
    if names:
        raise HostError(
            "the evidence store is a database of another program",
            cause=f"it has tables {', '.join(sorted(names)[:3])}, and none that says its version",
            hint="move the file aside to begin a new store, or name a database of its own",
        )
    return None


def _check_version(version: int | None, newest: int, name: str, *, writable: bool) -> None:
    """Refuse a store that cannot be read as it is; whoever may write brings an older one up to date."""
    if version is None:
        if not writable:
            raise StoreIsEmpty(f"{name} is empty", hint="`tunerd bench` fills it")
    elif version > newest:
        raise HostError(
            f"{name} was written by a newer tunerd",
            cause=f"its version is {version}, and this tunerd knows up to {newest}",
            state="nothing in it was changed",
            hint="upgrade tunerd here; a file can also be moved aside, to begin a new one",
        )
    elif version < newest and not writable:
        raise StoreIsOld(
            f"{name} was written by an older tunerd",
            cause=f"its version is {version}, and this tunerd reads {newest}",
            hint="have somebody who may write to it run `tunerd results list` once",
        )


T = TypeVar("T")
BUSY_TIMEOUT_S = 60.0
_FETCH = 1000
_MAX_NUMBER = 2**63 - 1  # of SQLite
_ARM, _SAMPLE, _SUMMARY = EntryKind.ARM, EntryKind.SAMPLE, EntryKind.SUMMARY
_VERDICT, _EVENT = EntryKind.VERDICT, EntryKind.EVENT


class EvidenceStore:
    """The evidence of one machine and mode, or of many in a database.

    A file is opened to write by default; see `StoreFile` for what that does and raises. Every call raises
    HostError where the disk is full, read-only or damaged, and Busy where another process keeps the
    store for longer than `wait_s`.
    """

    def __init__(
        self,
        where: Path | Backend,
        *,
        writable: bool = True,
        check: bool = True,
        wait_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        if isinstance(where, Path):
            where = StoreFile(where, writable=writable, check=check, wait_s=wait_s)
        self._file: Backend = where
        # By what and number, so that each row counts once: its run, and why it was left out.
        self._damaged: dict[tuple[str, int], tuple[int, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What the calls so far had to leave out of what they gave back."""
        counts = Counter((of, what, why) for (what, _), (of, why) in self._damaged.items())
        return tuple(Damage(of, what, why, n) for (of, what, why), n in counts.items())

    # Writing

    def add_run(self, record: RunRecord) -> int:
        """Begin a run; returns its number."""
        with self._file.writing() as connection:
            key = connection.execute(run.insert().values(_head(record))).inserted_primary_key
            number = int(key[0])  # type: ignore[index]  # None only for many rows
            for arm in record.arms:
                _add_arm(connection, number, arm)
        return number

    def add_arm(self, number: int, arm: ArmRecord) -> None:
        """Add an arm to a run that has begun.

        Raises:
            HostError: the run has an arm of this name.
        """
        with self._file.writing() as connection:
            _add_arm(connection, number, arm)

    def end_run(
        self, number: int, outcome: RunOutcome, *, ended_s: float, reason: str | None = None
    ) -> None:
        """Write how a run ended."""
        self._set_end(number, {"outcome": str(outcome), "ended_s": ended_s, "reason": reason})

    def reopen_run(self, number: int) -> None:
        """Take back how a run ended, for it goes on."""
        self._set_end(number, {"outcome": None, "ended_s": None, "reason": None})

    def _set_end(self, number: int, values: Mapping[str, Any]) -> None:
        with self._file.writing() as connection:
            connection.execute(run.update().where(run.c.id == number), values)

    def add_samples(self, number: int, measured: Sequence[Sample], *, arm: str) -> None:
        """Store samples of an arm of a run, in the order in which they were measured.

        Raises:
            ValueError: the run has no such arm.
        """
        if not measured:
            return
        kept = [plain(replace(one, details=without_text(one.details))) for one in measured]
        with self._file.writing() as connection:
            _demand_arm(connection, number, arm)
            row = {"run_id": number, "kind": _SAMPLE, "name": arm}
            rows = [{**row, "is_usable": one.is_usable, "body": body}
                    for one, body in zip(measured, kept, strict=True)]  # fmt: skip
            connection.execute(entry.insert(), rows)

    def add_summary(self, number: int, summary: SummaryRecord) -> None:
        """Store figures that a run came to.

        Raises:
            ValueError: the run has no arm of that name.
        """
        kept = replace(summary, figures=without_text(summary.figures))
        with self._file.writing() as connection:
            if summary.arm is not None:
                _demand_arm(connection, number, summary.arm)
            _add(connection, number, _SUMMARY, summary.name, plain(kept))

    def add_verdict(self, number: int, verdict: VerdictRecord) -> None:
        """Store what a comparison came to."""
        kept = replace(verdict, details=without_text(verdict.details))
        with self._file.writing() as connection:
            _add(connection, number, _VERDICT, None, plain(kept))

    def add_sweep_event(self, number: int, event: Mapping[str, Any]) -> None:
        """Store a start or a request of a sweep, as JSON values."""
        with self._file.writing() as connection:
            _add(connection, number, _EVENT, None, dict(event))

    def drop_requests(self, one: StoredRun) -> None:
        """Drop the samples of a run and what a sweep did, but for pairs, by which the next challenge goes."""
        gone = Dropped(one.n_samples, one.n_unusable)
        pairs = [
            row["id"]
            for row in self._entries([one.number], _EVENT)
            if not isinstance(row["body"], dict) or row["body"].get("pair")
        ]
        is_request = (entry.c.run_id == one.number) & entry.c.kind.in_((_SAMPLE, _EVENT))
        with self._file.writing() as connection:
            head = _head(replace(one.record, dropped=gone))["head"]
            connection.execute(run.update().where(run.c.id == one.number), {"head": head})
            connection.execute(entry.delete().where(is_request, entry.c.id.not_in(pairs)))

    def give_back(self) -> None:
        """Give the disk what lies free in a file where that is much; what comes next fills the rest."""
        if isinstance(self._file, StoreFile):
            self._file.give_back()

    # Reading

    def reading(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """A connection that sees the store as it was when the body began."""
        return self._file.reading()

    def runs(
        self, *, limit: int | None = None, kind: str | None = None, with_arms: bool = True
    ) -> tuple[StoredRun, ...]:
        """Runs, newest first.

        Args:
            limit: At most so many.
            kind: Only those of this command.
            with_arms: Whether to read their arms, of which a sweep has hundreds.
        """
        chosen = run.select().order_by(run.c.id.desc()).limit(limit)
        if kind is not None:
            chosen = chosen.where(run.c.kind == kind)
        return self._read_runs(chosen, with_arms=with_arms)

    def run(self, number: int) -> StoredRun | None:
        """One run; None if there is none of this number."""
        if not 0 <= number <= _MAX_NUMBER:
            return None
        return next(iter(self._read_runs(run.select().where(run.c.id == number))), None)

    def count_runs(self) -> int:
        """How many runs there are."""
        with self._file.reading() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(run)) or 0

    def samples(self, number: int) -> tuple[Sample, ...]:
        """The samples of a run, in the order in which they were measured."""
        return tuple(sample for _, sample in self.arm_samples(number))

    def samples_of(
        self, runs: Iterable[StoredRun], counts: Callable[[ArmRecord], bool]
    ) -> list[Sample]:
        """The samples of all arms that count, run by run."""
        return [
            sample
            for one in runs
            if (names := {arm.name for arm in one.record.arms if counts(arm)})
            for name, sample in self.arm_samples(one.number)
            if name in names
        ]

    def arm_samples(self, number: int) -> Iterator[tuple[str, Sample]]:
        """The samples of a run in order, each with the name of its arm; none of a damaged arm."""
        names = {arm.name for arm in self._records(ArmRecord, number)}
        for row in self._entries([number], _SAMPLE):
            sample = self._take(Sample, row) if row["name"] in names else None
            if sample is not None:
                yield row["name"], sample

    def joules_per_token(self, number: int) -> dict[str, float | None]:
        """Energy a generated token of each arm of a run, over its usable requests [J]."""
        by_arm = self._by_arm(number)
        return {arm: summarise(found).joules_per_token for arm, found in by_arm.items()}

    def _by_arm(self, number: int) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = {}
        for arm, sample in self.arm_samples(number):
            found.setdefault(arm, []).append(sample)
        return found

    def evidence(self, run: StoredRun) -> RunEvidence:
        """A run with all that was stored of it."""
        found = self._by_arm(run.number)
        return RunEvidence(
            run=run,
            samples={arm.name: tuple(found.get(arm.name, ())) for arm in run.record.arms},
            summaries=self.summaries(run.number),
            verdicts=self.verdicts(run.number),
        )

    def summaries(
        self, number: int, *, names: Collection[str] | None = None
    ) -> tuple[SummaryRecord, ...]:
        """The figures of a run, in the order in which they were stored; only of these names if given."""
        return tuple(self._records(SummaryRecord, number, names))

    def verdicts(self, number: int) -> tuple[VerdictRecord, ...]:
        """The verdicts of a run, in the order in which they were reached."""
        return tuple(self._records(VerdictRecord, number))

    def sweep_events(self, number: int) -> tuple[dict[str, Any], ...]:
        """What a sweep did, in order.

        Raises:
            HostError: a row is damaged; without it, it would go on from another place.
        """
        events, n_damaged = self.readable_events(number)
        if n_damaged:
            text = f"{self._file.name} has a damaged event of sweep {number}"
            raise HostError(text, state=_AS_BEFORE)
        return events

    def readable_events(self, number: int) -> tuple[tuple[dict[str, Any], ...], int]:
        """What can be read of what a sweep did, in order, and how many events are damaged."""
        rows = [row["body"] for row in self._entries([number], _EVENT)]
        events = tuple(row for row in rows if _is_event(row))
        return events, len(rows) - len(events)

    # Below

    def _read_runs(
        self, chosen: sa.Select[Any], *, with_arms: bool = True
    ) -> tuple[StoredRun, ...]:
        with self._file.reading() as connection:
            rows = connection.execute(chosen).mappings().all()
            numbers = [row["id"] for row in rows]
            counts = _counts(connection, numbers)
        arms: dict[int, list[ArmRecord]] = {}
        for row in self._entries(numbers, _ARM) if with_arms else ():
            arm = self._take(ArmRecord, row)
            if arm is not None:
                arms.setdefault(row["run_id"], []).append(arm)
        found = []
        for row in rows:
            told = row["head"] if isinstance(row["head"], dict) else {}
            head = {"kind": row["kind"], "started_s": row["started_s"], **told,
                    "arms": arms.get(row["id"], ())}  # fmt: skip
            n_samples, n_unusable = counts.get(row["id"], (0, 0))
            data = {**row, "number": row["id"], "record": head, "n_samples": n_samples,
                    "n_unusable": n_unusable}  # fmt: skip
            one = self._understood("runs", StoredRun, data, row["id"], row["id"])
            if one is not None and (gone := one.record.dropped) is not None:
                one = replace(one, n_samples=gone.n_samples, n_unusable=gone.n_unusable)
            found += [] if one is None else [one]
        return tuple(found)

    def _records(
        self, kind: type[T], number: int, names: Collection[str] | None = None
    ) -> Iterator[T]:
        rows = self._entries([number], _KINDS[kind][0], names)
        taken = (self._take(kind, row) for row in rows)
        return (one for one in taken if one is not None)

    def _entries(
        self, numbers: Sequence[int], what: EntryKind, names: Collection[str] | None = None
    ) -> Iterator[Any]:
        """Entries of these runs in order."""
        chosen = entry.select().where(entry.c.run_id.in_(numbers), entry.c.kind == what)
        if names is not None:
            chosen = chosen.where(entry.c.name.in_(names))
        with self._file.reading() as connection:
            streamed = connection.execution_options(yield_per=_FETCH)
            yield from streamed.execute(chosen.order_by(entry.c.id)).mappings()

    def _take(self, kind: type[T], row: Mapping[Any, Any]) -> T | None:
        return self._understood(_KINDS[kind][1], kind, row["body"], row["run_id"], row["id"])

    def _understood(self, what: str, kind: type[T], data: Any, of: int, row: int) -> T | None:
        """What a document says; None where it is damaged, which is kept for `damage`."""
        try:
            return read(kind, data)
        except Unreadable as error:
            self._damaged[what, row] = (of, str(error))
            return None


def _is_event(row: Any) -> bool:
    """Whether it is a start or a request of a sweep, and its answer one, as whoever goes on from it reads them."""
    try:
        _ = read(SweepSample, row).reading
    except (ValueError, TypeError, OverflowError):
        return False
    return isinstance(row, dict)


def open_to_read(path: Path, *, wait_s: float = BUSY_TIMEOUT_S) -> EvidenceStore | None:
    """The store for reading; None where nothing was ever stored, or somebody is just making it.

    A store of an older tunerd is brought up to date first, by whoever may write it. It is not looked
    through for damage, which takes longer with each night: what is read of a damaged part says so.

    Raises:
        HostError: as `StoreFile`.
    """
    if not path.exists():
        return None
    try:
        return EvidenceStore(path, writable=False, check=False, wait_s=wait_s)
    except StoreIsEmpty:
        return None
    except StoreIsOld:
        if not all(os.access(place, os.W_OK) for place in (path, path.parent)):
            raise
    with EvidenceStore(path, wait_s=wait_s):
        pass
    return EvidenceStore(path, writable=False, check=False, wait_s=wait_s)


def demand_storable(ctx: Context) -> None:
    """See that evidence can be stored, before a person is asked; a store that is not there is not made.

    Raises:
        HostError, Busy: as `StoreFile`.
    """
    path = ctx.paths.evidence
    if path.exists():
        with EvidenceStore(path):
            return
    folder = next(folder for folder in path.parents if folder.exists())
    demand_writable(folder / path.name)


@contextlib.contextmanager
def reading(ctx: Context) -> Iterator[EvidenceStore | None]:
    """The store of this machine for reading, as `open_to_read`."""
    store = open_to_read(ctx.paths.evidence)
    with store or contextlib.nullcontext():
        yield store


# The records among entries, with what several of one kind are called.
_KINDS: Mapping[type[Any], tuple[EntryKind, str]] = {
    ArmRecord: (_ARM, "arms"),
    Sample: (_SAMPLE, "samples"),
    SummaryRecord: (_SUMMARY, "summaries"),
    VerdictRecord: (_VERDICT, "verdicts"),
}


def _head(record: RunRecord) -> dict[str, Any]:
    """A run as a row, without its arms."""
    head = plain(replace(record, arms=()))
    return {"kind": head.pop("kind"), "started_s": head.pop("started_s"), "head": head}


def _add(
    connection: sa.Connection, number: int, kind: EntryKind, name: str | None, body: Any
) -> None:
    row = {"run_id": number, "kind": kind, "name": name, "is_usable": True, "body": body}
    connection.execute(entry.insert().values(row))


def _add_arm(connection: sa.Connection, number: int, arm: ArmRecord) -> None:
    """Without secrets, in which a command line, a unit or an origin may have them."""
    if arm.name in _arm_names(connection, number):
        raise HostError(f"run {number} has an arm `{arm.name}` already")
    kept = replace(
        arm,
        argv=None if arm.argv is None else tuple(without_secrets(arm.argv)),
        environment=compared_environment(arm.environment),
        origins=tuple(
            (" ".join(without_secrets(words.split(" "))), key, who)
            for words, key, who in arm.origins
        ),
    )
    _add(connection, number, _ARM, arm.name, plain(kept))


def _arm_names(connection: sa.Connection, number: int) -> list[str]:
    chosen = sa.select(entry.c.name).where(entry.c.run_id == number, entry.c.kind == _ARM)
    return list(connection.scalars(chosen))


def _demand_arm(connection: sa.Connection, number: int, name: str) -> None:
    if name not in _arm_names(connection, number):
        raise ValueError(f"run {number} has no arm `{name}`")


def _counts(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """How many samples each run has, and how many of them are not usable."""
    unusable = sa.func.sum(sa.case((entry.c.is_usable, 0), else_=1))
    chosen = (
        sa.select(entry.c.run_id, sa.func.count(), unusable)
        .where(entry.c.run_id.in_(numbers), entry.c.kind == _SAMPLE)
        .group_by(entry.c.run_id)
    )
    return {of: (n, int(bad or 0)) for of, n, bad in connection.execute(chosen)}


# What a store held that tunerd 0.1 wrote, with a table for each kind of record. Rows become documents as they
# are: one that was damaged is a damaged document, and told as such.

_CHUNK = 1000
_JSON = {"suites", "argv", "environment", "origins", "parts", "accepted_by_position", "marks",
         "details", "figures", "reasons", "event"}  # fmt: skip
_RECORDS = {what: kind for kind, (what, _) in _KINDS.items()}
# Children first. Version 1 lacked the last three.
_TABLES = ("verdicts", "summaries", "samples", "arms", "runs", "memory_observations",
           "memory_loads", "sweep_events", "fingerprints")  # fmt: skip
_ENTRIES: Mapping[EntryKind, str] = {
    _ARM: "SELECT arms.*, parts FROM arms LEFT JOIN fingerprints"
    " ON fingerprints.id = fingerprint_id ORDER BY arms.id",
    _SAMPLE: "SELECT samples.*, arms.name AS arm FROM samples LEFT JOIN arms"
    " ON arms.id = arm_id ORDER BY samples.id",
    _SUMMARY: "SELECT summaries.*, arms.name AS arm FROM summaries LEFT JOIN arms"
    " ON arms.id = arm_id ORDER BY summaries.id",
    _VERDICT: "SELECT * FROM verdicts ORDER BY id",
    _EVENT: "SELECT * FROM sweep_events ORDER BY id",
}
_Values = dict[str, Any]


def _keep_documents(connection: sa.Connection) -> None:
    """Make the tables of today, fill them from those of an older store, and drop those."""
    METADATA.create_all(connection)
    known = set(sa.inspect(connection).get_table_names())
    if "runs" not in known:
        return
    _insert(connection, run, map(_run, _rows(connection, "SELECT * FROM runs")))
    for kind, query in _ENTRIES.items():
        if kind is not _EVENT or "sweep_events" in known:
            _insert(connection, entry, (_entry(kind, row) for row in _rows(connection, query)))
    for name in _TABLES:
        if name in known:
            connection.exec_driver_sql(f"DROP TABLE {name}")


STEPS: Mapping[int, Step] = {4: _keep_documents}  # those before had a table for each kind of record


def _rows(connection: sa.Connection, query: str) -> Iterable[_Values]:
    for row in connection.exec_driver_sql(query).mappings():
        yield {name: _value(name, value) for name, value in row.items()}


def _insert(connection: sa.Connection, table: sa.Table, rows: Iterable[_Values]) -> None:
    left = iter(rows)
    while chunk := list(itertools.islice(left, _CHUNK)):
        connection.execute(table.insert(), chunk)


def _value(name: str, value: Any) -> Any:
    """A column as JSON: what is no JSON where it should be stays the text that it is."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if name not in _JSON or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _run(row: _Values) -> _Values:
    columns = {name: row[name] for name in ("id", "ended_s", "outcome", "reason")}
    head = _only(RunRecord, row)
    # What is no time stays in the head, where it is found to be damaged.
    started_s = head.pop("started_s") if isinstance(row["started_s"], int | float) else 0.0
    return {**columns, "kind": str(head.pop("kind")), "started_s": started_s, "head": head}


def _entry(kind: EntryKind, row: _Values) -> _Values:
    name = row["arm"] if kind is _SAMPLE else row.get("name")
    return {
        "run_id": row["run_id"],
        "kind": kind,
        "name": None if name is None else str(name),
        "is_usable": bool(row.get("is_usable", True)),
        "body": row["event"] if kind is _EVENT else _only(_RECORDS[kind], _named(kind, row)),
    }


def _named(kind: EntryKind, row: _Values) -> _Values:
    """The columns under the names of today's fields."""
    if kind is _ARM:
        return {**row, "fingerprint": row["parts"]}
    if kind is not _SAMPLE:
        return row
    client = None if row["wall_ms"] is None else _only(ClientTimes, row)
    timings = _only(Timings, row) if row["has_timings"] else None
    return {**row, "case": row["case_name"], "timings": timings, "client": client}


def _only(kind: type[Any], row: _Values) -> _Values:
    return {field.name: row[field.name] for field in fields(kind) if field.name in row}
