"""One question, one answer, a line each, over a Unix socket: how the web part asks the daemon.

Whoever serves browsers can do nothing itself; what it may ask for is checked at the other end.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tunerd.errors import HostError
from tunerd.machine.peers import peer_of

# A body of 64 KiB whose every byte is escaped.
_MAX_QUESTION_BYTES = 512 * 1024
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_AT_ONCE = 16
_READ_S = 10.0
_WRITE_S = 60.0
_AGAIN_S = 0.1


def ask(path: Path, question: bytes, *, timeout_s: float) -> bytes:
    """The answer to a question of one line.

    Raises:
        HostError: nobody answers.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(timeout_s)
            channel.connect(str(path))
            channel.sendall(question + b"\n")
            return _line(channel, _MAX_ANSWER_BYTES)
    except OSError as error:
        raise HostError(
            "tunerd's daemon does not answer",
            cause=f"`{path}`: {error.strerror or error}",
            hint="`systemctl status tunerd` says more",
        ) from error


class Answering:
    """Answers on a listening socket, in threads, from `start` until `stop`.

    Args:
        listener: Its connections.
        uid: The one account that is heard; None for nobody.
        answer: Makes a line of a line.
    """

    def __init__(
        self, listener: socket.socket, uid: int | None, answer: Callable[[bytes], bytes]
    ) -> None:
        self._listener = listener
        self._uid = uid
        self._answer = answer
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="asked", daemon=True)

    def start(self) -> None:
        """Answer from now on; who came before waits in the socket."""
        self._listener.setblocking(False)
        self._thread.start()

    def stop(self) -> None:
        """Take no more questions."""
        self._wake.close()
        self._thread.join()
        self._listener.close()
        self._woken.close()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._woken], [], [])
            if self._woken in ready:
                return
            self._places.acquire()
            try:
                channel, _ = self._listener.accept()
                threading.Thread(target=self._one, args=(channel,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor or no thread left: later there may be
                self._places.release()
                select.select([self._woken], [], [], _AGAIN_S)

    def _one(self, channel: socket.socket) -> None:
        try:
            with channel, contextlib.suppress(OSError):  # whoever went away needs no answer
                if peer_of(channel).uid != self._uid:
                    return
                channel.settimeout(_READ_S)
                answer = self._answer(_line(channel, _MAX_QUESTION_BYTES))
                channel.settimeout(_WRITE_S)
                channel.sendall(answer + b"\n")
        finally:
            self._places.release()


def _line(channel: socket.socket, most_bytes: int) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = channel.recv(_CHUNK_BYTES)
        received += chunk
        if not chunk or len(received) > most_bytes:
            raise ConnectionError("the other end said no whole line")
    return bytes(received[:-1])
