"""A store that SQLite finds whole, in which a column holds what no tunerd wrote there."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.integration.measure.test_store_results import Bench
from tests.support.stores import filled, queried
from tests.support.synthetic_runs import made_runs
from tunerd.cli.measure import render_csv, render_list, render_show
from tunerd.errors import TunerdError
from tunerd.measure.evidence import Damage, RunEvidence
from tunerd.measure.results import export, results, show
from tunerd.measure.store import EvidenceStore
from tunerd.web.report import report

_KINDS = {"arms": "arm", "samples": "sample", "summaries": "summary", "verdicts": "verdict"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of several runs with everything in it."""
    path = filled(tmp_path_factory.mktemp("sound") / "evidence.db", made_runs())
    queried(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def damage(sound: Path, target: Path, column: str, value: Any, *, first_only: bool) -> None:
    """A copy in which a column holds this value."""
    for left in target.parent.glob(f"{target.name}*"):
        left.unlink()
    shutil.copy(sound, target)
    what, name = column.split(".")
    table, document = ("run", "head") if what == "runs" else ("entry", "body")
    kind = f" WHERE kind = '{_KINDS[what]}'" if what in _KINDS else ""
    where = f" WHERE id = (SELECT min(id) FROM {table}{kind})" if first_only else kind  # noqa: S608
    new = "?"
    if name not in {row[1] for row in queried(target, f"PRAGMA table_info({table})")}:
        if queried(target, "SELECT json_valid(?)", value) != [(1,)]:
            value = json.dumps(str(value))
        name, new = document, f"json_set({document}, '$.{name}', json(?))"
    with contextlib.suppress(sqlite3.IntegrityError):  # the file itself refuses that one
        queried(target, f"UPDATE OR IGNORE {table} SET {name} = {new}{where}", value)  # noqa: S608


def everything_read(path: Path) -> tuple[list[RunEvidence], tuple[Damage, ...]]:
    """All of a store."""
    with EvidenceStore(path, writable=False) as store:
        found = [store.evidence(run) for run in store.runs()]
        return found, store.damage


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("samples.body", "{bad"),
        ("samples.details", "[1]"),
        ("samples.position", "abc"),
        ("summaries.figures", "[3]"),
        ("verdicts.ratio", "x"),
    ],
)
def test_one_damaged_row_is_left_out_counted_and_named_and_the_rest_is_there(
    sound: Path, tmp_path: Path, column: str, value: Any
) -> None:
    whole, none = everything_read(sound)
    damage(sound, tmp_path / "evidence.db", column, value, first_only=True)

    found, left_out = everything_read(tmp_path / "evidence.db")

    table = column.split(".", maxsplit=1)[0]
    assert none == ()
    assert [(one.table, one.n_rows) for one in left_out] == [(table, 1)]
    assert column.endswith(".body") or column.split(".")[1] in left_out[0].text
    assert left_out[0].run is not None
    assert rows_of(found, table) == rows_of(whole, table) - 1
    assert [one.run.number for one in found] == [one.run.number for one in whole]


def rows_of(evidence: list[RunEvidence], table: str) -> int:
    counts = {
        "samples": lambda one: sum(len(rows) for rows in one.samples.values()),
        "summaries": lambda one: len(one.summaries),
        "verdicts": lambda one: len(one.verdicts),
    }
    return sum(counts[table](one) for one in evidence)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


HOSTILE: tuple[tuple[str, Any], ...] = (
    ("runs.kind", b"\xff\xfe"), ("runs.started_s", "abc"), ("runs.ended_s", float("inf")), ("runs.outcome", "x"),
    ("runs.head", "[" * 5000), ("runs.suites", "[[1, 2, 3]]"), ("arms.body", '{"schema": 9}'),
    ("arms.fingerprint", "[1]"), ("samples.is_usable", "x"), ("samples.timings", '{"a": 1e999}'),
    ("samples.marks", "null"), ("summaries.name", 2**63 - 1), ("summaries.figures", "[3]"), ("verdicts.ratio", -1e300),
)  # fmt: skip


def test_whatever_a_column_holds_results_and_report_show_the_rest(
    sound: Path, bench: Bench
) -> None:
    context = bench.context()
    for column, value in HOSTILE:
        damage(sound, context.paths.evidence, column, value, first_only=False)
        listed = results(context)
        json.dumps(dict(listed.payload), allow_nan=False)
        list(render_list(listed.payload))
        for row in listed.payload["results"]:
            shown = show(context, row["run"])
            list(render_show(shown.payload))
            list(render_csv(export(context, [row["run"]]).payload))
        with contextlib.suppress(TunerdError):
            report(context, ())
