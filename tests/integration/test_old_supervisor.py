"""A supervisor that an older tunerd started: what it lacks is told, and how to change it in safety."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import free_port
from tests.support.supervised import supervisor_pid, wait_until_gone
from tests.support.sweep_box import SweepBox, swept
from tunerd.actions.context import build_context
from tunerd.core.lease import LeaseSpec
from tunerd.system.local import Local
from tunerd.system.local_lease import LocalLease

OLD = Path(__file__).parents[1] / "support" / "old_supervisor.py"


@pytest.fixture
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found


def with_a_lease_that_ends(manager: Local) -> None:
    """What it cannot be asked for must not keep the lease from its end."""
    spec = LeaseSpec(id="a", production="llama-server.service", restores=True, limit_s=1.0,
                     why="a test")  # fmt: skip
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        LocalLease(spec, manager, ours).restore_when_free(("127.0.0.1", 1))


def test_a_supervisor_without_leases_is_named_with_the_way_out_which_works(box: SweepBox) -> None:
    context = build_context(environment=box.box.environment, start_supervisor=True)
    real = supervisor_pid(context.paths)
    assert real is not None
    manager = Local(context.paths, may_start=True, environment=box.box.environment)
    before = manager.state(context.unit).main_pid
    assert before is not None
    lacks = ("lease", "restore-when-free")
    command = [sys.executable, str(OLD), str(context.paths.runtime_dir), *lacks]
    old = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert old.stdout is not None
        assert old.stdout.readline() == "ready\n"
        done = box.call("bench", "night", "--yes", "--json", code=1)
        assert box.serves
        with_a_lease_that_ends(manager)
    finally:
        old.kill()
        old.communicate()

    error = json.loads(done.stdout)["error"]
    assert error["code"] == "old_supervisor"
    assert error["state"] == "nothing was touched"
    assert "`lease`" in error["cause"]
    way_out = re.search(r"`kill -9 (\d+)`", error["hint"])
    assert way_out is not None
    assert int(way_out[1]) == old.pid, "whoever listens is the one to end"

    # The stand-in is ended; what stands for it behind must be too.
    os.kill(real, signal.SIGKILL)
    wait_until_gone(real)
    assert box.serves, "what it served goes on"
    manager.ensure_supervisor()
    assert manager.state(context.unit).main_pid == before, "it was taken over as it is"
    found = box.json("bench", "night", "--suite", "cache", "--repeats", "1", "--yes",
                     "--set", "serving.metrics=false")  # fmt: skip
    assert found["samples"]
    assert supervisor_pid(context.paths) not in {None, real}
    assert box.serves
