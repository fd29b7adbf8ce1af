"""ik_llama.cpp is measured in mainline's place on one port, which it leaves taken for a minute.

The kernel remembers for as long connections that a server closed, and a build with other socket
options cannot bind their port until then. See docs/reliability.md.
"""

from __future__ import annotations

import itertools
import time
from enum import StrEnum

import pytest

from tests.fault.campaign import TIMEOUT_S, faults
from tests.fault.victim import KILL_MEASURE, kill_each, rest_of, start_measuring, until_it_answers
from tests.support import needs
from tests.support.deployment import MODEL, UNIT, Deployment, profile
from tests.support.machine import Machine

PORT = 8080
MAINLINE, IK = "mainline-2026-08-18", "ik-2026-08"
SETTINGS = "".join(f'[engines.{name}]\npath = "/srv/engines/{name}"\n' for name in (MAINLINE, IK))
_PATIENCE_S = 150.0
_ENDED = f"grep -hE '^ *[0-9]+: [0-9A-F]+:{PORT:04X} [0-9A-F]+:[0-9A-F]+ 06 ' /proc/net/tcp /proc/net/tcp6"
_STREAMS = 4


class Production(StrEnum):
    """How the unit in whose place something is measured came to be."""

    DEPLOYED = "deployed by tunerd"
    BARE = "hand-written, without Restart="
    QUICK = "hand-written, Restart=on-failure with systemd's own limits"
    PATIENT = "hand-written, Restart=always every 3 s"


_RESTARTS = {
    Production.BARE: "",
    Production.QUICK: "Restart=on-failure\n",
    Production.PATIENT: "Restart=always\nRestartSec=3\n",
}


class End(StrEnum):
    """How the measurement ends."""

    DONE = "it is done"
    COMMAND = "SIGKILL of the command"
    CANDIDATE = "SIGKILL of the candidate"
    LEASE = "SIGKILL of the lease"
    START = "somebody starts production"
    TIME_OUT = "time out"


_SCRIPTS = {
    End.COMMAND: KILL_MEASURE,
    End.CANDIDATE: kill_each("tunerd-candidate-*"),
    End.LEASE: kill_each("tunerd-lease-*"),
    End.START: f"systemctl start --no-block {UNIT}",
}


class PortVictim:
    """A machine on which mainline serves as one kind of production."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        profiles = {
            "production": profile(MAINLINE, serving__alias="production"),
            "ik": profile(IK, serving__alias="ik"),
        }
        self.tunerd = Deployment(
            machine, settings=SETTINGS, profiles=profiles, settle_s=0.1, start_limit_s=120.0
        )

    def serve(self, production: Production) -> None:
        """Put it there, whatever stood before, once the kernel has forgotten the connections of the last case."""
        self.machine.systemctl("stop", UNIT, check=False)
        self.machine.sh(f"while {_ENDED} | grep -q .; do sleep 0.5; done", limit_s=_PATIENCE_S)
        if production is Production.DEPLOYED:
            self.tunerd("apply", "production", "--yes")
            return
        self.tunerd.write_unit(
            "[Service]\n"
            f"ExecStart=/srv/engines/{MAINLINE} -m {MODEL} --host 127.0.0.1 --port {PORT} "
            f"-a production -c 1024 -t 1 -np 1\n{_RESTARTS[production]}"
            "[Install]\nWantedBy=multi-user.target\n"
        )
        self.machine.systemctl("enable", UNIT)
        self.machine.systemctl("reset-failed", UNIT, check=False)
        self.machine.systemctl("start", UNIT)
        until_it_answers(self.machine, "production", limit_s=_PATIENCE_S)

    def befall(self, end: End) -> tuple[int, str]:
        """Measure ik with streams, let the measurement end so, and wait for production.

        Returns how many ended connections the kernel kept the port of at the end, and what was seen.
        """
        rounds = 1 if end in {End.DONE, End.CANDIDATE} else 1000
        budget_s = 12.0 if end is End.TIME_OUT else 600.0
        words = ("ik", f"--rounds={rounds}", f"--budget={budget_s}", "--requests=20")
        process = start_measuring(self.machine, *words)
        assert process.stdout is not None
        assert any(line.startswith(b"serving") for line in process.stdout), "no candidate serves"
        body = '{"prompt": "please go on with code", "n_predict": 16, "stream": true}'
        stream = f"curl -sfN http://127.0.0.1:{PORT}/completion -d '{body}' > /dev/null"
        for _ in range(_STREAMS):
            self.machine.sh(stream, check=False)
        time_waits = int(self.machine.sh(f"{_ENDED} | wc -l").stdout)
        if end in _SCRIPTS:
            self.machine.sh(_SCRIPTS[end])
        else:
            process.wait(timeout=_PATIENCE_S)
        began_s = time.monotonic()
        until_it_answers(self.machine, "production", limit_s=_PATIENCE_S)
        away_s = time.monotonic() - began_s
        return time_waits, f"{time_waits} left, away for {away_s:.1f} s: {rest_of(process)}"


pytestmark = pytest.mark.engine
BARE = Production.BARE


@pytest.mark.timeout(TIMEOUT_S)
def test_a_unit_is_back_once_its_port_is_free_however_the_measurement_ends(
    machine: Machine,
) -> None:
    for name in (MAINLINE, IK):
        needs.engine(name)
    victim = PortVictim(machine)
    for production, end in faults([(BARE, End.COMMAND)], itertools.product(Production, End)):
        victim.serve(production)

        time_waits, seen = victim.befall(end)

        print(production, end, seen)
        assert time_waits > 0, "nothing was left on the port"
        if (production, end) == (BARE, End.COMMAND):
            assert machine.show(UNIT, "NRestarts") == "0", "its first start found the port free"
        assert machine.show(UNIT, "Result") == "success"
        left = machine.sh("ls -d /run/tunerd-lease-*", check=False).stdout
        assert left == "", "the lease's folder is gone with it"
