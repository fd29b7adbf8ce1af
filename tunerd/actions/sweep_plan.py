"""Everything about a sweep that is known before production is stopped: space, cost, what stays and why."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from tunerd.actions.bench_plan import rates_seen
from tunerd.actions.choose_engine import PlanRequest
from tunerd.actions.compare_sides import LIVE, SideRequest, plan_side
from tunerd.actions.context import Context
from tunerd.actions.lease_outlook import Outlook, beside_others, outlook
from tunerd.actions.lease_record import wait_for_dead_measurement
from tunerd.actions.plan import Plan
from tunerd.actions.profile_layers import load_profile, parse_options
from tunerd.actions.sweep_draft import drafter_of
from tunerd.actions.sweep_facts import Seen, engine_facts, frozen_keys, plan_with
from tunerd.actions.sweep_hours import closed_text, deadline_of, window_of
from tunerd.actions.sweep_placement import placements_of
from tunerd.actions.tuned_layer import failed_arms
from tunerd.actions.workloads import workload_for
from tunerd.core.fingerprint_arguments import digest
from tunerd.core.generation import Generation
from tunerd.core.job import SHORT_KEYS
from tunerd.core.profile import Range
from tunerd.core.quantity import format_duration
from tunerd.core.resolve import Resolved
from tunerd.core.result import Message, note, warning
from tunerd.core.sweep import Arm, Policy
from tunerd.core.sweep.arm import LEFT_TO_FIT
from tunerd.core.sweep.forecast import Forecast, forecast
from tunerd.core.sweep.keys import ARM_KEYS, TYPE, Base, base_arm, changes, spec_of
from tunerd.core.sweep.sample import plain
from tunerd.core.sweep.space import SpacePlan, Wishes, plan_space, values_of
from tunerd.core.sweep.tpe import REQUIREMENT, TPE
from tunerd.core.sweep.tune import PHYSICS, STRATEGIES
from tunerd.core.window import Deadline, open_span
from tunerd.core.workload import Workload
from tunerd.core.workload_shape import WorkloadShape, fitted
from tunerd.errors import ConfigError, EngineError, UsageError
from tunerd.system.files import is_locked
from tunerd.system.store import open_to_read

_FRAME_TOKENS = 192
_LEAST_RUNS = 2  # what serves now and one more
_SEED_BITS = 32
# Of a load that nobody saw yet: a start, and a disk that reads so many bytes a second.
_START_S = 3.0
_DISK_BYTES_S = 200e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What is asked for; `space` are `KEY=VALUES` as typed, `seed` None is a fresh one.

    `window` are times of day such as `01:00-06:30`: production serves again by its end. `strategy` is
    who proposes: "physics" or "tpe".
    """

    budget_s: float
    max_arms: int | None = None
    workload: str | None = None
    space: tuple[str, ...] = ()
    seed: int | None = None
    start_after: bool = False
    window: str | None = None
    strategy: str = PHYSICS

    def to_json(self) -> dict[str, Any]:
        """As it is kept, so that it can be asked for again."""
        return {**asdict(self), "space": list(self.space)}


def request_from_json(data: Mapping[str, Any]) -> SweepRequest:
    """The request that `to_json` wrote."""
    return SweepRequest(**{**data, "space": tuple(data["space"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSweep:
    """A sweep that could begin.

    `basis` is a hash over what its samples depend on beside the arm: samples of another night with
    the same basis still hold.
    """

    request: SweepRequest
    generation: Generation
    plan_request: PlanRequest
    base_plan: Plan
    space: SpacePlan
    seen: Seen
    shape: WorkloadShape
    workload: Workload
    context_tokens: int | None
    policy: Policy
    seed: int
    basis: str
    outlook: Outlook
    load_s: float
    forecast: Forecast
    messages: tuple[Message, ...]
    deadline: Deadline | None = None

    @property
    def base(self) -> Base:
        """What serves now."""
        return self.space.base

    @property
    def question(self) -> str:
        """What a person is asked before it begins: how far it gets, and the time without service."""
        room = f" ({self.forecast.text})" if self.forecast.can_decide else ""
        return (
            f"A sweep of {self.shape.name} for {format_duration(self.outlook.measuring_s)} at most over "
            f"{self.space.n_points} configurations{room}: {self.outlook.text}. Go on?"
        )


def _check_strategy(request: SweepRequest) -> None:
    if request.strategy not in STRATEGIES:
        raise UsageError(
            f"there is no strategy {request.strategy!r}", hint=f"one of {', '.join(STRATEGIES)}"
        )
    if request.strategy == TPE and find_spec("optuna") is None:
        raise UsageError(
            "strategy tpe needs Optuna, which is not installed",
            hint=f"`{sys.executable} -m pip install '{REQUIREMENT}'`, or leave --strategy out",
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
    _check_strategy(request)
    generation = _serving(ctx)
    _check_budget(ctx, request)
    if not is_locked(ctx.paths.measure_lock):
        wait_for_dead_measurement(ctx)
    plan_request = PlanRequest(generation.profile or "", dict(generation.pins))
    ahead = outlook(ctx, measuring_s=request.budget_s, start_after=request.start_after)
    base_plan = plan_side(ctx, SideRequest(LIVE, plan_request, generation))
    resolved = base_plan.resolved
    ranges = _ranges(resolved, (*ctx.settings.sweep.space, *request.space))
    pins = _kept(ctx) | {key: _who(resolved, key) for key in sorted(resolved.pins)}
    frozen = frozen_keys(base_plan, ranges)
    drafter = drafter_of(ctx, base_plan, ranges)
    placements = placements_of(ctx, base_plan, pins)
    seen = engine_facts(
        ctx, plan_request, base_plan, ranges, proves=proves, frozen=frozen, drafter=drafter,
        placements=placements.alternatives,
    )  # fmt: skip
    base = _base(base_plan, resolved, placements.searched | set(ranges))
    settings = ctx.settings.sweep
    wishes = Wishes(
        ranges=ranges,
        pins=pins,
        frozen=frozen,
        may_change_output=settings.may_change_output,
        draft_model=drafter.name,
    )
    space = plan_space(base, seen.engines, wishes)
    others = {engine for engine, _ in space.space.families} - {base_plan.engine.name}
    left = (*space.left_out, *drafter.left, *placements.left_with(others))
    space = replace(space, left_out=left)
    shape, told = workload_for(ctx, request.workload, resolved)
    context = _context_tokens(base_plan)
    workload, cut = shape.plain(), tuple[int, ...]()
    if context is not None:
        workload, cut = fitted(workload, context, margin_tokens=_FRAME_TOKENS)
    basis = _basis(base_plan, seen, shape, drafter.sha256)
    policy = Policy(
        min_gain=settings.min_gain,
        headroom_mib=settings.headroom_mib,
        may_change_output=settings.may_change_output,
        context_tokens=context,
        seeds=_seeds(ctx, plan_request, space.base, base_plan),
        max_arms=request.max_arms,
        rejected=tuple(failed_arms(ctx, generation.profile or "", seen.identities)),
    )
    with_evidence = open_to_read(ctx.paths.evidence)
    try:
        rates = rates_seen(with_evidence, resolved.name) if with_evidence is not None else None
    finally:
        if with_evidence is not None:
            with_evidence.close()
    load_s = _load_s(ahead, base_plan)
    deadline = deadline_of(
        ctx, request.window, load_s=load_s, changes_program=len(_engines(space)) > 1
    )
    left_s = request.budget_s if deadline is None else deadline.measuring_s(ctx.clock.now_s())
    if left_s < request.budget_s:
        ahead = outlook(ctx, measuring_s=left_s, start_after=request.start_after)
    programs = [seen.programs[name] for name in sorted(_engines(space)) if name in seen.programs]
    ahead = beside_others(ctx, ahead, programs)
    predicted = forecast(
        workload, ahead.measuring_s, load_s=load_s, rates=rates,
        n_families=len(space.space.families), min_gain=settings.min_gain,
    )  # fmt: skip
    messages = [
        *_window_messages(ctx, request),
        told,
        *placements.messages,
        *_cut_messages(shape, cut, context),
    ]
    if not predicted.can_decide and not for_resume:
        messages.append(warning("short", predicted.text, "--budget for a longer one"))
    return PreparedSweep(
        request=request,
        generation=generation,
        plan_request=plan_request,
        base_plan=base_plan,
        space=space,
        seen=seen,
        shape=shape,
        workload=workload,
        context_tokens=context,
        policy=policy,
        seed=secrets.randbits(_SEED_BITS) if request.seed is None else request.seed,
        basis=basis,
        outlook=ahead,
        load_s=load_s,
        forecast=predicted,
        messages=tuple(messages),
        deadline=deadline,
    )


def plan_arm(ctx: Context, prepared: PreparedSweep, arm: Arm) -> Plan:
    """What would be deployed for an arm.

    Raises:
        EngineError: another engine than the arm's would serve it.
        ConfigError: the profile does not allow it.
    """
    plan = plan_with(ctx, prepared.plan_request, changes(arm, prepared.base))
    if plan.engine.name != arm.engine:
        raise EngineError(f"{plan.engine.name} would serve this instead of {arm.engine}")
    return plan


def demand_room(prepared: PreparedSweep) -> None:
    """There is time for what serves and one other: with less, production would stop for nothing.

    Raises:
        UsageError: there is not.
    """
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
        hint="a longer sweep.window, or a later night" if is_cut
        else f"--budget {least}min measures a little, {whole}min can prove something",
    )  # fmt: skip


def plan_json(prepared: PreparedSweep) -> dict[str, Any]:
    """The plan of a sweep as scripts read it."""
    families = [
        {
            "engine": engine,
            "speculation": spec,
            **{k: list(v) for k, v in _family_json(one).items()},
        }
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
        "families": families,
        "points": prepared.space.n_points,
        "left_out": [asdict(one) for one in prepared.space.left_out],
        "per_request": sorted(prepared.seen.per_request),
        "seeds": [str(arm) for arm in prepared.policy.seeds],
        "rejected": [
            {"arm": str(arm), "reason": reason} for arm, reason in prepared.policy.rejected
        ],
        "forecast": prepared.forecast.to_json(),
        "outlook": prepared.outlook.to_json(),
        "basis": prepared.basis,
    }


def _family_json(family: Any) -> dict[str, Sequence[Any]]:
    return {
        name: [sorted(map(list, one)) for one in family.extra]
        if name == "extra"
        else getattr(family, name)
        for name in family.__dataclass_fields__
    }


def _serving(ctx: Context) -> Generation:
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.profile is None:
        raise UsageError(
            "tunerd has deployed no profile here that a sweep could start from",
            cause="nothing was deployed" if entry is None else "what serves was adopted as it was",
            hint="`tunerd apply PROFILE` first; `tunerd profiles new` writes a profile",
        )
    return entry.generation


def _check_budget(ctx: Context, request: SweepRequest) -> None:
    most = ctx.settings.sweep.downtime_s
    if request.budget_s > most:
        raise UsageError(
            f"--budget {format_duration(request.budget_s)} is more than sweep.downtime_s allows: "
            f"{format_duration(most)}",
            hint="a shorter budget, or a larger sweep.downtime_s",
        )


def _ranges(resolved: Resolved, space: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values by key: the profile's table, and what was typed over it.

    Raises:
        ConfigError: a range of the profile is none.
        UsageError: a typed one is none.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for key, given in resolved.profile.sweep.items():
        try:
            found[key] = values_of(key, given)
        except ValueError as error:
            raise ConfigError(
                f'profile `{resolved.name}`: [sweep] "{key}": {error}', state="nothing was touched"
            ) from error
    for option in space:
        key, values = _typed(option)
        found[key] = values
    return found


def _typed(option: str) -> tuple[str, tuple[Any, ...]]:
    from tunerd.core.profile_check import all_keys

    key, equals, text = option.partition("=")
    key = SHORT_KEYS.get(key.strip(), key.strip())
    hint = "for example --space speculation.n_max=1,2,3"
    if not equals or not text:
        raise UsageError(f"--space {option}: expected KEY=VALUE,VALUE", hint=hint)
    if key not in all_keys():
        raise UsageError(f"--space {option}: no profile key is called `{key}`", hint=hint)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if key == "engine.prefer":
        return key, tuple(words)
    values = [parse_options([f"{key}={word}"])[key] for word in words]
    return key, values_of(key, Range(values=tuple(values)))


def _kept(ctx: Context) -> dict[str, str]:
    """Keys that the settings keep out of every sweep.

    Raises:
        ConfigError: one of them is no key.
    """
    from tunerd.core.profile_check import all_keys

    known, wanted = all_keys(), ctx.settings.sweep.keep
    for key in wanted:
        if key not in known:
            raise ConfigError(
                f"sweep.keep: no profile key is called `{key}`", state="nothing was touched"
            )
    return dict.fromkeys(wanted, "sweep.keep")


def _window_messages(ctx: Context, request: SweepRequest) -> list[Message]:
    window = window_of(ctx, request.window)
    if window is None or open_span(window, ctx.clock.now_s()) is not None:
        return []
    return [warning("window", closed_text(ctx, window, str(request.window)))]


def _engines(space: SpacePlan) -> set[str]:
    return {engine for engine, _spec in space.space.families} | {space.base.arm.engine}


def _base(plan: Plan, resolved: Resolved, searched: Collection[str] = ()) -> Base:
    values = {key: setting.value for key, setting in resolved.settings.items()}
    capabilities = plan.engine.capabilities
    arm = base_arm(
        plan.engine.name,
        values,
        has_gpu=plan.has_gpu,
        physical_cores=plan.host.cpu.physical_cores,
        default_n_max=capabilities.default_n_max if capabilities is not None else None,
        default_p_min=capabilities.default_p_min if capabilities is not None else None,
        searched=searched,
    )
    current = values.get(TYPE) or "off"
    return Base(arm, values, {spec_of(current): current})


def _load_s(ahead: Outlook, plan: Plan) -> float:
    return ahead.load_s or _START_S + (plan.facts.file_bytes or 0) / _DISK_BYTES_S


def _who(resolved: Resolved, key: str) -> str:
    origin = resolved.origin(key)
    return str(origin) if origin is not None else "a pin"


def _seeds(ctx: Context, request: PlanRequest, base: Base, plan: Plan) -> tuple[Arm, ...]:
    """The profile without its tuned layer: what people published or wrote."""
    names = (str(plan.engine.capabilities.family),) if plan.engine.capabilities else ()
    untuned = load_profile(
        ctx, request.profile, options=request.options,
        engine_names=(*names, plan.engine.name), with_tuned=False,
    )  # fmt: skip
    arm = _base(plan, untuned, {key for key, _ in base.arm.placement}).arm
    left = {(key, LEFT_TO_FIT) for key, _ in base.arm.placement - arm.placement}
    placement = {**dict(left), **dict(arm.placement)}.items()
    arm = replace(arm, extra=base.arm.extra - base.arm.placement | frozenset(placement))
    return () if arm.canonical() == base.arm.canonical() else (arm,)


def _context_tokens(plan: Plan) -> int | None:
    serving = plan.resolved.profile.serving
    if not serving.ctx_size:
        return None
    return serving.ctx_size // (1 if serving.kv_unified else serving.n_parallel or 1)


def _basis(plan: Plan, seen: Seen, shape: WorkloadShape, draft_sha256: str | None) -> str:
    """A hash over what samples depend on beside the arm."""
    values = {
        key: setting.value
        for key, setting in plan.resolved.settings.items()
        if key not in ARM_KEYS and key.partition(".")[0] in {"model", "serving", "memory", "environment"}
    }  # fmt: skip
    return digest(
        {
            "values": plain(values),
            "engines": dict(seen.identities),
            "model": plan.facts.identity.sha256,
            "gpus": [gpu.name for gpu in plan.host.gpus or ()],
            "driver": plan.host.driver_version,
            "cpu": plan.host.cpu.model,
            "workload": shape.sha256,
            **({} if draft_sha256 is None else {"draft": draft_sha256}),
        }
    )


def _cut_messages(shape: WorkloadShape, cut: Sequence[int], context: int | None) -> list[Message]:
    if context is None:
        return [note("context-unknown", "the engine chooses the context; it may be too small")]
    return [
        warning("workload-cut", f"`{shape.classes[index].name}` of {shape.name} does not fit into "
                f"{context} tokens of context and is measured shorter", "--workload for a smaller one")
        for index in cut
    ]  # fmt: skip
