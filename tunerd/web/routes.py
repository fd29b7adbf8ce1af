"""The OpenAPI description of the local API, made of its paths and of what the commands behind them take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tunerd import __version__
from tunerd.errors import TunerdError, UsageError
from tunerd.operations import MAY, MOST_NUMBER, Lane, command_of, has_question, schema_of, takes
from tunerd.result import ActionResult, error_json

# GET. Parts of a path are arguments of the command, the query has the rest.
READS: Mapping[str, str] = {
    "/api/status": "status",
    "/api/top": "top",
    "/api/history": "history",
    "/api/history/{number}": "history show",
    "/api/history/{one}/diff/{other}": "history diff",
    "/api/rollback": "rollback --list",
    "/api/rollback/preview": "rollback --dry-run",
    "/api/plan/{profile}": "plan",
    "/api/verify": "verify",
    "/api/doctor": "doctor",
    "/api/profiles": "profiles list",
    "/api/profiles/{profile}": "profiles show",
    "/api/profiles/{profile}/check": "profiles check",
    "/api/engines": "engines",
    "/api/detect": "detect",
    "/api/results": "results list",
    "/api/results/{run}": "results show",
    "/api/export": "results export",
    "/api/report": "report",
    "/api/sweeps": "sweep list",
    "/api/sweeps/{sweep}": "sweep show",
    "/api/sweep": "sweep status",
    "/api/workloads": "workload list",
    "/api/workloads/{workload}": "workload show",
    "/api/schedule": "schedule show",
    "/api/guards": "guard show",
    "/api/guards/check": "guard check",
    "/api/probations": "probation show",
    "/api/jobs": "jobs",
}
# POST: each begins a job.
BEGINS: Mapping[str, str] = {
    f"/api/{kind.replace(' --', '/').replace(' ', '/')}": kind
    for kind, lane in MAY.items()
    if lane.is_job and kind not in READS.values()
}
RUN = "/api/run"
# A body of 64 KiB whose every byte is escaped.
MAX_QUESTION_BYTES = 512 * 1024
_NUMBER = {"type": "integer", "minimum": 0, "maximum": MOST_NUMBER}


@dataclass(frozen=True, slots=True)
class Look:
    """Something that no command says; without a path it is for the web part itself."""

    summary: str
    takes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    path: str | None = None


LOOKS: Mapping[str, Look] = {
    "facts": Look("What the page shows everywhere, and where it listens"),
    "metrics": Look("The newest reading for Prometheus"),
    "job": Look("One job", {"number": _NUMBER}, "/api/jobs/{number}"),
    "events": Look(
        "What a job told since an offset, which the answer before has",
        {"number": _NUMBER, "offset": _NUMBER},
        "/api/jobs/{number}/events",
    ),
    "telemetry": Look(
        "What was watched, by day and week",
        {"hours": {"type": "number", "minimum": 0.1, "maximum": 9600.0,
                   "description": "the last so many hours"}},
        "/api/telemetry",
    ),
}  # fmt: skip
LOOK_PATHS: Mapping[str, str] = {one.path: name for name, one in LOOKS.items() if one.path}


def is_slow(kind: str) -> bool:
    """Whether it takes a process of its own."""
    return MAY[kind] is not Lane.HERE


_PARTS = re.compile(r"{(\w+)}")
_ASK = "only as far as the question that a person is asked: nothing is stopped or changed"
_HEADER = {
    "name": "X-Tunerd",
    "in": "header",
    "required": True,
    "description": "proves that no foreign page sent the request",
    "schema": {"const": "1"},
}
Schema = dict[str, Any]


def describe_api() -> Schema:
    """The whole description."""
    paths: dict[str, Schema] = {}
    for path, kind in READS.items():
        schemas = {name: schema_of(one) for name, one in takes(kind).items()}
        needed = {name for name, one in takes(kind).items() if one.required}
        answer = "Jobs" if kind == "jobs" else "Envelope"
        paths[path] = {"get": _reading(path, _summary(kind), schemas, needed, answer)}
    for path, name in LOOK_PATHS.items():
        look = LOOKS[name]
        answer = "Job" if name == "job" else "Envelope"
        paths[path] = {"get": _reading(path, look.summary, look.takes, set(), answer)}
    for path, kind in BEGINS.items():
        paths.setdefault(path, {})["post"] = _beginning(path, kind)
    paths[RUN] = {"post": _running()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tunerd's local API",
            "version": __version__,
            "description": "The JSON of the reading commands, and jobs for what changes something. "
            "On a Unix socket for root and members of group tunerd.",
        },
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _summary(kind: str) -> str:
    return command_of(kind).get_short_help_str(100)


def _reading(
    path: str, summary: str, schemas: Mapping[str, Any], needed: set[str], answer: str
) -> Schema:
    parts = _PARTS.findall(path)
    return {
        "operationId": _name(path, "get"),
        "summary": summary,
        "parameters": [
            {
                "name": name,
                "in": "path" if name in parts else "query",
                "required": name in parts or name in needed,
                "description": schema.get("description", ""),
                "schema": {key: value for key, value in schema.items() if key != "description"},
            }
            for name, schema in schemas.items()
        ],
        "responses": {"200": _answer("what the command prints with --json", answer), **_ELSE},
    }


def _beginning(path: str, kind: str) -> Schema:
    known = takes(kind)
    body: Schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: schema_of(one) for name, one in known.items()},
        "required": [name for name, one in known.items() if one.required],
    }
    if has_question(kind):
        body["properties"]["ask"] = {"type": "boolean", "description": _ASK}
    return _posting(_name(path, "post"), _summary(kind), body, {})


def _running() -> Schema:
    words = {"type": "array", "items": {"type": "string"}, "description": "as they are typed"}
    body = {"type": "object", "additionalProperties": False, "properties": {"argv": words},
            "required": ["argv"]}  # fmt: skip
    read = {"200": _answer("what a command that only reads prints with --json", "Envelope")}
    return _posting("post_run", "Any of these commands by its words", body, read)


def _posting(name: str, summary: str, body: Schema, more: Schema) -> Schema:
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [_HEADER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"202": _answer("the job that was begun", "Job"), **more, **_ELSE},
    }


def _name(path: str, method: str) -> str:
    words = [part for part in re.split(r"[/{}]+", path) if part and part != "api"]
    return "_".join((method, *words))


def _answer(text: str, schema: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": text, "content": content}


_ELSE = {"default": _answer("what is wrong: 400 and 415 what was sent, 403 and 421 by whom, 404 and 409 as "
                            "things are, 413 its size, 422 a file, 503 the machine", "Error")}  # fmt: skip


def _object(**properties: Any) -> Schema:
    """An object with these keys, each of them there; others may be beside them."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _schemas() -> Mapping[str, Schema]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    message = _object(level=text, code=text, text=text, hint=maybe)
    envelope = {
        "schema": {"type": "integer"},
        "command": text,
        "ok": {"type": "boolean"},
        "messages": {"type": "array", "items": message},
    }
    anything = {"type": ["object", "null"]}
    job = _object(
        job={"type": "integer"}, kind=text, argv={"type": "array", "items": text}, asked_by=text,
        asked_s={"type": "number"}, state=text, progress=anything,
        exit_code={"type": ["integer", "null"]}, result=anything,
    )  # fmt: skip
    error = _object(code=text, message=text, cause=maybe, state=maybe, hint=maybe)
    return {
        "Envelope": _object(**envelope),
        "Error": _object(**envelope, error=error),
        "Job": _object(**envelope, job=job),
        "Jobs": _object(**envelope, jobs={"type": "array", "items": job}),
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """An envelope, the exit code that the command would have had, and an HTTP status where it tells more."""

    envelope: Mapping[str, Any]
    exit_code: int = 0
    status: int | None = None

    @property
    def is_error(self) -> bool:
        """Whether there is no payload."""
        return "error" in self.envelope

    @classmethod
    def of(cls, result: ActionResult) -> Self:
        """What an operation came to."""
        return cls(result.to_json(), result.exit_code)

    @classmethod
    def failed(cls, error: TunerdError, command: str = "api", *, status: int | None = None,
               code: str | None = None) -> Self:  # fmt: skip
        """What went wrong, by the exit code of the error."""
        return cls(error_json(error, command, code=code), error.exit_code, status)

    def to_line(self) -> bytes:
        """As it goes from the daemon to the web part."""
        return json.dumps([self.envelope, self.exit_code, self.status]).encode()


def bad_request(message: str, cause: str | None = None) -> Answer:
    """400 with the places that are wrong."""
    error = UsageError(message, cause=cause, state="nothing was touched", hint="/api/openapi.json")
    return Answer.failed(error, status=400)


def refused(status: int, message: str, hint: str | None = None) -> Answer:
    """A refusal as an envelope."""
    error = UsageError(message, state="nothing was touched", hint=hint)
    return Answer.failed(error, status=status, code="refused")
