"""Bars for the terminal: each part has a mark of its own, so that colour says nothing alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

Part = tuple[str, float]  # name and size
_MARKS = (("█", "cyan"), ("▒", "magenta"), ("░", "yellow"), ("▓", "green"))
_WIDTH = 40


def bar(parts: Sequence[Part], *, largest: float, width: int = _WIDTH) -> str:
    """One bar; `largest` is the size that fills the whole width."""
    text = Text()
    edges = [0.0]
    for _, size in parts:
        edges.append(edges[-1] + size)
    scale = width / largest if largest > 0 else 0.0
    for (mark, colour), (begin, end) in zip(_MARKS, pairwise(edges), strict=False):
        text.append(mark * (round(end * scale) - round(begin * scale)), style=colour)
    text.append(" " * (width - text.cell_len))
    return _plain_or_coloured(text)


def legend(names: Sequence[str]) -> str:
    """Which mark is which part."""
    text = Text()
    for name, (mark, colour) in zip(names, _MARKS, strict=False):
        text.append(mark, style=colour)
        text.append(f" {name}  ")
    return _plain_or_coloured(text).rstrip()


def histogram(counts: Sequence[tuple[str, int]], *, width: int = _WIDTH) -> Iterator[str]:
    """A line for each bin."""
    most = max((count for _, count in counts), default=0)
    label = max((len(name) for name, _ in counts), default=0)
    for name, count in counts:
        yield f"{name.rjust(label)}  {bar([(name, count)], largest=most, width=width)}  {count}"


def _plain_or_coloured(text: Text) -> str:
    console = Console(file=sys.stdout)  # which heeds NO_COLOR
    if not console.is_terminal:
        return text.plain
    with console.capture() as capture:
        console.print(text, end="", soft_wrap=True)
    return capture.get()
