"""Every route of the local API as a table: where, what for, what it takes, and who answers.

The OpenAPI description is made of the same table, so it cannot say anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel

from tunerd.actions.context import Context
from tunerd.actions.jobs import list_jobs, read_job
from tunerd.core.job import JobKind, check_options
from tunerd.core.result import ActionResult
from tunerd.web import api_models as models
from tunerd.web.gate import Visitor
from tunerd.web.reads import Answer, Reads


@dataclass(frozen=True, slots=True)
class Call:
    """A request after every check: names and numbers of the path, and the query or body."""

    visitor: Visitor
    path: Mapping[str, Any]
    query: Any


_STEPS_S = (60, 600, 3600, 21600)
_MOST_POINTS = 300
Read = Callable[[Reads, Call], Answer]


@dataclass(frozen=True, slots=True)
class ReadRoute:
    """A GET. `path` has `{name}` and `{number}` as parts."""

    path: str
    summary: str
    read: Read
    query: type[BaseModel] = models.NoQuery
    answer: type[BaseModel] = models.Envelope
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class JobRoute:
    """A POST that begins a job."""

    path: str
    summary: str
    kind: JobKind
    body: type[models.Body]


def _status(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.status import status

    return reads.here(status, "status")


def _history(reads: Reads, call: Call) -> Answer:
    from tunerd.actions.history import history

    return reads.here(lambda ctx: history(ctx, limit=call.query.limit), "history")


def _generation(reads: Reads, call: Call) -> Answer:
    from tunerd.actions.history import show

    return reads.here(lambda ctx: show(ctx, call.path["number"]), "history show")


def _difference(reads: Reads, call: Call) -> Answer:
    from tunerd.actions.history import diff

    return reads.here(lambda ctx: diff(ctx, call.path["one"], call.path["other"]), "history diff")


def _targets(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.rollback import list_targets

    return reads.here(list_targets, "rollback")


def _preview(reads: Reads, call: Call) -> Answer:
    from tunerd.actions.rollback import preview

    return reads.here(lambda ctx: preview(ctx, call.query.to), "rollback")


def _plan(reads: Reads, call: Call) -> Answer:
    given = call.query.model_dump(exclude_none=True)
    arguments = {"profile": call.path["profile"], **given}
    return reads.by_job(JobKind.PLAN, arguments, call.visitor.name)


def _verify(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.verify import verify

    return reads.here(verify, "verify")


def _doctor(reads: Reads, _call: Call) -> Answer:
    return reads.apart("doctor")


def _profiles(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.profiles import list_profiles

    return reads.here(list_profiles, "profiles list")


def _profile(reads: Reads, call: Call) -> Answer:
    from tunerd.actions.profiles import show_profile

    name, options = call.path["profile"], call.query.set or {}

    def read(ctx: Context) -> ActionResult:
        check_options(options)
        return show_profile(ctx, name, options=options)

    return reads.here(read, "profiles show")


def _engines(reads: Reads, call: Call) -> Answer:
    return reads.by_job(JobKind.ENGINES, {}, call.visitor.name)


def _detect(reads: Reads, call: Call) -> Answer:
    return reads.by_job(JobKind.DETECT, {}, call.visitor.name)


def _results(reads: Reads, call: Call) -> Answer:
    return reads.apart("results", "list", *_all(call))


def _stale(reads: Reads, call: Call) -> Answer:
    return reads.apart("results", "stale", *_all(call))


def _all(call: Call) -> tuple[str, ...]:
    return ("--all",) if call.query.all else ()


def _export(reads: Reads, call: Call) -> Answer:
    return reads.apart("results", "export", *call.query.runs.split(","))


def _report(reads: Reads, call: Call) -> Answer:
    runs = call.query.runs.split(",") if call.query.runs else ()
    more = () if call.query.check else ("--no-check",)
    return reads.apart("report", *runs, *more, "--output", "-")


def _result(reads: Reads, call: Call) -> Answer:
    return reads.apart("results", "show", str(call.path["number"]))


def _sweeps(reads: Reads, _call: Call) -> Answer:
    return reads.apart("sweep", "list")


def _sweep(reads: Reads, call: Call) -> Answer:
    return reads.apart("sweep", "show", str(call.path["number"]))


def _sweep_status(reads: Reads, _call: Call) -> Answer:
    return reads.apart("sweep", "status")


def _verdict(reads: Reads, call: Call) -> Answer:
    return reads.apart("verdict", str(call.path["number"]))


def _newest_sweep(reads: Reads, _call: Call) -> Answer:
    return reads.apart("sweep", "show")


def _newest_verdict(reads: Reads, _call: Call) -> Answer:
    return reads.apart("verdict")


def _schedule(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.schedule import show_schedule

    return reads.here(show_schedule, "schedule show")


def _guards(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.guard_show import show_guards

    return reads.here(show_guards, "guard show")


def _guard_check(reads: Reads, call: Call) -> Answer:
    return reads.by_job(JobKind.GUARD_CHECK, {}, call.visitor.name)


def _probations(reads: Reads, _call: Call) -> Answer:
    return reads.apart("probation", "show")


def _top(reads: Reads, _call: Call) -> Answer:
    from tunerd.actions.top import Top

    return reads.here(lambda ctx: Top(ctx).look(), "top")


def _workloads(reads: Reads, _call: Call) -> Answer:
    return reads.apart("workload", "list")


def _workload(reads: Reads, call: Call) -> Answer:
    return reads.apart("workload", "show", call.path["workload"])


def _jobs(reads: Reads, call: Call) -> Answer:
    def read(ctx: Context) -> ActionResult:
        found = [one.to_json() for one in list_jobs(ctx, limit=call.query.limit)]
        return ActionResult("jobs", {"jobs": found})

    return reads.here(read, "jobs")


def _job(reads: Reads, call: Call) -> Answer:
    def read(ctx: Context) -> ActionResult:
        return ActionResult("job", {"job": read_job(ctx, call.path["number"]).to_json()})

    return reads.here(read, "job")


def _readings(reads: Reads, call: Call) -> Answer:
    found = reads.telemetry.readings() if reads.telemetry is not None else ()
    rows = [one.to_brief_json() if call.query.brief else one.to_json() for one in found]
    payload = {"watched": reads.telemetry is not None,
               "latest": found[-1].to_json() if found else None, "readings": rows}  # fmt: skip
    return Answer(ActionResult("readings", payload).to_json())


def _telemetry(reads: Reads, call: Call) -> Answer:
    from tunerd.actions.telemetry import history

    def read(ctx: Context) -> ActionResult:
        now_s = ctx.clock.now_s()
        hours: float = call.query.hours
        found = history(ctx, now_s - hours * 3600, now_s, step_s=_step_s(hours))
        return ActionResult("telemetry", asdict(found))

    return reads.here(read, "telemetry")


def _step_s(hours: float) -> int:
    """Some hundred points, whatever the stretch [s]; rows of a minute and of ten are kept."""
    return next((step for step in _STEPS_S if hours * 3600 / step <= _MOST_POINTS), _STEPS_S[-1])


_LIMIT = models.LimitQuery
READS: tuple[ReadRoute, ...] = (
    ReadRoute("/api/status", "What serves now, since when, and how well", _status),
    ReadRoute("/api/history", "Every swap, newest first", _history, _LIMIT),
    ReadRoute("/api/history/{number}", "Everything kept of one generation", _generation),
    ReadRoute("/api/history/{one}/diff/{other}", "How two generations differ", _difference),
    ReadRoute("/api/rollback", "What one can go back to", _targets),
    ReadRoute("/api/rollback/preview", "Where going back would lead", _preview, models.TargetQuery),
    ReadRoute("/api/plan/{profile}", "What apply would do", _plan, models.PlanQuery, is_slow=True),
    ReadRoute("/api/verify", "Whether the machine is what was deployed", _verify),
    ReadRoute("/api/doctor", "What may be wrong, and what to do", _doctor, is_slow=True),
    ReadRoute("/api/profiles", "Every profile", _profiles),
    ReadRoute(
        "/api/profiles/{profile}", "A profile's values, and who set each", _profile, models.SetQuery
    ),
    ReadRoute("/api/engines", "Each engine, and what it can do", _engines, is_slow=True),
    ReadRoute("/api/detect", "What is here", _detect, is_slow=True),
    ReadRoute("/api/results", "What was measured", _results, models.AllQuery, is_slow=True),
    ReadRoute(
        "/api/stale", "What changed since it was measured", _stale, models.AllQuery, is_slow=True
    ),
    ReadRoute("/api/export", "Runs with every sample", _export, models.RunsQuery, is_slow=True),
    ReadRoute("/api/report", "Runs as one page", _report, models.ReportQuery, is_slow=True),
    ReadRoute("/api/results/{number}", "One run", _result, is_slow=True),
    ReadRoute("/api/sweeps", "Every sweep", _sweeps, is_slow=True),
    ReadRoute("/api/sweeps/{number}", "One sweep in full", _sweep, is_slow=True),
    ReadRoute("/api/sweep", "The sweep that runs now", _sweep_status, is_slow=True),
    ReadRoute("/api/sweep/newest", "The newest sweep in full", _newest_sweep, is_slow=True),
    ReadRoute("/api/verdict", "What the newest sweep came to", _newest_verdict, is_slow=True),
    ReadRoute("/api/verdict/{number}", "What a sweep came to", _verdict, is_slow=True),
    ReadRoute("/api/workloads", "Every workload", _workloads, is_slow=True),
    ReadRoute("/api/workloads/{workload}", "One workload", _workload, is_slow=True),
    ReadRoute("/api/schedule", "When sweeps begin by themselves", _schedule),
    ReadRoute("/api/guards", "Every guard, its switch and its evidence", _guards),
    ReadRoute("/api/guards/check", "What the guards judge by", _guard_check, is_slow=True),
    ReadRoute("/api/probations", "How new servers are watched", _probations, is_slow=True),
    ReadRoute("/api/top", "Server, GPU and host as they are", _top),
    ReadRoute("/api/readings", "What was watched in the last hour", _readings, models.BriefQuery),
    ReadRoute("/api/telemetry", "What was watched, by day and week", _telemetry, models.HoursQuery),
    ReadRoute("/api/jobs", "The newest jobs", _jobs, _LIMIT, models.JobsEnvelope),
    ReadRoute("/api/jobs/{number}", "One job", _job, models.NoQuery, models.JobEnvelope),
)

JOBS: tuple[JobRoute, ...] = (
    JobRoute("/api/apply", "Deploy a profile", JobKind.APPLY, models.ApplyBody),
    JobRoute("/api/rollback", "Go back", JobKind.ROLLBACK, models.RollbackBody),
    JobRoute("/api/promote", "Deploy what a sweep proved", JobKind.PROMOTE, models.PromoteBody),
    JobRoute("/api/decline", "Turn a proposal down", JobKind.DECLINE, models.DeclineBody),
    JobRoute("/api/recover", "Mend an interrupted swap", JobKind.RECOVER, models.EmptyBody),
    JobRoute("/api/bench", "Measure a server", JobKind.BENCH, models.BenchBody),
    JobRoute("/api/compare", "Find the faster one", JobKind.COMPARE, models.CompareBody),
    JobRoute("/api/sweep/run", "Sweep as this job", JobKind.SWEEP_RUN, models.SweepBody),
    JobRoute("/api/sweep/resume", "Go on with a sweep", JobKind.SWEEP_RESUME, models.ResumeBody),
    JobRoute("/api/sweep/plan", "What would be tried", JobKind.SWEEP_PLAN, models.SweepBody),
    JobRoute("/api/sweep/watch", "A sweep as it goes", JobKind.SWEEP_WATCH, models.EmptyBody),
    JobRoute("/api/sweep/start", "Begin a sweep as a unit", JobKind.SWEEP_START, models.SweepBody),
    JobRoute("/api/sweep/stop", "End the sweep", JobKind.SWEEP_STOP, models.EmptyBody),
    JobRoute("/api/schedule/run-now", "Begin a night", JobKind.RUN_NOW, models.RunNowBody),
    JobRoute("/api/schedule/set", "Set the window", JobKind.SCHEDULE_SET, models.ScheduleBody),
    JobRoute("/api/schedule/skip", "Skip a night", JobKind.SKIP_TONIGHT, models.SkipBody),
    JobRoute("/api/guard/set", "Switch a guard", JobKind.GUARD_SET, models.GuardBody),
    JobRoute("/api/guard/raise-margin", "Raise the margin", JobKind.RAISE_MARGIN, models.EmptyBody),
    JobRoute("/api/doctor/deep", "A control run", JobKind.DOCTOR_DEEP, models.DeepBody),
    JobRoute("/api/engines/prove", "Try every engine", JobKind.PROVE, models.EmptyBody),
    JobRoute("/api/workload/learn", "Learn a workload", JobKind.WORKLOAD_LEARN, models.LearnBody),
    JobRoute("/api/notify/test", "Send a test notice", JobKind.NOTIFY_TEST, models.EmptyBody),
    JobRoute("/api/jobs/stop", "End a job that measures", JobKind.JOB_STOP, models.StopBody),
)
