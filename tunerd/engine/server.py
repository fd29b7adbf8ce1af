"""How llama-server is asked over HTTP.

Replies are hostile until read: they are bounded in size and time, and whatever is not what a
llama-server would say comes back as a value that says so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd.engine.health import Completion, HttpState
from tunerd.machine.clock import Clock
from tunerd.machine.http import HttpRequest, NoAnswerError, NoAnswerInTimeError
from tunerd.machine.net import address_in, own_host, who_shares

MAX_STREAM_BYTES = 64 * 1024 * 1024
MAX_PIECES = 1024 * 1024  # a byte that comes alone takes a hundred here, and so does an empty event
_DATA = b"data:"
_ERROR = b"error:"
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer.

    `events` are JSON objects with the milliseconds since the request was sent; `wall_ms` is the whole
    time. `is_whole` says that the stream came to its own end; `problem` why there is no answer, or
    only a part of one.
    """

    events: tuple[tuple[float, dict[str, Any]], ...]
    wall_ms: float
    is_whole: bool
    problem: str | None = None
    timed_out: bool = False


@dataclass
class Arrivals:
    """Pieces of a body as they came, with their times [ms]."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    n_bytes: int = 0
    n_lines: int = 0

    def add(self, at_ms: float, piece: bytes) -> bool:
        """Note a piece; False where the answer has grown too large to be one."""
        self.pieces.append((at_ms, piece))
        self.n_bytes += len(piece)
        self.n_lines += piece.count(b"\n")  # two an event
        n_most = max(len(self.pieces), self.n_lines // 2)
        return self.n_bytes <= MAX_STREAM_BYTES and n_most <= MAX_PIECES

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    def lines(self) -> Iterator[tuple[float, bytes]]:
        """Whole lines, each with the time of the piece that ended it."""
        begun: list[bytes] = []  # of a line that has not ended; never joined before that
        for at_ms, piece in self.pieces:
            *lines, rest = piece.split(b"\n")
            for line in lines:
                yield at_ms, b"".join((*begun, line)).rstrip(b"\r")
                begun.clear()
            begun.append(rest)
        if last := b"".join(begun):
            yield self.pieces[-1][0], last


def read_events(
    arrivals: Arrivals,
) -> tuple[tuple[tuple[float, dict[str, Any]], ...], str | None]:
    """The objects in a stream, and the error that the server told in it."""
    found: list[tuple[float, dict[str, Any]]] = []
    problem = None
    for at_ms, line in arrivals.lines():
        is_error = line.startswith(_ERROR)
        if not is_error and not line.startswith(_DATA):
            continue  # comments keep the connection open, other fields are of no use here
        payload = line.partition(b":")[2].strip()
        if payload in (b"", _DONE):
            continue
        event = _object(payload)
        if event is None:
            problem = problem or "an event is not a JSON object"
        elif is_error or "error" in event:
            problem = problem or _told(event)
        else:
            found.append((at_ms, event))
    return tuple(found), problem


def _object(payload: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _told(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:300] if message else "an error without a message"


MAX_REPLY_BYTES = 8 * 1024 * 1024
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
NOT_IN_TIME = "no answer in time"
_TOO_LARGE = "the answer is too large"
_EVENTS = "text/event-stream"
_HEALTH = "/health"
_LOADING = 503
_OK = 200
# Wrong key, no such route, wrong question; 501 is what a server of embeddings says.
_REFUSALS = frozenset({*range(400, 500), 501})
_WANTS_KEY = (401, 403)
_MOST = 2**31 - 1  # llama.cpp counts in 32 bits
_AT_WORK = re.compile(r"(?m)^llamacpp:requests_processing (\d{1,9})\b")


class UnknownListenerError(NoAnswerError):
    """Whether it is the server that would be asked cannot be seen from here."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, the key it wants, if any, and the process that it is.

    With a process it is asked where that one listens, and nobody else is: neither who took its port
    nor who listens on another address that its name has.
    """

    host: str
    port: int
    api_key: str | None = None
    pid: int | None = None

    @property
    def bound_host(self) -> str:
        """The host on which it binds."""
        return self.host.split(",")[0].strip() or _ANY_ADDRESS[""]

    @property
    def reachable_host(self) -> str:
        """The host by which it is reached from this machine."""
        return _ANY_ADDRESS.get(self.bound_host, self.bound_host)

    @property
    def url(self) -> str:
        """The base URL to reach it from this machine."""
        host = self.reachable_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def now(self) -> tuple[str, str | None]:
        """The host to connect to, and the key, where it is known who will read it.

        Raises:
            NoAnswerError: its process does not listen there.
            UnknownListenerError: nobody can say who does.
        """
        if self.pid is None:
            return self.reachable_host, self.api_key
        try:
            host = own_host(self.pid, self.port)
        except LookupError:
            host = self.reachable_host
            if address_in(host) is None:
                raise UnknownListenerError(f"it is unknown who listens on {host}") from None
            return host, None
        if host is None:
            raise NoAnswerError(f"process {self.pid} does not listen on port {self.port}")
        return host, self.api_key

    def sharer(self) -> int | None:
        """Another process that may be asked in its place; None where nobody is seen, or its own is not known."""
        with contextlib.suppress(NoAnswerError):
            return None if self.pid is None else who_shares(self.port, self.now()[0], self.pid)
        return None


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: `body` is the parsed JSON or None, `problem` why there is none.

    `had_key`: the request had a key with it.
    """

    status: int | None
    body: Any
    problem: str | None
    timed_out: bool = False
    had_key: bool = False


@dataclass(frozen=True, slots=True)
class Slots:
    """What the slots route says: how many there are, how many work, whether speculation is active.

    `speculative` is None where the build does not say (ik) or nothing could be read.
    """

    total: int
    busy: int
    speculative: bool | None


@dataclass(frozen=True, slots=True)
class Props:
    """What the props route says; every build answers it without waking up.

    `n_slots` is None where it does not say, `is_asleep` is False where the build cannot sleep. A router
    serves no model itself: it starts a server for each that it is asked for.
    """

    n_slots: int | None
    is_asleep: bool = False
    is_router: bool = False


def listed_models(reply: Reply) -> tuple[str, ...]:
    """The names in an answer of `/v1/models`, none where it is no such list."""
    try:
        return tuple(row["id"] for row in reply.body["data"] if isinstance(row["id"], str))
    except (KeyError, TypeError):
        return ()


class LlamaServer:
    """One running llama-server."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self.address = address
        self.slowest_s = 0.0  # until the first piece of a stream
        self._clock = clock
        self._open: set[HttpRequest] = set()

    def health(self, *, timeout_s: float = 2.0) -> HttpState:
        """What the health route says.

        ik binds its port and stays silent while it loads; mainline answers 503.
        """
        reply = self.get(_HEALTH, timeout_s=timeout_s)
        if reply.status is None:
            return HttpState.SILENT if reply.timed_out else HttpState.REFUSED
        if reply.status == _LOADING:
            return HttpState.LOADING
        is_ready = (
            reply.status == _OK
            and isinstance(reply.body, dict)
            and reply.body.get("status") in ("ok", "no slot available")  # of any type
        )
        return HttpState.READY if is_ready else HttpState.WRONG

    def alias(self, *, timeout_s: float = 5.0) -> str | None:
        """The name of the model that it serves; None if it could not be told."""
        return next(iter(listed_models(self.get("/v1/models", timeout_s=timeout_s))), None)

    def props(self, *, timeout_s: float = 5.0) -> Props | None:
        """What it says of itself; None where the route cannot be read."""
        reply = self.get("/props", timeout_s=timeout_s)
        if reply.status != _OK or not isinstance(reply.body, dict):
            return None
        return Props(
            _whole(reply.body.get("total_slots")),
            is_asleep=reply.body.get("is_sleeping") is True,
            is_router=reply.body.get("role") == "router",
        )

    def slots(self, *, timeout_s: float = 5.0) -> Slots | None:
        """The state of the slots; None where the route is off or cannot be read.

        A server that sleeps loads its model for this question.
        """
        reply = self.get("/slots", timeout_s=timeout_s)
        if reply.status != _OK or not isinstance(reply.body, list):
            return None
        slots = [slot for slot in reply.body if isinstance(slot, dict)]
        flags = [slot["speculative"] for slot in slots if isinstance(slot.get("speculative"), bool)]
        return Slots(
            total=len(slots),
            busy=sum(_is_busy(slot) for slot in slots),
            speculative=any(flags) if flags else None,
        )

    def n_busy(self, *, timeout_s: float = 5.0) -> int | None:
        """Requests under way, without waking a server that sleeps; None where neither slots nor counters tell."""
        props = self.props(timeout_s=timeout_s)
        if props is not None and props.is_asleep:
            return 0
        slots = self.slots(timeout_s=timeout_s)
        if slots is not None:
            return slots.busy
        found = _AT_WORK.search(self.metrics_text(timeout_s=timeout_s) or "")
        return None if found is None else int(found[1])

    def complete(
        self,
        prompt: str | list[int],
        *,
        n_predict: int,
        timeout_s: float,
        options: Mapping[str, Any] | None = None,
        route: str = "/completion",
    ) -> Completion:
        """One completion at temperature 0, or why there is none; `route` may be OpenAI's."""
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "temperature": 0.0,
            "cache_prompt": False,
            **(options or {}),
        }
        reply = self.post(route, body, timeout_s=timeout_s)
        answer = reply.body if isinstance(reply.body, dict) and reply.status == _OK else None
        if answer is None:
            is_told = isinstance(reply.body, dict) and "error" in reply.body
            told = f": {_told(reply.body)}" if is_told else ""
            problem = f"no answer within {timeout_s:.0f} s" if reply.timed_out else reply.problem
            return Completion(
                problem=problem or f"status {reply.status}{told}",
                timed_out=reply.timed_out,
                is_refused=reply.status in _REFUSALS,
                wants_key=reply.status in _WANTS_KEY and not reply.had_key,
            )
        timings = answer.get("timings")
        timings = timings if isinstance(timings, dict) else {}
        text = _written(answer)
        return Completion(
            text=text,
            n_predicted=_whole(timings.get("predicted_n", answer.get("tokens_predicted"))),
            n_drafted=_whole(timings.get("draft_n")),
            problem=None if text is not None else "the answer is not a completion",
            n_accepted=_whole(timings.get("draft_n_accepted")),
        )

    def get(self, path: str, *, timeout_s: float) -> Reply:
        """A GET request; never raises."""
        return _json_reply(self._ask("GET", path, None, timeout_s))

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Reply:
        """A POST request with a JSON body; never raises."""
        return _json_reply(self._ask("POST", path, body, timeout_s))

    def metrics_text(self, *, timeout_s: float = 5.0) -> str | None:
        """The text of the metrics route; None where it is off or cannot be read."""
        reply = self._ask("GET", "/metrics", None, timeout_s)
        if reply.status != _OK or reply.problem is not None:
            return None
        return bytes(reply.body).decode("utf-8", "replace")

    def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
        gives_up: Callable[[], bool] | None = None,
    ) -> Streamed:
        """A POST request whose answer comes in events, on a connection of its own; never raises.

        A connection is not used again: after a stream that was cut short llama-server closes it.

        Args:
            path: Route.
            body: JSON.
            timeout_s: Until the whole answer is there.
            meanwhile: Called after each piece that arrives; it should be quick.
            gives_up: Asked every few seconds before the first piece, whether to wait no longer.
        """
        began_s = self._clock.monotonic_s()
        arrivals = Arrivals()
        status, problem, timed_out, is_events = None, None, False, True

        def elapsed_ms() -> float:
            return (self._clock.monotonic_s() - began_s) * 1000

        try:
            with self._request(timeout_s, gives_up) as (request, key):
                began_s = self._clock.monotonic_s()
                status = request.send("POST", path, *_composed(body, key))
                is_events = (request.header("content-type") or "").startswith(_EVENTS)
                for piece in request.pieces():
                    if not arrivals.pieces:
                        self.slowest_s = max(self.slowest_s, elapsed_ms() / 1000)
                    if not arrivals.add(elapsed_ms(), piece):
                        problem = _TOO_LARGE
                        break
                    if meanwhile is not None:
                        meanwhile()
        except NoAnswerInTimeError:
            problem, timed_out = NOT_IN_TIME, True
        except NoAnswerError as error:
            problem = str(error)
        if status is not None and problem is None:
            return _streamed(status, arrivals, elapsed_ms(), is_events=is_events)
        events = read_events(arrivals)[0] if is_events else ()
        return Streamed(events, elapsed_ms(), False, problem, timed_out)

    def hang_up(self) -> None:
        """End the requests that other threads have under way."""
        for request in tuple(self._open):
            request.hang_up()

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Reply:
        """An answer whose body is bytes."""
        content = bytearray()
        try:
            with self._request(timeout_s) as (request, key):
                is_public = path == _HEALTH
                status = request.send(method, path, *_composed(body, None if is_public else key))
                for piece in request.pieces():
                    content += piece
                    if len(content) > MAX_REPLY_BYTES:
                        return Reply(status, None, _TOO_LARGE)
        except NoAnswerInTimeError:
            return Reply(None, None, NOT_IN_TIME, timed_out=True)
        except NoAnswerError as error:
            return Reply(None, None, str(error))
        return Reply(status, content, None, had_key=key is not None)

    @contextlib.contextmanager
    def _request(
        self, timeout_s: float, gives_up: Callable[[], bool] | None = None
    ) -> Iterator[tuple[HttpRequest, str | None]]:
        """A request that is not sent yet, and the key."""
        host, key = self.address.now()
        where = (host, self.address.port)
        with HttpRequest(
            where, timeout_s=timeout_s, clock=self._clock, gives_up=gives_up
        ) as request:
            self._open.add(request)
            try:
                yield request, key
            finally:
                self._open.discard(request)


def _streamed(
    status: int | None, arrivals: Arrivals, wall_ms: float, *, is_events: bool
) -> Streamed:
    """An answer whose end was seen."""
    if is_events and status == _OK:
        events, problem = read_events(arrivals)
        # Some servers close a while after the last byte, which nobody waits for.
        wall_ms = arrivals.pieces[-1][0] if arrivals.pieces else wall_ms
        return Streamed(events, wall_ms, problem is None, problem)
    event = _object(arrivals.body)
    if event is None:
        return Streamed((), wall_ms, False, f"status {status} without valid JSON")
    if "error" in event or status != _OK:
        told = f": {_told(event)}" if "error" in event else ""
        return Streamed((), wall_ms, False, f"status {status}{told}")
    return Streamed(((wall_ms, event),), wall_ms, True)


def _composed(
    body: Mapping[str, Any] | None, key: str | None
) -> tuple[dict[str, str], bytes | None]:
    """Headers and body of a request."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if body is None:
        return headers, None
    return {**headers, "Content-Type": "application/json"}, json.dumps(body).encode()


def _json_reply(raw: Reply) -> Reply:
    if raw.body is None:
        return raw
    try:
        return replace(raw, body=json.loads(raw.body))
    except (ValueError, RecursionError):
        return replace(raw, body=None, problem=f"status {raw.status} without valid JSON")


def _is_busy(slot: Mapping[str, Any]) -> bool:
    """mainline says `is_processing`, ik `state` (0 idle)."""
    processing = slot.get("is_processing")
    if isinstance(processing, bool):
        return processing
    return slot.get("state", 0) not in (0, None)  # of any type


def _written(answer: Mapping[str, Any]) -> str | None:
    """The text of a completion, in llama.cpp's own answer or in OpenAI's."""
    try:
        text = answer["content"] if "content" in answer else answer["choices"][0]["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST else None
