"""The page: what the API says, as HTML that needs no script, and forms for what changes something; and the process of the web part."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qsl

import structlog
from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from tunerd import __version__
from tunerd.errors import ConfigError, TunerdError
from tunerd.machine import peers
from tunerd.machine.clock import SystemClock
from tunerd.operations import JobState
from tunerd.paths import FROM_ELSEWHERE, parse_listen, paths_for
from tunerd.units.text import shown_hash
from tunerd.web import app, view
from tunerd.web.app import RefusedError
from tunerd.web.html import STATIC, environment
from tunerd.web.routes import Answer, refused
from tunerd.web.view import (
    Chart,
    Columns,
    Line,
    Lines,
    Point,
    Table,
    figure,
    flags_table,
    heads,
    percent,
    status_facts,
    table_of,
)
from tunerd.words import UNKNOWN, Mode, format_duration, ratio, when

_MOST_FIELDS = 20


async def _form_of(request: Request) -> dict[str, str]:
    """The fields of a form; empty where the body is none.

    Raises:
        RefusedError: it is too large, or did not come.
    """
    content = await app.read_body(request, "application/x-www-form-urlencoded")
    try:
        return dict(parse_qsl(content.decode(), max_num_fields=_MOST_FIELDS))
    except ValueError as problem:
        raise RefusedError(refused(400, "the form cannot be read")) from problem


# What a browser may have done by a form of its own, at /do/NAME.
FORMS: Mapping[str, str] = {
    kind.replace(" ", "-"): kind
    for kind in ("apply", "rollback", "promote", "decline", "sweep start", "sweep stop")
}


def values_of(kind: str, fields: Mapping[str, str]) -> dict[str, str]:
    """What a form asks for, by the names of the API; what was left empty is not said.

    Raises:
        RefusedError: nobody said that they are sure, where that is asked.
    """
    values = {name: text for name, text in fields.items() if text and name != "token"}
    if kind == "sweep start" and values.pop("sure", None) is None:
        raise RefusedError(refused(400, "confirm that you are sure"))
    return values


PLACES = (("/", "Overview"), ("/generations", "Generations"), ("/deploy", "Deploy"),
          ("/sweeps", "Sweeps"), ("/workloads", "Workload"), ("/doctor", "Doctor"), ("/jobs", "Jobs"))  # fmt: skip
_SPANS = ((1, "1 hour"), (24, "1 day"), (168, "1 week"), (720, "1 month"))


@dataclass(frozen=True, slots=True)
class _Look:
    """A page that shows what the API says, by the names of its template.

    Parts of the API's paths are those of the page's own; of its query goes on what `passes` names.
    """

    template: str
    here: str
    asks: Mapping[str, str]
    passes: tuple[str, ...] = ()


_LOOKS: Mapping[str, _Look] = {
    "/generations": _Look("generations", "/generations",
                          {"found": "/api/history?limit=100", "targets": "/api/rollback"}),
    "/rollback": _Look("rollback", "/generations", {"plan": "/api/rollback/preview"}, ("to",)),
    "/deploy": _Look("deploy", "/deploy", {"found": "/api/profiles", "status": "/api/status"}),
    "/deploy/{profile}": _Look("plan", "/deploy", {"plan": "/api/plan/{profile}?explain=true"}),
    "/sweeps": _Look("sweeps", "/sweeps", {"found": "/api/sweeps", "now": "/api/sweep"}),
    "/sweeps/{sweep}": _Look("sweep", "/sweeps", {"sweep": "/api/sweeps/{sweep}"}),
    "/workloads": _Look("workloads", "/workloads", {"found": "/api/workloads"}),
    "/workloads/{workload}": _Look("workloads", "/workloads", {
        "found": "/api/workloads", "shown": "/api/workloads/{workload}"}),
    "/doctor": _Look("doctor", "/doctor", {"found": "/api/doctor"}),
    "/jobs": _Look("jobs", "/jobs", {"found": "/api/jobs"}),
    "/jobs/{number}": _Look("job", "/jobs", {"found": "/api/jobs/{number}"}),
}  # fmt: skip
LIVE_PARTS = ("health", "now", "serves", "days")
_LEAST_LIVE_S = 2.0
_UNDER_WAY = frozenset({JobState.STARTING, JobState.RUNNING})
Page = Callable[["Pages", Request], Awaitable[Response]]


def build_site(front: app.Front) -> app.GateMiddleware:
    """The API and the page, behind the gate."""
    pages = Pages(front)

    def page_error(request: Request, answer: Answer) -> Response:
        status, error = app.status_of(answer), answer.envelope["error"]
        return pages.show("error", request, "", status, error=error)

    return app.build_app(front, _page_routes(pages), page_error)


def _page_routes(pages: Pages) -> list[BaseRoute]:
    """Every route of the page."""
    shown: dict[str, Page] = {
        **{path: partial(_look, place) for path, place in _LOOKS.items()},
        "/": _overview,
        "/live": _live,
        "/generations/{number}": _generation,
        "/sweeps/{sweep}/promote": _promotion,
        "/sweeps/{sweep}/decline": _declining,
    }
    return [
        *(Route(path, partial(page, pages)) for path, page in shown.items()),
        *(
            Route(f"/do/{name}", partial(_do, kind, pages), methods=["POST"])
            for name, kind in FORMS.items()
        ),
        # An installer may have put links in the place of files.
        Mount("/static", StaticFiles(directory=STATIC, follow_symlink=True)),
    ]


@dataclass(frozen=True, slots=True)
class Pages:
    """Asks the API's own routes, and fills templates."""

    front: app.Front

    async def ask(self, path: str, request: Request, query: Mapping[str, str] | None = None,
                  **parts: Any) -> dict[str, Any]:  # fmt: skip
        """The envelope of a reading route.

        Raises:
            RefusedError: it is an error, or the query is wrong.
        """
        place = {name: str(value) for name, value in parts.items()}
        answer = await self.front.read(path, app.visitor_of(request), place, query)
        if answer.is_error:
            raise RefusedError(answer)
        return dict(answer.envelope)

    def show(self, template: str, request: Request, here: str, code: int = 200, /,
             **values: Any) -> Response:  # fmt: skip
        """A page from its template."""
        visitor = app.visitor_of(request)
        text = self.fill(
            template,
            **values,
            version=__version__,
            unit=self.front.facts.unit,
            visitor=visitor.text,
            token=self.front.gate.form_token(visitor),
            places=PLACES,
            here=here,
        )
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), code)

    def fill(self, template: str, **values: Any) -> str:
        """A template with its values."""
        return _templates().get_template(f"page/{template}.html").render(**values)


@cache
def _templates() -> Environment:
    """With the views that they show what the API says by."""
    found = environment()
    own = (diff_lines, explained, format_duration, shown_hash, typed, when)
    found.globals |= {"views": view, **{one.__name__: one for one in own}}
    return found


def explained(plan: Mapping[str, Any]) -> Table:
    """Who set each flag of a plan."""
    return flags_table([(one["flag"], one["key"], one["origin"]) for one in plan["explain"]])


def typed(argv: Sequence[str]) -> str:
    """The words of a job as one would type them."""
    return " ".join(word for word in argv if "--shown" not in word)


# Looking


async def _look(look: _Look, pages: Pages, request: Request) -> Response:
    found: dict[str, Any] = {}
    told = request.query_params
    given = {name: told[name] for name in look.passes if told.get(name)}
    for name, asked in look.asks.items():
        path, _, query = asked.partition("?")
        parts = {key: text for key, text in request.path_params.items() if f"{{{key}}}" in path}
        found[name] = await pages.ask(path, request, {**dict(parse_qsl(query)), **given}, **parts)
    return pages.show(look.template, request, look.here, query=told, **found)


async def _overview(pages: Pages, request: Request) -> Response:
    values = await _watched(pages, request)
    every_s = max(_LEAST_LIVE_S, pages.front.facts.every_s)
    return pages.show("overview", request, "/", **values, spans=_SPANS, every_s=every_s)


async def _live(pages: Pages, request: Request) -> Response:
    """The parts of the overview that change, for a script that puts them in their places."""
    values = await _watched(pages, request)
    parts = {name: pages.fill(f"live_{name}", **values) for name in LIVE_PARTS}
    title = values["view"]["health"].sentence
    return app.Json({"title": title, "at": values["at"], "parts": parts})


async def _watched(pages: Pages, request: Request) -> dict[str, Any]:
    """What the parts of the overview that change are filled with."""
    hours = request.query_params.get("hours", "24")
    status = await pages.ask("/api/status", request)
    top = await pages.ask("/api/top", request)
    telemetry = await pages.ask("/api/telemetry", request, {"hours": hours})
    jobs = await pages.ask("/api/jobs", request)
    flags = None
    if status["generation"] is not None:
        kept = await pages.ask("/api/history/{number}", request, number=status["generation"])
        flags = flags_table(kept["generation"]["origins"])
    now_s = SystemClock().now_s()
    since_s = now_s - float(hours) * 3600
    telemetry["events"] = [one for one in telemetry["events"] if one["at_s"] >= since_s]
    made = overview(status, top, telemetry)
    job = next((one for one in jobs["jobs"] if one["state"] in _UNDER_WAY), None)
    return {"view": made, "hours": float(hours), "at": when(now_s), "job": job, "flags": flags}


async def _generation(pages: Pages, request: Request) -> Response:
    number = request.path_params["number"]
    kept = await pages.ask("/api/history/{number}", request, number=number)
    status = await pages.ask("/api/status", request)
    one, diff = kept["generation"]["number"] - 1, None
    with suppress(RefusedError):  # the one before was damaged, or is not kept any more
        found = await pages.ask("/api/history/{one}/diff/{other}", request, one=one, other=number)
        diff = found["diff"]
    return pages.show("generation", request, "/generations", kept=kept, status=status, diff=diff)


async def _promotion(pages: Pages, request: Request) -> Response:
    """What promoting would change, and whether to."""
    sweep = await pages.ask("/api/sweeps/{sweep}", request, sweep=request.path_params["sweep"])
    words = ["promote", str(sweep["sweep"])]
    answer = await pages.front.wait(words, app.visitor_of(request))
    if answer.is_error:
        raise RefusedError(answer)
    return pages.show("promotion", request, "/sweeps", sweep=sweep, plan=answer.envelope)


async def _declining(pages: Pages, request: Request) -> Response:
    sweep = await pages.ask("/api/sweeps/{sweep}", request, sweep=request.path_params["sweep"])
    if sweep["verdict"] != "promote" or sweep["decision"] is not None:
        raise RefusedError(refused(409, "this sweep proposes nothing, or was already decided"))
    return pages.show("declining", request, "/sweeps", sweep=sweep)


# Changing


async def _do(kind: str, pages: Pages, request: Request) -> Response:
    """A form that begins a job, and leads to it."""
    fields, visitor = await _form_of(request), app.visitor_of(request)
    if not pages.front.gate.is_form_token(visitor, fields.get("token", "")):
        text = "the form is not from this page, or from before a restart"
        raise RefusedError(refused(403, text))
    answer = await pages.front.begin(kind, values_of(kind, fields), visitor, is_text=True)
    if answer.is_error:
        if answer.status is not None:
            answer = refused(answer.status, "a field of the form is wrong")
        raise RefusedError(answer)
    return RedirectResponse(f"/jobs/{answer.envelope['job']['job']}", 303)


# The overview: now, the last hour, days; values in, values out

_MOST_ROWS = 48
_COLOURS = ("mainline", "bee", "other", "waiting")


_Row = Mapping[str, Any]
"""A stretch of `/api/telemetry`, such as a minute or a look, with what its cards were by index."""


def _rows_of(telemetry: Mapping[str, Any]) -> list[_Row]:
    cards: dict[float, dict[int, Mapping[str, Any]]] = {}
    for one in telemetry["gpus"]:
        cards.setdefault(one["begin_s"], {})[one["index"]] = one
    return [{**one, "cards": cards.get(one["begin_s"], {})} for one in telemetry["points"]]


# Now


def _key_figures(
    status: Mapping[str, Any], speeds: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Speed, acceptance and VRAM at this moment: what each is, its value and its unit."""
    accepted = percent(speeds.get("acceptance_ratio"))
    yield "Generation, recent", figure(speeds.get("decode_tok_s")) or "not seen", "tok/s"
    yield "Drafts accepted, recent", accepted or "not seen", ""
    for gpu in status["vram"] or ():
        used, total = gpu["used_mib"], gpu["total_mib"]
        of = "GiB" if total is None else f"of {_gib(total)} GiB"
        yield f"VRAM in use, {gpu['name']}", _gib(used) or UNKNOWN, of
    if not status["vram"]:
        yield "VRAM in use", "no GPU" if status["vram"] == [] else UNKNOWN, ""


def _of_all(part: str | None, whole: str | None) -> str | None:
    return part if part is None or whole is None else f"{part} of {whole}"


_CARD: Columns[Mapping[str, Any]] = {
    "~Card": lambda gpu: (
        f"GPU {gpu['index']}: {gpu['name']}{', split by MIG' if gpu['is_mig'] else ''}"
    ),
    "VRAM in use [GiB]": lambda gpu: _of_all(_gib(gpu["used_mib"]), _gib(gpu["total_mib"])),
    "The server's": lambda gpu: _gib(gpu["server_mib"]),
    "Others'": lambda gpu: _gib(gpu["others_mib"]),
    "Free": lambda gpu: _gib(gpu["free_mib"]),
    "Busy": lambda gpu: percent(ratio(gpu["utilisation_percent"], 100), 0),
    "Power [W]": lambda gpu: _of_all(figure(gpu["power_w"], 0), figure(gpu["power_limit_w"], 0)),
    "Core [°C]": lambda gpu: figure(gpu["temperature_c"], 0),
    "~Throttled by": lambda gpu: (
        None if gpu["throttle_reasons"] is None else ", ".join(gpu["throttle_reasons"]) or "nothing"
    ),
}


# Over time


def _cards_of(seen: Sequence[_Row]) -> list[int]:
    """The indexes of all cards that were seen."""
    return sorted({index for row in seen for index in row["cards"]})


def _charts_of(seen: Sequence[_Row]) -> Iterator[Chart]:
    """Speed, acceptance and VRAM over time; what nobody saw a figure of has no chart."""
    if len(seen) < 2:  # noqa: PLR2004 -- a line needs two
        return
    for name, title, colour, unit, points in (
        ("speed", "Generation", "decode", "tok/s", [(row["begin_s"], row["decode_tok_s"]) for row in seen]),
        ("acceptance", "Drafts accepted", "ik", "", [(row["begin_s"], row["acceptance_ratio"]) for row in seen]),
    ):  # fmt: skip
        if any(value is not None for _, value in points):
            line = Line(title, colour, tuple(Point(at_s, value) for at_s, value in points))
            plot = _over_time((line,), unit, is_ratio=not unit)
            yield _chart(name, title, plot, "Gaps: the server was idle or away.")
    if _cards_of(seen):
        yield _vram_chart(seen)


def _chart(name: str, title: str, plot: Lines, gaps: str) -> Chart:
    """With a note where a line has gaps."""
    has_gaps = any(point.y is None for line in plot.lines for point in line.points)
    return Chart(name, title, plot, gaps if has_gaps else None)


def _vram_chart(seen: Sequence[_Row]) -> Chart:
    """What is in use of each card, and what others than the server hold of it."""
    lines: list[Line] = []
    for at, index in enumerate(_cards_of(seen)):
        colour = _COLOURS[at % len(_COLOURS)]
        lines.append(Line(f"GPU {index}", colour, _gib_points(seen, index, "used_mib")))
        others = _gib_points(seen, index, "others_mib")
        if any(point.y for point in others):
            lines.append(Line(f"GPU {index}, held by others", colour, others, shade=2))
    plot = _over_time(tuple(lines), "GiB")
    note = "Gaps: the card could not be read, or was not looked at."
    return _chart("vram", "VRAM in use", plot, note)


def _over_time(lines: tuple[Line, ...], unit: str, *, is_ratio: bool = False) -> Lines:
    title = "this machine's time"
    return Lines(lines, unit, title, height=240, is_ratio=is_ratio, is_time=True)


def _gib_points(seen: Sequence[_Row], index: int, key: str) -> tuple[Point, ...]:
    values = ((row["begin_s"], row["cards"].get(index, {}).get(key)) for row in seen)
    return tuple(Point(at_s, None if mib is None else mib / 1024) for at_s, mib in values)


def _tables_of(seen: Sequence[_Row]) -> tuple[Table, ...]:
    """The same in figures, newest first."""
    if not seen:
        return ()
    columns = heads("~From", "Generation [tok/s]", "Drafts accepted", "Serving",
                    *(f"VRAM of GPU {index} [GiB]" for index in _cards_of(seen)))  # fmt: skip
    step = -(-len(seen) // _MOST_ROWS)
    rows = tuple(
        (
            when(row["begin_s"]),
            figure(row["decode_tok_s"]),
            percent(row["acceptance_ratio"]),
            percent(ratio(row["n_ready"], row["n"]), 0),
            *(_gib(row["cards"].get(index, {}).get("used_mib")) for index in _cards_of(seen)),
        )
        for row in seen[::-1][::step]
    )
    left_out = "" if step == 1 else f"; one of every {step} stretches"
    return (Table(f"What was watched, newest first{left_out}", columns, rows),)


def _gib(mib: int | None) -> str | None:
    return None if mib is None else f"{mib / 1024:.1f}"


@dataclass(frozen=True, slots=True)
class Health:
    """How the server is, in a sentence; `level` is good, warn or bad."""

    level: str
    sentence: str
    detail: str


def overview(
    status: Mapping[str, Any], top: Mapping[str, Any], telemetry: Mapping[str, Any]
) -> dict[str, Any]:
    """What the first page is filled with, from `/api/status`, `/api/top` and `/api/telemetry`."""
    remarks = [
        *status["messages"],
        *({"level": "warning", **drift} for drift in status["drift"]),
        *(_event(one) for one in telemetry["events"][:5]),
    ]
    seen = _rows_of(telemetry)
    return {
        "health": health_of(status),
        "figures": tuple(_key_figures(status, top["speeds"] or {})),
        "cards": table_of("Cards now", top["gpus"], _CARD) if top["gpus"] else None,
        "facts": status_facts(status),
        "remarks": remarks,
        "charts": list(_charts_of(seen)),
        "tables": _tables_of(seen),
    }


def health_of(status: Mapping[str, Any]) -> Health:
    """Whether the server is well."""
    serves = f"{status['alias'] or 'It'} at {status['address'] or 'an unknown address'}"
    if status["change_under_way"]:
        return Health(
            "warn", "A change is under way right now.", "Its end is shown under Generations."
        )
    if status["measurement"] is not None:
        text = f"The server is away while `{status['measurement']['purpose']}` measures."
        return Health("warn", text, "It comes back by itself.")
    if not status["exists"] and status["active"] == "inactive":
        return Health("warn", "Nothing is deployed yet.", "Deploy a profile to begin.")
    if status["active"] != "active":
        text = f"{status['unit']}: {status['active']} ({status['sub_state']})"
        return Health("bad", "Your server does not run.", text)
    if status["healthy"] is None:
        return Health("warn", "Your server runs; whether it answers is not known.", serves)
    if not status["healthy"]:
        text = f"{serves}: {status['health']}"
        return Health("bad", "Your server runs, but does not answer.", text)
    if status["drift"]:
        return Health("warn", "Your server serves, but is not what was deployed.", serves)
    if status["asleep"]:
        return Health("good", "Your server is well, and asleep until somebody asks it.", serves)
    return Health("good", "Your server is well.", serves)


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {"level": event["level"], "text": f"{when(event['at_s'])}: {event['text']}",
            "hint": event["hint"]}  # fmt: skip


def diff_lines(diff: str) -> list[tuple[str, str]]:
    """The lines of a difference with what each is: add, del, head or same."""
    kinds = {"+": "add", "-": "del", "@": "head"}
    return [
        ("head" if line.startswith(("+++", "---")) else kinds.get(line[:1], "same"), line)
        for line in diff.splitlines()
    ]


# The web part as a process: it can do nothing but ask the daemon


log = structlog.get_logger()


def serve(mode: Mode, environment: Mapping[str, str]) -> None:
    """Answer until a signal, on the socket that systemd holds or on one of its own.

    Raises:
        HostError: the daemon does not answer, or the socket cannot be had.
    """
    paths = paths_for(mode, environment)
    daemon = paths.runtime_dir / peers.DAEMON_SOCKET
    is_system = mode is Mode.SYSTEM
    facts = app.read_facts(daemon)
    gate = app.Gate(
        own_uid=0 if is_system else os.geteuid(),
        group=lambda: peers.group_number(app.GROUP) if is_system else None,
        hosts=facts.hosts,
    )
    sockets = list(peers.inherited_sockets(environment)) or [
        peers.unix_socket(paths.socket, group=gate.group())
    ]
    if facts.listen is not None:
        sockets += _page_socket(facts.listen)
    log.info("api.ready", at=[_name(one) for one in sockets])
    app.ApiServer(build_site(app.Front(daemon, gate, facts)), sockets, gate.knows).run()


def _page_socket(text: str) -> list[socket.socket]:
    """Where browsers of this machine come in; what is wrong with it is said in the log."""
    address = parse_listen(text)
    try:
        if not address.is_loopback:
            raise ConfigError(
                f"the page does not listen on {address.host}: others can reach it there",
                hint=f"let it listen on 127.0.0.1; {FROM_ELSEWHERE}",
            )
        return [peers.tcp_socket(address.host, address.port)]
    except TunerdError as problem:
        peers.say_not_served(problem)
        return []


def _name(one: socket.socket) -> str:
    name = one.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"
