"""Notices to a webhook: left by the daemon, which has no network, and sent by a unit of its own."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import asdict
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.own_unit import OwnUnit, start_own_unit
from tunerd.core.notice import Format, is_wanted, post_of
from tunerd.core.result import ActionResult
from tunerd.core.telemetry.history import Event
from tunerd.errors import HostError, ServiceError, TunerdError, UsageError
from tunerd.settings import NotifySettings
from tunerd.system.webhook import deliver

TEMPLATE = "tunerd-notify@{}.service"
# The template goes on where these end.
_WAITS_S = (0.0, 5.0, 20.0)
_KEEP_S = 86400.0
_UP = {"active", "activating", "deactivating"}


def leave_notice(ctx: Context, event: Event) -> str | None:
    """Leave word, and have it sent; the name of the notice, None where nobody wants it.

    Raises:
        HostError: it cannot be written.
        ServiceError: nothing that sends it can be started.
    """
    settings = ctx.settings.notify
    if settings.webhook is None or not is_wanted(event, settings.least):
        return None
    name = _free_name(ctx)
    ctx.files.make_folder(_folder(ctx), mode=0o700)
    data = {"event": asdict(event), "unit": ctx.unit, "to": settings.model_dump(mode="json")}
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
    unit = TEMPLATE.format(name)
    state = ctx.services.state(unit)
    if state.exists:
        if state.active_state in _UP:
            return False
        if state.has_failed:
            ctx.services.reset_failed(unit)
        ctx.services.start(unit)
        return True
    own = f"tunerd-notify-{name}.service"
    if ctx.services.state(own).active_state in _UP:
        return False
    start_own_unit(ctx, OwnUnit(own, "sends a notice", ["notify", "send", name]))
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
        _send(ctx, settings, str(data["unit"]), Event(**data["event"]))
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
    _send(ctx, ctx.settings.notify, ctx.unit, event)
    return ActionResult("notify test", {"webhook": ctx.settings.notify.webhook})


def forget_old_notices(ctx: Context) -> None:
    """Remove those that nobody took for a day."""
    try:
        for path in _folder(ctx).glob("*.json"):
            if ctx.clock.now_s() - path.stat().st_mtime > _KEEP_S:
                ctx.files.remove(path)
    except (OSError, TunerdError):
        return


def _send(ctx: Context, settings: NotifySettings, unit: str, event: Event) -> None:
    if settings.webhook is None:
        raise UsageError("no webhook is set", hint="notify.webhook in tunerd.toml")
    post = post_of(event, host=socket.gethostname(), unit=unit, how=Format(settings.format))
    headers = dict(post.headers)
    if settings.token_file is not None:
        token = (ctx.files.read(settings.token_file) or b"").decode("ascii", "replace").strip()
        headers["Authorization"] = f"Bearer {token}"
    problem = None
    for wait_s in _WAITS_S:
        if problem is not None:
            ctx.say(f"it did not arrive ({problem}); again in {wait_s:.0f} s")
        ctx.clock.sleep(wait_s)
        done = deliver(settings.webhook, post.body, headers)
        problem = done.problem
        if problem is None:
            return
        if done.is_final:
            raise UsageError(
                "the webhook refuses the notice", cause=problem, hint="[notify] of tunerd.toml"
            )
    raise HostError("the notice did not arrive", cause=problem, state="it is kept for the next try")


def _free_name(ctx: Context) -> str:
    """Milliseconds, with a number behind where one is taken."""
    base = f"{ctx.clock.now_s() * 1000:.0f}"
    names = [base, *(f"{base}-{n}" for n in range(1, 100))]
    found = next((name for name in names if not _path(ctx, name).exists()), None)
    if found is None:
        raise ServiceError("too many notices at once")
    return found


def _folder(ctx: Context) -> Path:
    return ctx.paths.state_dir / "notices"


def _path(ctx: Context, name: str) -> Path:
    return _folder(ctx) / f"{name}.json"
