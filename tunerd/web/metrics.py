"""`/metrics`: the newest reading as Prometheus reads it, in base units; what is unknown is left out.

Names and units follow Prometheus' own conventions. A counter is the server's or the service manager's
own, and begins anew with a life of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

from tunerd import __version__
from tunerd.watch.figures import UNKNOWN, Reading
from tunerd.words import BYTES_PER_MIB

# What stands behind a name: the plain format has it, the table below does not.
_ENDINGS = {"counter": "_total", "info": "_info", "gauge": ""}
_Samples = Iterable[tuple[Mapping[str, str], float | None]]
_Row = tuple[str, str, str, Callable[[Any], float | None]]


@dataclass(frozen=True, slots=True)
class _Collector:
    """What prometheus-client asks for its metrics."""

    reading: Reading | None

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield _family("info", "tunerd", "The tunerd that watches.", [({"version": __version__}, 1)])
        if self.reading is not None:
            yield from _families(self.reading)


def exposition(reading: Reading | None) -> bytes:
    """The text of `/metrics`; without a reading only who answers."""
    return generate_latest(_Collector(reading))


def _family(kind: str, name: str, text: str, samples: _Samples) -> Metric:
    family = Metric(name, text, kind)
    for labels, value in samples:
        if value is not None:
            family.add_sample(name + _ENDINGS[kind], dict(labels), value)
    return family


def _families(reading: Reading) -> Iterator[Metric]:
    unit = {"unit": reading.engine.unit}
    cards = {str(gpu.index): gpu for gpu in reading.gpus or ()}
    counters = reading.engine.counters
    measuring, version = float(reading.measuring is not None), reading.driver_version
    named = [
        ({"gpu": at, "name": gpu.name, "uuid": gpu.uuid or ""}, 1) for at, gpu in cards.items()
    ]
    held = [({"gpu": at, "reason": reason}, 1)
            for at, gpu in cards.items() for reason in gpu.throttle_reasons or ()]  # fmt: skip
    yield _family("gauge", "tunerd_measuring",
                  "Whether a measurement holds the server's place (1) or not (0).", [(unit, measuring)])  # fmt: skip
    yield _family("info", "tunerd_gpu_driver", "The GPU's driver.",
                  [({"version": version}, 1)] if version else [])  # fmt: skip
    yield _family("info", "tunerd_gpu", "A card by its index.", named)
    yield _family(
        "gauge", "tunerd_gpu_throttle_reason", "What throttles its clocks now, in words.", held
    )
    seen: tuple[tuple[str, Sequence[_Row], Sequence[tuple[Mapping[str, str], Any]]], ...] = (
        ("tunerd", _READING, [({}, reading)]),
        ("tunerd_server", _ENGINE, [(unit, reading.engine)]),
        ("tunerd_server", _COUNTERS, [(unit, counters)] if counters is not None else []),
        ("tunerd_gpu", _GPU, [({"gpu": at}, gpu) for at, gpu in cards.items()]),
    )
    for prefix, rows, ones in seen:
        for kind, name, text, take in rows:
            yield _family(kind, f"{prefix}_{name}", text, [(by, take(one)) for by, one in ones])


def _bytes(mib: float | None) -> float | None:
    return _scaled(mib, BYTES_PER_MIB)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _flag(value: bool | None) -> float | None:
    return None if value is None else float(value)


_READING: tuple[_Row, ...] = (
    ("gauge", "reading_timestamp_seconds", "When the newest look was taken.", lambda r: r.at_s),
    ("gauge", "gpus", "Cards that can be read.", lambda r: None if r.gpus is None else len(r.gpus)),
    ("gauge", "gpu_problem", "Whether a card or the driver cannot be read (1) or not (0).",
     lambda r: float(r.gpu_problem is not None)),
    ("gauge", "host_memory_total_bytes", "RAM that programs here may use.", lambda r: _bytes(r.host.total_mib)),
    ("gauge", "host_memory_available_bytes", "RAM that is available.", lambda r: _bytes(r.host.available_mib)),
    ("gauge", "host_swap_used_bytes", "Swap in use.", lambda r: _bytes(r.host.swap_used_mib)),
    ("gauge", "host_cpu_ratio", "Share of all cores in use between two looks.",
     lambda r: _scaled(r.host.cpu_percent, 0.01)),
)  # fmt: skip
_ENGINE: tuple[_Row, ...] = (
    ("gauge", "active", "Whether the unit's main process runs.",
     lambda e: None if e.active_state == UNKNOWN else float(e.is_active)),
    ("gauge", "ready", "Whether the server says that it serves.",
     lambda e: _flag(e.is_ready if e.is_expected else e.is_ready or None)),
    ("gauge", "start_time_seconds", "When this life of the server began.", lambda e: e.since_s),
    ("counter", "restarts", "Starts by the service manager on its own, since one by hand.", lambda e: e.n_restarts),
    ("gauge", "slots", "Requests that it can work on at once.", lambda e: e.slots_total),
    ("gauge", "slots_busy", "Requests that it works on.", lambda e: e.slots_busy),
    ("gauge", "resident_memory_bytes", "RAM of its main process.", lambda e: _bytes(e.rss_mib)),
    ("counter", "cpu_seconds", "Processor time of its main process.", lambda e: e.cpu_s),
)  # fmt: skip
_COUNTERS: tuple[_Row, ...] = (
    ("counter", "prompt_tokens", "Prompt tokens that were read, cached ones not among them.", lambda c: c.n_prompt),
    ("counter", "cached_tokens", "Prompt tokens that were already cached.", lambda c: c.n_cached),
    ("counter", "prompt_seconds", "Time spent on reading prompts, of all slots together.", lambda c: c.prompt_s),
    ("counter", "predicted_tokens", "Tokens generated.", lambda c: c.n_predicted),
    ("counter", "predicted_seconds", "Time spent on generating, of all slots together.", lambda c: c.predicted_s),
    ("counter", "drafted_tokens", "Tokens drafted.", lambda c: c.n_drafted),
    ("counter", "accepted_tokens", "Drafted tokens that were accepted.", lambda c: c.n_accepted),
    ("gauge", "requests_deferred", "Requests that wait for a slot.", lambda c: c.n_deferred),
)  # fmt: skip
_GPU: tuple[_Row, ...] = (
    ("gauge", "memory_total_bytes", "VRAM of the card.", lambda gpu: _bytes(gpu.total_mib)),
    ("gauge", "memory_used_bytes", "VRAM in use, the driver's reserve not counted.", lambda gpu: _bytes(gpu.used_mib)),
    ("gauge", "memory_free_bytes", "VRAM that is free.", lambda gpu: _bytes(gpu.free_mib)),
    ("gauge", "memory_server_bytes", "VRAM that the server holds.", lambda gpu: _bytes(gpu.server_mib)),
    ("gauge", "memory_others_bytes", "VRAM that others hold.", lambda gpu: _bytes(gpu.others_mib)),
    ("gauge", "utilization_ratio", "Share of the last sampling period in which it worked.",
     lambda gpu: _scaled(gpu.utilisation_percent, 0.01)),
    ("gauge", "power_watts", "Power that it draws.", lambda gpu: gpu.power_w),
    ("gauge", "power_limit_watts", "Power that its owner allows.", lambda gpu: gpu.power_limit_w),
    ("gauge", "sm_clock_hertz", "Clock of its cores.", lambda gpu: _scaled(gpu.sm_clock_mhz, 1e6)),
    ("gauge", "memory_clock_hertz", "Clock of its memory.", lambda gpu: _scaled(gpu.memory_clock_mhz, 1e6)),
    ("gauge", "temperature_celsius", "Temperature of its core.", lambda gpu: gpu.temperature_c),
    ("gauge", "throttled", "Whether heat or a power brake holds its clocks down; the owner's limit does not count.",
     lambda gpu: _flag(gpu.is_throttled)),
)  # fmt: skip
