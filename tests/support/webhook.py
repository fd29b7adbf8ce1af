"""A receiver of notices in a machine, on an address that is not loopback's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.machine import Machine
from tests.support.roots import PREFIX

ADDRESS = "203.0.113.9"  # of no network: RFC 5737
PORT = 9099
URL = f"http://{ADDRESS}:{PORT}/hook"
_UNIT = "test-webhook.service"
_KEPT = "/srv/webhook.jsonl"
_PROGRAM = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("{_KEPT}", "ab") as kept:
            kept.write(body + bytes([10]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("{ADDRESS}", {PORT}), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Webhook:
    """It refuses connections until it is started."""

    machine: Machine

    def __post_init__(self) -> None:
        self.machine.sh(f"ip address add {ADDRESS}/32 dev lo 2>/dev/null; rm -f {_KEPT}")
        self.stop()

    def start(self) -> None:
        """Listen."""
        python = PREFIX / "bin/python"
        self.machine.run("systemd-run", "--quiet", f"--unit={_UNIT}", "--collect",
                         *(python, "-S", "-E", "-c", _PROGRAM))  # fmt: skip
        self.machine.sh(
            f"until bash -c 'exec 3<>/dev/tcp/{ADDRESS}/{PORT}' 2>/dev/null; do sleep 0.05; done"
        )

    def stop(self) -> None:
        """Refuse connections."""
        self.machine.systemctl("stop", _UNIT, check=False)

    def got(self) -> list[dict[str, Any]]:
        """What arrived, oldest first."""
        said = self.machine.sh(f"cat {_KEPT} 2>/dev/null || true").stdout
        return [json.loads(line) for line in said.splitlines()]

    def kinds(self) -> list[str]:
        """The kinds of the notices that arrived."""
        return [one["kind"] for one in self.got()]
