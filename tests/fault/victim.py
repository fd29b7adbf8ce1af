"""A machine with two profiles of a real engine, whose swaps are interfered with."""

from __future__ import annotations

import json
import random
import subprocess
import time
from dataclasses import asdict, dataclass, field

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine
from tests.support.roots import PREFIX, SOURCES_INSIDE
from tests.support.waiting import until

PROFILES = ("one", "two")
KILLS = (PREFIX / "bin/python", "-S", "-E", SOURCES_INSIDE / "tests/fault/killer.py")
KILL_MEASURE = "pkill -KILL -f '[t]ests.fault.measure' || true"
_PATIENCE_S = 60.0
_STRAYS_S = 20.0
_MEASURES_S = 150.0


def kill_main(unit: str) -> str:
    """The command that kills a unit's main process."""
    return f"systemctl kill --signal=KILL --kill-who=main {unit}"


def kill_each(pattern: str) -> str:
    """The command that kills the main processes of all such units that have not just ended."""
    listed = f"systemctl list-units --plain --no-legend '{pattern}' | cut -d' ' -f1"
    return f"for unit in $({listed}); do {kill_main('$unit')} || :; done"


def until_it_answers(machine: Machine, alias: str, *, limit_s: float) -> None:
    """Until a server answers on the usual port, by this name."""
    ask = "curl -sf http://127.0.0.1:8080/v1/models"
    machine.sh(f"until {ask} | grep -q '\"{alias}\"'; do sleep 0.05; done", limit_s=limit_s)


def start_measuring(machine: Machine, *words: str) -> subprocess.Popen[bytes]:
    """See measure.py; its output is read as it comes."""
    python = (PREFIX / "bin/python", "-B", "-m", "tests.fault.measure")
    return machine.start(*python, *words, folder=SOURCES_INSIDE)


def rest_of(process: subprocess.Popen[bytes]) -> str:
    """What a measurement still prints until its end."""
    out, err = process.communicate(timeout=_MEASURES_S)
    assert b"Traceback" not in err, err.decode()
    return out.decode()


@dataclass(frozen=True)
class Blow:
    """SIGKILL at a moment of a swap; see killer.py."""

    after_s: float
    watch: str | None = None
    with_children: bool = False

    def __str__(self) -> str:
        since = f"{self.watch} changed" if self.watch else "the start"
        whom = " and its children" if self.with_children else ""
        return f"SIGKILL{whom} {1000 * self.after_s:.0f} ms after {since}"


@dataclass
class Victim:
    """Profiles `one` and `two` are deployed in turn; `texts` are their units.

    The engine is that of TUNERD_TEST_ENGINES where there is one, else Debian's own, else the
    embedded one.
    """

    machine: Machine
    engine: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    swap_s: float = 0.0
    """How long a whole apply took."""

    def __post_init__(self) -> None:
        settings, self.engine = self._engine()
        profiles = {name: profile(self.engine, serving__alias=name) for name in PROFILES}
        self.tunerd = Deployment(self.machine, settings=settings, profiles=profiles, settle_s=0.1)
        for name in (*PROFILES, PROFILES[0]):
            began_s = time.monotonic()
            self.tunerd("apply", name, "--yes")
            self.swap_s = time.monotonic() - began_s
            self.texts[name] = self._unit()
        self.machine.sh("journalctl --sync; sync")

    def _engine(self) -> tuple[str, str]:
        builds = sorted(
            name for name in self.machine.files("/srv/engines") if name.startswith("mainline-")
        )
        if builds:
            return f'[engines.real]\npath = "/srv/engines/{builds[-1]}"\n', "real"
        if self.machine.sh("command -v llama-server", check=False).stdout:
            return "", "mainline"
        return "", "embedded"

    def _unit(self) -> str:
        unit = self.tunerd.unit()
        assert unit is not None, "there is no unit file"
        assert unit.look.split() == ["regular", "file", "644", "root:root"], unit.look
        return unit.text

    @property
    def record(self) -> str:
        """The intent record of a swap under way."""
        return f"{self.tunerd.state}/journal/{UNIT}.json"

    @property
    def unit_path(self) -> str:
        return f"{self.tunerd.units}/{UNIT}"

    @property
    def live(self) -> str:
        """The profile whose unit stands whole."""
        text = self._unit()
        names = [name for name, whole in self.texts.items() if whole == text]
        assert names, f"a unit that nobody wrote:\n{text}"
        return names[0]

    @property
    def other(self) -> str:
        """The profile that does not stand."""
        return next(name for name in PROFILES if name != self.live)

    def some_swap(self, rng: random.Random) -> list[str]:
        """A swap to the other profile: apply, or rollback where that leads there."""
        if rng.random() < 0.3:
            newest = self.tunerd.json("rollback", "--list")["backups"]
            if newest and not newest[0]["is_live"]:
                return ["rollback"]
        return ["apply", self.other, "--yes"]

    def some_blow(self, rng: random.Random) -> Blow:
        """Half of them at any moment of a swap, the others around its renames."""
        with_children = rng.random() < 0.3
        if rng.random() < 0.5:
            return Blow(rng.uniform(0, self.swap_s), None, with_children)
        if rng.random() < 0.5:
            return Blow(rng.uniform(0, 0.2), self.record, with_children)
        return Blow(rng.uniform(0, 0.5 * self.swap_s), self.unit_path, with_children)

    def strike(self, words: list[str], blow: Blow) -> None:
        """Run `tunerd WORDS` and kill it then."""
        told = {"argv": ["/usr/local/bin/tunerd", *words], **asdict(blow)}
        done = self.machine.run(*KILLS, json.dumps(told))
        found = json.loads(done.stdout.splitlines()[-1])
        assert "Traceback" not in found["err"], found["err"]

    def cut(self, words: list[str], blow: Blow) -> None:
        """Run `tunerd WORDS` and cut the power at that moment, whether it still runs or not."""
        told = {"argv": ["/usr/local/bin/tunerd", *words], **asdict(blow), "spares": True}
        process = self.machine.start(*KILLS, json.dumps(told))
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n", b"now\n"]
        self.machine.power_cut()
        process.communicate(timeout=180)

    def boot(self) -> None:
        """Boot, and wait until the server has loaded and answers."""
        self.machine.boot()
        ask = "curl -sf http://127.0.0.1:8080/health"
        self.machine.sh(f"until {ask} > /dev/null; do sleep 0.1; done", limit_s=_PATIENCE_S)

    def wait_for_the_daemon(self) -> None:
        """Until no record is left, which the daemon sees to."""
        self.machine.sh(f"while [ -e {self.record} ]; do sleep 0.1; done", limit_s=_PATIENCE_S)

    def check(self) -> str:
        """A whole unit is live and serves, and nothing is left of any swap; whose it is."""
        name = self.live
        assert self.tunerd.journal_files() == [], "a record is left"
        # The daemon may just write what the server that it brought back took.
        until(lambda: not self._left(), lambda: f"{self._left()} is gone", _STRAYS_S)
        assert self.tunerd.alias() == name, "another one answers"
        assert self.tunerd.generate()["content"], "it says nothing"
        pid = self.tunerd.show("MainPID")
        assert f"--alias\0{name}\0" in self.machine.read(f"/proc/{pid}/cmdline"), "old process"
        # After a boot the daemon looks at engines, which are there and listen for a moment.
        until(lambda: self._servers() == [pid], f"{pid} runs alone", _STRAYS_S)
        until(lambda: self._listeners() == {"8080"}, "no other port is open", _PATIENCE_S)
        said = self.tunerd("verify", expect=None)
        assert said.code == 0, f"verify: {said}"
        history = self.tunerd.json("history")["generations"]
        assert all(entry["outcome"] != "running" for entry in history), history[0]
        return name

    def _left(self) -> str:
        look = f"find {self.tunerd.units} {self.tunerd.state} -name '*.tmp' -print"
        return self.machine.sh(look).stdout

    def _servers(self) -> list[str]:
        listed = self.machine.sh("pgrep --full -- '[-]-alias (one|two) ' || true").stdout
        return listed.split()

    def _listeners(self) -> set[str]:
        """TCP ports on which anybody listens."""
        rows = self.machine.sh("cat /proc/net/tcp /proc/net/tcp6").stdout.splitlines()
        fields = [row.split() for row in rows]
        return {str(int(row[1].rpartition(":")[2], 16)) for row in fields if row[3:4] == ["0A"]}
