"""Looks: one reading of everything that is watched, for the daemon and for `tunerd top`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunerd.app import Context
from tunerd.engine.health import HttpState
from tunerd.engine.server import Address, LlamaServer
from tunerd.engine.serving import address_now, read_live_unit
from tunerd.errors import TunerdError
from tunerd.machine.facts import Gpu
from tunerd.machine.files import stamp_of
from tunerd.machine.host import CpuSeconds, cpu_seconds, memory_of, process_cpu_s, read_memory
from tunerd.machine.process import descends_from, may_use_nvidia
from tunerd.measure.answer import Counters, read_counters
from tunerd.production.measurement import read_measurement
from tunerd.result import ActionResult, Message, warning
from tunerd.units.generations import Outcome
from tunerd.units.manager import LogSpan, UnitState
from tunerd.watch.figures import (
    Answers,
    EngineNow,
    GpuNow,
    HostNow,
    Reading,
    Served,
    gpu_now,
    served_between,
    values_of,
)
from tunerd.watch.history import history

_ASK_S = 2.0
# Each look at its counters is work for a llama-server, and takes its turn among the requests.
# Source: ggml-org/llama.cpp#29104, a server that stalls when it is asked every second.
_LEAST_SCRAPE_S = 5.0
# More processor time than two questions cost, and less than a short answer.
_QUESTIONS_S = 0.05
_LOG_LINES = 3000


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a life of the server is reached, and whether it sleeps when nobody asks."""

    key: object
    address: Address
    sleeps: bool


@dataclass(frozen=True, slots=True)
class _Scrape:
    """Counters as they were seen, and those to hold the next against."""

    at_s: float
    life: str | None
    counters: Counters
    known: Counters


class Watcher:
    """Looks; what grows between two looks is told in the later one.

    A look never raises. It starts one process (`systemctl show`), reads files below /proc, asks NVML,
    and puts three short questions to a server that serves. One that sleeps is asked nothing that wakes
    it, and one that may fall asleep nothing that puts that off.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._scrape: _Scrape | None = None
        self._cpu: CpuSeconds | None = None
        self._worked: tuple[str | None, float] | None = None
        self._found: _Found | None = None

    def look(self) -> Reading:
        """Everything now."""
        ctx = self._ctx
        state = self._state()
        asked = self._ask(state)
        at_s = ctx.clock.now_s()  # just after the counters, as near to them as can be
        gpu = ctx.gpu.read()
        pid = None if state is None else state.main_pid
        measurement = read_measurement(ctx)
        return Reading(
            at_s=at_s,
            gpus=None if gpu.gpus is None else _gpus(gpu.gpus, pid),
            gpu_problem=gpu.gpu_problem,
            driver_version=gpu.driver_version,
            host=self._host(),
            engine=_engine(ctx.unit, state, asked, is_expected=self._is_expected(state)),
            measuring=None if measurement is None else measurement.purpose,
            awaits_reboot=gpu.awaits_reboot is not None and (pid is None or may_use_nvidia(pid)),
        )

    def server(self) -> LlamaServer | None:
        """The server as the last look reached it; None where it did not."""
        return None if self._found is None else LlamaServer(self._found.address, self._ctx.clock)

    def _state(self) -> UnitState | None:
        with contextlib.suppress(TunerdError):
            return self._ctx.services.state(self._ctx.unit)
        return None

    def _is_expected(self, state: UnitState | None) -> bool:
        if state is None or state.is_enabled:
            return True
        try:
            newest = next(self._ctx.generations.entries(), None)
        except TunerdError:
            return True
        return newest is not None and newest.ending.outcome is not Outcome.REMOVED

    def _host(self) -> HostNow:
        memory = read_memory()
        before, self._cpu = self._cpu, cpu_seconds()
        return HostNow(**values_of(memory), cpu_percent=_cpu_percent(before, self._cpu))

    def _ask(self, state: UnitState | None) -> Answers:
        if state is None or not state.is_active:
            self._scrape = None
            return Answers()
        rests = self._rests(state)
        found = self._reached(state)
        if found is None:
            return Answers()
        server = LlamaServer(found.address, self._ctx.clock)
        health = server.health(timeout_s=_ASK_S)
        if health is not HttpState.READY:
            return Answers(health)
        props = server.props(timeout_s=_ASK_S)
        is_asleep = props is not None and props.is_asleep
        total = None if props is None else props.n_slots
        if is_asleep:
            return Answers(health, total, 0, self._counted(state), is_asleep=True)
        counters, served = self._count(server, state, spare=found.sleeps and rests)
        busy = None if counters is None else counters.n_processing
        if (total is None or busy is None) and not found.sleeps:
            slots = server.slots(timeout_s=_ASK_S)
            total, busy = (total, busy) if slots is None else (slots.total, slots.busy)
        return Answers(health, total, busy, counters, served, False if found.sleeps else None)

    def _rests(self, state: UnitState) -> bool:
        """Whether the process has computed no more since the look before than that look cost it."""
        life, cpu_s = state.life, None
        if state.main_pid is not None:
            cpu_s = process_cpu_s(state.main_pid)
        before, self._worked = self._worked, None if cpu_s is None else (life, cpu_s)
        if before is None or cpu_s is None or before[0] != life:
            return False
        return cpu_s - before[1] <= _QUESTIONS_S

    def _reached(self, state: UnitState) -> _Found | None:
        """Where this life of the server is reached; found out once for each."""
        ctx, path = self._ctx, state.fragment_path
        key = (state.invocation_id, state.main_pid, path and stamp_of(path))
        if self._found is None or self._found.key != key:
            self._found = None
            with contextlib.suppress(TunerdError):
                live = read_live_unit(ctx)
                address = address_now(ctx, live, state)
                if address is not None:
                    self._found = _Found(key, address, live.serving.sleeps)
        return self._found

    def _counted(self, state: UnitState) -> Counters | None:
        """The counters of this life, as they were seen last."""
        seen = self._scrape
        return seen.counters if seen is not None and seen.life == state.life else None

    def _count(
        self, server: LlamaServer, state: UnitState, *, spare: bool
    ) -> tuple[Counters | None, Served | None]:
        """Its counters and what they grew by.

        With `spare` it is asked only where it worked when it was asked last, or never was.
        """
        clock, life = self._ctx.clock, state.life
        counted, before = self._counted(state), self._scrape
        if counted is not None and before is not None:
            is_known = spare and not counted.n_at_work
            if is_known or clock.monotonic_s() - before.at_s < _LEAST_SCRAPE_S:
                return counted, None
        text = server.metrics_text(timeout_s=_ASK_S)
        if text is None:
            return None, None
        now_s, counters = clock.monotonic_s(), read_counters(text)
        served, known = None, counters
        if before is not None and before.life == life:
            served, known = served_between(before.known, counters, now_s - before.at_s)
        self._scrape = _Scrape(now_s, life, counters, known)
        return counters, served


def _gpus(gpus: Sequence[Gpu], server_pid: int | None) -> tuple[GpuNow, ...]:
    """The cards, with what the server and its children hold told apart."""
    return tuple(
        gpu_now(gpu, [one.pid for one in gpu.processes or ()
                      if server_pid is not None and descends_from(one.pid, server_pid)])
        for gpu in gpus
    )  # fmt: skip


def _engine(unit: str, state: UnitState | None, asked: Answers, *, is_expected: bool) -> EngineNow:
    said = values_of(asked)
    if state is None:
        return EngineNow(unit=unit, **said, is_expected=is_expected)
    pid = state.main_pid
    memory = None if pid is None else memory_of(pid)
    return EngineNow(
        unit=unit,
        **said,
        active_state=state.active_state,
        sub_state=state.sub_state,
        result=state.result,
        n_restarts=state.n_restarts,
        life=state.life,
        since_s=state.active_since_s,
        pid=pid,
        rss_mib=None if memory is None else memory.rss_mib,
        cpu_s=None if pid is None else process_cpu_s(pid),
        is_expected=is_expected,
        anonymous_mib=None if memory is None else memory.anonymous_mib,
    )


def server_log(ctx: Context) -> Callable[[float], LogSpan]:
    """Reads what the server wrote since a time [s since the epoch]."""
    return lambda since_s: ctx.services.log_since(ctx.unit, since_s, max_lines=_LOG_LINES)


def _cpu_percent(before: CpuSeconds | None, after: CpuSeconds | None) -> float | None:
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    share = (after.busy_s - before.busy_s) / (after.total_s - before.total_s)
    return 100 * min(1.0, max(0.0, share))


_RECENT_S = 900


class Top:
    """Looks, one after the other; speeds of the last quarter of an hour come from the history."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._watcher = Watcher(ctx)
        self._last: Served | None = None

    def look(self) -> ActionResult:
        """One look.

        The payload has the reading, and `speeds`: of the work between the last two looks that saw any,
        else of the last quarter of an hour that the daemon kept, else null.
        """
        reading = self._watcher.look()
        self._last = _worked((reading,)) or self._last
        return _shown(self._ctx, reading, self._last)


def top(ctx: Context, readings: Sequence[Reading]) -> ActionResult:
    """The newest of the daemon's own looks, oldest first, as `Top.look` shows it; else one look."""
    if not readings:
        return Top(ctx).look()
    newest = readings[-1]
    recent = [one for one in readings if one.at_s >= newest.at_s - _RECENT_S]
    return _shown(ctx, newest, _worked(recent))


def _worked(readings: Sequence[Reading]) -> Served | None:
    """The last work that was seen between two looks."""
    found = (one.engine.served for one in reversed(readings))
    return next((one for one in found if one is not None and one.n_predicted), None)


def _shown(ctx: Context, reading: Reading, known: Served | None) -> ActionResult:
    since = "between two looks"
    if known is None:
        since, known = "in the last 15 min", _kept(ctx, reading.at_s)
    speeds = None
    if known is not None:
        speeds = {"since": since, **known.rates(), "n_predicted": known.n_predicted}
    return ActionResult("top", {**reading.to_json(), "speeds": speeds}, _messages(reading))


def _kept(ctx: Context, now_s: float) -> Served | None:
    kept = history(ctx, now_s - _RECENT_S, now_s, step_s=_RECENT_S, events=0)
    worked = [point for point in kept.points if point.n_predicted]
    return worked[-1] if worked else None


def _messages(reading: Reading) -> tuple[Message, ...]:
    found = []
    if reading.gpu_problem is not None:
        found.append(warning("gpu", reading.gpu_problem, "`tunerd doctor`"))
    if reading.engine.active_state == "failed":
        text = f"the unit has failed ({reading.engine.result})"
        found.append(warning("failed", text, "`tunerd doctor`"))
    return tuple(found)
