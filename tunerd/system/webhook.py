"""Posts to a webhook: once, without redirects, with a limit; the answer is a status or a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LIMIT_S = 15.0
_OK = range(200, 300)
# Of the refusals these may be over soon.
_PASSING = frozenset({408, 425, 429})
_CLIENT_ERRORS = range(400, 500)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How it went; `is_final` where asking again would not help."""

    problem: str | None
    is_final: bool


def deliver(url: str, body: bytes, headers: Mapping[str, str]) -> Delivery:
    """One attempt; never raises."""
    import httpx

    try:
        answer = httpx.post(
            url, content=body, headers=dict(headers), timeout=_LIMIT_S, follow_redirects=False
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return Delivery(str(error) or type(error).__name__, is_final=False)
    if answer.status_code in _OK:
        return Delivery(None, is_final=True)
    is_refused = answer.status_code in _CLIENT_ERRORS and answer.status_code not in _PASSING
    return Delivery(f"it answered with status {answer.status_code}", is_final=is_refused)
