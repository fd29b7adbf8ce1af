"""What a sweep may try: the profile's ranges, what builds and machine allow, and why the rest is out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunerd.core.profile import Range
from tunerd.core.sweep.arm import (
    DRAFT,
    DRAFT_MODEL,
    OFF,
    PLACEMENT_KEYS,
    SAME_TEXT_KEYS,
    Arm,
    Extra,
)
from tunerd.core.sweep.grid import Left
from tunerd.core.sweep.keys import (
    ARM_KEYS,
    BATCH,
    ENGINE,
    FIT,
    KEY_OF,
    KV_KEYS,
    N_MAX,
    P_MIN,
    THREADS,
    TYPE,
    UBATCH,
    Base,
    spec_of,
)
from tunerd.core.sweep.protocol import Family, Space

# Where a profile names no range. What can change the output, batches and threads stay as they are.
USUAL_RANGES: Mapping[str, tuple[Any, ...]] = {
    N_MAX: (1, 2, 3, 4, 5, 6, 8),
    P_MIN: (0.0, 0.5, 0.75, 0.9),
    FIT: tuple(range(0, 4097, 64)),
}
_STEPS: Mapping[str, float] = {N_MAX: 1, P_MIN: 0.05, FIT: 64, THREADS: 1}
_DOUBLING = frozenset({UBATCH, BATCH})
_MOST_VALUES = 512


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of one installed build before anything is started.

    `kinds` are types of speculation with the reason why this build or model cannot have them, None
    where they can be had. `refused` are values of single keys that would not be deployed, with the
    reason. `problem` says why it cannot serve the profile at all. `placements` are those to try as a
    whole beside the present one.
    """

    name: str
    kinds: Mapping[str, str | None] = field(default_factory=dict)
    ignores_n_max: str | None = None
    ignores_p_min: str | None = None
    refused: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    problem: str | None = None
    placements: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What people want: ranges by key, keys that must stay, and whether the output may change.

    `pins` are keys with who pinned them, `frozen` keys that cannot be searched here, with the reason.
    `draft_model` is who drafts where the kind is `draft`, if it is not what serves.
    """

    ranges: Mapping[str, tuple[Any, ...]]
    pins: Mapping[str, str]
    frozen: Mapping[str, str] = field(default_factory=dict)
    may_change_output: bool = False
    draft_model: str | None = None


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """A space with its incumbent, and what was left out of it with the reason."""

    space: Space
    base: Base
    left_out: tuple[Left, ...]

    @property
    def n_points(self) -> int:
        """Configurations in the space; margins count once, for they are chosen by a law."""
        return sum(_points(spec, family) for (_, spec), family in self.space.families.items())


def _points(spec: str, family: Family) -> int:
    drafts = 1 if spec == OFF else len(family.n_max) * len(family.p_min)
    others = (family.kv, family.ubatch, family.batch, family.threads, family.extra or ((),))
    return drafts * math.prod(len(values) for values in others)


def values_of(key: str, given: Range) -> tuple[Any, ...]:
    """The values of a range, ascending where they are numbers.

    Raises:
        ValueError: it names none, or too many.
    """
    if given.values is not None:
        if not given.values:
            raise ValueError("an empty list allows nothing")
        listed = (tuple(one) if isinstance(one, list) else one for one in given.values)
        return tuple(dict.fromkeys(listed))
    if given.min is None or given.max is None or given.max < given.min:
        raise ValueError("give `values`, or `min` and `max`")
    if key in _DOUBLING and given.step is None:
        return tuple(_doubled(given.min, given.max))
    step = given.step if given.step is not None else _STEPS.get(key)
    if not step or step < 0:
        raise ValueError("a range of this key needs a `step` above 0")
    count = math.floor((given.max - given.min) / step + 1e-9) + 1
    if count > _MOST_VALUES:
        raise ValueError(f"{count} values are too many; at most {_MOST_VALUES}")
    numbers = [given.min + step * at for at in range(count)]
    if all(float(one).is_integer() for one in (given.min, step)) and key != P_MIN:
        return tuple(int(one) for one in numbers)
    return tuple(round(one, 6) for one in numbers)


def _doubled(least: float, most: float) -> Iterator[int]:
    value = max(1, int(least))
    while value <= most:
        yield value
        value *= 2


def plan_space(base: Base, engines: Sequence[EngineFacts], wishes: Wishes) -> SpacePlan:
    """The space; what serves now and speculation off are always in it, unless they are pinned away.

    Args:
        base: What serves now.
        engines: Installed builds, that of the base among them.
        wishes: Ranges, pins and consent.
    """
    left: list[Left] = []
    families: dict[tuple[str, str], Family] = {}
    spec_types = dict(base.spec_types)
    for engine in engines:
        reason = _engine_out(engine, base, wishes)
        if reason is not None:
            left.append(Left(engine.name, reason))
            continue
        for spec, kind in _kinds(engine, base, wishes, left):
            known = spec_types.setdefault(spec, kind)
            if known != kind:
                left.append(Left(f"{engine.name}, {kind}", f"one sweep tries one kind of {spec}: {known}"))  # fmt: skip
                continue
            families[engine.name, spec] = _family(engine, spec, base, wishes, left)
    pinned = {key: base.values.get(key) for key in wishes.pins}
    left += [
        Left(key, f"pinned to {base.values.get(key)} by {who}") for key, who in wishes.pins.items()
    ]
    left += [Left(key, reason) for key, reason in wishes.frozen.items()]
    if not wishes.may_change_output:
        named = [key for key in wishes.ranges if _changes_output(key)]
        left += [Left(key, "it can change what the model says, and sweep.may_change_output is false")
                 for key in named]  # fmt: skip
    arm_pins = {key: value for key, value in pinned.items() if key not in ARM_KEYS}
    whole = Base(base.arm, base.values, spec_types)
    return SpacePlan(Space(families, arm_pins), whole, tuple(dict.fromkeys(left)))


def _engine_out(engine: EngineFacts, base: Base, wishes: Wishes) -> str | None:
    """Why a build takes no part."""
    if engine.problem is not None:
        return engine.problem
    if engine.name == base.arm.engine:
        return None
    if ENGINE in wishes.pins:
        return f"{ENGINE} is pinned by {wishes.pins[ENGINE]}"
    listed = wishes.ranges.get(ENGINE)
    if listed is not None and engine.name not in listed:
        return f"{ENGINE} of [sweep] does not list it"
    return None


def _kinds(
    engine: EngineFacts, base: Base, wishes: Wishes, left: list[Left]
) -> Iterator[tuple[str, str]]:
    """Kinds of speculation to try with a build, as (kind of an arm, type of a profile)."""
    current = base.spec_types.get(base.arm.spec, base.arm.spec)
    for kind, reason in engine.kinds.items():
        spec = spec_of(kind)
        listed = wishes.ranges.get(TYPE)
        why = reason
        if kind == current and engine.name == base.arm.engine:
            why = None  # it serves now, whatever a list says
        elif TYPE in wishes.pins and kind != current:
            why = f"{TYPE} is pinned to {current}"
        elif why is None and kind != OFF and listed is not None and kind not in listed:
            why = f"{TYPE} of [sweep] does not list it"
        if why is None:
            yield spec, kind
        else:
            left.append(Left(f"{engine.name}, {kind}", why))


def _family(engine: EngineFacts, spec: str, base: Base, wishes: Wishes, left: list[Left]) -> Family:
    def allowed(attribute: str) -> tuple[Any, ...]:
        return _values(engine, KEY_OF[attribute], getattr(base.arm, attribute), wishes, left)

    n_max, p_min = allowed("n_max"), allowed("p_min")
    if engine.ignores_n_max is not None and spec != OFF:
        n_max = _only(n_max, base.arm.n_max)
        left.append(Left(f"{engine.name}, {N_MAX}", engine.ignores_n_max))
    if engine.ignores_p_min is not None and spec != OFF:
        p_min = (0.0,) if base.arm.p_min not in p_min else (base.arm.p_min,)
        left.append(Left(f"{engine.name}, {P_MIN}", engine.ignores_p_min))
    return Family(
        n_max=tuple(value for value in n_max if value > 0) or (1,) if spec != OFF else (0,),
        p_min=p_min if spec != OFF else (0.0,),
        fit_mib=allowed("fit_mib"),
        kv=_kv_types(engine, base.arm, wishes, left),
        ubatch=allowed("ubatch"),
        batch=allowed("batch"),
        threads=allowed("threads"),
        extra=_extras(engine, spec, base.arm, wishes, left),
    )


def _only(values: Sequence[int], wanted: int) -> tuple[int, ...]:
    return (wanted,) if wanted in values else (min(values),)


def _values(
    engine: EngineFacts, key: str, current: Any, wishes: Wishes, left: list[Left]
) -> tuple[Any, ...]:
    """Allowed values of one key; what serves now always is one, unless there is nothing to serve."""
    if key in wishes.pins or key in wishes.frozen:
        return (current,)
    listed = wishes.ranges.get(key) or USUAL_RANGES.get(key) or ()
    kept = []
    for value in sorted({*listed, *_own(key, current)}):
        reason = engine.refused.get((key, value))
        if reason is None or value == current:
            kept.append(value)
        else:
            left.append(Left(f"{engine.name}, {key} = {value}", reason))
    return tuple(kept) or (current,)


def _own(key: str, current: Any) -> tuple[Any, ...]:
    """The present value; where nothing is drafted there is none of the depth of drafts."""
    return () if key == N_MAX and not current else (current,)


def _kv_types(engine: EngineFacts, arm: Arm, wishes: Wishes, left: list[Left]) -> tuple[str, ...]:
    key = KV_KEYS[0]
    pinned = any(one in wishes.pins or one in wishes.frozen for one in KV_KEYS)
    if not wishes.may_change_output or pinned:
        return (arm.kv,)
    kept = []
    for value in dict.fromkeys((arm.kv, *map(str, wishes.ranges.get(key, ())))):
        reason = engine.refused.get((key, value))
        if reason is None or value == arm.kv:
            kept.append(value)
        else:
            left.append(Left(f"{engine.name}, {key} = {value}", reason))
    return tuple(kept)


def _changes_output(key: str) -> bool:
    return key in KV_KEYS or key not in ARM_KEYS | SAME_TEXT_KEYS


def _extras(
    engine: EngineFacts, spec: str, arm: Arm, wishes: Wishes, left: list[Left]
) -> tuple[Extra, ...]:
    """What serves now, other placements, and each value of each other key alone."""
    drafter: Extra = frozenset()
    if spec == DRAFT and arm.spec != DRAFT and wishes.draft_model is not None:
        drafter = frozenset({(DRAFT_MODEL, wishes.draft_model)})
    options = (arm.extra, *engine.placements, *_single(engine, arm, wishes, left))
    return tuple(dict.fromkeys(option | drafter for option in options))


def _single(engine: EngineFacts, arm: Arm, wishes: Wishes, left: list[Left]) -> Iterator[Extra]:
    for key, values in wishes.ranges.items():
        is_placement = key in PLACEMENT_KEYS
        if key in ARM_KEYS or key == DRAFT_MODEL or key in wishes.pins or key in wishes.frozen:
            continue
        if not is_placement and not wishes.may_change_output:
            continue
        kept = arm.extra if is_placement else arm.placement
        for value in values:
            reason = engine.refused.get((key, value)) if is_placement else None
            if reason is None:
                yield frozenset({pair for pair in kept if pair[0] != key} | {(key, value)})
            else:
                left.append(Left(f"{engine.name}, {key} = {value}", reason))
