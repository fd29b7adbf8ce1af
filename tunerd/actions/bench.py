"""`tunerd bench`: measures a server by a suite, keeps every sample, and says what it came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from tunerd.actions.bench_plan import BenchRequest
from tunerd.actions.bench_published import against_published, published_of
from tunerd.actions.bench_run import Measured
from tunerd.actions.bench_serving import beside_serving
from tunerd.actions.bench_session import BOTH_ARMS, OFF, ON, Confirm, Session
from tunerd.actions.bench_target import LIVE, open_live, open_url
from tunerd.actions.choose_engine import PlanRequest
from tunerd.actions.context import Context
from tunerd.actions.plan import make_plan
from tunerd.actions.results import arm_json, sample_json
from tunerd.core.bench.findings import SERVING, ArmData, figures, findings
from tunerd.core.bench.problems import count_problems
from tunerd.core.bench.request import Suite
from tunerd.core.bench.trust import count_marks
from tunerd.core.output_changes import changes_sampling
from tunerd.core.profile import Published
from tunerd.core.result import ActionResult, Level, Message, error, note, warning
from tunerd.errors import BenchError, UsageError
from tunerd.system.store import EvidenceStore


def bench_live(ctx: Context, asked: BenchRequest) -> ActionResult:
    """Measure the unit that serves now; nothing of it is changed.

    Raises:
        BenchError: it cannot be measured, or not trusted.
    """
    with _store(ctx) as store:
        opened = open_live(ctx)
        published = _published(ctx, asked, opened.profile)
        session = Session(ctx, asked, store)
        session.on_server(opened, LIVE)
        return result_of(session, LIVE, published)


def bench_url(ctx: Context, asked: BenchRequest, url: str) -> ActionResult:
    """Measure a server by its address.

    Raises:
        UsageError: it is no address.
        BenchError: it cannot be measured.
    """
    with _store(ctx) as store:
        published = _published(ctx, asked, None)
        session = Session(ctx, asked, store)
        session.on_server(open_url(ctx, url), url)
        return result_of(session, url, published)


def bench_profile(
    ctx: Context,
    asked: BenchRequest,
    request: PlanRequest,
    confirm: Confirm,
    *,
    start_after: bool = False,
) -> ActionResult:
    """Measure a profile as a candidate in the live unit's place, which serves again afterwards.

    Args:
        ctx: Where.
        asked: The suite.
        request: The profile.
        confirm: Called with how long there will be no service; raises where that is not wanted.
        start_after: Start the live unit afterwards even if it does not run now.

    Raises:
        BenchError: it cannot be measured.
        Preempted: somebody started the live unit, or the time ran out.
        Stranded: the live unit does not serve afterwards.
    """
    made = make_plan(ctx, request)
    plans = {request.profile: made}
    if asked.suite in BOTH_ARMS and made.resolved.profile.speculation.type not in {None, "off"}:
        without = replace(request, options={**request.options, "speculation.type": "off"})
        plans = {ON: made, OFF: make_plan(ctx, without)}
    for one in plans.values():
        if one.is_refused:
            _refuse(one.messages)
    published = _published(ctx, asked, made.resolved.name)
    beside = beside_serving(ctx, made, asked.suite)
    if asked.suite is Suite.QUALITY and beside.changes and beside.plan is not None:
        plans[SERVING] = beside.plan
        asked = replace(asked, with_own_sampling=changes_sampling(beside.changes))
    with _store(ctx) as store:
        session = Session(ctx, asked, store, messages=list(beside.messages))
        session.on_candidates(plans, confirm, start_after=start_after)
        return result_of(session, f"profile {request.profile}", published)


def _published(ctx: Context, asked: BenchRequest, profile: str | None) -> Published | None:
    """The published numbers where they are wanted, before anything is measured."""
    if not asked.is_against_published:
        return None
    if asked.suite not in {Suite.MTP, Suite.LENGTHS}:
        raise UsageError(
            f"nothing was published that suite `{asked.suite}` measures",
            hint="--suite mtp, or --suite lengths",
        )
    return published_of(ctx, profile)


def _refuse(messages: Sequence[Message]) -> None:
    first = next(one for one in messages if one.level is Level.ERROR)
    raise BenchError(
        "the profile cannot be deployed, so it is not measured",
        cause=first.text,
        state="nothing was touched",
        hint=first.hint or "`tunerd plan PROFILE`",
    )


@contextmanager
def _store(ctx: Context) -> Iterator[EvidenceStore]:
    ctx.files.make_folder(ctx.paths.state_dir)
    with EvidenceStore(ctx.paths.evidence) as store:
        yield store


def result_of(session: Session, target: str, published: Published | None) -> ActionResult:
    """What the samples came to; figures beside them are stored too."""
    if session.plan is None or session.run is None:
        raise BenchError("nothing was measured")
    arms = [_arm_data(session, name, one) for name, one in session.measured.items()]
    found = findings(session.plan, arms, session.shape)
    for record in found.records:
        session.store.add_summary(session.run, record)
    messages = [*session.messages, *_unusable(arms), *_unwatched(session)]
    messages += _without_times(session)
    has_any = any(sample.is_usable for arm in arms for sample in arm.samples)
    if not has_any:
        text = "no request could be measured undisturbed"
        messages.append(error("nothing-usable", text, "the reasons are listed with it"))
    beside = None
    if published is not None:
        family = session.opened[0].target.arm.family
        beside = against_published(published, session.plan.suite, arms[0], family)
    payload = {
        "run": session.run,
        "target": target,
        "suite": str(session.plan.suite),
        "seed": session.seed,
        "arms": [arm_json(arm) for arm in session.arms],
        "summary": figures(arms),
        **found.payload,
        "left_out": {arm.name: dict(count_marks(arm.samples)) for arm in arms},
        "against": None if beside is None else [{**asdict(one), "ratio": one.ratio}
                                               for one in beside],
        "samples": [{"arm": arm.name, **sample_json(sample)}
                    for arm in arms for sample in arm.samples],
    }  # fmt: skip
    return ActionResult("bench", payload, tuple(messages), 0 if has_any else 1, has_acted=True)


def _arm_data(session: Session, name: str, measured: Measured) -> ArmData:
    return ArmData(
        name=name,
        samples=measured.samples,
        answers=measured.answers,
        groups=measured.walls_ms,
        by_position=measured.acceptance_by_position,
        planned_free_mib=session.planned_free_mib.get(name),
    )


def _unwatched(session: Session) -> list[Message]:
    if all(one.traffic_seen for one in session.measured.values()):
        return []
    text = (
        "the server counts nothing (`--metrics` is off): others' requests show only while they run"
    )
    return [note("no-counters", text)]


def _without_times(session: Session) -> list[Message]:
    """llama-server tells its times with every answer; without them there is no speed to show."""
    found = []
    for opened in session.opened:
        name = opened.target.name
        usable = [one for one in session.measured[name].samples if one.is_usable]
        n = sum(one.timings is None or one.timings.predicted_ms is None for one in usable)
        if opened.target.is_llama and n:
            text = f"{name}: {n} of {len(usable)} answers came without the server's own times"
            hint = "no speed is shown for them; the client's clock is kept with the samples"
            found.append(warning("no-times", text, hint))
    return found


def _unusable(arms: Sequence[ArmData]) -> list[Message]:
    found = []
    for arm in arms:
        counts = count_marks(arm.samples)
        if counts:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in counts.items())
            found.append(warning("left-out", f"{arm.name}: left out of every figure: {reasons}"))
        for reason, n in count_problems(arm.samples).items():
            found.append(warning("no-answer", f"{arm.name}: no answer to {n}: {reason}"))
    return found
