"""The OpenAPI description of the local API, made of the table of its routes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tunerd import __version__
from tunerd.core.names import NAME_PATTERN
from tunerd.web import api_models as models
from tunerd.web.api_routes import JOBS, READS, JobRoute, ReadRoute

NUMBERS = frozenset({"number", "one", "other"})
_PARTS = re.compile(r"{(\w+)}")
_REFERENCE = "#/components/schemas/{model}"
_READ_ERRORS = {404: "there is none", 409: "not possible as things are", 422: "a file is wrong",
                503: "the machine lacks something"}  # fmt: skip
_GATE_ERRORS = {400: "a parameter or the body is wrong", 401: "a token is needed",
                403: "not allowed", 421: "another host name", 429: "too many wrong tokens"}  # fmt: skip
_JOB_ERRORS = {404: "there is none", 409: "another job runs", 413: "the body is too large",
               415: "the body is no JSON", 422: "a file is wrong", 503: "the job cannot be started"}  # fmt: skip


def describe_api() -> dict[str, Any]:
    """The whole description."""
    paths: dict[str, dict[str, Any]] = {}
    for read in READS:
        paths.setdefault(read.path, {})["get"] = _read_operation(read)
    for job in JOBS:
        paths.setdefault(job.path, {})["post"] = _job_operation(job)
    paths["/api/jobs/{number}/events"] = {"get": _events_operation()}
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


def _read_operation(route: ReadRoute) -> dict[str, Any]:
    query = route.query.model_json_schema()
    return {
        "operationId": _name(route.path, "get"),
        "summary": route.summary,
        "parameters": [*_path_parameters(route.path), *_query_parameters(query)],
        "responses": {
            "200": _answer("what the command prints with --json", route.answer),
            **_errors(_GATE_ERRORS | _READ_ERRORS),
        },
    }


def _job_operation(route: JobRoute) -> dict[str, Any]:
    return {
        "operationId": _name(route.path, "post"),
        "summary": route.summary,
        "parameters": [
            {
                "name": "X-Tunerd",
                "in": "header",
                "required": True,
                "description": "proves that no foreign page sent the request",
                "schema": {"const": "1"},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _reference(route.body)}},
        },
        "responses": {
            "202": _answer("the job that was begun", models.JobEnvelope),
            **_errors(_GATE_ERRORS | _JOB_ERRORS),
        },
    }


def _events_operation() -> dict[str, Any]:
    return {
        "operationId": "get_job_events",
        "summary": "What a job does, as server-sent events, until it ends",
        "parameters": _path_parameters("/api/jobs/{number}/events"),
        "responses": {
            "200": {
                "description": "events `begun`, `progress` and `end`",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
            **_errors(_GATE_ERRORS | {404: "there is none"}),
        },
    }


def _name(path: str, method: str) -> str:
    words = [part for part in re.split(r"[/{}]+", path) if part and part != "api"]
    return "_".join((method, *words))


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 0, "maximum": 10**12 - 1}
            if name in NUMBERS
            else {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        }
        for name in _PARTS.findall(path)
    ]


def _query_parameters(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": name in model.get("required", ()),
            "description": schema.get("description", ""),
            **_value(_without_null(schema)),
        }
        for name, schema in model.get("properties", {}).items()
    ]


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A query has no null: what may be missing is left out."""
    kinds = [one for one in schema.get("anyOf", []) if one.get("type") != "null"]
    found = dict(kinds[0] if kinds else schema)
    return {
        key: value for key, value in found.items() if key not in {"title", "description", "default"}
    }


def _value(schema: Mapping[str, Any]) -> dict[str, Any]:
    """How a parameter is written: as it is, or as JSON in a text."""
    if schema.get("contentMediaType") != "application/json":
        return {"schema": dict(schema)}
    return {"content": {"application/json": {"schema": schema["contentSchema"]}}}


def _answer(text: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _reference(model)}}}


def _errors(texts: Mapping[int, str]) -> dict[str, Any]:
    return {str(status): _answer(text, models.ErrorEnvelope) for status, text in texts.items()}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _schemas() -> dict[str, Any]:
    answers: list[type[BaseModel]] = [
        models.Envelope, models.ErrorEnvelope, models.JobEnvelope, models.JobsEnvelope,
    ]  # fmt: skip
    bodies: list[type[BaseModel]] = [route.body for route in JOBS]
    _, answered = models_json_schema(
        [(one, "serialization") for one in answers], ref_template=_REFERENCE
    )
    _, taken = models_json_schema([(one, "validation") for one in bodies], ref_template=_REFERENCE)
    return {**answered["$defs"], **taken["$defs"]}
