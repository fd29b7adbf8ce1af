"""A machine on which the daemon looks after a stand-in engine, and is killed whatever it does."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.fault.victim import KILLS, kill_main
from tests.support.deployment import UNIT, Deployment, place_units, profile
from tests.support.machine import Machine
from tests.support.roots import PREFIX
from tests.support.stand_in import RTX_4070_SUPER
from tests.support.webhook import URL, Webhook

DAEMON, WEB = "tunerd.service", "tunerd-web.service"
SOCKET = "/run/tunerd/tunerd.sock"
STATE = "/var/lib/tunerd"
RECORD = f"{STATE}/journal/{UNIT}.json"
_HISTORY = f"{STATE}/telemetry.db*"
_PATIENCE_S = 120.0
_STARTED = "MESSAGE_ID=39f53479d3a045ac8e11786248231fbf"  # systemd: a unit has started
WATCHED = """
[engines.eng]
path = "/srv/eng/llama-server"
[probation]
enabled = false
[daemon]
every_s = 1.0
busy_every_s = 1.0
"""
SETTINGS = (
    WATCHED
    + """
[guards]
hang_every_s = 5.0
hang_limit_s = 2.0
hang_restarts_per_hour = 1
oom_steps = 2
[sweep]
budget_s = 300.0
quiet_s = 1.0
window = "{window}"
timezone = "UTC"
[notify]
webhook = "{url}"
[schedule]
enabled = {has_nights}
"""
)
_RANGES = """
[sweep]
"serving.threads" = [1]
"serving.n_ubatch" = [256, 512]
"""
PROFILES = {
    "card": profile("eng", match__gpu="RTX 4070", memory__fit=True, memory__fit_mib=1664,
                    serving__alias="card", serving__metrics=True),
    "plain": profile("eng", serving__alias="plain", serving__metrics=True) + _RANGES,
    "other": profile("eng", serving__alias="other", serving__metrics=True),
}  # fmt: skip
_TIGHT = [{"when": {"fit-target": "1664"}, "set": {"fail": "oom-weights"}}]
_EVENTS = """
import json, os, sqlite3, sys
db = os.path.exists(sys.argv[1]) and sqlite3.connect("file:" + sys.argv[1] + "?mode=ro", uri=True)
asked = "select kind, level, text from events order by at_s"
print(json.dumps(db.execute(asked).fetchall() if db else []))
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

    START = "it starts"
    RECOVERY = "it starts and mends a swap that was cut short"
    RAISE = "its guard raises the margin"
    RESTART = "its guard restarts a server that hangs"
    NIGHT = "it begins a night"
    JOB = "a job of the API runs"
    NOTICE = "it leaves a notice"


@dataclass
class DaemonVictim:
    """Production is a stand-in; the shipped units are installed, and the daemon is enabled."""

    machine: Machine
    start_s: float = 0.0
    """How long a start of the daemon takes until it is ready."""
    _before: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        machine = self.machine
        self.box = Deployment(machine, profiles=PROFILES, stop_timeout_s=2, settle_s=0.1)
        self.box.stand_ins(eng={"device": RTX_4070_SUPER})
        self.settings()
        self.webhook = Webhook(machine)
        self.webhook.start()
        place_units(machine, DAEMON, WEB, "tunerd.socket", "tunerd-daemon.socket")
        self.box.apply("plain")
        began_s = time.monotonic()
        machine.systemctl("enable", "--now", "tunerd.socket", "tunerd-daemon.socket", DAEMON)
        self.start_s = time.monotonic() - began_s

    def settings(self, *, has_nights: bool = False, more: str = "") -> None:
        """What the daemon goes by."""
        hour = int(time.time()) // 3600
        window = f"{(hour - 1) % 24:02d}:00-{(hour - 2) % 24:02d}:00"  # not about to end
        text = SETTINGS.format(url=URL, window=window, has_nights=str(has_nights).lower()) + more
        self.box.settings(text, stop_timeout_s=2, settle_s=0.1)

    # Faults

    def befall(self, fault: DaemonFault, rng: random.Random) -> str:
        """Kill it while it does that, and see everything come right; what the blow met."""
        machine = self.machine
        machine.systemctl("reset-failed", DAEMON, check=False)
        machine.systemctl("start", DAEMON)
        self.box.until(lambda: self.is_ready, "the daemon is ready")
        self.box.until(self._has_sent, "earlier notices were sent")
        self._before = self.events()
        n_arrived = len(self.webhook.got())
        met: str = getattr(self, f"_{fault.name.lower()}")(rng)
        self.box.until(lambda: self.is_ready, "systemd has started the daemon again")
        self.box.until(self._has_sent, "every notice was sent")
        told = [row[0] for row in self.told() if row[1] != "note"]
        arrived = self.webhook.kinds()[n_arrived:]
        assert sorted(arrived) == sorted(told), f"{told} were told, {arrived} arrived"
        return met

    def _has_sent(self) -> bool:
        return not self.machine.files(f"{STATE}/notices")

    def _start(self, rng: random.Random) -> str:
        pid = self._serving()
        self.machine.systemctl("restart", "--no-block", DAEMON)
        time.sleep(rng.uniform(0.0, self.start_s))
        was = self._kill()
        assert self._serving() == pid, "production was restarted"
        return was

    def _recovery(self, rng: random.Random) -> str:
        machine = self.machine
        self.machine.systemctl("stop", DAEMON, "tunerd.socket", "tunerd-daemon.socket")
        words = ["/usr/local/bin/tunerd", "apply", self._other(), "--yes"]
        told = {"argv": words, "watch": RECORD, "after_s": rng.uniform(0.0, 0.3)}
        machine.run(*KILLS, json.dumps(told))
        machine.systemctl("start", "--no-block", "tunerd.socket", DAEMON)
        time.sleep(rng.uniform(0.0, 2 * self.start_s))
        was = self._kill()
        self.box.until(lambda: not machine.exists(RECORD), "the swap is mended")
        return was

    def _raise(self, rng: random.Random) -> str:
        box = self.box
        first = box.apply("card")["generation"]
        box.behave("eng", device=RTX_4070_SUPER, rules=_TIGHT)
        box.machine.kill(box.show("MainPID"))
        if rng.random() < 0.5:
            was = self._kill_after(RECORD, rng.uniform(0.0, 0.5))()
        else:
            self.box.until(lambda: self.told("oom") or box.machine.exists(RECORD), "it decides")
            time.sleep(rng.uniform(0.0, 1.0))
            was = self._kill()
        self.box.until(lambda: "1792" in box.show("ExecStart"), "the margin is raised")
        self.box.until(lambda: box.alias() == "card", "it serves")
        self.box.until(lambda: bool(self.told("guard-acted")), "the end of it is told")
        raised = [one for one in box.json("history")["generations"] if one["number"] > first]
        assert [one["reason"] for one in raised] == ["guard"], raised
        assert len(self.told("guard-acted")) == 1
        box.behave("eng", device=RTX_4070_SUPER)
        box.apply("plain")
        return was

    def _restart(self, rng: random.Random) -> str:
        """One restart an hour is allowed: the daemon after it must know of it."""
        box = self.box
        self._forget()
        box.behave("eng", device=RTX_4070_SUPER, reply="hang")
        box.systemctl("restart", UNIT)
        since_us = self._now_us()
        self.box.until(lambda: bool(self.told("hang")), "a hang is told")
        time.sleep(rng.uniform(0.0, 1.0))
        was = self._kill()
        self.box.until(lambda: len(self.told("hang")) > 1, "it leaves it alone")
        assert [row[1] for row in self.told("hang")] == ["warning", "error"]
        n_starts = self._starts(UNIT, since_us)
        assert n_starts <= 1, "restarted beyond the limit"
        box.behave("eng", device=RTX_4070_SUPER)
        box.systemctl("restart", UNIT)
        return f"{was}, {n_starts} restarts"

    def _night(self, rng: random.Random) -> str:
        if self.box.alias() != "plain":
            self.box.apply("plain")
        self.machine.run("rm", "-f", f"{STATE}/schedule.json")
        n_before = self._n_nights()
        end = self._kill_after(f"{STATE}/schedule.json", rng.uniform(0.0, 2.0))
        self.settings(has_nights=True)
        was = end()
        self.box.until(lambda: self.is_ready, "the daemon is ready")
        time.sleep(3.0)
        n_begun = self._n_nights() - n_before
        self.settings()
        self.machine.systemctl("stop", "tunerd-job-*", check=False)
        assert n_begun <= 1, f"the night was begun {n_begun} times"
        return f"{was}, {n_begun} nights"

    def _n_nights(self) -> int:
        found = "grep --files-with-matches 'sweep night' /run/tunerd/jobs/*/request.json"
        return len(self.machine.sh(f"{found} || true").stdout.split())

    def _job(self, rng: random.Random) -> str:
        body = {"profile": self._other()}
        began = self._ask("/api/apply", body)
        time.sleep(rng.uniform(0.0, 2.5))
        was = self._kill()
        number = began["job"]["job"]
        self.box.until(lambda: self._job_state(number) in {"done", "failed"}, "the job is over")
        assert self._job_state(number) == "done"
        assert self.box.alias() == body["profile"]
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
        box.until(self._is_quiet, "no unit of tunerd's runs beside the daemon and its web part")
        assert not machine.exists(RECORD)
        look = f"find {box.units} {STATE} -name '*.tmp' -o -name '*.damaged*'"
        box.until(lambda: not machine.sh(look).stdout, lambda: f"gone: {machine.sh(look).stdout}")
        said = self._python(_SOUND, f"{STATE}/telemetry.db", f"{STATE}/evidence.db").splitlines()
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
        if self._state() != "active":
            return False
        asked = f"curl --silent --fail --max-time 5 --unix-socket {SOCKET} http://localhost/metrics"
        return self.machine.sh(f"{asked} > /dev/null", check=False).returncode == 0

    def events(self) -> list[list[str]]:
        """Everything that was ever told, oldest first: kind, level, text."""
        found: list[list[str]] = json.loads(self._python(_EVENTS, f"{STATE}/telemetry.db"))
        return found

    def told(self, *kinds: str) -> list[list[str]]:
        """What was told since this fault began; of these kinds, or all."""
        rows = self.events()[len(self._before) :]
        return [row for row in rows if not kinds or row[0] in kinds]

    # Means

    def _python(self, code: str, *words: str) -> str:
        return self.machine.run(PREFIX / "bin/python", "-S", "-E", "-c", code, *words).stdout

    def _kill(self) -> str:
        """Kill it now; what it was doing for systemd."""
        state = self._state()
        self.machine.sh(kill_main(DAEMON), check=False)
        return state

    def _kill_after(self, watch: str, after_s: float) -> Callable[[], str]:
        """Begin to watch these files; the call ends when it was killed, so long after they changed."""
        told = {"unit": DAEMON, "watch": watch, "after_s": after_s, "limit_s": _PATIENCE_S}
        started = self.machine.start(*KILLS, json.dumps(told))
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"

        def end() -> str:
            out, _ = started.communicate(timeout=_PATIENCE_S + 20)
            found = json.loads(out)
            assert found["changed"], f"nothing was written to {watch}"
            return "at work" if found["pid"] else "was gone"

        return end

    def _forget(self) -> None:
        """A history of before counts no more."""
        self.machine.systemctl("stop", DAEMON)
        self.machine.sh(f"rm -f {_HISTORY}")
        self.machine.systemctl("start", DAEMON)
        self._before = []

    def _serving(self) -> str:
        return self.box.show("InvocationID")

    def _state(self) -> str:
        return self.machine.systemctl("is-active", DAEMON, check=False)

    def _other(self) -> str:
        return "other" if self.box.alias() == "plain" else "plain"

    def _now_us(self) -> int:
        return int(self.machine.run("date", "+%s%6N").stdout)

    def _starts(self, unit: str, since_us: int) -> int:
        """How often the unit was started since then; a cursor and a match would lose the first."""
        told = self.machine.run(
            "journalctl", "--output=json", "--quiet", "--boot", _STARTED, f"UNIT={unit}", check=False
        ).stdout  # fmt: skip
        times_us = [
            int(json.loads(line)["_SOURCE_REALTIME_TIMESTAMP"]) for line in told.splitlines()
        ]
        return sum(at_us > since_us for at_us in times_us)

    def _ask(self, url: str, body: object = None) -> Any:
        words = ["curl", "--silent", "--unix-socket", SOCKET, f"http://localhost{url}"]
        if body is not None:
            words += ["-H", "X-Tunerd: 1", "-H", "Content-Type: application/json",
                      "-d", json.dumps(body)]  # fmt: skip
        return json.loads(self.machine.run(*words).stdout)

    def _job_state(self, number: int) -> str | None:
        try:
            return str(self._ask(f"/api/jobs/{number}")["job"]["state"])
        except (AssertionError, ValueError):  # the daemon is on its way back
            return None
