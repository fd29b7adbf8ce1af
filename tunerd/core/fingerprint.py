"""What evidence is valid for: engine, driver, GPU, model, arguments and workload, as one value.

Two measurements may be compared, and an old one may be believed, where their fingerprints agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tunerd.core.fingerprint_arguments import digest

SCHEMA = 1
_SHORT_DIGITS = 12


class FingerprintPart(StrEnum):
    """The parts of a fingerprint, by the names that people read."""

    ENGINE = "engine"
    DRIVER = "driver"
    GPU = "GPU"
    POWER_LIMIT = "power limit"
    CPU = "processor"
    MODEL = "model"
    TEMPLATE = "chat template"
    ARGUMENTS = "arguments"
    WORKLOAD = "workload"
    TUNERD = "tunerd"


# Memory depends on neither what is asked of the server nor how fast the card may run.
MEMORY_PARTS = frozenset(
    {
        FingerprintPart.ENGINE,
        FingerprintPart.DRIVER,
        FingerprintPart.GPU,
        FingerprintPart.MODEL,
        FingerprintPart.ARGUMENTS,
    }
)
# Another tunerd is worth a remark, but measures what the same server does.
_REMARKS = frozenset({FingerprintPart.TUNERD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a measurement is valid for; a part that could not be told is None.

    `gpu_names` is empty where there is certainly no GPU; `power_limits_w` has one for each of them.
    `model_sha256` covers every model file that the command names
    (`models_sha256`), `arguments_sha256` the arguments that matter. `template_sha256` is None where
    there is none, `workload_sha256` where the measurement was not of a workload.
    """

    engine_sha256: str | None = None
    driver_version: str | None = None
    gpu_names: tuple[str, ...] | None = None
    power_limits_w: tuple[float | None, ...] | None = None
    cpu_model: str | None = None
    model_sha256: str | None = None
    template_sha256: str | None = None
    arguments_sha256: str | None = None
    workload_sha256: str | None = None
    tunerd_version: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Its stable form: every key, in order, with the number of this form."""
        return {
            "schema": SCHEMA,
            "engine_sha256": self.engine_sha256,
            "driver_version": self.driver_version,
            "gpu_names": None if self.gpu_names is None else list(self.gpu_names),
            "power_limits_w": _watts(self.power_limits_w),
            "cpu_model": self.cpu_model,
            "model_sha256": self.model_sha256,
            "template_sha256": self.template_sha256,
            "arguments_sha256": self.arguments_sha256,
            "workload_sha256": self.workload_sha256,
            "tunerd_version": self.tunerd_version,
        }

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
        parts = {row.part: row.value(self) for row in _ROWS if row.part in MEMORY_PARTS}
        if not parts[FingerprintPart.GPU] and parts[FingerprintPart.GPU] is not None:
            parts[FingerprintPart.DRIVER] = "none"
        if any(value is None for value in parts.values()):
            return None
        return digest({str(part): value for part, value in sorted(parts.items())})


@dataclass(frozen=True, slots=True)
class Change:
    """One part in which two fingerprints differ.

    `is_known` is False where one of them could not tell the part, so that it may or may not have
    changed. `is_remark` marks a part that does not invalidate evidence.
    """

    part: FingerprintPart
    text: str
    is_known: bool

    @property
    def is_remark(self) -> bool:
        """Whether it is worth saying, and no more."""
        return self.part in _REMARKS


def changes(then: Fingerprint, now: Fingerprint) -> tuple[Change, ...]:
    """Every part in which two fingerprints differ."""
    found = []
    for row in _ROWS:
        before, after = row.value(then), row.value(now)
        if before == after:
            continue
        old, new = row.show(before), row.show(after)
        if after is None:
            text = f"{row.part} cannot be told now; it was {old}"
        elif before is None:
            text = f"{row.part} was not known; it is {new} now"
        else:
            text = f"{row.part} changed: {old} -> {new}"
        found.append(Change(row.part, text, before is not None and after is not None))
    return tuple(found)


def difference(then: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """The parts in which two fingerprints differ, in words; empty where they agree."""
    return tuple(change.text for change in changes(then, now))


def holds(then: Fingerprint, now: Fingerprint) -> bool | None:
    """Whether evidence of then still counts now; None where it cannot be told."""
    found = [change for change in changes(then, now) if not change.is_remark]
    if any(change.is_known for change in found):
        return False
    return None if found else True


def models_sha256(identities: Sequence[str | None]) -> str | None:
    """One hash over all models that a command names, the main one first; None if any is unknown."""
    known = [identity for identity in identities if identity is not None]
    if not known or len(known) < len(identities):
        return None
    return known[0] if len(known) == 1 else digest(known)


def fingerprint_from_json(data: Mapping[str, Any]) -> Fingerprint:
    """The inverse of `Fingerprint.to_json`; parts that an older tunerd did not know are None.

    Raises:
        ValueError: it is no fingerprint, or of a newer tunerd.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"fingerprint of an unknown form: {data.get('schema')!r}")
    names, watts = data.get("gpu_names"), data.get("power_limits_w")
    return Fingerprint(
        engine_sha256=_text(data, "engine_sha256"),
        driver_version=_text(data, "driver_version"),
        gpu_names=None if names is None else tuple(str(name) for name in names),
        power_limits_w=None
        if watts is None
        else tuple(None if watt is None else float(watt) for watt in watts),
        cpu_model=_text(data, "cpu_model"),
        model_sha256=_text(data, "model_sha256"),
        template_sha256=_text(data, "template_sha256"),
        arguments_sha256=_text(data, "arguments_sha256"),
        workload_sha256=_text(data, "workload_sha256"),
        tunerd_version=_text(data, "tunerd_version"),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """How one part is read, and shown to people."""

    part: FingerprintPart
    value: Callable[[Fingerprint], Any]
    show: Callable[[Any], str]


def _hash_text(value: str | None) -> str:
    return "none" if value is None else value[:_SHORT_DIGITS]


def _plain_text(value: str | None) -> str:
    return "none" if value is None else value


def _names_text(names: Sequence[str] | None) -> str:
    return ", ".join(names) if names else "none"


def _watts_text(watts: Sequence[float] | None) -> str:
    if not watts:
        return "none"
    return ", ".join(f"{watt:g} W" for watt in watts)


_ROWS: tuple[_Row, ...] = (
    _Row(FingerprintPart.ENGINE, lambda one: one.engine_sha256, _hash_text),
    _Row(FingerprintPart.DRIVER, lambda one: one.driver_version, _plain_text),
    _Row(FingerprintPart.GPU, lambda one: one.gpu_names, _names_text),
    _Row(FingerprintPart.POWER_LIMIT, lambda one: _known_watts(one.power_limits_w), _watts_text),
    _Row(FingerprintPart.CPU, lambda one: one.cpu_model, _plain_text),
    _Row(FingerprintPart.MODEL, lambda one: one.model_sha256, _hash_text),
    _Row(FingerprintPart.TEMPLATE, lambda one: one.template_sha256, _hash_text),
    _Row(FingerprintPart.ARGUMENTS, lambda one: one.arguments_sha256, _hash_text),
    _Row(FingerprintPart.WORKLOAD, lambda one: one.workload_sha256, _hash_text),
    _Row(FingerprintPart.TUNERD, lambda one: one.tunerd_version, _plain_text),
)


def _known_watts(limits: Sequence[float | None] | None) -> list[float | None] | None:
    """The limits where every one is known."""
    watts = _watts(limits)
    return None if watts is None or any(watt is None for watt in watts) else watts


def _watts(limits: Sequence[float | None] | None) -> list[float | None] | None:
    """Watts to one decimal: what a driver reports of a fixed limit moves in the third."""
    if limits is None:
        return None
    return [None if limit is None else round(float(limit), 1) for limit in limits]


def _text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"not a text: {key}")
    return value
