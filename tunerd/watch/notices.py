"""Notices to a webhook: left by the daemon, which has no network, and sent by a unit of its own."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from tunerd.app import Context
from tunerd.errors import HostError, TunerdError, UsageError
from tunerd.production.own import NOTIFY, start_own_unit
from tunerd.records import plain, read
from tunerd.result import ActionResult
from tunerd.settings import NotifySettings
from tunerd.units.manager import UP
from tunerd.watch.figures import Event


class Teller:
    """A part of the daemon's work, which tells what a person should hear.

    Args:
        ctx: Where.
        tell: Takes what a person should hear once.
    """

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        self._ctx = ctx
        self._tell = tell
        # Problems that are not over.
        self._said: set[str] = set()

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on; what was seen and done is still known."""
        self._ctx = ctx

    def _event(self, kind: str, level: str, text: str, hint: str | None = None) -> None:
        self._tell(Event(self._ctx.clock.now_s(), kind, level, text, hint))

    def _once(self, problem: str, kind: str, level: str, text: str, hint: str | None) -> None:
        """Tell of a problem, once until it is over."""
        if problem not in self._said:
            self._said.add(problem)
            self._event(kind, level, text, hint)


LEVELS = ("note", "warning", "error")
# Source: docs.ntfy.sh/publish, message priority (1 to 5) and tags.
_NTFY_PRIORITY = {"note": "2", "warning": "3", "error": "4"}
_NTFY_TAG = {"note": "information_source", "warning": "warning", "error": "rotating_light"}


def _request_of(event: Event, settings: NotifySettings, unit: str) -> tuple[bytes, dict[str, str]]:
    """Body and headers that tell of an event, as the receiver takes them."""
    host = socket.gethostname()
    if settings.format == "ntfy":
        text = event.text if event.hint is None else f"{event.text}\n\n{event.hint}"
        title = f"{host}: {unit}: {event.kind}"
        return text.encode("utf-8", "replace"), {
            "Content-Type": "text/plain; charset=utf-8",
            # A header has one line of ASCII.
            "Title": "".join(letter if " " <= letter <= "~" else "?" for letter in title)[:200],
            "Priority": _NTFY_PRIORITY[event.level],
            "Tags": _NTFY_TAG[event.level],
        }
    at = datetime.fromtimestamp(event.at_s, UTC).isoformat(timespec="seconds")
    data = {"source": "tunerd", "host": host, "unit": unit, "at": at, **asdict(event)}
    return json.dumps(data).encode(), {"Content-Type": "application/json", "User-Agent": "tunerd"}


_LIMIT_S = 15.0
_OK = range(200, 300)
# Of the refusals these may be over soon.
_PASSING = frozenset({408, 425, 429})
_CLIENT_ERRORS = range(400, 500)


def _deliver(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[str | None, bool]:
    """One attempt: why it failed, None where it arrived, and whether asking again would not help."""
    import httpx

    try:
        with httpx.stream(  # the status is all that is wanted: what else it says may be without end
            "POST", url, content=body, headers=dict(headers), timeout=_LIMIT_S
        ) as answer:
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return str(error) or type(error).__name__, False
    if status in _OK:
        return None, True
    return f"it answered with status {status}", status in _CLIENT_ERRORS and status not in _PASSING


# Its unit goes on where these end.
_WAITS_S = (0.0, 5.0, 20.0)
_KEEP_S = 86400.0
_KEPT = "it is kept for the next try"


def leave_notice(ctx: Context, event: Event) -> str | None:
    """Leave word, and have it sent; the name of the notice, None where nobody wants it.

    Raises:
        HostError: it cannot be written.
        ServiceError: nothing that sends it can be started.
    """
    settings = ctx.settings.notify
    is_grave = LEVELS.index(event.level) >= LEVELS.index(settings.least)
    if settings.webhook is None or not is_grave:
        return None
    name = _free_name(ctx)
    ctx.files.make_folder(_folder(ctx), mode=0o700)
    data = {"event": plain(event), "unit": ctx.unit, "to": settings.model_dump(mode="json")}
    ctx.files.write_json(_path(ctx, name), data, mode=0o600)
    _start(ctx, name)
    return name


def send_left_notices(ctx: Context) -> tuple[str, ...]:
    """Have notices sent that nobody is at: of a daemon that died, from before a boot, given up.

    Returns:
        The names of those that are sent anew.

    Raises:
        ServiceError: nothing that sends them can be started.
    """
    with contextlib.suppress(HostError):
        ctx.files.remove_temporaries(_folder(ctx))
    try:
        names = sorted(path.stem for path in _folder(ctx).glob("*.json"))
    except OSError:
        return ()
    if ctx.settings.notify.webhook is None:
        return ()
    return tuple(name for name in names if _start(ctx, name))


def _start(ctx: Context, name: str) -> bool:
    """Start what sends a notice; False where that is at work, or waits to try again."""
    unit = f"tunerd-notify-{name}.service"
    if ctx.services.state(unit).active_state in UP:
        return False
    words = ["notify", "send", name]
    start_own_unit(ctx, unit, "sends a notice", words, like=NOTIFY, is_told=True)
    return True


def send_notice(ctx: Context, name: str, *, as_left: bool = False) -> ActionResult:
    """`tunerd notify send NAME`: some attempts; the notice goes when it has arrived or was refused.

    Args:
        ctx: Where.
        name: Which.
        as_left: Go by the settings under which it was left: those of now are wrong, which may be the
            very thing that it tells.

    Raises:
        UsageError: there is no such notice, or nobody takes it: it is gone.
        HostError: it did not arrive; it stays, to be sent again.
    """
    data = ctx.files.read_json(_path(ctx, name)) if name.replace("-", "").isalnum() else None
    if not isinstance(data, dict):
        raise UsageError(f"there is no notice `{name}`")
    settings = NotifySettings(**data["to"]) if as_left else ctx.settings.notify
    try:
        _send(ctx, settings, str(data["unit"]), read(Event, data["event"]), _KEPT)
    except UsageError:
        ctx.files.remove(_path(ctx, name))
        raise
    ctx.files.remove(_path(ctx, name))
    return ActionResult("notify send", {"name": name}, has_acted=True)


def try_notice(ctx: Context) -> ActionResult:
    """`tunerd notify test`: one notice that says that it is a test, sent from here.

    Raises:
        UsageError: no webhook is set, or it refuses.
        HostError: it did not arrive.
    """
    event = Event(ctx.clock.now_s(), "test", "note", "this is a test of tunerd's notices")
    _send(ctx, ctx.settings.notify, ctx.unit, event, "nothing of the test is kept")
    return ActionResult("notify test", {})


def forget_old_notices(ctx: Context, seen_s: dict[str, float]) -> None:
    """Remove those that nobody took for a day.

    Args:
        ctx: Where.
        seen_s: When each was seen first, which this keeps: the time of a file is that of a clock that
            somebody may have set since.
    """
    now_s = ctx.clock.monotonic_s()
    try:
        for path in _folder(ctx).glob("*.json"):
            if now_s - seen_s.setdefault(path.name, now_s) > _KEEP_S:
                ctx.files.remove(path)
                del seen_s[path.name]
    except (OSError, TunerdError):
        return


def _send(ctx: Context, settings: NotifySettings, unit: str, event: Event, then: str) -> None:
    if settings.webhook is None:
        hint = "`tunerd settings set notify.webhook https://HOST/PATH`"
        raise UsageError("no webhook is set", hint=hint)
    body, headers = _request_of(event, settings, unit)
    if settings.token_file is not None:
        token = (ctx.files.read(settings.token_file) or b"").decode("ascii", "replace").strip()
        if not (token.isascii() and token.isprintable()):  # what refuses it would show it
            raise HostError(f"`{settings.token_file}` holds no token: a token is one line of ASCII")
        headers["Authorization"] = f"Bearer {token}"
    problem = None
    for wait_s in _WAITS_S:
        if problem is not None:
            ctx.say(f"it did not arrive ({problem}); trying again in {wait_s:.0f} s")
        ctx.clock.sleep(wait_s)
        problem, is_final = _deliver(settings.webhook, body, headers)
        if problem is None:
            return
        if is_final:
            hint = "[notify] of tunerd.toml"
            raise UsageError("the webhook refuses the notice", cause=problem, hint=hint)
    raise HostError("the notice did not arrive", cause=problem, state=then)


def _free_name(ctx: Context) -> str:
    """Milliseconds, with a number behind where one is taken."""
    base = f"{ctx.clock.now_s() * 1000:.0f}"
    names = chain([base], (f"{base}-{n}" for n in count(1)))
    return next(name for name in names if not _path(ctx, name).exists())


def _folder(ctx: Context) -> Path:
    return ctx.paths.state_dir / "notices"


def _path(ctx: Context, name: str) -> Path:
    return _folder(ctx) / f"{name}.json"
