"""When nights are: shown, set, skipped, begun at once, and begun by the daemon; and the settings of the box, of which they are some."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tunerd import calendar
from tunerd.app import Context
from tunerd.engine.serving import is_asleep, read_live_unit
from tunerd.errors import ConfigError, HostError, TunerdError, UsageError
from tunerd.machine.clock import local_zone
from tunerd.machine.files import is_locked
from tunerd.paths import FROM_ELSEWHERE, parse_listen
from tunerd.production.own import SWEEP_UNIT, start_sweep_unit
from tunerd.production.probation import daemon_lock
from tunerd.profile.schema import all_keys
from tunerd.records import plain, read_or_none
from tunerd.result import ActionResult, Message, note, warning
from tunerd.settings import check_settings, sources_of
from tunerd.units.manager import PORT_LIMIT_S, UP
from tunerd.units.systemd import lingers
from tunerd.words import Mode, format_duration, local_time, nearest_name

_LEAST_STARTS = 4  # what serves now and one more, each started twice
_LEAST_S = 30.0


def window_of(ctx: Context, text: str | None) -> calendar.Window | None:
    """The window of `01:00-06:30` on the days and by the clock of the settings; None for always.

    Raises:
        UsageError: it is none.
    """
    if text is None:
        return None
    return _parsed(ctx, text, ctx.settings.sweep.days, ctx.settings.sweep.timezone)


def _parsed(ctx: Context, text: str, days: str, timezone: str | None) -> calendar.Window:
    try:
        return calendar.parse_window(text, days, _zone(ctx, timezone))
    except ValueError as error:
        raise UsageError(
            f"`{text}` is no window that a sweep could keep to", cause=f"allowed: {error}",
            state="nothing was touched",
        ) from error  # fmt: skip


def _zone(ctx: Context, named: str | None) -> str:
    """By whose clock: what is named, else the machine's, for a daemon does not have the TZ of somebody's shell."""
    return named or local_zone(ctx.environment if ctx.mode is Mode.LOCAL else {})


def demand_open(ctx: Context, text: str | None) -> None:
    """The window is open, or there is none.

    Raises:
        UsageError: it is closed, and when it opens.
    """
    window = window_of(ctx, text)
    if window is not None and calendar.open_span(window, ctx.clock.now_s()) is None:
        raise UsageError(
            closed_text(ctx, window, str(text)),
            state="nothing was touched",
            hint="`tunerd sweep run` or `tunerd sweep start` without --window sweep at once",
        )


def closed_text(ctx: Context, window: calendar.Window, text: str) -> str:
    """That the window is closed, and when it opens."""
    following = next(calendar.spans(window, ctx.clock.now_s()), None)
    if following is None:
        return f"the window {text} is closed, and does not open soon"
    opens = datetime.fromtimestamp(following.begin_s, window.zone).strftime("%a %d %b %H:%M")
    return f"the window {text} is closed; it opens {opens} ({window.zone})"


def deadline_of(
    ctx: Context, text: str | None, *, load_s: float, changes_program: bool
) -> calendar.Deadline | None:
    """When the window under way ends; None where there is none, or it is closed."""
    window = window_of(ctx, text)
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
    ctx: Context, deadline: calendar.Deadline | None, *, budget_s: float, load_s: float
) -> None:
    """So much of the window is left that something can come of it.

    Raises:
        UsageError: it is not.
    """
    if deadline is None:
        return
    left_s, least_s = deadline.measuring_s(ctx.clock.now_s()), least_time_s(budget_s, load_s)
    if left_s < least_s:
        raise UsageError(
            f"too little is left of the window {deadline.text}",
            cause=f"{format_duration(left_s)} to measure in, with {format_duration(deadline.reserve_s)} "
            f"kept for production's return; at least {format_duration(least_s)} are needed",
            state="nothing was touched",
            hint="a longer sweep.window, or a later night",
        )


def least_time_s(budget_s: float, load_s: float) -> float:
    """The time of which something can come, all of a shorter budget [s]."""
    return min(budget_s, _LEAST_S + _LEAST_STARTS * load_s)


def ends_text(deadline: calendar.Deadline, now_s: float) -> str:
    """Why something ends now, for people."""
    if calendar.is_ahead(deadline.begin_s, now_s):
        return f"the clock was set back, and the window {deadline.text} is closed by it"
    end = local_time(deadline.end_s, "%H:%M %Z")
    return f"the window {deadline.text} ends ({end}), and production must serve again by then"


def set_keys(ctx: Context, command: str, changed: Mapping[str, Any], shown_by: str) -> ActionResult:
    """Change keys of the settings file, for a command; another shows what is in force.

    Args:
        ctx: Where.
        command: Its name.
        changed: Dotted keys such as `sweep.window`, and values; None takes a key away.
        shown_by: The other command.

    Raises:
        UsageError: a value is not allowed.
        HostError: the file cannot be read or written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    path = ctx.paths.settings_file
    try:
        document = tomlkit.parse((ctx.files.read(path) or b"").decode("utf-8-sig"))
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise HostError(
            f"`{path}` is no TOML", cause=str(error), state="nothing was changed"
        ) from error
    for dotted, value in changed.items():
        *names, key = dotted.split(".")
        if value is None:
            _take_out(document, names, key)
            continue
        table: Any = document
        for name in names:
            table = table.setdefault(name, tomlkit.table())
        table[key] = value
    text = tomlkit.dumps(document)
    try:  # a wrong file would keep every command, and the daemon's next start, from working
        check_settings(text, path)
    except ConfigError as problem:
        raise UsageError(
            "that cannot be set", cause=problem.cause, state="nothing was changed"
        ) from problem
    ctx.files.make_folder(path.parent)
    look = ctx.files.look(path)
    # Whoever knows the address of a webhook may read what is posted there, and post as well.
    if look is not None and "webhook" in document.get("notify", {}):
        look = replace(look, mode=look.mode & 0o600)
    ctx.files.write(path, text.encode(), mode=0o600, like=look)
    taken = "the daemon takes it over by itself"
    if {"mode", "service.unit"} & {*changed}:
        taken = f"a daemon goes by it once it is started again (`{ctx.systemctl} restart tunerd`)"
    hint = f"{taken}; `{shown_by}` shows it"
    given = [
        one for value in changed.values() for one in (value if isinstance(value, list) else [value])
    ]
    missing = (one for one in given if str(one).startswith("/") and not Path(one).exists())
    told = (
        note("written", f"`{path}` was changed", hint),
        *(warning("no-such-file", f"there is no `{one}` yet") for one in missing),
    )
    return ActionResult(command, {"changed": dict(changed)}, told, has_acted=True)


def _take_out(table: Any, names: Sequence[str], key: str) -> None:
    """A key, and each table that has nothing left then: an empty `[engines.NAME]` would be an engine without a program."""
    if not names:
        table.pop(key, None)
    elif names[0] in table:
        _take_out(table[names[0]], names[1:], key)
        if not table[names[0]].as_string().strip():  # nor a comment
            table.pop(names[0])


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
    memory = read_memory(ctx)
    payload = {
        "enabled": settings.schedule.enabled,
        "window": settings.sweep.window,
        "days": settings.sweep.days,
        "timezone": _zone(ctx, settings.sweep.timezone),
        "missed": settings.schedule.missed,
        "begin": settings.schedule.begin,
        "budget_s": min(settings.sweep.budget_s, settings.sweep.downtime_s),
        "unit": SWEEP_UNIT,
        "running": ctx.services.state(SWEEP_UNIT).active_state in UP,
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
    days = changed.get("sweep.days") or ctx.settings.sweep.days
    zone = changed.get("sweep.timezone") or ctx.settings.sweep.timezone
    if window is not None:
        parsed = _parsed(ctx, window, days, zone)
        now_s = ctx.clock.now_s()
        if not calendar.openings(
            parsed, calendar.Memory(), now_s, missed=calendar.Missed.LATE, least_s=_LEAST_NIGHT_S
        ):
            raise UsageError(
                f"a night needs at least {format_duration(_LEAST_NIGHT_S)}, and the window is shorter",
                state="nothing was changed",
            )
    elif changed.get("schedule.enabled"):
        raise UsageError(
            "nights need a window", state="nothing was changed", hint="--window 01:00-06:30"
        )
    done = set_keys(ctx, "schedule set", changed, "tunerd schedule show")
    told = _until_logout(ctx) if changed.get("schedule.enabled") else ()
    return replace(done, messages=(*done.messages, *told))


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
    payload = {"skipped": asdict(span), "timezone": _zone(ctx, ctx.settings.sweep.timezone)}
    return ActionResult("schedule skip-tonight", payload, has_acted=True)


def ask_tonight(ctx: Context) -> bool:
    """Have the next opening of the window used on whatever day it is; False where nights are not begun.

    Raises:
        HostError: that cannot be written.
    """
    if not ctx.settings.schedule.enabled or ctx.settings.sweep.window is None:
        return False
    _write_memory(ctx, replace(read_memory(ctx), asked_s=ctx.clock.now_s()))
    return True


def next_openings(ctx: Context, *, most: int = 1) -> tuple[calendar.Opening, ...]:
    """The next openings of the window; none where nights are not begun, or there is no window.

    Raises:
        UsageError: the settings' window is none.
    """
    window = window_of(ctx, ctx.settings.sweep.window)
    if window is None or not ctx.settings.schedule.enabled:
        return ()
    return calendar.openings(
        window,
        read_memory(ctx),
        ctx.clock.now_s(),
        missed=calendar.Missed.LATE
        if _waits_for_sleep(ctx)
        else calendar.Missed(ctx.settings.schedule.missed),
        least_s=_LEAST_NIGHT_S,
        most=most,
    )


def is_wanted_later(ctx: Context) -> bool:
    """Whether a night that is due waits for the server to fall asleep."""
    return _waits_for_sleep(ctx) and not is_asleep(ctx)


def _waits_for_sleep(ctx: Context) -> bool:
    return ctx.settings.schedule.begin == "asleep"


def begin_night(ctx: Context, opening: calendar.Opening) -> bool:
    """Start the sweep's unit, once for an opening; False where it runs already.

    Raises:
        HostError: that it was begun, or its unit, cannot be written.
        ServiceError: it does not start, and may be tried again.
    """
    is_up = ctx.services.state(SWEEP_UNIT).active_state in UP
    memory = read_memory(ctx)
    # First: whoever dies in between loses a night rather than having two of it.
    _write_memory(ctx, replace(memory, last_begin_s=opening.span.begin_s, asked_s=None))
    if is_up:
        return False
    try:
        start_sweep_unit(ctx)
    except TunerdError:
        with contextlib.suppress(TunerdError):
            _write_memory(ctx, memory)
        raise
    return True


def forget_what_is_ahead(ctx: Context) -> None:
    """An opening whose night began on a clock that was set back since is had again.

    Raises:
        HostError: that cannot be written.
    """
    memory = read_memory(ctx)
    if calendar.is_ahead(memory.last_begin_s or 0.0, ctx.clock.now_s()):
        _write_memory(ctx, replace(memory, last_begin_s=None))


def read_memory(ctx: Context) -> calendar.Memory:
    """What is remembered of nights; nothing where that cannot be read."""
    try:
        data = ctx.files.read_json(_path(ctx))
    except TunerdError:
        return calendar.Memory()
    return read_or_none(calendar.Memory, data) or calendar.Memory()


def _write_memory(ctx: Context, memory: calendar.Memory) -> None:
    ctx.files.make_folder(ctx.paths.state_dir)
    ctx.files.write_json(_path(ctx), plain(memory))


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
    if not next_openings(ctx):
        text = f"no night begins: the window is shorter than {format_duration(_LEAST_NIGHT_S)}"
        return (warning("too-short", text, "`tunerd schedule set --window`"),)
    if not is_locked(daemon_lock(ctx)):
        hint = f"`{ctx.systemctl} start tunerd`, or `tunerd daemon` in a terminal"
        return (warning("no-daemon", "no night begins: no tunerd daemon runs", hint),)
    if _waits_for_sleep(ctx) and not read_live_unit(ctx).serving.sleeps:
        text = "nights wait for the server's sleep, and this one never falls asleep"
        hint = "`serving.sleep_idle_s` in its profile, or `tunerd schedule set --begin open`"
        return (warning("never-asleep", text, hint),)
    return _until_logout(ctx)


def _until_logout(ctx: Context) -> tuple[Message, ...]:
    """That nights end with the last session of a user who does not linger."""
    if ctx.mode is not Mode.USER or lingers(ctx.environment) is not False:
        return ()
    text = "no night begins once you have logged out: your units end then, without lingering"
    return (warning("no-linger", text, "loginctl enable-linger"),)


def show_settings(ctx: Context) -> ActionResult:
    """All settings with their sources, and the folders in use."""
    values: dict[str, Any] = ctx.settings.model_dump(mode="json")
    sources = sources_of(ctx.paths, ctx.environment).items()
    rows = [{"name": name, "value": _at(values, name), "source": one} for name, one in sources]
    paths = {name: str(path) for name, path in asdict(ctx.paths).items()}
    return ActionResult("settings", {"settings": rows, "paths": paths, "mode": str(ctx.mode)})


def set_setting(
    ctx: Context,
    key: str,
    words: Sequence[str],
    *,
    check: Callable[[Context, str, Sequence[str]], None] | None,
) -> ActionResult:
    """Write one key of tunerd.toml, its comments and all else kept; without words the key is taken away.

    Args:
        ctx: Where.
        key: Dotted, such as `models.dirs`.
        words: What was typed: as many as a list has, or the list itself; as TOML reads them, else as text.
        check: Refuses what the file may hold and no sweep could go by, as `check_setting` does.

    Raises:
        UsageError: there is no such key, or what it would hold is not allowed.
        HostError: the file cannot be read or written.
    """
    known = sources_of(ctx.paths, ctx.environment)
    in_file = tomllib.loads((ctx.files.read(ctx.paths.settings_file) or b"").decode("utf-8-sig"))
    is_there = _at(in_file, key) is not None
    if not is_there and key not in known and not key.startswith("engines."):
        nearest = nearest_name(key, tuple(known))
        hint = f"did you mean `{nearest}`?" if nearest else "`tunerd settings` lists all"
        if key in all_keys():
            hint = f"it is a key of profiles: `tunerd apply PROFILE --set {key}=VALUE`"
        raise UsageError(f"there is no setting `{key}`", state="nothing was changed", hint=hint)
    if not words and not is_there:
        raise UsageError(
            f"`{key}` does not stand in `{ctx.paths.settings_file}`",
            state="nothing was changed",
            hint="`tunerd settings` shows where each comes from",
        )
    is_list = isinstance(_at(ctx.settings.model_dump(mode="json"), key), list)
    if is_list and len(words) == 1 and isinstance(whole := _as_toml(words[0]), list):
        words = [str(one) for one in whole] or words
    if len(words) > 1 and not is_list:
        raise UsageError(f"`{key}` holds one value", state="nothing was changed")
    tried: list[Any] = [*map(_as_toml, words), *words] or [None]
    if is_list and words:
        tried = [list(words)]
    if words and check is not None:
        _demand_meaning(partial(check, ctx), key, words)
    name = "settings set" if words else "settings unset"
    for one in tried[:-1]:
        with contextlib.suppress(UsageError):
            return set_keys(ctx, name, {key: one}, "tunerd settings")
    return set_keys(ctx, name, {key: tried[-1]}, "tunerd settings")


def _demand_meaning(
    check: Callable[[str, Sequence[str]], None], key: str, words: Sequence[str]
) -> None:
    """Refuse what a settings file may hold, and nothing could go by.

    Raises:
        UsageError: a list of values or keys is none, there is no such workload, or others reach the address.
    """
    refused = "that cannot be set"
    state = "nothing was changed"
    try:
        check(key, words)
    except (UsageError, ConfigError) as problem:
        raise UsageError(refused, cause=problem.words, state=state, hint=problem.hint) from problem
    with contextlib.suppress(ValueError):  # what is no address the settings tell
        if key == "page.listen" and not parse_listen(words[0]).is_loopback:
            raise UsageError(
                refused, cause="others can reach the page there", state=state, hint=FROM_ELSEWHERE
            )


def _at(values: Any, dotted: str) -> Any:
    """What stands under a dotted key; None for nothing."""
    for part in dotted.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _as_toml(word: str) -> Any:
    """A number, a truth value or a list, where it is one; else the text."""
    try:
        return tomllib.loads(f"x = {word}")["x"]
    except tomllib.TOMLDecodeError:
        return word
