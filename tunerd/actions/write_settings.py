"""Writes single keys into tunerd.toml; what else stands there stays, and nothing wrong is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.actions.context import Context
from tunerd.errors import ConfigError, HostError, UsageError
from tunerd.settings_sources import check_settings


def write_settings(ctx: Context, changed: Mapping[str, Any]) -> None:
    """Change keys of the settings file.

    Args:
        ctx: Where.
        changed: Dotted keys such as `sweep.window`, and values; None takes a key away.

    Raises:
        UsageError: a value is not allowed.
        HostError: the file cannot be read or written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    path = ctx.paths.settings_file
    try:
        document = tomlkit.parse((ctx.files.read(path) or b"").decode())
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise HostError(
            f"`{path}` is no TOML", cause=str(error), state="nothing was changed"
        ) from error
    for dotted, value in changed.items():
        name, _, key = dotted.partition(".")
        table: Any = document.setdefault(name, tomlkit.table())
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    text = tomlkit.dumps(document)
    try:  # a wrong file would keep every command, and the daemon's next start, from working
        check_settings(text, path)
    except ConfigError as problem:
        raise UsageError(
            "that cannot be set", cause=problem.cause, state="nothing was changed"
        ) from problem
    ctx.files.make_folder(path.parent)
    ctx.files.write(path, text.encode(), like=ctx.files.look(path))
