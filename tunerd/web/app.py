"""The application: the gate before everything, the routes of the API, the metrics, and the page."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread
import structlog
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tunerd.actions.context import Context
from tunerd.actions.jobs import demand_lane, error_json, read_job, running_jobs, start_job
from tunerd.actions.profile_layers import load_profile
from tunerd.actions.telemetry import Telemetry
from tunerd.core.job import JobKind, JobRequest, check_arguments
from tunerd.core.names import generation_number, is_name
from tunerd.core.progress import ignore_progress
from tunerd.core.result import ActionResult
from tunerd.errors import Busy, ConfigError, DeployError, TunerdError, UsageError
from tunerd.web.api_routes import JOBS, READS, Call, JobRoute, ReadRoute
from tunerd.web.gate import MAX_BODY_BYTES, Gate, Visitor
from tunerd.web.middleware import GateMiddleware
from tunerd.web.openapi import NUMBERS, describe_api
from tunerd.web.reads import Answer, Reads

EXIT_CODE = "x-tunerd-exit-code"
_STATUS = ((Busy, 409), (UsageError, 404), (ConfigError, 422), (DeployError, 409))
_BY_CODE = {"busy": 409, "usage": 404, "config": 422, "deploy": 409, "stranded": 409}
_ERRORS = {404: "there is nothing under this address", 405: "that cannot be done here",
           500: "tunerd itself failed; its log says how"}  # fmt: skip
_SLOW_AT_ONCE = 2
_POLL_S = 0.25
_KEEP_ALIVE_S = 15.0
_BODY_S = 20.0

log = structlog.get_logger()
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Seams:
    """What the daemon lends; None where nobody watches.

    `metrics` gives the text of `/metrics`, and its content type.
    """

    telemetry: Telemetry | None = None
    metrics: Callable[[], tuple[bytes, str]] | None = None


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A route of the page."""

    path: str
    handle: Handler
    methods: tuple[str, ...] = ("GET",)


class Desk:
    """What every handler works with."""

    def __init__(self, ctx: Context, gate: Gate, seams: Seams) -> None:
        self.gate = gate
        self.seams = seams
        self.take_over(ctx)
        self._slow: anyio.CapacityLimiter | None = None
        self._starting: anyio.Lock | None = None

    def take_over(self, ctx: Context) -> None:
        """Answer by these settings from now on."""
        self.ctx = replace(ctx, progress=ignore_progress)
        self.reads = Reads(ctx, self.seams.telemetry)

    async def read(self, route: ReadRoute, call: Call) -> Answer:
        """What a reading route says; slow ones wait for each other, and hold up nobody else."""
        if self._slow is None:
            self._slow = anyio.CapacityLimiter(_SLOW_AT_ONCE)
        limiter = self._slow if route.is_slow else None
        return await anyio.to_thread.run_sync(route.read, self.reads, call, limiter=limiter)

    async def begin(self, route: JobRoute, body: BaseModel, visitor: Visitor) -> int:
        """Begin a job, if no other one changes something.

        Raises:
            TunerdError: it cannot be begun.
        """
        if self._starting is None:
            self._starting = anyio.Lock()
        arguments = body.model_dump(exclude_none=True)
        request = JobRequest(route.kind, visitor.name, self.ctx.clock.now_s(), arguments)
        async with self._starting:
            number = await anyio.to_thread.run_sync(self._begin, request)
        peer = visitor.peer
        log.info("job.begun", job=number, kind=str(route.kind), by=visitor.name, uid=peer.uid,
                 pid=peer.pid, via=str(peer.via))  # fmt: skip
        return number

    def _begin(self, request: JobRequest) -> int:
        check_arguments(request.arguments)
        _demand_known(self.ctx, request)
        if request.kind is JobKind.SWEEP_WATCH:  # all who watch are told the same
            found = [one for one in running_jobs(self.ctx) if one.request.kind is request.kind]
            if found:
                return found[0].number
        demand_lane(self.ctx, request)
        return start_job(self.ctx, request)


def _demand_known(ctx: Context, request: JobRequest) -> None:
    """A profile that is not there is told at once, not by a job that fails."""
    if "profile" in request.arguments:
        load_profile(ctx, request.arguments["profile"], options=dict(request.arguments["set"]))


def build_app(
    desk: Desk,
    pages: Sequence[PageRoute] = (),
    page_error: Callable[[Request, int, str], Response] | None = None,
) -> GateMiddleware:
    """The application, behind its gate; `page_error` shows a status and its words to a browser."""

    async def failed(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        is_api = request.url.path.startswith("/api/") or page_error is None
        text = _ERRORS.get(status, "it cannot be done")
        response = (
            refusal_response(status, text, "/api/openapi.json")
            if is_api or page_error is None
            else page_error(request, status, text)
        )
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        return response

    routes = [
        *(Route(one.path, _reading(desk, one), methods=["GET"]) for one in READS),
        *(Route(one.path, _beginning(desk, one), methods=["POST"]) for one in JOBS),
        Route("/api/jobs/{number}/events", _events(desk), methods=["GET"]),
        Route("/api/openapi.json", _openapi, methods=["GET"]),
        Route("/metrics", _metrics(desk), methods=["GET"]),
        *(Route(one.path, one.handle, methods=list(one.methods)) for one in pages),
    ]
    app = Starlette(
        routes=_joined(routes), exception_handlers={HTTPException: failed, Exception: failed}
    )
    app.router.redirect_slashes = False
    return GateMiddleware(app, desk.gate)


def _joined(routes: list[Route]) -> list[Route]:
    """Routes of one path as one, so that another method is refused with all that are allowed."""
    by_path: dict[str, dict[str, Handler]] = {}
    for route in routes:
        for method in (route.methods or set()) - {"HEAD"}:
            by_path.setdefault(route.path, {})[method] = route.endpoint
    return [_one_path(path, handlers) for path, handlers in by_path.items()]


def _one_path(path: str, handlers: Mapping[str, Handler]) -> Route:
    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request)

    return Route(path, handle, methods=sorted(handlers))


def _reading(desk: Desk, route: ReadRoute) -> Handler:
    async def handle(request: Request) -> Response:
        query, problem = _query(route.query, request)
        if problem is not None:
            return problem
        path = _path(request)
        if path is None:
            return _unknown()
        call = Call(request.scope["tunerd.visitor"], path, query)
        return respond(await desk.read(route, call))

    return handle


def _beginning(desk: Desk, route: JobRoute) -> Handler:
    async def handle(request: Request) -> Response:
        body, problem = await _body(route, request)
        if body is None:
            return problem or _unknown()
        try:
            number = await desk.begin(route, body, request.scope["tunerd.visitor"])
        except TunerdError as error:
            return respond(Answer(error_json(error, str(route.kind)), error.exit_code))
        job = await anyio.to_thread.run_sync(read_job, desk.ctx, number)
        envelope = ActionResult("job", {"job": job.to_json()}).to_json()
        return JSONResponse(envelope, 202, {"location": f"/api/jobs/{number}"})

    return handle


def _events(desk: Desk) -> Handler:
    async def handle(request: Request) -> Response:
        path = _path(request)
        if path is None:
            return _unknown()
        try:
            await anyio.to_thread.run_sync(read_job, desk.ctx, path["number"])
        except TunerdError as error:
            return respond(Answer(error_json(error, "job"), error.exit_code))
        seen = generation_number(request.headers.get("last-event-id", "")) or 0
        return StreamingResponse(
            _stream(desk, path["number"], seen),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    return handle


async def _stream(desk: Desk, number: int, seen: int) -> AsyncIterator[str]:
    """Every event from `seen` on, until the job is over; the job does not care who listens."""
    quiet_s = 0.0
    while True:
        job = await anyio.to_thread.run_sync(read_job, desk.ctx, number)
        for at, event in enumerate(job.events[seen:], seen + 1):
            yield f"id: {at}\nevent: {event.get('event')}\ndata: {json.dumps(event)}\n\n"
            quiet_s = 0.0
        seen = max(seen, len(job.events))
        if job.state.is_over:
            if job.end is None:
                died = {"event": "end", "exit_code": 1, "result": None}
                yield f"event: end\ndata: {json.dumps(died)}\n\n"
            return
        await anyio.sleep(_POLL_S)
        quiet_s += _POLL_S
        if quiet_s >= _KEEP_ALIVE_S:
            quiet_s = 0.0
            yield ": still at it\n\n"


def _metrics(desk: Desk) -> Handler:
    async def handle(_request: Request) -> Response:
        if desk.seams.metrics is None:
            return refusal_response(404, "nothing is counted here", "tunerd's daemon counts")
        text, kind = await anyio.to_thread.run_sync(desk.seams.metrics)
        return Response(text, media_type=kind)

    return handle


async def _openapi(_request: Request) -> Response:
    return JSONResponse(describe_api())


def respond(answer: Answer) -> JSONResponse:
    """An envelope as an answer; the command's exit code stands in a header."""
    status = 200
    if answer.is_error:
        status = _BY_CODE.get(answer.envelope["error"]["code"], 503)
    return JSONResponse(dict(answer.envelope), status, {EXIT_CODE: str(answer.exit_code)})


def _path(request: Request) -> dict[str, Any] | None:
    """The parts of the path as numbers and names; None where one can be neither."""
    found: dict[str, Any] = {}
    for key, value in request.path_params.items():
        if key in NUMBERS:
            found[key] = generation_number(value)
        else:
            found[key] = value if is_name(value) else None
        if found[key] is None:
            return None
    return found


def _query(model: type[BaseModel], request: Request) -> tuple[BaseModel | None, Response | None]:
    pairs = request.query_params.multi_items()
    try:
        if len({key for key, _ in pairs}) != len(pairs):
            return None, bad_request("a parameter is given twice")
        return model.model_validate(dict(pairs)), None
    except ValidationError as error:
        return None, bad_request("a parameter is wrong", _places(error))


async def _body(route: JobRoute, request: Request) -> tuple[BaseModel | None, Response | None]:
    if request.url.query:
        return None, bad_request("there are no parameters here")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return None, refusal_response(415, "the body is not application/json")
    content = await read_body(request)
    if isinstance(content, Response):
        return None, content
    try:
        return route.body.model_validate_json(content), None
    except ValidationError as error:
        return None, bad_request("the body is wrong", _places(error))


async def read_body(request: Request) -> bytes | Response:
    """The whole body, if it comes in time and is not too large."""
    try:
        with anyio.fail_after(_BODY_S):
            content = await request.body()
    except TimeoutError:
        return refusal_response(408, "the body did not come")
    except ClientDisconnect:
        return refusal_response(400, "the client went away")
    if len(content) > MAX_BODY_BYTES or request.scope.get("tunerd.too_large"):
        return refusal_response(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return content


def _places(error: ValidationError) -> str:
    places = error.errors(include_url=False, include_input=False, include_context=False)
    return "\n".join(
        f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in places
    )


def bad_request(message: str, cause: str | None = None) -> Response:
    """400 with the places that are wrong."""
    error = UsageError(message, cause=cause, state="nothing was touched", hint="/api/openapi.json")
    return JSONResponse(error_json(error, "api"), 400, {EXIT_CODE: "2"})


def refusal_response(status: int, message: str, hint: str | None = None) -> Response:
    """A refusal as an envelope."""
    error = UsageError(message, state="nothing was touched", hint=hint)
    return JSONResponse(error_json(error, "api", code="refused"), status, {EXIT_CODE: "2"})


def _unknown() -> Response:
    return refusal_response(404, "there is nothing of that name", "/api/openapi.json")
