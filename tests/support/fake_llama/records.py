"""What the stand-in writes: the engine's log, and a record of what happened for the test."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.fake_llama.behaviour import Behaviour

_BLOCK_BYTES = 4096


class Log:
    """The engine's own log: mainline on standard error, ik's `INFO [` lines on standard output."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._began_s = time.monotonic()
        self._lock = threading.RLock()  # a second signal ends it in the middle of the first
        self._unwritten = b""

    def __call__(self, line: str) -> None:
        """Write `L text` with L one of I, W, E; other lines, and ik's, stand as they are."""
        level, _, text = line.partition(" ")
        is_levelled = level in {"I", "W", "E"}
        if line.startswith(">"):
            self._write(1, line[1:])
        elif is_levelled and not self._behaviour.is_ik:
            micros = int((time.monotonic() - self._began_s) * 1e6)
            minutes, micros = divmod(micros, 60_000_000)
            seconds, micros = divmod(micros, 1_000_000)
            millis, micros = divmod(micros, 1000)
            stamp = f"{minutes}.{seconds:02d}.{millis:03d}.{micros:03d}"
            self._write(2, f"{stamp} {level} {text}")
        else:
            self._write(2, text if is_levelled else line)

    def keyed(self, function: str, text: str, **keys: object) -> None:
        """One of ik's key=value lines."""
        pairs = "".join(f' {key}="{value}"' for key, value in keys.items())
        stamp = int(time.time())
        self._write(1, f'INFO [{function:>24}] {text} | tid="1" timestamp={stamp}{pairs}')

    def flush(self) -> None:
        """What a C library does at an orderly exit, and only then."""
        with self._lock:
            _write(1, self._unwritten)
            self._unwritten = b""

    def _write(self, descriptor: int, line: str) -> None:
        """Standard error at once, standard output in blocks, as C does where it is no terminal."""
        data = (line + "\n").encode()
        with self._lock:
            if descriptor == 1:
                self._unwritten += data
                if len(self._unwritten) < _BLOCK_BYTES:
                    return
                data, self._unwritten = self._unwritten, b""
            _write(descriptor, data)


def _write(descriptor: int, data: bytes) -> None:
    try:
        os.write(descriptor, data)
    except OSError:
        return  # whoever read the log is gone; the real engine does not mind either


class Record:
    """What happened, as JSON lines in the file that the settings name."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.n_earlier_loads = self._count_loads()

    def _count_loads(self) -> int:
        if self._path is None:
            return 0
        try:
            text = Path(self._path).read_text(encoding="utf-8")
        except OSError:
            return 0
        return text.count('"event": "load"')

    def add(self, event: str, **facts: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"event": event, **facts}) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            return  # a hardened unit may not let it write; it still has to serve
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
