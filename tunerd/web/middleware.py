"""Puts the gate before the application: refuses, bounds bodies, and adds the headers of every answer."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from tunerd.actions.jobs import error_json
from tunerd.core.access import Peer, Via
from tunerd.errors import UsageError
from tunerd.web.gate import MAX_BODY_BYTES, Gate, Refusal, Visitor

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PEER = "tunerd.peer"
VISITOR = "tunerd.visitor"
# plotly sets styles from its script; no script but our own files runs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
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
# What somebody without a session may see: where the token is shown, and how it looks.
_OPEN_PATHS = frozenset({"/login", "/static/page.css"})


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
            return _answer(Refusal(403, "the other end is not known"), path)
        refusal = self._gate.check_origin(scope["method"], path, headers)
        if refusal is not None:
            return _answer(refusal, path)
        if _declared(headers) > MAX_BODY_BYTES:
            return _answer(Refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes"), path)
        if path in _OPEN_PATHS and peer.via is Via.TCP:
            return None
        found = self._gate.enter(peer, headers)
        if isinstance(found, Visitor):
            scope[VISITOR] = found
            return None
        if found.status == 401 and _is_page(path) and scope["method"] == "GET":  # noqa: PLR2004
            return RedirectResponse("/login", 303)
        return _answer(found, path)


def _answer(refusal: Refusal, path: str) -> Response:
    headers = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
    if refusal.status == 401:  # noqa: PLR2004
        headers["www-authenticate"] = 'Bearer realm="tunerd"'
    if _is_page(path):
        hint = f"<p>{escape(refusal.hint)}</p>" if refusal.hint else ""
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>tunerd</title>'
            f"<main><h1>{escape(refusal.message)}</h1>{hint}</main></html>"
        )
        return HTMLResponse(text, refusal.status, headers)
    error = UsageError(refusal.message, state="nothing was touched", hint=refusal.hint)
    return JSONResponse(error_json(error, "api", code="refused"), refusal.status, headers)


def _is_page(path: str) -> bool:
    return not path.startswith(("/api/", "/metrics"))


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
