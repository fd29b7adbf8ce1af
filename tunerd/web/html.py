"""What page and report have in common: their templates and their files, light enough for who only shows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tunerd.web.charts import draw, legend
from tunerd.web.view import NOT_ASKED
from tunerd.words import UNKNOWN, harmless

_HERE = Path(__file__).parent
STATIC = _HERE / "static"


def _harmless(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return harmless(value, keep="\n\r") if is_text else value


@cache
def environment() -> Environment:
    """Templates of reports and of the page; everything in them is escaped, and turns no text around."""
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"drawn": draw, "legend": legend}
    found.globals |= {"unknown": UNKNOWN, "not_asked": NOT_ASKED}
    return found


def static_text(name: str) -> str:
    """One of our own files."""
    return (STATIC / name).read_text(encoding="utf-8")
