"""The forms of the page: what a browser sends, as the body of a route of the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from tunerd.core.names import generation_number
from tunerd.web.app import read_body

_MOST_FIELDS = 20
Form = Callable[[Mapping[str, str]], tuple[str, dict[str, Any]]]


class NotShownError(Exception):
    """A route of the API said no; the page shows what it said."""

    def __init__(self, error: Mapping[str, Any], status: int) -> None:
        super().__init__(error["message"])
        self.error = error
        self.status = status


def wrong(message: str) -> dict[str, Any]:
    """An error of whoever asked, as the page shows it."""
    return {"code": "usage", "message": message, "cause": None, "state": "nothing was touched",
            "hint": None}  # fmt: skip


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; empty where the body is none.

    Raises:
        NotShownError: it is too large, or did not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    content = await read_body(request)
    if isinstance(content, Response):
        raise NotShownError(wrong("the form is too large, or did not come"), content.status_code)
    if kind != "application/x-www-form-urlencoded":
        raise NotShownError(wrong("that is no form"), 415)
    try:
        return dict(parse_qsl(content.decode(), max_num_fields=_MOST_FIELDS))
    except ValueError as problem:
        raise NotShownError(wrong("the form cannot be read"), 400) from problem


def _apply_form(fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    return "/api/apply", {
        "profile": fields.get("profile", ""),
        "shown": fields.get("shown", ""),
        "now": "now" in fields,
        "probation": "probation" in fields,
    }


def _rollback_form(fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    to = {"to": fields["to"]} if fields.get("to") else {}
    return "/api/rollback", {**to, "shown": fields.get("shown", ""), "now": "now" in fields}


def _promote_form(fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    return "/api/promote", {
        "sweep": _integer(fields.get("sweep")),
        "shown": fields.get("shown", ""),
        "now": "now" in fields,
        "probation": "probation" in fields,
    }


def _decline_form(fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    why = {"why": fields["why"]} if fields.get("why") else {}
    return "/api/decline", {"sweep": _integer(fields.get("sweep")), **why}


def _sweep_start_form(fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    _demand_sure(fields)
    try:
        hours = float(fields.get("hours", ""))
    except ValueError as problem:
        raise NotShownError(wrong("the hours are no number"), 400) from problem
    return "/api/sweep/start", {"budget_s": hours * 3600}


def _sweep_stop_form(_fields: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    return "/api/sweep/stop", {}


FORMS: Mapping[str, Form] = {
    "apply": _apply_form,
    "rollback": _rollback_form,
    "promote": _promote_form,
    "decline": _decline_form,
    "sweep-start": _sweep_start_form,
    "sweep-stop": _sweep_stop_form,
}


def _demand_sure(fields: Mapping[str, str]) -> None:
    if "sure" not in fields:
        raise NotShownError(wrong("say that you are sure"), 400)


def _integer(text: str | None) -> int:
    number = generation_number(text or "")
    if number is None:
        raise NotShownError(wrong("that is no number"), 400)
    return number
