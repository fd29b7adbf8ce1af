"""What `guard check` left, and the cheap stamps that say when it has to be run again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.guards.drift import Confirmed
from tunerd.core.guards.upgrade import EngineSeen, Replanned
from tunerd.errors import TunerdError


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known; None is not known."""

    confirmed: Confirmed | None = None
    replanned: Replanned | None = None
    engine_sha256: str | None = None


def findings_path(ctx: Context) -> Path:
    """Where `check` leaves what it found."""
    return ctx.paths.state_dir / "guards.json"


def read_findings(ctx: Context, seen: object) -> tuple[object, Findings | None]:
    """What was left since `seen`, with the stamp of it; None where that is nothing new."""
    stamp = _stamp(findings_path(ctx))
    if stamp is None or stamp == seen:
        return seen, None
    try:
        return stamp, _findings(ctx.files.read_json(findings_path(ctx)))
    except (TunerdError, TypeError, KeyError, AttributeError):
        return stamp, None


def engine_seen(ctx: Context, driver_version: str | None) -> EngineSeen:
    """A stamp of every file of the engine that serves, and the driver."""
    entry = ctx.generations.serving(ctx.unit)
    if entry is None:
        return EngineSeen(None, driver_version)
    generation = entry.generation
    names = {path for path, _ in generation.engine_components} | set(generation.argv[:1])
    files = []
    for name in sorted(names):
        stamp = _stamp(Path(name))
        if stamp is None:
            return EngineSeen(None, driver_version)
        files.append((name, *stamp))
    return EngineSeen(tuple(files), driver_version)


def findings_stamp(ctx: Context, life: str | None, engine: EngineSeen | None) -> object:
    """What the findings rest on; another value means that they are old."""
    return (
        life,
        None if engine is None else (engine.files, engine.driver_version),
        _stamp(ctx.paths.generations_dir),
        _stamp(ctx.paths.evidence),
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _findings(data: Any) -> Findings:
    confirmed, replanned = data["confirmed"], data["replanned"]
    return Findings(
        confirmed=None if confirmed is None else Confirmed(**confirmed),
        replanned=None
        if replanned is None
        else Replanned(**{**replanned, "refusals": tuple(replanned["refusals"])}),
        engine_sha256=data["engine_sha256"],
    )
