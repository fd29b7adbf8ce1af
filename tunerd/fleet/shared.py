"""Evidence that is handed in to the shared store, once, and what that knows of all boxes."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.dialects.postgresql import insert

from tunerd import __version__
from tunerd.app import Context
from tunerd.errors import HostError, TunerdError, UsageError
from tunerd.fleet.database import Database, Refused, box, origin
from tunerd.machine.files import lock
from tunerd.measure.store import (
    EntryKind,
    EvidenceStore,
    StoreIsEmpty,
    StoreIsOld,
    entry,
    open_to_read,
    run,
)
from tunerd.production.status import HAND_IN_EVERY_S, HandedIn, status
from tunerd.records import plain, read_or_none
from tunerd.result import ActionResult, Message, note, warning
from tunerd.words import all_known

_SILENT_S = 3 * HAND_IN_EVERY_S
_CHUNK = 500
_LOCAL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStatus:
    """What a box tells of itself; its clock is left out: `up_s` is how long its unit had run [s]."""

    unit: str | None = None
    active: str | None = None
    health: str | None = None
    profile: str | None = None
    generation: int | None = None
    up_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    drift: tuple[str, ...] | None = None
    problem: str | None = None
    tunerd_version: str | None = None


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
    _url(ctx)
    at_work = ctx.paths.handed_in.with_suffix(".lock")
    with lock(at_work, purpose="fleet hand-in", since=ctx.now_text()):
        try:
            result = _hand_in(ctx)
        except TunerdError as problem:
            with contextlib.suppress(HostError):
                last = ctx.files.recall(HandedIn, ctx.paths.handed_in) or HandedIn()
                _keep(ctx, HandedIn(at_s=last.at_s, problem=problem.words))
            raise
        _keep(ctx, HandedIn(at_s=ctx.clock.now_s(), problem=None))
    return result


def _keep(ctx: Context, how: HandedIn) -> None:
    ctx.files.write_json(ctx.paths.handed_in, plain(how))


def _hand_in(ctx: Context) -> ActionResult:
    counts, messages = {"runs": 0, "entries": 0, "left_out": 0}, list[Message]()
    with contextlib.closing(opened(ctx, writable=True)) as database:
        own_id = box_id(ctx)
        _tell_of_box(ctx, database, own_id)
        local = open_to_read(ctx.paths.evidence, check=False, wait_s=_LOCAL_WAIT_S)
        if local is not None:
            with local:
                _hand_in_runs(ctx, database, local, own_id, counts, messages)
    payload = {"box": own_id, "name": _name(ctx), **counts}
    return ActionResult("fleet hand-in", payload, tuple(messages), has_acted=True)


def _name(ctx: Context) -> str:
    return ctx.settings.store.box or socket.gethostname()


def box_id(ctx: Context) -> str:
    """Who this box is: made once, by chance."""
    known = ctx.files.read_json(ctx.paths.box)
    if isinstance(known, dict) and isinstance(known.get("id"), str):
        return str(known["id"])
    made = uuid.uuid4().hex
    ctx.files.write_json(ctx.paths.box, {"id": made})
    return made


def _tell_of_box(ctx: Context, database: Database, box_id: str) -> None:
    """The heartbeat: this box with its card, its engine and what serves, and that it was heard of now."""
    try:
        found: Mapping[str, Any] = status(ctx).payload
        problem = None
    except TunerdError as error:
        found, problem = {}, error.words
    serving = ctx.deployed()
    since_s, cards = found.get("since_s"), found.get("vram")
    is_up = found.get("active") == "active"
    told = BoxStatus(
        **{name: found.get(name) for name in ("unit", "active", "health", "profile", "generation")},
        up_s=max(0.0, ctx.clock.now_s() - since_s) if is_up and since_s is not None else None,
        drift=tuple(one["code"] for one in found["drift"]) if found else None,
        problem=problem,
        tunerd_version=__version__,
    )
    row = {
        "name": _name(ctx),
        "card": ", ".join(str(card["name"]) for card in cards) if cards else None,
        "vram_mib": sum(all_known(card["total_mib"] for card in cards or ())) or None,
        "engine": found.get("engine"),
        "engine_sha256": None if serving is None else serving.engine_sha256,
        "seen_at": sa.func.clock_timestamp(),
        "status": plain(told),
    }
    with database.writing() as connection:
        put = insert(box).values(id=box_id, **row)
        connection.execute(put.on_conflict_do_update(index_elements=[box.c.id], set_=row))


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
    return [
        row
        for row in rows
        if there.get(_local_id(row)) != (row["last_entry"] or 0, row["outcome"], row["ended_s"])
    ]


def _hand_in_runs(
    ctx: Context, database: Database, local: EvidenceStore, box_id: str, counts: dict[str, int],
    messages: list[Message],
) -> None:  # fmt: skip
    for row in _lacking(database, local, box_id):
        try:
            counts["entries"] += _hand_in_run(ctx, database, local, box_id, row)
            counts["runs"] += 1
        except Refused as problem:
            counts["left_out"] += 1
            messages.append(warning("left-out", f"run {row['id']}: {problem.words}"))


def _hand_in_run(
    ctx: Context, database: Database, local: EvidenceStore, box_id: str, row: Mapping[Any, Any]
) -> int:
    """Hand in what is lacking of a run, some hundred entries at a time; how many there were."""
    ctx.say(f"handing in run {row['id']}")
    n_entries, n_more = 0, _CHUNK
    while n_more == _CHUNK:
        with database.writing() as connection:
            n_more = _hand_in_some(connection, local, box_id, row)
        n_entries += n_more
    return n_entries


def _hand_in_some(
    connection: sa.Connection, local: EvidenceStore, box_id: str, row: Mapping[Any, Any]
) -> int:
    """Entries, and how far this box is now, in one transaction: after it both are there, or neither."""
    mine = (origin.c.box_id == box_id) & (origin.c.local_id == _local_id(row))
    known = connection.execute(origin.select().where(mine)).one_or_none()
    end = {name: row[name] for name in ("ended_s", "outcome", "reason")}
    if known is None:
        began = {name: row[name] for name in ("kind", "started_s", "head")}
        made = connection.execute(run.insert().values(**began, **end)).inserted_primary_key
        number, after = int(made[0]), 0  # type: ignore[index]  # None only for many rows
        values = {"run_id": number, "box_id": box_id, "local_id": _local_id(row), "last_entry": 0}
        connection.execute(origin.insert().values(**values, handed_in_at=sa.func.clock_timestamp()))
    else:
        number, after = known.run_id, known.last_entry
        connection.execute(run.update().where(run.c.id == number).values(**end))
    wanted = entry.select().where(entry.c.run_id == row["id"], entry.c.id > after)
    with local.reading() as reading:
        found = reading.execute(wanted.order_by(entry.c.id).limit(_CHUNK)).mappings().all()
    if found:
        kept = ("kind", "name", "is_usable", "body")
        rows = [{"run_id": number, **{name: one[name] for name in kept}} for one in found]
        connection.execute(entry.insert(), rows)
        after = found[-1]["id"]
    connection.execute(
        origin.update().where(mine).values(
            last_entry=after, handed_in_at=sa.func.clock_timestamp()
        )
    )  # fmt: skip
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
        warning("silent", f"{row['name']} is silent: heard of {row['seen_age_s']:.0f} s ago",
                f"`tunerd fleet hand-in` there says why; it is heard of every {HAND_IN_EVERY_S:.0f} s")
        for row in rows if row["is_silent"]
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
    evidence = (
        sa.select(
            origin.c.box_id, sa.func.count(origin.c.run_id.distinct()).label("runs"),
            sa.func.count(entry.c.id).label("samples"),
            age_s(sa.func.max(origin.c.handed_in_at)).label("evidence_age_s"),
        ).outerjoin(entry, is_sample).group_by(origin.c.box_id).subquery()
    )  # fmt: skip
    told = (box.c.id, box.c.name, box.c.card, box.c.vram_mib, box.c.engine, box.c.engine_sha256,
            at_s.label("seen_s"), age_s(box.c.seen_at).label("seen_age_s"),
            sa.func.coalesce(evidence.c.runs, 0).label("runs"),
            sa.func.coalesce(evidence.c.samples, 0).label("samples"), evidence.c.evidence_age_s)  # fmt: skip
    chosen = sa.select(*told, box.c.status).outerjoin(evidence, evidence.c.box_id == box.c.id)
    with database.reading() as connection:
        rows = connection.execute(chosen.order_by(box.c.name)).mappings().all()
    return [_row(dict(row)) for row in rows]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    told = read_or_none(BoxStatus, row.pop("status")) or BoxStatus(problem="damaged")
    since_s = None if told.up_s is None else row["seen_s"] - min(told.up_s, row["seen_s"])
    is_silent = row["seen_age_s"] > _SILENT_S
    return {**row, "is_silent": is_silent, **plain(told), "serving_since_s": since_s}
