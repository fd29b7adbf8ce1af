"""Words that a shell may complete: read from files and names alone, no engine is started."""

from __future__ import annotations

from tunerd.app import Context
from tunerd.engine.builds import find_programs
from tunerd.measure.learn import workload_names
from tunerd.production.journal import backups
from tunerd.profile.files import load_sources


def profiles(ctx: Context) -> tuple[str, ...]:
    """Names of profiles."""
    sources, _ = load_sources(ctx)
    return sources.names


def sides(ctx: Context) -> tuple[str, ...]:
    """What `compare` takes and that has a name: profiles, generations and what serves."""
    return ("live", *profiles(ctx), *generations(ctx), *ctx.settings.engines)


def engines(ctx: Context) -> tuple[str, ...]:
    """Engines that can be kept: by their name in the settings, others by path."""
    return tuple(found.name or str(found.program) for found in find_programs(ctx))


def targets(ctx: Context) -> tuple[str, ...]:
    """What one can go back to: backups by name, generations by number."""
    return (*(backup.name for backup in backups(ctx)), *generations(ctx))


def generations(ctx: Context) -> tuple[str, ...]:
    """Numbers of generations, newest first."""
    return tuple(str(number) for number in ctx.generations.numbers())


def units(ctx: Context) -> tuple[str, ...]:
    """Service units."""
    return ctx.services.service_units()


def workloads(ctx: Context) -> tuple[str, ...]:
    """Names of workloads."""
    return workload_names(ctx)
