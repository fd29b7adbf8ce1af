"""Measures on the live box: takes production's place for a while, and sees to it that it comes back.

    with hold(ctx, purpose="bench rtx-3090-ti-24gb", budget_s=600) as held:
        with held.serve(plan) as candidate:
            if candidate.fault is None:
                ask(candidate.address)
                held.check()

Whatever ends this process, the service manager ends the candidates and starts production again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tunerd.app import Context
from tunerd.engine.builds import engine_of
from tunerd.engine.capabilities import Engine
from tunerd.engine.health import Failure, FailureKind
from tunerd.engine.server import Address
from tunerd.engine.serving import (
    check_manager,
    environment_with,
    read_live_unit,
    specifiers_of,
)
from tunerd.errors import (
    Busy,
    DeployError,
    JobCanceled,
    LeaseEnded,
    ServiceError,
    Stranded,
    TunerdError,
)
from tunerd.machine.facts import Gpu
from tunerd.machine.files import lock, stamp_of
from tunerd.machine.peers import only_one
from tunerd.machine.process import Interrupts
from tunerd.model.verdict import lines_of_load
from tunerd.production import gate, measurement
from tunerd.production.journal import record_path
from tunerd.production.plan import (
    LOAD_LINES,
    Plan,
    address_of_plan,
    expectation_of_plan,
    remember_load,
    unit_spec,
    unit_text_of,
)
from tunerd.production.recover import recover_locked
from tunerd.production.unattended import demand_root_for_plan
from tunerd.result import Progress
from tunerd.tryout.local import PID_NAME, prune_logs
from tunerd.units.generations import Outcome
from tunerd.units.manager import (
    PORT_LIMIT_S,
    Lease,
    LeaseRecord,
    LeaseSpec,
    UnitState,
    candidate_unit,
    is_candidate,
)
from tunerd.units.text import relaxed_words
from tunerd.words import Mode, format_duration

_MODE = 0o644
_STOP_TIMEOUT_S = 3
# Sorts after what people write; what it says must win over drop-ins of production.
_OWN_DROP_IN = "zzz-tunerd-candidate.conf"
# What it writes must be seen: the end of one that failed is a result.
_OWN = (
    f"[Unit]\nBindsTo={{}}\n[Service]\nRestart=no\nTimeoutStopSec={_STOP_TIMEOUT_S}\n"
    "StandardOutput=journal\nStandardError=journal\nLogNamespace=\n"
    "SyslogLevel=info\nLogLevelMax=info\n"
)
# Whom production's end alarms, or what it restarts: a candidate's is nothing of the kind, and dependencies cannot be reset.
_OF_ITS_END = re.compile(
    rb"(?m)^[ \t]*(On(Failure|Success)|(Failure|Success|StartLimit)Action)[ \t]*="
)
# A candidate has another name; `%%` is none, whatever follows.
_SPECIFIER = re.compile(rb"%[%a-zA-Z]")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server under trial: it answered a real request, or has a `fault`.

    `lines` is what the engine wrote until then; `vram_free_mib` what its GPUs have left after the load,
    the least of them, None without a GPU or a reading.
    """

    unit: str
    plan: Plan
    environment: Mapping[str, str]
    address: Address
    serving: gate.Serving | None
    fault: Failure | None
    lines: tuple[str, ...]
    vram_free_mib: int | None


def _start_candidate(
    ctx: Context, plan: Plan, lease: LeaseSpec, number: int, *, limit_s: float
) -> Candidate:
    """Write its unit, start it, and wait until it has answered a real request or will not.

    Raises:
        DeployError: only root may have its unit run.
        HostError: the unit file cannot be written.
        ServiceError: the service manager refused, for instance because the lease is gone.
    """
    unit = candidate_unit(lease.id, number)
    address = address_of_plan(ctx, plan)
    if plan.errors:
        return _judged(ctx, unit, plan, address, _refusal(plan))
    demand_root_for_plan(ctx, plan)
    ctx.say(f"starting candidate {number}")
    _write_unit(ctx, plan, lease, unit, limit_s)
    found = gate.started(ctx, unit, ctx.services.start_bound) or gate.wait_until_serving(
        ctx,
        unit,
        address=address,
        expected=expectation_of_plan(plan),
        model_bytes=plan.facts.file_bytes,
    )
    if isinstance(found, gate.NotServing):
        return _judged(ctx, unit, plan, address, found.failure)
    candidate = _judged(ctx, unit, plan, address, found)
    said = lines_of_load(candidate.lines, LOAD_LINES)
    remember_load(ctx, plan.command.argv, plan.unit_text, said)
    return candidate


def _stop_candidate(ctx: Context, lease: LeaseSpec, number: int) -> None:
    """Stop it and remove every trace; one that was never started is no error.

    Nothing here may hide what the caller found: what cannot be removed is left to `tunerd recover`,
    and what cannot be stopped ends with the lease.
    """
    unit = candidate_unit(lease.id, number)
    folder = ctx.services.runtime_unit_dir
    if not ((folder / unit).exists() or (folder / f"{unit}.d").exists()):
        return
    steps: tuple[Callable[[], None], ...] = (
        lambda: ctx.services.stop(unit),
        lambda: measurement.remove_unit_files(ctx, unit),
        ctx.services.reload,
        lambda: ctx.services.reset_failed(unit),
    )
    for step in steps:
        with contextlib.suppress(TunerdError):
            step()
    if ctx.mode is Mode.LOCAL:  # elsewhere the journal has limits of its own
        prune_logs(ctx.paths, is_candidate)


def _candidate_text(ctx: Context, plan: Plan, lease: LeaseSpec, unit: str, limit_s: float) -> str:
    """The unit's text: production's, but for its name and what ties it to the lease."""
    spec = unit_spec(ctx, plan.resolved, plan.engine, plan.command, plan.live)
    own = [("RuntimeMaxSec", f"{max(1.0, limit_s):.0f}")] if ctx.mode is not Mode.LOCAL else []
    # Instances of one template share a slice, which may have limits.
    template, at, _ = lease.production.partition("@")
    dashed = template.replace("-", r"\x2d")
    around = (ctx.services.state(lease.production).slice or "") if at else ""
    own += [("Slice", around)] if around.endswith(f"-{dashed}.slice") else []
    spec = replace(
        spec,
        unit=unit,
        restart="no",
        # llama-server waits for the end of a stream under way, and production for that of the candidate.
        stop_timeout_s=min(spec.stop_timeout_s, _STOP_TIMEOUT_S),
        unit_directives=(
            *spec.unit_directives,
            ("BindsTo", lease.unit),
            # Ordered after production too, so that it is down before production starts.
            ("After", f"{lease.unit} {lease.production}"),
        ),
        service_directives=(*spec.service_directives, *own),
        wanted_by=None,
    )
    return unit_text_of(ctx, spec)


def _write_unit(ctx: Context, plan: Plan, lease: LeaseSpec, unit: str, limit_s: float) -> None:
    folder = ctx.services.runtime_unit_dir
    ctx.files.make_folder(folder)
    _copy_drop_ins(ctx, lease, unit)
    text = _candidate_text(ctx, plan, lease, unit, limit_s)
    ctx.files.write(folder / unit, text.encode("utf-8", "surrogateescape"), mode=_MODE)
    ctx.services.reload()


def _copy_drop_ins(ctx: Context, lease: LeaseSpec, unit: str) -> None:
    """Production's drop-ins hold for what is measured too, as they will when it is deployed."""
    drop_ins = read_live_unit(ctx).drop_ins
    if not drop_ins:
        return
    folder = ctx.services.runtime_unit_dir / f"{unit}.d"
    ctx.files.make_folder(folder)
    names = _by_name(specifiers_of(ctx, lease.production))
    for path in drop_ins:
        content = ctx.files.read(path)
        if content is not None:
            content = _OF_ITS_END.sub(rb"# \g<0>", content)
            content = _SPECIFIER.sub(lambda found: names.get(found[0], found[0]), content)
            ctx.files.write(folder / path.name, content, mode=_MODE)
    ctx.files.write(folder / _OWN_DROP_IN, _OWN.format(lease.unit).encode(), mode=_MODE)


def _by_name(specifiers: Mapping[str, str]) -> dict[bytes, bytes]:
    """What stands for a unit's name or a part of it; nothing for one with a backslash, which only some lines would unescape."""
    found = {letter: specifiers[letter] for letter in "nNpij"}
    # Unescaped. Source: systemd.unit(5).
    found |= {letter: found[letter.lower()].replace("-", "/") for letter in "PIJ"}
    found["f"] = f"/{found['I'] or found['P']}"
    return {} if "\\" in found["n"] else {f"%{k}".encode(): v.encode() for k, v in found.items()}


def _refusal(plan: Plan) -> Failure:
    words = "; ".join(message.text for message in plan.errors)
    hint = next((message.hint for message in plan.errors if message.hint), None)
    return Failure(FailureKind.BAD_ARGUMENT, words, hint)


def _judged(
    ctx: Context, unit: str, plan: Plan, address: Address, found: gate.Serving | Failure
) -> Candidate:
    serving = found if isinstance(found, gate.Serving) else None
    return Candidate(
        unit=unit,
        plan=plan,
        # By production's own text, drop-ins and name: a candidate's differs in none.
        environment=environment_with(ctx, plan.unit_text),
        address=address,
        serving=serving,
        fault=None if isinstance(found, gate.Serving) else found,
        lines=() if plan.errors else ctx.services.log(unit, max_lines=LOAD_LINES),
        vram_free_mib=least_free_mib(ctx.gpu.read().gpus or (), serving.pid)
        if serving is not None and plan.has_gpu
        else None,
    )


def _replaced_since(ctx: Context, plan: Plan) -> str | None:
    """What of a plan was replaced since it was made: builds and models may be in the middle of a night."""
    engine, then = engine_of(ctx, plan.engine).identity, plan.engine.identity
    if then is not None and (engine is None or engine.sha256 != then.sha256):
        return f"`{plan.engine.program}` was replaced by another build since it began"
    changed = (path for path, then in plan.stamps.items() if stamp_of(path) != then)
    return next((f"`{path}` was replaced since it began" for path in changed), None)


def replaced_amid(why: str) -> LeaseEnded:
    """The end of a measurement whose build or model is another by now."""
    return LeaseEnded(
        "what is measured was replaced during the measurement",
        cause=why,
        state="what was measured until then is kept",
        hint="measure again once nothing is being installed",
    )


def least_free_mib(gpus: Sequence[Gpu], pid: int | None) -> int | None:
    """What is free on the fullest card that a process is on; on any, where none is known to have it [MiB]."""
    own = [gpu for gpu in gpus if any(one.pid == pid for one in gpu.processes or ())]
    return min((gpu.free_mib for gpu in own or gpus if gpu.free_mib is not None), default=None)


_COMES_BACK_S = 5.0
_POLL_S = 0.1
# systemd ends what is bound to a unit before the unit itself, which then gets its SIGTERM at once.
_SIGNAL_FOLLOWS_S = 1.0
# Of a unit: those that are stopped with it. Source: systemd.unit(5), the inverses of Requires= and the like.
_TAKE_ALONG = ("RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf")
_LEFT = "stays stopped, since somebody stopped it just now or the machine goes down; the next boot starts it"
_CHANGED = "was left alone, since somebody is changing it just now"


class Held:
    """Production's place, held: candidates may be served in it.

    `was_running` is whether production ran before, `restores` whether it runs afterwards.
    `inhibits` is what the machine is kept from meanwhile (`sleep`, `idle`), None for nothing;
    `notes` is what a person should know of how it began.
    `without_service_s` is known after the end: from production's stop to its next real answer;
    None if it did not run before or does not afterwards. `afterwards` is what became of it, in words.
    `late` is what somebody would have ended it by while production came back already.
    """

    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        *,
        before: UnitState,
        began_s: float,
        address: Address | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.id = lease.spec.id
        self.was_running = before.is_active
        self.restores = lease.spec.restores
        self.inhibits = lease.inhibits
        self.notes = notes
        self.without_service_s: float | None = None
        self.late: BaseException | None = None
        self.afterwards = "serves again" if self.restores else "does not run, as before"
        self.until_s = began_s + lease.spec.limit_s
        self._ctx = ctx
        self._lease = lease
        self._before = before
        self._newest = _newest_of(ctx)
        self._began_s = began_s
        self._address = address
        self._n_candidates = 0
        self._turns = gate.PortTurns(ctx, lease.is_held, gate.program_of_production(ctx))
        self._supervisor = self._supervisor_now()

    @property
    def left_s(self) -> float:
        """Seconds until the service manager ends the lease; never below 0."""
        return max(0.0, self.until_s - self._ctx.clock.monotonic_s())

    def check(self) -> None:
        """The lease still stands; call it between requests, and whenever one failed.

        Raises:
            LeaseEnded: somebody started production or a change, its time ran out, or it was killed.
                Production is starting or serves; nothing more can be measured.
        """
        if not self._lease.is_held():
            raise self._preempted()

    @contextlib.contextmanager
    def serve(self, plan: Plan) -> Iterator[Candidate]:
        """Serve what a plan would deploy, for the body: the same unit text, user and arguments.

        Yields a candidate that has answered a real request, or one whose `fault` says why it did
        not; a plan that is refused is such a fault too. One at a time.

        Raises:
            LeaseEnded: the lease ended before or while it started.
            ServiceError: the service manager does not do its part.
            HostError: the unit file cannot be written.
        """
        self.check()
        if not plan.errors:
            option, address = plan.engine.port_option, address_of_plan(self._ctx, plan)
            self._turns.wait_for(plan.engine.program, option, address)
            self.check()
            self._restore_when_free(plan, address)
        self._n_candidates += 1
        started = False
        try:
            candidate = _start_candidate(
                self._ctx, plan, self._lease.spec, self._n_candidates, limit_s=self.left_s
            )
            started = True
            if candidate.fault is not None:
                self.check()
            why = None if plan.errors else _replaced_since(self._ctx, plan)
            if why is not None:
                raise replaced_amid(why)
            yield candidate
        except ServiceError:
            if not started:  # a unit that is bound to a lease which is gone does not start
                self.check()
            raise
        finally:
            _stop_candidate(self._ctx, self._lease.spec, self._n_candidates)

    def _restore_when_free(self, plan: Plan, address: Address) -> None:
        """Should everything end now: after another build production's port may be taken a minute."""
        own = self._address
        if not self.restores or own is None or address.port not in {0, own.port}:
            return  # whoever has another port changes nothing about what was left on this one
        is_free = self._turns.leaves_it_free(plan.engine)
        self._lease.restore_when_free(None if is_free else (own.bound_host, own.port))

    def look(self, candidate: Candidate) -> Failure | None:
        """Why the candidate died since it started; None while it runs. For requests that failed.

        Raises:
            LeaseEnded: the lease is gone.
        """
        self.check()
        if candidate.serving is None:
            return candidate.fault
        state = self._ctx.services.state(candidate.unit)
        if state.is_active and state.main_pid == candidate.serving.pid:
            return None
        fault = gate.why_it_ended(self._ctx, candidate.unit).failure
        self.check()
        return fault

    def _supervisor_now(self) -> bytes | None:
        """Which supervisor runs in local mode, by its pid; None where there is none."""
        return self._ctx.files.read(self._ctx.paths.runtime_dir / PID_NAME)

    def _preempted(self) -> LeaseEnded:
        ctx = self._ctx
        word = measurement.ended_by(ctx, self.id)
        if word is not None:
            why = f"{word} ended it"
        elif self.left_s <= 0:
            why = f"its time of {format_duration(self._lease.spec.limit_s)} ran out"
        elif ctx.mode is Mode.LOCAL and (
            # Another one may have started production by now.
            self._supervisor_now() != self._supervisor or not ctx.services.state(ctx.unit).is_active
        ):
            why = "tunerd's supervisor ended"
        else:
            if self._lease.spec.bound_to is not None:  # ended first, where our own unit is to end
                ctx.clock.sleep(_SIGNAL_FOLLOWS_S)
            why = f"somebody started {ctx.unit}, or ended {self._lease.spec.unit}"
        state = f"{ctx.unit} is back in its place" if self.restores or word else None
        return LeaseEnded("the measurement was ended", cause=why, state=state)

    def close(self) -> None:
        """End the lease and wait until production serves; `hold` calls it.

        Raises:
            Stranded: production does not serve again.
            ServiceError: the service manager does not do its part.
        """
        ctx = self._ctx
        was_held = self._lease.is_held()
        if was_held:
            ctx.say(f"ending the measurement{f'; {ctx.unit} comes back' * self.restores}")
        try:
            if was_held and self.restores and self._n_candidates:
                self._turns.wait_for_production()
            self._lease.end()
        finally:
            word, record = measurement.ended_by(ctx, self.id), measurement.written_record(ctx)
            measurement.forget_measurement(ctx, self.id)
        if word is not None or not self.restores:
            return  # whoever asked for the end looks after the unit
        if not was_held and ctx.mode is not Mode.LOCAL:
            self._wait_for_its_start()
        try:
            self._see_it_serve()
        except TunerdError:
            if record is not None and record.id == self.id:
                measurement.owe(ctx, record)
            raise

    def _wait_for_its_start(self) -> None:
        """The manager starts it in a moment, if it has not: starting it by hand comes second.

        The lease may still wait for production's port.
        """
        ctx, now_s = self._ctx, self._ctx.clock.monotonic_s
        ending_s = now_s() + PORT_LIMIT_S
        end_s = now_s() + _COMES_BACK_S
        while now_s() < end_s:
            if ctx.services.state(self._lease.spec.unit).active_state == "deactivating":
                left_s = max(0.0, ending_s - now_s())
                ctx.report(Progress("waiting until the port is free again", left_s=left_s))
                end_s = min(now_s(), ending_s) + _COMES_BACK_S
            elif ctx.services.state(ctx.unit).active_state not in {"inactive", "deactivating"}:
                return
            ctx.clock.sleep(_POLL_S)

    def _see_it_serve(self) -> None:
        ctx = self._ctx
        state = ctx.services.state(ctx.unit)
        life = state.invocation_id or ""
        is_another = life not in {"", self._before.invocation_id}
        if is_another and not state.runs and ctx.services.was_stopped(ctx.unit, life):
            self.afterwards = _LEFT
            return
        try:
            ctx.services.start(ctx.unit)  # joins the start that the manager has begun
        except JobCanceled:
            self.afterwards = _LEFT
            return
        except ServiceError as error:
            if not ctx.services.state(ctx.unit).has_failed:
                raise self._not_back(error.message, error.cause) from error
        try:
            found = gate.come_back(ctx)
        except JobCanceled:  # somebody stops it while it is started once more
            self.afterwards = _LEFT
            return
        if isinstance(found, gate.Serving):
            if self.was_running:
                self.without_service_s = found.answered_at_s - self._began_s
            return
        # Who deploys in its place, or has, looks after the unit.
        is_theirs = found.was_stopped or record_path(ctx).exists()
        if not is_theirs and _newest_of(ctx) == self._newest:
            failure = found.failure
            raise self._not_back(found.text, f"{failure.kind}: {failure.words}")
        self.afterwards = _LEFT if found.was_stopped else _CHANGED

    def _not_back(self, message: str, cause: str | None) -> Stranded:
        return Stranded(
            f"{self._ctx.unit} does not serve after the measurement: {message}",
            cause=cause,
            state="its unit was not changed; the measurement's own units are gone",
            hint=f"`tunerd status`; then `{self._ctx.systemctl} restart {self._ctx.unit}`, or `tunerd rollback`",
        )


def _newest_of(ctx: Context) -> int:
    """The number of the unit's newest generation; 0 where there is none."""
    newest = next(iter(ctx.generations.entries(ctx.unit)), None)
    return 0 if newest is None else newest.generation.number


@contextlib.contextmanager
def hold(
    ctx: Context,
    *,
    purpose: str,
    budget_s: float,
    start_after: bool = False,
    ran: bool = False,
) -> Iterator[Held]:
    """Hold production's place for the body; afterwards production serves again, as before.

    What the body found must be kept before it ends: if production does not come back, this raises.
    Ctrl-C, SIGTERM and SIGHUP end the body as exceptions.

    Args:
        ctx: Where. Progress goes to its sink.
        purpose: What is measured, told to others: `bench rtx-3090-ti-24gb`.
        budget_s: The longest that production may be away, without its own load [s]; the service
            manager ends the lease then.
        start_after: Start production afterwards even if it does not run now.
        ran: It did when whoever asked was told what this costs: where it does no more, nothing is measured.

    Raises:
        Busy: another measurement or a change is under way.
        LeaseEnded: somebody stopped production before its place was taken.
        DeployError: as `demand_return`, or the service manager cannot do what a measurement will ask of it.
        HostError: a file cannot be written.
        ServiceError: the lease cannot be had; production was started again.
        Stranded: production does not serve afterwards.
    """
    with _only_measurement(ctx, purpose), Interrupts() as interrupts:
        measurement.wait_for_dead_measurement(ctx)
        held = _begin(ctx, purpose, budget_s, start_after=start_after, ran=ran)
        interrupted: BaseException | None = None
        try:
            yield held
        except (KeyboardInterrupt, SystemExit) as end:
            interrupted = end
            raise
        finally:
            with interrupts.held():
                held.close()
            held.late = interrupts.late
            if interrupted is not None:
                interrupted.add_note(f"{ctx.unit} {held.afterwards}")


def demand_alone(ctx: Context) -> None:
    """See that nobody measures, before a person is asked: what is measured stands in production's place.

    Raises:
        Busy: another measurement is under way.
    """
    with _only_measurement(ctx, "a look"):
        return


@contextlib.contextmanager
def _only_measurement(ctx: Context, purpose: str) -> Iterator[None]:
    """One at a time: the lock of measurements, and each card, which other STATEs and accounts may measure."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(ctx.paths.measure_lock, purpose=purpose, since=ctx.now_text()))
        except Busy as busy:
            raise Busy(
                "another measurement is under way",
                cause=busy.cause,
                state="nothing was changed",
                hint=f"{busy.hint}; while it holds the place of {ctx.unit}, starting that ends it",
            ) from busy
        for uuid, name in sorted(
            (gpu.uuid, gpu.name) for gpu in ctx.gpu.read().gpus or () if gpu.uuid
        ):
            try:
                stack.enter_context(only_one(f"card-{uuid}"))
            except Busy as busy:
                raise Busy(
                    f"another tunerd is measuring on the {name}",
                    cause=busy.cause,
                    state="nothing was changed",
                    hint="wait for it: two measurements on one card would both be wrong",
                ) from busy
        yield


def _prepare(
    ctx: Context, purpose: str, budget_s: float, *, start_after: bool
) -> tuple[LeaseSpec, UnitState]:
    check_manager(ctx)  # it is to read each candidate's unit
    demand_return(ctx, ctx.services.state(ctx.unit))
    along = _stopped_along(ctx)
    before = ctx.services.state(ctx.unit)  # last: cards and files take a while to look at
    spec = LeaseSpec(
        id=secrets.token_hex(6),
        production=ctx.unit,
        restores=before.exists and (before.runs or start_after),
        limit_s=budget_s,
        why=purpose,
        bound_to=ctx.own_unit,
        along=along,
    )
    return spec, before


def _stopped_along(ctx: Context) -> tuple[str, ...]:
    """Units that run and go down where production is stopped: nobody else starts them again."""
    found = [ctx.unit]
    for unit in found:  # which grows: others may require those
        shown = ctx.services.properties(unit, *_TAKE_ALONG)
        named = relaxed_words(" ".join(shown.values()))
        found += [one for one in sorted({*named} - {*found}) if ctx.services.state(one).runs]
    return tuple(found[1:])


def demand_return(ctx: Context, before: UnitState) -> None:
    """What serves will serve again: after a power cut, on the card, and on the files that stand there now; or there is none.

    Raises:
        DeployError: it is not.
    """
    if before.exists and before.is_enabled is not True:
        raise DeployError(
            f"{ctx.unit} does not start at boot, so it is not stopped for a measurement",
            cause="after a power cut during the measurement nothing would start it again",
            state="nothing was touched",
            hint=f"`{ctx.systemctl} enable {ctx.unit}`, or `tunerd apply PROFILE`",
        )
    gate.demand_card(ctx, before)
    edited = gate.edited_under(ctx, before) if before.runs else None
    if edited is not None:
        raise DeployError(
            f"what {ctx.unit} starts with was changed while it ran, so it is not stopped for a measurement",
            cause=f"{edited.text}\nit was never seen to start as it stands now",
            state="nothing was touched",
            hint=f"{edited.way}, then try again",
        )
    replaced = gate.replaced_under(ctx, before) if before.is_active else {}
    if replaced:
        texts, ways = (
            (one.text for one in replaced.values()),
            (one.way for one in replaced.values()),
        )
        raise DeployError(
            f"files of {ctx.unit} were replaced or removed while it ran, so it is not stopped for a measurement",
            cause="\n".join((*texts, "it was never seen to start as it stands now")),
            state="nothing was touched",
            # What is gone comes first: without it a restart would end what still serves.
            hint=f"{', then '.join(sorted(set(ways), reverse=True))}, then try again",
        )


def _told_of_sleep(lease: Lease) -> tuple[str, ...]:
    """What is not kept from happening in the middle of it."""
    if lease.inhibits == "sleep":
        return ()
    if lease.inhibits == "idle":
        return ("the machine will not go to sleep by itself, but somebody can put it to sleep",)
    return ("the machine may go to sleep meanwhile: nothing here can prevent it",)


def _take(ctx: Context, spec: LeaseSpec, before: UnitState) -> Lease:
    """Take the place; where that fails half-way, production is started again."""
    try:
        return ctx.services.lease(spec)
    except BaseException as error:
        now = ctx.services.state(ctx.unit)
        is_begun = _is_begun(ctx, now, before)
        if spec.restores and not now.is_active:
            ctx.services.reset_failed(ctx.unit)  # starts before this one must not refuse it
            try:
                ctx.services.start(ctx.unit)
            except JobCanceled as canceled:
                if isinstance(error, ServiceError):  # both, where the machine goes down
                    if ctx.own_unit is not None:
                        ctx.clock.sleep(_SIGNAL_FOLLOWS_S)
                    raise _never_began(canceled.cause, f"{ctx.unit} {_LEFT}") from canceled
        if isinstance(error, ServiceError) and is_begun:
            state = f"{ctx.unit} is back in its place"
            raise _never_began(f"somebody started {ctx.unit}", state) from error
        raise


def _never_began(cause: str | None, state: str) -> LeaseEnded:
    return LeaseEnded("the measurement was ended before it began", cause=cause, state=state)


def _is_begun(ctx: Context, now: UnitState, before: UnitState) -> bool:
    """Whether somebody has production started: it is up again, on its way, or about to be."""
    is_another = now.invocation_id != before.invocation_id
    if is_another and now.runs:
        return True
    return bool(ctx.services.properties(ctx.unit, "Job").get("Job"))


def _begin(ctx: Context, purpose: str, budget_s: float, *, start_after: bool, ran: bool) -> Held:
    """Stop production and take its place, while no swap runs and none is left half-way."""
    with contextlib.ExitStack() as changing:
        own = lock(ctx.paths.lock, purpose=f"beginning {purpose}", since=ctx.now_text())
        changing.enter_context(own)
        recover_locked(ctx)
        notes = gate.drain(ctx, ctx.services.state(ctx.unit))
        # After the wait: what somebody stopped meanwhile stays stopped.
        spec, before = _prepare(ctx, purpose, budget_s, start_after=start_after)
        if ran and not before.runs:
            why = f"{ctx.unit} {'failed' if before.has_failed else 'was stopped'} meanwhile"
            raise _never_began(why, "nothing was touched")
        measurement.clear_dead_measurements(ctx, is_mine=True)
        if before.runs:
            ctx.say(f"stopping {ctx.unit} for the measurement")
        began_s = ctx.clock.monotonic_s()
        address = gate.address_of_production(ctx, before)
        lease = _take(ctx, spec, before)
        notes += _told_of_sleep(lease)
        held = Held(
            ctx,
            lease,
            before=before,
            began_s=began_s,
            address=address,
            notes=notes,
        )
        try:
            if spec.restores:  # earlier starts must not count against the one that brings it back
                ctx.services.reset_failed(ctx.unit)
            now_s = ctx.clock.now_s()
            record = LeaseRecord(
                id=spec.id,
                production=ctx.unit,
                purpose=purpose,
                pid=os.getpid(),
                since_s=now_s,
                until_s=now_s + spec.limit_s,
                restores=spec.restores,
                inhibits=lease.inhibits,
            )
            measurement.write_measurement(ctx, record)
        except BaseException:
            changing.close()  # what brings production back takes the lock itself
            held.close()
            raise
    for text in notes:
        ctx.say(text)
    return held


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected time without service [s].

    `load_s` is how long production was away at its last swap, nearly all of it loading; None where
    that is not known. `port_wait_s` is how much longer it may take where its port must first be free
    again, 0 where that cannot be, and `along` are units that are stopped and started with it; `text` tells both.
    """

    unit: str
    is_there: bool
    runs: bool
    runs_afterwards: bool
    measuring_s: float
    load_s: float | None
    port_wait_s: float = 0.0
    along: tuple[str, ...] = ()

    @property
    def without_service_s(self) -> float | None:
        """None where it does not serve now either, or where the load is not known."""
        return self.measuring_s + self.load_s if self.runs and self.load_s is not None else None

    @property
    def text(self) -> str:
        """For people."""
        text = f"{self.unit} {self._what_happens()}"
        if not self.is_there:
            text = f"there is no {self.unit}: nothing is interrupted"
        if self.along:
            text += f"; stopped and started with it: {', '.join(self.along)}"
        if self.port_wait_s:
            text += (
                f"; if connections to another build keep its port taken, {self.unit} starts once it is free "
                f"again, up to {self.port_wait_s:.0f} s later"
            )
        return text

    def _what_happens(self) -> str:
        measuring = format_duration(self.measuring_s)
        if not self.runs and self.runs_afterwards:
            return f"does not run now; it is started after {measuring}"
        if not self.runs:
            return "does not run now, and stays stopped (--start-after starts it afterwards)"
        if self.load_s is None:
            return (
                f"will not serve for about {measuring} of measuring and the time it takes to load again; "
                "how long loading takes is not known yet"
            )
        return (
            f"will not serve for about {format_duration(self.measuring_s + self.load_s)}: {measuring} of "
            f"measuring, then {format_duration(self.load_s)} until it answers again, as at its last swap"
        )

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        told = {"without_service_s": self.without_service_s, "text": self.text}
        return {**asdict(self), **told}


def outlook(
    ctx: Context,
    *,
    measuring_s: float,
    start_after: bool = False,
    engines: Sequence[Engine] = (),
) -> Outlook:
    """What holding production's place for so long will cost.

    Args:
        ctx: Where.
        measuring_s: How long the measurement is expected to take, the candidates' loads included.
        start_after: Whether production is started afterwards even if it does not run now.
        engines: What the candidates run.

    Raises:
        DeployError: as `demand_return`.
    """
    state = ctx.services.state(ctx.unit)
    demand_return(ctx, state)
    ahead = Outlook(
        unit=ctx.unit,
        is_there=state.exists,
        runs=state.runs,
        runs_afterwards=state.exists and (state.runs or start_after),
        measuring_s=measuring_s,
        load_s=_last_load_s(ctx),
        along=_stopped_along(ctx),
    )
    return beside_others(ctx, ahead, engines)


def beside_others(ctx: Context, ahead: Outlook, engines: Sequence[Engine]) -> Outlook:
    """The outlook where these builds are measured: some leave production's port taken."""
    turns = gate.PortTurns(ctx, lambda: False, gate.program_of_production(ctx))
    is_free = turns.last is None or all(map(turns.leaves_it_free, engines))
    return (
        ahead if is_free or not ahead.runs_afterwards else replace(ahead, port_wait_s=PORT_LIMIT_S)
    )


def _last_load_s(ctx: Context) -> float | None:
    served = (one.ending for one in ctx.generations.entries(ctx.unit))
    last = next((one for one in served if one.outcome is Outcome.SERVING), None)
    return None if last is None else last.without_service_s
