"""`tunerd guard check`: what the guards judge by, found out anew in a process that may be large.

It reads the evidence, tries the deployed command line on the engine as it is now, plans the profile
again, and leaves what it found in `STATE/guards.json`. The daemon starts it and reads that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunerd.actions.choose_engine import PlanRequest
from tunerd.actions.context import Context
from tunerd.actions.dry_run import dry_arguments, refusal
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.guard_findings import findings_path
from tunerd.actions.live import read_live_unit
from tunerd.actions.plan import make_plan
from tunerd.actions.sweep_record import reading
from tunerd.actions.upgrade_compare import builds_of
from tunerd.core.fingerprint import Fingerprint
from tunerd.core.generation import Generation
from tunerd.core.guards.drift import Confirmed
from tunerd.core.guards.measured import confirmed_by
from tunerd.core.guards.upgrade import Replanned
from tunerd.core.live import LiveUnit
from tunerd.core.result import ActionResult, Level
from tunerd.core.sample import Sample
from tunerd.errors import TunerdError
from tunerd.system.engine_programs import Found

_LOOK_BACK = 200


def check(ctx: Context) -> ActionResult:
    """Find out and leave word; never fails for what it finds."""
    live = read_live_unit(ctx)
    entry = ctx.generations.serving(ctx.unit)
    generation = None if entry is None else entry.generation
    now = Fingerprint()
    if live.argv is not None:
        now = FingerprintReader(ctx).of(live.argv, live.environment).fingerprint
    driver = ctx.gpu.read().driver_version
    confirmed = _confirmed(ctx, now)
    replanned = _replanned(ctx, live, generation, now.engine_sha256, driver)
    payload: dict[str, Any] = {
        "at_s": ctx.clock.now_s(),
        "generation": None if generation is None else generation.number,
        "engine_sha256": now.engine_sha256,
        "driver_version": driver,
        "confirmed": None if confirmed is None else asdict(confirmed),
        "replanned": asdict(replanned),
    }
    ctx.files.make_folder(ctx.paths.state_dir)
    ctx.files.write_json(findings_path(ctx), payload)
    return ActionResult("guard check", payload, has_acted=True)


def _confirmed(ctx: Context, now: Fingerprint) -> Confirmed | None:
    """What was measured of exactly this server, on whatever driver and build; the newest of them."""
    if now.arguments_sha256 is None:
        return None
    found: list[Sample] = []
    then: Fingerprint | None = None
    try:
        with reading(ctx) as store:
            for run in () if store is None else store.runs(limit=_LOOK_BACK):
                for arm in run.record.arms:
                    if not _is_of(arm.fingerprint, now):
                        continue
                    then = then or arm.fingerprint
                    if store is not None and _alike(arm.fingerprint, then):
                        found += store.samples(run.number, arm=arm.name)
    except TunerdError:
        return None
    return None if then is None else confirmed_by(found, then)


def _is_of(one: Fingerprint, now: Fingerprint) -> bool:
    """The same command line on the same model and cards."""
    return (one.arguments_sha256, one.model_sha256, one.gpu_names) == (
        now.arguments_sha256,
        now.model_sha256,
        now.gpu_names,
    )


def _alike(one: Fingerprint, other: Fingerprint) -> bool:
    """Measured on the same build and driver: the newest that were."""
    return (one.engine_sha256, one.driver_version) == (other.engine_sha256, other.driver_version)


def _replanned(
    ctx: Context,
    live: LiveUnit,
    generation: Generation | None,
    identity: str | None,
    driver: str | None,
) -> Replanned:
    """What speaks against the next start of what is deployed."""
    known = None if generation is None else generation.engine_sha256
    changed = None if known is None or identity is None else known != identity
    builds = None
    if changed and generation is not None:
        builds = builds_of(ctx, generation, str(identity))
    return Replanned(
        identity_changed=changed,
        refusals=tuple(
            dict.fromkeys([*_of_the_program(ctx, live), *_of_the_plan(ctx, generation)])
        ),
        driver_before=None if generation is None else generation.host.get("driver_version"),
        driver_now=driver,
        identity_before=None if builds is None else builds.before,
        identity_now=None if builds is None else builds.now,
        kept=None if builds is None else builds.kept,
        engine=None if builds is None else builds.engine,
        compared=None if builds is None else builds.compared,
        run=None if builds is None else builds.run,
    )


def _of_the_program(ctx: Context, live: LiveUnit) -> Sequence[str]:
    """What the build itself says of the deployed command line."""
    if live.argv is None or live.program is None:
        return ()
    program = Path(live.program)
    if not program.exists():
        return (f"`{program}` is not there",)
    found = Found(program, "unit", None, tuple(sorted(live.environment.items())))
    try:
        said = refusal(ctx, found, dry_arguments(live.argv[1:], live.serving.model or ""))
    except TunerdError as problem:
        return (f"{problem.message}: {problem.cause}" if problem.cause else problem.message,)
    return () if said is None else (said,)


def _of_the_plan(ctx: Context, generation: Generation | None) -> Sequence[str]:
    if generation is None or generation.profile is None:
        return ()
    try:
        made = make_plan(ctx, PlanRequest(generation.profile, dict(generation.pins)))
    except TunerdError as problem:
        return (problem.cause or problem.message,)
    return [message.text for message in made.messages if message.level is Level.ERROR]
