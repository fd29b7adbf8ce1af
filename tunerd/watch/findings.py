"""What the guards go by: found out by `tunerd guard check` in a process of its own, and read by the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.builds import why_no_start
from tunerd.engine.choice import request_again
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.fingerprint import Fingerprint, holds, on_same_cards
from tunerd.engine.flags import without_secrets
from tunerd.engine.serving import read_live_unit
from tunerd.errors import Busy, ConfigError, EngineError, TunerdError
from tunerd.machine.files import stamp_of
from tunerd.measure.answer import Sample
from tunerd.measure.evidence import ArmRecord
from tunerd.production.journal import record_path
from tunerd.production.plan import UNASKED, make_plan
from tunerd.profile.arm import Best
from tunerd.records import plain, read_or_none
from tunerd.result import ActionResult
from tunerd.units.generations import Generation
from tunerd.units.live import LiveUnit
from tunerd.watch import drift
from tunerd.watch.guards import Replanned

_LOOK_BACK = 200


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known, of which generation and run; None is not known. `basis` is what a probation goes by, `best` what sweeps would find by now."""

    generation: int | None = None
    life: str | None = None
    basis: drift.Basis | None = None
    confirmed: drift.Confirmed | None = None
    replanned: Replanned | None = None
    engine_sha256: str | None = None
    best: Best | None = None


def _findings_path(ctx: Context) -> Path:
    """Where `check` leaves what it found."""
    return ctx.paths.state_dir / "guards.json"


def read_findings(ctx: Context, seen: object) -> tuple[object, Findings | None]:
    """What was left since `seen`, with the stamp of it; None where that is nothing new."""
    stamp = stamp_of(_findings_path(ctx))
    if stamp is None or stamp == seen:
        return seen, None
    try:
        data = ctx.files.read_json(_findings_path(ctx))
    except TunerdError:
        return stamp, None
    return stamp, read_or_none(Findings, data)


def check(ctx: Context) -> ActionResult:
    """Find out and leave word; never fails for what it finds.

    Raises:
        Busy: the unit that stands is on trial: should it fail, what is found of it would be held against what served.
    """
    live = read_live_unit(ctx)
    generation = ctx.deployed()
    if record_path(ctx).exists():
        raise Busy(
            "a swap is under way, or was cut short",
            state="nothing was changed",
            hint="try again when it has ended; `tunerd recover` ends one that was cut short",
        )
    now, driver = Fingerprint(), ctx.gpu.read().driver_version
    if live.argv is not None:
        now = FingerprintReader(ctx).of(live.argv, live.environment).fingerprint
    found = Findings(
        generation=None if generation is None else generation.number,
        life=ctx.services.state(ctx.unit).life,
        basis=None if generation is None else _basis(ctx, generation, now),
        confirmed=_confirmed(ctx, now),
        replanned=_replanned(ctx, live, generation, now.engine_sha256, driver),
        engine_sha256=now.engine_sha256,
        best=_best(ctx, generation),
    )
    payload = {"at_s": ctx.clock.now_s(), "driver_version": driver, **plain(found)}
    ctx.files.make_folder(ctx.paths.state_dir)
    ctx.files.write_json(_findings_path(ctx), payload)
    return ActionResult("guard check", payload, has_acted=True)


def _best(ctx: Context, generation: Generation | None) -> Best | None:
    if generation is None or generation.profile is None or ctx.settings.guards.drift == "off":
        return None
    from tunerd.sweep.run import predicted_best  # which takes numpy

    with contextlib.suppress(TunerdError):
        return predicted_best(ctx, generation)
    return None


def _confirmed(ctx: Context, now: Fingerprint) -> drift.Confirmed | None:
    """What was measured of exactly this server, on whatever driver and build; the newest of them."""
    if now.arguments_sha256 is None:
        return None
    then: list[Fingerprint] = []

    def counts(arm: ArmRecord) -> bool:
        found = arm.fingerprint
        if _of_what(found) != _of_what(now) or not on_same_cards(found, now):
            return False
        then.append(arm.fingerprint)
        return _by_what(arm.fingerprint) == _by_what(then[0])

    samples = _samples(ctx, counts)
    return drift.confirmed_by(samples, then[0]) if then else None


def _samples(ctx: Context, counts: Callable[[ArmRecord], bool]) -> list[Sample]:
    """Those of the arms that count, the newest run first; none where the store cannot be read."""
    from tunerd.measure.store import reading  # which takes SQLAlchemy

    with contextlib.suppress(TunerdError), reading(ctx) as store:
        return [] if store is None else store.samples_of(store.runs(limit=_LOOK_BACK), counts)
    return []


def _basis(ctx: Context, generation: Generation, now: Fingerprint) -> drift.Basis:
    """What a probation of the generation that serves goes by; speeds are None where too little was measured."""
    replaced = ctx.generations.serving(generation.unit, before=generation.number)
    # As it is kept with what was measured of it; one that was made by hand has none.
    before = None if replaced is None else without_secrets(replaced.generation.argv) or None

    def is_own(arm: ArmRecord) -> bool:
        return holds(arm.fingerprint.of_server, now.of_server) is True

    def is_before(arm: ArmRecord) -> bool:
        is_same = arm.argv == before and on_same_cards(arm.fingerprint, now)
        return is_same and not is_own(arm)

    own = drift.usable(_samples(ctx, is_own))
    previous = [] if before is None else _samples(ctx, is_before)
    has_gpu = bool(ctx.gpu.read().gpus)
    return drift.Basis(
        slowest_tok_s=drift.slowest_tok_s(own),
        deepest_tokens=max(map(drift.depth_of, own), default=0),
        previous_tok_s=drift.slowest_tok_s(previous),
        headroom_mib=ctx.settings.sweep.headroom_mib if has_gpu else None,
        cache_ram_mib=drift.cache_ram_mib(generation.argv),
        pace=drift.pace_of(own),
    )


def _of_what(one: Fingerprint) -> tuple[object, ...]:
    """The command line and the model."""
    return one.arguments_sha256, one.model_sha256


def _by_what(one: Fingerprint) -> tuple[object, ...]:
    """The build and the driver."""
    return one.engine_sha256, one.driver_version


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
    why = why_no_start(ctx, live, is_tried=True)
    refusals = (*filter(None, (why,)), *_of_the_plan(ctx, generation))
    driver_before = None if generation is None else generation.host.get("driver_version")
    made = Replanned(changed, tuple(dict.fromkeys(refusals)), driver_before, driver)
    if not changed or generation is None:
        return made
    from tunerd.sweep.run import builds_of  # which takes numpy

    builds = builds_of(ctx, generation, str(identity))
    return made if builds is None else replace(made, **asdict(builds))


def _of_the_plan(ctx: Context, generation: Generation | None) -> Sequence[str]:
    if generation is None or generation.profile is None:
        return ()
    try:
        made = make_plan(ctx, request_again(generation))
    # Its files are other ones by now, or gone; what builds say is asked of the one that starts.
    except (ConfigError, EngineError):
        return ()
    except TunerdError as problem:
        return (problem.cause or problem.message,)
    return [one.text for one in made.errors if one.code != UNASKED]
