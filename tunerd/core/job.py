"""Jobs: what the local API does for operators, as values that are checked before anything begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from pydantic import BaseModel

from tunerd.core.names import check_name
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
# As in `tunerd sweep run --space`; engines are chosen among those that root installed, by name.
ENGINES_KEY = "engine.prefer"
SHORT_KEYS: Mapping[str, str] = {"engine": ENGINES_KEY, "speculation": "speculation.type"}
_NAMES: Mapping[str, str] = {
    "profile": "a profile", "base": "a profile", "workload": "a workload", "name": "a workload",
}  # fmt: skip
_WORD = r"[A-Za-z0-9+-][A-Za-z0-9._+-]{0,99}"
_VALUE = re.compile(_WORD)
_VALUES = re.compile(f"{_WORD}(,{_WORD}){{0,63}}")


class Lane(StrEnum):
    """What may not run beside each other: one job of a lane at a time, but for those that look.

    A swap does not wait for a measurement: it ends the lease, as it does when root asks for it.
    """

    LOOK = "look"
    CHANGE = "change"
    MEASURE = "measure"
    NOTE = "note"


class JobKind(StrEnum):
    """What a job does; those of lane `LOOK` change nothing, but may try programs as another account."""

    APPLY = "apply"
    ROLLBACK = "rollback"
    PROMOTE = "promote"
    RAISE_MARGIN = "guard raise-margin"
    RECOVER = "recover"
    BENCH = "bench"
    COMPARE = "compare"
    SWEEP_RUN = "sweep run"
    SWEEP_RESUME = "sweep resume"
    DOCTOR_DEEP = "doctor --deep"
    PROVE = "engines --prove"
    DECLINE = "decline"
    SWEEP_START = "sweep start"
    SWEEP_STOP = "sweep stop"
    RUN_NOW = "schedule run-now"
    SCHEDULE_SET = "schedule set"
    SKIP_TONIGHT = "schedule skip-tonight"
    GUARD_SET = "guard set"
    WORKLOAD_LEARN = "workload learn"
    NOTIFY_TEST = "notify test"
    JOB_STOP = "jobs stop"
    PLAN = "plan"
    ENGINES = "engines"
    DETECT = "detect"
    GUARD_CHECK = "guard check"
    SWEEP_PLAN = "sweep plan"
    SWEEP_WATCH = "sweep watch"

    @property
    def lane(self) -> Lane:
        """What it may not run beside."""
        return next((lane for lane, kinds in _LANES.items() if self in kinds), Lane.NOTE)

    @property
    def changes(self) -> bool:
        """Whether it is more than looking."""
        return self.lane is not Lane.LOOK


_LANES: Mapping[Lane, frozenset[JobKind]] = {
    Lane.LOOK: frozenset(
        {JobKind.PLAN, JobKind.ENGINES, JobKind.DETECT, JobKind.GUARD_CHECK, JobKind.SWEEP_PLAN,
         JobKind.SWEEP_WATCH}
    ),
    Lane.CHANGE: frozenset(
        {JobKind.APPLY, JobKind.ROLLBACK, JobKind.PROMOTE, JobKind.RAISE_MARGIN, JobKind.RECOVER}
    ),
    Lane.MEASURE: frozenset(
        {JobKind.BENCH, JobKind.COMPARE, JobKind.SWEEP_RUN, JobKind.SWEEP_RESUME,
         JobKind.DOCTOR_DEEP, JobKind.PROVE}
    ),
}  # fmt: skip


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

    @property
    def lane(self) -> Lane:
        """What it may not run beside; one that only asks whether to begin looks."""
        return Lane.LOOK if self.arguments.get("ask") else self.kind.lane

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


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what may not be asked for through the API, whoever wrote it into a request.

    Raises:
        UsageError: a name cannot be one, or something may not be set without root.
    """
    for key, what in _NAMES.items():
        if arguments.get(key) is not None:
            check_name(arguments[key], of=what)
    check_options(arguments.get("set", {}))
    check_space(arguments.get("space", ()))
    check_sides(arguments.get("sides", ()))


def check_space(ranges: Sequence[str]) -> None:
    """Refuse ranges of a sweep over anything but what may be set without root, and engines by name.

    Raises:
        UsageError: one of them is over something else, or its values are no plain words.
    """
    for text in ranges:
        key, _, values = text.partition("=")
        key = SHORT_KEYS.get(key, key)
        if key != ENGINES_KEY:
            check_options({key: values})
        if not _VALUES.fullmatch(values):
            raise _not_plain(f"--space {text[:200]}")


def check_sides(words: Sequence[str]) -> None:
    """Refuse sides of a comparison that are neither names nor single settings that may be set.

    Raises:
        UsageError: one of them is something else.
    """
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            check_name(word, of="a profile, a generation or an engine")
            continue
        check_options({key: value})
        if not _VALUE.fullmatch(value):
            raise _not_plain(word[:200])


def _not_plain(text: str) -> UsageError:
    return UsageError(
        f"may not be asked for without root: `{text}`",
        cause="its values are no numbers and plain words",
        state="nothing was touched",
        hint="root writes the rest into a profile of this site",
    )


def _is_plain(schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return all(_is_plain(one) for one in schema["anyOf"])
    return "enum" in schema or "const" in schema or schema.get("type") in _PLAIN_TYPES
