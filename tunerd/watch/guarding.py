"""Feeds the guards with what is seen, and does what they decide: by a restart, or by a unit of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import structlog

from tunerd.app import Context
from tunerd.engine.choice import request_again
from tunerd.engine.flags import margin_in_force
from tunerd.engine.health import USAGE_LINES, FailureKind, classify, without_usage
from tunerd.engine.server import LlamaServer
from tunerd.engine.serving import stands, with_limit
from tunerd.errors import Busy, DeployError, TunerdError, UsageError
from tunerd.machine.files import is_locked, lock, stamp_of
from tunerd.production.apply import Confirm, apply
from tunerd.production.gate import demand_card, edited_under, is_given_up, may_be_stopped
from tunerd.production.journal import read_record, record_path
from tunerd.production.measurement import read_measurement
from tunerd.production.own import start_own_unit
from tunerd.production.plan import Plan
from tunerd.profile.arm import Best
from tunerd.profile.files import load_profile
from tunerd.profile.layers import Layer
from tunerd.result import ActionResult, note
from tunerd.sweep.schedule import ask_tonight
from tunerd.units.generations import Generation, HistoryEntry, model_stamps
from tunerd.units.manager import UP
from tunerd.units.systemd import Notifier
from tunerd.watch import guards
from tunerd.watch.drift import Basis, Drift
from tunerd.watch.figures import UNKNOWN, EngineNow, Event, Reading, restarts_between
from tunerd.watch.findings import Findings, read_findings
from tunerd.watch.history import history, newest_told
from tunerd.watch.notices import Teller
from tunerd.watch.probation import BY_GUARD, MARGIN_KEY, Probation, is_raise
from tunerd.watch.watcher import server_log

_ACT_UNIT = "tunerd-guard.service"
CHECK_UNIT = "tunerd-guard-check.service"
_GUARD_RESTART_S = 300.0
_RESTART_S = 240.0
_CHECK_AGAIN_S = 60.0
# Longer than since the first start of those that used up the limit of a shipped unit (900 s), so that nothing
# need be reset: a unit that allows fewer, by a person's drop-in, is started no oftener than that says.
_START_AGAIN_S = 900.0
_DAY_S = 86400.0
# The end of a life, with room for a backtrace: what was said before is no cause of its death.
_LAST_LINES = 100
_GUARD_EVENTS = 200
_GPU, _GPU_BACK = "gpu", "gpu-back"
_BEST = "best"
_UPGRADES = ("upgrade", "upgrade-refused")
# Once the server is back, want of memory is another time, and so it is a day later.
_OOM, _OOM_S = ("oom", guards.BACK), 86400.0
_RAISES = "the fit margin was raised"
_OF_A_RAISE = ("oom", "guard-acted", "guard-failed")
_NOT_RESTARTED = "not-restarted"

log = structlog.get_logger()


class CutShortError(BaseException):
    """The daemon shall end while it waits for the server."""


class Guarding(Teller):
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
        super().__init__(ctx, tell)
        self._probation = Probation(ctx, self._basis_of)
        self._drift = Drift(server_log(ctx))
        self._hang = guards.Hang("off", 0.0, 0)
        self._decayed: str | None = None
        self._held: tuple[str | None, str] | None = None
        self.take_over(ctx)
        self._notifier = notifier
        self._server = server
        self._before: Reading | None = None
        self._oom = guards.Deaths()
        self._seen = guards.Seen()
        self._engine: guards.EngineSeen | None = None
        self._findings = Findings()
        self._found_at: object = None
        self._checked: object = None
        self._checked_s: float | None = None
        # The generation that a raise which is under way began from.
        self._raised_from: int | None = None
        self._waits = False
        self._raise_failed: int | None = None
        # What was told last of some kinds, and of which generation, where the history cannot be kept.
        self._told_last: dict[tuple[str, ...], tuple[int | None, str]] = {}
        self._deaths = guards.Deaths()
        self._has_recalled = False
        self._failed_s: float | None = None
        self._gpu_problem: str | None = None

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on; what was seen and done is still known."""
        super().take_over(ctx)
        settings = ctx.settings.guards
        self._probation.take_over(ctx)
        self._settings = settings
        self._hang.policy, self._hang.every_s = settings.hang, settings.hang_every_s
        self._hang.restarts_per_hour = settings.hang_restarts_per_hour
        if settings.drift != "act":
            self._decayed = None

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
            self._hang.forget()
            self._hang.has_given_up = False
            return
        if reading.engine.active_state == UNKNOWN:
            return  # the service manager does not answer: what was seen before still holds
        before = self._before
        self._look_for_deaths(before, reading)
        self._before = (
            reading  # not before: what could not be looked into is looked into the next time
        )
        if self._raised_from is not None:
            return
        self._start_again(reading)
        self._look_for_hang(before, reading)
        self._look_for_drift(reading)
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
        self._hang.recall(told, self._ctx.clock.now_s())
        self._deaths = guards.deaths_recalled(told)
        card, newest = newest_told(self._ctx, _GPU, _GPU_BACK), newest_told(self._ctx, *_OF_A_RAISE)
        self._gpu_problem = card.text if card is not None and card.kind == _GPU else None
        serving = self._ctx.deployed()
        if newest is None or serving is None:
            return
        if newest.kind == "oom":
            self._raised_from = self._began_from(newest.at_s)
        elif newest.kind == "guard-failed" and newest.at_s >= serving.created_s:
            self._raise_failed = serving.number

    def _began_from(self, at_s: float) -> int | None:
        """What a raise that was told of then began from; None where it has not begun. How it ended nobody has told."""
        made = self._newest_raise()
        if made is not None and made.generation.created_s >= at_s:
            return made.generation.number - 1
        is_begun = self._ctx.services.state(_ACT_UNIT).active_state in UP
        return self._generation() if is_begun else None

    def _newest_raise(self) -> HistoryEntry | None:
        entries = self._ctx.generations.entries(self._ctx.unit)
        return next((one for one in entries if is_raise(one.generation)), None)

    def _is_under_way(self) -> bool:
        """Whether someone changes the unit; says how an own action ended, when it has."""
        if self._raised_from is not None:
            state = self._ctx.services.state(_ACT_UNIT)
            if state.active_state in UP:
                return True
            began_from, self._raised_from = self._raised_from, None
            self._say_end(began_from, state.result)
        return is_locked(self._ctx.paths.lock)

    def _say_end(self, began_from: int, result: str) -> None:
        """By the generation that it made: of a unit from before a boot, the manager says that it ended well."""
        made = self._newest_raise()
        cause = None
        if made is not None and made.generation.number > began_from:
            if made.ending.outcome.is_done:
                number = made.generation.number
                self._event("guard-acted", "note", f"{_RAISES}: generation {number} serves")
                return
            cause = made.ending.cause
        try:
            lines = self._ctx.services.log(_ACT_UNIT, max_lines=20)
        except TunerdError:
            lines = ()
        self._raise_failed = self._generation()
        said = (line for line in reversed(lines) if line.startswith("error:"))
        text = f"{_RAISES}: it failed ({next(said, cause or result)})"
        self._event("guard-failed", "error", text, self._ctx.log_of(_ACT_UNIT))

    def _look_at_cards(self, reading: Reading) -> None:
        """A card or a driver that cannot be read any more, and one that can be again."""
        before, self._gpu_problem = self._gpu_problem, reading.gpu_problem
        if reading.gpu_problem is not None and reading.gpu_problem != before:
            self._event(_GPU, "error", reading.gpu_problem, "`tunerd doctor`; `journalctl -k`")
        elif reading.gpu_problem is None and before is not None:
            self._event(_GPU_BACK, "note", f"the cards can be read again; before: {before}")

    # Out of memory

    def _look_for_deaths(self, before: Reading | None, reading: Reading) -> None:
        is_ready = reading.engine.is_ready is True
        back = guards.look_for_deaths(self._deaths, reading.at_s, is_ready=is_ready)
        if back is not None:
            self._say(back)
        engine, seen = reading.engine, self._seen
        if engine.is_active:
            self._seen = seen.then(engine.life, reading.free_mib, is_ready=is_ready)
        n, life = _deaths(before, reading)
        if not n:
            return
        kind, words = self._cause(life)
        has_given_up = engine.active_state == "failed"
        seen = seen if seen.life == life else guards.Seen(life)
        death = guards.Death(reading.at_s, kind, words, has_given_up, seen, n)
        log.warning("server.died", times=n, cause=str(kind), words=words)
        if self._probation.is_watching():
            return  # which takes back what dies
        # So ends a stop that was not obeyed, of which nobody wants to be told, and a start that took too long.
        is_late = engine.result == "timeout"
        is_stop = is_late and may_be_stopped(self._ctx, life, engine.result)
        was_deployed, margin = self._generation() is not None, self._margin()
        policy, most = self._settings.oom, self._settings.oom_steps
        decision = guards.look_at_oom(self._oom, death, margin, policy, most)  # counts it
        is_told = (
            decision is not None
            and decision.act is guards.Act.NOTHING
            and self._was_said(_OOM, f"{decision.text} (", within_s=_OOM_S)
        )
        if decision is not None and not is_told:
            self._decided(decision, engine)
            return
        if is_stop or (is_told and not death.has_given_up):
            return
        decision = guards.look_at_deaths(self._deaths, death, was_deployed=was_deployed)
        if decision is not None:
            self._say(decision)

    def _start_again(self, reading: Reading) -> None:
        """Every quarter of an hour where the service manager gave it up: what it died of may be over."""
        now_s, since_s = self._ctx.clock.monotonic_s(), self._failed_s
        if reading.engine.active_state != "failed":
            self._failed_s = None
            return
        if since_s is None or now_s - since_s >= _START_AGAIN_S:
            self._failed_s = now_s
        if since_s is None or self._failed_s == since_s or self._probation.is_watching():
            return
        try:
            with self._waiting(_GUARD_RESTART_S):
                _start_given_up(self._ctx, self._tell_of_start)
        except TunerdError as problem:
            log.warning("guard.not_started", unit=self._ctx.unit, problem=problem.message)

    def _tell_of_start(self) -> None:
        newest = newest_told(self._ctx, guards.FAILED, guards.BACK, guards.AGAIN)
        # Also where the guard against out-of-memory told of its end.
        self._deaths.said = guards.FAILED
        if newest is None or newest.kind != guards.AGAIN:
            text = "the service manager gave up on the server; tunerd starts it every 15 minutes until it serves"
            hint = f"`{self._ctx.systemctl} reset-failed {self._ctx.unit}` ends that"
            self._event(guards.AGAIN, "warning", text, hint)

    def _cause(self, life: str | None) -> tuple[FailureKind, str]:
        unit, most = self._ctx.unit, _LAST_LINES + USAGE_LINES
        try:
            lines = self._ctx.services.log(unit, invocation_id=life, max_lines=most)
        except TunerdError as problem:
            return FailureKind.UNKNOWN, problem.message
        found = classify(without_usage(lines)[-_LAST_LINES:])
        if found.kind is not FailureKind.BAD_ARGUMENT:  # a prompt in the log may say `usage:` too
            found = classify(lines[-_LAST_LINES:])
        found = with_limit(self._ctx, found, self._ctx.unit)
        return found.kind, found.words

    def _margin(self) -> guards.Margin:
        try:
            margin = margin_now(self._ctx)
        except TunerdError as problem:
            return guards.Margin(None, 0, is_pinned=False, left_alone=problem.message)
        if self._raise_failed is not None and self._generation() == self._raise_failed:
            return replace(margin, left_alone="raising it failed")
        return margin

    # Hang

    def _look_for_hang(self, before: Reading | None, reading: Reading) -> None:
        is_due = self._hang.look(reading, _cores(before, reading))
        server = self._server() if is_due else None
        if server is None:
            return
        limit_s = self._settings.hang_limit_s
        with self._waiting(limit_s + _GUARD_RESTART_S):
            answer = server.complete("1", n_predict=2, timeout_s=limit_s)
        now_s = self._ctx.clock.now_s()
        if answer.problem is None and answer.n_predicted:
            self._hang.answered(now_s)
            return
        if answer.is_refused:  # it answers: another kind of server, or a key that is not known here
            log.info("guard.cannot_ask", unit=self._ctx.unit, problem=answer.problem)
            self._hang.refused(now_s)
            return
        decision = self._hang.unanswered(now_s, answer.problem or "it has no tokens")
        if decision is not None:
            self._decided(decision, reading.engine)

    # Drift

    def _look_for_drift(self, reading: Reading) -> None:
        self._read_findings()
        engine, found = reading.engine, self._findings
        # Until they were found out anew they are of the server that was there before.
        if found.confirmed is not None and found.generation == self._generation():
            decision = self._drift.after(
                reading, found.confirmed, self._settings.drift, engine_sha256=found.engine_sha256
            )
            if decision is not None:
                self._decayed = engine.life if decision.act is guards.Act.RESTART else None
                self._say(decision)
        will_start = found.replanned is None or not found.replanned.refusals
        is_due = self._decayed is not None and engine.is_busy is False and will_start
        ctx = self._ctx
        edited = edited_under(ctx, ctx.services.state(ctx.unit)) if is_due else None
        if edited is not None:  # slow is better than what nobody has seen serve
            if self._held != (engine.life, edited.text):
                self._held = (engine.life, edited.text)
                hint = "`tunerd verify` says what differs from what was deployed, and what puts that back"
                self._event(_NOT_RESTARTED, "note", f"nothing was restarted: {edited.text}", hint)
            return
        # Both guards together restart no oftener than the one against hangs may.
        if is_due and self._decayed == engine.life and self._hang.may_restart(reading.at_s):
            self._decayed = None
            self._hang.restarts_s += (reading.at_s,)
            self._event(guards.DECAYED, "warning", "the server slowed down, and is restarted")
            self._restart(engine)

    def _generation(self) -> int | None:
        serving = self._ctx.deployed()
        return None if serving is None else serving.number

    # Upgrade

    def _freshen(self, reading: Reading) -> None:
        """Have the evidence read and the plan made anew when what they rest on has changed."""
        ctx, life = self._ctx, reading.engine.life
        seen = guards.EngineSeen((), None)
        if self._settings.upgrade != "off":
            seen = _engine_seen(ctx, reading.driver_version)
        self._engine, is_settled = guards.look_at_engine(self._engine, seen)
        folders = (ctx.paths.generations_dir, ctx.paths.evidence)
        # What is best moves with what is asked, so it is looked at once a day.
        basis = (life, self._engine, reading.at_s // _DAY_S, *map(stamp_of, folders))
        if not is_settled or life is None or basis == self._checked:
            return
        now_s = ctx.clock.monotonic_s()
        if self._checked_s is not None and now_s - self._checked_s < _CHECK_AGAIN_S:
            return
        if ctx.services.state(CHECK_UNIT).active_state in UP or record_path(ctx).exists():
            return  # a unit that is on trial is not looked at; nor may its record's end be all that changes then
        self._checked, self._checked_s = basis, now_s
        with contextlib.suppress(TunerdError):
            edited_under(ctx, ctx.services.state(ctx.unit))  # remembers what it was started with
        if not self._begin(CHECK_UNIT, "finds out what the guards judge by", ["guard", "check"]):
            self._checked = None

    def _read_findings(self) -> None:
        found_at, findings = read_findings(self._ctx, self._found_at)
        if findings is None:
            return
        self._found_at, self._findings = found_at, findings
        if findings.generation != self._generation():
            return  # of a server that was there before
        if findings.best is not None:
            self._look_at_best(findings.best)
        if findings.replanned is None or self._settings.upgrade == "off":
            return
        if self._before is not None and findings.life not in {None, self._before.engine.life}:
            return  # it was started since: the next check asks of what it was started with
        settings = self._ctx.settings
        decision = guards.decide(
            findings.replanned,
            self._settings.upgrade,
            has_nights=settings.schedule.enabled and settings.sweep.window is not None,
        )
        if decision is not None and not self._was_said(_UPGRADES, _told(decision)):
            self._say(decision)

    def _look_at_best(self, best: Best) -> None:
        """Ask for a sweep where other settings would be faster by now; once for each that would."""
        if not best.has_moved or self._settings.drift == "off":
            return
        text = f"current requests would be answered faster with {best.arm}"
        if self._was_said((_BEST,), text):
            return
        evidence = (
            f"the laws of the newest sweep predict {best.gain:.1%} for the {best.n_requests} requests since, and "
            f"{max(best.before, 0.0):.1%} when it ended"
        )
        hint = "`tunerd sweep start` finds out"
        if self._settings.drift == "act" and ask_tonight(self._ctx):
            hint = "the next opening of the window, any day, finds out: `tunerd schedule show`"
        self._say(guards.Decision(_BEST, guards.Act.NOTHING, "note", text, evidence, hint))

    def _was_said(self, kinds: tuple[str, ...], text: str, within_s: float = math.inf) -> bool:
        """Whether the same was told of the generation that serves, by whatever daemon, and no longer ago."""
        serving, now_s = self._ctx.deployed(), self._ctx.clock.now_s()
        told = None if serving is None else serving.number, text
        before, self._told_last[kinds] = self._told_last.get(kinds), told
        since_s = 0.0 if serving is None else serving.created_s
        if since_s > now_s:  # a clock that was ahead deployed it
            since_s = 0.0
        newest = newest_told(self._ctx, *kinds)
        if newest is None:
            return before == told
        return newest.text.startswith(text) and newest.at_s >= max(since_s, now_s - within_s)

    # What is done

    def _decided(self, decision: guards.Decision, engine: EngineNow) -> None:
        self._say(decision)
        if decision.act is guards.Act.RESTART:
            self._restart(engine)
        elif decision.act is guards.Act.RAISE_MARGIN:
            words = ["guard", "raise-margin", "--yes"]
            if self._begin(_ACT_UNIT, "raises the fit margin", words):
                self._raised_from = self._generation()
            else:
                text = "the fit margin could not be raised: its unit does not start"
                self._event("guard-failed", "error", text, "`tunerd guard raise-margin`")

    def _restart(self, engine: EngineNow) -> None:
        try:
            with self._waiting(_GUARD_RESTART_S):
                restart_server(self._ctx, engine.life)
        # Whoever changes it now starts it too; either was no restart of ours.
        except (Busy, DeployError) as refused:
            self._hang.restarts_s = self._hang.restarts_s[:-1]
            self._event(_NOT_RESTARTED, "note", f"nothing was restarted: {refused.message}")
        except TunerdError as problem:
            self._event(_NOT_RESTARTED, "error", problem.words, problem.hint)

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
            start_own_unit(self._ctx, unit, what, words)
        except TunerdError as problem:
            log.warning("guard.not_started", unit=unit, problem=problem.message)
            return False
        return True

    def _say(self, decision: guards.Decision) -> None:
        self._event(decision.kind, decision.level, _told(decision), decision.hint)


def _told(decision: guards.Decision) -> str:
    return f"{decision.text} ({decision.evidence})"


def _deaths(before: Reading | None, now: Reading) -> tuple[int, str | None]:
    """How often the server died by itself since the look before, and the life that is known to have."""
    engine = now.engine
    has_failed = engine.active_state == "failed" and engine.result != "success"
    if before is None:
        return (1, engine.life) if has_failed else (0, None)
    earlier = before.engine
    n = 0
    if engine.n_restarts is not None and earlier.n_restarts is not None:
        n = restarts_between(earlier.n_restarts, engine.n_restarts)
    if has_failed and earlier.active_state != "failed":
        n += 1
    is_dead = has_failed or engine.sub_state.startswith("auto-restart")
    return n, engine.life if is_dead else earlier.life


def _cores(before: Reading | None, now: Reading) -> float | None:
    """Processors that the server kept busy since the look before."""
    if before is None or before.engine.pid != now.engine.pid:
        return None
    then_s, now_s = before.engine.cpu_s, now.engine.cpu_s
    seconds = now.at_s - before.at_s
    return None if then_s is None or now_s is None or seconds <= 0 else (now_s - then_s) / seconds


def _engine_seen(ctx: Context, driver_version: str | None) -> guards.EngineSeen:
    """A stamp of every file of the engine that serves, of its models and what else it reads, and the driver."""
    generation = ctx.deployed()
    if generation is None:
        return guards.EngineSeen((), driver_version)
    names = {path for path, _ in generation.engine_components} | set(generation.argv[:1])
    names |= set(map(str, model_stamps(generation)))
    files = tuple((name, stamp_of(Path(name))) for name in sorted(names))
    return guards.EngineSeen(files, driver_version)


def restart_server(ctx: Context, life: str | None) -> None:
    """Restart the unit as it stands, where it is in this life.

    Raises:
        Busy: it is being changed or measured; somebody has stopped it, or started it anew.
        DeployError: it would not come back before a reboot.
        ServiceError: it does not start.
    """
    with lock(ctx.paths.lock, purpose="guard restart", since=ctx.now_text()):
        if read_measurement(ctx) is not None:
            raise Busy("a measurement is under way", state="nothing was restarted")
        demand_card(ctx, ctx.services.state(ctx.unit))
        state = ctx.services.state(ctx.unit)  # last: cards take a while to look at
        if not state.is_active or state.life != life:
            text = "the server was stopped or restarted meanwhile"
            raise Busy(text, state="nothing was restarted")
        ctx.services.reset_failed(ctx.unit)
        ctx.services.restart(ctx.unit, timeout_s=_RESTART_S)


def _start_given_up(ctx: Context, tell: Callable[[], None]) -> None:
    """Start the unit where its manager gave it up; one that somebody stopped, edited or disabled stays down.

    Args:
        ctx: Where.
        tell: Called before the start.

    Raises:
        Busy: it is being changed.
        ServiceError: it does not start.
    """
    with lock(ctx.paths.lock, purpose="guard start", since=ctx.now_text()):
        state, serving = ctx.services.state(ctx.unit), ctx.deployed()
        if not state.is_enabled or not is_given_up(ctx, state):
            return
        if serving is None or not stands(ctx, serving):
            return
        if read_record(ctx) is not None or read_measurement(ctx) is not None:
            return
        tell()
        ctx.services.start(ctx.unit, timeout_s=_RESTART_S)


def show_guards(ctx: Context) -> ActionResult:
    """Reads only."""
    settings = ctx.settings.guards
    kept = history(ctx, 0.0, 0.0, events=500)
    rows = [
        ("oom", settings.oom, _OF_A_RAISE,
         "two deaths within half an hour, or one after which systemd gave up, where the engine said that VRAM ran out",
         f"deploy a larger fit margin (128 MiB more; ik: 1664, 1792, 2048, then 256 more), {settings.oom_steps} times at most"),
        ("hang", settings.hang, ("hang",),
         (f"health is ok, nobody asks, nothing was generated for {settings.hang_every_s:.0f} s, and two tiny "
         f"generations fail or get no answer in {settings.hang_limit_s:.0f} s"),
         f"restart it, {settings.hang_restarts_per_hour} times an hour at most"),
        ("drift", settings.drift, ("drift", guards.DECAYED, "drift-over", _BEST),
         ("three stretches of 512 tokens or more in a row, all worse than measured: slower verification passes (or fewer "
          "tokens a second, where nothing is drafted), or fewer accepted drafts; or other draft settings that the newest "
          "sweep's laws predict to be more than 3 % faster for current requests"),
         ("say so with the likely cause; act: restart a server that has slowed down since it started, once it is idle, "
          "and sweep at the next opening of the window, whatever the day")),
        ("upgrade", settings.upgrade, ("upgrade", "upgrade-refused"),
         "files of the engine or the driver's version changed",
         ("plan and try the deployed command line again, and say what its next start will refuse; act: the "
          "next night compares a kept copy of the old build with the new one")),
    ]  # fmt: skip
    shown = [
        {"name": name, "policy": policy, "evidence": evidence, "may": may,
         "last": next((asdict(event) for event in kept.events if event.kind in kinds), None)}
        for name, policy, kinds, evidence, may in rows
    ]  # fmt: skip
    return ActionResult("guard show", {"guards": shown, "problem": kept.problem})


_MARGIN_FLAGS = frozenset({"--fit-target", "--fit-margin"})


def margin_now(ctx: Context) -> guards.Margin:
    """The margin that is deployed, and what was done to it.

    Raises:
        UsageError: no profile is deployed.
        ConfigError: its files are wrong.
    """
    generation = _serving_by_profile(ctx)
    raised = _raised(ctx, generation)
    resolved = load_profile(
        ctx, str(generation.profile), options=dict(generation.pins), with_tuned=generation.with_tuned,
        engine_names=() if generation.engine is None else (generation.engine,),
    )  # fmt: skip
    setting = resolved.settings.get(MARGIN_KEY)
    has_margin = not _MARGIN_FLAGS.isdisjoint(generation.argv)
    fit_mib = margin_in_force(resolved) if has_margin else None
    tried = [int(one.pins[MARGIN_KEY]) for one in raised]
    by_person = setting is not None and setting.origin.layer in {Layer.PIN, Layer.SET}
    return guards.Margin(
        fit_mib=None if fit_mib is None else max([fit_mib, *tried]),
        steps_taken=len(raised),
        is_pinned=by_person and not is_raise(generation),
        left_alone=None if stands(ctx, generation) else "its unit was edited by hand",
        counts_less="--fit-margin" in generation.argv,
    )


def _serving_by_profile(ctx: Context) -> Generation:
    """The generation that serves.

    Raises:
        UsageError: it was not made from a profile, or there is none.
    """
    generation = ctx.deployed()
    if generation is None or generation.profile is None:
        text = "nothing that serves here was deployed from a profile"
        raise UsageError(text, hint="`tunerd apply PROFILE`")
    return generation


def _raised(ctx: Context, serving: Generation) -> list[Generation]:
    """Raises since a person deployed something, whether they led to a server or not, newest first."""
    found = []
    for entry in ctx.generations.entries():
        one = entry.generation
        if one.unit != serving.unit or one.profile != serving.profile:
            break
        if is_raise(one):
            found.append(one)
        elif entry.ending.outcome.is_done:
            break
    return found


def raise_margin(
    ctx: Context, *, confirm: Confirm = lambda _plan: None, ask: Confirm | None = None
) -> ActionResult:
    """`tunerd guard raise-margin`: deploy what serves with the next larger margin.

    The server that was there is started again where that does not serve either.

    Args:
        ctx: Where.
        confirm: Checks the plan under the lock; raises to stop.
        ask: Shows the plan and asks a person; raises to stop. None where none sits there, as for the guard.

    Raises:
        UsageError: there is no margin to be raised.
        DeployError: more than the margin would change; else as `apply`.
        RolledBack, Stranded: as `apply`.
    """
    ctx = replace(ctx, is_unattended=True)
    generation = _serving_by_profile(ctx)
    margin = margin_now(ctx)
    target_mib = margin.next_mib
    if target_mib is None:
        raise UsageError(
            f"what serves has no fit margin that could be raised ({MARGIN_KEY})",
            cause="the model is placed by hand, or no GPU could be used when it was deployed",
            state="nothing was changed",
            hint="where VRAM is short, lower serving.ctx_size or raise memory.n_cpu_moe",
        )
    again = request_again(generation)
    request = replace(again, options={**again.options, MARGIN_KEY: target_mib})

    def where_nothing_else_changes(act: Confirm) -> Confirm:
        def checked(made: Plan) -> None:
            _demand_only_the_margin(generation, made)
            act(made)

        return checked

    done = apply(
        ctx, request, drain=False, confirm=where_nothing_else_changes(confirm), reason=BY_GUARD,
        ask=None if ask is None else where_nothing_else_changes(ask),
        probation=False,  # which would go back to the margin that ran out
    )  # fmt: skip
    text = f"the fit margin is now {target_mib} MiB; it was {margin.fit_mib} MiB"
    payload = {**done.payload, "fit_mib": target_mib, "fit_before_mib": margin.fit_mib}
    return replace(
        done, command="guard raise-margin", payload=payload,
        messages=(note("margin", text, f"{MARGIN_KEY} = {target_mib} in the profile keeps it"), *done.messages),
    )  # fmt: skip


def _demand_only_the_margin(generation: Generation, made: Plan) -> None:
    """Refuse where a person edited the unit, or the profile says something else than what serves."""
    if made.live_sha256 != generation.unit_sha256:
        raise DeployError(
            "the unit was edited by hand, so no guard replaces it",
            state="nothing was changed",
            hint="`tunerd verify` shows the difference",
        )
    now, then = (
        [word for before, word in pairwise(("", *argv)) if before not in _MARGIN_FLAGS]
        for argv in (made.command.argv, generation.argv)
    )
    if now != then:
        differ = set(now) ^ set(then)
        raise DeployError(
            f"profile `{generation.profile}` no longer says what serves",
            cause=f"besides the margin these would change: {' '.join(sorted(differ))}"[:500],
            state="nothing was changed",
            hint=f"`tunerd plan {generation.profile}` shows it; `tunerd apply` deploys it",
        )
