"""The store that boxes share, on PostgreSQL: connected with limits, brought up to date, its errors in words."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, StatementError

from tunerd.errors import Busy, HostError, TunerdError
from tunerd.measure import store

if TYPE_CHECKING:
    import psycopg

SHARED = sa.MetaData()
# `seen_at` and `handed_in_at` are by the database's clock: those of boxes may be wrong.
box = sa.Table(
    "box",
    SHARED,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", store.ForeignText, nullable=False),
    sa.Column("card", store.ForeignText),
    sa.Column("vram_mib", sa.BigInteger),
    sa.Column("engine", store.ForeignText),
    sa.Column("engine_sha256", sa.Text),
    sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("status", sa.JSON, nullable=False),
)
# Which run of which box a run here is, and the last of that box's entries that is here.
origin = sa.Table(
    "origin",
    SHARED,
    sa.Column("run_id", sa.ForeignKey(store.run.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("box_id", sa.ForeignKey(box.c.id), nullable=False),
    sa.Column("local_id", sa.Text, nullable=False),
    sa.Column("last_entry", sa.BigInteger, nullable=False),
    sa.Column("handed_in_at", sa.DateTime(timezone=True), nullable=False),
    sa.UniqueConstraint("box_id", "local_id"),
)
# What boxes of a class tell each other of a study, as documents, and the arms that they try just now.
told = sa.Table(
    "told",
    SHARED,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("class_id", sa.Text, nullable=False),
    sa.Column("box_id", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False, unique=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.JSON, nullable=False),
    sa.Column("told_at", sa.DateTime(timezone=True), server_default=sa.func.clock_timestamp()),
    sa.Index("ix_told_class", "class_id", "kind", "id"),
)
claim = sa.Table(
    "claim",
    SHARED,
    sa.Column("class_id", sa.Text, primary_key=True),
    sa.Column("arm", sa.Text, primary_key=True),
    sa.Column("box_id", sa.Text, nullable=False),
    sa.Column("until", sa.DateTime(timezone=True), nullable=False),
)
Step = Callable[[sa.Connection], None]


def _begin(connection: sa.Connection) -> None:
    store.METADATA.create_all(connection)
    SHARED.create_all(connection, tables=[box, origin])


def _add_study(connection: sa.Connection) -> None:
    SHARED.create_all(connection, tables=[told, claim])


STEPS: Mapping[int, Step] = {1: _begin, 2: _add_study}
"""What brings a database to each version from the one before."""
_LOCK = 0x74756E657264
"""The advisory lock of whoever writes."""
# How soon a connection that leads nowhere is given up, by libpq; milliseconds where it takes those.
_CONNECTING: Mapping[str, str] = {
    "application_name": "tunerd",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
_MOST_WORDS = 500
# The server, if it can, says itself that a statement takes too long.
_GRACE_S = 2.0
_KEPT = "what was measured stays on this box, and is handed in later"


class Refused(HostError):
    """The database does not take these values, whenever they come."""


class Database:
    """A store on PostgreSQL, for whoever needs a `Backend`.

    Args:
        url: As `store.url` of the settings.
        writable: Whether to bring it up to date, and write to it.
        wait_s: How long to wait for others who write [s].
        limit_s: Longest that a statement takes; a body of `reading` or `writing` has a little more, and then
            its connection is cut [s].
        steps: What brings it up to date.

    Raises:
        HostError: it cannot be reached or used, or belongs to another program or a newer tunerd.
        Busy: others keep it for longer than that.
    """

    def __init__(
        self,
        url: str,
        *,
        writable: bool,
        wait_s: float = 10.0,
        limit_s: float = 15.0,
        steps: Mapping[int, Step] = STEPS,
    ) -> None:
        try:
            import psycopg  # noqa: F401  only to see that it is there
        except ImportError as error:
            raise HostError(
                "the shared store needs a package that is not installed",
                cause=str(error),
                state=_KEPT,
                hint="`sudo ./install.sh --with-fleet` in tunerd's sources brings it",
            ) from error
        # It also warns of what is raised.
        logging.getLogger("psycopg").setLevel(logging.ERROR)
        self._url = sa.make_url(url)
        self.name = f"the shared store `{self._url.set(query={}).render_as_string()}`"
        self._wait_s = wait_s
        self._limit_s = limit_s
        self._options = (
            f"-c lock_timeout={wait_s * 1000:.0f} -c statement_timeout={limit_s * 1000:.0f}"
            f" -c idle_in_transaction_session_timeout={limit_s * 1000:.0f}"
            f"{'' if writable else ' -c default_transaction_read_only=on'}"
        )
        self._connections: list[psycopg.Connection[Any]] = []
        self._engine = sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            pool_pre_ping=True,
            hide_parameters=True,
            json_serializer=store.json_text,
            json_deserializer=store.json_value,
        )
        try:
            _, self._given = self._engine.dialect.create_connect_args(self._url)
        except ArgumentError as error:
            raise HostError(
                f"what store.url says of {self.name} cannot be read", cause=str(error), state=_KEPT,
                hint="several hosts in store.url are `?host=a:5432&host=b:5432`",
            ) from error  # fmt: skip
        try:
            self._check_and_migrate(steps, writable=writable)
        except TunerdError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        self._engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection that sees the store as it was when the body began.

        Raises:
            HostError: the database cannot be reached or used.
            Busy: it has no time.
        """
        options = {"isolation_level": "REPEATABLE READ"}
        with (
            self._bounded("read"),
            self._engine.connect().execution_options(**options) as connection,
        ):
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A connection whose changes are all there when the body has ended; nobody else writes meanwhile.

        Where the connection is lost at the end, they may be there or not, but only as a whole.

        Raises:
            HostError: the database cannot be reached or used.
            Busy: others write for too long.
        """
        with self._bounded("write"), self._engine.begin() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            yield connection

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg

        wanted = {**_CONNECTING, **self._given}
        wanted["options"] = f"{self._options} {self._given.get('options', '')}".rstrip()
        made = psycopg.connect(**wanted)
        self._connections = [*(one for one in self._connections if not one.closed), made]
        return made

    def _check_and_migrate(self, steps: Mapping[int, Step], *, writable: bool) -> None:
        newest = max(steps)
        with self.reading() as connection:
            version = store.version_of(connection)
        store.check_version(version, newest, self.name, writable=writable)
        if version == newest:
            return
        with self.writing() as connection:
            # Asked again: another box may have done it before the lock was ours.
            version = store.version_of(connection)
            store.check_version(version, newest, self.name, writable=True)
            for number in sorted(steps):
                if version is None or number > version:
                    steps[number](connection)
                    store.set_version(connection, number)

    @contextlib.contextmanager
    def _bounded(self, verb: str) -> Iterator[None]:
        """Errors in the body become ours; one that hangs is cut, for no limit of a server that hangs helps."""
        from psycopg import OperationalError

        is_cut = threading.Event()

        def cut() -> None:
            is_cut.set()
            for connection in self._connections:
                # It may have been closed meanwhile.
                with (
                    contextlib.suppress(OSError, OperationalError),
                    socket.socket(fileno=os.dup(connection.fileno())) as line,
                ):
                    line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self._limit_s + _GRACE_S, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        except StatementError as error:
            if is_cut.is_set():
                raise HostError(
                    f"cannot {verb} {self.name}: it does not answer",
                    cause=f"waited {self._limit_s + _GRACE_S:g} s",
                    state=_KEPT,
                    hint="look at the database, and the way to it",
                ) from error
            raise self._error(verb, error) from error
        finally:
            timer.cancel()

    def _error(self, verb: str, error: StatementError) -> TunerdError:
        """What an error of PostgreSQL, or of the way to it, means."""
        cause = "; ".join(map(str.strip, str(error.orig).splitlines()))[:_MOST_WORDS]
        code = getattr(error.orig, "sqlstate", None) or _code_of(error)
        kind, why, hint = next(
            (said for start, said in _SAID.items() if code.startswith(start)),
            (HostError, None, None),
        )
        what = f"cannot {verb} {self.name}"
        return kind(f"{what}: {why}" if why else what, cause=cause, state=_KEPT, hint=hint)


def _code_of(error: StatementError) -> str:
    """Of what libpq and psycopg say, without a code: that of the error in PostgreSQL's list."""
    from psycopg import DataError

    if not isinstance(error, DBAPIError) or isinstance(error.orig, DataError):
        return "22"
    words, tried = str(error.orig), getattr(error.orig, "pgconn", None)
    if tried is not None and tried.needs_password:
        return "28P01"
    signs = {"28": ("authentication", "pg_hba.conf"), "SSL": ("SSL", "certificate"),
             "3D000": ("does not exist",), "53300": ("too many", "remaining connection")}  # fmt: skip
    found = (code for code, texts in signs.items() if any(text in words for text in texts))
    return next(found, "08")


_ACCOUNT = (
    "the user in store.url; the password in `?passfile=`, PGPASSFILE or a systemd credential, "
    "a file that nobody else may read; pg_hba.conf there"
)
_STANDBY = (
    "is it a standby? `?target_session_attrs=read-write` finds the primary among several hosts"
)
_AWAY = (HostError, "it cannot be reached", "look at the database, and the way to it")
_VALUES = (
    Refused,
    "it does not take these values",
    "`tunerd results show` here says what they are",
)
_OTHERS = (Busy, "others are at work there", "wait a while, then try again")
# By the beginning of SQLSTATE; the first that fits.
# Source: PostgreSQL's documentation, appendix A (error codes).
_SAID: Mapping[str, tuple[type[TunerdError], str, str]] = {
    "SSL": (HostError, "TLS is refused", "`sslmode=` and `sslrootcert=` in store.url, as libpq takes them"),
    "08": _AWAY,
    "57P": _AWAY,
    "25P03": _AWAY,
    "28": (HostError, "it does not let this account in", _ACCOUNT),
    "3D000": (HostError, "there is no such database", "`createdb -O tunerd tunerd` there makes it"),
    "25006": (HostError, "it takes no changes", _STANDBY),
    "42501": (HostError, "this account may not do that",
              "`ALTER DATABASE tunerd OWNER TO tunerd` there gives it what it needs"),
    "42P01": (HostError, "a table of it is gone",
              "bring back a backup, or drop the other tables too: the next hand-in makes them, and boxes hand in anew"),
    "53100": (HostError, "its disk is full", "free some space there"),
    "53": _OTHERS,
    "55P03": _OTHERS,
    "40": _OTHERS,
    "57014": (HostError, "it takes too long", "look at what else the database does"),
    "22": _VALUES,
    "23": _VALUES,
    "42804": _VALUES,
}  # fmt: skip
