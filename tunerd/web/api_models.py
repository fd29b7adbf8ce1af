"""What the local API takes and gives, as pydantic sees it: every body comes from a hostile client."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Json, StringConstraints

from tunerd.core.job import MOST_OPTIONS
from tunerd.core.names import NAME_PATTERN

Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]
Number = Annotated[int, Field(ge=0, le=10**12 - 1)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# A backup's name, or a generation's number: never a path.
Target = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:_.@-]{1,300}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,40}\.[a-z_0-9]{1,60}$")]
Why = Annotated[
    str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Plain = bool | int | float | Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]{1,40}$")]
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


class DeclineBody(Body):
    """Turn down what a sweep proposes."""

    sweep: Number | None = Field(None, description="number of the sweep; the newest without it")
    why: Why | None = Field(None, description="kept with the sweep")


class SweepStartBody(Body):
    """Search for better settings."""

    budget_s: Annotated[float, Field(strict=False, ge=60, le=86400)] = Field(
        7200.0, description="longest that it may take, in seconds"
    )
    max_arms: Annotated[int, Field(ge=2, le=1000)] | None = Field(
        None, description="most configurations that are measured"
    )
    workload: Name | None = Field(
        None, description="name of a workload; the profile's own without it"
    )


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


class HoursQuery(BaseModel):
    """How far back."""

    model_config = ConfigDict(extra="forbid")

    hours: Annotated[float, Field(gt=0, le=9600)] = Field(
        24.0, description="the last so many hours"
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
