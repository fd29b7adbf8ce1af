"""`tunerd history`: generations, what each deployed, and how two of them differ."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.generation import HistoryEntry
from tunerd.core.result import ActionResult, warning
from tunerd.core.unit_diff import unified_diff
from tunerd.errors import UsageError

DEFAULT_LIMIT = 20


def history(ctx: Context, *, limit: int | None = DEFAULT_LIMIT) -> ActionResult:
    """Generations, newest first; `limit` None for all of them."""
    total = len(ctx.generations.numbers())
    rows = [summary_json(entry) for entry in islice(ctx.generations.entries(), limit)]
    messages = [
        warning("damaged", f"the record of generation {number} cannot be read",
                f"`tunerd history show {number}` says why")
        for number in sorted(ctx.generations.damaged)
    ]  # fmt: skip
    return ActionResult("history", {"generations": rows, "total": total}, tuple(messages))


def show(ctx: Context, number: int) -> ActionResult:
    """Everything that is kept of one generation.

    Raises:
        UsageError: there is no such generation.
    """
    entry = _entry(ctx, number)
    text = ctx.generations.unit_text(number)
    payload = {
        "generation": asdict(entry.generation),
        "ending": {**asdict(entry.ending), "outcome": str(entry.ending.outcome)},
        "unit": None if text is None else text.decode("utf-8", "replace"),
    }
    return ActionResult("history show", payload)


def diff(ctx: Context, one: int, other: int) -> ActionResult:
    """How the units of two generations differ.

    Raises:
        UsageError: one of them does not exist.
    """
    texts = []
    for number in (one, other):
        _entry(ctx, number)
        content = ctx.generations.unit_text(number)
        texts.append(None if content is None else content.decode("utf-8", "replace"))
    text = unified_diff(texts[0], texts[1], ctx.unit)
    text = text.replace("(live)", f"generation {one}", 1).replace(
        "(planned)", f"generation {other}", 1
    )
    return ActionResult("history diff", {"from": one, "to": other, "diff": text})


def summary_json(entry: HistoryEntry) -> dict[str, Any]:
    """One line of history as scripts read it."""
    generation, ending = entry.generation, entry.ending
    return {
        "number": generation.number,
        "created_s": generation.created_s,
        "reason": generation.reason,
        "profile": generation.profile,
        "engine": generation.engine,
        "outcome": str(ending.outcome),
        "cause": ending.cause,
        "detail": ending.detail,
        "without_service_s": ending.without_service_s,
        "replaced": generation.replaced_backup
        or ("no unit file" if generation.replaced_absent else None),
        "from_generation": generation.from_generation,
    }


def _entry(ctx: Context, number: int) -> HistoryEntry:
    entry = ctx.generations.read(number)
    if entry is None:
        raise UsageError(
            f"there is no generation {number}", hint="`tunerd history` lists what there is"
        )
    return entry
