"""The daemon's loop: jobs that run again, jobs that fail, clocks that are set."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.support.fakes import AheadClock, FakeClock
from tunerd.machine.clock import SystemClock
from tunerd.watch.daemon import Loop

LIMIT_S = 120.0


def run(loop: Loop) -> None:
    """The loop in this thread, ended in any case."""
    guard = threading.Timer(LIMIT_S, loop.end)
    guard.start()
    try:
        loop.run()
    finally:
        guard.cancel()


def nothing() -> None:
    """Called between jobs."""


@pytest.mark.parametrize("wait_s", [0.01, 0.0])
def test_a_job_runs_again_as_soon_as_it_says(wait_s: float) -> None:
    ran: list[int] = []
    loop = Loop(SystemClock(), nothing, 0.05, nothing)

    def job() -> float:
        ran.append(len(ran))
        if len(ran) == 5:
            loop.end()
        return wait_s

    loop.every("job", job, LIMIT_S)
    run(loop)
    assert ran == [0, 1, 2, 3, 4]


def test_a_job_that_fails_is_told_runs_again_when_it_is_wanted_then_and_the_others_go_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loop, wanted = Loop(SystemClock(), nothing, 0.05, nothing), [LIMIT_S]
    ran: list[int] = []

    def fail() -> None:
        wanted[0] = 0.01
        ran.append(len(ran))
        raise ValueError("a defect")

    loop.every("fails", fail, lambda: wanted[0])
    loop.every("ends", lambda: loop.end() if len(ran) > 2 else None, 0.01)
    run(loop)
    assert len(ran) > 2
    said = "".join(capfd.readouterr())
    assert said.count("daemon.job_failed") == len(ran)
    assert "a defect" in said


def test_what_feeds_the_watchdog_is_called_though_nothing_is_due() -> None:
    calls: list[int] = []

    def each() -> None:
        calls.append(1)
        if len(calls) == 4:
            loop.end()

    loop = Loop(SystemClock(), each, 0.01, nothing)
    run(loop)
    assert len(calls) == 4


@pytest.mark.timeout(LIMIT_S)
def test_a_signal_may_come_at_any_moment() -> None:
    """Once in a while the daemon hung: the handler waited for a lock that what it broke in on held."""
    loop = Loop(SystemClock(), nothing, 0.00001, nothing)
    before = signal.signal(signal.SIGVTALRM, lambda _number, _frame: loop.wakeup())
    loop.every("ends", loop.end, LIMIT_S, first_s=3.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        loop.run()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_a_clock_that_is_set_back_or_slept_is_noticed_once() -> None:
    clock = FakeClock()
    steps: list[float] = []
    loop = Loop(clock, nothing, 1.0, lambda: steps.append(clock.now_s()))
    clock.advance(60.0)
    loop.look_at_clock()
    assert steps == []
    clock.set_wall(clock.now_s() - 3600)
    loop.look_at_clock()
    loop.look_at_clock()
    clock.set_wall(clock.now_s() + 8 * 3600)
    loop.look_at_clock()
    assert len(steps) == 2


class CountingClock(AheadClock):
    """Counts how often it is asked."""

    n_asked = 0

    def now_s(self) -> float:
        self.n_asked += 1
        return super().now_s()


def test_a_clock_that_is_set_back_while_a_job_runs_holds_up_no_job_that_was_due_as_well() -> None:
    """Until the clock came to where it had been, the scheduler gathered runs that it took for missed: 20 MiB a second."""
    clock, ran = CountingClock(0.0), list[str]()

    def first() -> None:
        clock.by_s = -2.0
        ran.append("first")

    def second() -> None:
        ran.append("second")
        loop.end()

    loop = Loop(clock, nothing, 0.05, nothing)
    loop.every("first", first, LIMIT_S)
    loop.every("second", second, 0.1)
    run(loop)
    assert ran == ["first", "second"]
    assert clock.n_asked < 1000
