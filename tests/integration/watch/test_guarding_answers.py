"""What is held against a server, and what is not: refusals, a deaf service manager, a clock that is set."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.integration.watch.test_guarding import World
from tests.support.readings import an_engine
from tunerd.engine.server import Address, LlamaServer
from tunerd.units.systemd import Notifier
from tunerd.watch.guarding import Guarding


@contextmanager
def answering(status: int) -> Iterator[tuple[int, list[str]]]:
    """A server that answers each question so; its port, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            body = json.dumps({"error": {"message": "no", "code": status}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port, asked
        server.shutdown()
        thread.join()


def looked(world: World, port: int, looks: int) -> None:
    server = LlamaServer(Address("127.0.0.1", port), world.clock)
    world.guards = Guarding(world.ctx, Notifier({}), world.told.append, lambda: server)
    for _ in range(looks):
        world.look()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 501])
def test_a_server_that_does_not_do_that_is_no_server_that_hangs(
    tmp_path: Path, status: int
) -> None:
    world = World(tmp_path)
    before = world.manager.state("llama-server.service").invocation_id
    with answering(status) as (port, asked):
        looked(world, port, 200)  # two thousand seconds
        assert 1 <= len(asked) <= 2, "and it is not asked oftener for that"
    assert world.kinds == []
    assert world.manager.state("llama-server.service").invocation_id == before


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_fails_at_each_question_is_restarted(tmp_path: Path, status: int) -> None:
    world = World(tmp_path)
    before = world.manager.state("llama-server.service").invocation_id
    with answering(status) as (port, _asked):
        looked(world, port, 100)
    assert world.kinds == ["hang"]
    assert world.manager.state("llama-server.service").invocation_id != before


def test_a_hang_that_was_told_of_is_asked_about_seldom(tmp_path: Path) -> None:
    world = World(tmp_path)
    guards = world.ctx.settings.guards.model_copy(update={"hang": "advise"})
    settings = world.ctx.settings.model_copy(update={"guards": guards})
    world.ctx = replace(world.ctx, settings=settings)
    with answering(500) as (port, asked):
        looked(world, port, 1000)  # ten thousand seconds
        assert len(asked) < 20
    assert world.kinds == ["hang"]


def test_a_clock_that_is_set_back_does_not_put_the_guard_to_sleep(tmp_path: Path) -> None:
    world = World(tmp_path)
    with answering(500) as (port, asked):
        looked(world, port, 5)
        world.clock.set_wall(world.clock.now_s() - 86_400)
        for _ in range(120):
            world.look()
        assert len(asked) >= 2
    assert world.kinds == ["hang"]


def test_a_death_is_counted_once_though_the_service_manager_was_deaf_meanwhile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    world.look()
    gone = an_engine(
        active_state="failed", sub_state="failed", result="exit-code", health=None, life=None
    )
    for engine in (gone, gone, replace(gone, active_state="unknown", result="unknown"), gone):
        world.look(engine=engine)
    assert world.kinds == ["server-failed"]
    assert "".join(capfd.readouterr()).count("server.died") == 1
