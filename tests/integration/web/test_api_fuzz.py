"""The API against its own description, and against whatever a hostile client may send."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.api_box import OWN, ApiBox
from tests.support.fuzz import is_asked_for, often
from tunerd.web.routes import BEGINS, READS, describe_api, is_slow

# They start processes, and so does each job: a sample calls every third of them once.
SLOW = frozenset(path for path, kind in READS.items() if is_slow(kind))
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance,
          response_schema_conformance)  # fmt: skip


def operations(*, slow: bool) -> list[Any]:
    schema = schemathesis.openapi.from_dict(describe_api())
    found = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
    assert len(found) == len(list(schema.get_all_operations()))
    wanted = [one for one in found if (one.path in SLOW or one.method == "post") is slow]
    return wanted[:: 3 if slow and not is_asked_for() else 1]


ROUTES = [
    *(pytest.param(one, often(8), id=one.label) for one in operations(slow=False)),
    *(pytest.param(one, often(1, most=10), id=one.label) for one in operations(slow=True)),
]


@pytest.mark.parametrize(("operation", "how"), ROUTES)
def test_every_route_keeps_to_its_description(api: ApiBox, operation: Any, how: settings) -> None:
    @how
    @given(case=operation.as_strategy())
    def hold(case: Any) -> None:
        response = case.call(base_url=api.url, headers=OWN if case.method == "POST" else {})
        case.validate_response(response, checks=[*CHECKS, negative_data_rejection])

    hold()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["profile", "set", "to", "sweep", "why", "now", "budget", "shown", "space", "argv", "sides", "ask",
     "window", "days", "timezone", "guard", "policy", "name", "job", "suite", "workload"]
)  # fmt: skip


@often(60)
@given(
    route=st.sampled_from([path.removeprefix("/api/") for path in (*BEGINS, "/api/run")]),
    body=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3).map(json.dumps)
    | st.binary(max_size=200),
)
def test_no_body_does_more_than_be_refused_or_begin_one_job(
    api: ApiBox, route: str, body: str | bytes
) -> None:
    said = api.post(f"/api/{route}", body)

    assert said.status in {202, 400, 404, 409, 422}, (said, body)
    assert said.json["schema"] == 1


@often(60)
@given(junk=st.binary(min_size=1, max_size=400))
def test_whatever_comes_over_the_socket_the_next_client_is_served(api: ApiBox, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(30)
        channel.connect(str(api.path))
        channel.sendall(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n" + junk)

    assert api.ask("/api/profiles").status == 200
