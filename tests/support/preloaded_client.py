"""`preloaded_client.py SOCKET WORDS...`: be `tunerd WORDS` for whoever called this, by the process that forks for it."""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> int:
    """Its exit code, or minus the signal that ended it."""
    _, name, *words = sys.argv
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as way:
        way.connect(f"\0{name}")
        variables = [b"%s=%s" % pair for pair in os.environb.items()]
        told = [b"%d" % len(words), os.getcwdb(), *map(os.fsencode, words), *variables]  # noqa: PTH109
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: way.send(b"%d" % number))
        socket.send_fds(way, [b"\0".join(told)], [0, 1, 2])
        return int(way.recv(16) or 1)


if __name__ == "__main__":
    code = main()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
