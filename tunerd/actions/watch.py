"""One look at GPU, host and engine after the other: what the daemon, `top` and the metrics show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.lease_record import read_measurement
from tunerd.actions.live import address_now, read_live_unit
from tunerd.core.bench.counters import Counters, read_counters
from tunerd.core.health import HttpState
from tunerd.core.host import Gpu
from tunerd.core.service import UnitState
from tunerd.core.telemetry.pace import LEAST_SCRAPE_S
from tunerd.core.telemetry.reading import (
    UNKNOWN,
    EngineNow,
    GpuNow,
    HostNow,
    Reading,
    Served,
    gpu_now,
    served_between,
)
from tunerd.errors import TunerdError
from tunerd.system.host import (
    CpuSeconds,
    cpu_seconds,
    memory_of,
    process_cpu_s,
    read_memory,
)
from tunerd.system.llama import Address, LlamaServer
from tunerd.system.process_tree import descends_from

_ASK_S = 2.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the server itself said."""

    health: HttpState | None = None
    slots_total: int | None = None
    slots_busy: int | None = None
    counters: Counters | None = None
    served: Served | None = None


@dataclass(frozen=True, slots=True)
class _Scrape:
    at_s: float
    life: str | None
    counters: Counters


class Watcher:
    """Looks; what grows between two looks is told in the later one.

    A look never raises. It starts one process (`systemctl show`), reads files below /proc, asks NVML,
    and puts three short questions to a server that serves.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._scrape: _Scrape | None = None
        self._cpu: CpuSeconds | None = None
        self._found: tuple[object, Address | None] = (None, None)

    def look(self) -> Reading:
        """Everything now."""
        ctx = self._ctx
        state = self._state()
        asked = self._ask(state)
        gpu = ctx.gpu.read()
        pid = None if state is None else state.main_pid
        measurement = read_measurement(ctx)
        return Reading(
            at_s=ctx.clock.now_s(),
            gpus=None if gpu.gpus is None else _gpus(gpu.gpus, pid),
            gpu_problem=gpu.problem,
            driver_version=gpu.driver_version,
            host=self._host(),
            engine=_engine(ctx.unit, state, asked),
            measuring=None if measurement is None else measurement.purpose,
        )

    def server(self) -> LlamaServer | None:
        """The server as the last look reached it; None where it did not."""
        address = self._found[1]
        return None if address is None else self._ctx.connect(address)

    def _state(self) -> UnitState | None:
        try:
            return self._ctx.services.state(self._ctx.unit)
        except TunerdError:
            return None

    def _host(self) -> HostNow:
        memory = read_memory()
        before, self._cpu = self._cpu, cpu_seconds()
        return HostNow(
            total_mib=memory.total_mib,
            available_mib=memory.available_mib,
            swap_total_mib=memory.swap_total_mib,
            swap_used_mib=memory.swap_used_mib,
            cpu_percent=_cpu_percent(before, self._cpu),
        )

    def _ask(self, state: UnitState | None) -> _Asked:
        if state is None or not state.is_active:
            self._scrape = None
            return _Asked()
        address = self._address(state)
        if address is None:
            return _Asked()
        server = self._ctx.connect(address)
        health = server.health(timeout_s=_ASK_S)
        if health is not HttpState.READY:
            return _Asked(health)
        slots = server.slots(timeout_s=_ASK_S)
        counters, served = self._count(server, state)
        return _Asked(
            health=health,
            slots_total=None if slots is None else slots.total,
            slots_busy=None if slots is None else slots.busy,
            counters=counters,
            served=served,
        )

    def _address(self, state: UnitState) -> Address | None:
        """Where this life of the server is reached; found out once for each."""
        ctx = self._ctx
        key = (state.invocation_id, state.main_pid, _changed_ns(state.fragment_path))
        if self._found[0] != key or self._found[1] is None:
            try:
                self._found = (key, address_now(ctx, read_live_unit(ctx), state))
            except TunerdError:
                self._found = (None, None)
        return self._found[1]

    def _count(
        self, server: LlamaServer, state: UnitState
    ) -> tuple[Counters | None, Served | None]:
        now_s = self._ctx.clock.monotonic_s()
        before = self._scrape
        if before is not None and now_s - before.at_s < LEAST_SCRAPE_S:
            return before.counters, None
        text = server.metrics_text(timeout_s=_ASK_S)
        if text is None:
            return None, None
        life = state.invocation_id or str(state.main_pid)
        after = _Scrape(now_s, life, read_counters(text))
        self._scrape = after
        if before is None or before.life != life:
            return after.counters, None
        return after.counters, served_between(before.counters, after.counters, now_s - before.at_s)


def _gpus(gpus: Sequence[Gpu], server_pid: int | None) -> tuple[GpuNow, ...]:
    """The cards, with what the server and its children hold told apart."""
    found = []
    for gpu in gpus:
        pids = [process.pid for process in gpu.processes or ()]
        mine = [pid for pid in pids if server_pid is not None and descends_from(pid, server_pid)]
        found.append(gpu_now(gpu, mine))
    return tuple(found)


def _engine(unit: str, state: UnitState | None, asked: _Asked) -> EngineNow:
    pid = None if state is None else state.main_pid
    memory = None if pid is None else memory_of(pid)
    return EngineNow(
        unit=unit,
        active_state=UNKNOWN if state is None else state.active_state,
        sub_state=UNKNOWN if state is None else state.sub_state,
        result=UNKNOWN if state is None else state.result,
        n_restarts=None if state is None else state.n_restarts,
        life=None if state is None else state.invocation_id or (None if pid is None else str(pid)),
        since_s=None if state is None else state.active_since_s,
        pid=pid,
        health=asked.health,
        slots_total=asked.slots_total,
        slots_busy=asked.slots_busy,
        counters=asked.counters,
        served=asked.served,
        rss_mib=None if memory is None else memory.rss_mib,
        cpu_s=None if pid is None else process_cpu_s(pid),
    )


def _cpu_percent(before: CpuSeconds | None, after: CpuSeconds | None) -> float | None:
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    share = (after.busy_s - before.busy_s) / (after.total_s - before.total_s)
    return 100 * min(1.0, max(0.0, share))


def _changed_ns(path: Path | None) -> int | None:
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:
        return None
