"""Another power limit for a GPU while something is measured, given back whatever ends that.

A unit within the lease sets it when it starts and gives it back when it stops, by this module as a program:
`python -m tunerd.production.power set|restore FILE`. What the limit was stands in FILE before it is changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunerd.app import Context
from tunerd.errors import HostError, ServiceError, TunerdError
from tunerd.machine.files import Files
from tunerd.machine.gpu import LIMIT_OF, SAME_W, set_power_limit
from tunerd.production.own import own_environment
from tunerd.units.manager import UP, lease_unit, power_unit
from tunerd.units.text import exec_words, transient_text

_MODE = 0o644
_TIMEOUT_S = 30
_RESTORE_UNIT = "tunerd-power-restore.service"


@dataclass(frozen=True, slots=True)
class PowerRecord:
    """The limit that a GPU had, and the one that it is given within a lease [W]."""

    lease: str
    uuid: str
    before_w: float
    given_w: float


@contextlib.contextmanager
def power_limit(ctx: Context, lease: str, production: str, watts: float) -> Iterator[None]:
    """Let the only GPU draw so much [W] for the body, within a lease.

    Raises:
        HostError: the card's limit cannot be told, or a file cannot be written; or somebody set another one meanwhile.
        ServiceError: the limit was not set, or not given back; what it was is on record then.
    """
    gpus = ctx.gpu.read().gpus or ()
    if len(gpus) != 1 or gpus[0].uuid is None or gpus[0].power_limit_w is None:
        raise HostError("the GPU's power limit cannot be read", state="it was not changed")
    before_w = gpus[0].power_limit_w
    if ctx.paths.power.exists():  # of which `before_w` would be the wrong one
        raise HostError("an earlier power limit was not restored", hint="`tunerd recover`")
    record = PowerRecord(lease, gpus[0].uuid, before_w, watts)
    unit = power_unit(lease)
    folder = ctx.services.runtime_unit_dir
    ctx.files.make_folder(folder)
    ctx.files.write(folder / unit, _unit_text(ctx, lease, production).encode(), mode=_MODE)
    ctx.services.reload()
    ctx.files.keep(ctx.paths.power, record)
    try:
        try:
            ctx.services.start_bound(unit, timeout_s=_TIMEOUT_S)
        except ServiceError as failed:  # which knows no more than that a process ended
            said = (line for line in ctx.services.log(unit) if line.startswith(LIMIT_OF))
            failed.cause = next(said, failed.cause)
            raise
        yield
        _demand_it_held(ctx, watts)
    finally:
        ctx.services.stop(unit, timeout_s=2 * _TIMEOUT_S)
        ctx.files.remove(folder / unit)
        ctx.services.reload()
        ctx.services.reset_failed(unit)
        if ctx.paths.power.exists():
            if [gpu.power_limit_w for gpu in ctx.gpu.read().gpus or ()] != [before_w]:
                raise _not_given_back(record)
            ctx.files.remove(ctx.paths.power)  # it was never started


def _demand_it_held(ctx: Context, watts: float) -> None:
    """What was measured by a limit that somebody changed meanwhile is told of none."""
    for gpu in ctx.gpu.read().gpus or ():
        now_w = gpu.power_limit_w
        if now_w is not None and abs(now_w - watts) >= SAME_W:
            raise HostError(
                f"somebody set the power limit to {now_w:g} W while {watts:g} W was measured",
                state="the limit is left as they set it",
            )


def give_back_power(ctx: Context) -> bool:
    """Give back a limit whose lease is gone, where its unit could not; whether there was one.

    Raises:
        ServiceError: it cannot be given back; the record stays.
    """
    if not ctx.paths.power.exists():
        return False
    record = ctx.files.recall(PowerRecord, ctx.paths.power)
    if record is None:  # nobody but tunerd writes there, and it writes whole files
        ctx.files.remove(ctx.paths.power)
        return False
    if ctx.services.state(lease_unit(record.lease)).active_state in UP:
        return False
    ctx.services.reset_failed(_RESTORE_UNIT)
    with contextlib.suppress(ServiceError):
        ctx.services.run_transient(
            _RESTORE_UNIT, _program(ctx, "restore"),
            [("Description", "tunerd restores a power limit"), *_SERVICE],
            environment=own_environment(ctx),
        )  # fmt: skip
    if ctx.paths.power.exists():
        raise _not_given_back(record)
    return True


def _not_given_back(record: PowerRecord) -> ServiceError:
    return ServiceError(
        f"the GPU's power limit of {record.before_w:g} W was not restored",
        cause=f"the driver refused; it was set to {record.given_w:g} W for a measurement",
        state="the original limit is on record",
        hint=f"`nvidia-smi -i {record.uuid} -pl {record.before_w:g}`, then `tunerd recover`",
    )


# It opens /dev/nvidia*, and the driver takes a limit from who may administer the machine alone.
_SERVICE = (
    ("Type", "oneshot"),
    ("TimeoutStartSec", str(_TIMEOUT_S)),
    ("TimeoutStopSec", str(_TIMEOUT_S)),
    ("NoNewPrivileges", "yes"),
    ("ProtectHome", "read-only"),
    ("RestrictAddressFamilies", "AF_UNIX"),
    ("IPAddressDeny", "any"),
)


def _unit_text(ctx: Context, lease: str, production: str) -> str:
    """What ends it runs its ExecStopPost= as well: the lease's end, a failure, a kill."""
    properties = [
        ("Description", "tunerd measures with another power limit"),
        ("BindsTo", lease_unit(lease)),
        # Ordered after production too, so that the limit is given back before production starts.
        ("After", f"{lease_unit(lease)} {production}"),
        *_SERVICE,
        ("RemainAfterExit", "yes"),
        ("ExecStopPost", " ".join(exec_words(_program(ctx, "restore")))),
    ]
    return transient_text(_program(ctx, "set"), properties, own_environment(ctx))


def _program(ctx: Context, verb: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tunerd.production.power", verb, str(ctx.paths.power)]


def main(verb: str, path: Path) -> None:
    """Set the limit of a record, or give the one before back and remove the record.

    A limit that is neither was set by somebody since, and is left alone.

    Raises:
        HostError: the driver refuses, or the record cannot be removed.
    """
    record = Files().recall(PowerRecord, path)
    if record is None:
        return  # another has given it back
    if verb == "set":
        set_power_limit(record.uuid, record.given_w)
        return
    set_power_limit(record.uuid, record.before_w, in_place_of=record.given_w)
    Files().remove(path)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except TunerdError as error:
        sys.exit(error.words)
