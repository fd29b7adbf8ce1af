"""Replies over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class ClientGoneError(Exception):
    """The client closed its connection; its task is cancelled."""


class HttpError(Exception):
    """An answer in the error envelope."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": status, "message": message, "type": kind}}


def not_found() -> HttpError:
    return HttpError(404, "not_found_error", "File Not Found")


@dataclass(frozen=True)
class Answer:
    """A whole reply."""

    status: int
    body: bytes
    content_type: str = "application/json; charset=utf-8"


def json_answer(body: Any, status: int = 200) -> Answer:
    encoded = json.dumps(body, separators=(",", ":")).encode()
    return Answer(status, encoded)


Reply = Answer | Iterator[bytes]
