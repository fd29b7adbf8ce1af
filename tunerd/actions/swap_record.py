"""Where the intent record of a swap stands, and what it says."""

from __future__ import annotations

from pathlib import Path

from tunerd.actions.context import Context
from tunerd.core.swap import RecordError, SwapRecord, record_from_json
from tunerd.errors import HostError


def record_path(ctx: Context) -> Path:
    """Where the intent record of the unit stands while a swap runs."""
    return ctx.paths.journal_dir / f"{ctx.unit}.json"


def read_record(ctx: Context) -> SwapRecord | None:
    """The intent record of the unit; None while no swap is under way or was cut short.

    Raises:
        HostError: it is damaged.
    """
    data = ctx.files.read_json(record_path(ctx))
    if data is None:
        return None
    try:
        return record_from_json(data)
    except RecordError as problem:
        raise HostError(
            f"the intent record is damaged: `{record_path(ctx)}`",
            cause=str(problem),
            state=f"`{ctx.unit_path}` was not touched",
            hint="compare the unit with its newest `.pre-*`, then remove the record",
        ) from problem
