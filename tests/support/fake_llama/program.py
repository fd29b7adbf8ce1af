"""The life of the process: arguments, port, load, service, end."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, NoReturn

from tests.support.fake_llama.api import Api
from tests.support.fake_llama.arguments import ArgumentError, Arguments, apply_rules
from tests.support.fake_llama.behaviour import Behaviour, read_behaviour
from tests.support.fake_llama.engine import POLL_S, Engine
from tests.support.fake_llama.failures import FAILURES, Failure, port_taken
from tests.support.fake_llama.records import Log, Record

_VERBOSE = 4


class Program:
    """The life of the process: arguments, port, load, service, end."""

    def __init__(self, behaviour: Behaviour, argv: list[str]) -> None:
        self.behaviour = behaviour
        self.is_ik = behaviour.is_ik
        self.argv = argv
        self.log = Log(behaviour)
        self.record = Record(behaviour.record)
        self.arguments: Arguments
        self.api: Api
        # An Event has a lock, for which a handler that breaks in on `wait` would wait for ever.
        self._stop: SimpleQueue[None] = SimpleQueue()

    def end(self, status: int) -> NoReturn:
        self.record.add("exit")
        if status < 0:
            os.kill(os.getpid(), -status)
            time.sleep(3600)  # the signal comes first
        self.log.flush()
        os._exit(status)

    def die(self, failure: Failure) -> NoReturn:
        is_told_by_ik = self.is_ik and failure.ik_lines is not None
        for line in (failure.ik_lines if is_told_by_ik else failure.lines) or ():
            self.log(line.replace("{model}", self.arguments.facts.get("model", "")))
        self.end(failure.ends)

    def run(self) -> NoReturn:
        self._answer_questions()
        try:
            self.arguments = Arguments(self.argv, self.behaviour)
        except ArgumentError as error:
            self._refuse(str(error))
        apply_rules(self.behaviour, self.arguments)
        if self.behaviour.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine = Engine(self.behaviour, self.arguments, self.log, self.record)
        self.api = Api(engine, self.die)
        host = self.arguments.facts.get("host", "127.0.0.1").split(",")[0]
        port = self.arguments.whole("port", 8080)
        try:  # two of ik share a port, and each gets some of the clients
            listener = connection().listen(host, port, shares_port=self.is_ik)
        except OSError:
            self.die(port_taken(host, port))
        if not self.is_ik:
            connection().accept(listener, self.api)
        self._load()
        if self.is_ik:
            connection().accept(listener, self.api)
        self._serve(listener)

    def _answer_questions(self) -> None:
        asked = set(self.argv)
        if asked & {"-h", "--help", "--usage"}:
            path = self.behaviour.help_file
            text = Path(path).read_text(encoding="utf-8") if path else "usage: stand-in\n"
            os.write(1, text.encode())
            self.end(1 if self.is_ik else 0)
        if "--version" in asked:
            os.write(2, b"version: 0 (unknown)\nbuilt with GNU 12.2.0 for Linux x86_64\n")
            self.end(0)
        if "--list-devices" in asked and not self.is_ik:
            os.write(1, f"Available devices:\n  {device_line(self.behaviour)}\n".encode())
            self.end(0)

    def _refuse(self, words: str) -> NoReturn:
        os.write(2, (words + "\n").encode())
        if "while handling" in words:
            os.write(2, b"\n\nto show complete usage, run with -h\n")
        if self.is_ik and self.behaviour.help_file:
            os.write(1, Path(self.behaviour.help_file).read_bytes())
        self.end(1)

    def _failure(self) -> Failure | None:
        told = self.behaviour.fail
        if isinstance(told, list):
            told = told[min(self.record.n_earlier_loads, len(told) - 1)] if told else None
        return None if told is None else FAILURES[told]

    def _load(self) -> None:
        log_loading(self.log, self.behaviour, self.arguments)
        model = self.arguments.facts.get("model")
        if self.behaviour.needs_model and (model is None or not Path(model).is_file()):
            self.die(FAILURES["missing-model"])
        self.record.add("load", argv=self.argv)
        time.sleep(self.behaviour.load_s)
        while self.behaviour.load_never_ends:
            time.sleep(3600)
        failure = self._failure()
        if failure is not None and failure.at == "load":
            self.die(failure)
        self.api.failure_at_request = failure
        log_loaded(self.log, self.behaviour, self.api.engine)

    def _leave_child(self, listener: socket.socket) -> None:
        """A grandchild in its own session that outlives us, as a stray helper would."""
        if os.fork():
            return
        listener.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(120)  # nobody has to clean up after a test that was killed
        while True:
            time.sleep(3600)

    def _serve(self, listener: socket.socket) -> NoReturn:
        if self.behaviour.leave_child:
            self._leave_child(listener)
        if not self.behaviour.ignore_sigterm:
            signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        log_ready(self.log, self.api.engine)
        self.api.is_loaded = True
        self._stop.get()
        connection().stop(listener)
        while self.api.n_at_work:
            time.sleep(POLL_S)
        self.end(0)

    def _on_stop(self, _number: int, _frame: object) -> None:
        """The first signal waits for the clients, the second does not."""
        if self.api.engine.is_stopping:
            self.end(1)
        self.api.engine.is_stopping = True
        self._stop.put(None)


def connection() -> ModuleType:
    """A third of a start; questions need no HTTP."""
    return importlib.import_module("tests.support.fake_llama.connection")


def main() -> NoReturn:
    """Play the engine that the settings describe (`--stand-in FILE`), with the rest of the arguments."""
    _, path, *argv = sys.argv[1:]
    Program(read_behaviour(path), argv).run()


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
    log(f"I srv  llama_server: listening on http://{host}:{port}")
