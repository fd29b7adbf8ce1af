"""Whether a server that runs could be started again as it is: builds, models and drivers are replaced under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.builds import engine_of, files_of, found_in_unit
from tunerd.engine.probe import way_to
from tunerd.engine.serving import read_live_unit
from tunerd.errors import DeployError
from tunerd.machine.clock import process_began_s
from tunerd.machine.files import is_gone, real_path, stamp_of
from tunerd.machine.proc import may_use_nvidia, process_stat
from tunerd.units.generations import Generation, model_stamps
from tunerd.units.live import LiveUnit
from tunerd.units.manager import UnitState

ENGINE = "engine"


def replaced_under(ctx: Context, state: UnitState) -> dict[str, str]:
    """What of a unit's running server was replaced after it started.

    Nobody has seen the next start serve then, and what is measured is not what stands there. What was only
    touched, and is what was deployed, is no other file.

    Returns:
        The first such file in words, by `ENGINE`, the profile key that names it, or its path; empty where there is none.
    """
    stat = None if state.main_pid is None else process_stat(state.main_pid)
    if stat is None:
        return {}
    began_s = process_began_s(stat.start_ticks)
    found: dict[str, str] = {}
    live = read_live_unit(ctx, state.unit)
    for what, path in _unlike_deployed(ctx, live, ctx.deployed()):
        if is_gone(path) and live.has_own_files:
            continue
        if is_gone(path):
            found.setdefault(what, f"`{path}` is gone")
        elif _changed_after(path, began_s, ctx.clock.now_s()):
            found.setdefault(what, f"`{path}` was replaced after the server started")
    return found


def demand_card(ctx: Context, state: UnitState) -> None:
    """A server that is stopped can be started again: not where the driver was updated under it.

    Raises:
        DeployError: it cannot, before the machine is rebooted.
    """
    why = ctx.gpu.read().awaits_reboot if state.is_active and state.main_pid is not None else None
    if why is not None and may_use_nvidia(state.main_pid or 0):
        raise DeployError(
            f"{ctx.unit} would not come back, so it is not stopped: the driver was updated under it",
            cause=f"{why}; no program that starts now finds the card",
            state="nothing was touched; what runs goes on with the driver that it has loaded",
            hint="reboot, and then this again",
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
