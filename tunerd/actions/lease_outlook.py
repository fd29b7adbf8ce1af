"""What a measurement will cost: how long production is away, to be said before anybody is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.lease import demand_return_at_boot
from tunerd.actions.live import read_live_unit
from tunerd.actions.port_wait import (
    address_of_production,
    is_one_program,
    program_of_production,
)
from tunerd.core.generation import Outcome
from tunerd.core.lease import PORT_LIMIT_S
from tunerd.core.local_service import read_service
from tunerd.core.quantity import format_duration
from tunerd.core.restart_window import LEAST_WINDOW_S, restart_window_s
from tunerd.core.unit_file import parse_unit
from tunerd.errors import TunerdError

_DROP_IN = """\
[Unit]
StartLimitIntervalSec=900
StartLimitBurst=16
[Service]
Restart=on-failure
RestartSec=5"""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected time without service [s].

    `load_s` is how long production was away at its last swap, nearly all of it loading; None where
    that is not known. `without_service_s` is None where it does not serve now either, or where the
    load is not known. `port_wait_s` is how much longer it may take where its port must first be free
    again, 0 where that cannot be. `risk` is what could keep it from coming back should this command be
    killed in the middle, None for nothing; `text` tells both too.
    """

    unit: str
    is_there: bool
    runs: bool
    runs_afterwards: bool
    measuring_s: float
    load_s: float | None
    without_service_s: float | None
    text: str
    port_wait_s: float = 0.0
    risk: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def outlook(
    ctx: Context,
    *,
    measuring_s: float,
    start_after: bool = False,
    programs: Sequence[Path] = (),
) -> Outlook:
    """What holding production's place for so long will cost.

    Args:
        ctx: Where.
        measuring_s: How long the measurement is expected to take, the candidates' loads included.
        start_after: Whether production is started afterwards even if it does not run now.
        programs: What the candidates run.

    Raises:
        DeployError: production does not start at boot, so nothing may be measured in its place.
    """
    state = ctx.services.state(ctx.unit)
    demand_return_at_boot(ctx, state)
    runs = state.is_active or state.active_state == "activating"
    load_s = _last_load_s(ctx)
    known = runs and load_s is not None
    text = _text(ctx.unit, state.exists, runs, start_after, measuring_s, load_s)
    ahead = Outlook(
        unit=ctx.unit,
        is_there=state.exists,
        runs=runs,
        runs_afterwards=state.exists and (runs or start_after),
        measuring_s=measuring_s,
        load_s=load_s,
        without_service_s=measuring_s + (load_s or 0.0) if known else None,
        text=text,
    )
    return beside_others(ctx, ahead, programs)


def beside_others(ctx: Context, ahead: Outlook, programs: Sequence[Path]) -> Outlook:
    """The outlook where these programs are measured: others than production's leave its port taken."""
    own = program_of_production(ctx)
    is_one = own is None or all(is_one_program(one, own) for one in programs)
    if is_one or not ahead.runs_afterwards:
        return ahead
    wait = (
        f"where clients of another build leave its port taken, {ctx.unit} starts once it is free again, "
        f"up to {PORT_LIMIT_S:.0f} s later"
    )
    risk = return_risk(ctx, programs)
    text = f"{ahead.text}; {risk or wait}"
    return replace(ahead, text=text, risk=risk, port_wait_s=PORT_LIMIT_S)


def return_risk(ctx: Context, programs: Sequence[Path]) -> str | None:
    """Whether production would give up before its port is free, where nobody is left to wait for it.

    The lease waits for a port that it knows. Where neither the unit's text nor the running server
    tells it, only the unit's own restarts do, which may be too few; None also where its file cannot be
    read.
    """
    own = program_of_production(ctx)
    if own is None or all(is_one_program(one, own) for one in programs):
        return None
    if address_of_production(ctx, ctx.services.state(ctx.unit)) is not None:
        return None
    try:
        live = read_live_unit(ctx)
        merged = parse_unit(live.text or "")
        for path in live.drop_ins:
            content = ctx.files.read(path) or b""
            merged = merged.with_drop_in(parse_unit(content.decode("utf-8", "replace")))
        window_s = restart_window_s(read_service(ctx.unit, merged))
    except TunerdError:
        return None
    if window_s >= LEAST_WINDOW_S:
        return None
    folder = ctx.paths.unit_dir / f"{ctx.unit}.d"
    words = _DROP_IN.replace("\n", " ")
    return (
        f"should this command be killed in the middle, {ctx.unit} may stay down: its port, which its "
        f"file does not name, can be taken for {LEAST_WINDOW_S:.0f} s after a candidate of another build, "
        f"and it is started again for {format_duration(window_s)} only; `--port` in its command line, or "
        f"{folder / 'restarts.conf'} with `{words}`, mends that"
    )


def _last_load_s(ctx: Context) -> float | None:
    for entry in ctx.generations.entries():
        if entry.generation.unit == ctx.unit and entry.ending.outcome is Outcome.SERVING:
            return entry.ending.without_service_s
    return None


def _text(
    unit: str,
    is_there: bool,
    runs: bool,
    start_after: bool,
    measuring_s: float,
    load_s: float | None,
) -> str:
    if not is_there:
        return f"there is no {unit}: nothing is interrupted"
    if not runs and start_after:
        return f"{unit} does not run now; it is started after {format_duration(measuring_s)}"
    if not runs:
        return f"{unit} does not run now, and stays stopped (--start-after starts it afterwards)"
    if load_s is None:
        return (
            f"{unit} will not serve for about {format_duration(measuring_s)} of measuring, and then "
            "until it is loaded again; how long that takes is not known yet"
        )
    return (
        f"{unit} will not serve for about {format_duration(measuring_s + load_s)}: "
        f"{format_duration(measuring_s)} of measuring, then {format_duration(load_s)} until it "
        "answers again, as at its last swap"
    )
