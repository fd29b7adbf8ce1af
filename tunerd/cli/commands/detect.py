"""`tunerd detect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import columns, finish, json_option
from tunerd.core.quantity import format_mib


@click.command(name="detect", short_help="What is here.")
@json_option
@click.pass_obj
def command(mode: str | None, as_json: bool) -> None:
    """What is here: GPUs, processor, memory, limits, service manager, engines, units.

    What could not be told prints as `unknown`.

    \b
    Example:
      tunerd detect
      tunerd detect --json | jq '.gpus[0].free_mib'
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.detect import detect
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "detect", as_json=as_json)
    finish(found or detect(build_context(mode=mode)), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield from _gpus(payload)
    cpu, memory = payload["cpu"], payload["memory"]
    cores = (
        f"{_shown(cpu['physical_cores'])} physical cores, {_shown(cpu['logical_cores'])} logical"
    )
    simd = " ".join(cpu["simd"]) if cpu["simd"] is not None else "unknown"
    locked = "unlimited" if memory["memlock_unlimited"] else format_mib(memory["memlock_mib"])
    rows = [
        ("processor", f"{_shown(cpu['model'])}, {cores}"),
        ("SIMD", simd),
        ("RAM", f"{format_mib(memory['available_mib'])} free of {format_mib(memory['total_mib'])}"),
        ("swap", (f"{format_mib(memory['swap_used_mib'])} used of "
                 f"{format_mib(memory['swap_total_mib'])}")),
        ("memory lock limit", locked),
        ("service manager", _manager(payload)),
        ("kernel", _shown(payload["kernel"])),
    ]  # fmt: skip
    yield from columns(rows)
    yield ""
    yield "engines"
    yield from _engines(payload["engines"])
    yield ""
    yield "units that run a llama-server"
    units = [
        (f"  {unit['unit']}", unit["active"], _shown(unit["alias"]), _shown(unit["port"]),
         "by tunerd" if unit["written_by_tunerd"] else "by hand")
        for unit in payload["units"]
    ]  # fmt: skip
    yield from columns(units) if units else ["  none"]


def _gpus(payload: Mapping[str, Any]) -> Iterator[str]:
    if payload["gpus"] is None:
        yield f"GPU               unknown: {payload['gpu_problem']}"
        return
    if not payload["gpus"]:
        yield "GPU               none"
    for gpu in payload["gpus"]:
        yield f"GPU {gpu['index']}             {gpu['name']}"
        link = (
            f"generation {_shown(gpu['pcie_generation'])} of {_shown(gpu['pcie_generation_max'])}, "
            f"width {_shown(gpu['pcie_width'])} of {_shown(gpu['pcie_width_max'])}"
        )
        limit, default = _watts(gpu["power_limit_w"]), _watts(gpu["power_default_w"])
        yield from columns(
            [
                ("  VRAM", (f"{format_mib(gpu['free_mib'])} free, {format_mib(gpu['used_mib'])} used "
                           f"of {format_mib(gpu['total_mib'])}")),
                ("  power limit", f"{limit} (default {default})"),
                ("  PCIe link", link),
            ]
        )  # fmt: skip
        yield from _users(gpu)
    yield f"driver            {_shown(payload['driver_version'])}"


def _users(gpu: Mapping[str, Any]) -> Iterator[str]:
    if gpu["processes"] is None:
        yield "  used by         unknown"
        return
    for process in gpu["processes"]:
        what = " (display server)" if process["is_display_server"] else ""
        unit = f", unit {process['unit']}" if process["unit"] else ""
        name = _shown(process["name"])
        yield f"  used by         {name}{what}, pid {process['pid']}{unit}: {format_mib(process['used_mib'])}"
    if gpu["unattributed_mib"]:
        yield f"  used by         nobody that can be seen: {format_mib(gpu['unattributed_mib'])}"


def _engines(engines: list[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        (f"  {e['name']}", e["dialect"] or "-", e["version"] or "-", e["path"],
         f"not usable: {e['problem']}" if e["problem"] else e["found_by"])
        for e in engines
    ]  # fmt: skip
    yield from columns(rows) if rows else ["  none"]


def _manager(payload: Mapping[str, Any]) -> str:
    text = {"system": "systemd (system)", "user": "systemd (user)", "local": "none (tunerd's own)"}
    lingers = {True: ", lingering on", False: ", lingering off", None: ""}[payload["lingers"]]
    return text[payload["mode"]] + lingers


def _watts(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} W"


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)
