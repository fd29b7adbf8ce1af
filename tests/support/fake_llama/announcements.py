"""What an engine writes about itself while it starts."""

from __future__ import annotations

from typing import Any

from tests.support.fake_llama.arguments import Arguments
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.fake_llama.engine import Engine
from tests.support.fake_llama.records import Log

_VERBOSE = 4


def device_line(behaviour: Behaviour, width: int = 0) -> str:
    """One device as `--list-devices` and the log print it, or that there is none."""
    device = behaviour.device
    if device is None:
        return "(none)"
    memory = f"({device['total_mib']} MiB, {device['free_mib']} MiB free)"
    return f"{device['name']:{width}}: {device['description']} {memory}"


def log_loading(log: Log, behaviour: Behaviour, arguments: Arguments) -> None:
    if behaviour.is_ik:
        log.keyed("main", "build info", build=0, commit="unknown")
        return
    if arguments.whole("verbosity", 3) >= _VERBOSE and behaviour.device:
        log("I cmn  common_param: device_info:")
        log(f"I cmn  common_param:   - {device_line(behaviour, width=8)}")
        if arguments.facts.get("fit", "on") == "on":
            _log_fit(log, behaviour.device)
    log(f"I srv    load_model: loading model '{arguments.facts.get('model', '')}'")


def _log_fit(log: Log, device: dict[str, Any]) -> None:
    """Which layers lie on the device, and how many of them only in part, the output among those."""
    log("I cmn  common_init_: fitting params to device memory ...")
    layers, partly = (
        device.get("offloaded", device.get("n_layers", 41)),
        device.get("overflowing", 0),
    )
    memory = f"{int(device['model_mib']):6} MiB used, {int(device['free_mib']):6} MiB free"
    row = f"{device['name']}: {layers:2} layers ({partly:2} overflowing), {memory}"
    log(f"I common_params_fit_impl:   - {row}")
    log("I common_fit_params: successfully fit params to free device memory")


def log_loaded(log: Log, behaviour: Behaviour, engine: Engine) -> None:
    device, arguments = behaviour.device, engine.arguments
    is_verbose = behaviour.is_ik or arguments.whole("verbosity", 3) >= _VERBOSE
    if device is not None and is_verbose:
        name, n_layers = device["name"], device.get("n_layers", 41)
        offloaded = device.get("offloaded", n_layers)
        log(f"I load_tensors: offloaded {offloaded}/{n_layers} layers to GPU")
        log(f"I load_tensors:   {name} model buffer size = {device['model_mib']:8.2f} MiB")
        log(f"I llama_kv_cache:   {name} KV buffer size = {device['context_mib']:8.2f} MiB")
        log(f"I sched_reserve:   {name} compute buffer size = {device['compute_mib']:8.2f} MiB")


def log_ready(log: Log, engine: Engine) -> None:
    host = engine.arguments.facts.get("host", "127.0.0.1")
    port = engine.arguments.whole("port", 8080)
    if engine.behaviour.is_ik:
        log.keyed("main", "model loaded")
        log.keyed("main", "HTTP server listening", port=port, hostname=host)
        return
    slots = f"n_slots = {len(engine.slots)}, n_ctx_slot = {engine.n_ctx}, kv_unified = 'false'"
    log(f"I srv    load_model: initializing, {slots}")
    log("I srv  llama_server: model loaded")
    is_recent = engine.behaviour.dialect in {"main-0x", "main-lm"}
    log(
        f"I srv  llama_server: {'' if is_recent else 'server is '}listening on http://{host}:{port}"
    )
