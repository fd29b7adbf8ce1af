"""llama-server over HTTP: the only place that knows httpx, which is imported only to post.

Replies are hostile until read: they are bounded in size and time, and whatever is not what a
llama-server would say comes back as a value that says so.
"""

from __future__ import annotations

import functools
import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.core.health import Completion, HttpState
from tunerd.system.http_get import NoAnswerError, NoAnswerInTimeError, http_get
from tunerd.system.llama_stream import Arrivals, Streamed, read_events, read_plain
from tunerd.system.seams import Clock

if TYPE_CHECKING:
    import ssl

    import httpx

MAX_REPLY_BYTES = 8 * 1024 * 1024
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
_NOT_IN_TIME = "no answer in time"
_TOO_LARGE = "the answer is too large"
_EVENTS = "text/event-stream"
_LOADING = 503
_OK = 200
# Closed with a reset. ik closes first after a stream, and the kernel would remember that connection for a
# minute (TIME_WAIT), in which no other build can bind the port; a reset ends it there and then.
_FORGOTTEN = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
# Wrong key, no such route, wrong question; 501 is what a server of embeddings says.
_REFUSALS = frozenset({*range(400, 500), 501})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and the key it wants, if any."""

    host: str
    port: int
    api_key: str | None = None

    @property
    def reachable_host(self) -> str:
        """The host by which it is reached from this machine."""
        host = self.host.split(",")[0].strip()
        return _ANY_ADDRESS.get(host, host)

    @property
    def url(self) -> str:
        """The base URL to reach it from this machine."""
        host = self.reachable_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: `body` is the parsed JSON or None, `problem` why there is none."""

    status: int | None
    body: Any
    problem: str | None
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Slots:
    """What the slots route says: how many there are, how many work, whether speculation is active.

    `speculative` is None where the build does not say (ik) or nothing could be read.
    """

    total: int
    busy: int
    speculative: bool | None


class LlamaServer:
    """One running llama-server."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self.address = address
        self._clock = clock

    def health(self, *, timeout_s: float = 2.0) -> HttpState:
        """What the health route says.

        ik binds its port and stays silent while it loads; mainline answers 503.
        """
        reply = self.get("/health", timeout_s=timeout_s)
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
        reply = self.get("/v1/models", timeout_s=timeout_s)
        try:
            name = reply.body["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            return None
        return name if isinstance(name, str) else None

    def slots(self, *, timeout_s: float = 5.0) -> Slots | None:
        """The state of the slots; None where the route is off or cannot be read."""
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

    def complete(
        self,
        prompt: str | list[int],
        *,
        n_predict: int,
        timeout_s: float,
        options: Mapping[str, Any] | None = None,
    ) -> Completion:
        """One completion at temperature 0, or why there is none."""
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "temperature": 0.0,
            "cache_prompt": False,
            **(options or {}),
        }
        reply = self.post("/completion", body, timeout_s=timeout_s)
        if reply.timed_out:
            problem = f"no answer within {timeout_s:.0f} s"
            return Completion(None, None, None, problem, timed_out=True)
        is_refused = reply.status in _REFUSALS
        if reply.problem is not None:
            return Completion(None, None, None, reply.problem, is_refused=is_refused)
        if reply.status != _OK or not isinstance(reply.body, dict):
            return Completion(None, None, None, _error_text(reply), is_refused=is_refused)
        timings = reply.body.get("timings")
        timings = timings if isinstance(timings, dict) else {}
        text = reply.body.get("content")
        n_predicted = timings.get("predicted_n", reply.body.get("tokens_predicted"))
        return Completion(
            text=text if isinstance(text, str) else None,
            n_predicted=n_predicted if isinstance(n_predicted, int) else None,
            n_drafted=_whole(timings.get("draft_n")),
            problem=None if isinstance(text, str) else "the answer is no completion",
        )

    def get(self, path: str, *, timeout_s: float) -> Reply:
        """A GET request; never raises."""
        address = self.address
        try:
            found = http_get(
                address.reachable_host,
                address.port,
                path,
                headers=address.headers,
                timeout_s=timeout_s,
                max_bytes=MAX_REPLY_BYTES,
                clock=self._clock,
            )
        except NoAnswerInTimeError:
            return Reply(None, None, _NOT_IN_TIME, timed_out=True)
        except NoAnswerError as error:
            return Reply(None, None, str(error))
        if found.body is None:
            return Reply(found.status, None, _TOO_LARGE)
        return _json_reply(found.status, found.body)

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Reply:
        """A POST request with a JSON body; never raises."""
        import httpx

        # httpx limits each read; this limits their sum, for a server that sends byte by byte.
        deadline_s = self._clock.monotonic_s() + timeout_s
        try:
            with (
                self._client(httpx, timeout_s) as client,
                client.stream("POST", path, json=body) as response,
            ):
                content = bytearray()
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > MAX_REPLY_BYTES:
                        return Reply(response.status_code, None, _TOO_LARGE)
                    if self._clock.monotonic_s() > deadline_s:
                        return Reply(None, None, _NOT_IN_TIME, timed_out=True)
                status = response.status_code
        except httpx.TimeoutException:
            return Reply(None, None, _NOT_IN_TIME, timed_out=True)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return Reply(None, None, str(error) or type(error).__name__)
        return _json_reply(status, content)

    def metrics_text(self, *, timeout_s: float = 5.0) -> str | None:
        """The text of the metrics route; None where it is off or cannot be read."""
        address = self.address
        try:
            found = http_get(
                address.reachable_host,
                address.port,
                "/metrics",
                headers=address.headers,
                timeout_s=timeout_s,
                max_bytes=MAX_REPLY_BYTES,
                clock=self._clock,
            )
        except (NoAnswerInTimeError, NoAnswerError):
            return None
        if found.status != _OK or found.body is None:
            return None
        return found.body.decode("utf-8", "replace")

    def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> Streamed:
        """A POST request whose answer comes in events, on a connection of its own; never raises.

        A connection is not used again: after a stream that was cut short llama-server closes it.

        Args:
            path: Route.
            body: JSON.
            timeout_s: Until the whole answer is there.
            meanwhile: Called after each piece that arrives; it should be quick.
        """
        import httpx

        began_s = self._clock.monotonic_s()
        arrivals = Arrivals()
        status, problem, timed_out, is_events = None, None, False, True

        def elapsed_ms() -> float:
            return (self._clock.monotonic_s() - began_s) * 1000

        try:
            with (
                self._client(httpx, timeout_s) as client,
                client.stream("POST", path, json=body) as response,
            ):
                status = response.status_code
                is_events = response.headers.get("content-type", "").startswith(_EVENTS)
                for piece in response.iter_bytes():
                    at_ms = elapsed_ms()
                    if not arrivals.add(at_ms, piece):
                        problem = _TOO_LARGE
                        break
                    if at_ms > timeout_s * 1000:
                        problem, timed_out = _NOT_IN_TIME, True
                        break
                    if meanwhile is not None:
                        meanwhile()
        except httpx.TimeoutException:
            problem, timed_out = _NOT_IN_TIME, True
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            problem = str(error) or type(error).__name__
        return _streamed(status, arrivals, elapsed_ms(), problem, timed_out, is_events)

    def _client(self, library: Any, timeout_s: float) -> httpx.Client:
        transport = library.HTTPTransport(verify=_no_certificates(), socket_options=[_FORGOTTEN])
        client: httpx.Client = library.Client(
            base_url=self.address.url,
            headers=self.address.headers,
            transport=transport,
            timeout=library.Timeout(timeout_s, connect=min(timeout_s, 2.0)),
            trust_env=False,
            follow_redirects=False,
        )
        return client


def _streamed(
    status: int | None,
    arrivals: Arrivals,
    wall_ms: float,
    problem: str | None,
    timed_out: bool,
    is_events: bool,
) -> Streamed:
    if status is None or problem is not None:
        events = read_events(arrivals)[0] if is_events else ()
        return Streamed(status, events, wall_ms, False, problem, timed_out)
    if is_events and status == _OK:
        events, problem = read_events(arrivals)
        return Streamed(status, events, wall_ms, problem is None, problem)
    event, problem = read_plain(arrivals, status)
    if event is None or status != _OK:
        return Streamed(status, (), wall_ms, False, problem or f"status {status}")
    return Streamed(status, ((wall_ms, event),), wall_ms, True)


def _json_reply(status: int, content: bytes | bytearray) -> Reply:
    try:
        return Reply(status, json.loads(content), None)
    except (ValueError, RecursionError):
        return Reply(status, None, f"status {status} without valid JSON")


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    """Only plain HTTP is spoken here; reading the certificates of the world takes 27 ms a request."""
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _is_busy(slot: Mapping[str, Any]) -> bool:
    """mainline says `is_processing`, ik `state` (0 idle)."""
    processing = slot.get("is_processing")
    if isinstance(processing, bool):
        return processing
    return slot.get("state", 0) not in (0, None)  # of any type


def _error_text(reply: Reply) -> str:
    message = None
    if isinstance(reply.body, dict) and isinstance(reply.body.get("error"), dict):
        message = reply.body["error"].get("message")
    if isinstance(message, str):
        return f"status {reply.status}: {message[:300]}"
    return f"status {reply.status}"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
