"""Warns of engines that a profile names and that are not here: most are misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tunerd.actions.context import Context
from tunerd.actions.find_engines import find_engines
from tunerd.actions.profile_layers import load_sources
from tunerd.core.engine_names import unknown_names
from tunerd.core.layers import layers_of
from tunerd.core.profile_check import Problem
from tunerd.core.resolve import LayerFile, set_layer
from tunerd.core.result import Message, warning

if TYPE_CHECKING:
    from tunerd.actions.choose_engine import PlanRequest

_HINT = "`tunerd engines` lists what is here; the table or name has no effect"


def named_by_plan(ctx: Context, request: PlanRequest) -> list[Message]:
    """Warnings about the layers of a profile and about what was given with `--set`."""
    sources, _ = load_sources(ctx)
    layers = layers_of(request.profile, sources, with_tuned=request.with_tuned)
    files: list[LayerFile] = [] if isinstance(layers, Problem) else list(layers)
    if request.options:
        files.append(set_layer(request.options))
    return named_by_files(ctx, ((file.source, file.data) for file in files))


def named_by_files(ctx: Context, files: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Message]:
    """Warnings about files, each with where it stands; engines are only looked for if need be."""
    read = list(files)
    known: list[str] = list(ctx.settings.engines)
    if any(unknown_names(source, data, known) for source, data in read):
        known += [engine.name for engine in find_engines(ctx)]
    return [
        warning("unknown-engine", str(problem), _HINT)
        for source, data in read
        for problem in unknown_names(source, data, known)
    ]
