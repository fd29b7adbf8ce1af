"""The time after a swap in which a worse server is taken back: a unit of its own watches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.lease_record import read_measurement
from tunerd.actions.live import address_now, read_live_unit
from tunerd.actions.own_unit import probation_unit
from tunerd.actions.probation_basis import basis_of
from tunerd.actions.rollback import rollback
from tunerd.actions.sweep_record import decide, find_sweep, reading
from tunerd.actions.tuned_layer import read_tuned, remember_failure, take_out_tuned
from tunerd.core.generation import Generation
from tunerd.core.health import HttpState
from tunerd.core.probation import Judgement, Look, Standing, comparable, judge, windows
from tunerd.core.request_log import read_requests
from tunerd.core.result import ActionResult, Message, note
from tunerd.core.sweep.sample import arm_from_json
from tunerd.errors import TunerdError, UsageError
from tunerd.system.host import process_facts

_ASK_S = 10.0
_LOG_LINES = 20_000
_EDITED = "somebody edited the unit"


def run_probation(
    ctx: Context, number: int, *, sweep: int | None, duration_s: float | None = None
) -> ActionResult:
    """Watch a generation until its time is over, it does worse, or something else serves.

    Returns:
        Exit code 3 where it was taken back.

    Raises:
        UsageError: it does not serve, or not as it was deployed.
        Stranded: it did worse, and so did what served before.
    """
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.number != number:
        raise UsageError(f"generation {number} does not serve", hint="`tunerd history`")
    if _is_edited(ctx, entry.generation):
        raise UsageError(_EDITED, hint="`tunerd verify` shows the difference")
    watch = _Watch(ctx, entry.generation, sweep)
    return watch.run(duration_s or ctx.settings.probation.duration_s)


class _Overtaken(Exception):
    """Something else serves than what is watched."""


class _Watch:
    """One probation."""

    def __init__(self, ctx: Context, generation: Generation, sweep: int | None) -> None:
        self._ctx = ctx
        self._generation = generation
        self._basis = basis_of(ctx, generation)
        self._sweep = sweep
        self._looks: list[Look] = []
        self._began_s = ctx.clock.now_s()
        self._life = self._look().life

    def run(self, duration_s: float) -> ActionResult:
        """Until there is an answer."""
        ctx = self._ctx
        end_s = ctx.clock.monotonic_s() + duration_s
        every_s = min(ctx.settings.probation.every_s, duration_s)
        was_measured = False
        while ctx.clock.monotonic_s() < end_s:
            ctx.clock.sleep(min(every_s, max(0.0, end_s - ctx.clock.monotonic_s())))
            if not self._still_serves():
                return self._end("ended", "something else was deployed")
            if _is_edited(ctx, self._generation):
                return self._end("ended", _EDITED)
            if read_measurement(ctx) is not None:
                self._looks.clear()  # production is away on purpose, and returns as another life
                self._life, was_measured = None, True
                continue
            if was_measured:
                self._basis, was_measured = basis_of(ctx, self._generation), False
            look = self._look()
            self._life = self._life or look.life
            if look.life != self._life and look.is_active and not look.n_restarts:
                self._life = look.life  # a person restarted it
                self._looks.clear()
            self._looks.append(look)
            found = judge(self._looks, self._basis, life=self._life)
            self._write("running", "", end_s - ctx.clock.monotonic_s())
            if found.standing is Standing.WORSE:
                return self._take_back(found)
        if self._looks and self._looks[-1].is_stopped:
            return self._end("ended", "somebody stopped it")
        if self._basis.slowest_tok_s is None:
            return self._end("passed", "it served; its speed was not judged, for none was measured")
        return self._end("passed", "nothing was worse than what was measured of it")

    def _demand_still(self, _target: object) -> None:
        """Asked under the lock: nobody has deployed anything else since the last look."""
        if not self._still_serves():
            raise _Overtaken

    def _still_serves(self) -> bool:
        entry = self._ctx.generations.serving(self._ctx.unit)
        return entry is not None and entry.generation.number == self._generation.number

    def _look(self) -> Look:
        ctx = self._ctx
        state = ctx.services.state(ctx.unit)
        address = address_now(ctx, read_live_unit(ctx), state) if state.is_active else None
        server = None if address is None else ctx.connect(address)
        is_ready = server is not None and server.health(timeout_s=_ASK_S) is HttpState.READY
        served = self._served(state.invocation_id) if is_ready else (None, None)
        facts = None if state.main_pid is None else process_facts(state.main_pid)
        free = [gpu.free_mib for gpu in ctx.gpu.read().gpus or ()]
        return Look(
            at_s=ctx.clock.now_s(),
            life=state.invocation_id or (None if state.main_pid is None else str(state.main_pid)),
            is_active=state.is_active,
            is_ready=is_ready,
            is_stopped=state.active_state == "inactive" and state.result == "success",
            n_restarts=state.n_restarts,
            n_predicted=served[0],
            predicted_s=served[1],
            rss_mib=None if facts is None else facts.rss_mib,
            vram_free_mib=min((mib for mib in free if mib is not None), default=None),
        )

    def _served(self, invocation: str | None) -> tuple[int | None, float | None]:
        """Tokens and seconds of the comparable requests that this life has answered, by its log."""
        try:
            lines = self._ctx.services.log(
                self._ctx.unit, invocation_id=invocation, max_lines=_LOG_LINES
            )
        except TunerdError:
            return None, None
        return comparable(read_requests(lines).requests, self._basis)

    def _take_back(self, found: Judgement) -> ActionResult:
        """Back to what served before; the arm is remembered where a sweep proved it."""
        ctx, generation = self._ctx, self._generation
        ctx.say(f"generation {generation.number} is taken back: {found.reason}")
        self._write("worse", found.reason, 0.0)
        try:
            rollback(
                ctx, to=generation.replaced_backup, drain=True, confirm=self._demand_still,
                reason="guard",
            )  # fmt: skip
        except _Overtaken:
            return self._end("ended", "something else was deployed")
        if self._sweep is not None:
            self._remember(found.reason)
        return self._end("taken back", found.reason, exit_code=3)

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
        ctx.files.make_folder(_folder(ctx))
        ctx.files.write_json(_folder(ctx) / f"{self._generation.number}.json", record)
        return record


def _is_edited(ctx: Context, generation: Generation) -> bool:
    argv = read_live_unit(ctx).argv
    return argv is None or tuple(argv) != tuple(generation.argv)


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
