"""The files of the page: styles, scripts, and plotly's script from its Python package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tunerd.web.report import plotly_script
from tunerd.web.report_theme import css_variables

_FOLDER = Path(__file__).parent / "static"
_KEPT = "public, max-age=31536000, immutable"  # the address names the version
_STYLE = "text/css; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"


async def static_file(request: Request) -> Response:
    """One of a closed list of files."""
    name = request.path_params["name"]
    if name == "page.css":
        return _kept(_style(), _STYLE)
    if name in {"page.js", "live.js", "report.js"}:
        return _kept(_text(name), _SCRIPT)
    if name == "plotly.js":
        return _kept(plotly_script(), _SCRIPT)
    return PlainTextResponse("there is no such file", 404)


def _kept(text: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers={"cache-control": _KEPT})


@cache
def _style() -> str:
    return css_variables() + _text("report.css") + _text("page.css")


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
