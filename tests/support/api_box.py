"""The local API on real sockets, in this process, with folders of a test behind it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.folders import open_folder
from tests.support.local_box import Box
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import until
from tunerd.app import Context
from tunerd.jobs import running_jobs
from tunerd.machine.peers import tcp_socket, unix_socket
from tunerd.watch.history import Telemetry
from tunerd.web.app import ApiServer, Front, Gate, Limits, read_facts
from tunerd.web.page import build_site
from tunerd.web.part import Answering, Desk

_JOBS_LIMIT_S = 400.0
# Numbers that no account has.
GROUP, MEMBER, STRANGER = 54321, 54322, 54323
OWN = {"X-Tunerd": "1"}
_ASK = """
import http.client, json, socket, sys
path, method, url = sys.argv[1:4]
connection = http.client.HTTPConnection("localhost" if path.startswith("/") else path)
try:
    if path.startswith("/"):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
    connection.request(method, url, "{}", {"Content-Type": "application/json", "X-Tunerd": "1"})
    reply = connection.getresponse()
    print(json.dumps([reply.status, reply.read().decode()]))
except OSError as error:
    print(json.dumps([None, type(error).__name__]))
"""


@dataclass(frozen=True)
class Said:
    """One answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class ApiBox:
    """A running API: `path` is its socket, `port` that of the page, `tunnel` as `ssh -L` leads to the socket."""

    box: Box
    path: Path
    port: int
    telemetry: Telemetry = field(default_factory=Telemetry)
    tunnel: int = 0

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.tunnel}"

    def ask(
        self,
        url: str,
        *,
        method: str = "GET",
        body: object = None,
        headers: Mapping[str, str] | None = None,
        tcp: bool = False,
    ) -> Said:
        """One request; a body that is no text is sent as JSON, and anything sent is deliberate."""
        port = self.tunnel if tcp else None
        connection = http.client.HTTPConnection(
            "127.0.0.1" if tcp else "localhost", port, timeout=300
        )
        if not tcp:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(60)
            connection.sock.connect(str(self.path))
        sent = {
            **({} if method == "GET" else {"Content-Type": "application/json", **OWN}),
            **(headers or {}),
        }
        content = body if isinstance(body, str | bytes | None) else json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, url, content, sent)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Said(reply.status, found, reply.read())

    def post(self, url: str, body: object, **options: Any) -> Said:
        """A request that changes something."""
        return self.ask(url, method="POST", body=body, **options)

    def events(self, number: int) -> list[dict[str, Any]]:
        """Everything that a job tells until it is over."""
        found: list[dict[str, Any]] = []
        offset = 0

        def is_over() -> bool:
            nonlocal offset
            said = self.ask(f"/api/jobs/{number}/events?offset={offset}")
            assert said.status == 200, said
            found.extend(said.json["events"])
            offset = said.json["offset"]
            return bool(said.json["is_over"])

        until(is_over, "the job is over", _JOBS_LIMIT_S)
        return found

    def ask_as(self, uid: int, *groups: int, url: str = "/api/status", method: str = "GET",
               tcp: bool = False) -> tuple[int | None, str]:  # fmt: skip
        """What somebody else is told; None and the name of the error where nobody answers them."""
        python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
        where = f"127.0.0.1:{self.port}" if tcp else str(self.path)
        done = subprocess.run(
            [python, "-S", "-E", "-c", _ASK, where, method, url],
            capture_output=True, text=True, check=True, timeout=300, cwd="/",
            user=uid, group=uid, extra_groups=list(groups),
        )  # fmt: skip
        status, text = json.loads(done.stdout)
        return status, text


@contextlib.contextmanager
def serving(
    *,
    box: Box | None = None,
    group: int | None = None,
    context: Context | None = None,
    telemetry: Telemetry | None = None,
    limits: Limits | None = None,
) -> Iterator[ApiBox]:
    """The API until the body ends; its folder can be entered by everybody, as `/run/tunerd` can.

    Without `context` it works in that of the box; `telemetry` is what somebody else watches.
    """
    with open_folder() as folder:
        own = box or Box(folder / "box", {"TUNERD_SERVICE__SETTLE_S": "0.2"})
        own.folder.mkdir(exist_ok=True)
        ctx = context or own.context
        watched = telemetry or Telemetry()
        path, asked = folder / "tunerd.sock", folder / "daemon.sock"
        answering = Answering(
            unix_socket(asked, group=None), os.getuid(), Desk(ctx, watched).answer
        )
        answering.start()
        sockets = [unix_socket(path, group=group), tcp_socket("127.0.0.1", 0)]
        made = ApiBox(own, path, sockets[1].getsockname()[1], watched)
        gate = Gate(own_uid=os.getuid(), group=lambda: group)
        site = build_site(Front(asked, gate, read_facts(asked)))
        try:
            server = ApiServer(site, sockets, gate.knows, limits or Limits())
            with running(server), Proxy(path) as tunnel:
                made.tunnel = tunnel.port
                yield made
        finally:
            answering.stop()
            _wait_for_jobs(ctx)  # they write into folders that are about to go


@contextlib.contextmanager
def running(server: ApiServer) -> Iterator[None]:
    """The server in a thread, until the body ends."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


def _wait_for_jobs(ctx: Context) -> None:
    until(lambda: not running_jobs(ctx), "every job has ended", _JOBS_LIMIT_S)
