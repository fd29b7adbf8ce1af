"""`/metrics`: the newest reading as Prometheus reads it, in base units; what is unknown is left out.

Names and units follow Prometheus' own conventions. A counter is the server's or the service manager's
own, and begins anew with a life of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric

from tunerd import __version__
from tunerd.watch.figures import UNKNOWN, GpuNow, Reading
from tunerd.words import BYTES_PER_MIB

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_MHZ = 1e6
_GpuRow = tuple[str, str, Callable[[GpuNow], float | None]]


@dataclass(frozen=True, slots=True)
class _Collector:
    """What prometheus-client asks for its metrics."""

    reading: Reading | None

    def collect(self) -> Iterator[Metric]:
        """All families."""
        info = InfoMetricFamily("tunerd", "The tunerd that watches.")
        info.add_metric([], {"version": __version__})
        yield info
        if self.reading is None:
            return
        yield from _server(self.reading)
        yield from _tokens(self.reading)
        yield from _cards(self.reading)
        yield from _host(self.reading)


def exposition(reading: Reading | None) -> bytes:
    """The text of `/metrics`; without a reading only who answers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(reading))
    return generate_latest(registry)


def _server(reading: Reading) -> Iterator[Metric]:
    engine = reading.engine
    unit = {"unit": engine.unit}
    yield _gauge(
        "tunerd_reading_timestamp_seconds", "When the newest look was taken.", {}, reading.at_s
    )
    yield _gauge("tunerd_measuring", "Whether a measurement holds the server's place (1) or not (0).",
                 unit, float(reading.measuring is not None))  # fmt: skip
    yield _gauge(
        "tunerd_server_active",
        "Whether the unit's main process runs.",
        unit,
        None if engine.active_state == UNKNOWN else float(engine.is_active),
    )
    yield _gauge(
        "tunerd_server_ready",
        "Whether the server says that it serves.",
        unit,
        _flag(engine.is_ready if engine.is_expected else engine.is_ready or None),
    )
    yield _gauge(
        "tunerd_server_start_time_seconds",
        "When this life of the server began.",
        unit,
        engine.since_s,
    )
    yield _counter("tunerd_server_restarts", "Starts by the service manager on its own, since one by hand.",
                   unit, engine.n_restarts)  # fmt: skip
    yield _gauge(
        "tunerd_server_slots", "Requests that it can work on at once.", unit, engine.slots_total
    )
    yield _gauge("tunerd_server_slots_busy", "Requests that it works on.", unit, engine.slots_busy)
    yield _gauge(
        "tunerd_server_resident_memory_bytes",
        "RAM of its main process.",
        unit,
        _bytes(engine.rss_mib),
    )
    yield _counter(
        "tunerd_server_cpu_seconds", "Processor time of its main process.", unit, engine.cpu_s
    )


def _tokens(reading: Reading) -> Iterator[Metric]:
    engine = reading.engine
    counters = engine.counters
    if counters is None:
        return
    unit = {"unit": engine.unit}
    rows = (
        (
            "prompt_tokens",
            "Prompt tokens that were read, cached ones not among them.",
            counters.n_prompt,
        ),
        ("cached_tokens", "Prompt tokens that were there already.", counters.n_cached),
        (
            "prompt_seconds",
            "Time spent on reading prompts, of all slots together.",
            counters.prompt_s,
        ),
        ("predicted_tokens", "Tokens generated.", counters.n_predicted),
        (
            "predicted_seconds",
            "Time spent on generating, of all slots together.",
            counters.predicted_s,
        ),
        ("drafted_tokens", "Tokens drafted.", counters.n_drafted),
        ("accepted_tokens", "Drafted tokens that were right.", counters.n_accepted),
    )
    for name, text, value in rows:
        yield _counter(f"tunerd_server_{name}", text, unit, value)
    yield _gauge(
        "tunerd_server_requests_deferred",
        "Requests that wait for a slot.",
        unit,
        counters.n_deferred,
    )


_GPU_ROWS: tuple[_GpuRow, ...] = (
    ("memory_total_bytes", "VRAM of the card.", lambda gpu: _bytes(gpu.total_mib)),
    ("memory_used_bytes", "VRAM in use, the driver's reserve not counted.", lambda gpu: _bytes(gpu.used_mib)),
    ("memory_free_bytes", "VRAM that is free.", lambda gpu: _bytes(gpu.free_mib)),
    ("memory_server_bytes", "VRAM that the server holds.", lambda gpu: _bytes(gpu.server_mib)),
    ("memory_others_bytes", "VRAM that others hold.", lambda gpu: _bytes(gpu.others_mib)),
    ("utilization_ratio", "Share of the last sampling period in which it worked.",
     lambda gpu: _scaled(gpu.utilisation_percent, 0.01)),
    ("power_watts", "Power that it draws.", lambda gpu: gpu.power_w),
    ("power_limit_watts", "Power that its owner allows.", lambda gpu: gpu.power_limit_w),
    ("sm_clock_hertz", "Clock of its cores.", lambda gpu: _scaled(gpu.sm_clock_mhz, _MHZ)),
    ("memory_clock_hertz", "Clock of its memory.", lambda gpu: _scaled(gpu.memory_clock_mhz, _MHZ)),
    ("temperature_celsius", "Temperature of its core.", lambda gpu: gpu.temperature_c),
    ("throttled", "Whether heat or a power brake holds its clocks down; the owner's limit does not count.",
     lambda gpu: _flag(gpu.is_throttled)),
)  # fmt: skip


def _cards(reading: Reading) -> Iterator[Metric]:
    driver = InfoMetricFamily("tunerd_gpu_driver", "The GPU's driver.")
    if reading.driver_version is not None:
        driver.add_metric([], {"version": reading.driver_version})
    yield driver
    yield _gauge("tunerd_gpus", "Cards that can be read.", {},
                 None if reading.gpus is None else len(reading.gpus))  # fmt: skip
    yield _gauge("tunerd_gpu_problem", "Whether a card or the driver cannot be read (1) or not (0).", {},
                 float(reading.gpu_problem is not None))  # fmt: skip
    cards = reading.gpus or ()
    info = InfoMetricFamily("tunerd_gpu", "A card by its index.", labels=["gpu"])
    for gpu in cards:
        info.add_metric([str(gpu.index)], {"name": gpu.name, "uuid": gpu.uuid or ""})
    yield info
    for name, text, take in _GPU_ROWS:
        family = GaugeMetricFamily(f"tunerd_gpu_{name}", text, labels=["gpu"])
        for gpu in cards:
            value = take(gpu)
            if value is not None:
                family.add_metric([str(gpu.index)], value)
        yield family
    held = GaugeMetricFamily("tunerd_gpu_throttle_reason", "What holds its clocks down now, in words.",
                             labels=["gpu", "reason"])  # fmt: skip
    for gpu in cards:
        for reason in gpu.throttle_reasons or ():
            held.add_metric([str(gpu.index), reason], 1.0)
    yield held


def _host(reading: Reading) -> Iterable[Metric]:
    host = reading.host
    return (
        _gauge("tunerd_host_memory_total_bytes", "RAM that programs here may use.", {}, _bytes(host.total_mib)),
        _gauge("tunerd_host_memory_available_bytes", "RAM that is available.", {}, _bytes(host.available_mib)),
        _gauge("tunerd_host_swap_used_bytes", "Swap in use.", {}, _bytes(host.swap_used_mib)),
        _gauge("tunerd_host_cpu_ratio", "Share of all cores in use between two looks.", {},
               _scaled(host.cpu_percent, 0.01)),
    )  # fmt: skip


def _gauge(name: str, text: str, labels: dict[str, str], value: float | None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    if value is not None:
        family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float | None) -> Metric:
    """The library writes `_total` behind its name."""
    family = CounterMetricFamily(name, text, labels=list(labels))
    if value is not None:
        family.add_metric(list(labels.values()), value)
    return family


def _bytes(mib: float | None) -> float | None:
    return _scaled(mib, BYTES_PER_MIB)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _flag(value: bool | None) -> float | None:
    return None if value is None else float(value)
