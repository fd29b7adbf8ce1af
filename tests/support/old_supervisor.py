"""A supervisor of before an upgrade, by its words alone: what the newer one added it does not know.

    python old_supervisor.py FOLDER OP...

It stands between callers and the real supervisor in FOLDER, hands everything on but the requests
that it does not know, and prints `ready` once callers reach it instead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

NAME = "supervise.sock"
BEHIND = "behind.sock"


def answer(connection: socket.socket, unknown: set[str]) -> None:
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            op = json.loads(line)["op"]
            if op in unknown:
                message = f"the supervisor does not know this request: {op}"
                error = {"code": "service", "message": message, "cause": None, "hint": None}
                told = json.dumps({"version": 1, "ok": False, "error": error}).encode() + b"\n"
            else:
                told = handed_on(line)
            connection.sendall(told)


def handed_on(line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(BEHIND)
        channel.sendall(line)
        with channel.makefile("rb") as answers:
            return answers.readline()


def main() -> None:
    folder, *unknown = sys.argv[1:]
    os.chdir(folder)
    os.rename(NAME, BEHIND)  # noqa: PTH104 -- relative, for the kernel takes 107 bytes
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(NAME)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection, set(unknown)), daemon=True).start()


if __name__ == "__main__":
    main()
