"""When nights are: shown, set, skipped, begun at once, and begun by the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.actions.context import Context
from tunerd.actions.own_unit import SWEEP_UNIT, OwnUnit, start_own_unit
from tunerd.actions.sweep_hours import window_of
from tunerd.actions.write_settings import write_settings
from tunerd.core.result import ActionResult, Message, note, warning
from tunerd.core.schedule import Memory, Missed, Opening, openings
from tunerd.core.window import parse_window
from tunerd.errors import TunerdError, UsageError
from tunerd.system.clock import local_zone

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared
    from tunerd.actions.sweep_plan import PreparedSweep

# The keys of the settings file behind what `tunerd schedule set` takes.
KEYS: Mapping[str, str] = {
    "window": "sweep.window",
    "days": "sweep.days",
    "timezone": "sweep.timezone",
    "missed": "schedule.missed",
    "enabled": "schedule.enabled",
}
_SHOWN = 3
_LEAST_S = 900.0
_UP = {"active", "activating", "deactivating"}


def show_schedule(ctx: Context) -> ActionResult:
    """The window, whether nights are begun by themselves, and when the next ones are."""
    settings = ctx.settings
    memory = read_memory(ctx)
    nights = next_openings(ctx, most=_SHOWN)
    state = ctx.services.state(SWEEP_UNIT)
    payload = {
        "enabled": settings.schedule.enabled,
        "window": settings.sweep.window,
        "days": settings.sweep.days,
        "timezone": settings.sweep.timezone or local_zone(ctx.environment),
        "missed": settings.schedule.missed,
        "budget_s": min(settings.sweep.budget_s, settings.sweep.downtime_s),
        "unit": SWEEP_UNIT,
        "running": state.active_state in _UP,
        "last_begin_s": memory.last_begin_s,
        "nights": [
            {"begin_s": one.span.begin_s, "end_s": one.span.end_s, "seconds": one.span.seconds,
             "skipped": one.is_skipped}
            for one in nights
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
    days = changed.get("sweep.days") or ctx.settings.sweep.days
    zone = changed.get("sweep.timezone") or ctx.settings.sweep.timezone
    if window is not None:
        try:
            parse_window(window, days, zone or local_zone(ctx.environment))
        except ValueError as error:
            raise UsageError(
                "that is no window", cause=str(error), state="nothing was changed"
            ) from error
    elif changed.get("schedule.enabled"):
        raise UsageError(
            "nights need a window", state="nothing was changed", hint="--window 01:00-06:30"
        )
    write_settings(ctx, changed)
    hint = "the daemon takes it over by itself; `tunerd schedule show`"
    message = note("written", f"`{ctx.paths.settings_file}` was changed", hint)
    return ActionResult("schedule set", {"changed": dict(changed)}, (message,), has_acted=True)


def begin_now(ctx: Context, *, confirm: Callable[[Prepared | PreparedSweep], None]) -> ActionResult:
    """Begin what a night would do, at once and whatever the window says.

    Raises:
        Busy, UsageError, ConfigError, DeployError, ServiceError: as `start_sweep`.
    """
    from tunerd.actions.sweep_night import configured_request
    from tunerd.actions.sweep_unit import start_sweep

    request = replace(configured_request(ctx), window=None)
    return start_sweep(ctx, request, confirm=confirm, is_night=True)


def skip_tonight(ctx: Context, *, undo: bool) -> ActionResult:
    """Leave the next night out, or have it after all.

    Raises:
        UsageError: there is none.
    """
    memory = read_memory(ctx)
    if undo:
        _write_memory(ctx, replace(memory, skip_begin_s=None))
        return ActionResult("schedule skip-tonight", {"skipped": None}, has_acted=True)
    found = next_openings(ctx)
    if not found:
        raise UsageError("there is no night to skip", hint="`tunerd schedule show`")
    span = found[0].span
    _write_memory(ctx, replace(memory, skip_begin_s=span.begin_s))
    zone = ctx.settings.sweep.timezone or local_zone(ctx.environment)
    payload = {"skipped": asdict(span), "timezone": zone}
    return ActionResult("schedule skip-tonight", payload, has_acted=True)


def next_openings(ctx: Context, *, most: int = 1) -> tuple[Opening, ...]:
    """The next openings of the window; none where nights are not begun, or there is no window.

    Raises:
        UsageError: the settings' window is none.
    """
    window = window_of(ctx, ctx.settings.sweep.window)
    if window is None or not ctx.settings.schedule.enabled:
        return ()
    return openings(
        window,
        read_memory(ctx),
        ctx.clock.now_s(),
        missed=Missed(ctx.settings.schedule.missed),
        least_s=_LEAST_S,
        most=most,
    )


def begin_night(ctx: Context, opening: Opening) -> bool:
    """Start the sweep's unit, once for an opening; False where it runs already.

    Raises:
        HostError: that it was begun, or its unit, cannot be written.
        ServiceError: it does not start, and may be tried again.
    """
    is_up = ctx.services.state(SWEEP_UNIT).active_state in _UP
    memory = read_memory(ctx)
    # First: whoever dies in between loses a night rather than having two of it.
    _write_memory(ctx, replace(memory, last_begin_s=opening.span.begin_s))
    if is_up:
        return False
    try:
        _start_sweep(ctx)
    except TunerdError:
        with contextlib.suppress(TunerdError):
            _write_memory(ctx, memory)
        raise
    return True


def _start_sweep(ctx: Context) -> None:
    if not ctx.services.state(SWEEP_UNIT).exists:  # tunerd was not installed by install.sh
        words = ["sweep", "night", "--yes", "--bound-to", SWEEP_UNIT]
        start_own_unit(ctx, OwnUnit(SWEEP_UNIT, "a sweep", words))
        return
    ctx.services.reset_failed(SWEEP_UNIT)
    ctx.services.start(SWEEP_UNIT)


def read_memory(ctx: Context) -> Memory:
    """What is remembered of nights; nothing where that cannot be read."""
    try:
        data = ctx.files.read_json(_path(ctx))
        return Memory(**data) if isinstance(data, dict) else Memory()
    except (TunerdError, TypeError):
        return Memory()


def _write_memory(ctx: Context, memory: Memory) -> None:
    ctx.files.make_folder(ctx.paths.state_dir)
    ctx.files.write_json(_path(ctx), asdict(memory))


def _path(ctx: Context) -> Path:
    return ctx.paths.state_dir / "schedule.json"


def _remarks(ctx: Context) -> tuple[Message, ...]:
    settings = ctx.settings
    if not settings.schedule.enabled:
        hint = "`tunerd schedule set --window 01:00-06:30 --on`"
        return (note("off", "no night begins by itself", hint),)
    if settings.sweep.window is None:
        return (
            warning(
                "no-window", "nights are on, and no window is set", "`tunerd schedule set --window`"
            ),
        )
    return ()
