"""The time after a swap in which a worse server is taken back: a unit of its own watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.lease_record import read_measurement
from tunerd.actions.live import address_now, drop_ins_in_force, read_live_unit, standing_text
from tunerd.actions.own_unit import probation_unit
from tunerd.actions.probation_basis import basis_of, replaced_by
from tunerd.actions.rollback import rollback
from tunerd.actions.swap_record import read_record
from tunerd.actions.sweep_record import decide, find_sweep, reading
from tunerd.actions.tuned_layer import read_tuned, remember_failure, take_out_tuned
from tunerd.core.generation import HistoryEntry
from tunerd.core.health import HttpState
from tunerd.core.probation import Basis, Judgement, Look, Standing, comparable, judge, windows
from tunerd.core.request_log import read_requests
from tunerd.core.result import ActionResult, Message, note
from tunerd.core.service import UnitState
from tunerd.core.swap import sha256
from tunerd.core.sweep.sample import arm_from_json
from tunerd.errors import (
    Busy,
    DeployError,
    HostError,
    RolledBack,
    Stranded,
    TunerdError,
    UsageError,
)
from tunerd.system.host import memory_of, process_cpu_s

_ASK_S = 10.0
_LOG_LINES = 20_000
_REFRESH_LOOKS = 10
_EDITED = "somebody edited the unit"


def run_probation(
    ctx: Context,
    number: int,
    *,
    sweep: int | None,
    duration_s: float | None = None,
    restarts: int = 0,
) -> ActionResult:
    """Watch a generation until its time is over, it does worse, or something else serves.

    Args:
        ctx: Where.
        number: Of the generation.
        sweep: Which proved it; None for none.
        duration_s: How long; None for what the settings say.
        restarts: How often its manager had started it by itself when the swap was done.

    Returns:
        Exit code 3 where it was taken back, or should have been and what served before does not serve.

    Raises:
        UsageError: it does not serve, or not as it was deployed.
        Stranded: it did worse, and neither server came back.
    """
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.number != number:
        raise UsageError(f"generation {number} does not serve", hint="`tunerd history`")
    if _is_edited(ctx, entry):
        raise UsageError(_EDITED, hint="`tunerd verify` shows the difference")
    watch = _Watch(ctx, entry, sweep, restarts)
    return watch.run(duration_s or ctx.settings.probation.duration_s)


class _Overtaken(Exception):
    """Something else serves than what is watched."""


class _Watch:
    """One probation."""

    def __init__(self, ctx: Context, entry: HistoryEntry, sweep: int | None, restarts: int) -> None:
        self._ctx = ctx
        self._entry = entry
        self._generation = entry.generation
        self._restarts = restarts
        self._sweep = sweep
        self._looks: list[Look] = []
        self._began_s = ctx.clock.now_s()
        self._life = self._look(comparable_to=None).life
        self._basis = basis_of(ctx, entry.generation)

    def run(self, duration_s: float) -> ActionResult:
        """Until there is an answer."""
        ctx = self._ctx
        end_s = ctx.clock.monotonic_s() + duration_s
        every_s = min(ctx.settings.probation.every_s, duration_s)
        while ctx.clock.monotonic_s() < end_s:
            ctx.clock.sleep(min(every_s, max(0.0, end_s - ctx.clock.monotonic_s())))
            if _is_swapping(ctx):
                continue  # which may fail, and leave this one serving
            why = self._why_over()
            if why is not None:
                return self._end("ended", why)
            if read_measurement(ctx) is not None:
                # Production is away on purpose, and returns as another life.
                self._begin_again(None)
                self._restarts = 0
                continue
            found = self._judge()
            self._write("running", "", end_s - ctx.clock.monotonic_s())
            if found.standing is Standing.WORSE:
                result = self._take_back(found)
                if result is not None:
                    return result
        return self._end(*self._at_the_end())

    def _judge(self) -> Judgement:
        if self._basis.slowest_tok_s is None and len(self._looks) % _REFRESH_LOOKS == 0:
            self._basis = basis_of(self._ctx, self._generation)  # somebody may have measured it
        look = self._look(comparable_to=self._basis)
        self._restarts = min(self._restarts, look.n_restarts or 0)
        self._life = self._life or look.life
        if look.life != self._life and look.is_active and not look.n_restarts:
            self._begin_again(look.life)  # a person restarted it
        self._looks.append(look)
        return judge(self._looks, self._basis, restarts=self._restarts)

    def _begin_again(self, life: str | None) -> None:
        self._looks.clear()
        self._life = life

    def _at_the_end(self) -> tuple[str, str]:
        if self._looks and self._looks[-1].is_stopped:
            return "ended", "somebody stopped it"
        if self._basis.slowest_tok_s is None:
            return "passed", "it served; its speed was not judged, for none was measured"
        return "passed", "nothing was worse than what was measured of it"

    def _why_over(self) -> str | None:
        serving = self._ctx.generations.serving(self._ctx.unit)
        if serving is None or serving.generation.number != self._generation.number:
            return "something else was deployed"
        return _EDITED if _is_edited(self._ctx, self._entry) else None

    def _demand_still(self, _target: object) -> None:
        """Asked under the lock: nobody has deployed or edited anything since the last look."""
        if self._why_over() is not None:
            raise _Overtaken

    def _look(self, *, comparable_to: Basis | None) -> Look:
        ctx = self._ctx
        state = ctx.services.state(ctx.unit)
        address = address_now(ctx, read_live_unit(ctx), state) if state.is_active else None
        server = None if address is None else ctx.connect(address)
        is_ready = server is not None and server.health(timeout_s=_ASK_S) is HttpState.READY
        served: tuple[int | None, float | None] = None, None
        if is_ready and comparable_to is not None:
            served = self._served(state.invocation_id, comparable_to)
        memory = None if state.main_pid is None else memory_of(state.main_pid)
        cards = [] if state.main_pid is None else _cards_of(ctx, state.main_pid)
        return Look(
            at_s=ctx.clock.now_s(),
            life=state.invocation_id or (None if state.main_pid is None else str(state.main_pid)),
            is_active=state.is_active,
            is_ready=is_ready,
            is_stopped=is_stopped_by_hand(state),
            n_restarts=state.n_restarts,
            n_predicted=served[0],
            predicted_s=served[1],
            cpu_s=None if state.main_pid is None else process_cpu_s(state.main_pid),
            anonymous_mib=None if memory is None else memory.anonymous_mib,
            vram_free_mib=min((free for free, _ in cards), default=None),
            vram_own_mib=sum(own for _, own in cards) if cards else None,
        )

    def _served(self, invocation: str | None, basis: Basis) -> tuple[int | None, float | None]:
        """Tokens and seconds of the comparable requests that this life has answered, by its log."""
        try:
            lines = self._ctx.services.log(
                self._ctx.unit, invocation_id=invocation, max_lines=_LOG_LINES
            )
        except TunerdError:
            return None, None
        return comparable(read_requests(lines).requests, basis)

    def _take_back(self, found: Judgement) -> ActionResult | None:
        """Back to what served before; None where somebody has the lock, and it is tried again.

        The arm is remembered where a sweep proved it.
        """
        ctx, generation = self._ctx, self._generation
        ctx.say(f"generation {generation.number} is taken back: {found.reason}")
        self._write("worse", found.reason, 0.0)
        state, reason, exit_code = "taken back", found.reason, 3
        try:
            rollback(ctx, to=self._back(), drain=True, confirm=self._demand_still, reason="guard")
        except _Overtaken:
            return self._end("ended", self._why_over() or "something else was deployed")
        except Busy as error:
            ctx.say(f"not yet: {error.message}")
            return None
        except Stranded:
            raise
        except RolledBack:
            state, reason = "worse", f"{reason}; what served before does not serve either"
        except (DeployError, UsageError) as error:
            state, exit_code = "worse", 1
            reason = f"{reason}; it could not be taken back: {error.message}"
        if self._sweep is not None:
            self._remember(found.reason)
        return self._end(state, reason, exit_code=exit_code)

    def _back(self) -> str | None:
        """The backup of what served before, or the generation that it was where that is gone."""
        ctx, backup = self._ctx, self._generation.replaced_backup
        if backup is None or ctx.files.read(ctx.paths.unit_dir / backup) is not None:
            return backup
        replaced = replaced_by(ctx, self._generation)
        return backup if replaced is None else str(replaced.number)

    def _remember(self, reason: str) -> None:
        ctx, sweep = self._ctx, self._sweep
        with reading(ctx) as store:
            found = find_sweep(store, sweep)
        profile = self._generation.profile
        if found.verdict is None or profile is None:
            return
        arm = arm_from_json(found.verdict.details["arm"])
        remember_failure(ctx, profile, arm, self._generation.engine_sha256, reason)
        record = read_tuned(ctx, profile)
        if record is not None and record.sweep == sweep:
            take_out_tuned(ctx, record, by_hand=False)
        decide(ctx, found.number, {"what": "taken back", "text": f"failed in service: {reason}"})

    def _end(self, state: str, reason: str, *, exit_code: int = 0) -> ActionResult:
        record = self._write(state, reason, 0.0)
        return ActionResult("probation run", record, (), exit_code)

    def _write(self, state: str, reason: str, left_s: float) -> dict[str, Any]:
        ctx = self._ctx
        speeds = windows(self._looks)
        record = {
            "generation": self._generation.number,
            "sweep": self._sweep,
            "state": state,
            "reason": reason,
            "began_s": self._began_s,
            "looked_s": ctx.clock.now_s(),
            "left_s": max(0.0, left_s),
            "basis": self._basis.to_json(),
            "looks": len(self._looks),
            "tok_s": speeds[-1] if speeds else None,
            "last": asdict(self._looks[-1]) if self._looks else None,
        }
        with contextlib.suppress(HostError):  # on a full disk it watches on
            ctx.files.make_folder(_folder(ctx))
            ctx.files.write_json(_folder(ctx) / f"{self._generation.number}.json", record)
        return record


def _is_edited(ctx: Context, entry: HistoryEntry) -> bool:
    """Whether the unit's file, or what is laid over it, is another than was deployed."""
    generation = entry.generation
    if sha256(standing_text(ctx)) != generation.unit_sha256:
        return True
    known = entry.ending.drop_ins
    now = drop_ins_in_force(ctx)
    return known is not None and now is not None and not set(now) <= set(known)


def _is_swapping(ctx: Context) -> bool:
    try:
        return read_record(ctx) is not None
    except HostError:
        return True


def is_stopped_by_hand(state: UnitState) -> bool:
    """Whether somebody stopped it or is doing so; `timeout` is how a stop ends that was not obeyed."""
    if state.active_state == "inactive":
        return state.result == "success"
    return state.active_state == "deactivating" or (
        state.active_state == "failed" and state.result == "timeout"
    )


def _cards_of(ctx: Context, pid: int) -> list[tuple[int, int]]:
    """Free VRAM and that of the process [MiB], of each card on which it is known to hold some."""
    found: list[tuple[int, int]] = []
    for gpu in ctx.gpu.read().gpus or ():
        own = sum(one.used_mib or 0 for one in gpu.processes or () if one.pid == pid)
        if own and gpu.free_mib is not None:
            found.append((gpu.free_mib, own))
    return found


def show_probation(ctx: Context) -> ActionResult:
    """Every probation that is known, newest first."""
    rows: list[Mapping[str, Any]] = []
    for number in ctx.generations.numbers():
        data = ctx.files.read_json(_folder(ctx) / f"{number}.json")
        if data is not None:
            active = ctx.services.state(probation_unit(number)).is_active
            state = data["state"] if data["state"] != "running" or active else "cut"
            rows.append({**data, "state": state})
    messages: Sequence[Message] = () if rows else (note("no-probation", "nothing was watched yet"),)
    return ActionResult("probation show", {"probations": rows}, tuple(messages))


def _folder(ctx: Context) -> Path:
    return ctx.paths.state_dir / "probation"
