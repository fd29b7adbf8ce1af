"""tunerd's own requests in a log, told apart by what the server reported of them."""

from __future__ import annotations

from dataclasses import replace

from tunerd.engine.log import LoggedRequest
from tunerd.measure.answer import Timings
from tunerd.measure.trust import of_others

REQUEST = LoggedRequest(
    prompt_n=812,
    prompt_ms=410.37,
    predicted_n=192,
    predicted_ms=3051.22,
    cached_n=0,
    drafted_n=None,
    accepted_n=None,
    concurrency=1,
)
OWN = Timings(prompt_n=812, prompt_ms=410.3659, predicted_n=192, predicted_ms=3051.2241)


def test_a_request_that_was_measured_is_found_by_its_counts_and_times() -> None:
    user = replace(REQUEST, predicted_ms=3050.9)
    assert of_others([REQUEST, user], [OWN]) == (user,)


def test_one_measurement_stands_for_one_request() -> None:
    assert of_others([REQUEST, REQUEST], [OWN]) == (REQUEST,)


def test_a_measurement_without_times_takes_nobodys_request_away() -> None:
    unknown = replace(OWN, predicted_ms=None)
    assert of_others([REQUEST], [unknown]) == (REQUEST,)
