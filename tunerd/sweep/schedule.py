"""When nights are: shown, set, skipped, begun at once, and begun by the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tunerd import calendar
from tunerd.app import Context
from tunerd.engine.serving import is_asleep, read_live_unit
from tunerd.errors import TunerdError, UsageError
from tunerd.jobs import begin_measuring, job_unit, sweeping_job
from tunerd.machine.clock import local_zone
from tunerd.machine.files import is_locked, lock
from tunerd.production.probation import daemon_lock
from tunerd.records import plain, read_or_none
from tunerd.result import ActionResult, Message, note, warning
from tunerd.settings_file import set_keys
from tunerd.units.manager import PORT_LIMIT_S
from tunerd.words import Mode, format_duration, local_time

_LEAST_STARTS = 4  # what serves now and one more, each started twice
_LEAST_S = 30.0


def _window_of(
    ctx: Context, text: str | None, days: str | None = None, timezone: str | None = None
) -> calendar.Window | None:
    """The window of `01:00-06:30`, by the settings where no days and no clock are given; None for always.

    Raises:
        UsageError: it is none.
    """
    if text is None:
        return None
    try:
        return calendar.parse_window(text, days or ctx.settings.sweep.days, _zone(ctx, timezone))
    except ValueError as error:
        raise UsageError(
            f"`{text}` is not a window that a sweep can keep to", cause=f"allowed: {error}",
            state="nothing was touched",
        ) from error  # fmt: skip


def _zone(ctx: Context, named: str | None = None) -> str:
    """By whose clock: what is named, else the machine's, for a daemon does not have the TZ of somebody's shell."""
    own = ctx.environment if ctx.mode is Mode.LOCAL else {}
    return named or ctx.settings.sweep.timezone or local_zone(own)


def demand_open(ctx: Context, text: str | None) -> None:
    """The window is open, or there is none.

    Raises:
        UsageError: it is closed, and when it opens.
    """
    if closed := why_closed(ctx, text):
        raise UsageError(
            closed,
            state="nothing was touched",
            hint="`tunerd sweep run` or `tunerd sweep start` without --window sweep at once",
        )


def why_closed(ctx: Context, text: str | None) -> str | None:
    """That the window is closed, and when it opens; None where it is open, or there is none."""
    window = _window_of(ctx, text)
    if window is None or calendar.open_span(window, ctx.clock.now_s()) is not None:
        return None
    following = next(calendar.spans(window, ctx.clock.now_s()), None)
    if following is None:
        return f"the window {text} is closed, and does not open soon"
    opens = datetime.fromtimestamp(following.begin_s, window.zone).strftime("%a %d %b %H:%M")
    return f"the window {text} is closed; it opens {opens} ({window.zone})"


def deadline_of(
    ctx: Context, text: str | None, *, load_s: float, changes_program: bool
) -> calendar.Deadline | None:
    """When the window under way ends; None where there is none, or it is closed."""
    window = _window_of(ctx, text)
    span = None if window is None else calendar.open_span(window, ctx.clock.now_s())
    if window is None or span is None:
        return None
    kept_s = calendar.reserve_s(
        load_s,
        drain_s=ctx.settings.service.drain_s,
        deploys=ctx.settings.sweep.promote == "auto",
        port_wait_s=PORT_LIMIT_S if changes_program else 0.0,
    )
    return calendar.Deadline(span.end_s, kept_s, str(text), span.begin_s)


def demand_time(
    ctx: Context, text: str | None, deadline: calendar.Deadline | None, least_s: float
) -> None:
    """So much of the window is left that something can come of it.

    Raises:
        UsageError: it is not, or the window has closed before its end was asked for.
    """
    if deadline is None:
        demand_open(ctx, text)
        return
    left_s = deadline.measuring_s(ctx.clock.now_s())
    if left_s < least_s:
        raise UsageError(
            f"too little is left of the window {deadline.text}",
            cause=f"{format_duration(left_s)} are left to measure, and {format_duration(deadline.reserve_s)} are "
            f"kept to bring production back; at least {format_duration(least_s)} are needed to measure",
            state="nothing was touched",
            hint="set a longer sweep.window, or try again another night",
        )


def least_time_s(budget_s: float, load_s: float) -> float:
    """The time of which something can come, all of a shorter budget [s]."""
    return min(budget_s, _LEAST_S + _LEAST_STARTS * load_s)


def ends_text(deadline: calendar.Deadline, now_s: float) -> str:
    """Why something ends now, for people."""
    if calendar.is_ahead(deadline.begin_s, now_s):
        return f"the clock was set back, to before the window {deadline.text}"
    end = local_time(deadline.end_s, "%H:%M %Z")
    return f"the window {deadline.text} ends ({end}), and production must serve again by then"


# The keys of the settings file behind what `tunerd schedule set` takes.
KEYS: Mapping[str, str] = {
    "window": "sweep.window",
    "days": "sweep.days",
    "timezone": "sweep.timezone",
    "missed": "schedule.missed",
    "begin": "schedule.begin",
    "enabled": "schedule.enabled",
}
_SHOWN = 3
_LEAST_NIGHT_S = 900.0


def show_schedule(ctx: Context) -> ActionResult:
    """The window, whether nights are begun by themselves, and when the next ones are."""
    settings = ctx.settings
    memory, job = read_memory(ctx), sweeping_job(ctx)
    payload = {
        "enabled": settings.schedule.enabled,
        "window": settings.sweep.window,
        "days": settings.sweep.days,
        "timezone": _zone(ctx),
        "missed": settings.schedule.missed,
        "begin": settings.schedule.begin,
        "budget_s": min(settings.sweep.budget_s, settings.sweep.downtime_s),
        "unit": None if job is None else job_unit(job),
        "running": job is not None,
        "last_begin_s": memory.last_begin_s,
        "asked_s": memory.asked_s,
        "nights": [
            {**asdict(one.span), "seconds": one.span.seconds, "skipped": one.is_skipped}
            for one in next_openings(ctx, most=_SHOWN)
        ],
    }  # fmt: skip
    return ActionResult("schedule show", payload, _remarks(ctx))


def set_schedule(ctx: Context, changed: Mapping[str, Any]) -> ActionResult:
    """Write keys of [sweep] and [schedule] into tunerd.toml; what else stands there stays.

    Args:
        ctx: Where.
        changed: Dotted keys and values; None takes a key away.

    Raises:
        UsageError: there is nothing to set, one is not allowed, or together they are no window.
        HostError: the file cannot be read or written.
    """
    if not changed:
        raise UsageError("nothing to set", hint="for example --window 01:00-06:30 --on")
    window = changed.get("sweep.window", ctx.settings.sweep.window)
    days, zone = changed.get("sweep.days"), changed.get("sweep.timezone")
    if (parsed := _window_of(ctx, window, days, zone)) is not None:
        now_s = ctx.clock.now_s()
        if not calendar.openings(
            parsed, calendar.Memory(), now_s, missed=calendar.Missed.LATE, least_s=_LEAST_NIGHT_S
        ):
            raise UsageError(
                f"a night needs at least {format_duration(_LEAST_NIGHT_S)}, and the window is shorter",
                state="nothing was changed",
            )
    elif changed.get("schedule.enabled"):
        text, hint = "nights need a window", "--window 01:00-06:30"
        raise UsageError(text, state="nothing was changed", hint=hint)
    done = set_keys(ctx, "schedule set", changed, "tunerd schedule show")
    told = ctx.until_logout() if changed.get("schedule.enabled") else ()
    return replace(done, messages=(*done.messages, *told))


def skip_tonight(ctx: Context, *, undo: bool) -> ActionResult:
    """Leave the next night out, or have it after all.

    Raises:
        UsageError: there is none.
    """
    if undo:
        _change_memory(ctx, skip_begin_s=None)
        return ActionResult("schedule skip-tonight", {"skipped": None}, has_acted=True)
    found = next_openings(ctx)
    if not found:
        raise UsageError("there is no night to skip", hint="`tunerd schedule show`")
    span = found[0].span
    _change_memory(ctx, skip_begin_s=span.begin_s)
    payload = {"skipped": asdict(span), "timezone": _zone(ctx)}
    return ActionResult("schedule skip-tonight", payload, has_acted=True)


def ask_tonight(ctx: Context) -> bool:
    """Have the next opening of the window used on whatever day it is; False where nights are not begun.

    Raises:
        HostError: that cannot be written.
    """
    if not ctx.settings.schedule.enabled or ctx.settings.sweep.window is None:
        return False
    _change_memory(ctx, asked_s=ctx.clock.now_s())
    return True


def next_openings(
    ctx: Context, *, most: int = 1, waits: bool = False
) -> tuple[calendar.Opening, ...]:
    """The next openings of the window; none where nights are not begun, or there is no window.

    Args:
        ctx: Where.
        most: How many.
        waits: Whether one that is due has waited since it was: it is not missed.

    Raises:
        UsageError: the settings' window is none.
    """
    window = _window_of(ctx, ctx.settings.sweep.window)
    if window is None or not ctx.settings.schedule.enabled:
        return ()
    is_late = waits or _waits_for_sleep(ctx)
    missed = calendar.Missed.LATE if is_late else calendar.Missed(ctx.settings.schedule.missed)
    now_s = ctx.clock.now_s()
    return calendar.openings(
        window, read_memory(ctx), now_s, missed=missed, least_s=_LEAST_NIGHT_S, most=most
    )


def is_wanted_later(ctx: Context) -> bool:
    """Whether a night that is due waits: for a swap, for a measurement that is no sweep, or for the server to fall asleep."""
    if is_locked(ctx.paths.lock) or (_waits_for_sleep(ctx) and not is_asleep(ctx)):
        return True
    return is_locked(ctx.paths.measure_lock) and not _is_sweeping(ctx)


def _is_sweeping(ctx: Context) -> bool:
    """Whether a job, or somebody, sweeps; it may have yielded."""
    return sweeping_job(ctx) is not None or is_locked(ctx.paths.sweep_lock)


def _waits_for_sleep(ctx: Context) -> bool:
    return ctx.settings.schedule.begin == "asleep"


def begin_night(ctx: Context, opening: calendar.Opening) -> int | None:
    """Begin the job that sweeps, once for an opening; its number, None where there is a sweep already.

    Raises:
        HostError: that it was begun, or its request, cannot be written.
        Busy, ServiceError: it does not start, and may be tried again.
    """
    is_sweeping, before = _is_sweeping(ctx), read_memory(ctx)
    # First: whoever dies in between loses a night rather than having two of it.
    _change_memory(ctx, last_begin_s=opening.span.begin_s, asked_s=None)
    if is_sweeping:
        return None
    try:
        return begin_measuring(ctx, "sweep night", ["sweep", "night", "--yes"])
    except TunerdError:
        with contextlib.suppress(TunerdError):
            _change_memory(ctx, last_begin_s=before.last_begin_s, asked_s=before.asked_s)
        raise


def forget_what_is_ahead(ctx: Context) -> None:
    """An opening whose night began on a clock that was set back since is had again.

    Raises:
        HostError: that cannot be written.
    """
    memory = read_memory(ctx)
    if calendar.is_ahead(memory.last_begin_s or 0.0, ctx.clock.now_s()):
        _change_memory(ctx, last_begin_s=None)


def read_memory(ctx: Context) -> calendar.Memory:
    """What is remembered of nights; nothing where that cannot be read."""
    try:
        data = ctx.files.read_json(_path(ctx))
    except TunerdError:
        return calendar.Memory()
    return read_or_none(calendar.Memory, data) or calendar.Memory()


def _change_memory(ctx: Context, **changed: float | None) -> None:
    """Change this of what is remembered; what somebody else changes at that moment stays.

    Raises:
        HostError, Busy: it cannot be written.
    """
    with lock(ctx.paths.schedule_lock, purpose="schedule", since=ctx.now_text()):
        ctx.files.write_json(_path(ctx), plain(replace(read_memory(ctx), **changed)))


def _path(ctx: Context) -> Path:
    return ctx.paths.state_dir / "schedule.json"


def _remarks(ctx: Context) -> tuple[Message, ...]:
    settings = ctx.settings
    if not settings.schedule.enabled:
        hint = "`tunerd schedule set --window 01:00-06:30 --on`"
        return (note("off", "no night begins by itself", hint),)
    if settings.sweep.window is None:
        text = "nights are on, but no window is set"
        return (warning("no-window", text, "`tunerd schedule set --window`"),)
    if not next_openings(ctx):
        text = f"no night begins: the window is shorter than {format_duration(_LEAST_NIGHT_S)}"
        return (warning("too-short", text, "`tunerd schedule set --window`"),)
    if not is_locked(daemon_lock(ctx)):
        hint = "`tunerd daemon` in a terminal"
        if ctx.mode is not Mode.LOCAL:
            hint = f"`{ctx.systemctl} start tunerd`, or {hint}"
        return (warning("no-daemon", "no night begins: no tunerd daemon runs", hint),)
    if _waits_for_sleep(ctx) and not read_live_unit(ctx).serving.sleeps:
        text = "nights wait until the server sleeps, and this one never does"
        hint = "set `serving.sleep_idle_s` in its profile, or `tunerd schedule set --begin open`"
        return (warning("never-asleep", text, hint),)
    return ctx.until_logout()
