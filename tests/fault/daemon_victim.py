"""A machine on which the daemon looks after a stand-in engine, and is killed whatever it does."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.fault.victim import KILLER, kill_main
from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine
from tests.support.roots import PREFIX, SOURCES_INSIDE
from tests.support.webhook import URL, Webhook

DAEMON, WEB = "tunerd.service", "tunerd-web.service"
SOCKET = "/run/tunerd/tunerd.sock"
STATE = "/var/lib/tunerd"
RECORD = f"{STATE}/journal/{UNIT}.json"
_UNITS = (DAEMON, "tunerd.socket", "tunerd-daemon.socket", WEB)
_PATIENCE_S = 120.0
SETTINGS = """
[engines.eng]
path = "/srv/eng/llama-server"
[probation]
enabled = false
[daemon]
every_s = 1.0
busy_every_s = 1.0
[notify]
webhook = "{url}"
"""
PROFILES = {
    name: profile("eng", serving__alias=name, serving__metrics=True) for name in ("plain", "other")
}
_EVENTS = """
import json, sqlite3, sys
db = sqlite3.connect("file:" + sys.argv[1] + "?mode=ro", uri=True)
print(json.dumps(db.execute("select kind, level, text from events order by at_s").fetchall()))
"""
_SOUND = """
import sqlite3, sys
for path in sys.argv[1:]:
    try:
        db = sqlite3.connect("file:" + path + "?mode=ro", uri=True)
        print(path, db.execute("pragma integrity_check").fetchone()[0])
    except sqlite3.OperationalError as error:
        if "unable to open" not in str(error):
            print(path, error)
"""


class DaemonFault(StrEnum):
    """What the daemon does when it is killed."""

    RECOVERY = "it starts and mends a swap that was cut short"
    NOTICE = "it leaves a notice"


@dataclass
class DaemonVictim:
    """Production is a stand-in; the shipped units are installed, and the daemon is enabled."""

    machine: Machine
    start_s: float = 0.0
    """How long a start of the daemon takes until it is ready."""

    def __post_init__(self) -> None:
        machine = self.machine
        self.box = Deployment(machine, profiles=PROFILES, stop_timeout_s=2, settle_s=0.1)
        self.box.stand_ins(eng={})
        self.settings()
        self.webhook = Webhook(machine)
        self.webhook.start()
        for name in _UNITS:
            machine.run("cp", SOURCES_INSIDE / "units" / name, "/etc/systemd/system/")
        machine.systemctl("daemon-reload")
        self.box.apply("plain")
        began_s = time.monotonic()
        machine.systemctl("enable", "--now", "tunerd.socket", "tunerd-daemon.socket", DAEMON)
        self.start_s = time.monotonic() - began_s

    def settings(self, *, more: str = "") -> None:
        """What the daemon goes by."""
        text = SETTINGS.format(url=URL) + more
        self.box.settings(text, stop_timeout_s=2, settle_s=0.1)

    # Faults

    def befall(self, fault: DaemonFault, rng: random.Random) -> str:
        """Kill it while it does that, and see everything come right; what the blow met."""
        machine = self.machine
        machine.systemctl("reset-failed", DAEMON, check=False)
        machine.systemctl("start", DAEMON)
        self.box.until(lambda: self.is_ready, "the daemon is ready")
        self.box.until(self._has_sent, "earlier notices were sent")
        n_before = len(self.events())
        n_arrived = len(self.webhook.got())
        met: str = getattr(self, f"_{fault.name.lower()}")(rng)
        self.box.until(lambda: self.is_ready, "systemd has started the daemon again")
        self.box.until(self._has_sent, "every notice was sent")
        told_since = self.events()[n_before:]
        told = [kind for kind, level, _ in told_since if level != "note"]
        arrived = self.webhook.kinds()[n_arrived:]
        assert sorted(arrived) == sorted(told), f"{told} were told, {arrived} arrived"
        return met

    def _has_sent(self) -> bool:
        return not self.machine.files(f"{STATE}/notices")

    def _recovery(self, rng: random.Random) -> str:
        machine = self.machine
        self.machine.systemctl("stop", DAEMON, "tunerd.socket", "tunerd-daemon.socket")
        words = ["/usr/local/bin/tunerd", "apply", self._other(), "--yes"]
        told = {"argv": words, "watch": RECORD, "after_s": rng.uniform(0.0, 0.3)}
        machine.run(PREFIX / "bin/python", "-S", "-E", KILLER, json.dumps(told), limit_s=150)
        machine.systemctl("start", "--no-block", "tunerd.socket", DAEMON)
        time.sleep(rng.uniform(0.0, 2 * self.start_s))
        was = self._kill()
        self.box.until(lambda: not machine.exists(RECORD), "the swap is mended")
        return was

    def _notice(self, rng: random.Random) -> str:
        """Settings that are wrong are told of; they are right again before the next daemon reads them."""
        pid = self._serving()
        end = self._kill_after(f"{STATE}/notices/*.json", rng.choice([0.0, rng.uniform(0.0, 0.5)]))
        self.settings(more="[guards.no-such]\nx = 1\n")
        was = end()
        self.settings()
        assert self._serving() == pid, "production was restarted"
        return was

    # What there is

    def check(self) -> None:
        """A whole unit serves, nothing is damaged, left over or astray."""
        box, machine = self.box, self.machine
        self.box.until(lambda: box.alias() is not None, "production serves")
        box.generate()
        self.box.until(
            self._is_quiet, "no unit of tunerd's runs beside the daemon and its web part"
        )
        assert not machine.exists(RECORD)
        left = machine.sh(f"find {box.units} {STATE} -name '*.tmp' -o -name '*.damaged*'").stdout
        assert left == "", f"left over: {left}"
        python = PREFIX / "bin/python"
        files = (f"{STATE}/telemetry.db", f"{STATE}/evidence.db")
        said = machine.run(python, "-S", "-E", "-c", _SOUND, *files).stdout.splitlines()
        assert all(line.endswith(" ok") for line in said), said
        assert any("telemetry" in line for line in said), said
        self.box.until(lambda: box("verify", expect=None).code == 0, "it is as deployed")
        history = box.json("history")["generations"]
        assert all(one["outcome"] != "running" for one in history), history[0]
        self.box.until(lambda: self._strays() == [], lambda: f"astray: {self._strays()}")

    def _strays(self) -> list[str]:
        """Servers beside production's, and processes of tunerd that are neither daemon nor web part."""
        own = {self.box.show("MainPID", unit) for unit in (UNIT, DAEMON, WEB)}
        listed = (
            "ps -eo pid,args | grep -E '[f]ake_llama_server|[/]opt/tunerd/bin/tunerd|[-]m tunerd'"
        )
        rows = self.machine.sh(f"{listed} || true").stdout.splitlines()
        return [row for row in rows if row.split()[0] not in own]

    def _is_quiet(self) -> bool:
        listed = self.machine.systemctl(
            "list-units", "--plain", "--no-legend", "--state=active,activating,deactivating",
            "tunerd-*.service",
        )  # fmt: skip
        return all(row.startswith(WEB) for row in listed.splitlines())

    @property
    def is_ready(self) -> bool:
        """Whether the daemon has reported ready and its API answers."""
        if self._state(DAEMON) != "active":
            return False
        asked = f"curl --silent --fail --max-time 5 --unix-socket {SOCKET} http://localhost/metrics"
        return self.machine.sh(f"{asked} > /dev/null", check=False).returncode == 0

    def events(self) -> list[list[str]]:
        """Everything that was ever told, oldest first: kind, level, text."""
        if not self.machine.exists(f"{STATE}/telemetry.db"):
            return []
        python = PREFIX / "bin/python"
        path = f"{STATE}/telemetry.db"
        found: list[list[str]] = json.loads(
            self.machine.run(python, "-S", "-E", "-c", _EVENTS, path).stdout
        )
        return found

    # Means

    def _kill(self) -> str:
        """Kill it now; what it was doing for systemd."""
        state = self._state(DAEMON)
        self.machine.sh(kill_main(DAEMON), check=False)
        return state

    def _kill_after(self, watch: str, after_s: float) -> Callable[[], str]:
        """Begin to watch these files; the call ends when it was killed, so long after they changed."""
        told = {"unit": DAEMON, "watch": watch, "after_s": after_s, "limit_s": _PATIENCE_S}
        python = PREFIX / "bin/python"
        started = self.machine.start(python, "-S", "-E", KILLER, json.dumps(told))
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"

        def end() -> str:
            out, _ = started.communicate(timeout=_PATIENCE_S + 20)
            found = json.loads(out)
            assert found["changed"], f"nothing was written to {watch}"
            return "at work" if found["pid"] else "was gone"

        return end

    def _serving(self) -> str:
        return self.box.show("InvocationID")

    def _state(self, unit: str) -> str:
        return self.machine.systemctl("is-active", unit, check=False)

    def _other(self) -> str:
        return "other" if self.box.alias() == "plain" else "plain"
