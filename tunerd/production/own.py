"""tunerd's own commands as units: a job, a probation, a notice. They outlive the terminal and the daemon."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.app import Context
from tunerd.errors import HostError
from tunerd.machine.process import own_command
from tunerd.units.text import parse_unit
from tunerd.words import Mode

# Shipped texts: what most of its commands may do, and what one that leaves this machine may.
JOB = "tunerd-job"
NOTIFY = "tunerd-notify"
# What is said of each unit here; all else is said by the shipped one that it is like.
_OWN = {"Description", "ExecStart"}
_KEPT = ("HOME", "PATH", "PYTHONPATH", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
         "TUNERD_", "PGPASSFILE", "PGSERVICE", "PGSSL")  # fmt: skip


def probation_unit(generation: int) -> str:
    """The name of the unit that takes a generation back."""
    return f"tunerd-probation-{generation}.service"


def start_own_unit(
    ctx: Context,
    unit: str,
    what: str,
    words: Sequence[str],
    *,
    like: str = JOB,
    is_told: bool = False,
) -> None:
    """Start a command of tunerd as a unit that is gone when it has ended.

    Args:
        ctx: Where.
        unit: Its name.
        what: What it does, for people.
        words: The command.
        like: The shipped unit whose confinement, limits and restarts it has: a notice is tried again.
        is_told: Whether something else tells how it ended; else the manager remembers a failure until somebody
            resets it.

    Raises:
        ServiceError: it does not start.
        HostError: a shipped unit cannot be read.
    """
    is_system = ctx.mode is Mode.SYSTEM
    shipped = shipped_unit(ctx, f"{like}.service" if is_system else f"{like}-user.service.in")
    properties = [("Description", f"tunerd: {what}")]
    if is_told:
        properties.append(("CollectMode", "inactive-or-failed"))
    if is_system:  # in the shipped text are the usual ones
        folders = (ctx.paths.state_dir, ctx.paths.runtime_dir)
        properties += [("ReadWritePaths", f'"-{folder}"') for folder in folders]
    of_like = parse_unit(shipped).directives
    properties += [(one.name, one.value) for one in of_like if one.name not in _OWN]
    ctx.services.reset_failed(unit)
    argv = own_command(ctx.mode, *words)
    ctx.services.run_transient(unit, argv, properties, environment=own_environment(ctx))


def own_environment(ctx: Context) -> dict[str, str]:
    """What tunerd's own programs need of this process's environment."""
    return {
        name: value
        for name, value in sorted(ctx.environment.items())
        if name.startswith(_KEPT) and name != "TUNERD_LOG_LEVEL"
    }


def shipped_unit(ctx: Context, name: str) -> str:
    """The text of a unit, or one with its fields open, from this installation.

    Raises:
        HostError: it cannot be read.
    """
    path = ctx.data_dir / "units" / name
    content = ctx.files.read(path)
    if content is None:
        raise HostError(
            f"a unit of this installation is missing: `{path}`", hint="install tunerd again"
        )
    return content.decode()
