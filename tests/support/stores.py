"""An evidence store wherever a test wants it: a file, or a database."""

from __future__ import annotations

from pathlib import Path

from tunerd.fleet.database import Database
from tunerd.measure.store import BUSY_TIMEOUT_S, EvidenceStore


def open_store(
    place: str, *, writable: bool = True, wait_s: float = BUSY_TIMEOUT_S
) -> EvidenceStore:
    """The store of a path or of an address."""
    if "://" in place:
        return EvidenceStore(Database(place, writable=writable, wait_s=wait_s))
    return EvidenceStore(Path(place), writable=writable, wait_s=wait_s)
