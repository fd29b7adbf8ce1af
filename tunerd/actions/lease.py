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
import secrets
from collections.abc import Iterator

from tunerd.actions.candidate import Candidate, start_candidate, stop_candidate
from tunerd.actions.come_back import come_back
from tunerd.actions.context import Context
from tunerd.actions.drain import drain
from tunerd.actions.lease_record import (
    clear_dead_measurements,
    ended_by,
    forget_measurement,
    wait_for_dead_measurement,
    write_measurement,
)
from tunerd.actions.plan import Plan
from tunerd.actions.plan_expect import address_of_plan
from tunerd.actions.port_wait import (
    PORT_WAIT_S,
    PortTurns,
    address_of_production,
    program_of_production,
)
from tunerd.actions.recover import recover_locked
from tunerd.actions.serve_check import NotServing, Serving
from tunerd.core.failure import FailureKind
from tunerd.core.host import Mode
from tunerd.core.lease import Fault, LeaseRecord, LeaseSpec
from tunerd.core.progress import Progress
from tunerd.core.quantity import format_duration
from tunerd.core.service import UnitState
from tunerd.errors import Busy, DeployError, JobCanceled, Preempted, ServiceError, Stranded
from tunerd.system.files import lock
from tunerd.system.interrupts import Interrupts
from tunerd.system.llama import Address
from tunerd.system.seams import Lease

_COMES_BACK_S = 5.0
_POLL_S = 0.1


class Held:
    """Production's place, held: candidates may be served in it.

    `was_running` is whether production ran before, `restores` whether it runs afterwards.
    `inhibits` is what the machine is kept from meanwhile (`sleep`, `idle`), None for nothing;
    `notes` is what a person should know of how it began.
    `without_service_s` is known after the end: from production's stop to its next real answer;
    None if it did not run before or does not afterwards.
    """

    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        *,
        was_running: bool,
        began_s: float,
        address: Address | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.id = lease.spec.id
        self.was_running = was_running
        self.restores = lease.spec.restores
        self.inhibits = lease.inhibits
        self.notes = notes
        self.without_service_s: float | None = None
        self.until_s = began_s + lease.spec.limit_s
        self._ctx = ctx
        self._lease = lease
        self._began_s = began_s
        self._address = address
        self._n_candidates = 0
        self._turns = PortTurns(ctx, lease.is_held, program_of_production(ctx))

    @property
    def left_s(self) -> float:
        """Seconds until the service manager ends the lease; never below 0."""
        return max(0.0, self.until_s - self._ctx.clock.monotonic_s())

    def check(self) -> None:
        """The lease still stands; call it between requests, and whenever one failed.

        Raises:
            Preempted: somebody started production or a change, its time ran out, or it was killed.
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
            Preempted: the lease ended before or while it started.
            ServiceError: the service manager does not do its part.
            HostError: the unit file cannot be written.
        """
        self.check()
        if not plan.is_refused:
            self._turns.wait_for(plan.engine.program, address_of_plan(self._ctx, plan))
            self.check()
            self._restore_when_free(plan)
        self._n_candidates += 1
        started = False
        try:
            candidate = start_candidate(
                self._ctx, plan, self._lease.spec, self._n_candidates, limit_s=self.left_s
            )
            started = True
            if candidate.fault is not None:
                self.check()
            yield candidate
        except ServiceError:
            if not started:  # a unit that is bound to a lease which is gone does not start
                self.check()
            raise
        finally:
            stop_candidate(self._ctx, self._lease.spec, self._n_candidates)

    def _restore_when_free(self, plan: Plan) -> None:
        """Should everything end now: after another build production's port may be taken a minute."""
        if self.restores and self._address is not None:
            is_same = self._turns.is_productions(plan.engine.program)
            where = (self._address.reachable_host, self._address.port)
            self._lease.restore_when_free(None if is_same else where)

    def look(self, candidate: Candidate) -> Fault | None:
        """Why the candidate died since it started; None while it runs. For requests that failed.

        Raises:
            Preempted: the lease is gone.
        """
        self.check()
        fault = candidate.look(self._ctx)
        if fault is not None:
            self.check()
        return fault

    def _preempted(self) -> Preempted:
        ctx = self._ctx
        word = ended_by(ctx, self.id)
        if word is not None:
            why = f"{word} ended it"
        elif self.left_s <= 0:
            why = f"its time of {format_duration(self._lease.spec.limit_s)} ran out"
        elif ctx.mode is Mode.LOCAL and not ctx.services.state(ctx.unit).is_active:
            why = "tunerd's supervisor ended"
        else:
            why = f"somebody started {ctx.unit}, or ended {self._lease.spec.unit}"
        state = f"{ctx.unit} is back in its place" if self.restores or word else None
        return Preempted("the measurement was ended", cause=why, state=state)

    def close(self) -> None:
        """End the lease and wait until production serves; `hold` calls it.

        Raises:
            Stranded: production does not serve again.
            ServiceError: the service manager does not do its part.
        """
        ctx = self._ctx
        was_held = self._lease.is_held()
        if was_held:
            ctx.say(f"ending the measurement; {ctx.unit} comes back")
        try:
            if was_held and self.restores and self._n_candidates:
                self._turns.wait_for_production()
            self._lease.end()
        finally:
            word = ended_by(ctx, self.id)
            forget_measurement(ctx, self.id)
        if word is not None or not self.restores:
            return  # whoever asked for the end looks after the unit
        if not was_held and ctx.mode is not Mode.LOCAL:
            self._wait_for_its_start()
        self._see_it_serve()

    def _wait_for_its_start(self) -> None:
        """The manager starts it in a moment, if it has not: starting it by hand comes second.

        The lease may still wait for production's port.
        """
        ctx, now_s = self._ctx, self._ctx.clock.monotonic_s
        ending_s = now_s() + PORT_WAIT_S
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
        try:
            ctx.services.start(ctx.unit)  # joins the start that the manager has begun
        except JobCanceled:
            return  # somebody stopped it just now
        except ServiceError as error:
            if not ctx.services.state(ctx.unit).has_failed:
                raise self._not_back(error.message, error.cause) from error
        found = come_back(ctx)
        if isinstance(found, Serving):
            if self.was_running:
                self.without_service_s = found.answered_at_s - self._began_s
            return
        if found.failure.kind is not FailureKind.STOPPED:
            raise self._not_back(found.text, _told(found))

    def _not_back(self, message: str, cause: str | None) -> Stranded:
        return Stranded(
            f"{self._ctx.unit} does not serve after the measurement: {message}",
            cause=cause,
            state="nothing of it was changed; the measurement's own units are gone",
            hint=f"`tunerd status`; then `systemctl restart {self._ctx.unit}`, or `tunerd rollback`",
        )


def _told(found: NotServing) -> str:
    return f"{found.failure.kind}: {found.failure.words}"


@contextlib.contextmanager
def hold(
    ctx: Context,
    *,
    purpose: str,
    budget_s: float,
    start_after: bool = False,
    drains: bool = True,
    bound_to: str | None = None,
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
        drains: Wait for requests under way first, as long as the settings say.
        bound_to: The unit that this process is, where it is one (`tunerd-sweep.service`); else the
            context's.

    Raises:
        Busy: another measurement or a change is under way.
        DeployError: production does not start at boot, so a power cut would leave nothing.
        HostError: a file cannot be written.
        ServiceError: the lease cannot be had; production was started again.
        Stranded: production does not serve afterwards.
    """
    with _only_measurement(ctx, purpose), Interrupts() as interrupts:
        wait_for_dead_measurement(ctx)
        spec, before = _prepare(ctx, purpose, budget_s, start_after=start_after, bound_to=bound_to)
        held = _begin(ctx, spec, before, purpose, drains=drains)
        try:
            yield held
        except (KeyboardInterrupt, SystemExit) as end:
            end.add_note(_state_after(ctx, held))
            raise
        finally:
            with interrupts.held():
                held.close()


def _state_after(ctx: Context, held: Held) -> str:
    """How the machine is once the lease was closed without an error."""
    return f"{ctx.unit} {'serves again' if held.restores else 'does not run, as before'}"


@contextlib.contextmanager
def _only_measurement(ctx: Context, purpose: str) -> Iterator[None]:
    """One at a time: the lock of measurements."""
    try:
        held = lock(ctx.paths.measure_lock, purpose=purpose, since=ctx.now_text())
        held.__enter__()
    except Busy as busy:
        raise Busy(
            "another measurement is under way",
            cause=busy.cause,
            state="nothing was changed",
            hint=f"wait for it, or end it by starting {ctx.unit}",
        ) from busy
    with contextlib.ExitStack() as stack:
        stack.push(held.__exit__)
        yield


def _prepare(
    ctx: Context, purpose: str, budget_s: float, *, start_after: bool, bound_to: str | None
) -> tuple[LeaseSpec, UnitState]:
    before = ctx.services.state(ctx.unit)
    demand_return_at_boot(ctx, before)
    runs = before.is_active or before.active_state == "activating"
    spec = LeaseSpec(
        id=secrets.token_hex(6),
        production=ctx.unit,
        restores=before.exists and (runs or start_after),
        limit_s=budget_s,
        why=purpose,
        bound_to=bound_to or ctx.own_unit,
    )
    return spec, before


def demand_return_at_boot(ctx: Context, before: UnitState) -> None:
    """Production is enabled, or there is none: a power cut must not leave a box without its server.

    Raises:
        DeployError: it is not.
    """
    if before.exists and before.is_enabled is not True:
        raise DeployError(
            f"{ctx.unit} does not start at boot, so nothing is measured in its place",
            cause="after a power cut in the middle nothing would bring it back",
            state="nothing was touched",
            hint=f"`systemctl enable {ctx.unit}`, or `tunerd apply PROFILE`",
        )


def _told_of_sleep(lease: Lease) -> tuple[str, ...]:
    """What is not kept from happening in the middle of it."""
    if lease.inhibits == "sleep":
        return ()
    if lease.inhibits == "idle":
        return ("the machine is kept from sleeping for idleness, not from being put to sleep",)
    return ("nothing keeps the machine from going to sleep meanwhile",)


def _take(ctx: Context, spec: LeaseSpec) -> Lease:
    """Take the place; where that fails half-way, production is started again."""
    try:
        return ctx.services.lease(spec)
    except BaseException:
        if spec.restores and not ctx.services.state(ctx.unit).is_active:
            ctx.services.start(ctx.unit)
        raise


def _begin(ctx: Context, spec: LeaseSpec, before: UnitState, purpose: str, *, drains: bool) -> Held:
    """Stop production and take its place, while no swap runs and none is left half-way."""
    with lock(ctx.paths.lock, purpose=f"beginning {purpose}", since=ctx.now_text()):
        recover_locked(ctx)
        notes = drain(ctx, before) if drains else ()
        clear_dead_measurements(ctx, is_mine=True)
        ctx.say(f"stopping {ctx.unit} for the measurement")
        began_s = ctx.clock.monotonic_s()
        address = address_of_production(ctx, before)
        lease = _take(ctx, spec)
        notes += _told_of_sleep(lease)
        held = Held(
            ctx,
            lease,
            was_running=before.is_active,
            began_s=began_s,
            address=address,
            notes=notes,
        )
        try:
            # Earlier starts must not count against the one that brings it back.
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
            write_measurement(ctx, record)
        except BaseException:
            held.close()
            raise
    for text in notes:
        ctx.say(text)
    return held
