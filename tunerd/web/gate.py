"""Puts the gate before the application: who may come in, what is refused, and the headers of every answer."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response

from tunerd.machine.peers import Peer, Via
from tunerd.web.routes import Answer, refused

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


GROUP = "tunerd"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HIGHEST_PORT = 65535


def may_act(peer: Peer, *, own_uid: int, group: int | None) -> bool:
    """Whether this peer may use the API.

    Root counts on the socket alone: on a port its uid is that of whoever speaks through a forwarder or a
    container of root's.

    Args:
        peer: Who asks.
        own_uid: Of this process; 0 in system mode.
        group: Number of the group `tunerd`; None where there is none, or in user mode.
    """
    if peer.uid is None or not peer.is_local or (peer.uid == 0 and peer.via is Via.TCP):
        return False
    return peer.uid in {0, own_uid} or (group is not None and group in peer.groups)


def host_is_ours(host: str | None, names: Iterable[str]) -> bool:
    """Whether a Host header names this machine; any port, for tunnels have their own.

    A page of a foreign name that resolves to this machine (DNS rebinding) sends that name.

    Args:
        host: As sent; None where there was none.
        names: Addresses and names that are ours beside the loopback ones; IPv6 in brackets.
    """
    if host is None:
        return False
    name, port = _split(host.strip().lower())
    if port is not None and not (port.isdecimal() and int(port) <= _HIGHEST_PORT):
        return False
    return name in {*_LOOPBACK_NAMES, *(one.lower() for one in names)}


def origin_is_ours(origin: str | None, host: str | None) -> bool:
    """Whether an Origin header is that of the page which this very address serves.

    Programs send none; a browser sends one with everything that changes something.
    """
    if origin is None:
        return True
    scheme, separator, rest = origin.strip().lower().partition("://")
    if not separator or scheme not in {"http", "https"} or host is None:
        return False
    return rest == host.strip().lower()


def _split(host: str) -> tuple[str, str | None]:
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return name + bracket, rest[1:] if rest.startswith(":") else (rest or None)
    name, colon, port = host.partition(":")
    return name, port if colon else None


HEADER = "x-tunerd"
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who may act; `name` is for records, `key` tells one from another."""

    peer: Peer
    name: str
    key: str


@dataclass
class Gate:
    """Decides about every request; safe to ask from several threads.

    `group` gives the number of the group each time, for it may be made after the start.
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
            hint = "it is `localhost`; page.hosts in tunerd.toml names other hosts"
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
        """Whether this peer may come in, as far as the kernel says."""
        return may_act(peer, own_uid=self.own_uid, group=self.group())

    def enter(self, peer: Peer, headers: Headers) -> Visitor | Answer:
        """Who this is, if they may act."""
        if peer.uid == 0 and any(name in headers for name in _OF_PROXIES):
            hint = "let it run under an account of its own in group tunerd, with a login of its own"
            return refused(403, "a proxy that runs as root speaks for nobody", hint)
        if self.knows(peer):
            return Visitor(peer, peer.text, f"uid:{peer.uid}")
        hint = "root adds somebody with `usermod -aG tunerd NAME`; it counts from the next login on"
        return refused(403, "only root and members of group tunerd may do that", hint)

    def form_token(self, visitor: Visitor) -> str:
        """What a form of ours carries, so that a form of somebody else is told from it."""
        return hmac.new(self._secret, visitor.key.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, visitor: Visitor, offered: str) -> bool:
        """Whether a form was ours, and this visitor's."""
        return hmac.compare_digest(
            offered.encode("utf-8", "replace"), self.form_token(visitor).encode()
        )


PEER = "tunerd.peer"
VISITOR = "tunerd.visitor"
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
    """The outermost layer; a scope without a peer comes from nobody, and is refused."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        sender = _with_headers(send, scope["path"])
        refused = self._refuse(scope)
        if refused is not None:
            await refused(scope, receive, sender)
            return
        await self._app(scope, _bounded(scope, receive), sender)

    def _refuse(self, scope: Scope) -> Response | None:
        """The answer to whoever may not go on; the visitor is noted in the scope of who may."""
        peer: Peer | None = scope.get(PEER)
        headers = Headers(scope=scope)
        path: str = scope["path"]
        if peer is None:
            return _answer(refused(403, "the other end is not known"), path)
        refusal = self._gate.check_origin(scope["method"], path, headers)
        if refusal is not None:
            return _answer(refusal, path)
        if _declared(headers) > MAX_BODY_BYTES:
            return _answer(refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes"), path)
        found = self._gate.enter(peer, headers)
        if isinstance(found, Visitor):
            scope[VISITOR] = found
            return None
        return _answer(found, path)


def _answer(refusal: Answer, path: str) -> Response:
    if path.startswith(("/api/", "/metrics")):
        return JSONResponse(refusal.envelope, refusal.status or 403)
    error = refusal.envelope["error"]
    hint = f"<p>{escape(error['hint'])}</p>" if error["hint"] else ""
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>tunerd</title>'
        f"<main><h1>{escape(error['message'])}</h1>{hint}</main></html>"
    )
    return HTMLResponse(text, refusal.status or 403)


def _declared(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() and len(text) < 16 else 0  # noqa: PLR2004 -- h11 checks it


def _bounded(scope: Scope, receive: Receive) -> Receive:
    """Stops to hand on a body that is longer than it may be, whatever its head said."""
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                scope["tunerd.too_large"] = True
                return {"type": "http.request", "body": b"", "more_body": False}
        return message

    return bounded


def _with_headers(send: Send, path: str) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if not path.startswith("/static/"):
                headers["cache-control"] = "no-store"
        await send(message)

    return sender
