"""A GET request with the standard library alone.

`tunerd status` asks a server for its health, and has 200 ms of CPU for everything: importing httpx
would take a quarter of that (docs/benchmarks.md).
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerd.system.seams import Clock

_CONNECT_LIMIT_S = 2.0
_PIECE_BYTES = 64 * 1024


class NoAnswerInTimeError(Exception):
    """The time was up before the answer was whole."""


class NoAnswerError(Exception):
    """There was no answer, or none that is HTTP; the text says why."""


@dataclass(frozen=True, slots=True)
class RawReply:
    """Status and body; the body is None where it was larger than allowed."""

    status: int
    body: bytes | None


def http_get(
    host: str,
    port: int,
    path: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    max_bytes: int,
    clock: Clock,
) -> RawReply:
    """The answer to one GET request; redirects are not followed, proxies not used.

    Raises:
        NoAnswerInTimeError: nothing came for `timeout_s`, or the body took longer than that.
        NoAnswerError: the connection failed or broke, or what came is no HTTP.
    """
    deadline_s = clock.monotonic_s() + timeout_s
    try:
        with closing(_connected(host, port, timeout_s)) as connection:
            connection.request("GET", path, headers=dict(headers))
            response = connection.getresponse()
            body = _body(response, deadline_s, max_bytes, clock)
    except TimeoutError as error:
        raise NoAnswerInTimeError from error
    except (http.client.HTTPException, OSError, OverflowError, ValueError) as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error
    return RawReply(response.status, body)


def _connected(host: str, port: int, timeout_s: float) -> http.client.HTTPConnection:
    """A connection; it has to be made in a shorter time than an answer may take."""
    connection = http.client.HTTPConnection(host, port, timeout=min(timeout_s, _CONNECT_LIMIT_S))
    connection.connect()
    connection.sock.settimeout(timeout_s)
    return connection


def _body(
    response: http.client.HTTPResponse, deadline_s: float, max_bytes: int, clock: Clock
) -> bytes | None:
    content = bytearray()
    while piece := response.read1(_PIECE_BYTES):
        content += piece
        if len(content) > max_bytes:
            return None
        if clock.monotonic_s() > deadline_s:
            raise TimeoutError
    if response.length:  # `read1` takes a connection that broke for the end of the body
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)
