"""The store that boxes share, on PostgreSQL: evidence handed in to it, once, and what that knows of all boxes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import ArgumentError, DBAPIError, StatementError

from tunerd import __version__
from tunerd.app import Context
from tunerd.errors import Busy, HostError, TunerdError, UsageError
from tunerd.machine.files import lock
from tunerd.measure import store
from tunerd.measure.store import (
    EntryKind,
    EvidenceStore,
    StoreIsEmpty,
    StoreIsOld,
    entry,
    run,
)
from tunerd.production.status import HAND_IN_EVERY_S, HandedIn, status
from tunerd.records import plain, read_or_none
from tunerd.result import ActionResult, Message, note, warning
from tunerd.words import all_known

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
# What boxes of a class tell each other of a study, as documents.
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


def _begin(connection: sa.Connection) -> None:
    store.METADATA.create_all(connection)
    SHARED.create_all(connection, tables=[box, origin])


STEPS: Mapping[int, store.Step] = {
    1: _begin,
    2: lambda connection: SHARED.create_all(connection, tables=[told]),
}
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
# How soon the server notices that a box is gone, so that what it claimed returns: within a minute.
_NOTICING = " -c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
# What only a connection of our own has: a pooler that gives out its own drops what was asked for at the start.
# Seen of PgBouncer 1.18; in its mode `transaction` two boxes then hold the same lock at once.
_OWN = "tunerd.own_connection"
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
        steps: Mapping[int, store.Step] = STEPS,
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
        self._limit_s = limit_s
        self._options = (
            f"-c lock_timeout={wait_s * 1000:.0f} -c statement_timeout={limit_s * 1000:.0f}"
            f" -c idle_in_transaction_session_timeout={limit_s * 1000:.0f}{_NOTICING} -c {_OWN}=on"
            f"{'' if writable else ' -c default_transaction_read_only=on'}"
        )
        self._connections: list[psycopg.Connection[Any]] = []
        engine = partial(
            sa.create_engine, "postgresql+psycopg://", creator=self._connect, pool_pre_ping=True,
            hide_parameters=True,
        )  # fmt: skip
        self._engine = engine(json_serializer=store.json_text, json_deserializer=store.json_value)
        # One connection, which has the locks of what is claimed.
        self._claims = engine(pool_size=1, max_overflow=0, isolation_level="AUTOCOMMIT")
        try:
            _, self._given = self._engine.dialect.create_connect_args(self._url)
        except ArgumentError as error:
            raise HostError(
                f"the options of {self.name} in store.url cannot be read", cause=str(error), state=_KEPT,
                hint="several hosts in store.url are `?host=a:5432&host=b:5432`",
            ) from error  # fmt: skip
        try:
            with self.reading() as connection:  # an error where it is not ours
                connection.execute(sa.select(sa.func.current_setting(_OWN)))
            store.bring_up_to_date(self.name, steps, self.reading, self.writing, writable=writable)
        except TunerdError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it, and of what is claimed."""
        self._engine.dispose()
        self._claims.dispose()

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

    @contextlib.contextmanager
    def claiming(self) -> Iterator[sa.Connection]:
        """A connection whose advisory locks hold until this is called again, or this process or the way to it ends.

        Raises:
            HostError, Busy: as `writing`.
        """
        with self._bounded("write"), self._claims.connect() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_unlock_all()))
            yield connection

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg

        wanted = {**_CONNECTING, **self._given}
        wanted["options"] = f"{self._options} {self._given.get('options', '')}".rstrip()
        made = psycopg.connect(**wanted)
        self._connections = [*(one for one in self._connections if not one.closed), made]
        return made

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
                    hint="check the database, and the network to it",
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
    signs = {"42704": ("unsupported startup parameter",), "28": ("authentication", "pg_hba.conf"), "SSL": ("SSL", "certificate"),
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
_AWAY = (HostError, "it cannot be reached", "check the database, and the network to it")
_VALUES = (Refused, "it refuses these values", "`tunerd results show` here says what they are")
_OTHERS = (Busy, "it is busy with other work", "wait a while, then try again")
# By the beginning of SQLSTATE; the first that fits.
# Source: PostgreSQL's documentation, appendix A (error codes).
_SAID: Mapping[str, tuple[type[TunerdError], str, str]] = {
    "SSL": (HostError, "TLS is refused", "`sslmode=` and `sslrootcert=` in store.url, as libpq takes them"),
    "42704": (HostError, "a pooler of connections, such as PgBouncer, stands before it",
               "host and port in store.url have to be PostgreSQL's own: locks and limits belong to a connection"),
    "08": _AWAY,
    "57P": _AWAY,
    "25P03": _AWAY,
    "28": (HostError, "it does not let this account in", _ACCOUNT),
    "3D000": (HostError, "there is no such database", "`createdb -O tunerd tunerd` there makes it"),
    "25006": (HostError, "it is read-only", _STANDBY),
    "42501": (HostError, "this account may not do that",
              "`ALTER DATABASE tunerd OWNER TO tunerd` there gives it what it needs"),
    "42P01": (HostError, "one of its tables is missing",
              "restore a backup, or drop the other tables too: the next hand-in creates them, and boxes hand everything in again"),
    "53100": (HostError, "its disk is full", "free some space there"),
    "53": _OTHERS,
    "55P03": _OTHERS,
    "40": _OTHERS,
    "57014": (HostError, "it takes too long", "check what else the database is doing"),
    "22": _VALUES,
    "23": _VALUES,
    "42804": _VALUES,
}  # fmt: skip


_SILENT_S = 3 * HAND_IN_EVERY_S
_CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStatus:
    """What a box tells of itself; its clock is left out: `up_s` is how long its unit had run [s].

    `mark` is another one each time, by which a box knows what it told itself. Where somebody else told the last
    one, `twin` is their name: whoever copies a disk copies the id too.
    """

    unit: str | None = None
    active: str | None = None
    health: str | None = None
    profile: str | None = None
    generation: int | None = None
    up_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    drift: tuple[str, ...] | None = None
    problem: str | None = None
    tunerd_version: str | None = None
    mark: str | None = None
    twin: str | None = None


def opened(ctx: Context, *, writable: bool) -> Database:
    """The store that this box shares with others.

    Raises:
        UsageError: none is set.
        HostError, Busy: as `Database`.
    """
    return Database(_url(ctx), writable=writable)


def _url(ctx: Context) -> str:
    url = ctx.settings.store.url
    if url is None:
        raise UsageError(
            "no shared store is set",
            state="nothing was touched",
            hint="`tunerd settings set store.url postgresql+psycopg://tunerd@db.lan/tunerd` (docs/fleet.md)",
        )
    return url


def hand_in(ctx: Context) -> ActionResult:
    """Hand in what the shared store does not have yet, and what serves here.

    May be ended at any moment, and repeated: the database itself knows what it has.

    Raises:
        UsageError: no shared store is set.
        HostError: it cannot be reached or used; what it lacks is handed in the next time.
        Busy: another process hands in, or others keep the database.
    """
    url = _url(ctx)
    begun_s, at_work = ctx.clock.now_s(), ctx.paths.handed_in.with_suffix(".lock")
    with lock(at_work, purpose="fleet hand-in", since=ctx.now_text()):
        try:
            result = _hand_in(ctx)
        except TunerdError as problem:
            with contextlib.suppress(HostError):
                last = ctx.files.recall(HandedIn, ctx.paths.handed_in) or HandedIn()
                ctx.files.keep(ctx.paths.handed_in, replace(last, problem=problem.words))
            raise
        ctx.files.keep(ctx.paths.handed_in, HandedIn(at_s=begun_s, url=url))
    return result


def _hand_in(ctx: Context) -> ActionResult:
    counts, messages = {"runs": 0, "entries": 0, "left_out": 0}, list[Message]()
    with contextlib.closing(opened(ctx, writable=True)) as database:
        own_id = box_id(ctx)
        _tell_of_box(ctx, database, own_id)
        with store.reading(ctx) as local:
            if local is not None:
                _hand_in_runs(ctx, database, local, own_id, counts, messages)
    payload = {"box": own_id, "name": _name(ctx), **counts}
    return ActionResult("fleet hand-in", payload, tuple(messages), has_acted=True)


def _name(ctx: Context) -> str:
    return ctx.settings.store.box or socket.gethostname()


def box_id(ctx: Context) -> str:
    """Who this box is: made once, by chance.

    Raises:
        Busy: another process makes it at this moment.
        HostError: it cannot be read or written.
    """
    found = _own_file(ctx).get("id")
    if not found:
        with lock(ctx.paths.box.with_suffix(".lock"), purpose="box id", since=ctx.now_text()):
            found = _own_file(ctx).get("id") or uuid.uuid4().hex
            ctx.files.write_json(ctx.paths.box, {"id": found})
    return str(found)


def _own_file(ctx: Context) -> Mapping[str, Any]:
    known = ctx.files.read_json(ctx.paths.box)
    return known if isinstance(known, dict) else {}


def _tell_of_box(ctx: Context, database: Database, box_id: str) -> None:
    """The heartbeat: this box with its card, its engine and what serves, and that it was heard of now."""
    try:
        found: Mapping[str, Any] = status(ctx).payload
        problem = None
    except TunerdError as error:
        found, problem = {}, error.words
    serving, own = ctx.deployed(), _own_file(ctx)
    since_s, cards = found.get("since_s"), found.get("vram")
    is_up = found.get("active") == "active"
    told = BoxStatus(
        **{name: found.get(name) for name in ("unit", "active", "health", "profile", "generation")},
        up_s=max(0.0, ctx.clock.now_s() - since_s) if is_up and since_s is not None else None,
        drift=tuple(one["code"] for one in found["drift"]) if found else None,
        problem=problem,
        tunerd_version=__version__,
        # Kept until it is told: whether it was may not be known.
        mark=own.get("next") or uuid.uuid4().hex,
    )
    ctx.files.write_json(ctx.paths.box, {**own, "id": box_id, "next": told.mark})
    row = {
        "name": _name(ctx),
        "card": ", ".join(str(card["name"]) for card in cards) if cards else None,
        "vram_mib": sum(all_known(card["total_mib"] for card in cards or ())) or None,
        "engine": found.get("engine"),
        "engine_sha256": None if serving is None else serving.engine_sha256,
        "seen_at": sa.func.clock_timestamp(),
        "status": plain(told),
    }
    chosen = sa.select(box.c.name, box.c.status).where(box.c.id == box_id)
    with database.writing() as connection:
        before = connection.execute(chosen).one_or_none()
        last = None if before is None else read_or_none(BoxStatus, before.status)
        if before and last and last.mark not in {None, own.get("told"), own.get("next")}:
            row["status"] = plain(replace(told, twin=before.name))
        put = insert(box).values(id=box_id, **row)
        connection.execute(put.on_conflict_do_update(index_elements=[box.c.id], set_=row))
    ctx.files.write_json(ctx.paths.box, {"id": box_id, "told": told.mark})


def _local_id(row: Mapping[Any, Any]) -> str:
    """What tells a run of this box from every other: a file that is begun anew numbers from 1 again."""
    return f"{row['id']}-{row['started_s']}"


def _lacking(database: Database, local: EvidenceStore, box_id: str) -> list[Mapping[Any, Any]]:
    """This box's runs, oldest first, of which something is not in the shared store."""
    last = sa.select(sa.func.max(entry.c.id)).where(entry.c.run_id == run.c.id).scalar_subquery()
    with local.reading() as connection:
        chosen = sa.select(run, last.label("last_entry")).order_by(run.c.id)
        rows = connection.execute(chosen).mappings().all()
    with database.reading() as connection:
        chosen = sa.select(origin.c.local_id, origin.c.last_entry, run.c.outcome, run.c.ended_s)
        known = connection.execute(chosen.join(run).where(origin.c.box_id == box_id))
        there = {one.local_id: tuple(one)[1:] for one in known}

    def lacks(row: Mapping[Any, Any]) -> bool:
        """Also the last entry here may be before that which was handed in: old ones are dropped."""
        last, *end = there.get(_local_id(row), (-1, None, None))
        return last < (row["last_entry"] or 0) or end != [row["outcome"], row["ended_s"]]

    return [row for row in rows if lacks(row)]


def _hand_in_runs(
    ctx: Context, database: Database, local: EvidenceStore, box_id: str, counts: dict[str, int],
    messages: list[Message],
) -> None:  # fmt: skip
    """Run by run, some hundred entries at a time."""
    for row in _lacking(database, local, box_id):
        ctx.say(f"handing in run {row['id']}")
        n_more = _CHUNK
        try:
            while n_more == _CHUNK:
                with database.writing() as connection:
                    n_more = _hand_in_some(connection, local, box_id, row)
                counts["entries"] += n_more
            counts["runs"] += 1
        except Refused as problem:
            counts["left_out"] += 1
            messages.append(warning("left-out", f"run {row['id']}: {problem.words}"))


def _hand_in_some(
    connection: sa.Connection, local: EvidenceStore, box_id: str, row: Mapping[Any, Any]
) -> int:
    """Entries, and how far this box is now, in one transaction: after it both are there, or neither."""
    mine = (origin.c.box_id == box_id) & (origin.c.local_id == _local_id(row))
    there = sa.select(origin.c.run_id, origin.c.last_entry).where(mine)
    number, after = connection.execute(there).one_or_none() or (None, 0)
    end = {name: row[name] for name in ("ended_s", "outcome", "reason")}
    if number is None:
        began = {name: row[name] for name in ("kind", "started_s", "head")}
        number = connection.scalar(run.insert().values(**began, **end).returning(run.c.id))
    else:
        connection.execute(run.update().where(run.c.id == number).values(**end))
    wanted = entry.select().where(entry.c.run_id == row["id"], entry.c.id > after)
    with local.reading() as reading:
        found = reading.execute(wanted.order_by(entry.c.id).limit(_CHUNK)).mappings().all()
    if found:
        kept = ("kind", "name", "is_usable", "body")
        rows = [{"run_id": number, **{name: one[name] for name in kept}} for one in found]
        connection.execute(entry.insert(), rows)
        after = found[-1]["id"]
    so_far = {"last_entry": after, "handed_in_at": sa.func.clock_timestamp()}
    put = insert(origin).values(run_id=number, box_id=box_id, local_id=_local_id(row), **so_far)
    connection.execute(put.on_conflict_do_update(index_elements=[origin.c.run_id], set_=so_far))
    return len(found)


def fleet_status(ctx: Context) -> ActionResult:
    """Every box that the shared store knows: its card, what serves, its evidence, and when it was heard of.

    Ages are by the database's clock.

    Raises:
        UsageError: no shared store is set.
        HostError, Busy: it cannot be read.
    """
    try:
        with contextlib.closing(opened(ctx, writable=False)) as database:
            rows = _boxes(database)
    except StoreIsEmpty:
        rows = []
    except StoreIsOld as old:
        old.hint = "`tunerd fleet hand-in` on a box brings it up to date"
        raise
    messages = [
        warning("silent", f"{row['name']} is silent: last heard from {row['seen_age_s']:.0f} s ago",
                f"`tunerd fleet hand-in` there says why; a box reports every {HAND_IN_EVERY_S:.0f} s")
        for row in rows if row["is_silent"]
    ]  # fmt: skip
    messages += [
        warning("same-box", f"{row['name']} and {row['twin']} tell as one box: one is a copy of the other's disk, or "
                "its STATE came from a backup", "remove `box.json` from the STATE of a copy")
        for row in rows if row["twin"] is not None
    ]  # fmt: skip
    if not rows:
        text = "no box has handed anything in yet"
        messages.append(note("nothing-handed-in", text, "`tunerd fleet hand-in` on each box"))
    return ActionResult("fleet status", {"boxes": rows}, tuple(messages))


def _boxes(database: Database) -> list[dict[str, Any]]:
    """As scripts read them, by name."""

    def known(moment: Any) -> Any:
        """Between the beginning of time and now; a row may say anything, infinity too."""
        return sa.func.greatest(
            sa.func.least(moment, sa.func.statement_timestamp()), sa.func.to_timestamp(0)
        )

    def age_s(moment: Any) -> Any:
        passed = sa.func.statement_timestamp() - known(moment)
        return sa.cast(sa.extract("epoch", passed), sa.Double)

    at_s = sa.cast(sa.extract("epoch", known(box.c.seen_at)), sa.Double)
    is_sample = (entry.c.run_id == origin.c.run_id) & (entry.c.kind == EntryKind.SAMPLE)
    handed_in_s = sa.func.min(age_s(origin.c.handed_in_at)).filter(origin.c.run_id.is_not(None))
    chosen = (
        sa.select(
            *(one for one in box.c if one is not box.c.seen_at), at_s.label("seen_s"),
            age_s(box.c.seen_at).label("seen_age_s"), handed_in_s.label("evidence_age_s"),
            sa.func.count(origin.c.run_id.distinct()).label("runs"),
            sa.func.count(entry.c.id).label("samples"),
        )
        .select_from(box.outerjoin(origin).outerjoin(entry, is_sample))
        .group_by(box.c.id).order_by(box.c.name)
    )  # fmt: skip
    with database.reading() as connection:
        rows = connection.execute(chosen).mappings().all()
    return [_row(dict(row)) for row in rows]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    told = read_or_none(BoxStatus, row.pop("status")) or BoxStatus(problem="damaged")
    since_s = None if told.up_s is None else row["seen_s"] - min(told.up_s, row["seen_s"])
    is_silent = row["seen_age_s"] > _SILENT_S
    return {**row, "is_silent": is_silent, **plain(told), "serving_since_s": since_s}
