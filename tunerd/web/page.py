"""The page: what the API says, as HTML that needs no script, and forms for what changes something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from tunerd import __version__
from tunerd.actions.job_actions import shown_hash
from tunerd.core.job import JobKind, JobState
from tunerd.core.names import generation_number, is_name
from tunerd.core.quantity import format_duration
from tunerd.errors import TunerdError
from tunerd.web import page_view as view
from tunerd.web.api_routes import JOBS, READS, Call, JobRoute, ReadRoute
from tunerd.web.app import Desk, PageRoute, build_app
from tunerd.web.gate import COOKIE, Refusal, Visitor
from tunerd.web.middleware import GateMiddleware
from tunerd.web.page_forms import FORMS, Form, NotShownError, form_of, wrong
from tunerd.web.page_static import static_file
from tunerd.web.reads import Answer
from tunerd.web.report import environment, script_json
from tunerd.web.report_sweep import sweep_section
from tunerd.web.report_text import counted, when
from tunerd.web.report_view import Chart

PLACES = (("/", "Overview"), ("/generations", "Generations"), ("/deploy", "Deploy"),
          ("/sweeps", "Sweeps"), ("/workloads", "Workload"), ("/doctor", "Doctor"), ("/jobs", "Jobs"))  # fmt: skip
_SPANS = ((1, "1 hour"), (24, "1 day"), (168, "1 week"), (720, "1 month"))
LIVE_PARTS = ("health", "now", "days")
_LEAST_LIVE_S = 2.0
_SWEEPS_A_PAGE = 50
_UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING})
_ROUTES: Mapping[str, ReadRoute] = {route.path: route for route in READS}
_JOBS: Mapping[str, JobRoute] = {route.path: route for route in JOBS}
Page = Callable[["Pages", Request, Visitor], Awaitable[Response]]


def build_site(desk: Desk) -> GateMiddleware:
    """The API and the page, behind the gate."""
    pages = Pages(desk)

    def page_error(request: Request, status: int, text: str) -> Response:
        visitor = request.scope.get("tunerd.visitor")
        return pages.show("error", visitor, "", status, error=wrong(text))

    return build_app(desk, page_routes(desk), page_error)


def page_routes(desk: Desk) -> list[PageRoute]:
    """Every route of the page."""
    pages = Pages(desk)
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
            PageRoute(f"/do/{name}", pages.handler(_doing(form)), ("POST",))
            for name, form in FORMS.items()
        ),
        PageRoute("/login", pages.login, ("GET", "POST")),
        PageRoute("/static/{name}", static_file),
    ]


@dataclass(frozen=True, slots=True)
class Pages:
    """Asks the API's own routes, and fills templates."""

    desk: Desk

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
        route = _ROUTES[path]
        try:
            asked = route.query.model_validate(dict(query or {}))
        except ValidationError as problem:
            raise NotShownError(wrong("a parameter is wrong"), 400) from problem
        answer: Answer = await self.desk.read(route, Call(visitor, parts, asked))
        if answer.is_error:
            status = 404 if answer.envelope["error"]["code"] == "usage" else 503
            raise NotShownError(answer.envelope["error"], status)
        return dict(answer.envelope)

    async def ask_by_job(
        self, kind: JobKind, arguments: Mapping[str, Any], visitor: Visitor
    ) -> dict[str, Any]:
        """The envelope of a job that only looks.

        Raises:
            NotShownError: it failed.
        """
        route = ReadRoute(
            "", "", lambda reads, _: reads.by_job(kind, arguments, visitor.name), is_slow=True
        )
        answer = await self.desk.read(route, Call(visitor, {}, None))
        if answer.is_error:
            raise NotShownError(answer.envelope["error"], 409)
        return dict(answer.envelope)

    def show(self, template: str, visitor: Visitor | None, here: str, status: int = 200,
             **values: Any) -> Response:  # fmt: skip
        """A page from its template."""
        charts: tuple[Chart, ...] = values.get("charts", ())
        figures = {one.name: one.figure for one in charts}
        text = self.fill(
            template,
            **values,
            version=__version__,
            unit=self.desk.ctx.unit,
            visitor=visitor.name if visitor is not None else None,
            token=self.desk.gate.form_token(visitor) if visitor is not None else "",
            places=PLACES,
            here=here,
            figures=script_json(figures) if figures else "",
        )
        return HTMLResponse(text, status)

    def fill(self, template: str, **values: Any) -> str:
        """A template with its values."""
        return environment().get_template(f"page/{template}.html").render(**values)

    async def login(self, request: Request) -> Response:
        """Shows where the token goes, and takes it."""
        if request.method != "POST":
            return self.show("login", None, "", refused=None)
        fields = await form_of(request)
        found = self.desk.gate.try_token(request.scope["tunerd.peer"], fields.get("token", ""))
        if isinstance(found, Refusal):
            return self.show("login", None, "", found.status, refused=found.message)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            COOKIE, self.desk.gate.open_session(), httponly=True, samesite="strict", path="/"
        )
        return response


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
        flags = view.flags_table(kept["generation"]["origins"])
    running = [
        one for one in jobs["jobs"] if _does_more_than_look(one) and one["state"] in _UNDER_WAY
    ]
    return pages.show(
        "overview", visitor, "/", **values, flags=flags, spans=_SPANS,
        every_s=max(_LEAST_LIVE_S, pages.desk.ctx.settings.daemon.every_s),
        job=running[0] if running else None,
    )  # fmt: skip


async def _live(pages: Pages, request: Request, visitor: Visitor) -> Response:
    """The parts of the overview that change, for a script that puts them in their places."""
    _, values = await _watched(pages, request, visitor)
    made: view.Overview = values["view"]
    parts = {name: pages.fill(f"live_{name}", **values) for name in LIVE_PARTS}
    return JSONResponse(
        {
            "title": made.health.sentence,
            "parts": parts,
            "figures": {one.name: one.figure for one in made.charts},
        }
    )


async def _watched(
    pages: Pages, request: Request, visitor: Visitor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status, and what the parts of the overview that change are filled with."""
    hours = request.query_params.get("hours", "24")
    status = await pages.ask("/api/status", visitor)
    readings = await pages.ask("/api/readings", visitor, {"brief": True})
    telemetry = await pages.ask("/api/telemetry", visitor, {"hours": hours})
    since_s = pages.desk.ctx.clock.now_s() - float(hours) * 3600
    telemetry["events"] = [one for one in telemetry["events"] if one["at_s"] >= since_s]
    made = view.overview(status, readings, telemetry, float(hours))
    return status, {
        "view": made,
        "charts": made.charts,
        "hours": float(hours),
        "watched": readings["watched"],
    }


async def _generations(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/history", visitor, {"limit": 100})
    targets = await pages.ask("/api/rollback", visitor)
    rows = view.generations_rows(found["generations"])
    return pages.show(
        "generations", visitor, "/generations", rows=rows, hidden=found["total"] - len(rows),
        targets=view.targets_rows(targets["backups"]),
    )  # fmt: skip


async def _generation(pages: Pages, request: Request, visitor: Visitor) -> Response:
    number = _number(request)
    kept = await pages.ask("/api/history/{number}", visitor, number=number)
    status = await pages.ask("/api/status", visitor)
    one, ending = kept["generation"], kept["ending"]
    lines: list[tuple[str, str]] = []
    if number > 1:
        try:
            path = "/api/history/{one}/diff/{other}"
            found = await pages.ask(path, visitor, one=number - 1, other=number)
            lines = view.diff_lines(found["diff"])
        except NotShownError:  # the one before was damaged, or is not kept any more
            number_before = 0
        else:
            number_before = number - 1
    else:
        number_before = 0
    rows = [
        ("When", when(one["created_s"])), ("Reason", one["reason"]), ("By", one["requested_by"]),
        ("Profile", one["profile"] or "not by a profile"), ("Engine", one["engine"]),
        ("Model", one["model_path"]), ("Outcome", ending["outcome"]),
        ("Replaced", one["replaced_backup"] or "no unit file"),
    ]  # fmt: skip
    return pages.show(
        "generation", visitor, "/generations", number=number, rows=rows, lines=lines,
        before=number_before, flags=view.flags_table(one["origins"]),
        text=kept["unit"] or "The unit file was removed.", is_live=number == status["generation"],
    )  # fmt: skip


async def _rollback(pages: Pages, request: Request, visitor: Visitor) -> Response:
    to = request.query_params.get("to")
    target = await pages.ask("/api/rollback/preview", visitor, {"to": to} if to else {})
    return pages.show(
        "rollback", visitor, "/generations", target=target, to=to or "",
        messages=target["messages"], lines=view.diff_lines(target["diff"]),
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
    rows = [
        ("Engine", f"{plan['engine']['name']} ({plan['engine']['dialect']})"),
        ("Model", plan["model"]["path"]),
        ("Memory", plan["memory"]["verdict"]),
        *((one["name"], f"{view.mib(one['worst_mib'])} of {view.mib(one['free_mib'])} free")
          for one in plan["memory"]["devices"]),
    ]  # fmt: skip
    flags = [(one["flag"], one["key"], one["origin"]) for one in plan["explain"]]
    return pages.show(
        "plan", visitor, "/deploy", plan=plan, rows=rows, messages=plan["messages"],
        lines=view.diff_lines(plan["diff"]), flags=view.flags_table(flags),
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
    found = await pages.ask("/api/sweeps/{number}", visitor, number=_number(request))
    section = sweep_section(found["sweep"], found["page"], found) if found["arms"] else None
    rows = [
        ("Begun", found["started"]), ("State", found["state"]), ("Profile", found["profile"]),
        ("Workload", found["workload"]), ("Verdict", found["verdict"]),
        ("Then", found["decision"] or "nothing yet"),
    ]  # fmt: skip
    return pages.show(
        "sweep", visitor, "/sweeps", sweep=found, rows=rows, section=section,
        charts=section.charts if section is not None else (), is_open=_is_open(found),
    )  # fmt: skip


def _is_open(sweep: Mapping[str, Any]) -> bool:
    """Whether it proposes something of which nobody has decided yet."""
    return sweep["verdict"] == "promote" and sweep["decision"] is None


async def _promotion(pages: Pages, request: Request, visitor: Visitor) -> Response:
    """What promoting would change, and whether to."""
    number = _number(request)
    sweep = await pages.ask("/api/sweeps/{number}", visitor, number=number)
    arguments = {"sweep": number, "ask": True}
    plan = await pages.ask_by_job(JobKind.PROMOTE, arguments, visitor)
    return pages.show(
        "promotion", visitor, "/sweeps", sweep=sweep, messages=plan["messages"],
        lines=view.diff_lines(plan["diff"]), shown=shown_hash(plan["diff"]),
    )  # fmt: skip


async def _declining(pages: Pages, request: Request, visitor: Visitor) -> Response:
    sweep = await pages.ask("/api/sweeps/{number}", visitor, number=_number(request))
    if not _is_open(sweep):
        raise NotShownError(wrong("this sweep proposes nothing, or was decided already"), 409)
    return pages.show("declining", visitor, "/sweeps", sweep=sweep)


async def _workloads(pages: Pages, _request: Request, visitor: Visitor) -> Response:
    found = await pages.ask("/api/workloads", visitor)
    return pages.show(
        "workloads", visitor, "/workloads", workloads=found["workloads"], shown=None, classes=None,
        messages=found["messages"],
    )  # fmt: skip


async def _workload(pages: Pages, request: Request, visitor: Visitor) -> Response:
    name = _name(request, "workload")
    shown = await pages.ask("/api/workloads/{workload}", visitor, workload=name)
    found = await pages.ask("/api/workloads", visitor)
    return pages.show(
        "workloads", visitor, "/workloads", workloads=found["workloads"], shown=shown,
        classes=view.classes_table(shown), messages=shown["messages"],
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
    changes = [one for one in found["jobs"] if _does_more_than_look(one)]
    return pages.show("jobs", visitor, "/jobs", jobs=changes)


def _does_more_than_look(job: Mapping[str, Any]) -> bool:
    return JobKind(job["kind"]).changes and not job["arguments"].get("ask")


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
        *((key.capitalize(), str(value)) for key, value in job["arguments"].items() if key != "shown"),
    ]  # fmt: skip
    ended = "It is done" if job["exit_code"] == 0 else "It ended without a word"
    return pages.show(
        "job", visitor, "/jobs", job=job, is_over=is_over, rows=rows,
        summary=result.get("summary") or result.get("text") or ended,
        progress="waiting for its turn" if progress is None else progress["text"] + left,
    )  # fmt: skip


# Changing


def _doing(form: Form) -> Page:
    """A form that begins a job, and leads to it."""

    async def handle(pages: Pages, request: Request, visitor: Visitor) -> Response:
        fields = await form_of(request)
        if not pages.desk.gate.is_form_token(visitor, fields.get("token", "")):
            raise NotShownError(
                wrong("the form is not from this page, or from before a restart"), 403
            )
        path, body = form(fields)
        route = _JOBS[path]
        try:
            number = await pages.desk.begin(route, route.body.model_validate(body), visitor)
        except ValidationError as problem:
            raise NotShownError(wrong("a field of the form is wrong"), 400) from problem
        except TunerdError as problem:
            error = {"code": problem.code, "message": problem.message, "cause": problem.cause,
                     "state": problem.state, "hint": problem.hint}  # fmt: skip
            raise NotShownError(error, 409) from problem
        return RedirectResponse(f"/jobs/{number}", 303)

    return handle
