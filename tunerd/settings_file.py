"""The settings of this box, `tunerd.toml`: shown, and written with its comments kept."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.errors import ConfigError, HostError, UsageError
from tunerd.machine.files import is_gone, lock
from tunerd.paths import FROM_ELSEWHERE, parse_listen
from tunerd.profile.schema import all_keys
from tunerd.result import ActionResult, note, warning
from tunerd.settings import check_settings, sources_of, variable_of
from tunerd.words import nearest_name


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
        Busy: somebody else writes it at this moment, whose change would be lost.
    """
    with lock(ctx.paths.settings_lock, purpose=command, since=ctx.now_text()):
        return _set_keys(ctx, command, changed, shown_by)


def _set_keys(
    ctx: Context, command: str, changed: Mapping[str, Any], shown_by: str
) -> ActionResult:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    path = ctx.paths.settings_file
    try:
        document = tomlkit.parse((ctx.files.read(path) or b"").decode("utf-8-sig"))
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise HostError(
            f"`{path}` is not valid TOML", cause=str(error), state="nothing was changed"
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
        content = text.encode()
        check_settings(content, path)
    except ConfigError as problem:
        raise _refused(problem.cause) from problem
    except UnicodeEncodeError as problem:  # a file's name of another time, say
        raise _refused(f"`{path}` is UTF-8, and it is not") from problem
    ctx.files.make_folder(path.parent)
    look = ctx.files.look(path)
    # Whoever knows the address of a webhook may read what is posted there, and post as well.
    if look is not None and "webhook" in document.get("notify", {}):
        look = replace(look, mode=look.mode & 0o600)
    ctx.files.write(path, content, mode=0o600, like=look)
    taken = "a daemon that runs applies it by itself"
    if "service.unit" in changed:
        taken = f"the daemon applies it, and what is changed later, after a restart ({ctx.restarts_daemon})"
    if "mode" in changed:  # a daemon is told its own where it is started
        taken = f"commands that name no mode go by it; the daemon applies what is changed later after a restart ({ctx.restarts_daemon})"
    hint = f"{taken}; `{shown_by}` shows it"
    lists = (value if isinstance(value, list) else [value] for value in changed.values())
    given = map(str, chain.from_iterable(lists))
    missing = (one for one in given if one.startswith("/") and is_gone(Path(one)))
    told = (
        note("written", f"`{path}` was changed", hint),
        *(warning("no-such-file", f"there is no `{one}` yet") for one in missing),
        *(
            warning(
                "set-elsewhere", f"{name} in the environment wins over the file", f"`unset {name}`"
            )
            for name in dict.fromkeys(variable_of(key, ctx.environment) for key in changed)
            if name is not None
        ),
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
            f"`{key}` is not set in `{ctx.paths.settings_file}`",
            state="nothing was changed",
            hint="`tunerd settings` shows where each comes from",
        )
    is_list = isinstance(_at(ctx.settings.model_dump(mode="json"), key), list)
    if is_list and len(words) == 1 and isinstance(whole := _as_toml(words[0]), list):
        words = [str(one) for one in whole] or words
    if len(words) > 1 and not is_list:
        raise UsageError(f"`{key}` takes one value", state="nothing was changed")
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


def _refused(cause: str | None, hint: str | None = None) -> UsageError:
    state = "nothing was changed"
    return UsageError("this value cannot be set", cause=cause, state=state, hint=hint)


def _demand_meaning(
    check: Callable[[str, Sequence[str]], None], key: str, words: Sequence[str]
) -> None:
    """Refuse what a settings file may hold, and nothing could go by.

    Raises:
        UsageError: a list of values or keys is none, there is no such workload, or others reach the address.
    """
    try:
        check(key, words)
    except (UsageError, ConfigError) as problem:
        raise _refused(problem.words, problem.hint) from problem
    with contextlib.suppress(ValueError):  # what is no address the settings tell
        if key == "page.listen" and not parse_listen(words[0]).is_loopback:
            raise _refused("others can reach the page there", FROM_ELSEWHERE)


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
