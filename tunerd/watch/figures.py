"""Readings of what is watched, and what they come to over time. `None` is not known, and is never zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from tunerd.engine.health import HttpState
from tunerd.machine.facts import Gpu, HostMemory
from tunerd.measure.answer import Counters, step_of
from tunerd.words import all_known, ratio

# Of a unit of which the service manager says nothing.
UNKNOWN = "unknown"
# What a ratio is made of is counted over the same time.
_TOGETHER = (
    ("n_prompt", "prompt_s", "n_cached"),
    ("n_predicted", "predicted_s", "n_drafted", "n_accepted"),
)
_LEAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class GpuNow(Gpu):
    """One GPU at one moment, with what the watched server holds of it told apart.

    `server_mib` is what the server holds of its memory, `others_mib` what everybody else does, what no
    process accounts for included. With `is_mig` the card is split, and its figures are of the whole.
    """

    server_mib: int | None = None
    others_mib: int | None = None

    @property
    def is_throttled(self) -> bool | None:
        """Whether something other than the owner's power limit holds its clocks down."""
        return None if self.throttle_reasons is None else bool(self.held_back_by)


@dataclass(frozen=True, slots=True)
class HostNow(HostMemory):
    """The machine at one moment; `cpu_percent` is of all cores together since the look before."""

    cpu_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What the server did between two looks, by its own counters.

    Speeds are tokens over the time that the server spent on them, so idleness is in none of them;
    they are None where nothing was done. Where its counters are coarse, figures are None in some looks
    and of all these together in a later one. `n_cached` are prompt tokens that were there already.
    """

    seconds: float
    n_prompt: int | None
    prompt_s: float | None
    n_cached: int | None
    n_predicted: int | None
    predicted_s: float | None
    n_drafted: int | None
    n_accepted: int | None

    @property
    def decode_tok_s(self) -> float | None:
        """Generated tokens a second of generation, of all slots together."""
        return ratio(self.n_predicted, self.predicted_s)

    @property
    def prompt_tok_s(self) -> float | None:
        """Prompt tokens a second of reading them; cached ones are not in it."""
        return ratio(self.n_prompt, self.prompt_s)

    @property
    def acceptance_ratio(self) -> float | None:
        """Share of the drafted tokens that were right."""
        return ratio(self.n_accepted, self.n_drafted)

    @property
    def reused_ratio(self) -> float | None:
        """Share of the prompt tokens that did not have to be read again."""
        if self.n_cached is None or self.n_prompt is None:
            return None
        return ratio(self.n_cached, self.n_cached + self.n_prompt)

    def rates(self) -> dict[str, float | None]:
        """All of these by their names."""
        names = ("decode_tok_s", "prompt_tok_s", "acceptance_ratio", "reused_ratio")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Answers:
    """What the server itself said; None where it was not asked, or does not say.

    `health` is None while the unit is not active, or where nobody knows the address. `served` is None
    where it counts nothing, was not asked this time, or began anew since the look before. `is_asleep` is
    None for one that keeps its model whatever happens; of one that sleeps the counters are those of before.
    """

    health: HttpState | None = None
    slots_total: int | None = None
    slots_busy: int | None = None
    counters: Counters | None = None
    served: Served | None = None
    is_asleep: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNow(Answers):
    """The deployed unit and its server at one moment.

    `life` names this run of the process, `n_restarts` counts how often the manager started it by
    itself. `cpu_s` is the processor time that the process has used since it began. `is_expected` is False
    where nothing was deployed, and nothing is started at boot. `anonymous_mib` is its memory without
    mapped files.
    """

    unit: str
    active_state: str = UNKNOWN
    sub_state: str = UNKNOWN
    result: str = UNKNOWN
    n_restarts: int | None = None
    life: str | None = None
    since_s: float | None = None
    pid: int | None = None
    rss_mib: int | None = None
    cpu_s: float | None = None
    is_expected: bool = True
    anonymous_mib: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether its main process runs."""
        return self.active_state == "active"

    @property
    def is_ready(self) -> bool | None:
        """Whether it says that it serves; None where it, or the service manager, could not be asked."""
        if not self.is_active:
            return None if self.active_state == UNKNOWN else False
        return None if self.health is None else self.health is HttpState.READY

    @property
    def is_stopped_by_hand(self) -> bool:
        """Whether somebody stopped it or is doing so; `timeout` is how a stop ends that was not obeyed."""
        ended = (self.active_state, self.result)
        return self.active_state == "deactivating" or ended in {
            ("inactive", "success"), ("failed", "timeout"),
        }  # fmt: skip

    @property
    def is_busy(self) -> bool | None:
        """Whether it works on requests; by slots, else by its counters."""
        if self.slots_busy is not None:
            return self.slots_busy > 0
        return None if self.counters is None else self.counters.n_at_work > 0

    @property
    def n_at_work(self) -> int:
        """Requests under way; two where it does not tell, for nothing is known then."""
        n, counters = self.slots_busy, self.counters
        if n is None and counters is not None:
            n = counters.n_processing
        waiting = (counters.n_deferred or 0) if counters is not None else 0
        return 2 if n is None else n + waiting


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything at one moment; `at_s` is wall-clock seconds since the epoch.

    `gpus` is None where it could not be told whether there are any (`gpu_problem` says why), and empty
    where there are none. `measuring` is the purpose of a measurement that holds production's place,
    `awaits_reboot` whether a server that starts now finds no card.
    """

    at_s: float
    gpus: tuple[GpuNow, ...] | None
    gpu_problem: str | None
    driver_version: str | None
    host: HostNow
    engine: EngineNow
    measuring: str | None = None
    awaits_reboot: bool = False

    @property
    def _cards(self) -> tuple[GpuNow, ...]:
        """Those that the server is seen on, else all."""
        used = tuple(gpu for gpu in self.gpus or () if gpu.server_mib)
        return used or self.gpus or ()

    @property
    def free_mib(self) -> int | None:
        """VRAM that is free on the fullest of its cards; None without cards, or where one does not tell."""
        return min(all_known(gpu.free_mib for gpu in self._cards), default=None)

    @property
    def others_mib(self) -> int | None:
        """VRAM that others than the server hold, on all cards; None where one does not tell."""
        known = all_known(gpu.others_mib for gpu in self.gpus or ())
        return sum(known) if known else None

    @property
    def is_throttled(self) -> bool | None:
        """Whether any of its cards is held down by heat or power brakes."""
        known = [gpu.is_throttled for gpu in self._cards]
        if True in known:
            return True
        return None if not known or None in known else False

    def to_json(self) -> dict[str, Any]:
        """JSON values, under the names of the fields; what is derived stands beside it."""
        data = asdict(self)
        served = self.engine.served
        data["engine"]["health"] = None if self.engine.health is None else str(self.engine.health)
        data["engine"]["is_ready"] = self.engine.is_ready
        data["engine"]["is_busy"] = self.engine.is_busy
        if served is not None:
            data["engine"]["served"] |= served.rates()
        return data


def gpu_now(gpu: Gpu, server_pids: Sequence[int]) -> GpuNow:
    """A card with what the server holds of it told apart.

    Args:
        gpu: As NVML tells it.
        server_pids: The server's processes; empty while it is down.
    """
    server_mib = _server_mib(gpu, server_pids)
    known = gpu.used_mib is not None and server_mib is not None
    return GpuNow(
        **values_of(gpu),
        server_mib=server_mib,
        others_mib=max(0, (gpu.used_mib or 0) - (server_mib or 0)) if known else None,
    )


def values_of(record: Any) -> dict[str, Any]:
    """The fields of a record, for one that is made of it and says more."""
    return {one.name: getattr(record, one.name) for one in fields(record)}


def _server_mib(gpu: Gpu, pids: Sequence[int]) -> int | None:
    if gpu.processes is None:
        return None
    mine = [process.used_mib for process in gpu.processes if process.pid in pids]
    return None if None in mine else sum(mib for mib in mine if mib is not None)


def served_between(
    before: Counters, after: Counters, seconds: float
) -> tuple[Served | None, Counters]:
    """What happened between two looks at one server's counters; None where one went back.

    A llama-server writes six digits, so that beyond a million tokens a counter grows in steps. What has
    grown by less than fifty of them is not known yet: the counters that are returned beside it are
    those to hold the next look against, in which that is counted from where it was known last.

    Args:
        before: What the look before returned.
        after: As they are now.
        seconds: Between the looks.
    """
    known: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for names in _TOGETHER:
        grown = {name: _grown(getattr(before, name), getattr(after, name)) for name in names}
        if any(value is not None and value < 0 for value in grown.values()):
            return None, after
        # However few are accepted, that is told well enough beside what was drafted.
        beside = {**grown, "n_accepted": grown.get("n_drafted")}
        if all(_is_sharp(beside[name], getattr(after, name)) for name in names):
            known |= grown
        else:
            known |= dict.fromkeys(names)
            held |= {name: getattr(before, name) for name in names}
    return Served(seconds, **known), replace(after, **held)


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _is_sharp(grown: float | None, value: float | None) -> bool:
    """Whether a counter's growth is more than its steps make of it."""
    return not grown or value is None or grown >= _LEAST_STEPS * step_of(value)


def next_look_s(last_s: float, *, idle_s: float, busy_s: float, is_busy: bool | None) -> float:
    """How long to wait until the next look; twice as long as last time while the server stays busy.

    Args:
        last_s: The wait before this look.
        idle_s: The wait while it rests.
        busy_s: The longest wait while it works on requests.
        is_busy: What this look saw; None counts as idle, for then nothing was asked of it.
    """
    if not is_busy:
        return idle_s
    return min(max(2 * last_s, idle_s), max(busy_s, idle_s))


MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Point(Served):
    """What a stretch came to, beside the cards; what was served in it is what the server counted.

    `n` readings were taken, `n_active` saw the unit active, `n_ready` saw it serve, `n_busy` saw it
    work, and `n_measuring` saw a measurement in its place. Figures of memory are the worst that was seen.
    """

    seconds: int
    begin_s: int
    n: int
    n_active: int
    n_ready: int
    n_busy: int
    n_measuring: int
    restarts: int | None = None
    rss_mib: int | None = None
    available_mib: int | None = None
    swap_used_mib: int | None = None
    cpu_percent: float | None = None


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


# How figures of several readings, or rows, become one; what is not named is summed.
FOLD = {"rss_mib": "max", "available_mib": "min", "swap_used_mib": "max", "cpu_percent": "avg",
        "used_mib": "max", "free_mib": "min", "server_mib": "max", "others_mib": "max",
        "utilisation_percent": "avg", "power_w": "avg", "sm_clock_mhz": "avg",
        "temperature_c": "avg"}  # fmt: skip
_RULES: Mapping[str, Callable[[list[float]], float]] = {
    "sum": lambda known: round(sum(known), 4),
    "max": max,
    "min": min,
    "avg": lambda known: round(fmean(known), 1),
}
_SERVED = tuple(name for names in _TOGETHER for name in names)
_HOST = ("available_mib", "swap_used_mib", "cpu_percent")
_CARD = ("used_mib", "free_mib", "server_mib", "others_mib", "utilisation_percent", "power_w",
         "sm_clock_mhz", "temperature_c")  # fmt: skip


def summarise(
    readings: Sequence[Reading], *, begin_s: int, seconds: int, before: Reading | None = None
) -> tuple[Point, tuple[GpuPoint, ...]]:
    """One row of readings.

    Args:
        readings: At least one, oldest first.
        begin_s: When the stretch began [s since the epoch].
        seconds: How long it is; 0 for a single look.
        before: The last reading of the stretch before, to tell restarts between them.
    """
    engines = [one.engine for one in readings]
    served = [one.served for one in engines if one.served is not None]
    point = Point(
        begin_s=begin_s,
        seconds=seconds,
        n=len(readings),
        n_active=sum(one.is_active for one in engines),
        n_ready=sum(one.is_ready is True for one in engines),
        n_busy=sum(one.is_busy is True for one in engines),
        n_measuring=sum(one.measuring is not None for one in readings),
        restarts=_restarts(readings if before is None else (before, *readings)),
        **_folded(served, _SERVED),
        **_folded(engines, ("rss_mib",)),
        **_folded([one.host for one in readings], _HOST),
    )
    indexes = sorted({gpu.index for one in readings for gpu in one.gpus or ()})
    return point, tuple(_gpu(readings, index, begin_s, seconds) for index in indexes)


def _gpu(readings: Sequence[Reading], index: int, begin_s: int, seconds: int) -> GpuPoint:
    seen = [gpu for one in readings for gpu in one.gpus or () if gpu.index == index]
    throttled = [gpu.is_throttled for gpu in seen if gpu.is_throttled is not None]
    return GpuPoint(
        begin_s=begin_s, seconds=seconds, index=index, n=len(seen), **_folded(seen, _CARD),
        n_throttled=sum(throttled) if throttled else None,
    )  # fmt: skip


def _folded(seen: Sequence[object], names: Iterable[str]) -> dict[str, Any]:
    """Figures of several readings as one, each by its rule; None where no reading has any."""
    found: dict[str, Any] = {}
    for name in names:
        known = [value for one in seen if (value := getattr(one, name)) is not None]
        found[name] = _RULES[FOLD.get(name, "sum")](known) if known else None
    return found


def _restarts(readings: Sequence[Reading]) -> int | None:
    """How often the manager started the server by itself; a start by hand sets its count to zero."""
    known = [one.engine.n_restarts for one in readings if one.engine.n_restarts is not None]
    if not known:
        return None
    return sum(restarts_between(early, late) for early, late in pairwise(known))


def restarts_between(early: int, late: int) -> int:
    """What a manager's count of its starts has grown by; below what it was it began anew."""
    return late - early if late >= early else late
