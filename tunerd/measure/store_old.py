"""Takes over what a store held that tunerd 0.1 wrote, with a table for each kind of record.

Rows become documents as they are: one that was damaged is a damaged document, and told as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from tunerd.measure.answer import ClientTimes, Sample, Timings
from tunerd.measure.evidence import ArmRecord, RunRecord, SummaryRecord, VerdictRecord
from tunerd.measure.store import EntryKind, entry, run

_CHUNK = 1000
_JSON = {"suites", "host", "argv", "environment", "origins", "parts", "accepted_by_position", "marks",
         "details", "figures", "reasons", "event"}  # fmt: skip
_KINDS: Mapping[EntryKind, type[Any]] = {
    EntryKind.ARM: ArmRecord,
    EntryKind.SAMPLE: Sample,
    EntryKind.SUMMARY: SummaryRecord,
    EntryKind.VERDICT: VerdictRecord,
}
# Children first. Version 1 lacked the last three.
_TABLES = ("verdicts", "summaries", "samples", "arms", "runs", "memory_observations",
           "memory_loads", "sweep_events", "fingerprints")  # fmt: skip
_ENTRIES: Mapping[EntryKind, str] = {
    EntryKind.ARM: "SELECT arms.*, parts FROM arms LEFT JOIN fingerprints"
    " ON fingerprints.id = fingerprint_id ORDER BY arms.id",
    EntryKind.SAMPLE: "SELECT samples.*, arms.name AS arm FROM samples LEFT JOIN arms"
    " ON arms.id = arm_id ORDER BY samples.id",
    EntryKind.SUMMARY: "SELECT summaries.*, arms.name AS arm FROM summaries LEFT JOIN arms"
    " ON arms.id = arm_id ORDER BY summaries.id",
    EntryKind.VERDICT: "SELECT * FROM verdicts ORDER BY id",
    EntryKind.EVENT: "SELECT * FROM sweep_events ORDER BY id",
}
_Values = dict[str, Any]


def take_over(connection: sa.Connection) -> None:
    """Fill the tables of today from those of an older store, and drop those."""
    known = set(sa.inspect(connection).get_table_names())
    _insert(connection, run, map(_run, _rows(connection, "SELECT * FROM runs")))
    for kind, query in _ENTRIES.items():
        if kind is not EntryKind.EVENT or "sweep_events" in known:
            _insert(connection, entry, (_entry(kind, row) for row in _rows(connection, query)))
    for name in _TABLES:
        if name in known:
            connection.exec_driver_sql(f"DROP TABLE {name}")


def _rows(connection: sa.Connection, query: str) -> Iterable[_Values]:
    for row in connection.exec_driver_sql(query).mappings():
        yield {name: _value(name, value) for name, value in row.items()}


def _insert(connection: sa.Connection, table: sa.Table, rows: Iterable[_Values]) -> None:
    waiting: list[_Values] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _CHUNK:
            connection.execute(table.insert(), waiting)
            waiting.clear()
    if waiting:
        connection.execute(table.insert(), waiting)


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
    name = row["arm"] if kind is EntryKind.SAMPLE else row.get("name")
    return {
        "run_id": row["run_id"],
        "kind": kind,
        "name": None if name is None else str(name),
        "is_usable": bool(row.get("is_usable", True)),
        "body": row["event"] if kind is EntryKind.EVENT else _only(_KINDS[kind], _named(kind, row)),
    }


def _named(kind: EntryKind, row: _Values) -> _Values:
    """The columns under the names of today's fields."""
    if kind is EntryKind.ARM:
        return {**row, "fingerprint": row["parts"]}
    if kind is not EntryKind.SAMPLE:
        return row
    client = None if row["wall_ms"] is None else _only(ClientTimes, row)
    timings = _only(Timings, row) if row["has_timings"] else None
    return {**row, "case": row["case_name"], "timings": timings, "client": client}


def _only(kind: type[Any], row: _Values) -> _Values:
    return {field.name: row[field.name] for field in fields(kind) if field.name in row}
