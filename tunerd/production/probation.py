"""The record of a probation: begun by what deploys, and kept by whoever watches, so that it outlives both."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from tunerd.app import Context
from tunerd.engine.serving import standing_text
from tunerd.errors import DeployError, HostError, TunerdError
from tunerd.machine.files import is_locked
from tunerd.production.unattended import demand_root_for
from tunerd.result import Message, note, warning
from tunerd.words import format_duration

# In the record: PAUSED is what a clean end leaves, such as that of a reboot.
RUNNING, PAUSED = "running", "paused"
_BY_ITSELF = "goes back by itself if it dies, stops answering, leaks, runs short of VRAM or decodes slower than measured"
_UNMEASURED = "; where nothing was measured of it, its speed is not judged"


def begin_probation(ctx: Context, generation: int, sweep: int | None = None) -> tuple[Message, ...]:
    """Leave word for the daemon that it is watched; what a person should know of it.

    Args:
        ctx: Where.
        generation: Which.
        sweep: That proved it; None for none.
    """
    settings = ctx.settings.probation
    if not settings.enabled:
        return (note("no-probation", "no probation: probation.enabled is false"),)
    by_hand = "`tunerd daemon`, also in a terminal, watches it"
    try:
        entry = ctx.generations.read(generation)
        backup = None if entry is None else entry.generation.replaced_backup
        if backup is None:
            return ()  # there is nothing to go back to
        before = ctx.files.read(ctx.paths.unit_dir / backup)
        if before == standing_text(ctx):
            return (note("no-probation", "no probation: what served before is the same"),)
        # Whoever watches says of which boot it is: in a container systemd 252 shows what it confines
        # the host's.
        record = new_record(
            generation, sweep, now_s=ctx.clock.now_s(), left_s=settings.duration_s,
            restarts=ctx.services.state(ctx.unit).n_restarts or 0, boot_id=None,
        )  # fmt: skip
        path = record_path(ctx, generation)
        ctx.files.make_folder(path.parent)
        ctx.files.write_json(path, record)
        why_root = _why_root_must(ctx, before)
    except TunerdError as error:  # the swap is done, and this is only about what follows it
        text = f"the probation could not be started: {error.message}"
        return (warning("no-probation", text, by_hand),)
    lasts = format_duration(settings.duration_s)
    if not is_locked(daemon_lock(ctx)):
        text = "nobody watches the new server now: no tunerd daemon runs; one that is started goes on with it"
        return (warning("probation", text, by_hand),)
    if why_root is not None:
        text = f"the daemon watches it for {lasts}, but only root can take it back: {why_root}"
        return (warning("probation", text, "should it do worse, as root: `tunerd rollback`"),)
    text = f"the daemon watches it for {lasts} and {_BY_ITSELF}{_UNMEASURED}"
    return (
        note("probation", text, "`tunerd probation show`; `tunerd bench` measures what serves"),
    )


def _why_root_must(ctx: Context, backup: bytes | None) -> str | None:
    """Why what watches, which is not root at a keyboard, may not put a backup back."""
    try:
        demand_root_for(replace(ctx, is_unattended=True), backup, "what served before")
    except DeployError as error:
        return error.cause or error.message
    return None


def new_record(
    generation: int,
    sweep: int | None,
    *,
    now_s: float,
    left_s: float,
    restarts: int,
    boot_id: str | None,
) -> dict[str, Any]:
    """A probation before its first look; `restarts` is how often it was started again until then."""
    return {
        "generation": generation,
        "sweep": sweep,
        "state": RUNNING,
        "reason": "",
        "began_s": now_s,
        "looked_s": now_s,
        "left_s": left_s,
        "restarts": restarts,
        "boot_id": boot_id,
        "basis": {"slowest_tok_s": None},
        "looks": 0,
        "tok_s": None,
        "last": None,
    }


def is_open(record: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether it was begun and has no end, so that somebody must go on with it."""
    return isinstance(record, Mapping) and record.get("state") in {RUNNING, PAUSED}


def went_down(record: Mapping[str, Any] | None, boot_id: str | None) -> bool:
    """Whether the machine did, without an order to, while it was watched."""
    if not is_open(record) or record["state"] != RUNNING or boot_id is None:
        return False
    return record.get("boot_id") not in {None, boot_id}


def record_path(ctx: Context, generation: int) -> Path:
    """Where the record of a probation is."""
    return ctx.paths.state_dir / "probation" / f"{generation}.json"


def read_probation(ctx: Context, generation: int) -> dict[str, Any] | None:
    """A record; None where there is none, or it cannot be read."""
    try:
        record = ctx.files.read_json(record_path(ctx, generation))
    except HostError:
        return None
    return record if isinstance(record, dict) else None


def keep_probation(ctx: Context, record: Mapping[str, Any]) -> None:
    """Write a record; where that fails, as on a full disk, what watches goes on."""
    path = record_path(ctx, record["generation"])
    with contextlib.suppress(HostError):
        ctx.files.make_folder(path.parent)
        ctx.files.write_json(path, record)


def forget_probation(ctx: Context, generation: int) -> None:
    """Remove the record of a generation that does not serve after all.

    Raises:
        HostError: it could not be removed.
    """
    if read_probation(ctx, generation) is not None:
        ctx.files.remove(record_path(ctx, generation))


def daemon_lock(ctx: Context) -> Path:
    """What a daemon holds while it runs."""
    return ctx.paths.state_dir / "daemon.lock"
