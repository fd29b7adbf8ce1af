"""What the sections of a report share: choosing samples, legends, and charts in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunerd.core.sample import Sample
from tunerd.web.report_series import Series
from tunerd.web.report_text import figure, joined, sentence
from tunerd.web.report_view import Key

WHISKERS = " Whiskers: slowest and fastest request."


def usable(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples that may enter a figure."""
    return tuple(sample for sample in samples if sample.is_usable)


def legend_of(series: Sequence[Series], *, lines: bool = True) -> tuple[Key, ...]:
    """The configurations of a chart, drawn as lines or as bars."""
    return tuple(Key(one.label, one.colour, one.shade, is_line=lines) for one in series)


def in_words(what: str, values: Sequence[tuple[str, float | None, str]]) -> str:
    """A chart in words: what it is, and a figure for each of what it compares."""
    shown = [
        f"{label} {figure(value)} {unit}" if value is not None else f"{label} missing"
        for label, value, unit in values
    ]
    return sentence([f"{what}: {joined(shown)}", "; the table has every figure"])


def distinct(values: Iterable[str]) -> list[str]:
    """Each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def as_words(kind: str) -> str:
    """The name of a kind of text as people write it."""
    return kind.replace("_", " ")
