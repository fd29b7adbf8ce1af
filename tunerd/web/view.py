"""What every result is shown as: sections of facts, tables and charts, for terminal, page and report alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerd.web.charts import Plot


Cell = str | None
"""A text; None is a figure that is missing, and is shown as such."""
Facts = tuple[tuple[str, Cell], ...]
"""Names and what they are."""


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column; numbers stand on the right."""

    title: str
    is_number: bool = True


def heads(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers; of words where the title begins with `~`."""
    return tuple(Column(one.removeprefix("~"), not one.startswith("~")) for one in titles)


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row names it, and leads to its link. `foot` are rows of totals."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    foot: tuple[tuple[Cell, ...], ...] = ()
    links: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart under its title."""

    name: str
    title: str
    plot: Plot
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its answer; `name` is its anchor."""

    name: str
    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    facts: Facts = ()


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A number worth reading first."""

    value: str
    unit: str
    label: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sentence that a comparison ended with, what its letters mean, and what else spoke for it."""

    sentence: str
    names: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]
    basis: str


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which conditions one configuration was measured."""

    label: str
    colour: str
    shade: int
    state: str | None
    state_texts: tuple[str, ...]
    facts: tuple[tuple[str, Cell], ...]
    differences: tuple[str, ...]
    flags: Table | None
    command: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report."""

    title: str
    subtitle: str
    made: str
    verdicts: tuple[Verdict, ...]
    sentences: tuple[str, ...]
    figures: tuple[KeyFigure, ...]
    sections: tuple[Section, ...]
    conditions: tuple[Conditions, ...]
    left_out: Section
    runs: Table

    @property
    def all_sections(self) -> tuple[Section, ...]:
        """The questions, and what was left out of their answers."""
        return (*self.sections, self.left_out)

    @property
    def charts(self) -> Sequence[Chart]:
        """Every chart, in order."""
        return [chart for section in self.sections for chart in section.charts]


NO_BREAK = "\u00a0"
NOT_ASKED = "n/a"
"""Where a figure cannot be: nothing is missing."""
_MS_PER_S = 1000


def figure(value: float | None, digits: int = 1) -> str | None:
    """`1,234.5`; None where there is none."""
    return None if value is None else f"{value:,.{digits}f}"


def percent(ratio: float | None, digits: int = 1) -> str | None:
    """`87.5 %`, in one line; None where there is none."""
    return None if ratio is None else f"{ratio * 100:.{digits}f}{NO_BREAK}%"


def seconds(ms: float | None, digits: int = 1) -> str | None:
    """Milliseconds as seconds, without the unit."""
    return None if ms is None else figure(ms / _MS_PER_S, digits)


def tokens(n: float | None) -> str | None:
    """`43,000`; None where there is none."""
    return None if n is None else f"{n:,.0f}"


def span(low: float | None, high: float | None, digits: int = 1) -> str | None:
    """`39.1 to 48.9`; None where an end is missing."""
    if low is None or high is None:
        return None
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def counted(n: int, one: str, many: str | None = None) -> str:
    """`1 sample`, `5 samples`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def joined(words: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    known = list(words)
    if len(known) < 2:  # noqa: PLR2004
        return "".join(known)
    return f"{', '.join(known[:-1])} {last} {known[-1]}"


def sentence(parts: Sequence[str]) -> str:
    """Parts as one sentence with its full stop; names such as `ik-b4400` keep their small letter."""
    text = " ".join(part for part in parts if part)
    is_word = text.split(" ", 1)[0].rstrip(":,").isalpha()
    begin = text[:1].upper() if is_word else text[:1]
    return begin + text[1:] + ("" if text.endswith((".", "?")) else ".")
