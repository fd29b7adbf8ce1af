"""Feeds the guards with what is seen, and does what they decide: by a restart, or by a unit of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from tunerd.actions.context import Context
from tunerd.actions.guard_findings import Findings, engine_seen, findings_stamp, read_findings
from tunerd.actions.guard_margin import is_raise, margin_now
from tunerd.actions.guard_restart import restart_server
from tunerd.actions.own_unit import OwnUnit, probation_unit, start_own_unit
from tunerd.actions.telemetry import history
from tunerd.core.failure import FailureKind, classify
from tunerd.core.guards import deaths, drift, hang, oom, upgrade
from tunerd.core.guards.decision import Act, Decision, Policy
from tunerd.core.request_log import read_requests
from tunerd.core.telemetry.history import Event
from tunerd.core.telemetry.reading import UNKNOWN, EngineNow, Reading
from tunerd.errors import Busy, TunerdError
from tunerd.system.files import is_locked
from tunerd.system.llama import LlamaServer
from tunerd.system.notify import Notifier

ACT_UNIT = "tunerd-guard.service"
CHECK_UNIT = "tunerd-guard-check.service"
_RESTART_S = 300.0
_CHECK_AGAIN_S = 60.0
_LOG_LINES = 300
_REQUEST_LINES = 3000
_MOST_DEATHS = 5
_EVENTS = 200
_GPU, _GPU_BACK = "gpu", "gpu-back"
_UPGRADES = ("upgrade", "upgrade-refused")
_RAISES = "the fit margin was raised"
_OF_A_RAISE = ("oom", "guard-acted", "guard-failed")
_UP = {"active", "activating", "deactivating"}

log = structlog.get_logger()


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
        settings = ctx.settings.guards
        self._ctx = ctx
        self._notifier = notifier
        self._tell = tell
        self._server = server
        self._oom_rules = oom.OomRules(Policy(settings.oom), settings.oom_steps)
        self._hang_rules = hang.HangRules(
            Policy(settings.hang), settings.hang_every_s, settings.hang_restarts_per_hour
        )
        self._drift_policy = Policy(settings.drift)
        self._upgrade_policy = Policy(settings.upgrade)
        self._before: Reading | None = None
        self._last: Reading | None = None
        self._oom = oom.OomState()
        self._hang = hang.HangState()
        self._drift = drift.DriftState()
        self._upgrade = upgrade.UpgradeState()
        self._others_mib: tuple[str | None, int | None] = (None, None)
        self._findings = Findings()
        self._found_at: object = None
        self._checked: object = None
        self._checked_s: float | None = None
        self._upgrade_said = ""
        self._acts: str | None = None
        self._restart_when_idle = False
        self._raise_failed: int | None = None
        self._deaths = deaths.DeathsState()
        self._has_taken_over = False
        self._gpu_problem: str | None = self._gpu_problem_told()

    def after(self, reading: Reading) -> None:
        """What follows from a look. While something is changed or measured, nothing does."""
        self._look_at_cards(reading)
        if not self._has_taken_over:
            self._take_over()
            self._has_taken_over = True
        if self._is_under_way() or reading.measuring is not None:
            self._before = None
            self._hang = hang.HangState(restarts_s=self._hang.restarts_s)
            return
        if reading.engine.active_state == UNKNOWN:
            return  # the service manager does not answer: what was seen before still holds
        self._look_for_deaths(reading)
        self._before = reading
        if self._acts is not None:
            return
        self._look_for_hang(reading)
        self._look_for_drift(reading)
        self._look_for_upgrade(reading)
        self._freshen(reading)

    def _take_over(self) -> None:
        """What guards before these did, as they told it: a limit holds whatever becomes of a daemon."""
        told = history(self._ctx, 0.0, 0.0, events=_EVENTS).events
        self._hang = hang.recalled(told, self._ctx.clock.now_s())
        self._deaths = deaths.recalled(told)
        newest = next((event for event in told if event.kind in _OF_A_RAISE), None)
        if newest is not None and newest.kind == "oom" and self._has_raised_since(newest.at_s):
            self._acts = _RAISES

    def _has_raised_since(self, at_s: float) -> bool:
        """Whether a raise that was told of then has begun, and nobody has told how it ended."""
        if self._ctx.services.state(ACT_UNIT).active_state in _UP:
            return True
        newest = next(iter(self._ctx.generations.entries()), None)
        return (
            newest is not None
            and is_raise(newest.generation)
            and newest.generation.created_s >= at_s
        )

    def _is_under_way(self) -> bool:
        """Whether someone changes the unit; says how an own action ended, when it has."""
        if self._acts is not None:
            state = self._ctx.services.state(ACT_UNIT)
            if state.active_state in _UP:
                return True
            what, self._acts = self._acts, None
            self._say_end(what, state.result)
        return is_locked(self._ctx.paths.lock)

    def _say_end(self, what: str, result: str) -> None:
        entry = self._ctx.generations.serving(self._ctx.unit)
        if result == "success" and entry is not None and is_raise(entry.generation):
            number = entry.generation.number
            self._event("guard-acted", "note", f"{what}: generation {number} serves", None)
            return
        try:
            lines = self._ctx.services.log(ACT_UNIT, max_lines=20)
        except TunerdError:
            lines = ()
        self._raise_failed = None if entry is None else entry.generation.number
        why = next((line for line in reversed(lines) if line.startswith("error:")), result)
        self._event(
            "guard-failed", "error", f"{what}: it failed ({why})", f"journalctl -u {ACT_UNIT}"
        )

    def _look_at_cards(self, reading: Reading) -> None:
        """A card or a driver that cannot be read any more, and one that can be again."""
        before, self._gpu_problem = self._gpu_problem, reading.gpu_problem
        if reading.gpu_problem is not None and reading.gpu_problem != before:
            self._event(_GPU, "error", reading.gpu_problem, "`tunerd doctor`; `journalctl -k`")
        elif reading.gpu_problem is None and before is not None:
            self._event(_GPU_BACK, "note", f"the cards can be read again; before: {before}", None)

    def _gpu_problem_told(self) -> str | None:
        """What was told last of cards, be it by a daemon before this one; None if all was well then."""
        told = history(self._ctx, 0.0, 0.0, events=_EVENTS).events
        newest = next((event for event in told if event.kind in (_GPU, _GPU_BACK)), None)
        return newest.text if newest is not None and newest.kind == _GPU else None

    # Out of memory

    def _look_for_deaths(self, reading: Reading) -> None:
        self._deaths, back = deaths.look(
            self._deaths, reading.at_s, is_ready=reading.engine.is_ready is True
        )
        if back is not None:
            self._say(back)
        n, life = _deaths(self._before, reading)
        if not n:
            return
        kind, words = self._cause(life)
        death = oom.Death(reading.at_s, kind, words, reading.engine.active_state == "failed")
        log.warning("server.died", times=n, cause=str(kind), words=words)
        if self._is_on_probation():
            return  # which takes back what dies
        for _ in range(min(n, _MOST_DEATHS)):
            self._oom, decision = oom.look_at_death(
                self._oom, death, self._margin(), self._oom_rules
            )
            if decision is not None:
                self._decided(decision)
                return
        is_told = kind is FailureKind.OUT_OF_VRAM and self._oom.said and not death.has_given_up
        # `timeout` is how a stop ends that was not obeyed: nobody wants to be told of that.
        if is_told or reading.engine.result == "timeout":
            return
        for _ in range(min(n, _MOST_DEATHS)):
            self._deaths, decision = deaths.look_at_death(self._deaths, death)
            if decision is not None:
                self._say(decision)

    def _cause(self, life: str | None) -> tuple[FailureKind, str]:
        try:
            lines = self._ctx.services.log(self._ctx.unit, invocation_id=life, max_lines=_LOG_LINES)
        except TunerdError as problem:
            return FailureKind.UNKNOWN, problem.message
        found = classify(lines)
        return found.kind, found.words

    def _is_on_probation(self) -> bool:
        entry = self._ctx.generations.serving(self._ctx.unit)
        if entry is None:
            return False
        unit = probation_unit(entry.generation.number)
        return self._ctx.services.state(unit).active_state in _UP

    def _margin(self) -> oom.Margin:
        try:
            margin = margin_now(self._ctx)
        except TunerdError:
            return oom.Margin(None, 0, is_pinned=False)
        entry = self._ctx.generations.serving(self._ctx.unit)
        if entry is not None and entry.generation.number == self._raise_failed:
            return replace(margin, left_alone="raising it failed")
        return margin

    # Hang

    def _look_for_hang(self, reading: Reading) -> None:
        engine = reading.engine
        counters = engine.counters
        seen = hang.HangLook(
            at_s=reading.at_s,
            life=engine.life,
            is_ready=engine.is_ready is True,
            is_busy=engine.is_busy,
            n_predicted=None if counters is None else counters.n_predicted,
            cores=self._cores(reading),
        )
        self._hang, is_due = hang.look(self._hang, seen, self._hang_rules)
        server = self._server() if is_due else None
        if server is None:
            return
        limit_s = self._ctx.settings.guards.hang_limit_s
        self._notifier.patience(limit_s + _RESTART_S)
        answer = server.complete("1", n_predict=2, timeout_s=limit_s)
        self._notifier.patience(None)
        now_s = self._ctx.clock.now_s()
        if answer.problem is None and answer.n_predicted:
            self._hang = hang.answered(self._hang, now_s)
            return
        if answer.is_refused:  # it answers: another kind of server, or a key that is not known here
            log.info("guard.cannot_ask", unit=self._ctx.unit, problem=answer.problem)
            self._hang = hang.refused(self._hang, now_s)
            return
        problem = answer.problem or "it holds no tokens"
        self._hang, decision = hang.unanswered(self._hang, now_s, problem, self._hang_rules)
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
        engine = reading.engine
        self._read_findings()
        if self._others_mib[0] != engine.life or self._others_mib[1] is None:
            self._others_mib = (engine.life, reading.others_mib)
        confirmed = self._findings.confirmed
        if confirmed is not None:
            seen = drift.DriftLook(
                at_s=reading.at_s,
                life=engine.life,
                served=engine.served,
                is_alone=_n_at_work(engine) <= 1,
                driver_version=reading.driver_version,
                engine_sha256=self._findings.engine_sha256,
                others_mib=reading.others_mib,
                is_throttled=reading.is_throttled,
                is_idle=_n_at_work(engine) == 0,
            )
            known = replace(confirmed, others_mib=self._others_mib[1])
            self._drift, decision = drift.look(self._drift, seen, known, self._drift_policy)
            if decision is not None:
                decision = self._look_closer(decision, engine.life, known)
            if decision is not None:
                self._restart_when_idle = decision.act is Act.RESTART
                self._say(decision)
        if self._restart_when_idle and engine.is_busy is False and self._may_restart(reading.at_s):
            self._restart_when_idle = False
            self._hang = replace(self._hang, restarts_s=(*self._hang.restarts_s, reading.at_s))
            self._restart()

    def _look_closer(
        self, decision: Decision, life: str | None, confirmed: drift.Confirmed
    ) -> Decision | None:
        """Whether requests like those that were measured are slow as well, by the server's own log."""
        if decision.kind != drift.DRIFT or not drift.is_of_speed(self._drift, confirmed):
            return decision
        try:
            lines = self._ctx.services.log(
                self._ctx.unit, invocation_id=life, max_lines=_REQUEST_LINES
            )
        except TunerdError:
            lines = ()
        found = drift.alike(read_requests(lines).requests, confirmed)
        self._drift, closer = drift.look_closer(self._drift, decision, found, confirmed)
        return closer

    def _may_restart(self, at_s: float) -> bool:
        """Both guards together restart no oftener than the one against hangs may."""
        recent = hang.within_an_hour(self._hang.restarts_s, at_s)
        return len(recent) < self._hang_rules.restarts_per_hour

    # Upgrade

    def _look_for_upgrade(self, reading: Reading) -> None:
        seen = engine_seen(self._ctx, reading.driver_version)
        self._upgrade, is_due = upgrade.look(self._upgrade, seen, self._upgrade_policy)
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
        if self._ctx.services.state(CHECK_UNIT).active_state in _UP:
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
        decision = upgrade.decide(
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
        told = history(self._ctx, 0.0, 0.0, events=_EVENTS).events
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
                self._acts = _RAISES
            else:
                text = "the fit margin could not be raised: its unit does not start"
                self._event("guard-failed", "error", text, "`tunerd guard raise-margin`")

    def _restart(self) -> None:
        self._notifier.patience(_RESTART_S)
        try:
            restart_server(self._ctx)
        except Busy:
            return  # whoever changes it now starts it too
        except TunerdError as problem:
            cause = f": {problem.cause}" if problem.cause else ""
            self._event("guard-failed", "error", f"{problem.message}{cause}", problem.hint)
        finally:
            self._notifier.patience(None)

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


def _n_at_work(engine: EngineNow) -> int:
    """Requests under way, as far as the server tells; two where it does not, for nothing is known then."""
    counters = engine.counters
    waiting = (counters.n_deferred or 0) if counters is not None else 0
    if engine.slots_busy is not None:
        return engine.slots_busy + waiting
    if counters is None or counters.n_processing is None:
        return 2
    return counters.n_processing + waiting
