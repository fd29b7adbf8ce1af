"""Readings of a stretch of time in one row: what is kept for weeks and for a year.

Sums are over the readings that have the value, extremes too; a value that no reading has is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean

from tunerd.core.telemetry.reading import GpuNow, Reading, Served

# Rows of a minute are kept for two weeks, rows of ten minutes for somewhat over a year.
MINUTE_S = 60
COARSE_S = 600
KEEP_MINUTES_S = 14 * 86400
KEEP_COARSE_S = 400 * 86400
KEEP_EVENTS_S = 400 * 86400


@dataclass(frozen=True, slots=True)
class Point:
    """What a stretch came to, beside the cards.

    `n` readings were taken, `n_active` saw the unit active, `n_ready` saw it serve, `n_busy` saw it
    work, and `n_measuring` saw a measurement in its place. Tokens and seconds are what the server
    counted; figures of memory are the worst that was seen.
    """

    begin_s: int
    seconds: int
    n: int
    n_active: int
    n_ready: int
    n_busy: int
    n_measuring: int
    n_prompt: int | None = None
    prompt_s: float | None = None
    n_cached: int | None = None
    n_predicted: int | None = None
    predicted_s: float | None = None
    n_drafted: int | None = None
    n_accepted: int | None = None
    restarts: int | None = None
    rss_mib: int | None = None
    available_mib: int | None = None
    swap_used_mib: int | None = None
    cpu_percent: float | None = None

    @property
    def served(self) -> Served:
        """The same as what happens between two looks, with its speeds."""
        return Served(self.seconds, self.n_prompt, self.prompt_s, self.n_cached, self.n_predicted,
                      self.predicted_s, self.n_drafted, self.n_accepted)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuPoint:
    """What a stretch came to on one card: memory at its fullest, the rest as means.

    `n_throttled` of the `n` readings saw heat or a power brake hold it down.
    """

    begin_s: int
    seconds: int
    index: int
    n: int
    used_mib: int | None
    free_mib: int | None
    server_mib: int | None
    others_mib: int | None
    utilisation_percent: float | None
    power_w: float | None
    sm_clock_mhz: float | None
    temperature_c: float | None
    n_throttled: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened and is told once: `kind` is stable for scripts, `level` as a message's."""

    at_s: float
    kind: str
    level: str
    text: str
    hint: str | None = None


POINT_COLUMNS = tuple(field.name for field in fields(Point))
GPU_COLUMNS = tuple(field.name for field in fields(GpuPoint))


class Bucket:
    """Gathers the readings of one minute after the other."""

    def __init__(self, seconds: int = MINUTE_S) -> None:
        self._seconds = seconds
        self._readings: list[Reading] = []
        self._before: Reading | None = None

    def add(self, reading: Reading) -> tuple[Point, tuple[GpuPoint, ...]] | None:
        """Take a reading; what the stretch before came to, when this one begins the next."""
        done = None
        if self._readings and self._begin_s(self._readings[0]) != self._begin_s(reading):
            done = self.close()
        self._readings.append(reading)
        return done

    def close(self) -> tuple[Point, tuple[GpuPoint, ...]] | None:
        """What was gathered; None if that is nothing."""
        if not self._readings:
            return None
        readings, self._readings = self._readings, []
        begin_s = self._begin_s(readings[0])
        done = summarise(readings, begin_s=begin_s, seconds=self._seconds, before=self._before)
        self._before = readings[-1]
        return done

    def _begin_s(self, reading: Reading) -> int:
        return int(reading.at_s // self._seconds) * self._seconds


def summarise(
    readings: Sequence[Reading], *, begin_s: int, seconds: int, before: Reading | None = None
) -> tuple[Point, tuple[GpuPoint, ...]]:
    """One row of readings.

    Args:
        readings: At least one, oldest first.
        begin_s: When the stretch began [s since the epoch].
        seconds: How long it is.
        before: The last reading of the stretch before, to tell restarts between them.
    """
    engines = [one.engine for one in readings]
    served = [one.served for one in engines if one.served is not None]
    hosts = [one.host for one in readings]
    point = Point(
        begin_s=begin_s,
        seconds=seconds,
        n=len(readings),
        n_active=sum(one.is_active for one in engines),
        n_ready=sum(one.is_ready is True for one in engines),
        n_busy=sum(one.is_busy is True for one in engines),
        n_measuring=sum(one.measuring is not None for one in readings),
        n_prompt=_sum(one.n_prompt for one in served),
        prompt_s=_sum_s(one.prompt_s for one in served),
        n_cached=_sum(one.n_cached for one in served),
        n_predicted=_sum(one.n_predicted for one in served),
        predicted_s=_sum_s(one.predicted_s for one in served),
        n_drafted=_sum(one.n_drafted for one in served),
        n_accepted=_sum(one.n_accepted for one in served),
        restarts=_restarts(readings if before is None else (before, *readings)),
        rss_mib=_most(one.rss_mib for one in engines),
        available_mib=_least(one.available_mib for one in hosts),
        swap_used_mib=_most(one.swap_used_mib for one in hosts),
        cpu_percent=_mean(one.cpu_percent for one in hosts),
    )
    indexes = sorted({gpu.index for one in readings for gpu in one.gpus or ()})
    return point, tuple(_gpu(readings, index, begin_s, seconds) for index in indexes)


def _gpu(readings: Sequence[Reading], index: int, begin_s: int, seconds: int) -> GpuPoint:
    seen = [gpu for one in readings for gpu in one.gpus or () if gpu.index == index]

    def each(take: Callable[[GpuNow], float | None]) -> list[float | None]:
        return [take(gpu) for gpu in seen]

    throttled = [gpu.is_throttled for gpu in seen if gpu.is_throttled is not None]
    return GpuPoint(
        begin_s=begin_s,
        seconds=seconds,
        index=index,
        n=len(seen),
        used_mib=_most(gpu.used_mib for gpu in seen),
        free_mib=_least(gpu.free_mib for gpu in seen),
        server_mib=_most(gpu.server_mib for gpu in seen),
        others_mib=_most(gpu.others_mib for gpu in seen),
        utilisation_percent=_mean(each(lambda gpu: gpu.utilisation_percent)),
        power_w=_mean(each(lambda gpu: gpu.power_w)),
        sm_clock_mhz=_mean(each(lambda gpu: gpu.sm_clock_mhz)),
        temperature_c=_mean(each(lambda gpu: gpu.temperature_c)),
        n_throttled=sum(throttled) if throttled else None,
    )


def _restarts(readings: Sequence[Reading]) -> int | None:
    """How often the manager started the server by itself; a start by hand sets its count to zero."""
    known = [one.engine.n_restarts for one in readings if one.engine.n_restarts is not None]
    if not known:
        return None
    return sum(max(0, late - early) for early, late in pairwise(known))


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_s(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 4) if known else None


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 1) if known else None
