"""What a shell completes behind an option or argument; where nothing can be read it completes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from tunerd.errors import TunerdError

if TYPE_CHECKING:
    from tunerd.app import Context

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_MODES = ("system", "user", "local")


def names_of(kind: str, *, or_files: bool = False) -> Completer:
    """Names of a kind, by the function below that lists them."""

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
        names = _NAMES[kind](build_context(mode=mode))
    except (TunerdError, OSError, ValueError):  # a message would stand in the middle of the line
        return ()
    return names


def _fitting(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


# From files and names alone: no engine is started. What lists them is imported when a shell asks.


def _profiles(ctx: Context) -> Iterable[str]:
    from tunerd.profile.files import load_sources

    return load_sources(ctx)[0].names


def _engines(ctx: Context) -> Iterable[str]:
    """Those that can be kept: by their name in the settings, others by path."""
    from tunerd.engine.builds import find_programs

    return (found.name or str(found.program) for found in find_programs(ctx))


def _settings(ctx: Context) -> Iterable[str]:
    from tunerd.settings import sources_of

    return sources_of(ctx.paths, ctx.environment)


def _targets(ctx: Context) -> Iterable[str]:
    """What one can go back to: backups by name, generations by number."""
    from tunerd.production.journal import backups

    return (*(backup.name for backup in backups(ctx)), *_generations(ctx))


def _generations(ctx: Context) -> Iterable[str]:
    return map(str, ctx.generations.numbers())


def _workloads(ctx: Context) -> Iterable[str]:
    from tunerd.measure.learn import workload_names

    return workload_names(ctx)


_NAMES: Mapping[str, Callable[[Context], Iterable[str]]] = {
    "profiles": _profiles,
    "engines": _engines,
    "generations": _generations,
    "settings": _settings,
    "targets": _targets,
    "workloads": _workloads,
    "units": lambda ctx: ctx.services.service_units(),
    # What `compare` takes and that has a name.
    "sides": lambda ctx: ("live", *_profiles(ctx), *_generations(ctx), *ctx.settings.engines),
}
