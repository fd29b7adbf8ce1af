"""Feeds the guards with what is seen, and does what they decide: by a restart, or by a unit of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog

from tunerd.app import Context
from tunerd.engine.builds import dry_arguments, refusal, request_again
from tunerd.engine.flags import without_secrets
from tunerd.engine.health import FailureKind, classify
from tunerd.engine.probe import Found
from tunerd.engine.server import LlamaServer
from tunerd.engine.serving import read_live_unit
from tunerd.errors import Busy, DeployError, TunerdError, UsageError
from tunerd.machine.files import is_locked
from tunerd.measure.answer import Sample
from tunerd.measure.conditions import FingerprintReader
from tunerd.measure.evidence import ArmRecord, Fingerprint, holds
from tunerd.production.apply import apply
from tunerd.production.own import OwnUnit, start_own_unit
from tunerd.production.plan import Plan, make_plan
from tunerd.records import plain
from tunerd.result import ActionResult, Level, note
from tunerd.sweep.record import reading
from tunerd.sweep.run import builds_of
from tunerd.sweep.schedule import write_settings
from tunerd.units.generations import Generation
from tunerd.units.live import LiveUnit
from tunerd.units.manager import UP
from tunerd.units.systemd import Notifier
from tunerd.watch.figures import UNKNOWN, Event, Reading
from tunerd.watch.guards import (
    Act,
    Confirmed,
    Death,
    DeathsState,
    Decision,
    HangRules,
    HangState,
    Margin,
    OomRules,
    OomState,
    Policy,
    Replanned,
    Seen,
    UpgradeState,
    answered,
    confirmed_by,
    deaths_recalled,
    decide,
    depth_of,
    hang_recalled,
    look_at_deaths,
    look_at_oom,
    look_for_deaths,
    look_for_hang,
    look_for_upgrade,
    refused,
    slowest_tok_s,
    unanswered,
    usable,
    within_an_hour,
)
from tunerd.watch.history import history
from tunerd.watch.judgement import Basis, cache_ram_mib
from tunerd.watch.probation import Probation
from tunerd.watch.speed import (
    KEY,
    REASON,
    Findings,
    Speed,
    engine_seen,
    findings_path,
    findings_stamp,
    is_raise,
    margin_now,
    read_findings,
    restart_server,
    serving_by_profile,
)

ACT_UNIT = "tunerd-guard.service"
CHECK_UNIT = "tunerd-guard-check.service"
_GUARD_RESTART_S = 300.0
_CHECK_AGAIN_S = 60.0
# The end of a life, with room for a backtrace: what was said before is no cause of its death.
_LAST_LINES = 100
_MOST_DEATHS = 5
_GUARD_EVENTS = 200
_GPU, _GPU_BACK = "gpu", "gpu-back"
_UPGRADES = ("upgrade", "upgrade-refused")
_RAISES = "the fit margin was raised"
_OF_A_RAISE = ("oom", "guard-acted", "guard-failed")

log = structlog.get_logger()


class CutShortError(BaseException):
    """The daemon shall end while it waits for the server."""


class Guarding:
    """All guards over one unit.

    Args:
        ctx: Where, with the settings that say what they may do.
        notifier: Told of what takes longer than the watchdog waits.
        tell: Takes what a person should hear once.
        server: The server as it is reached now; None where nobody knows.
    """

    def __init__(
        self,
        ctx: Context,
        notifier: Notifier,
        tell: Callable[[Event], None],
        server: Callable[[], LlamaServer | None],
    ) -> None:
        self._probation = Probation(ctx, self._basis_of)
        self._speed = Speed(ctx)
        self.take_over(ctx)
        self._notifier = notifier
        self._tell = tell
        self._server = server
        self._before: Reading | None = None
        self._last: Reading | None = None
        self._oom = OomState()
        self._seen = Seen()
        self._hang = HangState()
        self._upgrade = UpgradeState()
        self._findings = Findings()
        self._found_at: object = None
        self._checked: object = None
        self._checked_s: float | None = None
        self._upgrade_said = ""
        self._raises = False
        self._restart_when_idle = False
        self._waits = False
        self._raise_failed: int | None = None
        self._deaths = DeathsState()
        self._has_recalled = False
        self._gpu_problem: str | None = None

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on; what was seen and done is still known."""
        settings = ctx.settings.guards
        self._ctx = ctx
        self._probation.take_over(ctx)
        self._speed.take_over(ctx)
        self._oom_rules = OomRules(Policy(settings.oom), settings.oom_steps)
        self._hang_rules = HangRules(
            Policy(settings.hang), settings.hang_every_s, settings.hang_restarts_per_hour
        )
        self._drift_policy = Policy(settings.drift)
        self._upgrade_policy = Policy(settings.upgrade)
        if settings.drift != "act":
            self._restart_when_idle = False

    def after(self, reading: Reading) -> None:
        """What follows from a look. While something is changed or measured, nothing does."""
        if not self._has_recalled:
            self._recall()
            self._has_recalled = True
        self._look_at_cards(reading)
        worse = self._probation.after(reading)
        if worse is not None:
            self._probation.begin_taking_back(worse)
        if self._is_under_way() or reading.measuring is not None:
            self._before = None
            self._hang = HangState(restarts_s=self._hang.restarts_s)
            return
        if reading.engine.active_state == UNKNOWN:
            return  # the service manager does not answer: what was seen before still holds
        self._look_for_deaths(reading)
        self._before = reading
        if self._raises:
            return
        self._look_for_hang(reading)
        self._look_for_drift(reading)
        self._look_for_upgrade(reading)
        self._freshen(reading)

    @property
    def longest_wait_s(self) -> float:
        """How soon the next look must follow, however busy the server is."""
        watches = self._probation.is_watching()
        return self._ctx.settings.probation.every_s if watches else float("inf")

    def pause(self) -> None:
        """The daemon ends, in good order."""
        self._probation.pause()

    def _basis_of(self, generation: Generation) -> Basis | None:
        self._read_findings()
        found = self._findings
        return found.basis if found.generation == generation.number else None

    def _recall(self) -> None:
        """What guards before these did, as they told it: a limit holds whatever becomes of a daemon."""
        told = history(self._ctx, 0.0, 0.0, events=_GUARD_EVENTS).events
        self._hang = hang_recalled(told, self._ctx.clock.now_s())
        self._deaths = deaths_recalled(told)
        card = next((event for event in told if event.kind in (_GPU, _GPU_BACK)), None)
        self._gpu_problem = card.text if card is not None and card.kind == _GPU else None
        newest = next((event for event in told if event.kind in _OF_A_RAISE), None)
        if newest is not None and newest.kind == "oom" and self._has_raised_since(newest.at_s):
            self._raises = True

    def _has_raised_since(self, at_s: float) -> bool:
        """Whether a raise that was told of then has begun, and nobody has told how it ended."""
        if self._ctx.services.state(ACT_UNIT).active_state in UP:
            return True
        newest = next(iter(self._ctx.generations.entries()), None)
        return (
            newest is not None
            and is_raise(newest.generation)
            and newest.generation.created_s >= at_s
        )

    def _is_under_way(self) -> bool:
        """Whether someone changes the unit; says how an own action ended, when it has."""
        if self._raises:
            state = self._ctx.services.state(ACT_UNIT)
            if state.active_state in UP:
                return True
            self._raises = False
            self._say_end(state.result)
        return is_locked(self._ctx.paths.lock)

    def _say_end(self, result: str) -> None:
        entry = self._ctx.generations.serving(self._ctx.unit)
        if result == "success" and entry is not None and is_raise(entry.generation):
            number = entry.generation.number
            self._event("guard-acted", "note", f"{_RAISES}: generation {number} serves", None)
            return
        try:
            lines = self._ctx.services.log(ACT_UNIT, max_lines=20)
        except TunerdError:
            lines = ()
        self._raise_failed = None if entry is None else entry.generation.number
        why = next((line for line in reversed(lines) if line.startswith("error:")), result)
        self._event(
            "guard-failed", "error", f"{_RAISES}: it failed ({why})", f"journalctl -u {ACT_UNIT}"
        )

    def _look_at_cards(self, reading: Reading) -> None:
        """A card or a driver that cannot be read any more, and one that can be again."""
        before, self._gpu_problem = self._gpu_problem, reading.gpu_problem
        if reading.gpu_problem is not None and reading.gpu_problem != before:
            self._event(_GPU, "error", reading.gpu_problem, "`tunerd doctor`; `journalctl -k`")
        elif reading.gpu_problem is None and before is not None:
            self._event(_GPU_BACK, "note", f"the cards can be read again; before: {before}", None)

    # Out of memory

    def _look_for_deaths(self, reading: Reading) -> None:
        self._deaths, back = look_for_deaths(
            self._deaths, reading.at_s, is_ready=reading.engine.is_ready is True
        )
        if back is not None:
            self._say(back)
        engine, seen = reading.engine, self._seen
        if engine.is_active:
            self._seen = seen.then(engine.life, reading.free_mib, is_ready=engine.is_ready is True)
        n, life = _deaths(self._before, reading)
        if not n:
            return
        kind, words = self._cause(life)
        has_given_up = engine.active_state == "failed"
        seen = seen if seen.life == life else Seen(life)
        death = Death(reading.at_s, kind, words, has_given_up, seen)
        log.warning("server.died", times=n, cause=str(kind), words=words)
        if self._probation.is_watching():
            return  # which takes back what dies
        for _ in range(min(n, _MOST_DEATHS)):
            self._oom, decision = look_at_oom(self._oom, death, self._margin(), self._oom_rules)
            if decision is not None:
                self._decided(decision)
                return
        is_told = kind is FailureKind.OUT_OF_VRAM and self._oom.said and not death.has_given_up
        # `timeout` is how a stop ends that was not obeyed: nobody wants to be told of that.
        if is_told or reading.engine.result == "timeout":
            return
        for _ in range(min(n, _MOST_DEATHS)):
            self._deaths, decision = look_at_deaths(self._deaths, death)
            if decision is not None:
                self._say(decision)

    def _cause(self, life: str | None) -> tuple[FailureKind, str]:
        try:
            lines = self._ctx.services.log(
                self._ctx.unit, invocation_id=life, max_lines=_LAST_LINES
            )
        except TunerdError as problem:
            return FailureKind.UNKNOWN, problem.message
        found = classify(lines)
        return found.kind, found.words

    def _margin(self) -> Margin:
        try:
            margin = margin_now(self._ctx)
        except TunerdError:
            return Margin(None, 0, is_pinned=False)
        entry = self._ctx.generations.serving(self._ctx.unit)
        if entry is not None and entry.generation.number == self._raise_failed:
            return replace(margin, left_alone="raising it failed")
        return margin

    # Hang

    def _look_for_hang(self, reading: Reading) -> None:
        cores = self._cores(reading)
        self._hang, is_due = look_for_hang(self._hang, reading, cores, self._hang_rules)
        server = self._server() if is_due else None
        if server is None:
            return
        limit_s = self._ctx.settings.guards.hang_limit_s
        with self._waiting(limit_s + _GUARD_RESTART_S):
            answer = server.complete("1", n_predict=2, timeout_s=limit_s)
        now_s = self._ctx.clock.now_s()
        if answer.problem is None and answer.n_predicted:
            self._hang = answered(self._hang, now_s)
            return
        if answer.is_refused:  # it answers: another kind of server, or a key that is not known here
            log.info("guard.cannot_ask", unit=self._ctx.unit, problem=answer.problem)
            self._hang = refused(self._hang, now_s)
            return
        problem = answer.problem or "it holds no tokens"
        self._hang, decision = unanswered(self._hang, now_s, problem, self._hang_rules)
        if decision is not None:
            self._decided(decision)

    def _cores(self, reading: Reading) -> float | None:
        """Processors that the server kept busy since the look before."""
        before = self._last
        self._last = reading
        if before is None or before.engine.pid != reading.engine.pid:
            return None
        then, now = before.engine.cpu_s, reading.engine.cpu_s
        seconds = reading.at_s - before.at_s
        return None if then is None or now is None or seconds <= 0 else (now - then) / seconds

    # Drift

    def _look_for_drift(self, reading: Reading) -> None:
        self._read_findings()
        engine, confirmed = reading.engine, self._findings.confirmed
        if confirmed is not None:
            decision = self._speed.after(
                reading,
                confirmed,
                self._drift_policy,
                engine_sha256=self._findings.engine_sha256,
            )
            if decision is not None:
                self._restart_when_idle = decision.act is Act.RESTART
                self._say(decision)
        if self._restart_when_idle and engine.is_busy is False and self._may_restart(reading.at_s):
            self._restart_when_idle = False
            self._hang = replace(self._hang, restarts_s=(*self._hang.restarts_s, reading.at_s))
            self._restart()

    def _may_restart(self, at_s: float) -> bool:
        """Both guards together restart no oftener than the one against hangs may."""
        recent = within_an_hour(self._hang.restarts_s, at_s)
        return len(recent) < self._hang_rules.restarts_per_hour

    # Upgrade

    def _look_for_upgrade(self, reading: Reading) -> None:
        seen = engine_seen(self._ctx, reading.driver_version)
        self._upgrade, is_due = look_for_upgrade(self._upgrade, seen, self._upgrade_policy)
        if is_due:
            log.info("engine.changed", driver=seen.driver_version)
            self._checked_s = None
            self._checked = None

    def _freshen(self, reading: Reading) -> None:
        """Have the evidence read and the plan made anew when what they rest on has changed."""
        stamp = findings_stamp(self._ctx, reading.engine.life, self._upgrade.known)
        now_s = self._ctx.clock.monotonic_s()
        if stamp == self._checked or reading.engine.life is None:
            return
        if self._checked_s is not None and now_s - self._checked_s < _CHECK_AGAIN_S:
            return
        if self._ctx.services.state(CHECK_UNIT).active_state in UP:
            return
        self._checked, self._checked_s = stamp, now_s
        self._begin(CHECK_UNIT, "finds out what the guards judge by", ["guard", "check"])

    def _read_findings(self) -> None:
        found_at, findings = read_findings(self._ctx, self._found_at)
        if findings is None:
            return
        self._found_at, self._findings = found_at, findings
        if findings.replanned is None or self._upgrade_policy is Policy.OFF:
            return
        settings = self._ctx.settings
        decision = decide(
            findings.replanned,
            self._upgrade_policy,
            has_nights=settings.schedule.enabled and settings.sweep.window is not None,
        )
        text = "" if decision is None else f"{decision.text} ({decision.evidence})"
        if decision is not None and text != self._upgrade_said and not self._was_said(text):
            self._say(decision)
        self._upgrade_said = text

    def _was_said(self, text: str) -> bool:
        """Whether a daemon before this one told the same of the generation that serves."""
        entry = self._ctx.generations.serving(self._ctx.unit)
        since_s = 0.0 if entry is None else entry.generation.created_s
        told = history(self._ctx, 0.0, 0.0, events=_GUARD_EVENTS).events
        newest = next((event for event in told if event.kind in _UPGRADES), None)
        return newest is not None and newest.text == text and newest.at_s >= since_s

    # What is done

    def _decided(self, decision: Decision) -> None:
        self._say(decision)
        if decision.act is Act.RESTART:
            self._restart()
        elif decision.act is Act.RAISE_MARGIN:
            words = ["guard", "raise-margin"]
            if self._begin(ACT_UNIT, "raises the fit margin", words):
                self._raises = True
            else:
                text = "the fit margin could not be raised: its unit does not start"
                self._event("guard-failed", "error", text, "`tunerd guard raise-margin`")

    def _restart(self) -> None:
        try:
            with self._waiting(_GUARD_RESTART_S):
                restart_server(self._ctx)
        except Busy:
            return  # whoever changes it now starts it too
        except TunerdError as problem:
            cause = f": {problem.cause}" if problem.cause else ""
            self._event("guard-failed", "error", f"{problem.message}{cause}", problem.hint)

    @contextlib.contextmanager
    def _waiting(self, seconds: float) -> Iterator[None]:
        """For what the watchdog must wait for, and the end of the daemon must not."""
        self._notifier.patience(seconds)
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self._notifier.patience(None)

    def cut_short(self) -> None:
        """End a wait for the server; for a signal's handler. A restart goes on without the daemon.

        Raises:
            CutShortError: in the middle of such a wait.
        """
        if self._waits:
            raise CutShortError

    def _begin(self, unit: str, what: str, words: list[str]) -> bool:
        try:
            start_own_unit(self._ctx, OwnUnit(unit, what, words))
        except TunerdError as problem:
            log.warning("guard.not_started", unit=unit, problem=problem.message)
            return False
        return True

    def _say(self, decision: Decision) -> None:
        text = f"{decision.text} ({decision.evidence})"
        self._event(decision.kind, decision.level, text, decision.hint)

    def _event(self, kind: str, level: str, text: str, hint: str | None) -> None:
        self._tell(Event(self._ctx.clock.now_s(), kind, level, text, hint))


def _deaths(before: Reading | None, now: Reading) -> tuple[int, str | None]:
    """How often the server died by itself since the look before, and the life that is known to have."""
    engine = now.engine
    has_failed = engine.active_state == "failed" and engine.result != "success"
    if before is None:
        return (1, engine.life) if has_failed else (0, None)
    earlier = before.engine
    n = 0
    if engine.n_restarts is not None and earlier.n_restarts is not None:
        n = max(0, engine.n_restarts - earlier.n_restarts)
    if has_failed and earlier.active_state != "failed":
        n += 1
    is_dead = has_failed or engine.sub_state.startswith("auto-restart")
    return n, engine.life if is_dead else earlier.life


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
    basis = None if generation is None else _basis(ctx, generation, now)
    replanned = _replanned(ctx, live, generation, now.engine_sha256, driver)
    payload: dict[str, Any] = {
        "at_s": ctx.clock.now_s(),
        "generation": None if generation is None else generation.number,
        "engine_sha256": now.engine_sha256,
        "driver_version": driver,
        "basis": plain(basis),
        "confirmed": plain(confirmed),
        "replanned": plain(replanned),
    }
    ctx.files.make_folder(ctx.paths.state_dir)
    ctx.files.write_json(findings_path(ctx), payload)
    return ActionResult("guard check", payload, has_acted=True)


def _confirmed(ctx: Context, now: Fingerprint) -> Confirmed | None:
    """What was measured of exactly this server, on whatever driver and build; the newest of them."""
    if now.arguments_sha256 is None:
        return None
    then: list[Fingerprint] = []

    def counts(arm: ArmRecord) -> bool:
        if not _is_of(arm.fingerprint, now):
            return False
        then.append(arm.fingerprint)
        return _alike(arm.fingerprint, then[0])

    found = _samples(ctx, counts)
    return confirmed_by(found, then[0]) if then else None


def _samples(ctx: Context, counts: Callable[[ArmRecord], bool]) -> list[Sample]:
    """Those of the arms that count, the newest run first; none where the store cannot be read."""
    found: list[Sample] = []
    try:
        with reading(ctx) as store:
            for run in () if store is None else store.runs(limit=_LOOK_BACK):
                for arm in run.record.arms:
                    if store is not None and counts(arm):
                        found += store.samples(run.number, arm=arm.name)
    except TunerdError:
        return []
    return found


def basis_of(ctx: Context, generation: Generation) -> Basis:
    """What a probation of the generation that serves goes by; speeds are None where too little was measured."""
    live = read_live_unit(ctx)
    now = Fingerprint()
    if live.argv is not None:
        now = FingerprintReader(ctx).of(live.argv, live.environment).fingerprint
    return _basis(ctx, generation, now)


def _basis(ctx: Context, generation: Generation, now: Fingerprint) -> Basis:
    replaced = ctx.generations.serving(generation.unit, before=generation.number)
    # As it is kept with what was measured of it; one that was made by hand has none.
    before = None if replaced is None else without_secrets(replaced.generation.argv) or None
    own = _samples(ctx, lambda arm: _is_same(arm.fingerprint, now))

    def is_before(arm: ArmRecord) -> bool:
        return arm.argv == before and not _is_same(arm.fingerprint, now)

    previous = [] if before is None else _samples(ctx, is_before)
    has_gpu = bool(ctx.gpu.read().gpus)
    return Basis(
        slowest_tok_s=slowest_tok_s(own),
        deepest_tokens=max((depth_of(sample) for sample in usable(own)), default=0),
        n_samples=len(usable(own)),
        previous_tok_s=slowest_tok_s(previous),
        headroom_mib=ctx.settings.sweep.headroom_mib if has_gpu else None,
        cache_ram_mib=cache_ram_mib(generation.argv),
    )


def _is_same(then: Fingerprint, now: Fingerprint) -> bool:
    """The same server on the same machine, whatever it was asked."""
    return holds(
        replace(then, workload_sha256=None, tunerd_version=None),
        replace(now, workload_sha256=None, tunerd_version=None),
    ) is True  # fmt: skip


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
        said = refusal(ctx, found, dry_arguments(live.arguments))
    except TunerdError as problem:
        return (problem.words,)
    return () if said is None else (said,)


def _of_the_plan(ctx: Context, generation: Generation | None) -> Sequence[str]:
    if generation is None or generation.profile is None:
        return ()
    try:
        made = make_plan(ctx, request_again(generation))
    except TunerdError as problem:
        return (problem.cause or problem.message,)
    return [message.text for message in made.messages if message.level is Level.ERROR]


def raise_margin(ctx: Context) -> ActionResult:
    """`tunerd guard raise-margin`: deploy what serves with the next larger margin.

    The server that was there is started again where that does not serve either.

    Raises:
        UsageError: there is no margin to be raised.
        DeployError: more than the margin would change; else as `apply`.
        RolledBack, Stranded: as `apply`.
    """
    ctx = replace(ctx, is_unattended=True)
    generation = serving_by_profile(ctx).generation
    margin = margin_now(ctx)
    target_mib = margin.next_mib
    if target_mib is None:
        raise UsageError(
            f"profile `{generation.profile}` sets no {KEY}", hint="lower serving.ctx_size"
        )
    again = request_again(generation)
    request = replace(again, options={**again.options, KEY: target_mib})
    try:
        done = apply(
            ctx, request, drain=False,
            confirm=_only_the_margin(generation), reason=REASON,
            probation=False,  # which would go back to the margin that ran out
        )  # fmt: skip
    except TunerdError:
        _start_anyway(ctx)
        raise
    text = f"the fit margin is {target_mib} MiB now, {margin.fit_mib} MiB ran out of VRAM"
    payload = {**done.payload, "fit_mib": target_mib, "fit_before_mib": margin.fit_mib}
    return replace(
        done, command="guard raise-margin", payload=payload,
        messages=(note("margin", text, f"{KEY} = {target_mib} in the profile keeps it"), *done.messages),
    )  # fmt: skip


def _only_the_margin(generation: Generation) -> Callable[[Plan], None]:
    """Refuses where a person edited the unit, or the profile says something else than what serves."""

    def confirm(made: Plan) -> None:
        if made.live_sha256 != generation.unit_sha256:
            raise DeployError(
                "the unit was edited by hand, so no guard replaces it",
                state="nothing was changed",
                hint="`tunerd verify` shows the difference",
            )
        now, then = (_without_margin(argv) for argv in (made.command.argv, generation.argv))
        if now != then:
            differ = set(now) ^ set(then)
            raise DeployError(
                f"profile `{generation.profile}` says something else by now than what serves",
                cause=f"these would change beside the margin: {' '.join(sorted(differ))}"[:500],
                state="nothing was changed",
                hint=f"`tunerd plan {generation.profile}` shows it; `tunerd apply` deploys it",
            )

    return confirm


def _without_margin(argv: Sequence[str]) -> list[str]:
    flags = ("--fit-target", "--fit-margin")
    return [word for before, word in pairwise(("", *argv)) if before not in flags]


def _start_anyway(ctx: Context) -> None:
    """A server that dies again and again still serves in between; stopped it never would."""
    try:
        if not ctx.services.state(ctx.unit).is_active:
            ctx.services.reset_failed(ctx.unit)
            ctx.services.start(ctx.unit)
    except TunerdError:
        return


def set_guard(ctx: Context, guard: str, policy: str) -> ActionResult:
    """Write the switch of one guard into tunerd.toml.

    Args:
        ctx: Where.
        guard: oom, hang, drift or upgrade.
        policy: act, advise or off.

    Raises:
        UsageError: there is no such switch.
        HostError: the file cannot be read or written.
    """
    key = f"guards.{guard}"
    write_settings(ctx, {key: policy})
    hint = "the daemon takes it over by itself; `tunerd guard show`"
    message = note("written", f"`{ctx.paths.settings_file}` was changed", hint)
    return ActionResult("guard set", {"changed": {key: policy}}, (message,), has_acted=True)
