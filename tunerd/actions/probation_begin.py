"""After a swap: a unit of its own watches what was deployed."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.actions.context import Context
from tunerd.actions.live import standing_text
from tunerd.actions.own_unit import OwnUnit, probation_unit, start_own_unit
from tunerd.core.generation import Generation
from tunerd.core.quantity import format_duration
from tunerd.core.result import Message, note, warning
from tunerd.errors import TunerdError


@dataclass(frozen=True, slots=True)
class ProbationPlan:
    """Which generation is watched, and the sweep that proved it."""

    generation: int
    sweep: int | None = None


def begin_probation(ctx: Context, plan: ProbationPlan) -> tuple[Message, ...]:
    """Start the watch; what a person should know of it."""
    settings = ctx.settings.probation
    if not settings.enabled:
        return (note("no-probation", "no probation: probation.enabled is false"),)
    words = ["probation", "run", str(plan.generation)]
    words += [] if plan.sweep is None else ["--sweep", str(plan.sweep)]
    unit = probation_unit(plan.generation)
    try:
        entry = ctx.generations.read(plan.generation)
        backup = None if entry is None else entry.generation.replaced_backup
        if entry is None or backup is None:
            return ()  # there is nothing to go back to
        if ctx.files.read(ctx.paths.unit_dir / backup) == standing_text(ctx):
            return (note("no-probation", "no probation: what served before is the same"),)
        restarts = ctx.services.state(ctx.unit).n_restarts
        words += ["--restarts", str(restarts)] if restarts else []
        has_speed = _has_speed(ctx, entry.generation)
        start_own_unit(ctx, OwnUnit(unit, f"watches generation {plan.generation}", words))
    except TunerdError as error:  # the swap is done, and this is only about what follows it
        return (warning("no-probation", f"the probation could not be started: {error.message}",
                        f"`tunerd probation run {plan.generation}`"),)  # fmt: skip
    text = (
        f"{unit} watches it for {format_duration(settings.duration_s)} and goes back by itself if it "
        "dies, stops answering, leaks, runs short of VRAM or decodes slower than measured"
    )
    if has_speed:
        return (note("probation", text, "`tunerd probation show`"),)
    text += "; nothing was measured of it yet, so its speed is not judged"
    return (note("probation", text, "`tunerd bench` measures what serves"),)


def _has_speed(ctx: Context, generation: Generation) -> bool:
    if not ctx.paths.evidence.exists():
        return False
    from tunerd.actions.probation_basis import basis_of  # numpy comes with it

    return basis_of(ctx, generation).slowest_tok_s is not None
