"""After an upgrade in place: the build that was deployed against the one that stands there now.

A night that finds another build than the deployed one, and a copy of that, compares the two instead of
sweeping: what a sweep would tune may not be the build that stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.actions.context import Context
from tunerd.actions.find_engines import find_engines
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.keep import kept_folder
from tunerd.actions.live import read_live_unit
from tunerd.actions.sweep_hours import deadline_of, demand_open
from tunerd.actions.sweep_house import House
from tunerd.actions.sweep_record import reading
from tunerd.core.engine import SHORT
from tunerd.core.evidence import RunOutcome, StoredRun
from tunerd.core.generation import Generation
from tunerd.core.result import ActionResult
from tunerd.errors import TunerdError

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared

_LOOK_BACK = 100
# What the lease lasts longer than the comparison that ends by itself.
_SLACK_S = 120.0
_LEAST_S = 30.0
_LEAST_STARTS = 4


@dataclass(frozen=True, slots=True)
class Builds:
    """The build that was deployed and the one that its program is now, by short hashes.

    `kept` and `engine` are their names as engines, None where there is no copy, or no such engine;
    `compared` is what a comparison of the two came to, in that `run`.
    """

    before: str
    now: str
    kept: str | None
    engine: str | None
    compared: str | None = None
    run: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether they can be compared, and were not."""
        return self.kept is not None and self.engine is not None and self.compared is None


def builds_of(ctx: Context, generation: Generation, identity_now: str) -> Builds | None:
    """Both builds; None where the deployed one is unknown, or the same.

    Args:
        ctx: Where.
        generation: What serves.
        identity_now: Of its program as it is now.
    """
    before = generation.engine_sha256
    if before is None or before == identity_now:
        return None
    found = find_engines(ctx)
    folder = kept_folder(ctx, before)
    kept = next(
        (one for one in found if folder is not None and one.program.is_relative_to(folder)), None
    )
    program = Path(generation.argv[0]) if generation.argv else None
    now = next((one for one in found if one.program == program and one.problem is None), None)
    run = None if folder is None else _comparison(ctx, folder, identity_now)
    return Builds(
        before[:SHORT],
        identity_now[:SHORT],
        None if kept is None or kept.problem is not None else kept.name,
        None if now is None else now.name,
        None if run is None else run[1],
        None if run is None else run[0],
    )


def _comparison(ctx: Context, folder: Path, identity_now: str) -> tuple[int, str] | None:
    """The newest comparison of a copy with a build that came to its end: its number, and what it says."""
    try:
        with reading(ctx) as store:
            for run in () if store is None else store.runs(kind="compare", limit=_LOOK_BACK):
                if store is None or not _is_of(run, folder, identity_now):
                    continue
                verdicts = store.verdicts(run.number)
                if run.outcome is RunOutcome.DONE and verdicts:
                    return run.number, verdicts[-1].sentence
                if run.outcome is RunOutcome.FAILED:
                    return run.number, f"it could not be measured ({run.reason})"
    except TunerdError:
        return None
    return None


def _is_of(run: StoredRun, folder: Path, identity_now: str) -> bool:
    arms = run.record.arms
    copies = [arm for arm in arms if arm.program and Path(arm.program).is_relative_to(folder)]
    others = [arm for arm in arms if arm.fingerprint.engine_sha256 == identity_now]
    return bool(copies) and any(arm not in copies for arm in others)


def due_comparison(ctx: Context) -> Builds | None:
    """The builds that the next night compares; None where there is nothing to compare.

    Raises:
        ServiceError: the unit cannot be read.
    """
    if ctx.settings.guards.upgrade != "act":
        return None
    entry = ctx.generations.serving(ctx.unit)
    live = read_live_unit(ctx)
    if entry is None or live.argv is None:
        return None
    now = FingerprintReader(ctx).of(live.argv, live.environment).fingerprint.engine_sha256
    found = None if now is None else builds_of(ctx, entry.generation, now)
    return found if found is not None and found.is_due else None


def prepare_builds(ctx: Context, builds: Builds, *, budget_s: float) -> Prepared | None:
    """The comparison as it would be; None where it cannot be, which is said."""
    from tunerd.actions.compare import CompareRequest, prepare
    from tunerd.core.compare import Limits

    request = CompareRequest(
        words=(str(builds.kept), str(builds.engine)),
        workload=ctx.settings.sweep.workload,
        limits=Limits(budget_s=budget_s),
    )
    try:
        return prepare(ctx, request)
    except TunerdError as problem:
        cause = f": {problem.cause}" if problem.cause else ""
        ctx.say(f"old and new build cannot be compared: {problem.message}{cause}")
        return None


def compare_builds(
    ctx: Context, builds: Builds, *, budget_s: float, window: str | None, bound_to: str | None
) -> ActionResult | None:
    """Compare them in production's place; None where they cannot be, which is said.

    Args:
        ctx: Where.
        builds: Which.
        budget_s: The longest it may take [s].
        window: Times of day by whose end production serves again; None for any.
        bound_to: The unit that this process is, where it is one.

    Raises:
        UsageError: the window is closed.
        Busy, HostError: as a sweep.
        Preempted: the measurement was ended from outside.
        Stranded: production does not serve afterwards.
    """
    from tunerd.actions.compare import run_compare

    demand_open(ctx, window)
    House(ctx).settle()
    prepared = prepare_builds(ctx, builds, budget_s=budget_s)
    if prepared is None:
        return None
    load_s = prepared.outlook.load_s or 0.0
    least_s = min(budget_s, _LEAST_S + _LEAST_STARTS * load_s)
    deadline = deadline_of(ctx, window, load_s=load_s, changes_program=True)
    if deadline is not None:
        budget_s = min(budget_s, deadline.measuring_s(ctx.clock.now_s()) - _SLACK_S)
    if budget_s < least_s:
        ctx.say("too little time is left to compare the old build with the new one")
        return None
    ctx.say(f"the engine is another build than was deployed: {builds.kept} is compared with it")
    limits = replace(prepared.request.limits, budget_s=budget_s)
    return run_compare(
        ctx,
        replace(prepared.request, limits=limits),
        confirm=lambda _prepared: None,
        bound_to=bound_to,
    )
