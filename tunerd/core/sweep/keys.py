"""An arm in the words of a profile: which keys its attributes stand for, and what it changes of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunerd.core.sweep.arm import OFF, PLACEMENT_KEYS, Arm, Extra, placement_of

TYPE = "speculation.type"
ENGINE = "engine.prefer"
N_MAX = "speculation.n_max"
P_MIN = "speculation.p_min"
FIT = "memory.fit_mib"
UBATCH = "serving.n_ubatch"
BATCH = "serving.n_batch"
THREADS = "serving.threads"
KV_KEYS = ("serving.cache_type_k", "serving.cache_type_v")
_DRAFT_KV_KEYS = ("speculation.cache_type_k", "speculation.cache_type_v")

KEY_OF: Mapping[str, str] = {
    "n_max": N_MAX,
    "p_min": P_MIN,
    "fit_mib": FIT,
    "ubatch": UBATCH,
    "batch": BATCH,
    "threads": THREADS,
}
"""The key behind each numeric attribute of an arm."""
ARM_KEYS = frozenset({TYPE, ENGINE, *KEY_OF.values(), *KV_KEYS})

# What an arm says of values that are left to the engine. Source: `llama-server --help` of mainline
# and ik of August 2026. They are never written: an arm changes only what differs from the base.
_USUAL = {UBATCH: 512, BATCH: 2048, FIT: 1024}
_USUAL_KV = "f16"


@dataclass(frozen=True, slots=True)
class Base:
    """What serves now, as the arm that a sweep starts from.

    `values` are the profile's keys that some layer sets; `spec_types` says which profile type each
    kind of speculation of this sweep stands for.
    """

    arm: Arm
    values: Mapping[str, Any]
    spec_types: Mapping[str, str] = field(default_factory=dict)


def spec_of(profile_type: str | None) -> str:
    """The kind of speculation of an arm, for a type of a profile; all n-gram types are one kind."""
    if profile_type is None:
        return OFF
    return "ngram" if profile_type.startswith("ngram-") else profile_type


def base_arm(
    engine: str,
    values: Mapping[str, Any],
    *,
    has_gpu: bool,
    physical_cores: int | None,
    default_n_max: int | None,
    default_p_min: float | None,
    searched: Collection[str] = (),
) -> Arm:
    """The arm of what serves now; 0 threads are those that the engine chooses.

    Of a placement by hand it names the keys that are `searched`: the others are the same in every arm.
    """
    extra = placed(values, searched) if has_gpu else frozenset()
    spec = spec_of(values.get(TYPE))
    threads = values.get(THREADS)
    drafts = spec != OFF
    n_max, p_min = values.get(N_MAX), values.get(P_MIN)
    return Arm(
        engine=engine,
        spec=spec,
        n_max=int(n_max if n_max is not None else default_n_max or 1) if drafts else 0,
        p_min=float(p_min if p_min is not None else default_p_min or 0.0) if drafts else 0.0,
        fit_mib=int(values.get(FIT, _USUAL[FIT])) if has_gpu and not extra else 0,
        kv=str(values.get(KV_KEYS[0], _USUAL_KV)),
        ubatch=int(values.get(UBATCH, _USUAL[UBATCH])),
        batch=int(values.get(BATCH, _USUAL[BATCH])),
        threads=int(physical_cores or 0) if threads == "physical" else int(threads or 0),
        extra=extra,
    )


def placed(values: Mapping[str, Any], keys: Collection[str]) -> Extra:
    """What some keys say of a placement by hand; `cpu_moe = false` and an empty list place nothing."""
    given = {key: values[key] for key in PLACEMENT_KEYS & set(keys) if key in values}
    return placement_of(
        frozenset(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in given.items()
            if value is not False and value not in ([], ())
        )
    )


def changes(arm: Arm, base: Base) -> dict[str, Any]:
    """The profile's keys that make the base into this arm; empty for the base itself.

    Nothing that is equal is named, so that the base is started with exactly its own command line.
    """
    start, wanted = base.arm, arm.canonical()
    other_engine, other_spec = wanted.engine != start.engine, wanted.spec != start.spec
    found: dict[str, Any] = {}
    if other_engine:
        found[ENGINE] = [wanted.engine]
    if other_spec or other_engine:
        found[TYPE] = base.spec_types.get(wanted.spec, wanted.spec)
    if wanted.drafts:
        found |= _draft(wanted, start, whole=other_engine or other_spec)
    for name in ("fit_mib", "ubatch", "batch", "threads"):
        is_idle = name == "fit_mib" and wanted.is_placed
        if getattr(wanted, name) != getattr(start, name) and not is_idle:
            found[KEY_OF[name]] = getattr(wanted, name)
    if wanted.kv != start.kv:
        own = [key for key in _DRAFT_KV_KEYS if key in base.values]
        found |= dict.fromkeys((*KV_KEYS, *own), wanted.kv)
    return found | {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in wanted.extra - start.extra
    }


def _draft(wanted: Arm, start: Arm, *, whole: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if whole or wanted.n_max != start.n_max:
        found[N_MAX] = wanted.n_max
    if whole or wanted.p_min != start.p_min:
        found[P_MIN] = wanted.p_min
    return found
