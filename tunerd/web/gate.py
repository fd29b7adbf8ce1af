"""The gate before every route: who comes in, from where, how often, and with how much.

Clients are told apart by what the kernel says of them, else by a token. A browser is a client that
other pages can order about, so Host, Origin and a header that no foreign page can send are checked.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING

from tunerd.core.access import Peer, Via, host_is_ours, may_act, origin_is_ours

if TYPE_CHECKING:
    from starlette.datastructures import Headers

HEADER = "x-tunerd"
COOKIE = "tunerd_session"
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_BODY_BYTES = 64 * 1024
_MOST_FAILURES = 10
_WINDOW_S = 60.0
_MOST_ADDRESSES = 1024
_SESSION_S = 12 * 3600.0
_MOST_SESSIONS = 64


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is turned away, with the HTTP status that says so."""

    status: int
    message: str
    hint: str | None = None
    retry_after_s: int | None = None


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
    now_s: Callable[[], float]
    token: str | None = None
    hosts: Iterable[str] = ()
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _failures: dict[str, deque[float]] = field(default_factory=dict)
    _sessions: dict[str, float] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_origin(self, method: str, path: str, headers: Headers) -> Refusal | None:
        """Whether a browser was sent here by a page of somebody else."""
        host = headers.get("host")
        # On the socket as well: a tunnel (ssh -L) leads browsers there.
        if not host_is_ours(host, self.hosts):
            hint = "it is `localhost`; page.hosts in tunerd.toml names other hosts"
            return Refusal(421, "this address is not served under that name", hint)
        is_foreign = headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        if method in SAFE_METHODS:
            # A link may lead to the page; an image, a frame or a script costs a process and shows nothing.
            is_link = headers.get("sec-fetch-dest") == "document" and not path.startswith("/api/")
            if is_foreign and not is_link:
                return Refusal(403, "another site may not ask for anything here")
            return None
        if is_foreign or not origin_is_ours(headers.get("origin"), host):
            return Refusal(403, "another site may not change anything here")
        if path.startswith("/api/") and headers.get(HEADER) != "1":
            hint = "send the header `X-Tunerd: 1`, which no foreign page can"
            return Refusal(403, "the header that proves a deliberate request is missing", hint)
        return None

    def enter(self, peer: Peer, headers: Headers) -> Visitor | Refusal:
        """Who this is, if they may act."""
        # A proxy is no visitor: whoever it speaks for has to show the token.
        is_direct = not any(name in headers for name in _OF_PROXIES)
        if is_direct and may_act(peer, own_uid=self.own_uid, group=self.group()):
            return Visitor(peer, peer.text, f"uid:{peer.uid}")
        session = self._session(headers.get("cookie"))
        if session is not None:
            return Visitor(peer, peer.text, f"session:{session}")
        offered = _bearer(headers.get("authorization"))
        if offered is not None:
            return self.try_token(peer, offered)
        if self.token is not None and peer.via is Via.TCP:
            return Refusal(401, "a token is needed", "send `Authorization: Bearer TOKEN`")
        hint = "root adds somebody with `usermod -aG tunerd NAME`; it counts from the next login on"
        return Refusal(403, "only root and members of group tunerd may do that", hint)

    def try_token(self, peer: Peer, offered: str) -> Visitor | Refusal:
        """Whoever has the token, unless too many wrong ones came lately."""
        # Accounts of this machine share an address: one must not lock the others out.
        who = peer.address or "here" if peer.uid is None else f"uid:{peer.uid}"
        with self._lock:
            if who not in self._failures and len(self._failures) >= _MOST_ADDRESSES:
                del self._failures[next(iter(self._failures))]
            recent = self._failures.setdefault(who, deque(maxlen=_MOST_FAILURES))
            now_s = self.now_s()
            while recent and now_s - recent[0] > _WINDOW_S:
                recent.popleft()
            if len(recent) == _MOST_FAILURES:
                wait_s = int(_WINDOW_S - (now_s - recent[0])) + 1
                return Refusal(429, "too many wrong tokens", "wait a minute", wait_s)
            if self.token is not None and _same(offered, self.token):
                return Visitor(peer, peer.text, "token")
            recent.append(now_s)
        return Refusal(
            401, "that is not the token", "it stands in the file that page.token_file names"
        )

    def open_session(self) -> str:
        """A new session for a browser that showed the token."""
        name = secrets.token_hex(32)
        with self._lock:
            self._drop_old_sessions()
            while len(self._sessions) >= _MOST_SESSIONS:
                del self._sessions[min(self._sessions, key=lambda key: self._sessions[key])]
            self._sessions[name] = self.now_s() + _SESSION_S
        return name

    def form_token(self, visitor: Visitor) -> str:
        """What a form of ours carries, so that a form of somebody else is told from it."""
        return hmac.new(self._secret, visitor.key.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, visitor: Visitor, offered: str) -> bool:
        """Whether a form was ours, and this visitor's."""
        return _same(offered, self.form_token(visitor))

    def _session(self, cookie: str | None) -> str | None:
        try:
            morsel = SimpleCookie(cookie or "").get(COOKIE)
        except CookieError:
            return None
        if morsel is None:
            return None
        with self._lock:
            self._drop_old_sessions()
            return next((name for name in self._sessions if _same(name, morsel.value)), None)

    def _drop_old_sessions(self) -> None:
        now_s = self.now_s()
        for name in [name for name, end_s in self._sessions.items() if end_s < now_s]:
            del self._sessions[name]


def _bearer(header: str | None) -> str | None:
    kind, _, value = (header or "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else None


def _same(one: str, other: str) -> bool:
    """Compared in a time that tells nothing of either."""
    return hmac.compare_digest(_digest(one), _digest(other))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
