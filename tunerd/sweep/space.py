"""What a sweep may try: the profile's ranges, what builds and machine allow, and why the rest is out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd.model.facts import ModelFacts
from tunerd.model.memory import Device, EngineLaws, MemorySettings, estimate
from tunerd.profile.arm import (
    DRAFT_MODEL,
    NGRAM,
    OFF,
    PLACEMENT_KEYS,
    SAME_TEXT_KEYS,
    Arm,
    Extra,
    Family,
    Policy,
    Space,
    placement_of,
    wording_of,
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyGrid(Family):
    """Allowed values of one (engine, kind of speculation), ascending.

    `home` is the variant to begin with: the incumbent's values where they are allowed.
    """

    engine: str
    spec: str
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
        """The centre and all that differ from it in one way.

        A cache type by the next size up or down alone: from q4_0 straight to f16 an hour of 24G deep of the second world
        lost a start to layers that no longer fitted (docs/benchmarks.md). Threads the same: half of them say nothing of one less.
        """
        yield centre
        near: dict[str, Sequence[Any]] = {
            "kv": _next_to(centre.kv, self.kv, _bits),
            "threads": _next_to(centre.threads, self.threads, int),
        }
        for name in ("kv", "threads", "batch", "extra"):
            for value in near.get(name, getattr(self, name)):
                if value != getattr(centre, name):
                    yield replace(centre, **{name: value})

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
        names = ["kv", "ubatch", "batch", "threads", "extra"]
        names += ["n_max", "p_min"] if arm.drafts else []
        names += [] if arm.is_placed else ["fit_mib"]
        return all(getattr(arm, name) in getattr(family, name) for name in names)


def build_grid(space: Space, incumbent: Arm, policy: Policy) -> Grid:
    """The grid of a space for a sweep that starts from this incumbent."""
    families = {
        key: _grid_family(key, family, incumbent, policy) for key, family in space.families.items()
    }
    left_out = (Left("KV types and other keys", "they can change what the model says"),)
    return Grid(families, () if policy.may_change_output else left_out)


def _grid_family(key: tuple[str, str], given: Family, incumbent: Arm, policy: Policy) -> FamilyGrid:
    def values(name: str, fallback: Any) -> tuple[Any, ...]:
        return tuple(sorted(set(getattr(given, name)))) or (fallback,)

    kv = values("kv", incumbent.kv) if policy.may_change_output else (incumbent.kv,)
    threads = values("threads", incumbent.threads)
    batch = values("batch", incumbent.batch)
    ubatch = values("ubatch", incumbent.ubatch)
    extra = _grid_extras(given, incumbent, policy)
    engine, spec = key
    drafts = spec != OFF
    p_min = values("p_min", incumbent.p_min if drafts else 0.0)
    if spec in {OFF, NGRAM}:  # what is looked up has no confidence
        p_min = (incumbent.p_min,) if incumbent.p_min in p_min else p_min[:1]
    n_max = values("n_max", incumbent.n_max)
    return FamilyGrid(
        engine=engine,
        spec=spec,
        n_max=tuple(n for n in n_max if n > 0) or (1,) if drafts else n_max[:1],
        p_min=p_min,
        fit_mib=values("fit_mib", incumbent.fit_mib),
        kv=kv,
        ubatch=ubatch,
        batch=batch,
        threads=threads,
        extra=extra,
        home=Variant(
            incumbent.kv if incumbent.kv in kv else kv[0],
            _nearest(batch, incumbent.batch),
            incumbent.threads if incumbent.threads in threads else threads[0],
            incumbent.extra if incumbent.extra in extra else extra[0],
        ),
        home_ubatch=_nearest(ubatch, incumbent.ubatch),
    )


def _grid_extras(given: Family, incumbent: Arm, policy: Policy) -> tuple[Extra, ...]:
    """Alternatives of other keys."""
    options = dict.fromkeys(frozenset(option) for option in given.extra)
    kept = (
        option
        for option in options
        if policy.may_change_output or wording_of(option) == incumbent.wording
    )
    return tuple(kept) or (incumbent.extra,)


def _next_to(centre: Any, values: Sequence[Any], size: Callable[[Any], int]) -> list[Any]:
    """Values of the centre's size, of the next smaller and of the next larger one."""
    sizes = sorted({size(value) for value in (*values, centre)})
    at = sizes.index(size(centre))
    return [value for value in values if size(value) in sizes[max(at - 1, 0) : at + 2]]


def _bits(kv: str) -> int:
    """How large a cache type is, by its name: 4 of `q4_0` and `iq4_nl`, 16 of `f16`; 0 of one without a number."""
    return int(re.sub(r"^\D*(\d*).*", r"\1", kv) or 0)


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: (abs(value - wanted), value))


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

_KEY_OF: Mapping[str, str] = {
    "n_max": N_MAX,
    "p_min": P_MIN,
    "fit_mib": FIT,
    "ubatch": UBATCH,
    "batch": BATCH,
    "threads": THREADS,
}
"""The key behind each numeric attribute of an arm."""
ARM_KEYS = frozenset({TYPE, ENGINE, *_KEY_OF.values(), *KV_KEYS})

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
    extra = _placed(values, searched) if has_gpu else frozenset()
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


def _placed(values: Mapping[str, Any], keys: Collection[str]) -> Extra:
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
    drafts = ("n_max", "p_min") if wanted.drafts else ()
    margin = () if wanted.is_placed else ("fit_mib",)
    always = drafts if other_engine or other_spec else ()
    for name in (*drafts, *margin, "ubatch", "batch", "threads"):
        if name in always or getattr(wanted, name) != getattr(start, name):
            found[_KEY_OF[name]] = getattr(wanted, name)
    if wanted.kv != start.kv:
        own = [key for key in _DRAFT_KV_KEYS if key in base.values]
        found |= dict.fromkeys((*KV_KEYS, *own), wanted.kv)
    return found | {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in wanted.extra - start.extra
    }


_NAMES = ("engine", "spec", "n_max", "p_min", "fit_mib", "kv", "ubatch", "batch", "threads")


def changed(arm: Arm, incumbent: Arm) -> str:
    """In which attributes an arm differs from another."""
    parts: Sequence[str] = [
        f"{name} {getattr(incumbent, name)} -> {getattr(arm, name)}"
        for name in _NAMES
        if getattr(arm, name) != getattr(incumbent, name)
        and not (name == "fit_mib" and arm.is_placed)
    ]
    extra = [f"{key} = {value}" for key, value in sorted(arm.extra - incumbent.extra, key=str)]
    return ", ".join([*parts, *extra]) or "nothing"


# Where a profile names no range. What can change the output, batches and threads stay as they are.
USUAL_RANGES: Mapping[str, tuple[Any, ...]] = {
    N_MAX: (1, 2, 3, 4, 5, 6, 8),
    P_MIN: (0.0, 0.5, 0.75, 0.9),
    FIT: tuple(range(0, 4097, 64)),
}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of one installed build before anything is started.

    `kinds` are types of speculation with the reason why this build or model cannot have them, None
    where they can be had. `ignored` are keys without effect, with the reason. `refused` are values of single keys that would not be deployed, with the
    reason. `problem` says why it cannot serve the profile at all. `placements` are those to try as a
    whole beside the present one.
    """

    name: str
    kinds: Mapping[str, str | None] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    problem: str | None = None
    placements: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What people want: ranges by key, keys that must stay, and whether the output may change.

    `pins` are keys with who pinned them, `frozen` keys that cannot be searched here, with the reason.
    `drafters` are the draft models of kinds that have one, as they are named.
    """

    ranges: Mapping[str, tuple[Any, ...]]
    pins: Mapping[str, str]
    frozen: Mapping[str, str] = field(default_factory=dict)
    may_change_output: bool = False
    drafters: Mapping[str, str] = field(default_factory=dict)

    def keep(self, *keys: str) -> bool:
        """Whether one of these keys stays as it is."""
        return any(key in self.pins or key in self.frozen for key in keys)


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
                left.append(Left(f"{engine.name}, {kind}", f"a sweep tries only one kind of {spec}: {known}"))  # fmt: skip
                continue
            families[engine.name, spec] = _space_family(engine, spec, base, wishes, left)
    left += [
        Left(key, f"pinned to {base.values.get(key)} by {who}") for key, who in wishes.pins.items()
    ]
    left += [Left(key, reason) for key, reason in wishes.frozen.items()]
    if not wishes.may_change_output:
        why = "it can change what the model says, and sweep.may_change_output is false"
        same = ARM_KEYS | SAME_TEXT_KEYS
        left += [Left(key, why) for key in wishes.ranges if key in KV_KEYS or key not in same]
    whole = Base(base.arm, base.values, spec_types)
    return SpacePlan(Space(families), whole, tuple(dict.fromkeys(left)))


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
        return f"{ENGINE} does not list it"
    return None


def _kinds(
    engine: EngineFacts, base: Base, wishes: Wishes, left: list[Left]
) -> Iterator[tuple[str, str]]:
    """Kinds of speculation to try with a build, as (kind of an arm, type of a profile)."""
    current = base.spec_types.get(base.arm.spec, base.arm.spec)
    pinned = base.values.get(DRAFT_MODEL)
    for kind, reason in engine.kinds.items():
        spec = spec_of(kind)
        listed = wishes.ranges.get(TYPE)
        why = reason
        if kind == current and engine.name == base.arm.engine:
            why = None  # it serves now, whatever a list says
        elif TYPE in wishes.pins and kind != current:
            why = f"{TYPE} is pinned to {current}"
        elif (
            why is None
            and DRAFT_MODEL in wishes.pins
            and wishes.drafters.get(spec, pinned) != pinned
        ):
            why = f"{DRAFT_MODEL} is pinned to another file"
        elif why is None and kind != OFF and listed is not None and kind not in listed:
            why = f"{TYPE} of [sweep] does not list it"
        if why is None:
            yield spec, kind
        else:
            left.append(Left(f"{engine.name}, {kind}", why))


def _space_family(
    engine: EngineFacts, spec: str, base: Base, wishes: Wishes, left: list[Left]
) -> Family:
    def allowed(attribute: str) -> tuple[Any, ...]:
        key, current = _KEY_OF[attribute], getattr(base.arm, attribute)
        values = _values(engine, key, current, wishes, left)
        if key not in engine.ignored or spec == OFF:
            return values
        left.append(Left(f"{engine.name}, {key}", engine.ignored[key]))
        return (current,) if current in values else (min(values),)

    n_max, p_min = allowed("n_max"), allowed("p_min")
    return Family(
        n_max=tuple(value for value in n_max if value > 0) or (1,) if spec != OFF else (0,),
        p_min=p_min if spec != OFF else (0.0,),
        fit_mib=allowed("fit_mib"),
        kv=_kv_types(engine, base.arm, wishes, left),
        ubatch=allowed("ubatch"),
        batch=allowed("batch"),
        threads=allowed("threads"),
        extra=_space_extras(engine, spec, base.arm, wishes, left),
    )


def _values(
    engine: EngineFacts, key: str, current: Any, wishes: Wishes, left: list[Left]
) -> tuple[Any, ...]:
    """Allowed values of one key; what serves now always is one, unless there is nothing to serve."""
    if wishes.keep(key):
        return (current,)
    listed = wishes.ranges.get(key) or USUAL_RANGES.get(key) or ()
    own = () if key == N_MAX and not current else (current,)  # nothing is drafted now
    return _deployable(engine, key, sorted({*listed, *own}), current, left) or (current,)


def _deployable(
    engine: EngineFacts, key: str, values: Iterable[Any], current: Any, left: list[Left]
) -> tuple[Any, ...]:
    """The values that this build would be deployed with, and the present one."""
    kept = []
    for value in values:
        reason = engine.refused.get((key, value))
        if reason is None or value == current:
            kept.append(value)
        else:
            left.append(Left(f"{engine.name}, {key} = {value}", reason))
    return tuple(kept)


def _kv_types(engine: EngineFacts, arm: Arm, wishes: Wishes, left: list[Left]) -> tuple[str, ...]:
    key = KV_KEYS[0]
    if not wishes.may_change_output or wishes.keep(*KV_KEYS):
        return (arm.kv,)
    listed = dict.fromkeys((arm.kv, *map(str, wishes.ranges.get(key, ()))))
    return _deployable(engine, key, listed, arm.kv, left)


def _space_extras(
    engine: EngineFacts, spec: str, arm: Arm, wishes: Wishes, left: list[Left]
) -> tuple[Extra, ...]:
    """What serves now, other placements, and each value of each other key alone."""
    drafter: Extra = frozenset()
    if spec != arm.spec and spec in wishes.drafters:
        drafter = frozenset({(DRAFT_MODEL, wishes.drafters[spec])})
    options = (arm.extra, *engine.placements, *_single(engine, arm, wishes, left))
    return tuple(dict.fromkeys(option | drafter for option in options))


def _single(engine: EngineFacts, arm: Arm, wishes: Wishes, left: list[Left]) -> Iterator[Extra]:
    for key, values in wishes.ranges.items():
        if key in ARM_KEYS or key == DRAFT_MODEL or wishes.keep(key):
            continue
        if key not in SAME_TEXT_KEYS and not wishes.may_change_output:
            continue
        kept = arm.extra if key in PLACEMENT_KEYS else arm.placement
        others = {pair for pair in kept if pair[0] != key}
        for value in _deployable(engine, key, values, None, left):
            yield frozenset(others | {(key, value)})


LOG, ESTIMATE = "the log of the server that runs", "the memory estimate"
_FIT_BEGINS = "fitting params to device memory"
_FIT_FAILED = "to fit params to free device memory"
_ROW = re.compile(
    r"- (?P<device>\S[^:]{0,99}): {1,9}\d+ layers(?: \( *(?P<partly>\d+) overflowing\))?, +\d+ MiB used"
)
_OFFLOADED = re.compile(r"offloaded (?P<on_gpu>\d+)/(?P<all>\d+) layers to GPU")
_IK_MOVES = re.compile(r"Adding experts CPU overrides for layer (?P<layer>\d+)")


@dataclass(frozen=True, slots=True)
class FitSaid:
    """What a log says of the last fit.

    `n_on_gpu` of `n_to_place` layers, the output layer counted, are on the GPU; None where it does not
    say. Of those, `n_partly` have experts in RAM, the last of them perhaps only some.
    """

    n_on_gpu: int | None
    n_to_place: int | None
    n_partly: int
    n_devices: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A placement: layers on the GPU, and layers whose experts stay in RAM; `remark` is for people."""

    n_gpu_layers: int
    n_cpu_moe: int
    found_by: str
    remark: str | None = None

    @property
    def values(self) -> dict[str, int]:
        """As keys of a profile."""
        experts = {"memory.n_cpu_moe": self.n_cpu_moe} if self.n_cpu_moe else {}
        return {"memory.n_gpu_layers": self.n_gpu_layers, **experts}

    @property
    def text(self) -> str:
        """For people."""
        return ", ".join(f"{key} = {value}" for key, value in self.values.items())


def read_fit(lines: Iterable[str]) -> FitSaid:
    """What a log says of the fit of its last start; mainline needs `--log-verbosity 4` for it."""
    devices: dict[str, int] = {}
    moved: set[int] = set()
    offloaded: tuple[int, int] | None = None
    for line in lines:
        if _FIT_BEGINS in line:
            devices, moved, offloaded = {}, set(), None
        elif _FIT_FAILED in line and "successfully" not in line:
            devices = {}  # it loads as if nothing had been tried
        elif row := _ROW.search(line):
            devices[row["device"]] = int(row["partly"] or 0)
        elif row := _IK_MOVES.search(line):
            moved.add(int(row["layer"]))
        elif offloaded is None and (row := _OFFLOADED.search(line)):
            offloaded = int(row["on_gpu"]), int(row["all"])
    on_gpu, to_place = offloaded or (None, None)
    # mainline counts the output layer among those that overflow, and it has no experts.
    partly = max(0, sum(devices.values()) - 1) + len(moved)
    return FitSaid(on_gpu, to_place, partly, max(1, len(devices)))


def frozen_from_log(
    said: FitSaid, facts: ModelFacts, laws: EngineLaws, *, uses_mtp: bool
) -> Frozen | str | None:
    """What fit chose, as a placement by hand; why there is none; None where the log does not tell.

    As many layers' experts stay in RAM as fit moved, but those of the first layers (of the last of the
    trunk on ik_llama.cpp): fit begins with the last block, which is the MTP block where there is one, and
    that runs once for each drafted token. One layer that fit split goes to RAM whole.
    """
    if said.n_on_gpu is None or said.n_to_place is None:
        return None
    if said.n_devices > 1:
        return "there is more than one GPU, and no key says which layer lies on which"
    on_gpu, remark = said.n_on_gpu, None
    if said.n_on_gpu == said.n_to_place and not said.n_partly:
        return "fit moved nothing: the whole model is on the GPU"
    if on_gpu == said.n_to_place - 1 and facts.has_mtp and not uses_mtp:
        # Source: ggml-org/llama.cpp#24712; fit counts the trunk's layers, the loader the MTP block too.
        on_gpu = said.n_to_place
        remark = "fit left one layer in RAM because it does not count the MTP block; it is on the GPU here"
    experts = _experts_in_ram(facts, laws, said.n_to_place - on_gpu, said.n_partly)
    return Frozen(on_gpu, experts, LOG, remark)


def _experts_in_ram(facts: ModelFacts, laws: EngineLaws, first: int, wanted: int) -> int:
    """The number by which an engine leaves the experts of so many layers from `first` on in RAM."""
    if laws.cpu_moe_takes_last or not wanted:
        return wanted
    left = wanted
    for block in facts.blocks:
        left -= block.index >= first and block.expert_bytes > 0
        if left == 0:
            return block.index + 1
    return len(facts.blocks)


def frozen_from_estimate(
    facts: ModelFacts, settings: MemorySettings, free_mib: int | None, fit_mib: int
) -> Frozen | str:
    """The least that must go to RAM so that a margin stays free, or why that cannot be told.

    Args:
        facts: The model.
        settings: As it would be started, everything on the GPU.
        free_mib: VRAM that is there for it; None where unknown.
        fit_mib: The margin.
    """
    if free_mib is None:
        return "the log does not say what fit chose, and how much VRAM is free is unknown"

    def fits(n_gpu_layers: int, n_cpu_moe: int) -> bool:
        placed = replace(settings, n_gpu_layers=n_gpu_layers, n_cpu_moe=n_cpu_moe)
        return estimate(facts, placed).start_mib(Device.GPU) + fit_mib <= free_mib

    everything = len(facts.blocks) + 1
    if fits(everything, 0):
        return "fit has nothing to move: by the memory estimate the whole model fits on the GPU"
    most = len(facts.blocks) if facts.is_moe else 0
    for n_cpu_moe in range(1, most + 1):
        if fits(everything, n_cpu_moe):
            return Frozen(everything, n_cpu_moe, ESTIMATE)
    for n_gpu_layers in range(everything - 1, 0, -1):
        if fits(n_gpu_layers, most):
            return Frozen(n_gpu_layers, most, ESTIMATE)
    return "by the memory estimate not even one layer fits on the GPU"
