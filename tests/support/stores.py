"""An evidence store wherever a test wants it: a file, or a database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.support.synthetic_runs import MadeRun
from tunerd.fleet.shared import Database
from tunerd.measure.store import BUSY_TIMEOUT_S, EvidenceStore


def open_store(
    place: str, *, writable: bool = True, wait_s: float = BUSY_TIMEOUT_S
) -> EvidenceStore:
    """The store of a path or of an address."""
    if "://" in place:
        return EvidenceStore(Database(place, writable=writable, wait_s=wait_s))
    return EvidenceStore(Path(place), writable=writable, wait_s=wait_s)


def queried(path: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """What a statement gives and does, by SQLite alone."""
    with closing(sqlite3.connect(path)) as plain, plain:
        return plain.execute(statement, values).fetchall()


def written(path: Path, script: Path) -> Path:
    """A database as a script makes it."""
    with closing(sqlite3.connect(path)) as plain:
        plain.executescript(script.read_text())
    return path


def filled(path: Path, runs: Iterable[MadeRun]) -> Path:
    """A store of a file with these runs."""
    with EvidenceStore(path) as store:
        for run in runs:
            run.put(store)
    return path
