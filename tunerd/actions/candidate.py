"""Starts what a plan would deploy as a unit of its own, for as long as a lease lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tunerd.actions.context import Context
from tunerd.actions.lease_record import remove_unit_files
from tunerd.actions.live import read_live_unit, specifiers_of
from tunerd.actions.memory_evidence import remember_load
from tunerd.actions.plan import Plan
from tunerd.actions.plan_expect import address_of_plan, expectation_of_plan
from tunerd.actions.plan_unit import service_user, unit_spec, unit_template
from tunerd.actions.serve_check import (
    NotServing,
    Serving,
    wait_until_serving,
    why_it_ended,
)
from tunerd.core.failure import FailureKind
from tunerd.core.fingerprint_arguments import arguments_sha256
from tunerd.core.host import Mode
from tunerd.core.lease import Fault, LeaseSpec, Reason, candidate_unit, fault_of, is_candidate
from tunerd.core.result import Level
from tunerd.core.unit import render_unit
from tunerd.core.unit_environment import environment_of
from tunerd.core.unit_file import parse_unit
from tunerd.errors import JobCanceled, ServiceError, TunerdError
from tunerd.system.llama import Address
from tunerd.system.unit_log_file import prune_logs

_MODE = 0o644
_LINES = 2000
_STOP_TIMEOUT_S = 3
# Sorts after what people write; what it says must win over drop-ins of production.
_OWN_DROP_IN = "zzz-tunerd-candidate.conf"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server under trial: it answered a real request, or has a `fault`.

    `argv_sha256` is the hash of the arguments and of those `environment` variables that count, by
    which what was measured and what is deployed are known to be the same. `boot_s` is from its start to that first answer; `lines` is what the
    engine wrote until then; `vram_free_mib` what its GPUs have left after the load, the least of
    them, None without a GPU or a reading.
    """

    unit: str
    plan: Plan
    argv_sha256: str
    environment: Mapping[str, str]
    address: Address
    boot_s: float | None
    serving: Serving | None
    fault: Fault | None
    lines: tuple[str, ...]
    vram_free_mib: int | None

    @property
    def ok(self) -> bool:
        """Whether it serves."""
        return self.fault is None

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return self.address.url

    def look(self, ctx: Context) -> Fault | None:
        """Why it ended since; None while the process that answered first still runs."""
        if self.serving is None:
            return self.fault
        state = ctx.services.state(self.unit)
        if state.is_active and state.main_pid == self.serving.pid:
            return None
        return fault_of(why_it_ended(ctx, self.unit).failure)


def start_candidate(
    ctx: Context, plan: Plan, lease: LeaseSpec, number: int, *, limit_s: float
) -> Candidate:
    """Write its unit, start it, and wait until it has answered a real request or will not.

    Raises:
        HostError: the unit file cannot be written.
        ServiceError: the service manager refused, for instance because the lease is gone.
    """
    unit = candidate_unit(lease.id, number)
    address = address_of_plan(ctx, plan)
    if plan.is_refused:
        return _judged(ctx, unit, plan, address, fault=_refusal(plan))
    ctx.say(f"starting candidate {number}")
    _write_unit(ctx, plan, lease, unit, limit_s)
    began_s = ctx.clock.monotonic_s()
    found = _refused_start(ctx, unit) or wait_until_serving(
        ctx,
        unit,
        address=address,
        expected=expectation_of_plan(plan),
        model_bytes=plan.facts.file_bytes,
    )
    if isinstance(found, NotServing):
        return _judged(ctx, unit, plan, address, fault=fault_of(found.failure))
    boot_s = found.answered_at_s - began_s
    candidate = _judged(ctx, unit, plan, address, serving=found, boot_s=boot_s)
    calculated = plan.memory.calculated or plan.memory.estimate
    remember_load(ctx, plan.command.argv, plan.unit_text, calculated, candidate.lines)
    return candidate


def stop_candidate(ctx: Context, lease: LeaseSpec, number: int) -> None:
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
        lambda: remove_unit_files(ctx, unit),
        ctx.services.reload,
        lambda: ctx.services.reset_failed(unit),
    )
    for step in steps:
        with contextlib.suppress(TunerdError):
            step()
    if ctx.mode is Mode.LOCAL:  # elsewhere the journal has limits of its own
        prune_logs(ctx.paths, is_candidate)


def candidate_text(ctx: Context, plan: Plan, lease: LeaseSpec, unit: str, limit_s: float) -> str:
    """The unit's text: production's, but for its name and what ties it to the lease."""
    user = service_user(ctx, plan.live)
    spec = unit_spec(ctx, plan.resolved, plan.engine, plan.command, user)
    own = [("RuntimeMaxSec", f"{max(1.0, limit_s):.0f}")] if ctx.mode is not Mode.LOCAL else []
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
    return render_unit(unit_template(ctx), spec)


def _write_unit(ctx: Context, plan: Plan, lease: LeaseSpec, unit: str, limit_s: float) -> None:
    folder = ctx.services.runtime_unit_dir
    ctx.files.make_folder(folder)
    _copy_drop_ins(ctx, lease, unit)
    text = candidate_text(ctx, plan, lease, unit, limit_s)
    ctx.files.write(folder / unit, text.encode("utf-8", "surrogateescape"), mode=_MODE)
    ctx.services.reload()


def _copy_drop_ins(ctx: Context, lease: LeaseSpec, unit: str) -> None:
    """Production's drop-ins hold for what is measured too, as they will when it is deployed."""
    drop_ins = read_live_unit(ctx).drop_ins
    if not drop_ins:
        return
    folder = ctx.services.runtime_unit_dir / f"{unit}.d"
    ctx.files.make_folder(folder)
    for path in drop_ins:
        content = ctx.files.read(path)
        if content is not None:
            ctx.files.write(folder / path.name, content, mode=_MODE)
    own = f"[Unit]\nBindsTo={lease.unit}\n[Service]\nRestart=no\n"
    ctx.files.write(folder / _OWN_DROP_IN, own.encode(), mode=_MODE)


def _refused_start(ctx: Context, unit: str) -> NotServing | None:
    """Start it; why it did not even start, where that is for its own reasons."""
    try:
        ctx.services.start_bound(unit)
    except JobCanceled:
        raise
    except ServiceError:
        if not ctx.services.state(unit).has_failed:
            raise
        return why_it_ended(ctx, unit)
    return None


def _refusal(plan: Plan) -> Fault:
    errors = [message for message in plan.messages if message.level is Level.ERROR]
    words = "; ".join(message.text for message in errors)
    hint = next((message.hint for message in errors if message.hint), None)
    return Fault(Reason.REFUSED, FailureKind.BAD_ARGUMENT, words, hint)


def _judged(
    ctx: Context,
    unit: str,
    plan: Plan,
    address: Address,
    *,
    serving: Serving | None = None,
    boot_s: float | None = None,
    fault: Fault | None = None,
) -> Candidate:
    lines = ctx.services.log(unit, max_lines=_LINES) if not plan.is_refused else ()
    # By production's own text and name: a candidate's differs in neither.
    text = parse_unit(plan.unit_text)
    environment = dict(environment_of(text, specifiers_of(ctx, ctx.unit)).pairs)
    return Candidate(
        unit=unit,
        plan=plan,
        argv_sha256=arguments_sha256(plan.command.argv, environment) or "",
        environment=environment,
        address=address,
        boot_s=boot_s,
        serving=serving,
        fault=fault,
        lines=lines,
        vram_free_mib=_vram_free(ctx) if serving is not None and plan.has_gpu else None,
    )


def _vram_free(ctx: Context) -> int | None:
    free = [gpu.free_mib for gpu in ctx.gpu.read().gpus or ()]
    known = [mib for mib in free if mib is not None]
    return min(known, default=None)
