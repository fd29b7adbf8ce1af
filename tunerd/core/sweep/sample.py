"""What a night leaves behind, piece by piece: every start and every request, good or bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tunerd.core.sweep.arm import Arm, as_arm
from tunerd.core.sweep.protocol import Request
from tunerd.core.sweep.reading import Reading, read

BOOT = "boot"
REQUEST = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One start or one request.

    Attributes:
        event: "boot" or "request".
        process: Name of the server's life; a boot opens it.
        arm: What the process was started with.
        purpose: What it was for: warm-up, prefix, block, fill, tool, ...
        at_s: End of it on the box's clock [s].
        seconds: How long it took [s].
        failure: oom, hang, crash, refused, or empty.
        vram_free_mib: After a boot.
        request: What was asked; None of a boot.
        n_max: In force for this request.
        p_min: In force for this request.
        block: Name of the block of prompts that the request belongs to.
        answer: What the box returned.
        pair: Of a verdict: (challenge, pair), both from 1; None elsewhere.
        is_earlier: Of a sweep before this one, which spent an alpha of its own.
    """

    event: str
    process: str
    arm: Arm
    purpose: str
    at_s: float
    seconds: float
    failure: str = ""
    vram_free_mib: float | None = None
    request: Request | None = None
    n_max: int = 0
    p_min: float = 0.0
    block: str = ""
    answer: Mapping[str, Any] | None = None
    pair: tuple[int, int] | None = None
    is_earlier: bool = False

    @property
    def reading(self) -> Reading | None:
        """The answer with names and units."""
        return None if self.answer is None else read(self.answer)

    def to_json(self) -> dict[str, Any]:
        """JSON values only; `sample_from_json` takes them back."""
        return {name: plain(getattr(self, name)) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(Sample))


def sample_from_json(data: Mapping[str, Any]) -> Sample:
    """The sample that `to_json` wrote."""
    values = {name: data[name] for name in _NAMES if name in data}
    values["arm"] = arm_from_json(data["arm"])
    if data.get("request") is not None:
        values["request"] = Request(**data["request"])
    if data.get("pair") is not None:
        values["pair"] = tuple(data["pair"])
    return Sample(**values)


def arm_from_json(data: Mapping[str, Any]) -> Arm:
    """The arm that `plain` wrote."""
    extra = frozenset((key, _hashable(value)) for key, value in data["extra"])
    return Arm(**{**data, "kv": _hashable(data["kv"]), "extra": extra})


def _hashable(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def as_samples(history: Iterable[Any]) -> tuple[Sample, ...]:
    """Samples of our own class from what a caller kept: ours, their JSON, or the like."""
    return tuple(_as_sample(given) for given in history)


def _as_sample(given: Any) -> Sample:
    if isinstance(given, Mapping):
        return sample_from_json(given)
    values = {name: getattr(given, name) for name in _NAMES if hasattr(given, name)}
    values["arm"] = as_arm(values["arm"])
    request = values.get("request")
    if request is not None:
        values["request"] = Request(
            **{field.name: getattr(request, field.name) for field in fields(Request)}
        )
    return Sample(**values)


def plain(value: Any) -> Any:
    """JSON values of an arm, a request, numpy numbers and containers of them."""
    if isinstance(value, Arm):
        return {**asdict(value), "extra": sorted(([k, plain(v)] for k, v in value.extra), key=str)}
    if isinstance(value, Request):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
