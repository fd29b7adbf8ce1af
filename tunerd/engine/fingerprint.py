"""What evidence is valid for: engine, driver, GPU, model, arguments and workload, as one value.

Two measurements may be compared, and an old one may be believed, where their fingerprints agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunerd.records import plain
from tunerd.words import all_known, digest

SCHEMA = 1
_SHORT_DIGITS = 12
# The parts by the names that people read.
_PARTS: Mapping[str, str] = {
    "engine_sha256": "engine",
    "driver_version": "driver",
    "gpu_names": "GPU",
    "gpu_memory_mib": "VRAM of the card",
    "power_limits_w": "power limit",
    "cpu_model": "processor",
    "model_sha256": "model",
    "template_sha256": "chat template",
    "arguments_sha256": "arguments",
    "workload_sha256": "workload",
    "unit_limits": "limits of the unit",
    "tunerd_version": "tunerd",
}
# Memory depends on neither what is asked of the server nor how fast the card may run.
_MEMORY = ("engine_sha256", "driver_version", "gpu_names", "model_sha256", "arguments_sha256")
# Not kept by all versions: left out of the stable form where there is none.
_LATER = ("gpu_memory_mib", "unit_limits")
# Every server has these: where neither of two knows one, they need not be the same.
_ALWAYS = frozenset({"engine_sha256", "model_sha256"})
# Another tunerd is worth a remark, but measures what the same server does.
_REMARKS = frozenset({"tunerd_version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a measurement is valid for; a part that could not be told is None.

    `gpu_names` is empty where there is certainly no GPU; `power_limits_w` has one for each of them, and so has
    `gpu_memory_mib`, which evidence of before it was kept does not know.
    `model_sha256` covers every model file that the command names
    (`models_sha256`), `arguments_sha256` the arguments that matter. `template_sha256` is None where
    there is none, `workload_sha256` where the measurement was not of a workload. `unit_limits` are what drop-ins
    leave a unit's server of processors and memory; evidence of before they were kept does not know them.
    """

    engine_sha256: str | None = None
    driver_version: str | None = None
    gpu_names: tuple[str, ...] | None = None
    gpu_memory_mib: tuple[int | None, ...] | None = None
    power_limits_w: tuple[float | None, ...] | None = None
    cpu_model: str | None = None
    model_sha256: str | None = None
    template_sha256: str | None = None
    arguments_sha256: str | None = None
    workload_sha256: str | None = None
    unit_limits: tuple[str, ...] | None = None
    tunerd_version: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Its stable form: every key but those of before they were kept, with the number of this form."""
        found = {**plain(self, schema=SCHEMA), "power_limits_w": _watts(self.power_limits_w)}
        left_out = {name for name in _LATER if not getattr(self, name)}
        return {name: value for name, value in found.items() if name not in left_out}

    @property
    def of_server(self) -> Fingerprint:
        """That of the server alone, whatever it was asked and by which tunerd."""
        return replace(self, workload_sha256=None, tunerd_version=None)

    @property
    def sha256(self) -> str:
        """One hash over all parts; equal hashes are equal fingerprints."""
        return digest(self.to_json())

    @property
    def short(self) -> str:
        """The first twelve digits of the hash."""
        return self.sha256[:_SHORT_DIGITS]

    @property
    def memory_key(self) -> str | None:
        """One hash over what memory depends on; None where a part of that is not known.

        Without a GPU there is no driver either, and nothing is missing.
        """
        parts = {_PARTS[name]: getattr(self, name) for name in _MEMORY}
        if memory_mib := _value(self, "gpu_memory_mib"):
            parts[_PARTS["gpu_memory_mib"]] = memory_mib
        if self.gpu_names == ():
            parts[_PARTS["driver_version"]] = "none"
        return None if any(value is None for value in parts.values()) else digest(parts)


@dataclass(frozen=True, slots=True)
class Change:
    """One part in which two fingerprints differ.

    `is_known` is False where one of them could not tell the part, so that it may or may not have
    changed. `is_remark` marks a part that does not invalidate evidence.
    """

    text: str
    is_known: bool
    is_remark: bool


def changes(then: Fingerprint, now: Fingerprint) -> tuple[Change, ...]:
    """Every part in which two fingerprints differ."""
    found = []
    for name, part in _PARTS.items():
        before, after = _value(then, name), _value(now, name)
        if before == after and (before is not None or name not in _ALWAYS):
            continue
        if name == "unit_limits" and not (before or after):
            continue
        if name == "gpu_memory_mib" and not (before and after):
            continue  # a card is told by its name there
        old, new = _shown(name, before), _shown(name, after)
        is_known = before is not None and after is not None
        text = f"{part} changed: {old} -> {new}" if is_known else f"{part}: {old} then, {new} now"
        found.append(Change(text, is_known, name in _REMARKS))
    return tuple(found)


def holds(then: Fingerprint, now: Fingerprint) -> bool | None:
    """Whether evidence of then still counts now; None where it cannot be told."""
    found = [change for change in changes(then, now) if not change.is_remark]
    if any(change.is_known for change in found):
        return False
    return None if found else True


def holds_at(then: Fingerprint, now: Fingerprint) -> str | None:
    """The power limit at which evidence of then counts, in words, where nothing but that keeps it from it now."""
    limits = _value(then, "power_limits_w")
    if holds(then, now) or not holds(replace(now, power_limits_w=then.power_limits_w), then):
        return None
    return f"a power limit of {_shown('power_limits_w', limits)}" if limits else None


def on_same_cards(then: Fingerprint, now: Fingerprint) -> bool:
    """Whether both are of the same cards, by their names and, where both know it, their memory.

    In GiB: of the same card one driver counts more than another.
    """
    before, after = (_value(one, "gpu_memory_mib") or () for one in (then, now))
    sizes = [[round(mib / 1024) for mib in one] for one in (before, after) if one]
    return then.gpu_names == now.gpu_names and all(one == sizes[0] for one in sizes)


def models_sha256(identities: Sequence[str | None]) -> str | None:
    """One hash over all models that a command names, the main one first; None if any is unknown."""
    known = all_known(identities)
    return digest(known) if len(known) > 1 else next(iter(known), None)


def _value(fingerprint: Fingerprint, name: str) -> Any:
    """A part as it is compared: power limits and memory only where every one is known."""
    value = getattr(fingerprint, name)
    if name == "power_limits_w":
        value = _watts(value)
    return None if isinstance(value, list | tuple) and None in value else value


def _shown(name: str, value: Any) -> str:
    if not value:
        return "unknown" if value is None else "none"
    if name == "power_limits_w":
        return ", ".join(f"{watt:g} W" for watt in value)
    if name == "gpu_memory_mib":
        return ", ".join(f"{mib} MiB" for mib in value)
    if name in {"gpu_names", "unit_limits"}:
        return ", ".join(value)
    return str(value[:_SHORT_DIGITS] if name.endswith("sha256") else value)


def _watts(limits: Sequence[float | None] | None) -> list[float | None] | None:
    """Watts to one decimal: what a driver reports of a fixed limit moves in the third."""
    if limits is None:
        return None
    return [None if limit is None else round(float(limit), 1) for limit in limits]
