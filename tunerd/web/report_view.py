"""What a report shows, as values: the templates put them into HTML and decide nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | None
"""A text; None is a figure that is missing, and is shown as such."""


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column; numbers stand on the right."""

    title: str
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row names it. `foot` are rows of totals."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    foot: tuple[tuple[Cell, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a label, and the colour and shade by which it is drawn."""

    label: str
    colour: str
    shade: int = 0
    is_line: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: the figure that a script draws, and what it shows in words for who does not see it."""

    name: str
    title: str
    figure: Mapping[str, Any]
    alternative: str
    legend: tuple[Key, ...]
    note: str | None = None

    @property
    def height_px(self) -> int:
        """Room to keep before it is drawn."""
        height: int = self.figure["layout"]["height"]
        return height


@dataclass(frozen=True, slots=True)
class Section:
    """One question that the report answers; `name` is its anchor."""

    name: str
    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


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
