"""The application: the gate before everything, the routes of the API, the metrics, and the page.

It can do nothing itself: whatever it is asked for, it asks the daemon.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunerd.errors import Busy, HostError
from tunerd.machine.peers import Peer, Via, peer_of
from tunerd.operations import WrongError, argv_of
from tunerd.result import error_from_json
from tunerd.web.routes import (
    BEGINS,
    LOOK_PATHS,
    READS,
    RUN,
    Answer,
    bad_request,
    describe_api,
    is_slow,
    refused,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


# The gate: who may come in, what is refused, and the headers of every answer

GROUP = "tunerd"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[]*)(:[0-9]{1,5})?")


def host_is_ours(host: str | None, names: Iterable[str]) -> bool:
    """Whether a Host header names this machine; any port, for tunnels have their own.

    A page of a foreign name that resolves to this machine (DNS rebinding) sends that name.

    Args:
        host: As sent; None where there was none.
        names: Addresses and names that are ours beside the loopback ones; IPv6 in brackets.
    """
    found = _HOST.fullmatch((host or "").strip().lower())
    return found is not None and found["name"] in {*_LOOPBACK_NAMES, *map(str.lower, names)}


def origin_is_ours(origin: str | None, host: str | None) -> bool:
    """Whether an Origin header is that of the page which this very address serves.

    Programs send none; a browser sends one with everything that changes something.
    """
    if origin is None:
        return True
    ours = {f"{scheme}://{(host or '').strip().lower()}" for scheme in ("http", "https")}
    return host is not None and origin.strip().lower() in ours


HEADER = "x-tunerd"
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_BODY_BYTES = 64 * 1024


@dataclass
class Gate:
    """Decides about every request; safe to ask from several threads.

    `own_uid` is that of this process, 0 in system mode. `group` gives the number of the group `tunerd` each time,
    for it may be made after the start; None where there is none, or in user mode.
    """

    own_uid: int
    group: Callable[[], int | None]
    hosts: Iterable[str] = ()
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def check_origin(self, method: str, path: str, headers: Headers) -> Answer | None:
        """Whether a browser was sent here by a page of somebody else."""
        host = headers.get("host")
        # On the socket as well: a tunnel (ssh -L) leads browsers there.
        if not host_is_ours(host, self.hosts):
            hint = "use `localhost`; page.hosts in tunerd.toml names other hosts"
            return refused(421, "this address is not served under that name", hint)
        is_foreign = headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        if method in SAFE_METHODS:
            # A link may lead to the page; an image, a frame or a script costs a process and shows nothing.
            is_link = headers.get("sec-fetch-dest") == "document" and not path.startswith("/api/")
            if is_foreign and not is_link:
                return refused(403, "another site may not ask for anything here")
            return None
        if is_foreign or not origin_is_ours(headers.get("origin"), host):
            return refused(403, "another site may not change anything here")
        if path.startswith("/api/") and headers.get(HEADER) != "1":
            hint = "send the header `X-Tunerd: 1`, which no foreign page can"
            return refused(403, "the header that proves a deliberate request is missing", hint)
        return None

    def knows(self, peer: Peer) -> bool:
        """Whether this peer may come in, as far as the kernel says.

        Root counts on the socket alone: on a port its uid is that of whoever speaks through a forwarder or a
        container of root's.
        """
        if peer.uid is None or (peer.uid == 0 and peer.via is Via.TCP):
            return False
        group = self.group()
        return peer.uid in {0, self.own_uid} or (group is not None and group in peer.groups)

    def enter(self, peer: Peer, headers: Headers) -> Answer | None:
        """Why this peer may not act; None where they may."""
        if peer.uid == 0 and any(name in headers for name in _OF_PROXIES):
            hint = "run it under an account of its own in group tunerd, with a login of its own"
            return refused(403, "a proxy that runs as root may not speak for others", hint)
        if self.knows(peer):
            return None
        hint = "root adds people with `usermod -aG tunerd NAME`; it takes effect at the next login"
        return refused(403, "only root and members of group tunerd may do that", hint)

    def form_token(self, visitor: Peer) -> str:
        """What a form of ours carries, so that a form of somebody else is told from it."""
        return hmac.new(self._secret, str(visitor.uid).encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, visitor: Peer, offered: str) -> bool:
        """Whether a form was ours, and this visitor's."""
        ours = self.form_token(visitor).encode()
        return hmac.compare_digest(offered.encode("utf-8", "replace"), ours)


PEER = "tunerd.peer"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With no-referrer a browser sends `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class GateMiddleware:
    """The outermost layer; who asks stands in the scope of each request, as the kernel says."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, as ASGI has it."""
        if scope["type"] != "http":
            return
        path, headers = scope["path"], Headers(scope=scope)
        refusal = self._gate.check_origin(scope["method"], path, headers)
        refusal = refusal or self._gate.enter(scope[PEER], headers)
        answers = self._app if refusal is None else _answer(refusal, path)
        await answers(scope, receive, _with_headers(send, path))


class Json(JSONResponse):
    """JSON of anything: names and texts that are not UTF-8 are in it as surrogates, which read back."""

    def render(self, content: Any) -> bytes:
        """As bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _answer(refusal: Answer, path: str) -> Response:
    if path.startswith(("/api/", "/metrics")):
        return _respond(refusal)
    error = refusal.envelope["error"]
    text = "\n\n".join(filter(None, (error["message"], error["hint"])))
    return PlainTextResponse(text, status_of(refusal))


def _with_headers(send: Send, path: str) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            is_file = path.startswith("/static/") and message["status"] < 400  # noqa: PLR2004
            headers["cache-control"] = "no-cache" if is_file else "no-store"
        await send(message)

    return sender


# The routes


class RefusedError(Exception):
    """What was asked for is not done, or cannot be shown; the answer says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


EXIT_CODE = "x-tunerd-exit-code"
_BY_CODE = {
    "busy": 409,
    "usage": 404,
    "unknown_name": 404,
    "config": 422,
    "deploy": 409,
    "stranded": 409,
}
_ERRORS = {404: "there is nothing under this address", 405: "that cannot be done here",
           500: "tunerd itself failed; its log says how"}  # fmt: skip
_METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
_BEGUN = 202
_BODY_S = 20.0

# Longer than two that look for something take, one after the other.
_LIMIT_S = 600.0
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
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
    found, *_ = json.loads(ask(path, json.dumps({"uid": 0, "look": "facts"}).encode()))
    if "error" in found:
        raise error_from_json(found)
    return Facts(found["unit"], found["every_s"], found["listen"], tuple(found["hosts"]))


def ask(path: Path, question: bytes) -> bytes:
    """The answer to a question of one line; what may be asked for is checked at the other end.

    Raises:
        HostError: nobody answers.
    """
    why = "no whole line came"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(_LIMIT_S)
            channel.connect(str(path))
            channel.sendall(question + b"\n")
            with channel.makefile("rb") as told:
                line = told.readline(_MAX_ANSWER_BYTES)
        if line.endswith(b"\n"):
            return line[:-1]
    except OSError as error:
        why = error.strerror or str(error)
    raise HostError(
        "tunerd's daemon does not answer",
        cause=f"`{path}`: {why}",
        hint="`systemctl status tunerd` says more",
    )


def _asked(path: Path, question: Mapping[str, Any]) -> Answer:
    try:
        return Answer(*json.loads(ask(path, json.dumps(question).encode())))
    except HostError as problem:
        return Answer.failed(problem)


@dataclass
class Front:
    """Asks the daemon for everything, and holds each account to its share; `path` is where it is asked."""

    path: Path
    gate: Gate
    facts: Facts
    _shares: dict[int | None, anyio.CapacityLimiter] = field(default_factory=dict)

    async def read(
        self,
        path: str,
        visitor: Peer,
        parts: Mapping[str, str] | None = None,
        query: Mapping[str, str | list[str]] | None = None,
    ) -> Answer:
        """What a path of the API says; slow ones wait for others of the same account."""
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

    async def look(self, name: str, visitor: Peer, given: Mapping[str, Any]) -> Answer:
        """What no command says."""
        return await self._ask(visitor, look=name, given=given)

    async def wait(self, argv: Sequence[str], visitor: Peer) -> Answer:
        """What a slow look comes to."""
        return await self._in_turn(visitor, argv=list(argv), waits=True)

    async def run(self, argv: Sequence[str], visitor: Peer) -> Answer:
        """What these words come to: a job that was begun, or what was read."""
        return await self._in_turn(visitor, argv=list(argv))

    async def begin(
        self, kind: str, given: Mapping[str, Any], visitor: Peer, *, is_text: bool = False
    ) -> Answer:
        """Begin a job with these values of its operation."""
        try:
            argv = argv_of(kind, given, is_text=is_text)
        except WrongError as error:
            return bad_request("the body is wrong", str(error))
        return await self.run(argv, visitor)

    async def _in_turn(self, visitor: Peer, **what: Any) -> Answer:
        """Ask; what one account asks for waits for each other, and not what others ask for."""
        share = self._shares.setdefault(visitor.uid, anyio.CapacityLimiter(_OF_ONE_AT_ONCE))
        if share.statistics().tasks_waiting >= _MOST_WAITING:
            problem = Busy(
                "too many of your requests are waiting",
                cause=f"{_MOST_WAITING} requests of {visitor.text}",
                state="nothing was touched",
                hint="try again when they are answered",
            )
            return Answer.failed(problem)
        async with share:
            return await self._ask(visitor, **what)

    async def _ask(self, visitor: Peer, **what: Any) -> Answer:
        return await anyio.to_thread.run_sync(_asked, self.path, {"uid": visitor.uid, **what})


def build_app(
    front: Front, pages: Sequence[BaseRoute], page_error: Callable[[Request, Answer], Response]
) -> GateMiddleware:
    """The application, behind its gate; `page_error` shows a browser what went wrong."""

    async def failed(request: Request, error: Exception) -> Response:
        is_api = request.url.path.startswith("/api/")
        if isinstance(error, RefusedError):
            answer = error.answer
        else:
            status = error.status_code if isinstance(error, HTTPException) else 500
            hint = "/api/openapi.json" if is_api else None
            answer = refused(status, _ERRORS.get(status, "it cannot be done"), hint)
        response: Response = _respond(answer) if is_api else page_error(request, answer)
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        return response

    routes = [
        *(Route(at, partial(_read, front, at), methods=["GET"]) for at in (*READS, *LOOK_PATHS)),
        *(Route(at, partial(_begin, front, kind), methods=["POST"]) for at, kind in BEGINS.items()),
        Route(RUN, partial(_run, front), methods=["POST"]),
        Route("/api/openapi.json", lambda _request: Json(describe_api()), methods=["GET"]),
        Route("/metrics", partial(_metrics, front), methods=["GET"]),
        *pages,
    ]
    kinds: tuple[type[Exception], ...] = (RefusedError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, failed))
    app.router.redirect_slashes = False
    return GateMiddleware(app, front.gate)


async def _read(front: Front, path: str, request: Request) -> Response:
    asked = request.query_params
    several = {key: asked.getlist(key) for key in asked}
    query = {key: found if len(found) > 1 else found[0] for key, found in several.items()}
    return _respond(await front.read(path, visitor_of(request), request.path_params, query))


async def _begin(front: Front, kind: str, request: Request) -> Response:
    return _begun(await front.begin(kind, await _body(request), visitor_of(request)))


async def _run(front: Front, request: Request) -> Response:
    body = await _body(request)
    argv = body.get("argv")
    if (
        set(body) != {"argv"}
        or not isinstance(argv, list)
        or not all(isinstance(word, str) and word.isprintable() for word in argv)
    ):
        raise RefusedError(bad_request("the body is wrong", "argv: is not a list of texts"))
    return _begun(await front.run(argv, visitor_of(request)))


def _begun(answer: Answer) -> Response:
    response = _respond(answer)
    if answer.status == _BEGUN:
        response.headers["location"] = f"/api/jobs/{answer.envelope['job']['job']}"
    return response


async def _metrics(front: Front, request: Request) -> Response:
    answer = await front.look("metrics", visitor_of(request), {})
    if answer.is_error:
        return _respond(answer)
    return Response(answer.envelope["text"], media_type=_METRICS_KIND)


def visitor_of(request: Request) -> Peer:
    """Who asks: nobody comes here whom the gate refuses."""
    found: Peer = request.scope[PEER]
    return found


def status_of(error: Answer) -> int:
    """The HTTP status of an answer that is an error."""
    return error.status or _BY_CODE.get(error.envelope["error"]["code"], 503)


def _respond(answer: Answer) -> Json:
    """An envelope as an answer; the command's exit code stands in a header."""
    status = status_of(answer) if answer.is_error else answer.status or 200
    return Json(dict(answer.envelope), status, {EXIT_CODE: str(answer.exit_code)})


async def _body(request: Request) -> dict[str, Any]:
    if request.url.query:
        raise RefusedError(bad_request("there are no parameters here"))
    content = await read_body(request, "application/json")
    try:
        body = json.loads(content.decode())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RefusedError(bad_request("the body is wrong", "it is not a JSON object"))
    return body


async def read_body(request: Request, wanted: str) -> bytes:
    """The whole body.

    Raises:
        RefusedError: it is of another kind, does not come in time, or is too large, whatever its head says.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        raise RefusedError(refused(415, f"the body is not {wanted}"))
    content = bytearray()
    try:
        with anyio.fail_after(_BODY_S):
            async for piece in request.stream():
                content += piece
                if len(content) > MAX_BODY_BYTES:
                    text = f"the body is larger than {MAX_BODY_BYTES} bytes"
                    raise RefusedError(refused(413, text))
    except TimeoutError as error:
        raise RefusedError(refused(408, "the body did not arrive")) from error
    except ClientDisconnect as error:
        raise RefusedError(refused(400, "the client went away")) from error
    return bytes(content)


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
            self.transport.write(_FULL)
            self.transport.close()
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
