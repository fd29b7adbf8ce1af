"""The application: the gate before everything, the routes of the API, the metrics, and the page.

It can do nothing itself: whatever it is asked for, it asks the daemon.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunerd.errors import Busy, HostError
from tunerd.machine.peers import peer_of
from tunerd.operations import WrongError, argv_of
from tunerd.web.gate import MAX_BODY_BYTES, PEER, Gate, GateMiddleware, Visitor
from tunerd.web.routes import (
    BEGINS,
    LOOK_PATHS,
    READS,
    RUN,
    Answer,
    answer_of,
    bad_request,
    describe_api,
    is_slow,
    refused,
)
from tunerd.words import generation_number

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tunerd.machine.peers import Peer


EXIT_CODE = "x-tunerd-exit-code"
_BY_CODE = {"busy": 409, "usage": 404, "config": 422, "deploy": 409, "stranded": 409}
_ERRORS = {404: "there is nothing under this address", 405: "that cannot be done here",
           500: "tunerd itself failed; its log says how"}  # fmt: skip
_METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
_POLL_S = 0.25
_BEGUN = 202
_KEEP_ALIVE_S = 15.0
_BODY_S = 20.0

Handler = Callable[[Request], Awaitable[Response]]


# Longer than two that look for something take, one after the other.
_LIMIT_S = 600.0
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_SLOW_AT_ONCE = 2
_OF_ONE_AT_ONCE = 2
_MOST_WAITING = 32


@dataclass(frozen=True, slots=True)
class Facts:
    """What the page needs to know of the daemon's settings."""

    unit: str
    every_s: float
    listen: str | None
    hosts: tuple[str, ...]


def read_facts(path: Path) -> Facts:
    """Ask a daemon for them.

    Raises:
        HostError: it does not answer.
    """
    answer = _asked(path, {"uid": 0, "look": "facts"})
    found = answer.envelope
    if answer.is_error:
        raise HostError("tunerd's daemon does not answer", cause=found["error"]["message"])
    return Facts(found["unit"], found["every_s"], found["listen"], tuple(found["hosts"]))


def ask(path: Path, question: bytes) -> bytes:
    """The answer to a question of one line; what may be asked for is checked at the other end.

    Raises:
        HostError: nobody answers.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(_LIMIT_S)
            channel.connect(str(path))
            channel.sendall(question + b"\n")
            with channel.makefile("rb") as told:
                line = told.readline(_MAX_ANSWER_BYTES)
    except OSError as error:
        raise _silent(path, error.strerror or str(error)) from error
    if not line.endswith(b"\n"):
        raise _silent(path, "the other end said no whole line")
    return line[:-1]


def _silent(path: Path, why: str) -> HostError:
    return HostError(
        "tunerd's daemon does not answer",
        cause=f"`{path}`: {why}",
        hint="`systemctl status tunerd` says more",
    )


def _asked(path: Path, question: Mapping[str, Any]) -> Answer:
    try:
        return answer_of(ask(path, json.dumps(question).encode()))
    except HostError as problem:
        return Answer.failed(problem)


@dataclass
class Front:
    """Asks the daemon for everything, and holds each account to its share; `path` is where it is asked."""

    path: Path
    gate: Gate
    facts: Facts
    _shares: dict[str, anyio.CapacityLimiter] = field(default_factory=dict)
    _slow: anyio.CapacityLimiter | None = None

    async def read(
        self,
        path: str,
        visitor: Visitor,
        parts: Mapping[str, str] | None = None,
        query: Mapping[str, str | list[str]] | None = None,
    ) -> Answer:
        """What a path of the API says; slow ones wait for each other, and hold up nobody else."""
        given = {**(query or {}), **(parts or {})}
        if path in LOOK_PATHS:
            return await self.look(LOOK_PATHS[path], visitor, given)
        kind = READS[path]
        try:
            argv = argv_of(kind, given, is_text=True)
        except WrongError as error:
            if str(error).partition(":")[0] in (parts or {}):
                return refused(404, "there is nothing of that name", "/api/openapi.json")
            return bad_request("a parameter is wrong", str(error))
        if not is_slow(kind):
            return await self._ask(visitor, argv=argv)
        return await self.wait(argv, visitor)

    async def look(self, name: str, visitor: Visitor, given: Mapping[str, Any]) -> Answer:
        """What no command says."""
        return await self._ask(visitor, look=name, given=given)

    async def wait(self, argv: Sequence[str], visitor: Visitor) -> Answer:
        """What a slow look comes to."""
        self._slow = self._slow or anyio.CapacityLimiter(_SLOW_AT_ONCE)
        return await self._in_turn(visitor, self._slow, argv=list(argv), waits=True)

    async def run(self, argv: Sequence[str], visitor: Visitor) -> Answer:
        """What these words come to: a job that was begun, or what was read."""
        return await self._in_turn(visitor, None, argv=list(argv))

    async def begin(
        self, kind: str, given: Mapping[str, Any], visitor: Visitor, *, is_text: bool = False
    ) -> Answer:
        """Begin a job with these values of its operation."""
        try:
            argv = argv_of(kind, given, is_text=is_text)
        except WrongError as error:
            return bad_request("the body is wrong", str(error))
        return await self.run(argv, visitor)

    async def _in_turn(
        self, visitor: Visitor, limiter: anyio.CapacityLimiter | None, **what: Any
    ) -> Answer:
        """Ask; what one account asks for waits for each other, and not what others ask for."""
        share = self._shares.setdefault(visitor.key, anyio.CapacityLimiter(_OF_ONE_AT_ONCE))
        if share.statistics().tasks_waiting >= _MOST_WAITING:
            problem = Busy(
                "too much that you asked for waits",
                cause=f"{_MOST_WAITING} requests of {visitor.name}",
                state="nothing was touched",
                hint="try again when they are answered",
            )
            return Answer.failed(problem)
        async with share:
            return await self._ask(visitor, limiter, **what)

    async def _ask(
        self, visitor: Visitor, limiter: anyio.CapacityLimiter | None = None, **what: Any
    ) -> Answer:
        question = {"uid": visitor.peer.uid, **what}
        return await anyio.to_thread.run_sync(_asked, self.path, question, limiter=limiter)


def build_app(
    front: Front,
    pages: Sequence[Route],
    page_error: Callable[[Request, int, str], Response],
) -> GateMiddleware:
    """The application, behind its gate; `page_error` shows a status and its words to a browser."""

    async def failed(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = _ERRORS.get(status, "it cannot be done")
        response: Response = (
            respond(refused(status, text, "/api/openapi.json"))
            if request.url.path.startswith("/api/")
            else page_error(request, status, text)
        )
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        return response

    routes = [
        *(Route(path, _reading(front, path), methods=["GET"]) for path in (*READS, *LOOK_PATHS)),
        *(Route(path, _beginning(front, kind), methods=["POST"]) for path, kind in BEGINS.items()),
        Route(RUN, _running(front), methods=["POST"]),
        Route("/api/jobs/{number}/events", _events(front), methods=["GET"]),
        Route("/api/openapi.json", _openapi, methods=["GET"]),
        Route("/metrics", _metrics(front), methods=["GET"]),
        *pages,
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: failed})
    app.router.redirect_slashes = False
    return GateMiddleware(app, front.gate)


def _reading(front: Front, path: str) -> Handler:
    async def handle(request: Request) -> Response:
        asked = request.query_params
        several = {key: asked.getlist(key) for key in asked}
        query = {key: found if len(found) > 1 else found[0] for key, found in several.items()}
        return respond(await front.read(path, _visitor(request), request.path_params, query))

    return handle


def _beginning(front: Front, kind: str) -> Handler:
    async def handle(request: Request) -> Response:
        body = await _body(request)
        if isinstance(body, Response):
            return body
        return _begun(await front.begin(kind, body, _visitor(request)))

    return handle


def _running(front: Front) -> Handler:
    async def handle(request: Request) -> Response:
        body = await _body(request)
        if isinstance(body, Response):
            return body
        argv = body.get("argv")
        if set(body) != {"argv"} or not isinstance(argv, list) or not all(map(_is_word, argv)):
            return respond(bad_request("the body is wrong", "argv: is no list of texts"))
        return _begun(await front.run(argv, _visitor(request)))

    return handle


def _is_word(word: object) -> bool:
    return isinstance(word, str) and word.isprintable()


def _begun(answer: Answer) -> Response:
    response = respond(answer)
    if answer.status == _BEGUN:
        response.headers["location"] = f"/api/jobs/{answer.envelope['job']['job']}"
    return response


def _events(front: Front) -> Handler:
    followed: dict[str, _Followed] = {}

    async def handle(request: Request) -> Response:
        visitor, number = _visitor(request), request.path_params["number"]
        job = followed.get(number) or _Followed()
        await job.look(front, visitor, number)
        if job.refused is not None:
            return respond(job.refused)
        seen = generation_number(request.headers.get("last-event-id", "")) or 0
        return StreamingResponse(
            told(job, visitor, number, seen),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def told(job: _Followed, visitor: Visitor, number: str, seen: int) -> AsyncIterator[str]:
        job = followed.setdefault(number, job)
        job.n_readers += 1
        try:
            async for text in _stream(front, job, visitor, number, seen):
                yield text
        finally:
            job.n_readers -= 1
            if not job.n_readers:
                followed.pop(number, None)

    return handle


@dataclass
class _Followed:
    """What a job told: however many follow it, the daemon is asked now and then, for what is new."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    is_over: bool = False
    refused: Answer | None = None
    n_readers: int = 0
    _offset: int = 0
    _asked_s: float = -math.inf
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    async def look(self, front: Front, visitor: Visitor, number: str) -> None:
        async with self._lock:
            if self.is_over or anyio.current_time() - self._asked_s < _POLL_S:
                return
            since = {"number": number, "offset": str(self._offset)}
            answer = await front.look("news", visitor, since)
            self._asked_s = anyio.current_time()
            if answer.is_error:
                self.refused = answer
                return
            self.events += answer.envelope["events"]
            self._offset, self.is_over = answer.envelope["offset"], answer.envelope["is_over"]


async def _stream(
    front: Front, job: _Followed, visitor: Visitor, number: str, seen: int
) -> AsyncIterator[str]:
    """Every event after the first `seen`, until the job is over; the job does not care who listens."""
    quiet_s = 0.0
    while job.refused is None:  # where the daemon went away the client asks again
        for at, event in enumerate(job.events[seen:], seen + 1):
            yield f"id: {at}\nevent: {event.get('event')}\ndata: {json.dumps(event)}\n\n"
            quiet_s = 0.0
        seen = max(seen, len(job.events))
        if job.is_over:
            if not job.events or job.events[-1].get("event") != "end":
                died = {"event": "end", "exit_code": 1, "result": None}
                yield f"event: end\ndata: {json.dumps(died)}\n\n"
            return
        await anyio.sleep(_POLL_S)
        quiet_s += _POLL_S
        if quiet_s >= _KEEP_ALIVE_S:
            quiet_s = 0.0
            yield ": still at it\n\n"
        await job.look(front, visitor, number)


def _metrics(front: Front) -> Handler:
    async def handle(request: Request) -> Response:
        answer = await front.look("metrics", _visitor(request), {})
        if answer.is_error:
            return respond(answer)
        return Response(answer.envelope["text"], media_type=_METRICS_KIND)

    return handle


async def _openapi(_request: Request) -> Response:
    return JSONResponse(describe_api())


def _visitor(request: Request) -> Visitor:
    found: Visitor = request.scope["tunerd.visitor"]
    return found


def respond(answer: Answer) -> JSONResponse:
    """An envelope as an answer; the command's exit code stands in a header."""
    status = answer.status or 200
    if answer.is_error and answer.status is None:
        status = _BY_CODE.get(answer.envelope["error"]["code"], 503)
    return JSONResponse(dict(answer.envelope), status, {EXIT_CODE: str(answer.exit_code)})


async def _body(request: Request) -> dict[str, Any] | Response:
    if request.url.query:
        return respond(bad_request("there are no parameters here"))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return respond(refused(415, "the body is not application/json"))
    content = await read_body(request)
    if isinstance(content, Response):
        return content
    try:
        body = json.loads(content.decode())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return respond(bad_request("the body is wrong", "it is no JSON object"))
    return body


async def read_body(request: Request) -> bytes | Response:
    """The whole body, if it comes in time and is not too large."""
    try:
        with anyio.fail_after(_BODY_S):
            content = await request.body()
    except TimeoutError:
        return respond(refused(408, "the body did not come"))
    except ClientDisconnect:
        return respond(refused(400, "the client went away"))
    if len(content) > MAX_BODY_BYTES or request.scope.get("tunerd.too_large"):
        return respond(refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes"))
    return content


_MAX_HEAD_BYTES = 32 * 1024
_STOP_S = 5.0
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: 5\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients are held to.

    `connections` may be open at once on the socket, and as many on a port, `of_one` of them by one
    account, so that nobody can shut the others out; whoever will be refused has only room among
    `strangers`. A head must be whole `head_s` after its first byte [s].
    """

    connections: int = 512
    of_one: int = 256
    strangers: int = 32
    head_s: float = 20.0


class _Protocol(H11Protocol):
    """Asks the kernel for the peer of a connection, and gives up on one that does not speak."""

    limits = Limits()
    knows: Callable[[Peer], bool]
    place: object = None
    origin: object = None
    _unheard: Any = None  # the timer that gives up

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app, peer = self.app, peer_of(transport.get_extra_info("socket"))
        is_known = self.knows(peer)
        self.place = (peer.via, is_known)
        self.origin = (self.place, peer.uid)
        most = self.limits.connections if is_known else self.limits.strangers
        if self._n_like("place") > most or self._n_like("origin") > self.limits.of_one:
            self._turn_away()
            return

        async def with_peer(scope: Scope, receive: Receive, send: Send) -> None:
            scope[PEER] = peer
            await app(scope, receive, send)

        self.app = with_peer
        self._unheard = self.loop.call_later(self.limits.head_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_at_work():
            self._stop_waiting()
        elif self._unheard is None:  # not anew with each byte: a head may come one at a time
            self._unheard = self.loop.call_later(self.limits.head_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _n_like(self, what: str) -> int:
        mine = getattr(self, what)
        return sum(getattr(one, what, None) == mine for one in self.connections)

    def _is_at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._unheard is not None:
            self._unheard.cancel()
            self._unheard = None

    def _give_up(self) -> None:
        self._unheard = None
        if not self._is_at_work():
            self.transport.close()

    def _turn_away(self) -> None:
        self.transport.write(_FULL)
        self.transport.close()


class ApiServer:
    """The application on some listening sockets."""

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
        knows: Callable[[Peer], bool],
        limits: Limits = Limits(),
    ) -> None:
        config = uvicorn.Config(
            app,
            http=type(
                "_LimitedProtocol", (_Protocol,), {"limits": limits, "knows": staticmethod(knows)}
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            # Of each request that is no HTTP it would write a line, whoever sends it.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_graceful_shutdown=int(_STOP_S),
        )
        self._server = uvicorn.Server(config)
        self._sockets = list(sockets)

    def run(self) -> None:
        """Answer until a signal, or `stop`; connections wait in the sockets until it does."""
        self._server.run(sockets=self._sockets)

    def stop(self) -> None:
        """Answer what was asked, then no more; jobs go on."""
        self._server.should_exit = True
