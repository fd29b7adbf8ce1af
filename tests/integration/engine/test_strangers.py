"""A listener of another account in the server's place: it is not asked, and is told no key."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.fault.scenarios import deploy
from tests.fault.world import ENGINE, UNIT, a_world
from tests.support import forked
from tests.support.fakes import Life
from tests.support.folders import open_folder
from tests.support.ports import free_port
from tunerd.engine.health import HttpState
from tunerd.engine.server import Address, LlamaServer
from tunerd.engine.serving import read_live_unit
from tunerd.errors import RolledBack
from tunerd.machine.clock import SystemClock
from tunerd.machine.host import listening_programs
from tunerd.machine.net import listening_ports, own_host
from tunerd.production.plan import check_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not root, so it cannot become others")
LIMIT_S = 10.0
NOBODY = 65534
OF_THIS_TEST = 100_000 + os.getpid()
"""An account that nobody else has a server of."""
# Answers like a server that is ready, and prints what it was asked.
STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
listener = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print("listens", flush=True)
while True:
    client, _ = listener.accept()
    print(client.recv(65536), flush=True)
    client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 15\\r\\n\\r\\n{"status":"ok"}')
    client.close()
"""
# The server of the unit: it has an account of its own, and never listens.
SERVER = "import os, time; os.setuid(12345); print('runs', flush=True); time.sleep(60)"


running = partial(forked.running, sys.executable, "-c")


@contextmanager
def without_rights() -> Iterator[None]:
    """As an account that may look into nobody's processes."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("bound", "named"), [("127.0.0.1", "127.0.0.1"), ("::1", "localhost"), ("::1", "127.0.0.1")]
)
def test_a_stranger_in_the_servers_place_is_not_asked(bound: str, named: str) -> None:
    port = free_port()
    with running(SERVER) as server, running(STRANGER, bound, str(port), str(NOBODY)) as stranger:
        address = Address(named, port, "secret", pid=server.pid)
        asked = LlamaServer(address, SystemClock())

        assert asked.health(timeout_s=LIMIT_S) is HttpState.REFUSED
        assert asked.slots(timeout_s=LIMIT_S) is None
        assert asked.complete("x", n_predict=1, timeout_s=LIMIT_S).problem
        assert asked.stream("/completion", {}, timeout_s=LIMIT_S).problem
        assert stranger.log_tail().strip() == "listens"


def test_the_server_itself_is_asked_where_it_listens_and_not_where_its_name_leads() -> None:
    port = free_port()
    with (
        running(STRANGER, "::1", str(port), str(NOBODY)) as stranger,
        running(STRANGER, "127.0.0.1", str(port), "12345") as server,
    ):
        address = Address("localhost", port, "secret", pid=server.pid)
        asked = LlamaServer(address, SystemClock())

        assert asked.health(timeout_s=LIMIT_S) is HttpState.READY
        assert asked.get("/slots", timeout_s=LIMIT_S).status == 200
        assert stranger.log_tail().strip() == "listens"
        told = server.log_tail()
        assert told.count("Bearer secret") == 1, "health is asked without it"


def test_the_only_port_of_an_account_is_that_of_its_server_where_nobody_may_look() -> None:
    port, account = free_port(), str(OF_THIS_TEST)
    with running(STRANGER, "127.0.0.1", str(port), account) as server:
        with without_rights():
            assert listening_ports(server.pid) == frozenset({port})
        with running(STRANGER, "127.0.0.1", "0", account), without_rights():
            assert listening_ports(server.pid) is None, "nobody can say which"


def test_a_plan_takes_the_server_into_which_nobody_may_look_for_no_stranger() -> None:
    with open_folder() as folder, a_world(folder) as world, running(SERVER) as silent:
        world.manager.programs[ENGINE] = lambda _: Life()
        with running(STRANGER, "127.0.0.1", str(world.port), str(OF_THIS_TEST)) as server:
            ctx = world.context()
            world.manager.pid = server.pid
            world.put(world.text("own"))
            serving = read_live_unit(ctx).serving
            with without_rights():
                assert check_port(ctx, serving, ctx.services.state(UNIT)) == []
            world.manager.pid = silent.pid
            world.manager.reset_failed(UNIT)
            world.manager.restart(UNIT)
            with without_rights():
                assert [one.code for one in check_port(ctx, serving, ctx.services.state(UNIT))] == [
                    "port-taken"
                ]


def test_a_swap_asks_no_stranger_in_the_place_of_a_server_that_binds_nothing() -> None:
    with (
        open_folder() as folder,
        a_world(folder) as world,
        running(SERVER) as silent,
        running(STRANGER, "127.0.0.1", str(world.port), str(NOBODY)) as stranger,
    ):
        world.manager.programs[ENGINE] = lambda _: Life()
        world.manager.pid = silent.pid
        with pytest.raises(RolledBack):
            deploy(world.context(), world, "new")
        assert stranger.log_tail().strip() == "listens", "it was not asked at all"
        assert world.standing is None


SCRIPT = "import subprocess, sys; subprocess.call([sys.executable, '-c', *sys.argv[1:]])"


def test_a_script_that_starts_the_server_as_another_account_is_no_stranger() -> None:
    port = free_port()
    with running(SCRIPT, STRANGER, "127.0.0.1", str(port), "12345") as unit:
        assert own_host(unit.pid, port) == "127.0.0.1"
        assert list(listening_programs(unit.pid, 0)) == [], "nor does it say what the unit serves"


def test_what_becomes_another_account_does_not_say_what_the_unit_serves() -> None:
    with running(STRANGER, "127.0.0.1", str(free_port()), "12345") as unit:
        assert list(listening_programs(unit.pid, 12345)) != []
        assert list(listening_programs(unit.pid, 0)) == []


def test_a_server_that_a_script_starts_as_itself_says_what_the_unit_serves() -> None:
    with running(SCRIPT, STRANGER, "127.0.0.1", str(free_port()), "0") as unit:
        ((_program, words, _folder, _variables),) = listening_programs(unit.pid, os.getuid())
        assert words[2] == STRANGER
