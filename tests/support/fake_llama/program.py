"""The life of the process: arguments, port, load, service, end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.support.fake_llama.announcements import (
    device_line,
    log_loaded,
    log_loading,
    log_ready,
)
from tests.support.fake_llama.answers import Reply
from tests.support.fake_llama.api import Api
from tests.support.fake_llama.arguments import ArgumentError, Arguments, apply_rules
from tests.support.fake_llama.behaviour import Behaviour, read_behaviour
from tests.support.fake_llama.connection import Connection
from tests.support.fake_llama.engine import POLL_S, Engine
from tests.support.fake_llama.failures import FAILURES, Failure, port_taken
from tests.support.fake_llama.records import Log, Record

SETTINGS_VARIABLE = "TUNERD_TEST_STAND_IN"


class Program:
    """The life of the process: arguments, port, load, service, end."""

    def __init__(self, behaviour: Behaviour, argv: list[str]) -> None:
        self.behaviour = behaviour
        self.is_ik = behaviour.is_ik
        self.drips = behaviour.drips
        self.argv = argv
        self.log = Log(behaviour)
        self.record = Record(behaviour.record)
        self.arguments: Arguments
        self.api: Api
        self.answer: Callable[[str, str, dict[str, str], bytes, Callable[[], bool]], Reply]
        self._stop = threading.Event()
        self._n_at_work = 0
        self._work_lock = threading.Lock()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Counts a request as being worked on while it lasts."""
        with self._work_lock:
            self._n_at_work += 1
        try:
            yield
        finally:
            with self._work_lock:
                self._n_at_work -= 1

    def after_reply(self) -> None:
        """Die after so many completions, if that is to be played."""
        limit = self.behaviour.exit_after_requests
        if limit is not None and self.api.engine.n_completions >= limit:
            self._die_as_told()

    def end(self, status: int) -> NoReturn:
        self.record.add("exit", status=status)
        if status >= 0:
            self.log.flush()
        if status < 0:
            os.kill(os.getpid(), -status)
            time.sleep(3600)  # the signal comes first
        os._exit(status)

    def die(self, failure: Failure) -> NoReturn:
        self._write(failure)
        self.end(failure.ends)

    def _write(self, failure: Failure) -> None:
        lines = failure.lines
        if self.behaviour.is_ik and failure.ik_lines is not None:
            lines = failure.ik_lines
        for line in lines:
            self.log(line.replace("{model}", self.arguments.facts.get("model", "")))

    def _die_as_told(self) -> NoReturn:
        told = self.behaviour
        self.end(told.exit_status if told.exit_signal is None else -told.exit_signal)

    def run(self) -> NoReturn:
        self.record.add(
            "start",
            argv=self.argv,
            pid=os.getpid(),
            environment={name: os.environ[name] for name in sorted(os.environ)},
        )
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
        self.answer = self.api.answer
        listener = self._bind()
        if not self.behaviour.is_ik:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._load()
        if self.behaviour.is_ik:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._serve(listener)

    def _answer_questions(self) -> None:
        asked = set(self.argv)
        if asked & {"-h", "--help", "--usage"}:
            path = self.behaviour.help_file
            text = Path(path).read_text(encoding="utf-8") if path else "usage: stand-in\n"
            os.write(1, text.encode())
            self.end(1 if self.behaviour.is_ik else 0)
        if "--version" in asked:
            os.write(2, b"version: 0 (unknown)\nbuilt with GNU 12.2.0 for Linux x86_64\n")
            self.end(0)
        if "--list-devices" in asked and not self.behaviour.is_ik:
            os.write(1, f"Available devices:\n  {device_line(self.behaviour)}\n".encode())
            self.end(0)

    def _refuse(self, words: str) -> NoReturn:
        os.write(2, (words + "\n").encode())
        if "while handling" in words:
            os.write(2, b"\n\nto show complete usage, run with -h\n")
        if self.behaviour.is_ik and self.behaviour.help_file:
            os.write(1, Path(self.behaviour.help_file).read_bytes())
        self.end(1)

    def _bind(self) -> socket.socket:
        host = self.arguments.facts.get("host", "127.0.0.1").split(",")[0]
        port = self.arguments.whole("port", 8080)
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.is_ik:  # so that two of them share a port, and each gets some of the clients
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if self.behaviour.never_binds:
            return listener
        try:
            listener.bind((host, port))
            listener.listen(128)
        except OSError:
            self.die(port_taken(host, port))
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Connection(client, self).start()

    def _failure(self) -> Failure | None:
        told = self.behaviour.fail
        if isinstance(told, list):
            told = told[min(self.record.n_earlier_loads, len(told) - 1)] if told else None
        return None if told is None else FAILURES[told]

    def _load(self) -> None:
        log_loading(self.log, self.behaviour, self.arguments)
        failure = None if self._has_model() else FAILURES["missing-model"]
        if failure is None:
            self.record.add("load", argv=self.argv, pid=os.getpid())
            self._spend_load_time()
            failure = self._failure()
        if failure is not None and failure.at == "load":
            self.die(failure)
        elif failure is not None:
            self.api.failure_at_request = failure
        log_loaded(self.log, self.behaviour, self.api.engine)

    def _has_model(self) -> bool:
        model = self.arguments.facts.get("model")
        return not self.behaviour.needs_model or (model is not None and Path(model).is_file())

    def _spend_load_time(self) -> None:
        """Wait as long as the load takes."""
        time.sleep(self.behaviour.load_s)
        while self.behaviour.load_never_ends:
            time.sleep(3600)

    def _leave_child(self, listener: socket.socket) -> None:
        """A grandchild in its own session that outlives us, as a stray helper would."""
        pid = os.fork()
        if pid:
            self.record.add("child", pid=pid)
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
        self.record.add("ready")
        self._stop.wait()
        # shutdown() wakes the thread in accept(), which close() alone would leave there.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        while self._n_at_work:
            time.sleep(POLL_S)
        self.end(0)

    def _on_stop(self, _number: int, _frame: object) -> None:
        """The first signal waits for the clients, the second does not."""
        if self._stop.is_set():
            self.end(1)
        self.api.engine.is_stopping = True
        self._stop.set()


def main() -> NoReturn:
    """Play the engine that the settings describe, with the rest of the arguments."""
    argv = sys.argv[1:]
    path = os.environ.get(SETTINGS_VARIABLE)
    if argv[:1] == ["--stand-in"]:
        path, argv = argv[1], argv[2:]
    Program(read_behaviour(path), argv).run()
