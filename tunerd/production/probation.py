"""The record of a probation: begun by what deploys, and kept by whoever watches, so that it outlives both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tunerd.app import Context
from tunerd.engine.serving import standing_text
from tunerd.errors import TunerdError
from tunerd.machine.files import is_locked
from tunerd.production.unattended import why_only_root
from tunerd.result import Message, note, warning
from tunerd.words import format_duration

# In the record: PAUSED is what a clean end leaves, such as that of a reboot.
RUNNING, PAUSED = "running", "paused"


@dataclass(frozen=True, slots=True)
class ProbationRecord:
    """A probation as it stands on disk, at first before its first look.

    `restarts` is how often the server was started again until it began.
    """

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    generation: int
    sweep: int | None
    state: str
    reason: str
    began_s: float
    looked_s: float
    left_s: float
    restarts: int
    boot_id: str | None
    basis: dict[str, Any] = field(default_factory=lambda: {"slowest_tok_s": None})
    looks: int = 0
    tok_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has no end, so that somebody must go on with it."""
        return self.state in {RUNNING, PAUSED}


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
    by_hand = "`tunerd daemon` watches it; it may run in a terminal"
    try:
        entry = ctx.generations.read(generation)
        backup = None if entry is None else entry.generation.replaced_backup
        if backup is None:
            return ()  # there is nothing to go back to
        before = ctx.files.read(ctx.paths.unit_dir / backup)
        if before == standing_text(ctx):
            return (note("no-probation", "no probation: what served before is the same unit"),)
        # Whoever watches says of which boot it is: in a container systemd 252 shows what it confines
        # the host's.
        now_s, restarts = ctx.clock.now_s(), ctx.services.state(ctx.unit).n_restarts or 0
        record = ProbationRecord(
            generation, sweep, RUNNING, "", now_s, now_s, settings.duration_s, restarts, None
        )
        ctx.files.keep(record_path(ctx, generation), record)
        # What watches is not root at a keyboard.
        why_root = why_only_root(replace(ctx, is_unattended=True), before)
    except TunerdError as error:  # the swap is done, and this is only about what follows it
        text = f"the probation could not be started: {error.message}"
        return (warning("no-probation", text, by_hand),)
    lasts = format_duration(settings.duration_s)
    if not is_locked(daemon_lock(ctx)):
        text = "nothing watches the new server: no tunerd daemon runs; start one, and it takes over"
        return (warning("probation", text, by_hand),)
    if why_root is not None:
        text = f"the daemon watches it for {lasts}, but only root can take it back: {why_root}"
        return (warning("probation", text, "if it does worse, run `tunerd rollback` as root"),)
    text = f"the daemon watches it for {lasts} and goes back by itself if it dies, stops answering, leaks, runs short of VRAM or decodes slower than measured; its speed is judged only if it was measured"
    return (
        note("probation", text, "`tunerd probation show`; `tunerd bench` measures what serves"),
    )


def record_path(ctx: Context, generation: int) -> Path:
    """Where the record of a probation is."""
    return ctx.paths.state_dir / "probation" / f"{generation}.json"


def read_probation(ctx: Context, generation: int) -> ProbationRecord | None:
    """A record; None where there is none, or it cannot be read."""
    return ctx.files.recall(ProbationRecord, record_path(ctx, generation))


def keep_probation(ctx: Context, record: ProbationRecord) -> None:
    """Write a record; where that fails, as on a full disk, what watches goes on."""
    ctx.files.remember(record_path(ctx, record.generation), record)


def forget_probation(ctx: Context, generation: int) -> None:
    """Remove the record of a generation that does not serve after all.

    Raises:
        HostError: it could not be removed.
    """
    path = record_path(ctx, generation)
    if path.exists():  # before any there is no folder either
        ctx.files.remove(path)


def daemon_lock(ctx: Context) -> Path:
    """What a daemon holds while it runs."""
    return ctx.paths.state_dir / "daemon.lock"
