"""Server-sent events with the time of each, from pieces that break anywhere."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tunerd.engine.server import MAX_PIECES, MAX_STREAM_BYTES, Arrivals, read_events


def arrived(*pieces: bytes) -> Arrivals:
    found = Arrivals()
    for at_ms, piece in enumerate(pieces, start=1):
        found.add(float(at_ms), piece)
    return found


def event(**values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def test_each_event_has_the_time_at_which_it_was_whole() -> None:
    one, two = event(content=" a"), event(content=" b")

    found, problem = read_events(arrived(one, two[:5], two[5:]))

    assert found == ((1.0, {"content": " a"}), (3.0, {"content": " b"}))
    assert problem is None


@given(st.lists(st.integers(1, 60), max_size=6))
def test_where_the_pieces_break_changes_no_event(cuts: list[int]) -> None:
    stream = (
        event(content="ä\\n{") + b": a comment\r\n\r\n" + event(stop=True) + b"data: [DONE]\n\n"
    )
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]

    found, problem = read_events(arrived(*pieces))

    assert [one for _, one in found] == [{"content": "ä\\n{"}, {"stop": True}]
    assert problem is None


def test_the_last_event_counts_without_its_empty_line() -> None:
    assert len(read_events(arrived(event(stop=True).strip()))[0]) == 1


def test_an_error_in_the_stream_is_told_in_the_servers_words() -> None:
    for piece in (
        b'data: {"error": {"message": "Compute error.", "code": 500}}\n\n',
        b'error: {"message": "Compute error.", "code": 500}\n\n',
        b'data: {"error": "Compute error."}\n\n',
    ):
        found, problem = read_events(arrived(event(content=" a"), piece))
        assert (len(found), problem) == (1, "Compute error.")
    for wrong in (b"data: [1]\n\n", b"data: {x\n\n"):
        assert read_events(arrived(wrong))[1] is not None


def test_a_stream_without_end_is_noticed() -> None:
    for most, more in (
        (b"x" * MAX_STREAM_BYTES, b"x"),
        (b"data:{}\n\n" * MAX_PIECES, b"data:{}\n\n"),
    ):
        found = Arrivals()
        assert found.add(1.0, most)
        assert not found.add(2.0, more)
    found = Arrivals()
    assert all(found.add(1.0, b"") for _ in range(MAX_PIECES))
    assert not found.add(1.0, b"")


def test_a_line_without_end_costs_no_more_than_it_is_long() -> None:
    found = arrived(*[b"x" * 16] * 65536)
    began_s = time.process_time()
    assert [len(line) for _, line in found.lines()] == [1024 * 1024]
    assert time.process_time() - began_s < 1
