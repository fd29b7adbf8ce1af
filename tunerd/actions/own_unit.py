"""tunerd's own commands as units: a sweep, a probation. They outlive the terminal and the daemon."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.actions.context import Context
from tunerd.core.host import Mode
from tunerd.core.unit_file import exec_words, plain_value, quote_environment

SWEEP_UNIT = "tunerd-sweep.service"
_MODE = 0o644
# A stop waits until production serves again, which includes the load of its model.
_STOP_S = 1800
_KEPT = ("HOME", "PATH", "PYTHONPATH", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
         "TUNERD_")  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnUnit:
    """A command of tunerd as a unit that nothing restarts and a reboot forgets."""

    name: str
    what: str
    words: Sequence[str]


def probation_unit(generation: int) -> str:
    """The name of the unit that watches a generation after its swap."""
    return f"tunerd-probation-{generation}.service"


def start_own_unit(ctx: Context, unit: OwnUnit) -> None:
    """Write its file and start it.

    Raises:
        ServiceError: it does not start.
        HostError: its file cannot be written.
    """
    folder = ctx.services.runtime_unit_dir
    ctx.files.make_folder(folder)
    ctx.files.write(folder / unit.name, _text(ctx, unit).encode(), mode=_MODE)
    ctx.services.reload()
    ctx.services.reset_failed(unit.name)
    ctx.services.start(unit.name)


def _text(ctx: Context, unit: OwnUnit) -> str:
    argv = [sys.executable, "-m", "tunerd", f"--{ctx.mode}", *unit.words]
    environment = [
        f"Environment={quote_environment(name, value)}"
        for name, value in sorted(ctx.environment.items())
        if name.startswith(_KEPT) and name != "TUNERD_LOG_LEVEL"
    ]
    folder = plain_value(str(ctx.paths.state_dir))
    lines = [
        f"# Written by tunerd: {unit.what}",
        "[Unit]",
        f"Description=tunerd: {unit.what}",
        "[Service]",
        "Type=exec",
        *environment,
        f"WorkingDirectory={folder}",
        f"ExecStart={' '.join(exec_words(argv))}",
        "Restart=no",
        f"TimeoutStopSec={_STOP_S}",
        "KillMode=mixed",
    ]
    if ctx.mode is not Mode.LOCAL:
        lines.append("SuccessExitStatus=0 143")
    return "\n".join(lines) + "\n"
