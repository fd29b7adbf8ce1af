"""The daemon and `top` beside a real server, under tunerd's own supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import started_by_hand
from tests.support.fakes import FakeClock
from tests.support.local_box import Box, deployed
from tests.support.ports import free_port
from tests.support.stand_in import install
from tests.support.waiting import until
from tunerd.engine.health import HttpState
from tunerd.watch.figures import Reading
from tunerd.watch.history import history
from tunerd.watch.watcher import Watcher

pytestmark = pytest.mark.llama
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with deployed(tmp_path_factory.mktemp("box"), free_port()) as made:
        yield made


@contextmanager
def daemon(box: Box, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon, looking once a second; it is ended in any case."""
    environment = {**box.environment, "TUNERD_DAEMON__EVERY_S": "1", **variables}
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunerd", "daemon"], stderr=said, env=environment
        )
    try:
        until(lambda: b"daemon.ready" in log.read_bytes(), log.read_text)
        yield process
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)


def generate(box: Box) -> None:
    server = Watcher(box.context)
    looked(server)
    reached = server.server()
    assert reached is not None
    answer = reached.complete("please go on with code", n_predict=24, timeout_s=LIMIT_S)
    assert answer.problem is None


# The kernel counts processor time in ticks of 10 ms: within one, nothing is known of the time between.
_TICKS_S = 0.1


def looked(watcher: Watcher, *, at_slots: bool = False) -> Reading:
    """A look in which the server answered: it has 2 s for that, and a busy machine takes longer.

    What was counted since the look before is told once, so slots are waited for on demand only.
    """
    end_s = time.monotonic() + LIMIT_S
    while True:
        reading = watcher.look()
        engine = reading.engine
        if engine.counters is not None and (engine.slots_total is not None or not at_slots):
            return reading
        assert time.monotonic() < end_s, engine


def test_what_a_server_did_between_two_looks_is_told(box: Box) -> None:
    clock = FakeClock()
    watcher = Watcher(replace(box.context, clock=clock))
    first = looked(watcher, at_slots=True)
    generate(box)
    clock.advance(2.0)
    too_early = looked(watcher)
    clock.advance(10.0)
    time.sleep(_TICKS_S)
    later = looked(watcher)

    assert first.engine.health is HttpState.READY
    assert (first.engine.slots_busy, first.engine.slots_total) == (0, 1)
    assert (first.engine.served, too_early.engine.served) == (None, None)
    served = later.engine.served
    assert served is not None
    assert (served.seconds, served.n_predicted) == (12.0, 24)
    assert served.decode_tok_s is not None
    assert served.decode_tok_s > 0
    assert served.n_drafted, "the designed model drafts"
    assert later.engine.rss_mib is not None
    assert later.gpus is None or later.gpus == ()
    assert later.host.cpu_percent is not None


def test_top_needs_no_daemon(box: Box) -> None:
    said = box.json("top", "--once")
    assert (said["ok"], said["engine"]["health"]) == (True, "ready")
    assert said["speeds"] is None, "nothing was seen to be generated"
    text = box.call("top", "--once").stdout
    assert "health  ready" in text
    assert "0 of 1 at work" in text


def test_the_daemon_keeps_a_history_and_ends_in_time(box: Box, tmp_path: Path) -> None:
    paths = box.context.paths
    paths.telemetry.write_bytes(b"not a database at all" * 300)
    log = tmp_path / "log"
    with daemon(box, log) as process:
        until((paths.state_dir / "guards.json").exists, log.read_text)  # it has looked
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 0

    assert log.read_text().count("event.history-damaged") == 1
    assert len(list(paths.state_dir.glob("telemetry.db.damaged-*"))) == 1
    kept = history(box.context, 0.0, time.time() + 60)
    assert kept.problem is None
    assert sum(point.n for point in kept.points) >= 1
    assert any(point.n_ready for point in kept.points), "in 2 s a busy one answers not each time"
    assert [event.kind for event in kept.events] == ["history-damaged"]


def test_settings_that_change_are_taken_over_and_wrong_ones_change_nothing(
    box: Box, tmp_path: Path
) -> None:
    file, log = box.configure(""), tmp_path / "log"
    try:
        with daemon(box, log) as process:
            file.write_text("[guards]\nhang = 'sometimes'\n")
            until(lambda: b"event.settings-refused" in log.read_bytes(), log.read_text)
            file.write_text("[guards]\nhang = 'off'\n")
            until(lambda: b"settings.reloaded" in log.read_bytes(), log.read_text)
            assert b"event.settings-mended" in log.read_bytes()
            second = box.call("daemon")
            assert (second.returncode, process.poll()) == (75, None)
            assert "another tunerd daemon already runs here" in second.stderr
            process.send_signal(signal.SIGHUP)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=LIMIT_S) == 0
    finally:
        file.unlink()
    assert "guards.hang" in log.read_text()


def test_it_ends_at_once_although_it_waits_for_an_answer(tmp_path: Path) -> None:
    limits = {"TUNERD_GUARDS__HANG_EVERY_S": "5", "TUNERD_GUARDS__HANG_LIMIT_S": "600"}
    engine = install(tmp_path / "engine", reply="hang", needs_model=False)
    box = Box(tmp_path)
    command = f"{engine.program} --port {free_port()} -np 1 --metrics"
    log = tmp_path / "log"
    with started_by_hand(box, command) as manager, daemon(box, log, **limits) as process:
        until(lambda: "launch_slot" in "".join(manager.log(box.unit.name)), log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 0
    assert "look.cut_short" in log.read_text()
