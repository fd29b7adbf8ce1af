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
from tunerd.core.job import JobKind
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

    name = call.path["profile"]
    return reads.here(lambda ctx: show_profile(ctx, name, options={}), "profiles show")


def _engines(reads: Reads, call: Call) -> Answer:
    return reads.by_job(JobKind.ENGINES, {}, call.visitor.name)


def _results(reads: Reads, _call: Call) -> Answer:
    return reads.apart("results", "list")


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


def _readings(reads: Reads, _call: Call) -> Answer:
    found = reads.telemetry.readings() if reads.telemetry is not None else ()
    rows = [one.to_json() for one in found]
    payload = {"watched": reads.telemetry is not None, "latest": rows[-1] if rows else None,
               "readings": rows}  # fmt: skip
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
    ReadRoute("/api/profiles/{profile}", "A profile's values, and who set each", _profile),
    ReadRoute("/api/engines", "Each engine, and what it can do", _engines, is_slow=True),
    ReadRoute("/api/results", "What was measured", _results, is_slow=True),
    ReadRoute("/api/results/{number}", "One run", _result, is_slow=True),
    ReadRoute("/api/sweeps", "Every sweep", _sweeps, is_slow=True),
    ReadRoute("/api/sweeps/{number}", "One sweep in full", _sweep, is_slow=True),
    ReadRoute("/api/sweep", "The sweep that runs now", _sweep_status, is_slow=True),
    ReadRoute("/api/verdict/{number}", "What a sweep came to", _verdict, is_slow=True),
    ReadRoute("/api/workloads", "Every workload", _workloads, is_slow=True),
    ReadRoute("/api/workloads/{workload}", "One workload", _workload, is_slow=True),
    ReadRoute("/api/readings", "What was watched in the last hour", _readings),
    ReadRoute("/api/telemetry", "What was watched, by day and week", _telemetry, models.HoursQuery),
    ReadRoute("/api/jobs", "The newest jobs", _jobs, _LIMIT, models.JobsEnvelope),
    ReadRoute("/api/jobs/{number}", "One job", _job, models.NoQuery, models.JobEnvelope),
)

JOBS: tuple[JobRoute, ...] = (
    JobRoute("/api/apply", "Deploy a profile", JobKind.APPLY, models.ApplyBody),
    JobRoute("/api/rollback", "Go back", JobKind.ROLLBACK, models.RollbackBody),
    JobRoute("/api/promote", "Deploy what a sweep proved", JobKind.PROMOTE, models.PromoteBody),
    JobRoute("/api/decline", "Turn a proposal down", JobKind.DECLINE, models.DeclineBody),
    JobRoute("/api/sweep/start", "Begin a sweep", JobKind.SWEEP_START, models.SweepStartBody),
    JobRoute("/api/sweep/stop", "End the sweep", JobKind.SWEEP_STOP, models.EmptyBody),
)
