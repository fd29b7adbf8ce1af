"""A report as one HTML file that needs nothing else: styles, script and charts are inside it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunerd import __version__
from tunerd.core.evidence import RunEvidence
from tunerd.errors import HostError
from tunerd.web import report_lengths as lengths
from tunerd.web import report_sections as sections
from tunerd.web import report_summary as summary
from tunerd.web.report_series import series_of
from tunerd.web.report_summary import Validities
from tunerd.web.report_sweep import sweep_sections
from tunerd.web.report_text import MISSING, NOT_ASKED, when
from tunerd.web.report_theme import css_variables
from tunerd.web.report_view import Report, Section

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class ReportData:
    """What a report is made of; `made_s` is when."""

    evidence: tuple[RunEvidence, ...]
    validities: Validities
    made_s: float


def report_of(data: ReportData) -> Report:
    """What the report shows."""
    series = series_of(data.evidence)
    title, subtitle = summary.title_of(data.evidence, series)
    found: Sequence[Section | None] = (
        sections.turn_times(series, data.evidence),
        sections.speed_by_kind(series),
        sections.acceptance_by_position(series, data.evidence),
        lengths.crossover(series, data.evidence),
        lengths.as_context_fills(series, data.evidence),
        sections.other_suites(series, data.evidence),
        *sweep_sections(data.evidence),
    )
    return Report(
        title=title,
        subtitle=subtitle,
        made=when(data.made_s),
        verdicts=summary.verdicts_of(data.evidence, series),
        sentences=summary.sentences_of(data.evidence, series, data.validities),
        figures=summary.figures_of(data.evidence, series),
        sections=tuple(section for section in found if section is not None),
        conditions=summary.conditions_of(data.evidence, series, data.validities),
        left_out=summary.left_out(series, data.evidence),
        runs=summary.runs_table(data.evidence),
    )


def render_report(data: ReportData) -> str:
    """The whole page.

    Raises:
        HostError: plotly's package is not installed.
    """
    report = report_of(data)
    figures = {chart.name: chart.figure for chart in report.charts}
    return (
        environment()
        .get_template("report.html")
        .render(
            report=report,
            version=__version__,
            missing=MISSING,
            not_asked=NOT_ASKED,
            style=css_variables() + _read("report.css"),
            script=_read("report.js"),
            plotly=plotly_script() if figures else "",
            figures=script_json(figures),
        )
    )


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def plotly_script() -> str:
    """plotly's script, from its Python package, which is not imported for it.

    Raises:
        HostError: the package is not installed, or has no script.
    """
    spec = importlib.util.find_spec("plotly")
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(folders or ("",)))) / "package_data" / "plotly.min.js"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HostError(
            "cannot draw charts: plotly's script is not there",
            cause=f"{path}: {error.strerror}",
            hint="pip install plotly",
        ) from error
    # Inside of a script element these would end it, or change how it is read.
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def environment() -> Environment:
    """Templates of reports and of the page; everything in them is escaped."""
    return Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _read(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8")
