"""Other servers, and what stands before them: when their answers come, and of which of their models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.bench_box import BenchBox
from tests.support.receiver import answered_by
from tunerd.measure.life import Life
from tunerd.measure.request import Prompt, Request, Suite
from tunerd.measure.target import open_url

N_TOKENS = 64
TOKEN_S = 0.002
LATE_S = 0.5
REQUEST = Request(suite=Suite.MTP, case="code", kind="code", n_predict=N_TOKENS)


@dataclass
class Other:
    """A server of two models: `is_held` where a proxy hands on whole answers, `closes_late` after the last byte."""

    is_held: bool = False
    closes_late: bool = False
    models: tuple[str, ...] = ("small:1b", "large:30b")
    asked_for: list[str] = field(default_factory=list)
    url: str = ""


def event(**values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


@contextmanager
def serving(other: Other) -> Iterator[Other]:
    """It answers on the loopback."""

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> None:
        is_stream, is_list = request.command == "POST", request.path == "/v1/models"
        request.send_response(200 if is_stream or is_list else 404)
        request.send_header("Content-Type", "text/event-stream" if is_stream else "text/json")
        request.end_headers()
        if is_stream:
            other.asked_for.append(json.loads(body)["model"])
            stream(request)
        else:
            rows = [{"id": name} for name in other.models]
            request.wfile.write(json.dumps({"data": rows} if is_list else {}).encode())

    def stream(request: BaseHTTPRequestHandler) -> None:
        tokens = [event(choices=[{"delta": {"content": " word"}}])] * N_TOKENS
        usage = {"prompt_tokens": 30, "completion_tokens": N_TOKENS}
        last = event(choices=[{"delta": {}, "finish_reason": "stop"}], usage=usage)
        if other.is_held:
            time.sleep(N_TOKENS * TOKEN_S)
            tokens = [b"".join(tokens)]
        for piece in (*tokens, last):
            time.sleep(TOKEN_S)
            request.wfile.write(piece)
        time.sleep(LATE_S if other.closes_late else 0.0)

    with answered_by(answer) as port:
        other.url = f"http://127.0.0.1:{port}"
        yield other


def test_answers_that_a_proxy_held_back_have_no_speed_and_that_is_told(tmp_path: Path) -> None:
    """A table said 528,515 tokens a second of a server that made 125."""
    with serving(Other(is_held=True)) as other:
        result = BenchBox(tmp_path).bench(other.url)

    assert all(row["client_tok_s"] is None for row in result.payload["summary"])
    (told,) = [one for one in result.messages if one.code == "no-pace"]
    assert "9 of 9 answers have no speed" in told.text
    assert "proxy" in (told.hint or "")


def test_a_server_that_closes_late_is_not_slower_for_it(tmp_path: Path) -> None:
    ctx = BenchBox(tmp_path).context()
    with serving(Other(closes_late=True)) as other:
        began_s = time.monotonic()
        found = Life(ctx, open_url(ctx, other.url)).ask(REQUEST, Prompt("p", "say so")).sample
        took_ms = (time.monotonic() - began_s) * 1000

    assert found.problem is None
    assert found.client is not None
    assert found.client.wall_ms <= took_ms - 1000 * LATE_S


def test_which_of_several_models_is_measured_is_told_and_can_be_said(tmp_path: Path) -> None:
    with serving(Other()) as other:
        unsaid = BenchBox(tmp_path).bench(f"ollama={other.url}", Suite.CACHE)
        assert set(other.asked_for) == {"small:1b"}
        other.asked_for.clear()
        said = BenchBox(tmp_path).bench(f"ollama={other.url}#large:30b", Suite.CACHE)

    (told,) = [one.text for one in unsaid.messages if one.code == "first-model"]
    assert "asked for `small:1b`, the first of 2 models" in told
    assert set(other.asked_for) == {"large:30b"}
    assert "first-model" not in {one.code for one in said.messages}
