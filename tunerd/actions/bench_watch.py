"""Looks at the machine while something is measured: GPUs during a request, counters between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunerd.actions.bench_target import Target
from tunerd.actions.context import Context
from tunerd.core.bench.counters import Counters, gained, read_counters
from tunerd.core.bench.trust import GpuLook, Traffic, judge_traffic, look_at
from tunerd.core.sample import Timings

# Each look at the counters is work for the server, and resets gauges that others may read.
SCRAPE_S = 5.0
_GPU_LOOK_S = 0.5
_IDLE_POLL_S = 0.5
# A slot may be told as busy for a moment after its answer has ended.
_LEAST_WAIT_S = 5.0


@dataclass
class GpuWatch:
    """Reads the GPUs before, during and after one request, at most twice a second."""

    ctx: Context
    pids: tuple[int, ...]
    looks: list[GpuLook] = field(default_factory=list)
    _last_s: float | None = None

    def look(self) -> None:
        """Read now, if the last reading is old enough."""
        now_s = self.ctx.clock.monotonic_s()
        if self._last_s is None or now_s - self._last_s >= _GPU_LOOK_S:
            self.look_now()

    def look_now(self) -> None:
        """Read in any case."""
        self.looks.append(look_at(self.ctx.gpu.read().gpus, self.pids))
        self._last_s = self.ctx.clock.monotonic_s()

    @property
    def free_mib(self) -> int | None:
        """The least that was free; None where a reading could not tell."""
        known = [look.free_mib for look in self.looks]
        if not known or None in known:
            return None
        return min(mib for mib in known if mib is not None)


class TrafficWatch:
    """Tells foreign requests from the server's own counters, a stretch of time at a time.

    Where the server counts nothing, busy slots before a request are all that can be seen.
    """

    def __init__(self, ctx: Context, target: Target) -> None:
        self._ctx = ctx
        self._target = target
        self._before: Counters | None = None
        self._read_s: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the server has counters."""
        return self._before is not None

    @property
    def is_due(self) -> bool:
        """Whether the counters may be read again."""
        return self._age_s() >= SCRAPE_S

    @property
    def limit_s(self) -> float:
        """How long others are waited for at a time [s]."""
        return max(self._ctx.settings.service.drain_s, _LEAST_WAIT_S)

    def open(self) -> None:
        """Begin a stretch; waits until the counters may be read."""
        self._before = self._read()

    def close(self, own: list[Timings | None]) -> tuple[Traffic, tuple[int, ...] | None]:
        """End a stretch in which these requests were made, and begin the next.

        Returns:
            What it shows of foreign traffic, and how many drafts were accepted by position.
        """
        before = self._before
        if before is None and not self.is_due:
            return Traffic(None), None  # nothing to wait for where nothing was counted
        after = self._before = self._read()
        if before is None or after is None:
            return Traffic(None), None
        return judge_traffic(before, after, own), gained(before, after)

    def wait_until_idle(self) -> bool:
        """Wait until nothing is answered, as long as a swap would; whether that came true.

        Told by its slots, or by its counters where it shows none; true where it tells neither.
        """
        clock = self._ctx.clock
        end_s = clock.monotonic_s() + self.limit_s
        while True:
            if not self._n_at_work():
                return True
            if clock.monotonic_s() >= end_s:
                return False
            left_s = end_s - clock.monotonic_s()
            self._ctx.say("waiting for requests of others", left_s=left_s)
            clock.sleep(min(_IDLE_POLL_S, left_s))

    def _n_at_work(self) -> int | None:
        slots = self._target.server.slots() if self._target.is_llama else None
        if slots is not None:
            return slots.busy
        found = self._read() if self.counts else None
        return None if found is None else found.n_at_work

    def _read(self) -> Counters | None:
        if not self._target.is_llama:
            return None
        left_s = SCRAPE_S - self._age_s()
        if left_s > 0:
            self._ctx.clock.sleep(left_s)
        self._read_s = self._ctx.clock.monotonic_s()
        text = self._target.server.metrics_text()
        return None if text is None else read_counters(text)

    def _age_s(self) -> float:
        if self._read_s is None:
            return SCRAPE_S
        return self._ctx.clock.monotonic_s() - self._read_s
