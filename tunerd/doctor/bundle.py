"""What somebody who is asked for help wants to see, without what is nobody's business."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunerd import __version__
from tunerd.app import Context
from tunerd.doctor.doctor import doctor
from tunerd.engine.flags import SECRET_FLAGS, normal_spelling
from tunerd.engine.serving import standing_text
from tunerd.errors import TunerdError
from tunerd.machine.process import account_homes
from tunerd.production.checks import masked
from tunerd.production.profiles import detect
from tunerd.production.status import history, status, verify
from tunerd.result import ActionResult
from tunerd.sweep.schedule import show_settings

_SHOWN_LINES = 80
# Of an engine's log only lines that tell of trouble: others may hold what people asked it.
_TROUBLE = re.compile(
    r"\b(error|warn|fail|fatal|abort|assert|exception|out of memory)", re.IGNORECASE
)
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b")
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f-]{30,40}")
_LINK = re.compile(r"[a-z][a-z0-9+.-]*://(?!127\.0\.0\.1|localhost)[^\s\"']+")
_HIDDEN = "[hidden]"


def support_bundle(ctx: Context) -> ActionResult:
    """`tunerd support-bundle`: versions, what is here, what serves, what is wrong; nothing is changed.

    Names of people and machines, addresses, links and secrets are taken out; texts of requests are not in it.
    """
    parts: dict[str, Callable[[], Any]] = {
        "tunerd": lambda: {"version": __version__, "python": platform.python_version()},
        "system": lambda: {**_release(), "kernel": platform.release(), "mode": str(ctx.mode)},
        "detect": lambda: detect(ctx).payload,
        "status": lambda: status(ctx).payload,
        "verify": lambda: verify(ctx).payload,
        "doctor": lambda: doctor(ctx).payload,
        "history": lambda: history(ctx).payload,
        "settings": lambda: _changed(show_settings(ctx).payload["settings"]),
        "unit": lambda: masked(
            (standing_text(ctx) or b"").decode(errors="replace"), _HIDDEN
        ).splitlines(),
        "log of the server": lambda: _trouble(ctx.services.log(ctx.unit, max_lines=2000)),
        "log of the daemon": lambda: list(
            ctx.services.log("tunerd.service", max_lines=_SHOWN_LINES)
        ),
    }
    hide = _hider(ctx)
    found = {name: hide(_part(read)) for name, read in parts.items()}
    return ActionResult("support-bundle", {"parts": found})


def _part(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except TunerdError as problem:  # one part that cannot be had is a part of the story
        return {"problem": problem.words}


def _release() -> dict[str, str]:
    try:
        return {"release": platform.freedesktop_os_release().get("PRETTY_NAME", "")}
    except OSError:
        return {}


def _changed(settings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(row) for row in settings if row["source"] != "default"]


def _trouble(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if _TROUBLE.search(line)][-_SHOWN_LINES:]


def _hider(ctx: Context) -> Callable[[Any], Any]:
    """Takes out of texts, in whatever they stand, who and where this is."""
    names = {home.name for home in account_homes()} | {ctx.environment.get("USER", "")}
    hosts = {platform.node(), platform.node().partition(".")[0]}
    words = dict.fromkeys(names - {"", "root"}, "USER") | dict.fromkeys(hosts - {""}, "HOST")
    known = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words) or r"(?!)")

    def hide_text(text: str) -> str:
        text = masked(text, _HIDDEN)
        text = _UUID.sub(r"\1-[hidden]", _LINK.sub("[link]", _ADDRESS.sub("[address]", text)))
        return known.sub(lambda one: words[one[0]], text)

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return hide_text(value)
        if isinstance(value, Mapping):
            return {key: hide(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            pairs = zip(["", *map(str, value)], value, strict=False)
            return [
                _HIDDEN if normal_spelling(before) in SECRET_FLAGS else hide(one)
                for before, one in pairs
            ]
        return value

    return hide


def bundle_text(payload: Mapping[str, Any]) -> str:
    """As the file that people attach."""
    return json.dumps(payload["parts"], indent=1, ensure_ascii=False, default=str) + "\n"
