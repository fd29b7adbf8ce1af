"""A server that sleeps when nobody asks it: looks neither wake it nor keep it from falling asleep."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.integration.conftest import started_by_hand
from tests.support import needs
from tests.support.faked import set_to
from tests.support.fakes import FakeClock
from tests.support.local_box import Box
from tests.support.ports import free_port
from tests.support.stand_in import install
from tunerd.app import Context
from tunerd.machine.files import lock
from tunerd.production.gate import drain
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.watch.daemon import Nights
from tunerd.watch.figures import EngineNow, Event
from tunerd.watch.watcher import Watcher

UNIT = "llama-server.service"
LIMIT_S = 180.0
PAUSE_S = 0.3


@dataclass
class Sleeper:
    """A server whose unit was written by hand, and one who looks every ten seconds of a clock that hurries."""

    ctx: Context
    clock: FakeClock
    watcher: Watcher

    def look(self) -> EngineNow:
        time.sleep(PAUSE_S)
        self.clock.advance(10.0)
        return self.watcher.look().engine

    def until(self, holds: Callable[[EngineNow], bool]) -> EngineNow:
        end_s = time.monotonic() + LIMIT_S
        while not holds(seen := self.look()):
            assert time.monotonic() < end_s, seen
        return seen

    def generate(self) -> None:
        server = self.watcher.server()
        assert server is not None
        assert server.complete([300, 301], n_predict=300, timeout_s=LIMIT_S).problem is None


@contextmanager
def sleeper(folder: Path, program: Path, *more: str) -> Iterator[Sleeper]:
    box, model = Box(folder), folder / "tiny.gguf"
    write(design(SHAPES["tiny-nomtp"]), model)
    words = (str(program), "-m", str(model), "--port", str(free_port()), "-t", "1", "-c", "512",
             "-np", "1", "--sleep-idle-seconds", "2", *more)  # fmt: skip
    clock = FakeClock()
    with started_by_hand(box, shlex.join(words)) as manager:
        ctx = replace(box.context, clock=clock, services=manager)
        yield Sleeper(ctx, clock, Watcher(ctx))


@pytest.mark.engine
def test_a_real_server_is_let_sleep_and_counted_when_it_works(tmp_path: Path) -> None:
    with sleeper(tmp_path, needs.engine("mainline-2026-08-18"), "--metrics") as box:
        box.until(lambda seen: seen.is_ready is True)
        box.generate()
        assert box.look().is_asleep is False, "it will, when nobody asks it"
        asleep = box.until(lambda seen: seen.is_asleep is True)
        assert (asleep.is_ready, asleep.is_busy, asleep.slots_total) == (True, False, 1)
        assert drain(box.ctx, box.ctx.services.state(UNIT)) == ()
        assert all(box.look().is_asleep for _ in range(10)), "no look wakes it"
        assert asleep.counters is not None

        box.generate()
        generated = (asleep.counters.n_predicted or 0) + 300
        worked = box.until(lambda seen: seen.counters is not None
                           and (seen.counters.n_predicted or 0) >= generated)  # fmt: skip
        assert worked.slots_total == 1
        box.until(lambda seen: seen.is_asleep is True)


@pytest.mark.engine
def test_one_without_counters_is_not_asked_for_its_slots(tmp_path: Path) -> None:
    with sleeper(tmp_path, needs.engine("mainline-2026-08-18")) as box:
        asleep = box.until(lambda seen: seen.is_asleep is True)
        assert (asleep.slots_total, asleep.counters) == (1, None)
        assert all(box.look().is_asleep for _ in range(10))


def test_a_night_begins_when_the_server_sleeps_and_does_not_wake_it(tmp_path: Path) -> None:
    engine = install(tmp_path / "engine", dialect="main-0x")
    with sleeper(tmp_path, engine.program, "--metrics") as box:
        told: list[Event] = []
        ctx = set_to(box.ctx, sweep__window="00:00-23:59", schedule__enabled=True,
                     schedule__missed="skip", schedule__begin="asleep")  # fmt: skip
        nights = Nights(ctx, told.append)
        box.clock.set_wall(box.clock.now_s() // 86400 * 86400 + 3600.0)  # an hour after it opened

        box.until(lambda seen: seen.is_ready is True)
        box.generate()
        n_woken = len(engine.events("wake"))
        assert nights.look() == 60.0
        assert not told
        box.until(lambda seen: seen.is_asleep is True)
        assert all(box.look().is_asleep for _ in range(10))
        with lock(box.ctx.paths.sweep_lock, purpose="sweep", since="now"):  # nothing is measured
            nights.look()
        assert [one.kind for one in told] == ["night"]
        assert len(engine.events("wake")) == n_woken
