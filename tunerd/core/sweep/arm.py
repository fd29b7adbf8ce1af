"""An arm: one configuration of the server that a sweep may try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

OFF = "off"
DRAFT = "draft"
EXPERTS = "memory.n_cpu_moe"
LAYERS = "memory.n_gpu_layers"
DRAFT_MODEL = "speculation.draft_model"
# Where a model lies, in a profile's words. Like who drafts, this changes speed and memory, not the text.
PLACEMENT_KEYS = frozenset(
    {LAYERS, EXPERTS, "memory.cpu_moe", "memory.n_cpu_ffn", "memory.override_tensor"}
)
LEFT_TO_FIT = "default"
SAME_TEXT_KEYS = PLACEMENT_KEYS | {DRAFT_MODEL}

Extra = frozenset[tuple[str, Any]]


class ArmLike(Protocol):
    """Anything with the attributes of an arm; a box or a caller may have a class of its own."""

    @property
    def engine(self) -> str:
        """Name of an installed build."""
        ...

    @property
    def spec(self) -> str:
        """Kind of speculation."""
        ...

    @property
    def n_max(self) -> int:
        """Tokens drafted at most."""
        ...

    @property
    def p_min(self) -> float:
        """Confidence below which drafting stops."""
        ...

    @property
    def fit_mib(self) -> int:
        """Margin of VRAM left free [MiB]."""
        ...

    @property
    def kv(self) -> str:
        """Type of K and V cache."""
        ...

    @property
    def ubatch(self) -> int:
        """Tokens of one physical batch."""
        ...

    @property
    def batch(self) -> int:
        """Tokens of one logical batch."""
        ...

    @property
    def threads(self) -> int:
        """Threads of generation."""
        ...

    @property
    def extra(self) -> Iterable[tuple[str, Any]]:
        """Pairs of other profile keys."""
        ...


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration.

    Attributes:
        engine: Name of an installed build.
        spec: Kind of speculation: off, mtp, dflash, eagle3, ngram or draft.
        n_max: Tokens drafted at most; means nothing where spec is off.
        p_min: Confidence below which drafting stops, 0 to 1; means nothing where spec is off.
        fit_mib: Margin of VRAM that the engine's fit leaves free [MiB].
        kv: Type of K and V cache, the draft's too.
        ubatch: Tokens of one physical batch.
        batch: Tokens of one logical batch.
        threads: Threads of generation.
        extra: (key, value) pairs of other profile keys.
    """

    engine: str
    spec: str
    n_max: int
    p_min: float
    fit_mib: int
    kv: str
    ubatch: int
    batch: int
    threads: int
    extra: Extra = frozenset()

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return self.spec != OFF

    @property
    def family(self) -> tuple[str, str]:
        """Engine and kind of speculation: what a model of speculation holds for."""
        return self.engine, self.spec

    @property
    def placement(self) -> Extra:
        """What of `extra` places the model by hand; empty where the engine's fit does."""
        return placement_of(self.extra)

    @property
    def is_placed(self) -> bool:
        """Whether the model is placed by hand, so that a margin means nothing."""
        return bool(self.extra) and bool(self.placement)

    @property
    def wording(self) -> Extra:
        """What of `extra` may change what the model says."""
        return wording_of(self.extra)

    @property
    def n_cpu_moe(self) -> int | None:
        """Layers whose experts stay in RAM, where `extra` says so."""
        found = dict(self.placement).get(EXPERTS)
        return int(found) if found is not None else None

    def canonical(self) -> Arm:
        """The same configuration without what means nothing; equal arms do the same."""
        kept = self if self.drafts else replace(self, n_max=0, p_min=0.0)
        return replace(kept, fit_mib=0) if kept.fit_mib and kept.is_placed else kept

    def with_draft(self, n_max: int, p_min: float) -> Arm:
        """This arm with other settings of speculation."""
        return replace(self, n_max=n_max, p_min=p_min)

    def with_margin(self, fit_mib: int) -> Arm:
        """This arm with another margin; one that is placed by hand has none."""
        return self if self.is_placed else replace(self, fit_mib=fit_mib)

    def __str__(self) -> str:
        speculation = (
            f"{self.spec} {self.n_max}/{self.p_min:g}" if self.drafts else "no speculation"
        )
        parts = [
            self.engine,
            speculation,
            *(() if self.is_placed else (f"margin {self.fit_mib}",)),
            f"kv {self.kv}",
            f"ub {self.ubatch}",
            f"b {self.batch}",
            f"t {self.threads}",
            *(f"{key}={value}" for key, value in sorted(self.extra, key=str)),
        ]
        return ", ".join(parts)


def placement_of(extra: Extra) -> Extra:
    """The pairs that place a model by hand."""
    return frozenset(
        (key, value) for key, value in extra if key in PLACEMENT_KEYS and value != LEFT_TO_FIT
    )


def wording_of(extra: Extra) -> Extra:
    """The pairs that may change what the model says."""
    return frozenset(pair for pair in extra if pair[0] not in SAME_TEXT_KEYS)


def shape_of(arm: Arm) -> Extra | None:
    """A placement but for how many layers' experts stay in RAM; None where the engine's fit places."""
    if not arm.is_placed:
        return None
    pairs = {(key, value) for key, value in arm.placement if key != EXPERTS}
    return frozenset({*pairs, (EXPERTS, arm.n_cpu_moe is not None)})


def as_arm(given: ArmLike) -> Arm:
    """An arm of our own class, from any object with the same attributes."""
    return Arm(
        engine=given.engine,
        spec=given.spec or OFF,
        n_max=int(given.n_max or 0),
        p_min=float(given.p_min or 0.0),
        fit_mib=int(given.fit_mib or 0),
        kv=given.kv,
        ubatch=int(given.ubatch),
        batch=int(given.batch),
        threads=int(given.threads or 0),
        extra=frozenset(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in (getattr(given, "extra", None) or ())
        ),
    )


def simplicity(arm: Arm) -> tuple[int, int, int, int]:
    """Order of preference between equals, least first.

    Speculation off before on, fewer drafted tokens, a larger margin, a smaller batch.
    """
    canonical = arm.canonical()
    return int(canonical.drafts), canonical.n_max, -canonical.fit_mib, canonical.ubatch
