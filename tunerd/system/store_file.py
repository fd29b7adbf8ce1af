"""The SQLite file behind the evidence store: opened, checked, migrated; its errors become ours.

Nothing outside of this file knows that it is SQLite.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tunerd import __version__
from tunerd.errors import Busy, HostError, TunerdError
from tunerd.system.clock import SystemClock
from tunerd.system.files import make_private
from tunerd.system.store_checked import read_json
from tunerd.system.store_schema import METADATA, MIGRATIONS, VERSION, schema_versions

_RETRY_S = 0.05
_WRITES = "tunerd_writes"
# What SQLite keeps beside the file while somebody has it open, or was killed.
_SIDES = ("-wal", "-shm")


class StoreIsOld(HostError):
    """The store has to be brought up to date, and was opened to be read only."""


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
        self.writable = writable
        self._wait_s = wait_s
        if writable:
            self._make_folder()
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

        Nobody else writes meanwhile; an exception in the body undoes everything.
        """
        options = {_WRITES: True}
        with (
            self.translated("write"),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection

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
            "sqlite://", creator=connect, poolclass=sa.QueuePool, json_deserializer=read_json
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
        clock = SystemClock()
        end_s = clock.monotonic_s() + self._wait_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                is_busy = (error.sqlite_errorcode & 0xFF) == sqlite3.SQLITE_BUSY
                if not is_busy or clock.monotonic_s() > end_s:
                    raise
                clock.sleep(_RETRY_S)
            else:
                return

    def _open(self, *, check: bool) -> None:
        try:
            self._check_and_migrate(check=check)
        except DBAPIError as error:
            # A file that was closed well can be read without the files beside it, which a reader
            # who may not write in its folder cannot make.
            is_whole = not any(self._side(side).exists() for side in _SIDES)
            if self.writable or not is_whole or _code(error) not in _MAY_BE_IMMUTABLE:
                raise
            self.engine.dispose()
            self.engine = self._engine(immutable=True)
            self._check_and_migrate(check=check)

    def _check_and_migrate(self, *, check: bool) -> None:
        if check:
            with self.engine.connect() as connection:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise self._damaged(str(found))
        if not self.writable:
            with self.engine.connect() as connection:
                self._check_version(_version(connection))
            return
        with self.engine.connect() as connection:
            version = _version(connection)
        if version == VERSION:
            return
        with self.writing() as connection:
            # Asked again: somebody else may have done it before the lock was ours.
            self._migrate(connection, _version(connection))

    def _migrate(self, connection: sa.Connection, version: int | None) -> None:
        if version is None:
            METADATA.create_all(connection)
        else:
            self._check_version(version)
            for migration in MIGRATIONS:
                if migration.version > version:
                    migration.apply(connection)
        if version != VERSION:
            row = {"version": VERSION, "written_by": f"tunerd {__version__}"}
            connection.execute(schema_versions.insert(), row)

    def _check_version(self, version: int | None) -> None:
        if version is None:
            raise HostError(
                f"the evidence store is empty: `{self.path}`",
                hint="`tunerd bench` fills it",
            )
        if version > VERSION:
            raise HostError(
                f"the evidence store was written by a newer tunerd: `{self.path}`",
                cause=f"its version is {version}, and this tunerd knows up to {VERSION}",
                state="nothing in it was changed",
                hint="use the newer tunerd, or move the file aside to begin a new store",
            )
        if version < VERSION and not self.writable:
            raise StoreIsOld(
                f"the evidence store is of an older tunerd: `{self.path}`",
                cause=f"its version is {version}, and this tunerd reads {VERSION}",
                hint="let somebody who may write it run `tunerd results list` once",
            )

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(
                f"cannot create `{self.path.parent}`", cause=error.strerror or str(error)
            ) from error

    def _side(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def _damaged(self, cause: str) -> HostError:
        aside = shlex.quote(str(self.path.with_name(f"damaged-{self.path.name}")))
        return HostError(
            f"the evidence store is damaged: `{self.path}`",
            cause=cause,
            state="nothing in it was changed, and what serves does not depend on it",
            hint=f"move it aside with what stands beside it, and a new one is begun:\n"
            f"  mkdir {aside} && mv {shlex.quote(str(self.path))}* {aside}/",
        )

    def _error(self, verb: str, error: DBAPIError) -> TunerdError:
        """What an error of SQLite means; the numbers are its primary result codes."""
        code, cause = _code(error), str(error.orig)
        name = f"the evidence store `{self.path}`"
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
                state="what was stored before is there, and nothing of this was stored",
                hint=f"free some space on the file system of {self.path.parent}",
            )
        if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}:
            hint = "run it as the owner, or as root"
            if not self.writable and any(self._side(side).exists() for side in _SIDES):
                hint += ": whoever wrote it last was cut short"
            return HostError(f"cannot {verb} {name}", cause=cause, hint=hint)
        return HostError(f"cannot {verb} {name}", cause=cause)

    def _is_disk_full(self) -> bool:
        try:
            return os.statvfs(self.path.parent).f_bavail == 0
        except OSError:
            return False


_MAY_BE_IMMUTABLE = frozenset(
    {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
)


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


def _version(connection: sa.Connection) -> int | None:
    """The version of the tables; None in a file without any.

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
            hint="move the file aside to begin a new store",
        )
    return None
