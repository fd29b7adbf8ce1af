"""The arms that may be tried: the space with its pins, and what the incumbent keeps as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tunerd.core.sweep.arm import OFF, Arm, Extra, as_arm, placement_of, wording_of
from tunerd.core.sweep.protocol import Policy, Space

# Names under which a pin may speak of an arm's attribute: its own, and the profile's key.
_PIN_NAMES = {
    "engine": ("engine", "engine.name", "engine.prefer"),
    "spec": ("spec", "speculation.type", "type"),
    "n_max": ("n_max", "speculation.n_max"),
    "p_min": ("p_min", "speculation.p_min"),
    "fit_mib": ("fit_mib", "memory.fit_mib"),
    "kv": ("kv", "cache_type_k", "cache_type_v", "serving.cache_type_k", "serving.cache_type_v"),
    "ubatch": ("ubatch", "n_ubatch", "serving.n_ubatch", "serving.ubatch"),
    "batch": ("batch", "n_batch", "serving.n_batch", "serving.batch"),
    "threads": ("threads", "serving.threads"),
}
_PINS_OF_ARMS = frozenset(name for names in _PIN_NAMES.values() for name in names)
CONTEXT_NAMES = ("context_tokens", "ctx_size", "serving.ctx_size", "n_ctx", "context", "ctx")


@dataclass(frozen=True, slots=True)
class Variant:
    """What an arm is beside speculation, batch of the prompt and margin: levels of its own."""

    kv: str
    batch: int
    threads: int
    extra: Extra = frozenset()


def variant_of(arm: Arm) -> Variant:
    """The variant that an arm belongs to."""
    return Variant(arm.kv, arm.batch, arm.threads, arm.extra)


@dataclass(frozen=True, slots=True)
class FamilyGrid:
    """Allowed values of one (engine, kind of speculation), ascending.

    `home` is the variant to begin with: the incumbent's values where they are allowed.
    """

    engine: str
    spec: str
    n_max: tuple[int, ...]
    p_min: tuple[float, ...]
    fit_mib: tuple[int, ...]
    kv: tuple[str, ...]
    ubatch: tuple[int, ...]
    batch: tuple[int, ...]
    threads: tuple[int, ...]
    extra: tuple[Extra, ...]
    home: Variant
    home_ubatch: int

    @property
    def key(self) -> tuple[str, str]:
        """Engine and kind of speculation."""
        return self.engine, self.spec

    def arm(
        self, n_max: int, p_min: float, ubatch: int, fit_mib: int, variant: Variant | None = None
    ) -> Arm:
        """An arm of this family; the margin is 0 where the variant places the model by hand."""
        kept = variant or self.home
        margin = 0 if kept.extra and placement_of(kept.extra) else fit_mib
        return Arm(
            self.engine, self.spec, n_max, p_min, margin, kept.kv, ubatch, kept.batch,
            kept.threads, kept.extra,
        )  # fmt: skip

    def margin_at_least(self, mib: float) -> int | None:
        """The smallest allowed margin that is not below this; None above the largest."""
        return next((margin for margin in self.fit_mib if margin >= mib), None)

    def variants_near(self, centre: Variant) -> Iterator[Variant]:
        """The centre and all that differ from it in one way."""
        yield centre
        for kv in self.kv:
            if kv != centre.kv:
                yield replace(centre, kv=kv)
        for threads in self.threads:
            if threads != centre.threads:
                yield replace(centre, threads=threads)
        for batch in self.batch:
            if batch != centre.batch:
                yield replace(centre, batch=batch)
        for extra in self.extra:
            if extra != centre.extra:
                yield replace(centre, extra=extra)

    def allows_batches(self, ubatch: int, batch: int) -> bool:
        """Whether a physical batch fits its logical one; engines cut the former otherwise."""
        return ubatch <= batch or batch == self.batch[-1]


@dataclass(frozen=True, slots=True)
class Left:
    """Something that was not considered, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Grid:
    """All families that may be tried, and what was left out."""

    families: Mapping[tuple[str, str], FamilyGrid]
    left_out: tuple[Left, ...]

    def of(self, arm: Arm) -> FamilyGrid | None:
        """The family that an arm belongs to, if it is in the space."""
        return self.families.get(arm.family)

    def contains(self, arm: Arm) -> bool:
        """Whether an arm may be recommended: every value allowed, every pin kept."""
        family = self.of(arm)
        if family is None:
            return False
        draft = not arm.drafts or (arm.n_max in family.n_max and arm.p_min in family.p_min)
        return (
            draft
            and (arm.is_placed or arm.fit_mib in family.fit_mib)
            and arm.kv in family.kv
            and arm.ubatch in family.ubatch
            and arm.batch in family.batch
            and arm.threads in family.threads
            and arm.extra in family.extra
        )


def build_grid(space: Space, incumbent: Arm, policy: Policy) -> Grid:
    """The grid of a space for a sweep that starts from this incumbent."""
    pinned = space.pinned or {}
    pins = _pins(pinned)
    others = {key: value for key, value in pinned.items() if key not in _PINS_OF_ARMS}
    families: dict[tuple[str, str], FamilyGrid] = {}
    left_out: list[Left] = []
    for (engine, spec), family in space.families.items():
        name = f"{engine}, {spec}"
        pinned_away = [
            f"{key} is pinned to {pins[key]}"
            for key, value in (("engine", engine), ("spec", spec))
            if key in pins and pins[key] != value
        ]
        if pinned_away:
            left_out.append(Left(name, pinned_away[0]))
            continue
        if spec != OFF and "n_max" in pins and int(pins["n_max"]) < 1:
            left_out.append(Left(name, f"n_max is pinned to {pins['n_max']}"))
            continue
        found = _family(engine, spec, family, incumbent, pins, policy)
        families[engine, spec] = replace(found, **_keeping(found, others))
    left_out += [Left(key, f"pinned to {value}") for key, value in pins.items()]
    if not policy.may_change_output:
        left_out.append(Left("KV types and other keys", "they can change what the model says"))
    return Grid(families, tuple(left_out))


def _pins(pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Pins of an arm's attributes under its own names; others are the caller's."""
    found = {}
    for attribute, names in _PIN_NAMES.items():
        for name in names:
            if name in pinned and pinned[name] is not None:
                found[attribute] = pinned[name]
    return found


def _family(
    engine: str, spec: str, given: Any, incumbent: Arm, pins: Mapping[str, Any], policy: Policy
) -> FamilyGrid:
    def values(name: str, fallback: Any, *, frozen: bool = False) -> tuple[Any, ...]:
        if name in pins:
            return (pins[name],)
        if frozen:
            return (fallback,)
        allowed = tuple(getattr(given, name, None) or ())
        return tuple(sorted(set(allowed))) if allowed else (fallback,)

    keeps_output = not policy.may_change_output
    kv = values("kv", incumbent.kv, frozen=keeps_output)
    threads = values("threads", incumbent.threads)
    batch = values("batch", incumbent.batch)
    ubatch = values("ubatch", incumbent.ubatch)
    extra = _extras(given, incumbent, keeps_output=keeps_output)
    drafts = spec != OFF
    n_max = values("n_max", incumbent.n_max)
    home_ubatch = _nearest(ubatch, incumbent.ubatch)
    home_batch = incumbent.batch if incumbent.batch in batch else _nearest(batch, incumbent.batch)
    return FamilyGrid(
        engine=engine,
        spec=spec,
        n_max=tuple(n for n in n_max if n > 0) or (1,) if drafts else n_max[:1],
        p_min=values("p_min", incumbent.p_min) if drafts else values("p_min", 0.0)[:1],
        fit_mib=values("fit_mib", incumbent.fit_mib),
        kv=kv,
        ubatch=ubatch,
        batch=batch,
        threads=threads,
        extra=extra,
        home=Variant(
            incumbent.kv if incumbent.kv in kv else kv[0],
            home_batch,
            incumbent.threads if incumbent.threads in threads else threads[0],
            incumbent.extra if incumbent.extra in extra else extra[0],
        ),
        home_ubatch=home_ubatch,
    )


def _extras(given: Any, incumbent: Arm, *, keeps_output: bool) -> tuple[Extra, ...]:
    listed = tuple(frozenset(option) for option in getattr(given, "extra", None) or ())
    if keeps_output:
        listed = tuple(option for option in listed if wording_of(option) == incumbent.wording)
    return tuple(dict.fromkeys(listed)) or (incumbent.extra,)


def _keeping(family: FamilyGrid, pinned: Mapping[str, Any]) -> dict[str, Any]:
    """What changes of a family where alternatives of other keys that break a pin are left out."""
    kept = tuple(
        option
        for option in family.extra
        if all(pinned.get(key) in (value, None) for key, value in option)
    )
    if kept == family.extra or not kept:
        return {}
    home = family.home if family.home.extra in kept else replace(family.home, extra=kept[0])
    return {"extra": kept, "home": home}


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: (abs(value - wanted), value))


def first_arms(policy: Policy, grid: Grid) -> Iterable[Arm]:
    """Arms known from elsewhere that the space allows."""
    return [arm for arm in (as_arm(given) for given in policy.seeds) if grid.contains(arm)]


def planes(family: FamilyGrid) -> Iterator[tuple[int, float]]:
    """Every (n_max, p_min) of a family; a single one where nothing is drafted."""
    yield from product(family.n_max, family.p_min)
