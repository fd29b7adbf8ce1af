"""Checks rows of the evidence store as they are read: a file can be whole and what stands in it not.

SQLite keeps what it is given, whatever the type of a column. A row that does not hold what its table
may hold is left out and counted, so that one of them does not hide the others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sqlalchemy as sa

from tunerd.core.evidence import Damage
from tunerd.system.store_schema import METADATA

# The last second of the year 9999, which is the last that can be shown as a date.
_LAST_S = 253_402_300_799.0
_TIMES = frozenset({"started_s", "ended_s", "at_s", "observed_s"})
_SHOWN_LETTERS = 40


@dataclass(frozen=True, slots=True)
class BadJson:
    """What a column holds that should hold JSON and does not."""

    why: str


def read_json(text: Any) -> Any:
    """The value of a column of JSON; `BadJson` where there is none that can be used."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except (ValueError, TypeError, RecursionError) as error:
        return BadJson(str(error)[:_SHOWN_LETTERS] or type(error).__name__)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _int(text: str) -> int:
    return int(text) if math.isfinite(float(text)) else _refuse(text)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_text_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _is_origins(value: Any) -> bool:
    return isinstance(value, list) and all(_is_texts(one) and len(one) == _ORIGIN for one in value)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


_ORIGIN = 3  # words, key, who
_Check = tuple[Callable[[Any], bool], str]
_TABLE: _Check = (_is_table, "a table")
_TEXTS: _Check = (_is_texts, "a list of texts")
_JSON: Mapping[str, _Check] = {
    "fingerprints.parts": _TABLE,
    "runs.suites": _TEXTS,
    "runs.host": _TABLE,
    "arms.argv": _TEXTS,
    "arms.environment": (_is_text_table, "a table of texts"),
    "arms.origins": (_is_origins, "a list of flags with their origins"),
    "samples.accepted_by_position": (_is_counts, "a list of counts"),
    "samples.marks": _TEXTS,
    "samples.details": _TABLE,
    "summaries.figures": _TABLE,
    "verdicts.reasons": _TEXTS,
    "verdicts.details": _TABLE,
    "sweep_events.event": _TABLE,
}


def _wrong(column: sa.Column[Any], value: Any) -> str | None:
    """Why a column cannot hold this; None where it can."""
    if value is None:
        return None if column.nullable else "is missing"
    if isinstance(value, BadJson):
        return f"is no JSON: {value.why}"
    kind = column.type
    if isinstance(kind, sa.JSON):
        check, name = _JSON[f"{column.table.name}.{column.name}"]
        return None if check(value) else f"is not {name}"
    if isinstance(kind, sa.Boolean):
        return None
    if isinstance(kind, sa.Integer):
        is_right = isinstance(value, int)
    elif isinstance(kind, sa.Float):
        most = _LAST_S if column.name in _TIMES else math.inf
        is_right = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= most
    else:
        is_right = isinstance(value, str)
    return None if is_right else f"cannot be {str(value)[:_SHOWN_LETTERS]!r}"


@dataclass(slots=True)
class CheckedRows:
    """Reads rows, and counts those that it had to leave out; each row only once."""

    _seen: dict[tuple[str, int], tuple[int | None, str]] = field(default_factory=dict)

    def take(
        self,
        table: str,
        row: Mapping[Any, Any],
        read: Callable[[Mapping[Any, Any]], Any],
        *,
        run: int | None,
    ) -> Any:
        """What a row says; None where it is damaged.

        Args:
            table: Its name.
            row: The row, by names of columns.
            read: Makes a record of it; raises ValueError, KeyError or TypeError where it cannot.
            run: Which run it belongs to.
        """
        why = why_damaged(table, row)
        if why is None:
            try:
                return read(row)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                why = f"{error}"[: 2 * _SHOWN_LETTERS]
        self._seen[table, row["id"]] = (run, why)
        return None

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What was left out so far, by run, table and reason."""
        counts = Counter((run, table, why) for (table, _), (run, why) in self._seen.items())
        return tuple(Damage(run, table, why, n) for (run, table, why), n in counts.items())


def why_damaged(table: str, row: Mapping[Any, Any]) -> str | None:
    """What speaks against a row of this table, by the first column that is wrong; None if nothing."""
    for column in METADATA.tables[table].columns:
        if column.name in row and (why := _wrong(column, row[column.name])) is not None:
            return f"{column.name} {why}"
    return None
