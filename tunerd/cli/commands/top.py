"""`tunerd top`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.output import columns, finish, harmless_lines, json_option
from tunerd.core.quantity import format_duration, format_mib

if TYPE_CHECKING:
    from tunerd.core.result import ActionResult

_EVERY_S = 5.0


@click.command(name="top", short_help="Server, GPU and host as they are, again and again.")
@click.option("--once", is_flag=True, help="One look, then the end.")
@click.option("--every", "every_s", type=click.FloatRange(1, 3600), default=_EVERY_S,
              show_default=True, help="Seconds between two looks.")  # fmt: skip
@json_option
@click.pass_obj
def command(mode: str | None, once: bool, every_s: float, as_json: bool) -> None:
    """Health, speed, acceptance, VRAM, power and memory now. Ctrl-C ends it; --json is one look.

    \b
    Example:
      tunerd top
      tunerd top --once --json | jq .speeds
    """  # noqa: D301
    import sys
    from functools import partial

    from tunerd.actions.context import build_context
    from tunerd.actions.top import Top
    from tunerd.cli.remote import remote_for

    remote = remote_for(mode, as_json=as_json)
    look = Top(build_context(mode=mode)).look if remote is None else partial(remote.read, "top")
    if once or as_json or not sys.stdout.isatty():
        finish(look(), render, as_json=as_json)
        return
    _follow(look, every_s)


def _follow(look: Callable[[], ActionResult], every_s: float) -> None:
    """Draw again and again, until Ctrl-C."""
    import threading

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text("\n".join(harmless_lines(look().payload, render)))

    pause = threading.Event()
    console = Console(highlight=False)
    try:
        with Live(drawn(), console=console, auto_refresh=False, screen=True) as live:
            while not pause.wait(every_s):
                live.update(drawn(), refresh=True)
    except KeyboardInterrupt:
        return


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield from columns([*_server(payload), *_cards(payload), *_host(payload["host"])])


def _server(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    engine = payload["engine"]
    up = (
        f", for {format_duration(payload['at_s'] - engine['since_s'])}" if engine["since_s"] else ""
    )
    yield "unit", f"{engine['unit']}: {engine['active_state']} ({engine['sub_state']}){up}"
    if payload["measuring"]:
        yield "measures", payload["measuring"]
    is_up = engine["active_state"] == "active"
    yield "health", engine["health"] or ("unknown" if is_up else "not running")
    slots = "unknown"
    if engine["slots_total"] is not None:
        slots = f"{engine['slots_busy']} of {engine['slots_total']} at work"
    yield "slots", slots
    speeds = payload["speeds"]
    if speeds is None:
        yield (
            "speed",
            "unknown: nothing was generated yet, or the server counts nothing (--metrics)",
        )
        return
    yield (
        "speed",
        f"{_tok_s(speeds['decode_tok_s'])}, prompts {_tok_s(speeds['prompt_tok_s'])} ({speeds['since']})",
    )
    yield "drafts", f"{_percent(speeds['acceptance_ratio'])} accepted"
    yield "reused", f"{_percent(speeds['reused_ratio'])} of the prompt tokens"


def _cards(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if payload["gpus"] is None:
        yield "GPU", f"unknown: {payload['gpu_problem']}"
        return
    for gpu in payload["gpus"]:
        name = f"GPU {gpu['index']}"
        held = f"server {format_mib(gpu['server_mib'])}, others {format_mib(gpu['others_mib'])}"
        split = ", split by MIG" if gpu["is_mig"] else ""
        yield name, f"{gpu['name']}{split}: {_or_unknown(gpu['utilisation_percent'], '%')} busy"
        yield (
            "  VRAM",
            (
                f"{format_mib(gpu['used_mib'])} of {format_mib(gpu['total_mib'])} used, "
                f"{format_mib(gpu['free_mib'])} free; {held}"
            ),
        )
        watts = f"{_or_unknown(gpu['power_w'], 'W')} of {_or_unknown(gpu['power_limit_w'], 'W')}"
        clocks = f"{_or_unknown(gpu['sm_clock_mhz'], 'MHz')}, memory {_or_unknown(gpu['memory_clock_mhz'], 'MHz')}"
        yield "  power", f"{watts}, {_or_unknown(gpu['temperature_c'], '°C')}, {clocks}"
        if gpu["throttle_reasons"]:
            yield "  held", f"clocks are held down by {', '.join(gpu['throttle_reasons'])}"


def _host(host: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    swap = ""
    if host["swap_total_mib"]:
        swap = f", swap {format_mib(host['swap_used_mib'])} used"
    yield (
        "RAM",
        f"{format_mib(host['available_mib'])} of {format_mib(host['total_mib'])} available{swap}",
    )
    if host["cpu_percent"] is not None:
        yield "CPU", f"{host['cpu_percent']:.0f} % of all cores"


def _tok_s(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} tok/s"


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * ratio:.0f} %"


def _or_unknown(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}"
