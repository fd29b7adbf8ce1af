"""Waits until the unit's own process has answered a real request, or says why it will not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunerd.actions.context import Context
from tunerd.core.failure import Failure, FailureKind, classify, hint_for, last_words, was_stopped
from tunerd.core.health import (
    Completion,
    Expectation,
    HttpState,
    Lost,
    Observation,
    Patience,
    Ready,
    Starting,
    judge_generation,
    judge_settled,
    judge_speculation,
    judge_start,
    load_progress,
)
from tunerd.core.progress import Progress
from tunerd.core.service import UnitState
from tunerd.errors import JobCanceled, ServiceError
from tunerd.system.host import process_facts
from tunerd.system.llama import Address, LlamaServer
from tunerd.system.ports import is_in_use
from tunerd.system.sockets import listening_pid, listening_ports, other_listeners

POLL_S = 0.1
PROBE_PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
PROBE_TOKENS = 24
_LOG_LINES = 400
_MOST_RESTARTS = 3
_END_S = 1.0
# The manager may know of a process's end before the journal has its last lines.
_LOG_READS = 3
_LOG_LAG_S = 0.2
_NO_STEP = Progress("")
_VAGUE = (FailureKind.UNKNOWN, FailureKind.CRASH)


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answered: its process, its invocation, and when (on the monotonic clock)."""

    pid: int
    invocation: str | None
    answered_at_s: float
    first_text: str


@dataclass(frozen=True, slots=True)
class NotServing:
    """A server that did not, with the cause."""

    failure: Failure
    text: str


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

    Args:
        ctx: Where.
        unit: Its name.
        address: Where it should listen; None to look where its process does.
        expected: Who should answer.
        model_bytes: Size of the weights, for progress.
        begun: The step of a longer action that the load is; the first generation is the next one.
    """
    for _ in range(_MOST_RESTARTS):
        found = _watch(ctx, unit, address, expected, _Load(begun, model_bytes))
        if not isinstance(found, _RestartedByHand):
            break
        ctx.say("somebody restarted it; watching again")
        expected = replace(expected, old_invocation=found.old_invocation)
    if isinstance(found, Serving):
        return found
    lost = found.lost if isinstance(found, _RestartedByHand) else found
    return _with_port(ctx, unit, address, _not_serving(ctx, unit, lost))


@dataclass(frozen=True, slots=True)
class _RestartedByHand:
    """Another invocation runs now, and no failure led to it."""

    old_invocation: str | None
    lost: Lost


@dataclass(frozen=True, slots=True)
class _Load:
    """What progress is told of a load: the step that it is, and how much there is to load."""

    begun: Progress
    model_bytes: int | None

    def at(self, text: str, done_mib: int, took_s: float) -> Progress:
        """Progress of the load itself."""
        told = replace(self.begun, text=text)
        if not self.model_bytes or done_mib <= 0:
            return told
        ratio = min(0.99, done_mib * 1024 * 1024 / self.model_bytes)
        left_s = took_s * (1 - ratio) / ratio if took_s > 1 else None
        return replace(told, done_ratio=ratio, left_s=left_s)

    def after(self, text: str) -> Progress:
        """Progress of what follows the load."""
        step = self.begun.step
        return replace(self.begun, text=text, step=None if step is None else step + 1)


def _watch(
    ctx: Context,
    unit: str,
    address: Address | None,
    expected: Expectation,
    load: _Load,
) -> Serving | Lost | _RestartedByHand:
    found = _wait_for_ready(ctx, unit, address, expected, load)
    if isinstance(found, Lost):
        return found
    server, state = found
    ctx.report(load.after("asking for a first generation"))
    completion = server.complete(
        PROBE_PROMPT,
        n_predict=PROBE_TOKENS,
        timeout_s=ctx.settings.service.generation_limit_s,
    )
    answered_at_s = ctx.clock.monotonic_s()
    lost = _judge_completion(ctx, unit, state, completion, server, expected)
    if lost is None:
        ctx.report(load.after("watching that it stays"))
        lost = _settle(ctx, unit, state, ctx.settings.service.settle_s)
    if lost is None:
        text = completion.text or ""
        return Serving(state.main_pid or 0, state.invocation_id, answered_at_s, text)
    now = ctx.services.state(unit)
    if now.is_active and now.invocation_id != state.invocation_id and not now.n_restarts:
        return _RestartedByHand(state.invocation_id, lost)
    return lost


def _wait_for_ready(
    ctx: Context,
    unit: str,
    address: Address | None,
    expected: Expectation,
    load: _Load,
) -> tuple[LlamaServer, UnitState] | Lost:
    settings = ctx.settings.service
    began_s = ctx.clock.monotonic_s()
    patience = Patience(stall_s=settings.stall_s, limit_s=settings.start_limit_s)
    moved_s, furthest = began_s, -1
    last_text = ""
    while True:
        now, server = _look(ctx, unit, address)
        if (now.progress or 0) > furthest:
            moved_s, furthest = now.at_s, now.progress or 0
        judged = judge_start(
            now, first_s=began_s, moved_s=moved_s, expected=expected, patience=patience
        )
        if isinstance(judged, Lost):
            return judged
        if isinstance(judged, Ready) and server is not None:
            return server, now.unit
        if isinstance(judged, Starting) and (judged.text != last_text or load.model_bytes):
            last_text = judged.text
            ctx.report(load.at(judged.text, furthest, now.at_s - began_s))
        ctx.clock.sleep(POLL_S)


def _look(
    ctx: Context, unit: str, address: Address | None
) -> tuple[Observation, LlamaServer | None]:
    state = ctx.services.state(unit)
    if address is None and state.main_pid is not None:
        ports = listening_ports(state.main_pid)
        address = Address("127.0.0.1", min(ports)) if ports else None
    server = ctx.connect(address) if address is not None else None
    http = server.health() if server is not None and state.is_active else HttpState.REFUSED
    alias = server.alias() if server is not None and http is HttpState.READY else None
    listener = None
    # Not at each look: the kernel's table takes long to read.
    if address is not None and http in {HttpState.READY, HttpState.WRONG}:
        listener = _who_listens(address, state.main_pid)
    facts = process_facts(state.main_pid) if state.main_pid is not None else None
    progress = load_progress(
        {
            "read": None if facts is None or facts.read_bytes is None else facts.read_bytes >> 20,
            "rss": None if facts is None else facts.rss_mib,
            "vram": _vram_used(ctx, state.main_pid),
        }
    )
    now = Observation(ctx.clock.monotonic_s(), state, http, listener, alias, progress)
    return now, server


def _who_listens(address: Address, own: int | None) -> int | None:
    """The process that answers there; somebody else's where it shares the port with the unit's."""
    if own is not None:
        others = other_listeners(address.port, address.host, own)
        if others:
            return others[0]
    return listening_pid(address.port, address.host, likely=own)


def _vram_used(ctx: Context, pid: int | None) -> int | None:
    gpus = ctx.gpu.read().gpus
    if pid is None or not gpus:
        return None
    return sum(gpu.used_mib or 0 for gpu in gpus)


def _judge_completion(
    ctx: Context,
    unit: str,
    before: UnitState,
    completion: Completion,
    server: LlamaServer,
    expected: Expectation,
) -> Lost | None:
    # Where the connection broke, the process may take a moment to end.
    patience_s = _END_S if completion.problem is not None and not completion.timed_out else 0.0
    settled = _settle(ctx, unit, before, patience_s)
    if settled is not None:
        return settled
    if completion.problem is not None and completion.timed_out:
        return Lost(FailureKind.HANG, f"the first generation gave {completion.problem}")
    slots = server.slots() if expected.expects_draft else None
    return judge_generation(completion, wanted=PROBE_TOKENS) or judge_speculation(
        completion, speculative=slots.speculative if slots is not None else None, expected=expected
    )


def _settle(ctx: Context, unit: str, before: UnitState, for_s: float) -> Lost | None:
    """Watch a little longer: some servers die right after their first answer."""
    end_s = ctx.clock.monotonic_s() + for_s
    while True:
        now = ctx.services.state(unit)
        lost = judge_settled(now, main_pid=before.main_pid or 0, invocation=before.invocation_id)
        if lost is not None or ctx.clock.monotonic_s() >= end_s:
            return lost
        ctx.clock.sleep(min(0.25, for_s))


def restart_unit(ctx: Context, unit: str) -> NotServing | None:
    """Restart a unit; why it did not even start, where that is for its own reasons.

    Raises:
        JobCanceled: somebody else took it over.
        ServiceError: the service manager refused, or did not answer.
    """
    try:
        ctx.services.restart(unit)
    except JobCanceled:
        raise
    except ServiceError as problem:
        if not ctx.services.state(unit).has_failed:
            raise
        return _not_serving(ctx, unit, Lost(None, problem.message))
    return None


def why_it_ended(ctx: Context, unit: str) -> NotServing:
    """The cause of the end of a server that had answered before."""
    return _not_serving(ctx, unit, Lost(None, "it ended"))


def _not_serving(ctx: Context, unit: str, lost: Lost) -> NotServing:
    """The cause, from the log where the observation alone does not tell."""
    state = ctx.services.state(unit)
    lines, failure = _classified(ctx, unit, state)
    for _ in range(_LOG_READS):
        if state.is_active or failure.kind not in _VAGUE:
            break
        ctx.clock.sleep(_LOG_LAG_S)
        lines, failure = _classified(ctx, unit, state)
    if not state.is_active and state.result == "success" and was_stopped(lines):
        words = "it was stopped while it was being checked"
        return NotServing(Failure(FailureKind.STOPPED, words, None), lost.text)
    is_better_seen = failure.kind in _VAGUE or state.is_active
    if lost.kind is not None and lost.kind is not failure.kind and is_better_seen:
        # Of a server that runs, warnings in its log are not what went wrong.
        words = f"{lost.text}; it last said: {last_words(lines)}"
        failure = Failure(lost.kind, words, hint_for(lost.kind))
    return NotServing(failure, lost.text)


def _with_port(ctx: Context, unit: str, address: Address | None, found: NotServing) -> NotServing:
    """Whether a server that ended without a telling word had its port taken.

    mainline of May 2026 and BeeLlama bind first and end at once, and their log thread is slower.
    """
    state = ctx.services.state(unit)
    has_ended = not state.is_active and state.exit_kind == "exited"
    if address is None or found.failure.kind is not FailureKind.UNKNOWN or not has_ended:
        return found
    if not is_in_use(address.reachable_host, address.port):
        return found
    kind = FailureKind.PORT_TAKEN
    words = f"{found.failure.words}; port {address.port} of {address.host} is in use"
    return replace(found, failure=Failure(kind, words, hint_for(kind)))


def _classified(ctx: Context, unit: str, state: UnitState) -> tuple[tuple[str, ...], Failure]:
    lines = _last_words(ctx, unit, state)
    return lines, classify(
        lines, exit_kind=state.exit_kind, exit_status=state.exit_status, result=state.result
    )


def _last_words(ctx: Context, unit: str, state: UnitState) -> tuple[str, ...]:
    """What this invocation wrote: an earlier one may have failed for another reason."""
    if state.invocation_id is not None:
        lines = ctx.services.log(unit, invocation_id=state.invocation_id, max_lines=_LOG_LINES)
        if lines:
            return lines
    return ctx.services.log(unit, max_lines=_LOG_LINES)
