"""Everything about a sweep that is known before production is stopped: space, cost, what stays and why."""

from __future__ import annotations

import math
import secrets
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from tunerd.app import Context
from tunerd.calendar import Deadline
from tunerd.engine.builds import engines_meant, files_of, find_engines
from tunerd.engine.capabilities import Effect, Engine, FitStyle, laws_of
from tunerd.engine.choice import PlanRequest, draft_facts, locate, request_again
from tunerd.engine.flags import KINDS_WITH_DRAFT_FILE, USUAL_MARGIN_MIB
from tunerd.engine.flags import by_hand as keys_by_hand
from tunerd.engine.serving import file_environment_of, specifiers_of, unit_with
from tunerd.errors import ConfigError, EngineError, ModelFileError, TunerdError, UsageError
from tunerd.machine.files import is_locked, stamp_of
from tunerd.measure import compare
from tunerd.measure.learn import find_workload, workload_for
from tunerd.measure.results import candidates, here_of, imported, rates_seen
from tunerd.measure.target import LIVE
from tunerd.model.facts import ModelFacts
from tunerd.model.files import ModelFiles
from tunerd.model.memory import Device
from tunerd.operations import SHORT_KEYS
from tunerd.production.lease import Outlook, beside_others, outlook, replaced_amid
from tunerd.production.measurement import wait_for_dead_measurement
from tunerd.production.plan import Plan, cards_of, load_lines, make_plan, settings_of
from tunerd.profile.arm import (
    CONTEXT_SIZE,
    DRAFT,
    DRAFT_MODEL,
    EXPERTS,
    LEFT_TO_FIT,
    OFF,
    PLACEMENT_KEYS,
    Arm,
    Extra,
    Family,
    Policy,
)
from tunerd.profile.files import failed_arms, load_profile, parse_options
from tunerd.profile.layers import Layer, Resolved
from tunerd.profile.schema import POWER_LIMIT, Range, all_keys, values_of, wrong_values
from tunerd.profile.workload import Workload, WorkloadShape
from tunerd.records import plain
from tunerd.result import Level, Message, note, warning
from tunerd.sweep.context import sizes_between
from tunerd.sweep.known import Known, published
from tunerd.sweep.power import limits_of
from tunerd.sweep.schedule import deadline_of, why_closed
from tunerd.sweep.space import (
    ARM_KEYS,
    ENGINE,
    FIT,
    KV_KEYS,
    N_MAX,
    P_MIN,
    TYPE,
    USUAL_RANGES,
    Base,
    EngineFacts,
    Frozen,
    Grid,
    Left,
    SpacePlan,
    Wishes,
    base_arm,
    build_grid,
    changes,
    frozen_from_estimate,
    frozen_from_log,
    plan_space,
    read_fit,
    spec_of,
)
from tunerd.sweep.tuner import Forecast, forecast
from tunerd.units.generations import Generation
from tunerd.words import counted, digest, format_duration, sha256

_NONE_NAMED = "it needs a draft model, and speculation.draft_model names none"


@dataclass(frozen=True, slots=True)
class Drafter:
    """The draft model to try, as it is named; `reason` says why there is none.

    `head` is the file that MTP drafts with, if it is one of its own. `files` tell one file from another; `left` are
    those that were named and are not tried.
    """

    name: str | None
    reason: str | None
    head: str | None = None
    files: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()

    @property
    def by_kind(self) -> dict[str, str]:
        """The file of each kind that has one."""
        pairs = ((DRAFT, self.name), ("mtp", self.head))
        return {kind: name for kind, name in pairs if name is not None}


def _drafter_of(ctx: Context, base: Plan, ranges: Mapping[str, tuple[Any, ...]]) -> Drafter:
    """The first of the named files that can draft for the model; one sweep tries one.

    How often drafts are right is learned by kind of speculation, so two files would be taken for one.
    """
    speculation = base.resolved.profile.speculation
    own = speculation.draft_model
    named = dict.fromkeys([str(one) for one in ranges.get(DRAFT_MODEL, ())] or [own or ""])
    read = {name: _read(ctx, base, name) for name in filter(None, (own, *named))}
    facts = {name: one for name, one in read.items() if isinstance(one, ModelFacts)}
    heads = [name for name, one in facts.items() if one.has_mtp and one.no_model]
    serving = None if base.command.value_of(DRAFT_MODEL) is None else own
    taken = own if speculation.type == DRAFT else None
    head = serving if "mtp" in speculation.kinds else next(iter(heads), None)
    left = []
    for name in [name for name in named if name and name not in {serving, head}]:
        reason: str | None = f"a sweep tries only one draft model: {taken}"
        if name in heads:
            reason = "MTP drafts with another file, or with the model's own block"
        elif taken is None:
            reason = _why_unfit(ctx, base, read[name])
        if reason is None:
            taken = name
        else:
            left.append(Left(name, reason))
    why = None if taken is not None else "; ".join(one.reason for one in left) or _NONE_NAMED
    used = sorted(facts[name].identity.sha256 for name in facts.keys() & {serving, head, taken})
    return Drafter(taken, why, head, tuple(used), tuple(left))


def _read(ctx: Context, base: Plan, name: str) -> ModelFacts | str:
    """What a file says of itself, or why it cannot be read."""
    try:
        models = ModelFiles(ctx.paths.cache_dir, ctx.files)
        return models.read_facts(locate(ctx, name, base.resolved))
    except ModelFileError as error:
        return (error.cause or error.message).splitlines()[0]


def _why_unfit(ctx: Context, base: Plan, found: ModelFacts | str) -> str | None:
    """Why a file is no draft model for the model; None where it is."""
    if isinstance(found, str):
        return found
    target, draft = (one.identity.files[0].path for one in (base.facts, found))
    models = ModelFiles(ctx.paths.cache_dir, ctx.files)
    if found.no_model is None and (apart := models.why_vocabularies_differ(target, draft)):
        return f"its vocabulary is not the model's: {apart}"
    if found.no_model is None and found.file_bytes >= base.facts.file_bytes:
        return "it is not smaller than the model that it would draft for"
    return found.no_model


WHAT = "frozen placement"
_NO_GPU = "there is no GPU: everything lies in RAM"


@dataclass(frozen=True, slots=True)
class Placements:
    """Alternatives for the build that serves; `searched` are the keys that they change."""

    alternatives: tuple[Extra, ...] = ()
    searched: frozenset[str] = frozenset()
    left: tuple[Left, ...] = ()
    messages: tuple[Message, ...] = ()

    def left_with(self, others: Collection[str]) -> tuple[Left, ...]:
        """What is left out, told for other builds as well."""
        if not self.alternatives or self.searched:
            return self.left
        reason = "another build's fit chose it, and this build counts layers differently"
        return (*self.left, *(Left(f"{name}, {WHAT}", reason) for name in sorted(others)))


def _placements_of(ctx: Context, base: Plan, kept: Collection[str]) -> Placements:
    """What to try beside the present placement.

    Args:
        ctx: Where.
        base: What serves.
        kept: Keys that stay as they are.
    """
    by_hand = keys_by_hand(base.resolved)
    reason = _why_not(base, by_hand, kept)
    if reason is not None:
        return Placements(left=(Left(WHAT, reason),))
    if by_hand:
        return _back_to_fit(by_hand)
    found = _frozen(ctx, base)
    if not isinstance(found, Frozen):
        return Placements(left=(Left(WHAT, found),))
    remark = f"; {found.remark}" if found.remark else ""
    text = (
        f"speculation on and off are also compared with the same placement, {found.text}, which fit chose "
        f"according to {found.found_by}{remark}"
    )
    pairs = frozenset(found.values.items())
    return Placements((pairs,), messages=(note("frozen-placement", text),))


def _is_found_by_tunerd(base: Plan, keys: Collection[str]) -> bool:
    """Whether keys were set by nobody but an earlier promotion."""
    settings = [base.resolved.settings[key] for key in keys]
    return all(one.origin.layer is Layer.TUNED and not one.replaced for one in settings)


def _why_not(base: Plan, by_hand: Collection[str], kept: Collection[str]) -> str | None:
    pinned = sorted((PLACEMENT_KEYS | {FIT, "memory.fit"}) & set(kept))
    reason = _no_fit(base) or (f"{pinned[0]} is pinned" if pinned else None)
    if reason is not None or by_hand:
        return reason
    capabilities, memory = base.engine.capabilities, base.resolved.profile.memory
    asks_for_fit = memory.fit is True or memory.fit_mib is not None
    if capabilities is None or not (asks_for_fit or capabilities.fit_default_on):
        return "it is served without fit"
    if capabilities.first_of("--n-gpu-layers", "--gpu-layers") is None:
        return f"{base.engine.name} has no flag for layers on the GPU"
    return None


def _back_to_fit(by_hand: Collection[str]) -> Placements:
    """An earlier promotion froze it: fit is the alternative."""
    pairs = frozenset((key, LEFT_TO_FIT) for key in by_hand)
    text = f"fit is tried again besides the placement that an earlier sweep found ({', '.join(by_hand)})"
    return Placements((pairs,), frozenset(by_hand), messages=(note("fit-again", text),))


def _frozen(ctx: Context, base: Plan) -> Frozen | str:
    """What fit chose, from the log of the running server, else as the memory estimate says."""
    capabilities, profile = base.engine.capabilities, base.resolved.profile
    if capabilities is not None:
        laws = laws_of(capabilities)
        uses_mtp = "mtp" in profile.speculation.kinds
        said = read_fit(load_lines(ctx))
        told = frozen_from_log(said, base.facts, laws, uses_mtp=uses_mtp)
        if told is not None:
            return told
    draft = draft_facts(ctx, base.command)
    settings = settings_of(base.resolved, base.engine, draft, base.host, has_gpu=True)
    free = base.memory.free_mib.get(Device.GPU)
    margin = profile.memory.fit_mib if profile.memory.fit_mib is not None else USUAL_MARGIN_MIB
    return frozen_from_estimate(base.facts, settings, free, margin)


# More of these needs less VRAM and more RAM, where more of anything else needs more.
_TO_RAM = frozenset({EXPERTS, "memory.n_cpu_ffn"})
_USELESS = (Effect.NO_EFFECT, Effect.FAILED)


@dataclass(frozen=True, slots=True)
class Seen:
    """The builds with their facts; those among them that take settings of drafts with a request.

    `builds` are they themselves.
    """

    engines: tuple[EngineFacts, ...]
    identities: Mapping[str, str | None]
    per_request: frozenset[str]
    builds: Mapping[str, Engine]


def _plan_with(ctx: Context, request: PlanRequest, changes: Mapping[str, Any]) -> Plan:
    """The plan of a profile with some keys changed.

    Raises:
        TunerdError: there is none.
    """
    return make_plan(ctx, replace(request, options={**request.options, **changes}))


@dataclass(frozen=True, slots=True)
class _Builds:
    """What can be tried with each installed build.

    Attributes:
        ctx: Where.
        request: What serves now, as it would be planned.
        base: Its plan.
        ranges: Values to try, by key; none of keys that are not searched.
        drafter: The draft model, if there is one.
        proves: Whether builds that were not tried yet are tried now, on a tiny model.
    """

    ctx: Context
    request: PlanRequest
    base: Plan
    ranges: Mapping[str, tuple[Any, ...]]
    drafter: Drafter
    proves: bool

    def seen(self, placements: tuple[Extra, ...]) -> Seen:
        """Facts of every build, the base's own first, which may have whole placements to try."""
        name, listed = self.base.engine.name, self.ranges.get(ENGINE)
        others = (engine for engine in find_engines(self.ctx) if engine.name != name)
        facts, identities, per_request, builds = [], {}, set(), {}
        for engine in (self.base.engine, *others):
            is_base = engine.name == name
            if not is_base and listed is not None and engine.name not in listed:
                facts.append(EngineFacts(engine.name))
                continue
            known = self._proved(engine)
            found = self._facts(known, is_base=is_base)
            facts.append(replace(found, placements=placements) if is_base else found)
            builds[engine.name] = engine
            identities[engine.name] = None if known.identity is None else known.identity.sha256
            proofs = (known.proof(one).effect for one in ("per-request", "per-request p-min"))
            if all(one is Effect.PROVED for one in proofs):
                per_request.add(engine.name)
        return Seen(tuple(facts), identities, frozenset(per_request), builds)

    def _proved(self, engine: Engine) -> Engine:
        """The build with its proofs, tried now where speculation could matter and nobody tried it."""
        capabilities = engine.capabilities
        has_mtp = capabilities is not None and capabilities.spec_word("mtp")
        has_block = self.base.facts.has_mtp or self.drafter.head is not None
        matters = self.proves and has_block and has_mtp
        if not matters or engine.proof("mtp").effect is not Effect.UNTRIED:
            return engine
        from tunerd.engine.prove import prove_engine

        return prove_engine(self.ctx, engine)

    def _facts(self, engine: Engine, *, is_base: bool) -> EngineFacts:
        own = {} if is_base else {ENGINE: [engine.name]}
        if engine.is_embedded and self.base.has_gpu:
            return EngineFacts(engine.name, problem="it uses no GPU")
        reason = None if is_base else self._refusal(own, engine.name)
        if reason is not None:
            return EngineFacts(engine.name, problem=reason)
        return EngineFacts(
            name=engine.name,
            kinds=self._kinds(engine, own),
            ignored={
                key: f"{name} has no effect on this build: {engine.proof(name).detail}"
                for name, key in (("n-max", N_MAX), ("p-min", P_MIN))
                if engine.proof(name).effect in _USELESS
            },
            refused=dict(self._refused(own, engine.name)),
        )

    def _kinds(self, engine: Engine, own: Mapping[str, Any]) -> dict[str, str | None]:
        """Kinds of speculation, with the reason why a build cannot have them."""
        current = self.base.resolved.profile.speculation.type or OFF
        listed = tuple(str(one) for one in self.ranges.get(TYPE, ()))
        drafts = (DRAFT,) if self.drafter.name or self.drafter.left else ()
        kinds = dict.fromkeys((current, OFF, "mtp", *drafts, *listed))
        found = {kind: self._kind_out(engine, kind) for kind in kinds}
        for kind, name in self.drafter.by_kind.items():
            if kind != current and found.get(kind, "") is None:
                keys = {**own, TYPE: kind, DRAFT_MODEL: name}
                found[kind] = self._refusal(keys, engine.name)
        return found

    def _kind_out(self, engine: Engine, kind: str) -> str | None:
        """Why a build cannot have a kind of speculation with this model; None where it can."""
        if kind == OFF:
            return None
        if engine.capabilities is None or engine.capabilities.spec_word(kind) is None:
            return "this build has no such speculation"
        if kind == "mtp":
            if not self.base.facts.has_mtp and self.drafter.head is None:
                return "the model has no MTP block"
            proof = engine.proof("mtp")
            return proof.detail if proof.effect in _USELESS else None
        if kind == DRAFT:
            return self.drafter.reason
        named = self.base.resolved.profile.speculation.draft_model
        return _NONE_NAMED if kind in KINDS_WITH_DRAFT_FILE and named is None else None

    def _refused(
        self, own: Mapping[str, Any], engine: str
    ) -> Iterator[tuple[tuple[str, Any], str]]:
        """Values that would not be deployed: too much memory, or more than the build takes.

        What is too much stays too much for larger values, so the largest is tried first; where a larger
        one needs less VRAM and more RAM, both ends are.
        """
        for key, values in {**USUAL_RANGES, **self.ranges}.items():
            if key in {TYPE, ENGINE, FIT, DRAFT_MODEL} or not values:
                continue
            is_number = all(isinstance(value, int | float) for value in values)
            orders = [sorted(values, reverse=True)] if is_number else [list(values)]
            if key in _TO_RAM:
                orders.append(sorted(values))
            keys = KV_KEYS if key in KV_KEYS else (key,)
            for ordered in orders:
                for value in ordered:
                    reason = self._refusal({**own, **dict.fromkeys(keys, value)}, engine)
                    if reason is not None:
                        yield (key, value), reason
                    elif is_number:
                        break

    def _refusal(self, changes: Mapping[str, Any], engine: str) -> str | None:
        """Why this would not be deployed; None where it would."""
        plan, now = self.base, self.base.resolved.settings
        # A plan has the build run; that of what is so already is there.
        if any(key not in now or now[key].value != value for key, value in changes.items()):
            try:
                plan = _plan_with(self.ctx, self.request, changes)
            except TunerdError as error:
                return (error.cause or error.message).splitlines()[0]
        if plan.engine.name != engine:
            return f"{engine} cannot serve it; {plan.engine.name} would serve instead"
        errors = [one.text for one in plan.messages if one.level is Level.ERROR]
        return errors[0] if errors else None


def _frozen_keys(
    base: Plan, ranges: Mapping[str, tuple[Any, ...]], *, for_context: bool = False
) -> dict[str, str]:
    """Keys that cannot be searched on this machine, or are not, with the reason."""
    reasons = {key: _pointless(key, base) for key in sorted(PLACEMENT_KEYS & set(ranges))}
    if CONTEXT_SIZE in ranges and not for_context:
        reasons[CONTEXT_SIZE] = "less context is no gain; `--goal context` looks for the largest"
    return {key: why for key, why in {FIT: _no_fit(base), **reasons}.items() if why is not None}


def _no_fit(base: Plan) -> str | None:
    """Why the engine does not choose what lies on the GPU: no margin can be searched, and nothing frozen."""
    if not base.has_gpu:
        return _NO_GPU
    keys = keys_by_hand(base.resolved)
    is_given = bool(keys) and not _is_found_by_tunerd(base, keys)
    if base.resolved.profile.memory.fit is False or is_given:
        given = ", ".join(keys) or "memory.fit = false"
        return f"the model is placed by hand: {given}"
    capabilities = base.engine.capabilities
    if capabilities is None or capabilities.fit is FitStyle.NONE:
        return f"{base.engine.name} does not place the model by itself"
    return None


def _pointless(key: str, base: Plan) -> str | None:
    """Why a listed key of placement changes nothing here."""
    if not base.has_gpu:
        return _NO_GPU
    if key in {EXPERTS, "memory.cpu_moe"} and not base.facts.is_moe:
        return "the model has no experts"
    return None


_LEAST_RUNS = 2  # what serves now and one more
_SEED_BITS = 32
# Of a load that nobody saw yet: a start, and a disk that reads so many bytes a second.
_START_S = 3.0
_DISK_BYTES_S = 200e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What is asked for; `space` are `KEY=VALUES` as typed, `seed` None is a fresh one.

    `window` are times of day such as `01:00-06:30`: production serves again by its end. With `at_least_tok_s`
    the largest context is looked for that holds this speed, instead of the fastest settings.
    """

    budget_s: float
    workload: str | None = None
    space: tuple[str, ...] = ()
    seed: int | None = None
    start_after: bool = False
    window: str | None = None
    at_least_tok_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What serves, as it would be planned again, and the workload by which it is measured.

    `messages` say where that is from, and what of it was cut.
    """

    generation: Generation
    plan_request: PlanRequest
    base_plan: Plan
    outlook: Outlook
    shape: WorkloadShape
    workload: Workload
    messages: tuple[Message, ...]


def standing(ctx: Context, workload: str | None, *, start_after: bool = False) -> Standing:
    """What serves; how long it would be away is not known yet.

    Raises:
        UsageError: nothing does that tunerd deployed from a profile, or there is no such workload.
        DeployError: it would not come back by itself, or is no longer what was deployed.
    """
    generation = _serving(ctx)
    if not is_locked(ctx.paths.measure_lock):
        wait_for_dead_measurement(ctx)
    request = request_again(generation)
    ahead = outlook(ctx, measuring_s=0.0, start_after=start_after)
    plan = compare.plan_side(ctx, compare.SideRequest(LIVE, request, generation))
    shape, told = workload_for(ctx, workload, plan.resolved)
    fits, cut = compare.fitting(shape, [compare.context_tokens(plan)])
    return Standing(
        generation=generation, plan_request=request, base_plan=plan, outlook=ahead, shape=shape,
        workload=fits, messages=(told, *cut),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSweep(Standing):
    """A sweep that could begin.

    `basis` is a hash over what its samples depend on beside the arm: samples of another night with
    the same basis still hold. `wanted` is what the profile says of each key, by build. `power_limits_w` are measured
    after the search; `known` are laws by family to begin with.
    """

    request: SweepRequest
    space: SpacePlan
    seen: Seen
    wanted: Mapping[str, Mapping[str, Any]]
    policy: Policy
    seed: int
    basis: str
    load_s: float
    forecast: Forecast
    deadline: Deadline | None = None
    power_limits_w: tuple[float, ...] = ()
    known: Mapping[tuple[str, str], Known] = field(default_factory=dict)

    @property
    def base(self) -> Base:
        """What serves now."""
        return self.space.base

    @property
    def question(self) -> str:
        """What a person is asked before it begins: how far it gets, and the time without service."""
        room = f" ({self.forecast.text})" if self.forecast.can_decide else ""
        wanted = self.request.at_least_tok_s
        what = "" if wanted is None else f" for the largest context that holds {wanted:g} tok/s"
        return (
            f"A sweep of {self.shape.name}{what} for {format_duration(self.outlook.measuring_s)} at most over "
            f"{counted(self.space.n_points, 'configuration')}{room}: {self.outlook.text}. Go on?"
        )


def prepare(
    ctx: Context, request: SweepRequest, *, proves: bool, for_resume: bool = False
) -> PreparedSweep:
    """Plans a sweep; nothing is touched, but builds may be tried on a tiny model.

    Raises:
        UsageError: nothing serves that tunerd deployed from a profile, or an option is wrong.
        ConfigError: the profile's [sweep] table is wrong.
        DeployError: production would not come back by itself, or is no longer what was deployed.
    """
    _check_budget(ctx, request)
    found = standing(ctx, request.workload, start_after=request.start_after)
    base_plan, workload = found.base_plan, found.workload
    choice = _choice(ctx, request, found, proves=proves)
    space = choice.space
    ahead, deadline, load_s = _time_for(ctx, request, found, choice)
    predicted = forecast(
        workload, ahead.measuring_s, load_s=load_s, rates=rates_seen(ctx, base_plan.resolved.name),
        n_families=len(space.space.families), min_gain=ctx.settings.sweep.min_gain,
    )  # fmt: skip
    known, published_by = _published(ctx, base_plan, space, workload)
    messages = [*found.messages, *published_by, *choice.messages]
    if closed := why_closed(ctx, request.window):
        messages.insert(0, warning("window", closed))
    if not predicted.can_decide and not for_resume:
        messages.append(warning("short", predicted.text, "--budget gives it more time"))
    return PreparedSweep(
        request=request,
        generation=found.generation,
        plan_request=found.plan_request,
        base_plan=base_plan,
        space=space,
        seen=choice.seen,
        wanted={
            name: _values_of(
                base_plan.resolved
                if name == base_plan.engine.name
                else _profile_for(ctx, found.plan_request, build)
            )
            for name, build in choice.seen.builds.items()
            if name in _engines(space)
        },
        shape=found.shape,
        workload=workload,
        policy=_policy(ctx, request, found, choice),
        seed=secrets.randbits(_SEED_BITS) if request.seed is None else request.seed,
        basis=_basis(ctx, request, found, choice),
        outlook=ahead,
        load_s=load_s,
        forecast=predicted,
        messages=tuple(messages),
        deadline=deadline,
        power_limits_w=choice.power_limits_w,
        known=known,
    )


def _policy(ctx: Context, request: SweepRequest, found: Standing, choice: _Choice) -> Policy:
    settings, base, plan = ctx.settings.sweep, choice.space.base, found.base_plan
    policy = Policy(
        min_gain=settings.min_gain,
        headroom_mib=settings.headroom_mib,
        may_change_output=settings.may_change_output,
        context_tokens=compare.context_tokens(plan),
        seeds=_seeds(ctx, found.plan_request, base, plan),
        rejected=tuple(failed_arms(ctx, found.plan_request.profile, choice.seen.identities)),
        at_least_tok_s=request.at_least_tok_s,
        n_slots=compare.slots(plan),
    )
    others = _imported(ctx, plan, base.arm, build_grid(choice.space.space, base.arm, policy))
    return replace(policy, seeds=(*policy.seeds, *others))


def _time_for(
    ctx: Context, request: SweepRequest, found: Standing, choice: _Choice
) -> tuple[Outlook, Deadline | None, float]:
    """What lies ahead of production, when the sweep must have ended, and what a start takes [s]."""
    ahead = found.outlook
    load_s = ahead.load_s or _START_S + (found.base_plan.facts.file_bytes or 0) / _DISK_BYTES_S
    engines, seen = _engines(choice.space), choice.seen.builds
    deadline = deadline_of(ctx, request.window, load_s=load_s, changes_program=len(engines) > 1)
    window_s = math.inf if deadline is None else deadline.measuring_s(ctx.clock.now_s())
    ahead = replace(ahead, measuring_s=min(request.budget_s, window_s))
    used = [seen[name] for name in sorted(engines) if name in seen]
    return beside_others(ctx, ahead, used), deadline, load_s


@dataclass(frozen=True, slots=True)
class _Choice:
    """What there is to choose from, of whom it was asked, and what people should know of it."""

    space: SpacePlan
    seen: Seen
    drafter: Drafter
    messages: tuple[Message, ...]
    power_limits_w: tuple[float, ...] = ()


def _choice(ctx: Context, request: SweepRequest, found: Standing, *, proves: bool) -> _Choice:
    base_plan, resolved = found.base_plan, found.base_plan.resolved
    for_context = request.at_least_tok_s is not None
    ranges = {key: values_of(key, given) for key, given in resolved.profile.sweep.items()}
    ranges |= _typed(_SPACE, ctx.settings.sweep.space) | _typed("--space", request.space)
    limits = limits_of(ctx, ranges.pop(POWER_LIMIT, ()))
    pins = _kept(ctx.settings.sweep.keep) | {
        key: str(resolved.origin(key) or "a pin") for key in sorted(resolved.pins)
    }
    listed = ranges.get(CONTEXT_SIZE, ())
    if for_context:
        ranges[CONTEXT_SIZE] = _sizes(base_plan, ranges, pins, found.workload)
    frozen = _frozen_keys(base_plan, ranges, for_context=for_context)
    strangers = _name_engines(ctx, ranges)
    drafter = _drafter_of(ctx, base_plan, ranges)
    placements = _placements_of(ctx, base_plan, pins)
    searched = {key: values for key, values in ranges.items() if key not in frozen}
    builds = _Builds(ctx, found.plan_request, base_plan, searched, drafter, proves)
    seen = builds.seen(placements.alternatives)
    base = _base(base_plan, resolved, placements.searched | set(ranges))
    if for_context:
        own = frozenset({(CONTEXT_SIZE, _context_size(base_plan))})
        base = replace(base, arm=replace(base.arm, extra=base.arm.extra | own))
    wishes = Wishes(
        ranges=ranges,
        pins=pins,
        frozen=frozen,
        may_change_output=ctx.settings.sweep.may_change_output,
        drafters=drafter.by_kind,
    )
    space = plan_space(base, seen.engines, wishes)
    if for_context:
        why = "less than the workload needs, or more than the model was trained for"
        out = [one for one in listed if one not in ranges[CONTEXT_SIZE]]
        left = (*space.left_out, *(Left(f"{CONTEXT_SIZE} = {one}", why) for one in out))
        return _Choice(_for_context(replace(space, left_out=left)), seen, drafter, (), limits)
    others = {engine for engine, _ in space.space.families} - {base_plan.engine.name}
    left = (*space.left_out, *strangers, *drafter.left, *placements.left_with(others))
    return _Choice(replace(space, left_out=left), seen, drafter, placements.messages, limits)


def _name_engines(ctx: Context, ranges: dict[str, tuple[Any, ...]]) -> list[Left]:
    """Put the engines that are meant by families and paths into `ranges`; what is left out are words for none."""
    if ENGINE not in ranges:
        return []
    installed = find_engines(ctx)
    meant = {word: engines_meant(installed, word) for word in ranges[ENGINE]}
    ranges[ENGINE] = tuple(one.name for found in meant.values() for one in found)
    return [Left(f"{ENGINE} = {word}", "no such engine here") for word in meant if not meant[word]]


def plan_arm(ctx: Context, prepared: PreparedSweep, arm: Arm) -> Plan:
    """What would be deployed for an arm.

    Raises:
        EngineError: another engine than the arm's would serve it.
        ConfigError: the profile does not allow it.
        LeaseEnded: the engine is another build, or the profile says something else, than when the sweep began.
    """
    # One that the space does not have is refused below.
    wanted, build = prepared.wanted.get(arm.engine), prepared.seen.builds.get(arm.engine)
    build = build or prepared.base_plan.engine
    try:
        now = _profile_for(ctx, prepared.plan_request, build)
    except ConfigError as error:  # no refusal of this arm: nothing could be planned
        raise replaced_amid(error.words) from error
    if wanted not in (None, _values_of(now)):
        raise replaced_amid(f"profile `{prepared.plan_request.profile}` was edited since it began")
    plan = _plan_with(ctx, prepared.plan_request, changes(arm, prepared.base))
    if plan.engine.name != arm.engine:
        raise EngineError(f"{plan.engine.name} would serve this instead of {arm.engine}")
    then, build_now = prepared.seen.identities.get(arm.engine), plan.engine.identity
    if then is not None and (build_now is None or build_now.sha256 != then):
        raise replaced_amid(f"`{plan.engine.program}` was replaced by another build since it began")
    return plan


def _values_of(resolved: Resolved) -> Mapping[str, Any]:
    return {key: setting.value for key, setting in resolved.settings.items()}


def _profile_for(ctx: Context, request: PlanRequest, engine: Engine) -> Resolved:
    """The profile as it is served by this engine."""
    names = (str(engine.capabilities.family),) if engine.capabilities else ()
    return load_profile(
        ctx, request.profile, options=request.options, engine_names=(*names, engine.name),
        with_tuned=request.with_tuned,
    )  # fmt: skip


def demand_room(prepared: PreparedSweep) -> None:
    """There is something to try, and time for it: without, production would stop for nothing.

    Raises:
        UsageError: there is not.
    """
    if _is_exhausted(prepared):
        raise UsageError(
            "there is nothing to try",
            cause="\n".join(
                ["no configuration is left besides what serves",
                 *(f"{arm}: {reason}" for arm, reason in prepared.policy.rejected)]
            ),
            state="nothing was touched",
            hint="add values to [sweep] of the profile, or by --space; `tunerd sweep run --dry-run` shows what is left out",
        )  # fmt: skip
    predicted, left_s = prepared.forecast, prepared.outlook.measuring_s
    if predicted.starts >= _LEAST_RUNS:
        return
    is_cut = left_s < prepared.request.budget_s  # by its window
    least, whole = (math.ceil(seconds / 60) for seconds in (
        (_LEAST_RUNS + 0.5) * predicted.process_s, predicted.needed_s,
    ))  # fmt: skip
    raise UsageError(
        f"nothing can be found in {format_duration(left_s)}",
        cause=predicted.text,
        state="nothing was touched",
        hint="set a longer sweep.window, or try again another night" if is_cut
        else f"--budget {least}min measures a little, {whole}min can prove something",
    )  # fmt: skip


def _is_exhausted(prepared: PreparedSweep) -> bool:
    """Whether all that could be tried serves already, or was turned down for good."""
    families = prepared.space.space.families.values()
    if prepared.request.at_least_tok_s is not None or prepared.power_limits_w:
        return False
    if any(len(family.fit_mib) > 1 for family in families):  # margins are no points of the space
        return False
    grid = build_grid(prepared.space.space, prepared.space.base.arm, prepared.policy)
    known = {prepared.space.base.arm, *(arm.canonical() for arm, _ in prepared.policy.rejected)}
    return prepared.space.n_points <= sum(grid.contains(arm) for arm in known)


def plan_json(prepared: PreparedSweep) -> dict[str, Any]:
    """The plan of a sweep as scripts read it."""
    families = [
        {"engine": engine, "speculation": spec, **plain(one)}
        for (engine, spec), one in prepared.space.space.families.items()
    ]
    return {
        "profile": prepared.plan_request.profile,
        "generation": prepared.generation.number,
        "workload": prepared.shape.name,
        "budget_s": prepared.request.budget_s,
        "seed": prepared.seed,
        "incumbent": plain(prepared.base.arm),
        "incumbent_text": str(prepared.base.arm),
        "at_least_tok_s": prepared.request.at_least_tok_s,
        "families": families,
        "points": prepared.space.n_points,
        "power_limits_w": list(prepared.power_limits_w),
        "left_out": [asdict(one) for one in prepared.space.left_out],
        "per_request": sorted(prepared.seen.per_request),
        "seeds": [str(arm) for arm in prepared.policy.seeds],
        "rejected": [
            {"arm": str(arm), "reason": reason} for arm, reason in prepared.policy.rejected
        ],
        "forecast": asdict(prepared.forecast),
        "outlook": prepared.outlook.to_json(),
        "basis": prepared.basis,
    }


def _without_profile(made: Generation | None) -> str:
    if made is None:
        return "nothing was deployed"
    if made.unit_sha256 is None:
        return f"generation {made.number} ({made.reason}) removed the unit, and nothing serves"
    return "what serves was adopted as it was"


def _serving(ctx: Context) -> Generation:
    made = ctx.deployed()
    if made is None or made.profile is None:
        raise UsageError(
            "tunerd has deployed no profile here that a sweep could start from",
            cause=_without_profile(made),
            hint="`tunerd apply PROFILE` first; `tunerd profiles new` writes a profile",
        )
    return made


def _check_budget(ctx: Context, request: SweepRequest) -> None:
    most = ctx.settings.sweep.downtime_s
    if request.budget_s > most:
        raise UsageError(
            f"--budget {format_duration(request.budget_s)} is more than sweep.downtime_s allows: "
            f"{format_duration(most)}",
            hint="use a shorter budget, or set a larger sweep.downtime_s",
        )


_SPACE = "sweep.space"


def check_setting(ctx: Context, key: str, words: Sequence[str]) -> None:
    """Whether a sweep could go by what a setting would hold.

    Raises:
        UsageError, ConfigError: a list of values or keys is none, or there is no such workload.
    """
    if key == "sweep.workload":
        find_workload(ctx, words[0])
    _typed(_SPACE, words if key == _SPACE else ())
    _kept(words if key == "sweep.keep" else ())


def _typed(where: str, space: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values by key, as they were typed there.

    Raises:
        UsageError: they are none.
    """
    typed: dict[str, tuple[Any, ...]] = {}
    for option in space:
        key, values = _values(f"{where} {option}", option)
        if key in typed:
            hint = f"give all values of a key together: {key}=VALUE,VALUE"
            raise UsageError(f"{where} {option}: `{key}` was given twice", hint=hint)
        typed[key] = values
    return typed


def _values(place: str, option: str) -> tuple[str, tuple[Any, ...]]:
    key, equals, text = option.partition("=")
    key = SHORT_KEYS.get(key.strip(), key.strip())
    hint = "for example --space speculation.n_max=1,2,3"
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not equals or not words:
        raise UsageError(f"{place}: expected KEY=VALUE,VALUE", hint=hint)
    if key not in {*all_keys(), POWER_LIMIT}:
        raise UsageError(f"{place}: no profile key is called `{key}`", hint=hint)
    if key == "engine.prefer":
        return key, tuple(words)
    if key == POWER_LIMIT:
        return key, tuple(_watts(place, word) for word in words)
    values = [parse_options([f"{key}={word}"])[key] for word in words]
    for problem in wrong_values(place, key, values):
        raise UsageError(
            f"{place}: `{key}` cannot be {problem.found}",
            cause=f"allowed: {problem.allowed}",
            state="nothing was touched",
        )
    return key, values_of(key, Range(values=tuple(values)))


def _watts(place: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UsageError(f"{place}: `{word}` is not a number of watts") from None


def _kept(wanted: Sequence[str]) -> dict[str, str]:
    """Keys that the settings keep out of every sweep.

    Raises:
        ConfigError: one of them is no key.
    """
    known = all_keys()
    if (strange := next((key for key in wanted if key not in known), None)) is not None:
        text = f"sweep.keep: no profile key is called `{strange}`"
        raise ConfigError(text, state="nothing was touched")
    return dict.fromkeys(wanted, "sweep.keep")


def _engines(space: SpacePlan) -> set[str]:
    return {engine for engine, _spec in space.space.families} | {space.base.arm.engine}


def _base(plan: Plan, resolved: Resolved, searched: Collection[str] = ()) -> Base:
    capabilities = plan.engine.capabilities
    arm = base_arm(
        plan.engine.name,
        _values_of(resolved),
        has_gpu=plan.has_gpu,
        physical_cores=plan.host.cpu.physical_cores,
        default_n_max=capabilities.default_n_max if capabilities is not None else None,
        default_p_min=capabilities.default_p_min if capabilities is not None else None,
        searched=searched,
    )
    return base_of(arm, resolved)


def base_of(arm: Arm, resolved: Resolved) -> Base:
    """The arm that serves, with what its profile says."""
    values = _values_of(resolved)
    current = values.get(TYPE) or OFF
    return Base(arm, values, {spec_of(current): current})


def _seeds(ctx: Context, request: PlanRequest, base: Base, plan: Plan) -> tuple[Arm, ...]:
    """The profile without its tuned layer: what people published or wrote."""
    untuned = _profile_for(ctx, replace(request, with_tuned=False), plan.engine)
    arm = _base(plan, untuned, {key for key, _ in base.arm.placement}).arm
    placement = {key: LEFT_TO_FIT for key, _ in base.arm.placement} | dict(arm.placement)
    arm = replace(arm, extra=base.arm.extra - base.arm.placement | frozenset(placement.items()))
    return () if arm.canonical() == base.arm.canonical() else (arm,)


def _imported(ctx: Context, plan: Plan, base: Arm, grid: Grid) -> tuple[Arm, ...]:
    """What others measured of such a box and the space allows, the fastest first."""
    if not ctx.paths.imported_dir.is_dir():
        return ()
    entries = [entry for bundle in imported(ctx).values() for entry in bundle.entries]
    return candidates(entries, here_of(ctx, plan), base, grid.contains)


def _published(
    ctx: Context, plan: Plan, space: SpacePlan, workload: Workload
) -> tuple[dict[tuple[str, str], Known], list[Message]]:
    """The shipped laws of this model, and who published what they are fitted to."""
    name, told = (plan.facts.name or "").casefold(), list[Message]()
    found: dict[tuple[str, str], Known] = {}
    for path in sorted((ctx.data_dir / "profiles" / "laws").glob("*.toml")):
        table = tomllib.loads((ctx.files.read(path) or b"").decode())
        if not fnmatch(name, table["model"].casefold()):
            continue
        families = {
            engine.name: str(engine.capabilities.family)
            for engine in find_engines(ctx)
            if engine.capabilities is not None
            and (engine.name, table["spec"]) in space.space.families
        }
        laws = published(table, families, [gpu.name for gpu in cards_of(plan.host, plan)], workload)
        found |= laws
        text = f"the search starts from published figures: {table['source']}"
        told += [note("published", text)] if laws else []
    return found, told


def _context_size(plan: Plan) -> int:
    """What serves now asks for [tok].

    Raises:
        UsageError: it leaves that to the engine.
    """
    size = plan.resolved.profile.serving.ctx_size
    if size == 0:  # as trained
        size = plan.facts.context_length
    if not size:
        raise UsageError(
            "the engine chooses the context of what serves, so there is nothing to start from",
            state="nothing was touched",
            hint=f"set {CONTEXT_SIZE} in the profile, and `tunerd apply` it",
        )
    return size


def _sizes(
    plan: Plan, ranges: Mapping[str, tuple[Any, ...]], pins: Mapping[str, str], workload: Workload
) -> tuple[int, ...]:
    """Contexts to look at: those that are listed, else from what the workload needs up to the trained one [tok].

    Raises:
        UsageError: there is no choice.
    """
    own, n_slots = _context_size(plan), compare.slots(plan)
    least = n_slots * (max(one.depth_tokens for one in workload.classes) + compare.FRAME_TOKENS)
    listed = ranges.get(CONTEXT_SIZE)
    if CONTEXT_SIZE in pins:
        raise UsageError(
            f"{CONTEXT_SIZE} is pinned by {pins[CONTEXT_SIZE]}", state="nothing was touched",
            hint="`tunerd apply` the profile without that, or sweep for speed",
        )  # fmt: skip
    most = max(own, n_slots * (plan.facts.context_length or own))
    wanted = sizes_between(min(least, own), most) if listed is None else listed
    sizes = {own, *(int(one) for one in wanted if least <= int(one) <= most)}
    if len(sizes) == 1:
        raise UsageError(
            f"there is no context size to try besides {own}",
            cause=f"the workload needs {least} tokens, and the model was trained for {most}",
            state="nothing was touched",
            hint="give other sizes by --space serving.ctx_size=..., or a smaller --workload",
        )
    return tuple(sorted(sizes))


def _for_context(space: SpacePlan) -> SpacePlan:
    """What serves with other contexts, margins and cache types; all else stays as it is."""
    arm, own = space.base.arm, space.space.families[space.base.arm.family]
    sizes = [one for one in own.extra if {key for key, _ in one - arm.extra} <= {CONTEXT_SIZE}]
    extra = tuple(sorted(sizes, key=lambda one: int(dict(one)[CONTEXT_SIZE])))
    family = Family((arm.n_max,), (arm.p_min,), own.fit_mib, own.kv, (arm.ubatch,), (arm.batch,),
                    (arm.threads,), extra)  # fmt: skip
    left = [one for one in space.left_out if CONTEXT_SIZE in one.what or one.what in KV_KEYS]
    left.append(Left("all other settings", "they stay as they are; a sweep for speed tries them"))
    families = {arm.family: family}
    return replace(space, space=replace(space.space, families=families), left_out=tuple(left))


_MEASURED_KEYS = {"model", "serving", "speculation", "memory", "environment", "extra_args"}


def _basis(ctx: Context, request: SweepRequest, found: Standing, choice: _Choice) -> str:
    """A hash over what samples depend on beside the arm."""
    plan = found.base_plan
    values = {
        key: setting.value
        for key, setting in plan.resolved.settings.items()
        if key not in ARM_KEYS and key.partition(".")[0] in _MEASURED_KEYS
    }
    # An arm may start without the draft model, and a promoted one may need it: it has a place of its own.
    files = {
        key: stamp_of(path)
        for key, path in files_of(plan.command.argv)
        if key not in {"model.path", DRAFT_MODEL}
    }
    return digest(
        {
            "profile": plan.resolved.name,
            "values": plain(values),
            "files": files,
            "laid_over": _laid_over(ctx, plan),
            "engines": dict(choice.seen.identities),
            "model": plan.facts.identity.sha256,
            "gpus": [(gpu.name, gpu.total_mib, gpu.own_limit_w) for gpu in plan.host.gpus or ()],
            "driver": plan.host.driver_version,
            "cpu": plan.host.cpu.model,
            "workload": found.shape.sha256,
            **({"draft": ",".join(choice.drafter.files)} if choice.drafter.files else {}),
            # Its arms differ in context, of which the laws of a search for speed know nothing.
            **({} if request.at_least_tok_s is None else {"goal": "context"}),
        }
    )


def _laid_over(ctx: Context, plan: Plan) -> list[Any]:
    """What drop-ins and environment files make of a unit."""
    drop_ins = [ctx.files.read(path) for path in ctx.services.state(ctx.unit).drop_ins]
    variables = file_environment_of(
        ctx, unit_with(ctx, plan.unit_text), specifiers_of(ctx, ctx.unit)
    )
    return [list(map(sha256, drop_ins)), variables]
