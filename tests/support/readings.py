"""Readings of a healthy box, to be changed where a test looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.fake_gpu import DRIVER_VERSION, rtx_4070_super
from tunerd.app import Context
from tunerd.engine.health import HttpState
from tunerd.watch.figures import EngineNow, Event, HostNow, Reading, Served, gpu_now
from tunerd.watch.history import HistoryKeeper
from tunerd.words import MiB


def an_engine(**changed: Any) -> EngineNow:
    """A server that serves and rests."""
    usual = EngineNow(
        unit="llama-server.service",
        active_state="active",
        sub_state="running",
        result="success",
        n_restarts=0,
        life="life-1",
        since_s=1_790_000_000.0,
        pid=4242,
        health=HttpState.READY,
        slots_total=1,
        slots_busy=0,
        counters=None,
        served=None,
        rss_mib=900,
        cpu_s=10.0,
    )
    return replace(usual, **changed)


def served(
    n_predicted: int = 600,
    tok_s: float = 50.0,
    *,
    n_drafted: int | None = None,
    n_accepted: int | None = None,
    seconds: float = 30.0,
) -> Served:
    """Work that was done between two looks."""
    return Served(seconds, 100, 0.1, 0, n_predicted, n_predicted / tok_s, n_drafted, n_accepted)


def a_reading(
    at_s: float = 1_790_000_000.0, *, measuring: str | None = None, **engine: Any
) -> Reading:
    """A look at one card and a server."""
    return Reading(
        at_s=at_s,
        gpus=(gpu_now(rtx_4070_super(used_mib=8000), [4242]),),
        gpu_problem=None,
        driver_version=DRIVER_VERSION,
        host=HostNow(MiB(32000), MiB(24000), MiB(0), MiB(0), None, None, cpu_percent=3.0),
        engine=an_engine(**engine),
        measuring=measuring,
    )


def watched_hours(ctx: Context) -> None:
    """The history of ten hours, with pauses, until now."""
    told: list[Event] = []
    keeper = HistoryKeeper(ctx, told.append)
    now_s = ctx.clock.now_s()
    for minute in range(600, 0, -10):
        work = served(600, 48.0 + minute % 7, n_drafted=900, n_accepted=600 + minute % 50)
        keeper.add(a_reading(now_s - 60 * minute, served=work if minute % 60 else None))
    keeper.close()
