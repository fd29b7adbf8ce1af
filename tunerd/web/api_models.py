"""What the local API takes and gives, as pydantic sees it: every body comes from a hostile client."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, StringConstraints

from tunerd.core.job import MOST_OPTIONS
from tunerd.core.names import NAME_PATTERN

Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]
Number = Annotated[int, Field(ge=0, le=10**12 - 1)]
Numbers = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,12}(,[0-9]{1,12}){0,49}$")]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# A backup's name, or a generation's number: never a path.
Target = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:_.@-]{1,300}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,40}\.[a-z_0-9]{1,60}$")]
Why = Annotated[
    str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Plain = bool | int | float | Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]{1,40}$")]
# Times, days and zones as `tunerd schedule set` takes them; a zone is a file, so no dots in it.
Times = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}:[0-9]{2} ?- ?[0-9]{1,2}:[0-9]{2}$")]
Days = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z]{3,5}([,-][A-Za-z]{3})*$", max_length=60)
]
Zone = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}$")
]
_VALUE = r"[A-Za-z0-9+-][A-Za-z0-9._+-]{0,99}"
Space = Annotated[
    str, StringConstraints(pattern=rf"^[a-z_.]{{1,60}}=({_VALUE})(,{_VALUE}){{0,63}}$")
]
SideWord = Annotated[
    str,
    StringConstraints(pattern=rf"^({NAME_PATTERN}|[a-z_]{{1,40}}\.[a-z_0-9]{{1,60}}={_VALUE})$"),
]
Budget = Annotated[float, Field(strict=False, ge=1, le=86400)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ASK = "only as far as the question that a person is asked: nothing is stopped or changed"
_START_AFTER = "start the unit afterwards, even if it is down now"
_SHOWN = "sha256 of the `diff` that was shown; where it is another one by now, nothing is done"
_NOW = "do not wait for running requests"
_PROBATION = "watch the new server afterwards"


class Body(BaseModel):
    """A body; an unknown key is a mistake, and text is never taken for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ApplyBody(Body):
    """Deploy a profile."""

    profile: Name = Field(description="name of a profile")
    set: dict[Key, Plain] = Field(
        default_factory=dict,
        max_length=MOST_OPTIONS,
        description="keys to pin: numbers, switches and closed words of serving, speculation, memory",
    )
    untuned: bool = Field(False, description="leave out what the last promotion found")
    now: bool = Field(False, description=_NOW)
    probation: bool = Field(True, description=_PROBATION)
    shown: Hash | None = Field(None, description=_SHOWN)


class RollbackBody(Body):
    """Go back."""

    to: Target | None = Field(
        None, description="backup or generation; the newest backup without it"
    )
    now: bool = Field(False, description=_NOW)
    shown: Hash | None = Field(None, description=_SHOWN)


class PromoteBody(Body):
    """Deploy what a sweep proved."""

    sweep: Number | None = Field(None, description="number of the sweep; the newest without it")
    now: bool = Field(False, description=_NOW)
    probation: bool = Field(True, description=_PROBATION)
    shown: Hash | None = Field(None, description=_SHOWN)
    ask: bool = Field(False, description=_ASK)


class DeclineBody(Body):
    """Turn down what a sweep proposes."""

    sweep: Number | None = Field(None, description="number of the sweep; the newest without it")
    why: Why | None = Field(None, description="kept with the sweep")


class SweepBody(Body):
    """Search for better settings."""

    budget_s: Budget = Field(7200.0, description="longest that it may take, in seconds")
    max_arms: Annotated[int, Field(ge=2, le=1000)] | None = Field(
        None, description="most configurations that are measured"
    )
    workload: Name | None = Field(
        None, description="name of a workload; the profile's own without it"
    )
    space: Annotated[list[Space], Field(max_length=MOST_OPTIONS)] = Field(
        default_factory=list,
        description="values to try, as KEY=VALUE,VALUE: keys as in `set` of /api/apply, and names "
        "of engines",
    )
    seed: Seed | None = Field(None, description="of texts and order")
    start_after: bool = Field(False, description=_START_AFTER)
    strategy: Literal["physics", "tpe"] = Field("physics", description="who proposes")
    window: Times | None = Field(None, description="only between these times of day")
    ask: bool = Field(False, description=_ASK)


class ResumeBody(Body):
    """Go on with a sweep."""

    sweep: Number | None = Field(None, description="number of the sweep; the newest without it")
    ask: bool = Field(False, description=_ASK)


class BenchBody(Body):
    """Measure what serves, or a profile in its place."""

    profile: Name | None = Field(None, description="name of a profile; what serves without it")
    set: dict[Key, Plain] = Field(
        default_factory=dict, max_length=MOST_OPTIONS, description="as in /api/apply"
    )
    suite: Literal["mtp", "lengths", "cache", "deep", "quality", "concurrency", "workload"] = Field(
        "mtp", description="what to look at"
    )
    repeats: Annotated[int, Field(ge=1, le=100)] | None = Field(
        None, description="how often each case is measured"
    )
    depth: Annotated[int, Field(ge=16, le=10_000_000)] | None = Field(
        None, description="tokens of the long prompt"
    )
    workload: Name | None = Field(None, description="name of a workload")
    published: bool = Field(False, description="show the profile's published numbers beside")
    seed: Seed | None = Field(None, description="of texts and order")
    start_after: bool = Field(False, description=_START_AFTER)
    ask: bool = Field(False, description=_ASK)


class CompareBody(Body):
    """Find out which of two is faster."""

    sides: Annotated[list[SideWord], Field(max_length=2)] = Field(
        default_factory=list,
        description="A and B: profiles, generations, engines, `live`, or KEY=VALUE as in `set`",
    )
    base: Name | None = Field(None, description="profile that engines and single settings change")
    set: dict[Key, Plain] = Field(
        default_factory=dict, max_length=MOST_OPTIONS, description="for B alone, as in /api/apply"
    )
    workload: Name | None = Field(None, description="name of a workload")
    budget_s: Budget = Field(1800.0, description="longest that it may take, in seconds")
    max_pairs: Annotated[int, Field(ge=3, le=1000)] = Field(60, description="most pairs")
    tolerance: Annotated[float, Field(strict=False, ge=0.001, le=0.5)] = Field(
        0.015, description="a difference that does not matter; 0.01 is 1 %"
    )
    seed: Seed | None = Field(None, description="of texts and order")
    start_after: bool = Field(False, description=_START_AFTER)
    ask: bool = Field(False, description=_ASK)


class DeepBody(Body):
    """Doctor with a control run."""

    budget_s: Budget = Field(1800.0, description="longest that the control run may take")
    ask: bool = Field(False, description=_ASK)


class LearnBody(Body):
    """Derive a workload from the log of the unit that tunerd deploys."""

    name: Name = Field("learned", description="of the new workload")
    days: Annotated[int, Field(ge=1, le=3650)] | None = Field(
        None, description="how many days of the log to read"
    )
    write: bool = Field(True, description="false to show it only")


class ScheduleBody(Body):
    """When nights are; what is left out stays."""

    window: Times | None = Field(None, description="times of day, such as 01:00-06:30")
    days: Days | None = Field(None, description="such as mon-fri or sat,sun")
    timezone: Zone | None = Field(None, description="such as Europe/Berlin")
    missed: Literal["late", "skip"] | None = Field(None, description="a night that was missed")
    enabled: bool | None = Field(None, description="whether nights begin by themselves")


class SkipBody(Body):
    """Leave the next night out."""

    undo: bool = Field(False, description="have it after all")


class RunNowBody(Body):
    """Begin a night at once."""

    ask: bool = Field(False, description=_ASK)


class GuardBody(Body):
    """What a guard may do."""

    guard: Literal["oom", "hang", "drift", "upgrade"] = Field(description="which")
    policy: Literal["act", "advise", "off"] = Field(description="what it may do")


class StopBody(Body):
    """End a job that measures."""

    job: Number = Field(description="its number")


class EmptyBody(Body):
    """Nothing to choose."""


class LimitQuery(BaseModel):
    """How many."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=1000)] = Field(20, description="newest so many")


class TargetQuery(BaseModel):
    """Where to."""

    model_config = ConfigDict(extra="forbid")

    to: Target | None = Field(
        None, description="backup or generation; the newest backup without it"
    )


class PlanQuery(BaseModel):
    """A plan in detail."""

    model_config = ConfigDict(extra="forbid")

    set: Json[dict[Key, Plain]] | None = Field(
        None, description="keys to pin, as a JSON object, as `set` of /api/apply"
    )
    explain: bool = Field(False, description="who set each flag, and why")
    untuned: bool = Field(False, description="leave out what the last promotion found")


class SetQuery(BaseModel):
    """What would be set."""

    model_config = ConfigDict(extra="forbid")

    set: Json[dict[Key, Plain]] | None = Field(
        None, description="keys as a JSON object, as `set` of /api/apply"
    )


class AllQuery(BaseModel):
    """How many."""

    model_config = ConfigDict(extra="forbid")

    all: bool = Field(False, description="every one, not only the newest 20")


class RunsQuery(BaseModel):
    """Which runs."""

    model_config = ConfigDict(extra="forbid")

    runs: Numbers = Field(description="their numbers, such as 12,13")


class ReportQuery(BaseModel):
    """Which runs."""

    model_config = ConfigDict(extra="forbid")

    runs: Numbers | None = Field(None, description="their numbers; the newest without it")
    check: bool = Field(True, description="say whether the figures still hold here")


class HoursQuery(BaseModel):
    """How far back."""

    model_config = ConfigDict(extra="forbid")

    hours: Annotated[float, Field(gt=0, le=9600)] = Field(
        24.0, description="the last so many hours"
    )


class BriefQuery(BaseModel):
    """How much of each."""

    model_config = ConfigDict(extra="forbid")

    brief: bool = Field(
        False, description="of all but the newest only time, speed, acceptance and VRAM"
    )


class NoQuery(BaseModel):
    """No parameters."""

    model_config = ConfigDict(extra="forbid")


class MessageModel(BaseModel):
    """Something a person should know."""

    level: str
    code: str
    text: str
    hint: str | None


class Envelope(BaseModel):
    """What the same command prints with `--json`: these keys, and those of its payload beside them."""

    model_config = ConfigDict(extra="allow")

    schema_: int = Field(alias="schema")
    command: str
    ok: bool
    messages: list[MessageModel]


class Problem(BaseModel):
    """What failed, why, how the machine is now, what to do."""

    code: str
    message: str
    cause: str | None
    state: str | None
    hint: str | None


class ErrorEnvelope(Envelope):
    """An envelope that tells of an error."""

    error: Problem


class JobModel(BaseModel):
    """A job: what was asked for, how far it is, and what came of it."""

    job: int
    kind: str
    asked_by: str
    asked_s: float
    arguments: dict[str, Any]
    state: str
    progress: dict[str, Any] | None
    exit_code: int | None
    result: dict[str, Any] | None


class JobEnvelope(Envelope):
    """One job."""

    job: JobModel


class JobsEnvelope(Envelope):
    """The newest jobs."""

    jobs: list[JobModel]
