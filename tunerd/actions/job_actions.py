"""What each job of the local API does: the action of the same command, with checked arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.job import JobKind, JobRequest, check_arguments
from tunerd.core.result import ActionResult, Message
from tunerd.core.swap import sha256
from tunerd.errors import DeployError

Arguments = Mapping[str, Any]


class Question(Exception):
    """An action has come as far as its question; `result` is what a person is shown and asked."""

    def __init__(self, result: ActionResult) -> None:
        super().__init__()
        self.result = result


def do(ctx: Context, request: JobRequest) -> ActionResult:
    """What the job asks for; with `ask` only as far as its question.

    Raises:
        TunerdError: as the action of that name.
    """
    check_arguments(request.arguments)
    try:
        return _ACTIONS[request.kind](ctx, request.arguments)
    except Question as question:
        return question.result


def shown_hash(diff: str) -> str:
    """What stands for the difference that somebody was shown before they said yes."""
    return sha256(diff.encode("utf-8", "surrogateescape")) or ""


def _put(ctx: Context, arguments: Arguments, text: str, messages: tuple[Message, ...] = ()) -> None:
    """Stop at the question, where that is what was asked for; else tell what goes on unasked."""
    if arguments.get("ask"):
        raise Question(ActionResult("question", {"question": text}, messages))
    ctx.say(text.removesuffix(" Go on?"))


def _as_shown(arguments: Arguments) -> Callable[[Any], None]:
    """Refuses to go on where the difference is another one than was shown."""
    shown = arguments.get("shown")

    def confirm(made: Any) -> None:
        if shown is not None and shown_hash(made.diff) != shown:
            raise DeployError(
                "what would change is no longer what was shown",
                cause="a profile, the machine or the unit changed in the meantime",
                state="nothing was changed",
                hint="look at it again",
            )

    return confirm


# Swaps


def _apply(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.apply import apply

    return apply(
        ctx,
        _plan_request(arguments),
        drain=not arguments.get("now", False),
        confirm=_as_shown(arguments),
        probation=arguments.get("probation", True),
    )


def _rollback(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.rollback import rollback

    return rollback(
        ctx,
        to=arguments.get("to"),
        drain=not arguments.get("now", False),
        confirm=_as_shown(arguments),
    )


def _promote(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.plan import Plan, plan_json
    from tunerd.actions.promote import promote

    check = _as_shown(arguments)

    def confirm(made: Plan) -> None:
        check(made)
        if arguments.get("ask"):
            shown = plan_json(made, with_explain=False)
            payload = {**shown, "question": f"Swap {ctx.unit} now?"}
            raise Question(ActionResult("question", payload, made.messages))

    return promote(
        ctx,
        arguments.get("sweep"),
        drain=not arguments.get("now", False),
        confirm=confirm,
        with_probation=arguments.get("probation", True),
    )


def _raise_margin(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.guard_raise import raise_margin

    return raise_margin(ctx)


def _recover(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.recover import recover

    return recover(ctx)


# Measurements


def _bench(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions import bench
    from tunerd.actions.bench_plan import BenchRequest
    from tunerd.core.bench.request import Suite

    asked = BenchRequest(
        suite=Suite(arguments["suite"]),
        repeats=arguments.get("repeats"),
        depth=arguments.get("depth"),
        seed=arguments.get("seed"),
        workload=arguments.get("workload"),
        is_against_published=arguments.get("published", False),
    )
    if "profile" not in arguments:
        return bench.bench_live(ctx, asked)
    return bench.bench_profile(
        ctx,
        asked,
        _plan_request(arguments),
        lambda text: _put(ctx, arguments, text),
        start_after=arguments.get("start_after", False),
    )


def _compare(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.compare import CompareRequest, check_limits, run_compare

    limits = check_limits(
        arguments["budget_s"], arguments["max_pairs"], float(arguments["tolerance"])
    )
    request = CompareRequest(
        words=tuple(arguments.get("sides", ())),
        base=arguments.get("base"),
        options=_typed(arguments.get("set", {})),
        workload=arguments.get("workload"),
        limits=limits,
        seed=arguments.get("seed"),
        start_after=arguments.get("start_after", False),
    )
    return run_compare(
        ctx, request, confirm=lambda one: _put(ctx, arguments, one.question, one.messages)
    )


def _sweep_run(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.sweep_run import run_sweep

    return run_sweep(
        ctx,
        _sweep_request(arguments),
        confirm=lambda one: _put(ctx, arguments, one.question, one.messages),
    )


def _sweep_resume(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.sweep_run import resume_sweep

    return resume_sweep(
        ctx,
        arguments.get("sweep"),
        confirm=lambda one: _put(ctx, arguments, one.question, one.messages),
    )


def _sweep_plan(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.sweep_run import sweep_plan

    return sweep_plan(ctx, _sweep_request(arguments))


def _sweep_start(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.sweep_unit import start_sweep

    return start_sweep(
        ctx,
        _sweep_request(arguments),
        confirm=lambda one: _put(ctx, arguments, one.question, one.messages),
    )


def _sweep_stop(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.sweep_unit import stop_sweep

    return stop_sweep(ctx)


def _sweep_watch(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.sweep_unit import watch_sweep

    for line in watch_sweep(ctx):
        ctx.say(line)
    return ActionResult("sweep watch", {})


def _doctor_deep(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.doctor import DeepRequest, doctor

    request = DeepRequest(
        arguments["budget_s"], lambda one: _put(ctx, arguments, one.question, one.messages)
    )
    return doctor(ctx, request)


def _decline(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.promote import decline

    return decline(ctx, arguments.get("sweep"), why=arguments.get("why"))


# Switches


def _run_now(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.schedule import begin_now

    return begin_now(ctx, confirm=lambda one: _put(ctx, arguments, one.question, one.messages))


def _schedule_set(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.schedule import KEYS, set_schedule

    return set_schedule(ctx, {KEYS[name]: value for name, value in arguments.items()})


def _skip_tonight(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.schedule import skip_tonight

    return skip_tonight(ctx, undo=arguments.get("undo", False))


def _guard_set(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.guard_set import set_guard

    return set_guard(ctx, arguments["guard"], arguments["policy"])


def _workload_learn(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.workloads import learn_workload

    return learn_workload(
        ctx, name=arguments["name"], days=arguments.get("days"), write=arguments["write"]
    )


def _notify_test(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.notices import try_notice

    return try_notice(ctx)


def _job_stop(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.jobs import stop_job

    return stop_job(ctx, arguments["job"])


# Looking


def _plan(ctx: Context, arguments: Arguments) -> ActionResult:
    from tunerd.actions.plan import plan

    return plan(ctx, _plan_request(arguments), with_explain=arguments.get("explain", False))


def _engines(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.engines import engines

    return engines(ctx)


def _prove(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.engines import engines

    return engines(ctx, prove=True)


def _detect(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.detect import detect

    return detect(ctx)


def _guard_check(ctx: Context, _arguments: Arguments) -> ActionResult:
    from tunerd.actions.guard_check import check

    return check(ctx)


def _plan_request(arguments: Arguments) -> Any:
    from tunerd.actions.choose_engine import PlanRequest

    return PlanRequest(
        arguments["profile"],
        dict(arguments.get("set", {})),
        with_tuned=not arguments.get("untuned", False),
    )


def _sweep_request(arguments: Arguments) -> Any:
    from tunerd.actions.sweep_plan import SweepRequest

    return SweepRequest(
        budget_s=float(arguments["budget_s"]),
        max_arms=arguments.get("max_arms"),
        workload=arguments.get("workload"),
        space=tuple(arguments.get("space", ())),
        seed=arguments.get("seed"),
        start_after=arguments.get("start_after", False),
        strategy=arguments.get("strategy", "physics"),
        window=arguments.get("window"),
    )


def _typed(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Options as they are typed on a command line."""
    return tuple(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in options.items()
    )


_ACTIONS: Mapping[JobKind, Callable[[Context, Arguments], ActionResult]] = {
    JobKind.APPLY: _apply,
    JobKind.ROLLBACK: _rollback,
    JobKind.PROMOTE: _promote,
    JobKind.RAISE_MARGIN: _raise_margin,
    JobKind.RECOVER: _recover,
    JobKind.BENCH: _bench,
    JobKind.COMPARE: _compare,
    JobKind.SWEEP_RUN: _sweep_run,
    JobKind.SWEEP_RESUME: _sweep_resume,
    JobKind.SWEEP_PLAN: _sweep_plan,
    JobKind.SWEEP_START: _sweep_start,
    JobKind.SWEEP_STOP: _sweep_stop,
    JobKind.SWEEP_WATCH: _sweep_watch,
    JobKind.DOCTOR_DEEP: _doctor_deep,
    JobKind.DECLINE: _decline,
    JobKind.RUN_NOW: _run_now,
    JobKind.SCHEDULE_SET: _schedule_set,
    JobKind.SKIP_TONIGHT: _skip_tonight,
    JobKind.GUARD_SET: _guard_set,
    JobKind.WORKLOAD_LEARN: _workload_learn,
    JobKind.NOTIFY_TEST: _notify_test,
    JobKind.JOB_STOP: _job_stop,
    JobKind.PLAN: _plan,
    JobKind.ENGINES: _engines,
    JobKind.PROVE: _prove,
    JobKind.DETECT: _detect,
    JobKind.GUARD_CHECK: _guard_check,
}
