"""Whatever engines answer, and write into their logs: an answer or a plain no, no crash, and no line that is slow to read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import DATA
from tests.support.fuzz import ODD_NUMBERS, often, torn
from tests.support.readings import a_reading
from tests.support.receiver import answered_by
from tunerd.doctor.facts import read_server_log
from tunerd.engine.health import HttpState, classify
from tunerd.engine.log import learn, read_requests
from tunerd.engine.server import Address, LlamaServer
from tunerd.machine.clock import SystemClock
from tunerd.machine.process import Setting, run
from tunerd.measure.answer import Counters, read_counters
from tunerd.model.verdict import parse_report
from tunerd.watch.figures import served_between
from tunerd.web.metrics import exposition

LOGS = tuple(
    line
    for path in sorted([*DATA.glob("logs/*/*.txt"), *DATA.glob("memory/*.txt"), *DATA.glob("requests/*.log")])
    for line in path.read_text(errors="replace").splitlines()
)  # fmt: skip
KEYS = st.sampled_from(
    ["status", "data", "id", "content", "timings", "predicted_n", "draft_n", "is_processing", "state",
     "speculative", "error", "message", "tokens_predicted", "choices", "delta", "usage", "stop"]
) | st.text(max_size=6)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
METRICS = st.lists(
    st.builds(
        "{}{} {}".format,
        st.sampled_from(["llamacpp:", "", "# HELP llamacpp:"]),
        st.sampled_from(
            ["prompt_tokens_total", "tokens_predicted_total", "requests_processing",
             "prompt_seconds_total", "tokens_predicted_seconds_total", "n_decode_total",
             'spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
             'spec_decode_num_accepted_tokens_per_pos_total{position="999"}',
             "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"]
        ),
        st.sampled_from(ODD_NUMBERS) | st.integers().map(str) | st.floats().map(str),
    )
    | st.text(max_size=40),
    max_size=12,
).map("\n".join)  # fmt: skip


@dataclass
class Liar:
    """A server on a port that says what a test wants it to say."""

    port: int = 0
    status: int = 200
    kind: str = "application/json"
    body: bytes = b""


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    told = Liar()

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> None:
        request.send_response(told.status)
        request.send_header("Content-Type", told.kind)
        request.send_header("Content-Length", str(len(told.body)))
        request.end_headers()
        request.wfile.write(told.body)

    with answered_by(answer) as told.port:
        yield told


STATUS = st.sampled_from([200, 200, 200, 400, 404, 500, 501, 503])
# Of which each once ended in an exception.
COMPLETIONS = st.sampled_from(
    [{"choices": {"text": "x"}}, {"choices": [None]}, {"choices": ["x"]}, {"choices": []},
     {"choices": [{"text": 1}], "timings": [1]}, {"content": None}]
)  # fmt: skip
BODIES = (JSON | COMPLETIONS).map(lambda value: json.dumps(value).encode()) | st.binary(
    max_size=200
)


@often(60)
@given(status=STATUS, body=BODIES)
def test_any_reply_of_a_server_is_an_answer_or_none(liar: Liar, status: int, body: bytes) -> None:
    liar.status, liar.kind, liar.body = status, "application/json", body
    server = LlamaServer(Address("127.0.0.1", liar.port), SystemClock())

    assert server.health() in HttpState
    alias = server.alias()
    assert alias is None or isinstance(alias, str)
    slots = server.slots()
    assert slots is None or 0 <= slots.busy <= slots.total
    for route in ("/completion", "/v1/completions"):
        done = server.complete("x", n_predict=1, timeout_s=30.0, route=route)
        assert done.problem is not None or isinstance(done.text, str)
        assert done.n_predicted is None or isinstance(done.n_predicted, int)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1", "1e999", "true"])
def test_a_number_of_slots_that_no_server_has_is_not_known(liar: Liar, number: str) -> None:
    """`/metrics` and the store hold no number of 400 digits."""
    liar.status, liar.kind = 200, "application/json"
    liar.body = f'{{"total_slots": {number}, "role": "model"}}'.encode()
    props = LlamaServer(Address("127.0.0.1", liar.port), SystemClock()).props()
    assert props is not None
    assert props.n_slots is None


EVENTS = st.lists(
    st.sampled_from(
        [b"data: ", b"data:", b"\n", b"\n\n", b"data: [DONE]\n\n", b": x\n", b"error: "]
    )
    | JSON.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n")
    | st.binary(max_size=30),
    max_size=12,
).map(b"".join)


@often(40)
@given(
    status=STATUS, kind=st.sampled_from(["text/event-stream", "application/json", ""]), body=EVENTS
)
def test_any_stream_of_a_server_ends_in_events_or_a_problem(
    liar: Liar, status: int, kind: str, body: bytes
) -> None:
    liar.status, liar.kind, liar.body = status, kind, body
    server = LlamaServer(Address("127.0.0.1", liar.port), SystemClock())

    said = server.stream("/completion", {"prompt": "x"}, timeout_s=30.0)

    assert said.problem is not None or said.events or status == 200
    assert all(isinstance(event, dict) for _, event in said.events)


@often(200)
@given(before=METRICS, after=METRICS, seconds=st.floats(0.001, 1e6))
def test_any_counters_give_numbers_that_can_be_shown(
    before: str, after: str, seconds: float
) -> None:
    one, other = read_counters(before), read_counters(after)
    assert _is_sound(one)
    assert _is_sound(other)
    served, _ = served_between(one, other, seconds)
    reading = a_reading(counters=other, served=served)
    json.dumps(reading.to_json(), allow_nan=False)
    exposition(reading)


def _is_sound(counters: Counters) -> bool:
    values = (counters.n_prompt, counters.n_predicted, counters.prompt_s, counters.predicted_s)
    return all(value is None or (math.isfinite(value) and value >= 0) for value in values)


@often(200)
@given(lines=st.lists(torn(LOGS), max_size=60))
def test_any_log_is_read_to_its_end(lines: Sequence[str]) -> None:
    failure = classify(lines, exit_kind="exited", exit_status=1)
    assert failure.words
    report = parse_report(lines)
    assert all(buffer.mib >= 0 for buffer in report.buffers)
    found = read_requests(lines)
    for one in found.requests:
        assert min(one.prompt_n, one.predicted_n, one.prompt_ms, one.predicted_ms) >= 0
    learned = learn(found.requests, name="x", description="", source="")
    if learned is not None:
        json.dumps(learned.to_json(), allow_nan=False)
    read_server_log(lines)


N_CHARS = 20_000
CPU_S = 10  # linear patterns take 1 s, a quadratic one 30 s, a cubic one an hour
READERS = {
    "failure": "from tunerd.engine.health import classify as read",
    "arguments": "from tunerd.engine.health import argument_error\n"
    "def read(lines): argument_error(1, '\\n'.join(lines))",
    "requests": "from tunerd.engine.log import read_requests as read",
    "memory": "from tunerd.model.verdict import parse_report as read",
    "placement": "from tunerd.sweep.space import read_fit as read",
    "doctor": "from tunerd.doctor.facts import read_server_log as read",
}
PIECES = (
    ("CUDA", ""),
    ("invalid", ""),
    ("slot released |", "n_past=1 "),
    ("slot released | id_task=1 n_past=1 ", "n_past=1 "),
    ("| CUDA : ", "| CUDA : "),
    ("system_info: n_threads | CUDA : ", "a | b"),
    ("- a", ""),
    ("- a: ", " "),
    ("|  - ", " "),
    ("load_tensors: ", "x "),
    ("a", ""),
    ("a ", " "),
    ("failed to open ", ""),
    ("Stopping ", "..."),
    ("a.service", ""),
    ("\x1b[0m", ""),
    ("prompt eval time = ", " "),
    ("draft acceptance = ", "("),
    ("n_ctx ", " "),
    ("1.", "1"),
)
SCRIPT = """
import sys
{reader}
for first, then in {pieces!r}:
    begin = first * ({n_chars} // 2 // len(first))
    for line in (2 * begin, (begin + (then or first) * {n_chars})[:{n_chars}], (first + then * {n_chars})[:{n_chars}]):
        read(["slot launch_slot_: id  0 | task 1 | processing task, is_child = 0", line, line])
"""


@pytest.mark.parametrize("reader", READERS)
def test_no_line_is_slow_to_read(reader: str) -> None:
    script = SCRIPT.format(reader=READERS[reader], pieces=PIECES, n_chars=N_CHARS)
    done = run([sys.executable, "-c", script], Setting(limits={"CPU": CPU_S}), timeout_s=120)

    assert done.is_ok, done.stderr or f"signal {done.signal}, after {CPU_S} s of processor time"


def test_a_unit_of_many_continued_lines_is_read_once() -> None:
    script = (
        "from tunerd.units.text import parse_unit\n"
        "parse_unit('[Service]\\nA=' + 'x' * 20 + '\\\\\\n' + ('x' * 20 + '\\\\\\n') * 200_000)"
    )
    done = run([sys.executable, "-c", script], Setting(limits={"CPU": CPU_S}), timeout_s=120)

    assert done.is_ok, done.stderr or f"signal {done.signal}"
