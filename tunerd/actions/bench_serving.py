"""What serves now beside a profile that is measured: where their answers may differ, and its own plan."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.actions.compare_sides import LIVE, plan_side, side_of
from tunerd.actions.context import Context
from tunerd.actions.plan import Plan
from tunerd.core.bench.request import Suite
from tunerd.core.output_changes import Answering, OutputChange, change_words, output_changes
from tunerd.core.result import Message, note, warning
from tunerd.errors import TunerdError


@dataclass(frozen=True, slots=True)
class Beside:
    """How a profile differs from what serves in what may change answers.

    `plan` is what serves, planned anew; None where it cannot be.
    """

    changes: tuple[OutputChange, ...] = ()
    plan: Plan | None = None
    messages: tuple[Message, ...] = ()


def answering(plan: Plan) -> Answering:
    """What of a plan decides how it answers."""
    return Answering(plan.engine.name, plan.command.argv, plan.resolved.profile.environment)


def beside_serving(ctx: Context, made: Plan, suite: Suite) -> Beside:
    """What serves now, held against what would be deployed; nothing where nothing serves."""
    if not made.live.argv:
        return Beside()
    try:
        serving = plan_side(ctx, side_of(ctx, LIVE, base=None))
    except TunerdError as error:
        if suite is not Suite.QUALITY:
            return Beside()
        why = f"{error.message}: {error.cause}" if error.cause else error.message
        text = f"answers are not held against those of what serves: {why}"
        return Beside(messages=(warning("no-reference", text, error.hint),))
    changes = output_changes(answering(serving), answering(made))
    if not changes:
        return Beside(plan=serving)
    text = f"the profile may answer otherwise than what serves: {change_words(changes)}"
    if suite is Suite.QUALITY:
        return Beside(changes, serving, (note("changes-answers", text),))
    hint = f"`tunerd bench {made.resolved.name} --suite quality` holds their answers against each other"
    return Beside(changes, serving, (warning("changes-answers", text, hint),))
