"""Jobs: what the local API does for operators, as values that are checked before anything begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from pydantic import BaseModel

from tunerd.core.profile import Memory, Serving, Speculation
from tunerd.errors import UsageError

_TABLES: Mapping[str, type[BaseModel]] = {
    "serving": Serving,
    "speculation": Speculation,
    "memory": Memory,
}
# Texts, but of a pattern that holds no path: names of types.
_PLAIN_TEXTS = frozenset(
    {"serving.cache_type_k", "serving.cache_type_v",
     "speculation.cache_type_k", "speculation.cache_type_v"}
)  # fmt: skip
_PLAIN_TYPES = frozenset({"integer", "number", "boolean", "null"})
MOST_OPTIONS = 32


class JobKind(StrEnum):
    """What a job does; `PLAN` and `ENGINES` look only, but try programs as another account."""

    APPLY = "apply"
    ROLLBACK = "rollback"
    PROMOTE = "promote"
    DECLINE = "decline"
    SWEEP_START = "sweep start"
    SWEEP_STOP = "sweep stop"
    PLAN = "plan"
    ENGINES = "engines"

    @property
    def changes(self) -> bool:
        """Whether it is more than looking: one such job runs at a time."""
        return self not in {JobKind.PLAN, JobKind.ENGINES}


class JobState(StrEnum):
    """How far a job is; `DIED` is one whose process went without a word."""

    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DIED = "died"

    @property
    def is_over(self) -> bool:
        """Whether nothing will follow."""
        return self not in {JobState.STARTING, JobState.RUNNING}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What is to be done, with checked arguments, and for whom."""

    kind: JobKind
    asked_by: str
    asked_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it is handed to the process that does it."""
        return {**asdict(self), "kind": str(self.kind), "arguments": dict(self.arguments)}


def request_from_json(data: Mapping[str, Any]) -> JobRequest:
    """The request that `to_json` wrote."""
    return JobRequest(
        kind=JobKind(data["kind"]),
        asked_by=str(data["asked_by"]),
        asked_s=float(data["asked_s"]),
        arguments=dict(data["arguments"]),
    )


@cache
def plain_keys() -> frozenset[str]:
    """The keys that an operator may set without root: numbers, switches and words of a closed list.

    Nothing among them names a file, a program, an address, or reaches the command line as free text.
    """
    found = set(_PLAIN_TEXTS)
    for table, model in _TABLES.items():
        for name, schema in model.model_json_schema()["properties"].items():
            if _is_plain(schema):
                found.add(f"{table}.{name}")
    return frozenset(found)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what would let an operator choose programs, files or addresses.

    Raises:
        UsageError: a key is none that may be set through the API.
    """
    refused = sorted(key for key in options if key not in plain_keys())
    if refused:
        raise UsageError(
            f"may not be set without root: {', '.join(f'`{key[:100]}`' for key in refused)}",
            cause="it could choose a program, a file or an address",
            state="nothing was touched",
            hint="numbers and switches of serving, speculation and memory may be set; root writes "
            "the rest into a profile of this site",
        )


def _is_plain(schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return all(_is_plain(one) for one in schema["anyOf"])
    return "enum" in schema or "const" in schema or schema.get("type") in _PLAIN_TYPES
