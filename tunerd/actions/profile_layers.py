"""Reads profile files and resolves one profile, with every problem of every file at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.layers import ProfileSources, chain_of, layers_of, with_tuned_layer
from tunerd.core.profile_check import Problem
from tunerd.core.resolve import SET_SOURCE, Resolved, parse_set, resolve, set_layer
from tunerd.errors import ConfigError, UsageError
from tunerd.system.profiles import read_sources


def load_sources(ctx: Context) -> tuple[ProfileSources, tuple[Problem, ...]]:
    """Every profile file of this machine, and those that cannot be parsed."""
    return read_sources(
        shipped=ctx.data_dir / "profiles",
        site=ctx.paths.site_profiles,
        tuned=ctx.paths.tuned_dir,
        files=ctx.files,
    )


def load_profile(
    ctx: Context,
    name: str,
    *,
    options: Mapping[str, Any],
    engine_names: Sequence[str] = (),
    with_tuned: bool = True,
    tuned: Mapping[str, Any] | None = None,
) -> Resolved:
    """One profile with all its layers.

    Args:
        ctx: Where.
        name: Of the profile.
        options: What was given with `--set`, by dotted key.
        engine_names: Which `[engines.NAME]` tables apply.
        with_tuned: Whether the tuned layer takes part.
        tuned: What takes the place of the tuned layer on disk, as a parsed file.

    Raises:
        ConfigError: there is no such profile, or one of its layers is wrong.
    """
    sources, unparsed = load_sources(ctx)
    if tuned is not None:
        sources = with_tuned_layer(sources, name, tuned, ctx.paths.tuned_dir / f"{name}.toml")
    chain = chain_of(name, sources)
    related = tuple(
        problem
        for problem in unparsed
        if _is_layer(ctx, Path(problem.source), name, chain, with_tuned=with_tuned)
    )
    if related:
        raise config_error(name, related)
    layers = layers_of(name, sources, with_tuned=with_tuned)
    if isinstance(layers, Problem):
        raise config_error(name, (layers,))
    chosen = (*layers, set_layer(options)) if options else layers
    resolved = resolve(name, chosen, engine_names)
    if not isinstance(resolved, Resolved):
        raise config_error(name, resolved)
    return resolved


def _is_layer(
    ctx: Context, path: Path, name: str, chain: Sequence[str] | Problem, *, with_tuned: bool
) -> bool:
    """Whether a file would be a layer of a profile; one that cannot be read is not left out."""
    if path.parent == ctx.paths.tuned_dir:
        return with_tuned and path.stem == name
    return path.stem == name or (not isinstance(chain, Problem) and path.stem in chain)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """What was given with `--set`.

    Raises:
        UsageError: one of them is not `key=value`.
    """
    parsed: dict[str, Any] = {}
    for option in options:
        try:
            key, value = parse_set(option)
        except ValueError as error:
            raise UsageError(
                f"--set {option}: {error}", hint="for example --set speculation.n_max=2"
            ) from error
        parsed[key] = value
    return parsed


def config_error(name: str, problems: Sequence[Problem]) -> ConfigError:
    """All problems of a profile as one error."""
    count = f"{len(problems)} place{'s' if len(problems) > 1 else ''}"
    return ConfigError(
        f"profile `{name}` is wrong in {count}",
        cause="\n".join(str(problem) for problem in problems),
        state="nothing was touched",
        hint=_hint(problems),
    )


def _hint(problems: Sequence[Problem]) -> str:
    """What helps with these problems."""
    if all(problem.source == SET_SOURCE for problem in problems):
        return (
            "`tunerd profiles show PROFILE` shows keys and values; a list needs quotes for the shell: "
            "--set 'engine.prefer=[\"mainline\"]'"
        )
    if all(problem.key in {"name", "extends"} for problem in problems):
        return "`tunerd profiles list` shows what there is"
    return "correct the file; `tunerd profiles check FILE` checks one"
