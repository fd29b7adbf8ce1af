"""The page: what the API says, as HTML that needs no script, and forms for what changes something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)

from tunerd import __version__
from tunerd.machine.clock import SystemClock
from tunerd.operations import JobState
from tunerd.units.text import shown_hash
from tunerd.web.app import PageRoute, build_app, read_body
from tunerd.web.charts import css_variables
from tunerd.web.front import Front
from tunerd.web.gate import GateMiddleware, Visitor
from tunerd.web.page_view import Overview, diff_lines, overview
from tunerd.web.production_view import (
    backups_table,
    flags_table,
    generation_facts,
    generations_table,
    plan_facts,
)
from tunerd.web.report import environment, sweep_facts, sweep_section
from tunerd.web.view import counted
from tunerd.web.workload_view import workload_section
from tunerd.words import format_duration, format_mib, generation_number, is_name, when

_MOST_FIELDS = 20


class NotShownError(Exception):
    """A route of the API said no; the page shows what it said."""

    def __init__(self, error: Mapping[str, Any], status: int) -> None:
        super().__init__(error["message"])
        self.error = error
        self.status = status


def wrong(message: str) -> dict[str, Any]:
    """An error of whoever asked, as the page shows it."""
    return {"code": "usage", "message": message, "cause": None, "state": "nothing was touched",
            "hint": None}  # fmt: skip


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; empty where the body is none.

    Raises:
        NotShownError: it is too large, or did not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    content = await read_body(request)
    if isinstance(content, Response):
        raise NotShownError(wrong("the form is too large, or did not come"), content.status_code)
    if kind != "application/x-www-form-urlencoded":
        raise NotShownError(wrong("that is no form"), 415)
    try:
        return dict(parse_qsl(content.decode(), max_num_fields=_MOST_FIELDS))
    except ValueError as problem:
        raise NotShownError(wrong("the form cannot be read"), 400) from problem


# What a browser may have done by a form of its own, at /do/NAME.
FORMS: Mapping[str, str] = {
    kind.replace(" ", "-"): kind
    for kind in ("apply", "rollback", "promote", "decline", "sweep start", "sweep stop")
}


def values_of(kind: str, fields: Mapping[str, str]) -> dict[str, str]:
    """What a form asks for, by the names of the API; what was left empty is not said.

    Raises:
        NotShownError: nobody said that they are sure, where that is asked.
    """
    values = {name: text for name, text in fields.items() if text and name != "token"}
    if kind == "sweep start" and values.pop("sure", None) is None:
        raise NotShownError(wrong("say that you are sure"), 400)
    return values


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
        return _kept(_static_text(name), _SCRIPT)
    return PlainTextResponse("there is no such file", 404)


def _kept(text: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers={"cache-control": _KEPT})


@cache
def _style() -> str:
    return css_variables() + _static_text("report.css") + _static_text("page.css")


@cache
def _static_text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


PLACES = (("/", "Overview"), ("/generations", "Generations"), ("/deploy", "Deploy"),
          ("/sweeps", "Sweeps"), ("/workloads", "Workload"), ("/doctor", "Doctor"), ("/jobs", "Jobs"))  # fmt: skip
_SPANS = ((1, "1 hour"), (24, "1 day"), (168, "1 week"), (720, "1 month"))
LIVE_PARTS = ("health", "now", "days")
_LEAST_LIVE_S = 2.0
_SWEEPS_A_PAGE = 50
_UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING})
Page = Callable[["Pages", Request, Visitor], Awaitable[Response]]


def build_site(front: Front) -> GateMiddleware:
    """The API and the page, behind the gate."""
    pages = Pages(front)

    def page_error(request: Request, status: int, text: str) -> Response:
        visitor = request.scope.get("tunerd.visitor")
        return pages.show("error", visitor, "", status, error=wrong(text))

    return build_app(front, page_routes(front), page_error)


def page_routes(front: Front) -> list[PageRoute]:
    """Every route of the page."""
    pages = Pages(front)
    shown: dict[str, Page] = {
        "/": _overview,
        "/live": _live,
        "/generations": _generations,
        "/generations/{number}": _generation,
        "/rollback": _rollback,
        "/deploy": _deploy,
        "/deploy/{profile}": _plan,
        "/sweeps": _sweeps,
        "/sweeps/{number}": _sweep,
        "/sweeps/{number}/promote": _promotion,
        "/sweeps/{number}/decline": _declining,
        "/workloads": _workloads,
        "/workloads/{workload}": _workload,
        "/doctor": _doctor,
        "/jobs": _jobs,
        "/jobs/{number}": _job,
    }
    return [
        *(PageRoute(path, pages.handler(page)) for path, page in shown.items()),
        *(
            PageRoute(f"/do/{name}", pages.handler(_doing(kind)), ("POST",))
            for name, kind in FORMS.items()
        ),
        PageRoute("/static/{name}", static_file),
    ]


@dataclass(frozen=True, slots=True)
class Pages:
    """Asks the API's own routes, and fills templates."""

    front: Front

    def handler(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """The page with its errors shown."""

        async def handle(request: Request) -> Response:
            visitor: Visitor = request.scope["tunerd.visitor"]
            try:
                return await page(self, request, visitor)
            except NotShownError as problem:
                return self.show("error", visitor, "", problem.status, error=problem.error)

        return handle

    async def ask(self, path: str, visitor: Visitor, query: Mapping[str, Any] | None = None,
                  **parts: Any) -> dict[str, Any]:  # fmt: skip
        """The envelope of a reading route.

        Raises:
            NotShownError: it is an error, or the query is wrong.
        """
        asked = {name: _text(value) for name, value in (query or {}).items()}
        place = {name: str(value) for name, value in parts.items()}
        answer = await self.front.read(path, visitor, place, asked)
        if answer.is_error:
            status = 404 if answer.envelope["error"]["code"] == "usage" else 503
            raise NotShownError(answer.envelope["error"], answer.status or status)
        return dict(answer.envelope)

    def show(self, template: str, visitor: Visitor | None, here: str, status: int = 200,
             **values: Any) -> Response:  # fmt: skip
        """A page from its template."""
        text = self.fill(
            template,
            **values,
            version=__version__,
            unit=self.front.facts.unit,
            visitor=visitor.name if visitor is not None else None,
            token=self.front.gate.form_token(visitor) if visitor is not None else "",
            places=PLACES,
            here=here,
        )
        return HTMLResponse(text, status)

    def fill(self, template: str, **values: Any) -> str:
        """A template with its values."""
        return environment().get_template(f"page/{template}.html").render(**values)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(request: Request) -> int:
    number = generation_number(request.path_params["number"])
    if number is None:
        raise NotShownError(wrong("there is nothing of that number"), 404)
    return number


def _name(request: Request, key: str) -> str:
    name: str = request.path_params[key]
    if not is_name(name):
        raise NotShownError(wrong("there is nothing of that name"), 404)
    return name


# Looking


async def _overview(pages: Pages, request: Request, visitor: Visitor) -> Response:
    status, values = await _watched(pages, request, visitor)
    jobs = await pages.ask("/api/jobs", visitor)
    flags = None
    if status["generation"] is not None:
        kept = await pages.ask("/api/history/{number}", visitor, number=status["generation"])
        flags = flags_table(kept["generation"]["origins"])
    running = [one for one in jobs["jobs"] if one["state"] in _UNDER_WAY]
    return pages.show(
        "overview", visitor, "/", **values, flags=flags, spans=_SPANS,
        every_s=max(_LEAST_LIVE_S, pages.front.facts.every_s),
        job=running[0] if running else None,
    )  # fmt: skip


async def _live(pages: Pages, request: Request, visitor: Visitor) -> Response:
    """The parts of the overview that change, for a script that puts them in their places."""
    _, values = await _watched(pages, request, visitor)
    made: Overview = values["view"]
    parts = {name: pages.fill(f"live_{name}", **values) for name in LIVE_PARTS}
    return JSONResponse({"title": made.health.sentence, "parts": parts})


async def _watched(
    pages: Pages, request: Request, visitor: Visitor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status, and what the parts of the overview that change are filled with."""
    hours = request.query_params.get("hours", "24")
    status = await pages.ask("/api/status", visitor)
    readings = await pages.ask("/api/readings", visitor, {"brief": True})
    telemetry = await pages.ask("/api/telemetry", visitor, {"hours": hours})
    since_s = SystemClock().now_s() - float(hours) * 3600
    telemetry["events"] = [one for one in telemetry["events"] if one["at_s"] >= since_s]
    made = overview(status, readings, telemetry, float(hours))
    return status, {
        "view": made,
        "hours": float(hours),
        "watched": readings["watched"],
    }


async def _generations(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/history", visitor, {"limit": 100})
    targets = await pages.ask("/api/rollback", visitor)
    shown = found["generations"]
    return pages.show(
        "generations", visitor, "/generations", generations=generations_table(shown),
        hidden=found["total"] - len(shown), backups=backups_table(targets["backups"]),
    )  # fmt: skip


async def _generation(pages: Pages, request: Request, visitor: Visitor) -> Response:
    number = _number(request)
    kept = await pages.ask("/api/history/{number}", visitor, number=number)
    status = await pages.ask("/api/status", visitor)
    lines: list[tuple[str, str]] = []
    if number > 1:
        try:
            path = "/api/history/{one}/diff/{other}"
            found = await pages.ask(path, visitor, one=number - 1, other=number)
            lines = diff_lines(found["diff"])
        except NotShownError:  # the one before was damaged, or is not kept any more
            number_before = 0
        else:
            number_before = number - 1
    else:
        number_before = 0
    return pages.show(
        "generation", visitor, "/generations", number=number, rows=generation_facts(kept), lines=lines,
        before=number_before, flags=flags_table(kept["generation"]["origins"]),
        text=kept["unit"] or "The unit file was removed.", is_live=number == status["generation"],
    )  # fmt: skip


async def _rollback(pages: Pages, request: Request, visitor: Visitor) -> Response:
    to = request.query_params.get("to")
    target = await pages.ask("/api/rollback/preview", visitor, {"to": to} if to else {})
    return pages.show(
        "rollback", visitor, "/generations", target=target, to=to or "",
        messages=target["messages"], lines=diff_lines(target["diff"]),
        shown=shown_hash(target["diff"]),
    )  # fmt: skip


async def _deploy(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/profiles", visitor)
    status = await pages.ask("/api/status", visitor)
    return pages.show(
        "deploy", visitor, "/deploy", profiles=found["profiles"], live=status["profile"],
        messages=found["messages"],
    )  # fmt: skip


async def _plan(pages: Pages, request: Request, visitor: Visitor) -> Response:
    profile = _name(request, "profile")
    plan = await pages.ask("/api/plan/{profile}", visitor, {"explain": True}, profile=profile)
    memory = plan["memory"]
    needs = ((one["name"], f"{format_mib(one['worst_mib'])} of {format_mib(one['free_mib'])} free")
             for one in memory["devices"])  # fmt: skip
    rows = (*plan_facts(plan), ("memory", memory["verdict"]), *needs)
    flags = [(one["flag"], one["key"], one["origin"]) for one in plan["explain"]]
    return pages.show(
        "plan", visitor, "/deploy", plan=plan, rows=rows, messages=plan["messages"],
        lines=diff_lines(plan["diff"]), flags=flags_table(flags),
        shown=shown_hash(plan["diff"]),
    )  # fmt: skip


async def _sweeps(pages: Pages, request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/sweeps", visitor)
    begin = generation_number(request.query_params.get("from", "")) or 0
    end = begin + _SWEEPS_A_PAGE
    return pages.show(
        "sweeps", visitor, "/sweeps", sweeps=found["sweeps"][begin:end],
        messages=found["messages"], begin=begin, older=end if len(found["sweeps"]) > end else None,
    )  # fmt: skip


async def _sweep(pages: Pages, request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/sweeps/{sweep}", visitor, sweep=_number(request))
    section = sweep_section(found["sweep"], found["page"], found) if found["arms"] else None
    return pages.show(
        "sweep", visitor, "/sweeps", sweep=found, rows=sweep_facts(found), section=section,
        is_open=_is_open(found),
    )  # fmt: skip


def _is_open(sweep: Mapping[str, Any]) -> bool:
    """Whether it proposes something of which nobody has decided yet."""
    return sweep["verdict"] == "promote" and sweep["decision"] is None


async def _promotion(pages: Pages, request: Request, visitor: Visitor) -> Response:
    """What promoting would change, and whether to."""
    number = _number(request)
    sweep = await pages.ask("/api/sweeps/{sweep}", visitor, sweep=number)
    answer = await pages.front.wait(["promote", str(number)], visitor)
    if answer.is_error:
        raise NotShownError(answer.envelope["error"], 409)
    plan = answer.envelope
    return pages.show(
        "promotion", visitor, "/sweeps", sweep=sweep, messages=plan["messages"],
        lines=diff_lines(plan["diff"]), shown=shown_hash(plan["diff"]),
    )  # fmt: skip


async def _declining(pages: Pages, request: Request, visitor: Visitor) -> Response:
    sweep = await pages.ask("/api/sweeps/{sweep}", visitor, sweep=_number(request))
    if not _is_open(sweep):
        raise NotShownError(wrong("this sweep proposes nothing, or was decided already"), 409)
    return pages.show("declining", visitor, "/sweeps", sweep=sweep)


async def _workloads(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/workloads", visitor)
    return pages.show(
        "workloads", visitor, "/workloads", workloads=found["workloads"], shown=None, section=None,
        messages=found["messages"],
    )  # fmt: skip


async def _workload(pages: Pages, request: Request, visitor: Visitor) -> Response:
    name = _name(request, "workload")
    shown = await pages.ask("/api/workloads/{workload}", visitor, workload=name)
    found = await pages.ask("/api/workloads", visitor)
    return pages.show(
        "workloads", visitor, "/workloads", workloads=found["workloads"], shown=shown,
        section=workload_section(shown), messages=shown["messages"],
    )  # fmt: skip


async def _doctor(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/doctor", visitor)
    n = len(found["findings"])
    return pages.show(
        "doctor", visitor, "/doctor", messages=found["messages"], findings=found["findings"],
        passed=found["passed"], not_checked=found["not_checked"],
        sentence="Nothing was found to be wrong" if n == 0 else f"{counted(n, 'finding')}",
    )  # fmt: skip


async def _jobs(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/jobs", visitor)
    return pages.show("jobs", visitor, "/jobs", jobs=found["jobs"])


async def _job(pages: Pages, request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/jobs/{number}", visitor, number=_number(request))
    job = found["job"]
    is_over = job["state"] not in _UNDER_WAY
    result = job["result"] or {}
    progress = job["progress"]
    left_s = progress["left_s"] if progress is not None else None
    left = f", about {format_duration(left_s)} left" if left_s is not None else ""
    rows = [
        ("Asked for by", job["asked_by"]), ("When", when(job["asked_s"])), ("State", job["state"]),
        ("Command", " ".join(["tunerd", *(one for one in job["argv"] if "--shown" not in one)])),
    ]  # fmt: skip
    ended = "It is done" if job["exit_code"] == 0 else "It ended without a word"
    return pages.show(
        "job", visitor, "/jobs", job=job, is_over=is_over, rows=rows,
        summary=result.get("summary") or result.get("text") or ended,
        progress="waiting for its turn" if progress is None else progress["text"] + left,
    )  # fmt: skip


# Changing


def _doing(kind: str) -> Page:
    """A form that begins a job, and leads to it."""

    async def handle(pages: Pages, request: Request, visitor: Visitor) -> Response:
        fields = await form_of(request)
        if not pages.front.gate.is_form_token(visitor, fields.get("token", "")):
            raise NotShownError(
                wrong("the form is not from this page, or from before a restart"), 403
            )
        answer = await pages.front.begin(kind, values_of(kind, fields), visitor, is_text=True)
        if answer.is_error:
            if answer.status is not None:
                raise NotShownError(wrong("a field of the form is wrong"), answer.status)
            raise NotShownError(answer.envelope["error"], 409)
        return RedirectResponse(f"/jobs/{answer.envelope['job']['job']}", 303)

    return handle
