"""One look at everything that is watched. `None` is not known, and is never zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tunerd.core.bench.counters import Counters
from tunerd.core.health import HttpState
from tunerd.core.host import POWER_CAP, Gpu, GpuProcess

# Of a unit of which the service manager says nothing.
UNKNOWN = "unknown"
_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class GpuNow:
    """One GPU at one moment.

    `server_mib` is what the watched server holds of its memory, `others_mib` what everybody else does,
    what no process accounts for included. `utilisation_percent` is the share of the driver's last
    sampling period in which it worked. `throttle_reasons` say what holds its clocks down; empty where
    nothing does. With `is_mig` the card is split, and its figures are of the whole.
    """

    index: int
    name: str
    uuid: str | None
    total_mib: int | None
    used_mib: int | None
    free_mib: int | None
    server_mib: int | None
    others_mib: int | None
    utilisation_percent: float | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...] | None
    processes: tuple[GpuProcess, ...] | None
    is_mig: bool | None = None

    @property
    def is_throttled(self) -> bool | None:
        """Whether something other than the owner's power limit holds its clocks down."""
        if self.throttle_reasons is None:
            return None
        return any(reason != POWER_CAP for reason in self.throttle_reasons)


@dataclass(frozen=True, slots=True)
class HostNow:
    """The machine at one moment; `cpu_percent` is of all cores together since the look before."""

    total_mib: int | None
    available_mib: int | None
    swap_total_mib: int | None
    swap_used_mib: int | None
    cpu_percent: float | None


@dataclass(frozen=True, slots=True)
class Served:
    """What the server did between two looks, by its own counters.

    Speeds are tokens over the time that the server spent on them, so idleness is in none of them;
    they are None where nothing was done. `n_cached` are prompt tokens that were there already.
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
        return _ratio(self.n_predicted, self.predicted_s)

    @property
    def prompt_tok_s(self) -> float | None:
        """Prompt tokens a second of reading them; cached ones are not in it."""
        return _ratio(self.n_prompt, self.prompt_s)

    @property
    def acceptance_ratio(self) -> float | None:
        """Share of the drafted tokens that were right."""
        return _ratio(self.n_accepted, self.n_drafted)

    @property
    def reused_ratio(self) -> float | None:
        """Share of the prompt tokens that did not have to be read again."""
        if self.n_cached is None or self.n_prompt is None:
            return None
        return _ratio(self.n_cached, self.n_cached + self.n_prompt)


@dataclass(frozen=True, slots=True)
class EngineNow:
    """The deployed unit and its server at one moment.

    `life` names this run of the process, `n_restarts` counts how often the manager started it by
    itself. `health` is None while the unit is not active, or where nobody knows the address. `cpu_s`
    is the processor time that the process has used since it began. `served` is None where it counts
    nothing, was not asked this time, or began anew since the look before.
    """

    unit: str
    active_state: str
    sub_state: str
    result: str
    n_restarts: int | None
    life: str | None
    since_s: float | None
    pid: int | None
    health: HttpState | None
    slots_total: int | None
    slots_busy: int | None
    counters: Counters | None
    served: Served | None
    rss_mib: int | None
    cpu_s: float | None

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
    def is_busy(self) -> bool | None:
        """Whether it works on requests; by slots, else by its counters."""
        if self.slots_busy is not None:
            return self.slots_busy > 0
        return None if self.counters is None else self.counters.n_at_work > 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything at one moment; `at_s` is wall-clock seconds since the epoch.

    `gpus` is None where it could not be told whether there are any (`gpu_problem` says why), and empty
    where there are none. `measuring` is the purpose of a measurement that holds production's place.
    """

    at_s: float
    gpus: tuple[GpuNow, ...] | None
    gpu_problem: str | None
    driver_version: str | None
    host: HostNow
    engine: EngineNow
    measuring: str | None = None

    @property
    def free_mib(self) -> int | None:
        """VRAM that is free on the fullest card; None without cards, or where one does not tell."""
        known = [gpu.free_mib for gpu in self.gpus or ()]
        if not known or None in known:
            return None
        return min(mib for mib in known if mib is not None)

    @property
    def others_mib(self) -> int | None:
        """VRAM that others than the server hold, on all cards; None where one does not tell."""
        known = [gpu.others_mib for gpu in self.gpus or ()]
        if not known or None in known:
            return None
        return sum(mib for mib in known if mib is not None)

    @property
    def is_throttled(self) -> bool | None:
        """Whether any card is held down by heat or power brakes."""
        known = [gpu.is_throttled for gpu in self.gpus or ()]
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
            data["engine"]["served"] |= {
                "decode_tok_s": served.decode_tok_s,
                "prompt_tok_s": served.prompt_tok_s,
                "acceptance_ratio": served.acceptance_ratio,
                "reused_ratio": served.reused_ratio,
            }
        return data

    def to_brief_json(self) -> dict[str, Any]:
        """What a line over time needs of it: some of the same keys, in a tenth of the room."""
        served = self.engine.served
        return {
            "at_s": self.at_s,
            "gpus": None if self.gpus is None else [
                {"index": gpu.index, "used_mib": gpu.used_mib, "others_mib": gpu.others_mib}
                for gpu in self.gpus
            ],
            "engine": {
                "is_ready": self.engine.is_ready,
                "served": None if served is None else {
                    "decode_tok_s": served.decode_tok_s,
                    "acceptance_ratio": served.acceptance_ratio,
                },
            },
        }  # fmt: skip


def gpu_now(gpu: Gpu, server_pids: Sequence[int]) -> GpuNow:
    """A card with what the server holds of it told apart.

    Args:
        gpu: As NVML tells it.
        server_pids: The server's processes; empty while it is down.
    """
    server_mib = _server_mib(gpu, server_pids)
    known = gpu.used_mib is not None and server_mib is not None
    return GpuNow(
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        total_mib=gpu.total_mib,
        used_mib=gpu.used_mib,
        free_mib=gpu.free_mib,
        server_mib=server_mib,
        others_mib=max(0, (gpu.used_mib or 0) - (server_mib or 0)) if known else None,
        utilisation_percent=gpu.utilisation_percent,
        power_w=gpu.power_w,
        power_limit_w=gpu.power_limit_w,
        sm_clock_mhz=gpu.sm_clock_mhz,
        memory_clock_mhz=gpu.memory_clock_mhz,
        temperature_c=gpu.temperature_c,
        throttle_reasons=gpu.throttle_reasons,
        processes=gpu.processes,
        is_mig=gpu.is_mig,
    )


def _server_mib(gpu: Gpu, pids: Sequence[int]) -> int | None:
    if gpu.processes is None:
        return None
    mine = [process.used_mib for process in gpu.processes if process.pid in pids]
    return None if None in mine else sum(mib for mib in mine if mib is not None)


def served_between(before: Counters, after: Counters, seconds: float) -> Served | None:
    """What happened between two looks at one server's counters; None where one went back.

    Args:
        before: At the earlier look.
        after: At the later one.
        seconds: Between them.
    """
    found = Served(
        seconds=seconds,
        n_prompt=_grown(before.n_prompt, after.n_prompt),
        prompt_s=_grown(before.prompt_s, after.prompt_s),
        n_cached=_grown(before.n_cached, after.n_cached),
        n_predicted=_grown(before.n_predicted, after.n_predicted),
        predicted_s=_grown(before.predicted_s, after.predicted_s),
        n_drafted=_grown(before.n_drafted, after.n_drafted),
        n_accepted=_grown(before.n_accepted, after.n_accepted),
    )
    grown = (found.n_prompt, found.prompt_s, found.n_predicted, found.predicted_s, found.n_drafted)
    return None if any(value is not None and value < 0 for value in grown) else found


def _grown(before: _T | None, after: _T | None) -> _T | None:
    return None if before is None or after is None else after - before


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
