"""What a shell completes behind an option or argument; where nothing can be read it completes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from tunerd.errors import TunerdError

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_MODES = ("system", "user", "local")


def names_of(kind: str, *, or_files: bool = False) -> Completer:
    """Names of a kind, by the function of `cli.completions` that lists them."""

    def complete(
        ctx: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        items = _fitting(_listed(ctx, kind), incomplete)
        return [*items, CompletionItem(incomplete, type="file")] if or_files else items

    return complete


def keys(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of a profile, for `--set KEY=VALUE`."""
    from tunerd.profile.schema import all_keys

    return _fitting((f"{key}=" for key in all_keys()), incomplete)


def shapes(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Shapes of designed models."""
    from tunerd.tryout.designed import SHAPES

    return _fitting(SHAPES, incomplete)


def _listed(ctx: click.Context, kind: str) -> Iterable[str]:
    """The names; none where the machine or its settings do not allow to read them."""
    from tunerd.app import build_context

    given = ctx.find_root().params  # no command has run yet, so the mode is not worked out
    mode = next((name for name in _MODES if given.get(name)), None)
    try:
        found = getattr(importlib.import_module("tunerd.cli.completions"), kind)
        names: Iterable[str] = found(build_context(mode=mode))
    except (TunerdError, OSError, ValueError):  # a message would stand in the middle of the line
        return ()
    return names


def _fitting(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
