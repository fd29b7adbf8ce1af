"""Waits until the unit's own process has answered a real request, or says why it will not, or never could again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.builds import engine_of, files_of, found_in_unit, prober
from tunerd.engine.capabilities import Engine
from tunerd.engine.health import (
    USAGE_LINES,
    Completion,
    Expectation,
    Failure,
    FailureKind,
    HttpState,
    Lost,
    Observation,
    classify,
    failed,
    judge_generation,
    judge_settled,
    judge_speculation,
    judge_start,
    last_words,
    says_port_taken,
)
from tunerd.engine.probe import way_to
from tunerd.engine.server import Address, LlamaServer
from tunerd.engine.serving import (
    address_now,
    address_of,
    files_of_start,
    missing_to_start,
    read_live_unit,
    server_now,
    standing_text,
    stands,
    with_limit,
)
from tunerd.errors import Busy, DeployError, HostError, JobCanceled, ServiceError, TunerdError
from tunerd.machine import net
from tunerd.machine.clock import polls, process_began_s
from tunerd.machine.files import is_gone, lock, real_path, stamp_of
from tunerd.machine.host import process_facts
from tunerd.machine.process import may_use_nvidia, process_stat
from tunerd.result import Progress
from tunerd.units.generations import Generation, model_stamps
from tunerd.units.live import LiveUnit
from tunerd.units.manager import PORT_LIMIT_S, STOP_S, UnitState
from tunerd.words import PortOption, counted, sha256

POLL_S = 0.1
PROBE_PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
PROBE_TOKENS = 24
_LOG_LINES = 400 + USAGE_LINES
_MOST_RESTARTS = 3
_END_S = 1.0
# The manager may know of a process's end before the journal has its last lines.
_LOG_READS = 3
_LOG_LAG_S = 0.2
_NO_STEP = Progress("")
_VAGUE = (FailureKind.UNKNOWN, FailureKind.CRASH, FailureKind.KILLED)


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answered: its process, and when (on the monotonic clock).

    Of one that nobody can ask `first_text` is None, and it was only seen to run since then.
    """

    pid: int
    answered_at_s: float
    first_text: str | None


@dataclass(frozen=True)
class NotServing:
    """A server that did not.

    The cause is found when it is asked for, which is after another server was started: an engine may
    have written megabytes before it ended. What decides about starts is known at once.
    """

    text: str
    was_stopped: bool
    is_port_taken: bool
    explain: Callable[[], Failure] = field(repr=False)

    @cached_property
    def failure(self) -> Failure:
        """The cause."""
        return self.explain()


def wait_until_serving(
    ctx: Context,
    unit: str,
    *,
    address: Address | None,
    expected: Expectation,
    model_bytes: int | None = None,
    begun: Progress = _NO_STEP,
) -> Serving | NotServing:
    """Watch a unit that was just (re)started.

    What its manager counts as restarts up to now does not speak against it: a restart that is asked
    for and one that the manager had planned for a forerunner's end may be one start.

    Args:
        ctx: Where.
        unit: Its name.
        address: Where it should listen; None to look where its process does.
        expected: Who should answer.
        model_bytes: Size of the weights, for progress.
        begun: The step of a longer action that the load is; the first generation is the next one.
    """
    for _ in range(_MOST_RESTARTS):
        expected = replace(expected, n_restarts=ctx.services.state(unit).n_restarts or 0)
        found = _Start(ctx, unit, address, expected, model_bytes, begun).watch()
        if not isinstance(found, _RestartedByHand):
            break
        ctx.say("somebody restarted it; watching again")
        expected = replace(expected, old_invocation=found.old_invocation)
    if isinstance(found, Serving):
        return found
    lost = found.lost if isinstance(found, _RestartedByHand) else found
    return _not_serving(ctx, unit, lost, address)


@dataclass(frozen=True, slots=True)
class _RestartedByHand:
    """Another invocation runs now, and no failure led to it."""

    old_invocation: str | None
    lost: Lost


@dataclass(frozen=True, slots=True)
class _Start:
    """One start: of which unit, where it should listen, who should answer, and what progress tells of it."""

    ctx: Context
    unit: str
    address: Address | None
    expected: Expectation
    model_bytes: int | None
    begun: Progress

    def watch(self) -> Serving | Lost | _RestartedByHand:
        """Until it has answered a real request, or will not."""
        ctx, settings = self.ctx, self.ctx.settings.service
        found = self._wait_for_ready()
        if isinstance(found, Lost):
            return found
        server, state = found
        if server is None:  # nobody can ask it
            first_text, answered_at_s, lost = None, ctx.clock.monotonic_s(), None
        else:
            self._tell("asking for a first generation")
            completion = server.complete(
                PROBE_PROMPT, n_predict=PROBE_TOKENS, timeout_s=settings.generation_limit_s
            )
            first_text, answered_at_s = completion.text or "", ctx.clock.monotonic_s()
            lost = self._judge(state, completion, server)
        if lost is None:
            self._tell("checking that it stays up")
            lost = self._settle(state, settings.settle_s)
        if lost is None:
            return Serving(state.main_pid or 0, answered_at_s, first_text)
        now = ctx.services.state(self.unit)
        is_by_itself = (now.n_restarts or 0) > self.expected.n_restarts
        if now.is_active and now.invocation_id != state.invocation_id and not is_by_itself:
            return _RestartedByHand(state.invocation_id, lost)
        return lost

    def _wait_for_ready(self) -> tuple[LlamaServer | None, UnitState] | Lost:
        settings, clock = self.ctx.settings.service, self.ctx.clock
        began_s = clock.monotonic_s()
        moved_s, furthest = began_s, -1
        last_text = ""
        while True:
            now, server = self._look()
            loaded_mib = _loaded_mib(self.ctx, now.unit.main_pid)
            if loaded_mib > furthest:
                moved_s, furthest = now.at_s, loaded_mib
            judged = judge_start(
                now,
                first_s=began_s,
                moved_s=moved_s,
                expected=self.expected,
                stall_s=settings.stall_s,
                limit_s=settings.start_limit_s,
            )
            if isinstance(judged, Lost):
                return judged
            if judged is None and (server is not None or not self.expected.is_asked):
                return server, now.unit
            if judged is not None and (judged != last_text or self.model_bytes):
                last_text = judged
                self._tell_load(judged, furthest, now.at_s - began_s)
            clock.sleep(POLL_S)

    def _look(self) -> tuple[Observation, LlamaServer | None]:
        ctx, address = self.ctx, self.address
        state = ctx.services.state(self.unit)
        if address is None and state.main_pid is not None and self.expected.is_asked:
            ports = net.listening_ports(state.main_pid)
            address = Address("127.0.0.1", min(ports)) if ports else None
        server = None
        if address is not None and state.main_pid is not None:
            server = LlamaServer(replace(address, pid=state.main_pid), ctx.clock)
        http = server.health() if server is not None and state.is_active else HttpState.REFUSED
        alias = server.alias() if server is not None and http is HttpState.READY else None
        listener = None
        # Not at each look: the kernel's table takes long to read.
        answers = http in {HttpState.READY, HttpState.WRONG}
        if address is not None and answers and not self.expected.is_container:
            listener = net.who_listens(address.port, address.host, state.main_pid)
        return Observation(ctx.clock.monotonic_s(), state, http, listener, alias), server

    def _judge(self, before: UnitState, completion: Completion, server: LlamaServer) -> Lost | None:
        # Where the connection broke, the process may take a moment to end.
        patience_s = _END_S if completion.problem is not None and not completion.timed_out else 0.0
        settled = self._settle(before, patience_s)
        if settled is not None:
            return settled
        if completion.problem is not None and completion.timed_out:
            return Lost(FailureKind.HANG, f"the first generation gave {completion.problem}")
        # It answers, and refuses only who may not tell it the key, or what it is not for.
        if completion.wants_key or (completion.is_refused and self.expected.may_refuse):
            return None
        slots = server.slots() if self.expected.expects_draft else None
        speculative = None if slots is None else slots.speculative
        lost = judge_generation(completion)
        return lost or judge_speculation(
            completion, speculative=speculative, expected=self.expected
        )

    def _settle(self, before: UnitState, for_s: float) -> Lost | None:
        """Watch a little longer: some servers die right after their first answer."""
        pid, invocation = before.main_pid or 0, before.invocation_id
        for _ in polls(self.ctx.clock, for_s, every_s=_SETTLE_POLL_S):
            now = self.ctx.services.state(self.unit)
            lost = judge_settled(now, main_pid=pid, invocation=invocation)
            if lost is not None:
                return lost
        return None

    def _tell_load(self, text: str, done_mib: int, took_s: float) -> None:
        ratio = left_s = None
        if self.model_bytes and done_mib > 0:
            ratio = min(0.99, done_mib * 1024 * 1024 / self.model_bytes)
            left_s = took_s * (1 - ratio) / ratio if took_s > 1 else None
        self.ctx.report(replace(self.begun, text=text, done_ratio=ratio, left_s=left_s))

    def _tell(self, text: str) -> None:
        """What follows the load is the next step."""
        step = self.begun.step
        self.ctx.report(replace(self.begun, text=text, step=None if step is None else step + 1))


def _loaded_mib(ctx: Context, pid: int | None) -> int:
    """What grows while a model is loaded: memory in use, and bytes read."""
    if pid is None:
        return 0
    vram_mib = sum(gpu.used_mib or 0 for gpu in ctx.gpu.read().gpus or ())
    facts = process_facts(pid)
    if facts is None:
        return vram_mib
    return vram_mib + (facts.rss_mib or 0) + (facts.read_bytes or 0) // 2**20


def started(ctx: Context, unit: str, start: Callable[[str], None]) -> NotServing | None:
    """Start a unit in this way; why it did not even start, where that is for its own reasons.

    Raises:
        JobCanceled: somebody else took it over.
        ServiceError: the service manager refused, or did not answer.
    """
    try:
        start(unit)
    except ServiceError as problem:
        if isinstance(problem, JobCanceled) or not ctx.services.state(unit).has_failed:
            raise
        return _not_serving(ctx, unit, Lost(None, problem.message))
    return None


def why_it_ended(ctx: Context, unit: str) -> NotServing:
    """The cause of the end of a server that had answered before."""
    return _not_serving(ctx, unit, Lost(None, "it ended"))


def _not_serving(ctx: Context, unit: str, lost: Lost, address: Address | None = None) -> NotServing:
    state = ctx.services.state(unit)
    lines = _last_words(ctx, state)
    has_exited = not state.is_active and state.exit_kind == "exited"
    where = None if address is None or not has_exited else (address.bound_host, address.port)
    option = None if where is None else _port_option_of(ctx, unit)
    for _ in range(_LOG_READS):
        if where is None or says_port_taken(lines) or net.can_bind(*where, option):
            break
        ctx.clock.sleep(_LOG_LAG_S)
        lines = _last_words(ctx, state)
    # By what its manager says alone: a server may print whatever it likes before it ends.
    has_ended_well = not state.is_active and state.result == "success"
    was_stopped = has_ended_well and ctx.services.was_stopped(unit, state.invocation_id or "")
    option = option or PortOption.REUSE_ADDR
    in_use = address if where is not None and net.is_in_use(*where, option) else None
    is_port_taken = says_port_taken(lines)
    if was_stopped:
        words = "it was stopped while it was being checked"
        explain = partial(Failure, FailureKind.STOPPED, words, None)
    else:
        explain = partial(_explain, ctx, lost, state, lines, in_use)
        if in_use is not None and not is_port_taken:
            # mainline of August 2026 may end before its log thread has written why.
            is_port_taken = failure_of(ctx, state, lines).kind is FailureKind.UNKNOWN
    return NotServing(lost.text, was_stopped, is_port_taken, explain)


def _explain(
    ctx: Context, lost: Lost, state: UnitState, lines: tuple[str, ...], in_use: Address | None
) -> Failure:
    """The cause, from the log where the observation alone does not tell."""
    failure = failure_of(ctx, state, lines)
    for _ in range(_LOG_READS):
        if state.is_active or failure.kind not in _VAGUE or state.invocation_id is None:
            break
        ctx.clock.sleep(_LOG_LAG_S)
        with contextlib.suppress(ServiceError):
            lines = _last_words(ctx, state) or lines
        failure = failure_of(ctx, state, lines)
    is_better_seen = failure.kind in _VAGUE or state.is_active
    if lost.kind is not None and lost.kind is not failure.kind and is_better_seen:
        # Of a server that runs, warnings in its log are not what went wrong.
        failure = failed(lost.kind, f"{lost.text}; it last said: {last_words(lines)}")
    if in_use is not None and failure.kind is FailureKind.UNKNOWN:
        # mainline of May 2026 and BeeLlama bind first and end at once, and their log thread is slower.
        words = f"{failure.words}; port {in_use.port} of {in_use.host} is in use"
        failure = failed(FailureKind.PORT_TAKEN, words)
    return failure


def failure_of(ctx: Context, state: UnitState, lines: tuple[str, ...]) -> Failure:
    """How a unit's server ended, by its manager and by what it wrote."""
    kind, status = state.exit_kind, state.exit_status
    failure = classify(lines, exit_kind=kind, exit_status=status, result=state.result)
    return with_limit(ctx, failure, state.unit)


def _last_words(ctx: Context, state: UnitState) -> tuple[str, ...]:
    """What this invocation wrote, also if that is nothing: an earlier one may have failed for another reason."""
    return ctx.services.log(state.unit, invocation_id=state.invocation_id, max_lines=_LOG_LINES)


def expected_of(live: LiveUnit) -> Expectation:
    """Who should answer once a unit that stood before is started again."""
    return Expectation(
        old_invocation=None,
        alias=live.serving.alias,
        expects_draft=False,
        is_asked=live.serving.asked_otherwise is None,
        may_refuse=True,
        is_container=live.is_container,
    )


def check_as_it_stands(ctx: Context, old_invocation: str | None) -> Serving | NotServing:
    """Whether the unit that stands on disk serves, judged by what its own text says.

    It gets the time of a way back: what a new server may take says nothing of one that served before.
    """
    live = read_live_unit(ctx)
    expected = replace(expected_of(live), old_invocation=old_invocation)
    limits = {"service": ctx.settings.service.on_the_way_back}
    patient = replace(ctx, settings=ctx.settings.model_copy(update=limits))
    return wait_until_serving(patient, ctx.unit, address=address_of(ctx, live), expected=expected)


# Connections that have ended keep their port for a minute (TCP_TIMEWAIT_LEN of Linux). A server whose
# socket options are not those of the one before it cannot bind it before: mainline after ik_llama.cpp.
PORT_PATIENCE_S = 65.0
_AGAIN_S = 3.0
# Before a server that has served is started once more after an end without a cause: what ends beside it (its
# forerunner, on a busy machine) takes seconds, and whoever ends the daemon waits for this (30 s in its unit).
_PAUSES_S = (3.0, 6.0, 12.0)


def start_again(
    ctx: Context,
    watch: Callable[[str | None], Serving | NotServing],
    address: Callable[[], Address | None],
    *,
    has_served: bool = False,
) -> Serving | NotServing:
    """Restart what stands on disk and watch it; again where only time is missing.

    Args:
        ctx: Where.
        watch: Says how the start went; gets the invocation that ran before it.
        address: Where the server is to listen; None where nobody knows.
        has_served: It did so before with the same text, so that an end without a known cause is a
            reason to try again: what it says last may be lost, and a port that its forerunner still
            holds is not seen where a script hides the port.
    """
    end_s, pauses_s = None, list(_PAUSES_S if has_served else ())
    while True:
        old_invocation = ctx.services.state(ctx.unit).invocation_id
        ctx.services.reset_failed(ctx.unit)
        found = started(ctx, ctx.unit, ctx.services.restart) or watch(old_invocation)
        if isinstance(found, Serving):
            return found
        if port_will_be_free(found, address()):
            now_s = ctx.clock.monotonic_s()
            end_s = now_s + PORT_PATIENCE_S if end_s is None else end_s
            if now_s >= end_s:
                return found
            before = ctx.services.state(ctx.unit)
            _wait_to_try_again(ctx, address(), end_s)
            if was_stopped_since(ctx, before):
                return replace(found, was_stopped=True)
        elif pauses_s and _ended_without_cause(ctx, found):
            pause_s = pauses_s.pop(0)
            text = f"it ended for no known reason ({found.failure.words}); starting it again"
            ctx.report(Progress(text, left_s=pause_s))
            ctx.clock.sleep(pause_s)
            if ctx.services.state(ctx.unit).active_state != "failed":
                return found  # somebody stopped it meanwhile, or does something else with it
        else:
            return found


def is_given_up(ctx: Context, state: UnitState) -> bool:
    """Whether its manager started it again until it gave it up, and nobody stopped it."""
    was_left = state.active_state == "failed" and bool(state.n_restarts)
    return was_left and not may_be_stopped(ctx, state.invocation_id, state.result)


def may_be_stopped(ctx: Context, life: str | None, result: str) -> bool:
    """Whether somebody stopped it in this life, which ended so, or nobody can say."""
    try:
        if life is None or ctx.services.was_stopped(ctx.unit, life):
            return True
        # Where the log has nothing of it, a stop that was not obeyed is known by its result alone.
        return result == "timeout" and not ctx.services.log(
            ctx.unit, invocation_id=life, max_lines=1
        )
    except ServiceError:
        return True


def was_stopped_since(ctx: Context, before: UnitState, *, by_anybody: bool = False) -> bool:
    """Whether somebody stopped the server: not where it ended well by itself, or waits for its start at boot.

    One that is on its way down is waited for: with requests under way that takes a while, may end with a kill,
    and may be the first half of a restart.

    Args:
        ctx: Where.
        before: How it was a moment ago. Of a stop between two starts by its manager nothing is written.
        by_anybody: Whether one that ended well by itself counts as stopped.
    """
    for _ in polls(ctx.clock, STOP_S, every_s=_DRAIN_POLL_S):
        now = ctx.services.state(ctx.unit)
        if now.active_state != "deactivating":
            break
    if now.active_state not in {"inactive", "failed"} or now.invocation_id is None:
        return False
    if ctx.services.properties(ctx.unit, "Job").get("Job"):
        return False
    if now.active_state == "inactive" and (by_anybody or before.is_waiting):
        return True
    return ctx.services.was_stopped(ctx.unit, now.invocation_id)


def _ended_without_cause(ctx: Context, found: NotServing) -> bool:
    """Whether it ended by itself, nobody knows why, and its manager does not start it again."""
    state = ctx.services.state(ctx.unit)
    if state.active_state != "failed" or found.failure.kind is not FailureKind.UNKNOWN:
        return False
    # Some end with a status of failure when they are told to stop.
    return not ctx.services.was_stopped(ctx.unit, state.invocation_id or "")


def port_will_be_free(found: NotServing, address: Address | None) -> bool:
    """Whether a start failed for a port on which nobody listens, so that only time is missing."""
    if not found.is_port_taken:
        return False
    if address is None:
        return True
    # Builds say the same of an address that is not one of this machine.
    is_ours = net.why_no_listener(address.reachable_host) is None
    return is_ours and not net.is_listened_on(address.port, address.host)


def _wait_to_try_again(ctx: Context, address: Address | None, end_s: float) -> None:
    """Until production can bind its port, but for a few seconds at most: where it is known is a guess."""
    left_s, option = max(0.0, end_s - ctx.clock.monotonic_s()), _port_option_of(ctx, ctx.unit)
    ctx.report(Progress("waiting until the port is free again", left_s=left_s))
    if address is not None and net.can_bind(address.bound_host, address.port, option):
        address = None  # what keeps it from its port is not seen from here
    ctx.clock.sleep(min(_RETURN_POLL_S, left_s))
    for _ in polls(ctx.clock, min(_AGAIN_S, left_s), every_s=_RETURN_POLL_S):
        if address is not None and _is_free(address, option):
            return


_RETURN_POLL_S = 0.25
_SETTLE_POLL_S = 0.25


def come_back(ctx: Context) -> Serving | NotServing:
    """Watch production, which was started, until it serves or nothing will start it again.

    A start that its manager repeats is waited for, for as long as a port may take to be free; one that
    failed for such a port is repeated here, also where the manager has given up. What somebody stops or
    changes meanwhile is left alone.

    Raises:
        HostError: its file cannot be read.
        ServiceError: the service manager does not do its part.
    """
    end_s = ctx.clock.monotonic_s() + PORT_PATIENCE_S
    while True:
        n_restarts, text = ctx.services.state(ctx.unit).n_restarts or 0, standing_text(ctx)
        found = check_as_it_stands(ctx, old_invocation=None)
        if isinstance(found, Serving):
            return found
        if port_will_be_free(found, _address(ctx)):
            before = ctx.services.state(ctx.unit)
            _wait_to_try_again(ctx, _address(ctx), end_s)
            if was_stopped_since(ctx, before):
                return replace(found, was_stopped=True)
        elif _is_started_again(ctx.services.state(ctx.unit), n_restarts):
            if not _wait_for_restart(ctx, end_s):
                return found
            continue
        elif not _ended_without_cause(ctx, found):
            return found
        again = _start_alone(ctx, text)
        if again is not None or ctx.clock.monotonic_s() >= end_s:
            return again or found
        ctx.clock.sleep(_AGAIN_S)


def _start_alone(ctx: Context, text: bytes | None) -> Serving | NotServing | None:
    """Start the unit that has this text; None where somebody changes it, or has."""
    try:
        with lock(ctx.paths.lock, purpose="bringing it back", since=ctx.now_text()):
            return start_as_it_stands(ctx) if standing_text(ctx) == text else None
    except Busy:
        return None


def start_as_it_stands(ctx: Context, *, has_served: bool = True) -> Serving | NotServing:
    """Restart what stands on disk and watch it by its own text, as `start_again` does."""
    watch = partial(check_as_it_stands, ctx)
    return start_again(ctx, watch, partial(_address, ctx), has_served=has_served)


def _address(ctx: Context) -> Address | None:
    return address_of(ctx, read_live_unit(ctx))


def _is_started_again(state: UnitState, n_before: int) -> bool:
    """Whether its manager starts it again, or has done so since there were so many restarts."""
    return state.is_waiting or (state.runs and (state.n_restarts or 0) > n_before)


def _wait_for_restart(ctx: Context, end_s: float) -> bool:
    """Whether the manager did it in time."""
    for left_s in polls(ctx.clock, end_s - ctx.clock.monotonic_s(), every_s=_RETURN_POLL_S):
        if not left_s or not ctx.services.state(ctx.unit).is_waiting:
            return left_s > 0
        ctx.report(Progress(f"{ctx.unit} ended; its manager restarts it", left_s=left_s))
    return False


_PORT_POLL_S = 1.0


@dataclass
class PortTurns:
    """Whose turn the port was last, `last` being the program; None where it is not known.

    A server that closes a connection first leaves the port to the same program, and to builds with the
    same option (`PortOption`); to others the kernel gives it a minute later.
    """

    ctx: Context
    is_held: Callable[[], bool]
    last: Path | None

    @cached_property
    def option(self) -> PortOption | None:
        """Production's own; None where it is not known."""
        return _port_option_of(self.ctx, self.ctx.unit)

    def leaves_it_free(self, engine: Engine) -> bool:
        """Whether production binds at once what this build leaves, as far as that can be told."""
        own = program_of_production(self.ctx)
        if own is not None and real_path(engine.program) == real_path(own):
            return True
        return engine.port_option is not None and engine.port_option is self.option

    def wait_for(
        self, program: Path | None, option: PortOption | None, address: Address | None
    ) -> None:
        """Wait until this program can bind; not where it was the last one, or somebody listens.

        Ends early where the lease is gone: its place is taken then, and nothing is to be waited for.
        """
        is_same = (
            program is not None
            and self.last is not None
            and real_path(program) == real_path(self.last)
        )
        self.last = program
        if is_same or address is None:
            return
        for left_s in polls(self.ctx.clock, PORT_LIMIT_S, every_s=_PORT_POLL_S):
            if _is_free(address, option) or not left_s:
                return
            if not self.is_held() or net.is_listened_on(address.port, address.host):
                return
            self.ctx.report(Progress("waiting until the port is free again", left_s=left_s))

    def wait_for_production(self) -> None:
        """Wait until production can bind its port; where its file cannot be read, do not wait."""
        with contextlib.suppress(TunerdError):
            self.wait_for(program_of_production(self.ctx), self.option, _address(self.ctx))


def program_of_production(ctx: Context) -> Path | None:
    """The program that production's file names; None where that cannot be told."""
    with contextlib.suppress(TunerdError):
        live = read_live_unit(ctx)
        return Path(live.argv[0]) if live.argv else None
    return None


def _is_free(address: Address, option: PortOption | None) -> bool:
    """Whether a program with this option can bind there, after what its forerunner left was forgotten."""
    where = (address.bound_host, address.port)
    if net.can_bind(*where, option):
        return True
    if not net.is_listened_on(address.port, address.host):
        with contextlib.suppress(OSError):  # who may not have it done waits
            net.forget(net.ended(*where))
    return net.can_bind(*where, option)


def _port_option_of(ctx: Context, unit: str) -> PortOption | None:
    """How the program of a unit binds its port, by what was found of it before; None where that is not known.

    It is not run for this, which may take minutes: nothing serves meanwhile.
    """
    with contextlib.suppress(TunerdError):
        live = read_live_unit(ctx, unit)
        if live.program is not None and not live.is_container:
            known = prober(ctx).known(found_in_unit(live, Path(live.program)))
            return None if known is None else known.capabilities.port_option
    return None


def address_of_production(ctx: Context, state: UnitState) -> Address | None:
    """Where production listens, or will once it starts; None where that cannot be told."""
    with contextlib.suppress(TunerdError):
        return address_now(ctx, read_live_unit(ctx), state)
    return None


_DRAIN_POLL_S = 0.5


def drain(ctx: Context, before: UnitState) -> tuple[str, ...]:
    """Wait for idle slots as long as the settings say; what to tell of requests that are cut."""
    server = server_now(ctx, before)
    if server is None:
        return ()
    for left_s in polls(ctx.clock, ctx.settings.service.drain_s, every_s=_DRAIN_POLL_S):
        n_busy = server.n_busy(timeout_s=2.0)
        if n_busy is None and server.health() is HttpState.READY:
            # Amid a batch of a long prompt a server answers nothing but that it is well.
            if not server.get("/slots", timeout_s=2.0).timed_out:
                return (
                    "requests under way were not waited for: it tells nobody here of them (`--no-slots` without `--metrics`, or a key)",
                )
            n_busy = 1
        if not n_busy:
            return ()
        running = counted(n_busy, "running request")
        if left_s:
            ctx.say(f"waiting for {running}", left_s=left_s)
    return (f"cut after the drain time: {running}",)


ENGINE = "engine"


def replaced_under(ctx: Context, state: UnitState) -> dict[str, Edit]:
    """What of a unit's running server was replaced or removed after it started.

    Nobody has seen the next start serve then, and what is measured is not what stands there. What was only
    touched, and is what was deployed, is no other file.

    Returns:
        The first such file, by `ENGINE`, the profile key that names it, or its path; empty where there is none.
    """
    stat = None if state.main_pid is None else process_stat(state.main_pid)
    if stat is None:
        return {}
    began_s = process_began_s(stat.start_ticks)
    found: dict[str, Edit] = {}
    way = f"`{ctx.systemctl} restart {ctx.unit}`, or `tunerd apply PROFILE`"
    live = read_live_unit(ctx, state.unit)
    for what, path in _unlike_deployed(ctx, live, ctx.deployed()):
        if is_gone(path) and live.has_own_files:
            continue
        if is_gone(path):
            found.setdefault(what, Edit(f"`{path}` is gone", f"put `{path}` back"))
        elif _changed_after(path, began_s, ctx.clock.now_s()):
            text = f"`{path}` was replaced after the server started"
            found.setdefault(what, Edit(text, way))
    return found


@dataclass(frozen=True, slots=True)
class Edit:
    """What a server starts with was changed since it did, and how that comes into force or goes, both in words."""

    text: str
    way: str


@dataclass(frozen=True, slots=True)
class _StartedWith:
    """Hashes of a unit's file, drop-ins and what is read beside them, as the server of this invocation was started with them."""

    invocation: str
    files: Mapping[str, str]


def edited_under(ctx: Context, state: UnitState) -> Edit | None:
    """That a unit was edited after its server started: nobody has seen the next start serve then.

    What its manager reads beside it counts as the unit does. What it was started with is remembered each time that
    nothing was: files that are younger and say the same, as where a rebuild of NixOS has made links and secrets anew, or a
    swap has put them back, are no edit.
    """
    if not state.exists or is_gone(state.fragment_path or ctx.unit_path):
        return Edit("its unit file is gone", "put it back (`tunerd verify` says how)")
    way = f"`{ctx.systemctl} daemon-reload`, `{ctx.systemctl} restart {ctx.unit}`, or `tunerd apply PROFILE`"
    if state.needs_reload:
        return Edit("it was edited, and its manager has not read it since", way)
    deployed = ctx.deployed()
    is_deployed = deployed is not None and stands(ctx, deployed)
    # What is laid over every service is of systemd's package, or of a generator that writes it at each reload (LXC's).
    files = {str(path): path for path in state.drop_ins if path.parent.name != "service.d"}
    if not is_deployed:  # by its name: the manager may say where its link leads
        files[state.unit] = state.fragment_path or ctx.unit_path
    with contextlib.suppress(HostError):  # which may not read what another account's alone is
        live = read_live_unit(ctx, state.unit, state)
        if (missing := missing_to_start(ctx, live)) is not None:
            way = "put it back, or take it out of the unit; a restart would only end what serves"
            return Edit(missing, way)
        files = {str(path): path for path in files_of_start(ctx, live)} | files
    now = {name: found for name, path in files.items() if (found := _hash_of(ctx, path))}
    # Hashes of secrets too: for nobody else to read, and gone at the next boot, as what was started.
    kept = ctx.paths.runtime_dir / "started-with.json"
    known = ctx.files.recall(_StartedWith, kept)
    then = known.files if known is not None and known.invocation == state.invocation_id else {}
    since_s, now_s = state.active_since_s or ctx.clock.now_s(), ctx.clock.now_s()
    for name, path in files.items():
        is_same = name in now and now[name] == then.get(name)
        if not is_same and _changed_after(path, since_s, now_s):
            return Edit(f"`{path}` was edited after the server started", way)
    if state.runs and state.invocation_id is not None and not now.items() <= then.items():
        ctx.files.remember(kept, _StartedWith(state.invocation_id, {**then, **now}), mode=0o600)
    return None


def _hash_of(ctx: Context, path: Path) -> str | None:
    with contextlib.suppress(HostError):
        return sha256(ctx.files.read(path))
    return None


def demand_card(ctx: Context, state: UnitState) -> None:
    """A server that is stopped can be started again: not where the driver was updated under it.

    Raises:
        DeployError: it cannot, before the machine is rebooted.
    """
    why = ctx.gpu.read().awaits_reboot if state.is_active and state.main_pid is not None else None
    if why is not None and may_use_nvidia(state.main_pid or 0):
        raise DeployError(
            f"{ctx.unit} could not start again, so it is not stopped: the driver was updated while it ran",
            cause=f"{why}; a program that starts now cannot find the card",
            state="nothing was touched; the server keeps running with the driver that it has loaded",
            hint="reboot, then try again",
        )


def _unlike_deployed(
    ctx: Context, live: LiveUnit, generation: Generation | None
) -> Iterator[tuple[str, Path]]:
    """What a unit's server is made of, without the files that are known to be what was deployed."""
    if live.argv is None or live.program is None or live.is_container or live.has_own_root:
        return
    program = Path(live.program)
    identity = engine_of(ctx, found_in_unit(live, program)).identity
    components = () if identity is None else identity.components
    deployed = {} if generation is None else dict(generation.engine_components)
    same = {one.path for one in components if deployed.get(str(one.path)) == one.sha256}
    for path in (program, *(one.path for one in components)):
        if real_path(path) not in same:
            yield ENGINE, path
    stamps = {} if generation is None else model_stamps(generation)
    for what, part in files_of(live.argv):
        if part.is_absolute() and (stamps.get(part) or ()) != stamp_of(part):
            yield what, part


def _changed_after(path: Path, moment_s: float, now_s: float) -> bool:
    """Whether a file, or a link on the way to it, is another since then; a time to come is of a clock that was ahead."""
    parts = [part for part in way_to(path) if part.is_symlink()]
    try:
        times_s = [part.lstat().st_ctime for part in (*parts, real_path(path))]
    except OSError:
        return False
    return any(moment_s < one <= now_s for one in times_s)
