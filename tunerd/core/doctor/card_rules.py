"""Rules about the cards themselves: whether they answer, are whole, and run at their clocks."""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.doctor import sources
from tunerd.core.doctor.diagnosis import Missing, Rule, Seen, need
from tunerd.core.doctor.facts import Facts
from tunerd.core.doctor.questions import cards_of
from tunerd.core.host import POWER_CAP
from tunerd.core.result import Level

_LOOK = (
    "`journalctl -k` has the driver's own words (NVRM, Xid); a lost card mostly needs the machine off "
    "and on, a driver that was updated a reboot"
)


def _unreadable(facts: Facts) -> Iterator[Seen | Missing]:
    problem = facts.host.gpu_problem
    if problem is None:
        cards_of(facts)
        return
    driver = need(facts.driver, f"the driver's files, and the GPUs ({problem})")
    if driver.pci_addresses is None and driver.module_version is None and not driver.is_wsl:
        yield Missing(f"whether there is a GPU at all ({problem})")
        return
    yield Seen(Level.ERROR, problem, _LOOK)


def _mig(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        if gpu.is_mig is None:
            yield Missing(f"whether GPU {gpu.index} is split by MIG")
        elif gpu.is_mig:
            yield Seen(
                Level.WARNING,
                f"GPU {gpu.index} is split by MIG, and what is told of its memory is of the whole card",
                f"make it whole: nvidia-smi -i {gpu.index} -mig 0; or size the profile by its part",
            )


def _throttled(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        if gpu.throttle_reasons is None:
            yield Missing(f"what holds the clocks of GPU {gpu.index} down")
            continue
        reasons = [reason for reason in gpu.throttle_reasons if reason != POWER_CAP]
        if reasons:
            heat = "" if gpu.temperature_c is None else f", at {gpu.temperature_c} °C"
            yield Seen(
                Level.WARNING,
                f"GPU {gpu.index}: its clocks are held down by {', '.join(reasons)}{heat}",
                "look at fans, dust and the air in the case, and at the cables of its power; "
                f"less power is less heat: nvidia-smi -i {gpu.index} -pl WATTS",
            )


RULES = (
    Rule(
        "gpu-unreadable",
        "a card or a driver that cannot be read",
        "what cannot be read cannot compute either: a server that loses its card ends, or falls back to RAM",
        f"{sources.NVML}, nvmlReturn_t",
        _unreadable,
    ),
    Rule(
        "gpu-mig",
        "a card that is split by MIG",
        "a program gets one part of it, so that memory that is free on the card may not be free to a server",
        f"{sources.NVML}, nvmlDeviceGetMigMode; NVIDIA Multi-Instance GPU User Guide",
        _mig,
    ),
    Rule(
        "gpu-throttled",
        "heat or a power brake that holds a card's clocks down",
        "the server is slower than it was measured to be, and so is whatever is measured now",
        f"{sources.NVML}, nvmlDeviceGetCurrentClocksEventReasons",
        _throttled,
    ),
)
