"""Watches a server, and tells for how long it was gone.

    python prober.py PORT

A server counts as gone from the moment at which its port refuses, until it has given a token. While
it is there it is only connected to: a request under way when it is told to stop would keep
llama-server from ending. Prints `ready` after the first token. Then, for each line read from
standard input, how long [s] it was gone since the line before, if it was, once it is there. Needs
nothing but the standard library, so that it runs inside of any machine.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time

_BODY = json.dumps({"prompt": "a", "n_predict": 1, "temperature": 0, "cache_prompt": False})
_PAUSE_S = 0.005
_LIMIT_S = 60.0


def has_token(port: int) -> bool:
    """Whether one token came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    try:
        connection.request("POST", "/completion", _BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status == http.client.OK and "timings" in json.load(response)
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def is_open(port: int) -> bool:
    """Whether somebody listens."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class Watch:
    """How long the server was gone since it was last asked for."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._changed = threading.Condition()
        self._is_there = False
        self._gone_s = 0.0

    def run(self) -> None:
        seen_s = time.monotonic()
        while True:
            if self._is_there and is_open(self._port):
                seen_s = time.monotonic()
            else:
                self._set_there(False)
                if has_token(self._port):
                    with self._changed:
                        self._gone_s += time.monotonic() - seen_s
                    seen_s = time.monotonic()
                    self._set_there(True)
            time.sleep(_PAUSE_S)

    def _set_there(self, is_there: bool) -> None:
        with self._changed:
            self._is_there = is_there
            self._changed.notify_all()

    def take(self) -> float:
        with self._changed:
            self._changed.wait_for(lambda: self._is_there)
            gone_s, self._gone_s = self._gone_s, 0.0
            return gone_s


def main() -> None:
    watch = Watch(int(sys.argv[1]))
    threading.Thread(target=watch.run, daemon=True).start()
    watch.take()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(watch.take(), flush=True)


if __name__ == "__main__":
    main()
