"""Until when a sweep may keep production away: the window of a call or of the settings, by whose clock."""

from __future__ import annotations

from datetime import UTC, datetime

from tunerd.actions.context import Context
from tunerd.core.quantity import format_duration
from tunerd.core.window import (
    Deadline,
    Window,
    open_span,
    parse_window,
    reserve_s,
    spans,
)
from tunerd.errors import UsageError
from tunerd.system.clock import local_zone

_LEAST_STARTS = 4  # what serves now and one more, each started twice
_LEAST_S = 30.0


def window_of(ctx: Context, text: str | None) -> Window | None:
    """The window of `01:00-06:30` on the days and by the clock of the settings; None for always.

    Raises:
        UsageError: it is none.
    """
    if text is None:
        return None
    settings = ctx.settings.sweep
    zone = settings.timezone or local_zone(ctx.environment)
    try:
        return parse_window(text, settings.days, zone)
    except ValueError as error:
        raise UsageError(
            f"`{text}` is no window that a sweep could keep to", cause=str(error)
        ) from error


def demand_open(ctx: Context, text: str | None) -> None:
    """The window is open, or there is none.

    Raises:
        UsageError: it is closed, and when it opens.
    """
    window = window_of(ctx, text)
    if window is not None and open_span(window, ctx.clock.now_s()) is None:
        raise UsageError(
            closed_text(ctx, window, str(text)),
            state="nothing was touched",
            hint="`tunerd sweep run` or `tunerd sweep start` without --window sweep at once",
        )


def closed_text(ctx: Context, window: Window, text: str) -> str:
    """That the window is closed, and when it opens."""
    following = next(spans(window, ctx.clock.now_s()), None)
    if following is None:
        return f"the window {text} is closed, and does not open soon"
    opens = datetime.fromtimestamp(following.begin_s, window.zone).strftime("%a %d %b %H:%M")
    return f"the window {text} is closed; it opens {opens} ({window.zone.key})"


def deadline_of(
    ctx: Context, text: str | None, *, load_s: float, changes_program: bool
) -> Deadline | None:
    """When the window under way ends; None where there is none, or it is closed."""
    window = window_of(ctx, text)
    span = None if window is None else open_span(window, ctx.clock.now_s())
    if window is None or span is None:
        return None
    kept_s = reserve_s(
        load_s,
        drain_s=ctx.settings.service.drain_s,
        deploys=ctx.settings.sweep.promote == "auto",
        changes_program=changes_program,
    )
    return Deadline(span.end_s, kept_s, str(text))


def demand_time(ctx: Context, deadline: Deadline | None, *, budget_s: float, load_s: float) -> None:
    """So much of the window is left that something can come of it.

    Raises:
        UsageError: it is not.
    """
    if deadline is None:
        return
    left_s = deadline.measuring_s(ctx.clock.now_s())
    least_s = min(budget_s, _LEAST_S + _LEAST_STARTS * load_s)
    if left_s < least_s:
        raise UsageError(
            f"too little is left of the window {deadline.text}",
            cause=f"{format_duration(left_s)} to measure in, with {format_duration(deadline.reserve_s)} "
            f"kept for production's return; at least {format_duration(least_s)} are needed",
            state="nothing was touched",
            hint="a longer sweep.window, or a later night",
        )


def ends_text(deadline: Deadline) -> str:
    """Why something ends now, for people."""
    end = datetime.fromtimestamp(deadline.end_s, UTC).strftime("%H:%M UTC")
    return f"the window {deadline.text} ends ({end}), and production must serve again by then"
