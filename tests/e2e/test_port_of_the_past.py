"""ik_llama.cpp is measured in mainline's place on one port, which it leaves taken for a minute.

The kernel remembers for a minute connections that a server closed, and a build with other socket
options cannot bind their port until then. See docs/reliability.md. How leases end otherwise is in
their contract, with a port that stays taken for one whose time is over.
"""

from __future__ import annotations

import pytest

from tests.fault.campaign import TIMEOUT_S, faults
from tests.fault.victim import KILL_MEASURE, start_measuring
from tests.support import needs
from tests.support.deployment import MODEL, UNIT, Deployment, profile
from tests.support.machine import Machine

pytestmark = pytest.mark.engine

PORT = 8080
MAINLINE, IK = "mainline-2026-08-18", "ik-2026-08"
SETTINGS = "".join(f'[engines.{name}]\npath = "/srv/engines/{name}"\n' for name in (MAINLINE, IK))
PRODUCTION = f"""
[Service]
ExecStart=/srv/engines/{MAINLINE} -m {MODEL} --host 127.0.0.1 --port {PORT} -a production -c 1024 -t 1 -np 1
[Install]
WantedBy=multi-user.target
"""
STREAM = f"""curl -sfN http://127.0.0.1:{PORT}/completion > /dev/null \\
    -d '{{"prompt": "please go on with code", "n_predict": 16, "stream": true}}'"""
ENDED = f"grep -hE '^ *[0-9]+: [0-9A-F]+:{PORT:04X} [0-9A-F]+:[0-9A-F]+ 06 ' /proc/net/tcp /proc/net/tcp6"
ANSWERS = f"""until curl -sf http://127.0.0.1:{PORT}/v1/models | grep -q '"production"'; do sleep 0.2; done"""
_PATIENCE_S = 150.0


@pytest.mark.timeout(TIMEOUT_S)
def test_a_unit_is_back_once_its_port_is_free_though_nothing_restarts_it(
    host_machine: Machine,
) -> None:
    for name in (MAINLINE, IK):
        needs.engine(name)
    machine = host_machine
    tunerd = Deployment(
        machine, settings=SETTINGS, profiles={"ik": profile(IK, serving__alias="ik")},
        settle_s=0.1, start_limit_s=120.0,
    )  # fmt: skip
    tunerd.write_unit(PRODUCTION)
    machine.systemctl("enable", UNIT)
    for _ in faults(["SIGKILL of the command"]):
        machine.sh(f"while {ENDED} | grep -q .; do sleep 0.5; done", limit_s=_PATIENCE_S)
        machine.systemctl("restart", UNIT)
        machine.sh(ANSWERS, limit_s=_PATIENCE_S)
        process = start_measuring(machine, "ik", "--requests", "20")
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith(b"serving"):
            assert line, "the candidate does not serve"
        for _ in range(4):
            machine.sh(STREAM, check=False)
        assert int(machine.sh(f"{ENDED} | wc -l").stdout) > 0, "nothing was left on the port"

        machine.sh(KILL_MEASURE)
        machine.sh(ANSWERS, limit_s=_PATIENCE_S)

        _, err = process.communicate(timeout=_PATIENCE_S)
        assert b"Traceback" not in err, err.decode()
        assert machine.show(UNIT, "NRestarts") == "0", "its first start found the port free"
        assert machine.show(UNIT, "Result") == "success"
        left = machine.sh("ls -d /run/tunerd-lease-*", check=False).stdout
        assert left == "", "the lease's folder is gone with it"
