"""Servers that never answer, and others that answer otherwise: when a bench ends, when answers come, and of which model."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_box import BenchBox, answering
from tests.support.fakes import FakeClock
from tests.support.forked import running
from tests.support.ports import free_port
from tests.support.receiver import answered_by
from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import BenchError
from tunerd.machine.clock import SystemClock
from tunerd.machine.host import process_cpu_s
from tunerd.machine.process import family_of, start
from tunerd.measure.bench import Session
from tunerd.measure.evidence import ArmRecord
from tunerd.measure.life import Life, Silence
from tunerd.measure.request import BenchRequest, Prompt, Request, Suite
from tunerd.measure.store import EvidenceStore
from tunerd.measure.target import Target, open_url

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


@contextmanager
def listening(*answers: bytes) -> Iterator[tuple[int, list[socket.socket]]]:
    """A server that gives these answers, one a connection, and then none; and its connections."""
    met: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                met.append(client)
                if len(met) <= len(answers):
                    client.recv(65536)
                    client.sendall(ANSWER % (len(answers[len(met) - 1]), answers[len(met) - 1]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], met
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    for client in met:
        client.close()


def target_at(port: int, *pids: int) -> Target:
    server = LlamaServer(Address("127.0.0.1", port), SystemClock())
    arm = ArmRecord(name="live", fingerprint=Fingerprint(tunerd_version="0"))
    return Target(arm, server, life=lambda: "one", why_ended=lambda: None, pids=pids)


SLEEPS = "import time; print('runs', flush=True); time.sleep(100)"
WORKS = "while True: pass"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKS!r}])"


def used_s(pid: int) -> float:
    return sum(process_cpu_s(one) or 0.0 for one in family_of(pid))


def over_after(folder: Path, target: Target, *passed_s: float) -> list[bool]:
    """What is found at each look, so much after the one before."""
    clock = FakeClock()
    silence = Silence(BenchBox(folder, clock=clock).context(), target)
    found = []
    for seconds in passed_s:
        clock.advance(seconds)
        found.append(silence.is_over())
    return found


@pytest.fixture
def idle() -> Iterator[int]:
    """The pid of a server that does nothing."""
    with running(sys.executable, "-c", SLEEPS) as server:
        yield server.pid


@pytest.mark.parametrize(("slowest_s", "silent_s"), [(0.0, 58), (40.0, 118)])
def test_a_server_that_does_nothing_is_given_up_after_a_minute_or_thrice_its_slowest(
    tmp_path: Path, idle: int, slowest_s: float, silent_s: int
) -> None:
    target = target_at(free_port(), idle)
    target.server.slowest_s = slowest_s
    assert over_after(tmp_path, target, 0, silent_s, 4, 4) == [False, False, False, True]


def test_a_server_whose_counters_move_or_of_which_no_process_is_known_is_waited_for(
    tmp_path: Path, idle: int
) -> None:
    with listening(b"a 1", b"a 2", b"a 3") as (port, _):
        assert not any(over_after(tmp_path, target_at(port, idle), 0, 100, 10, 10))
    assert not any(over_after(tmp_path, target_at(free_port()), 0, 100, 100, 100))


def test_a_server_whose_child_uses_the_processor_works(tmp_path: Path) -> None:
    clock = FakeClock()
    with start([sys.executable, "-c", STARTS]) as server:
        silence = Silence(
            BenchBox(tmp_path, clock=clock).context(), target_at(free_port(), server.pid)
        )
        assert not silence.is_over()
        for _ in range(2):
            before_s = used_s(server.pid)
            while used_s(server.pid) < before_s + 0.6:
                time.sleep(0.05)
            clock.advance(100.0)
            assert not silence.is_over()


def test_a_signal_during_parallel_requests_waits_for_none_of_them(tmp_path: Path) -> None:
    request = Request(suite=Suite.WORKLOAD, case="crowd", kind="prose", n_predict=64)
    prompt = Prompt("one", "go on")
    with listening() as (port, met):
        life = Life(BenchBox(tmp_path).context(), target_at(port))

        def interrupt() -> None:
            while len(met) < 4:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            life.ask_all((request,) * 4, (prompt,) * 4)

        for client in met:
            client.settimeout(20.0)
            with suppress(ConnectionResetError):
                while client.recv(65536):
                    continue


class QuickClock(SystemClock):
    """Thirty seconds in one."""

    def monotonic_s(self) -> float:
        return super().monotonic_s() * 30


def test_two_requests_in_a_row_without_any_answer_end_a_suite(tmp_path: Path) -> None:
    box = BenchBox(tmp_path, clock=QuickClock())
    ctx = box.context()
    with (
        answering(tmp_path / "engine", "--metrics", reply=["normal"] * 4 + ["hang"]) as (server, _),
        EvidenceStore(ctx.paths.evidence) as store,
    ):
        target = replace(open_url(ctx, server.url), pids=(server.process.pid,))
        session = Session(ctx, BenchRequest(suite=Suite.MTP, repeats=3, seed=11))
        session.store = store
        with pytest.raises(BenchError) as ended:
            session.on_server(target, server.url)

    assert ended.value.message == "2 requests in a row had no answer"


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
