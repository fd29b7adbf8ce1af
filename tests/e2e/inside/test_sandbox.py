"""What a program in a unit of its own sees and how its end is told, with the systemd of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.supervised import processes_with
from tunerd.errors import HostError
from tunerd.machine.process import Completed, User, account
from tunerd.paths import paths_for
from tunerd.units.sandbox import Sandbox
from tunerd.units.systemd import Systemd
from tunerd.words import Mode

FOLDER = Path("/srv/sandbox")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "ODD": 'a $HOME %n %% "q" \\ $$'}


@pytest.fixture
def sandbox() -> Sandbox:
    FOLDER.mkdir(exist_ok=True)
    FOLDER.chmod(0o755)
    return Sandbox(
        account("llama-server"), Systemd(Mode.SYSTEM, paths_for(Mode.SYSTEM, os.environ))
    )


def run(sandbox: Sandbox, *argv: str, timeout_s: float = 30.0) -> Completed:
    limits = {"NOFILE": 99}
    return sandbox.run(
        argv, env=ENVIRONMENT, limits=limits, timeout_s=timeout_s, max_output_bytes=100_000
    )


def test_words_variables_and_limits_arrive_as_they_are(sandbox: Sandbox) -> None:
    words = ("a b", "$HOME", "${HOME}", "$$", "%n", 'q"q', "back\\slash", "", ";")
    done = run(sandbox, "/bin/sh", "-c", 'printf "%s|" "$@" "$ODD"; ulimit -n', "sh", *words)

    assert done.stdout == "|".join((*words, ENVIRONMENT["ODD"], "99\n"))
    assert (done.returncode, done.stderr, done.argv[0]) == (0, "", "/bin/sh")


def test_how_it_ended_is_told(sandbox: Sandbox) -> None:
    assert run(sandbox, "/bin/sh", "-c", "echo out; echo err >&2; exit 7").returncode == 7
    assert run(sandbox, "/bin/sh", "-c", "kill -SEGV $$").returncode is None
    late = run(sandbox, "/bin/sh", "-c", "setsid sleep 4712 & sleep 4712", timeout_s=1.0)
    assert late.timed_out
    assert processes_with("sleep\0004712") == set(), "its unit is stopped"


@pytest.mark.parametrize("interpreter", ["/nonexistent", "/bin"])
def test_what_cannot_be_executed_is_an_error(sandbox: Sandbox, interpreter: str) -> None:
    program = FOLDER / "program"
    program.write_text(f"#!{interpreter}\n")
    program.chmod(0o755)

    with pytest.raises(HostError, match="cannot run"):
        run(sandbox, str(program))
    with pytest.raises(HostError, match="cannot run"):
        run(sandbox, "/nonexistent/program")


def test_only_where_no_other_account_can_reach_it_the_servers_is_taken(sandbox: Sandbox) -> None:
    server = sandbox.account
    assert server is not None
    program = FOLDER / "id"
    program.write_text("#!/bin/sh\nid -u; id -G\n")
    program.chmod(0o755)
    uid, groups = run(sandbox, str(program)).stdout.split("\n")[:2]
    assert uid not in {"0", str(server.uid)}
    assert str(server.gid) not in groups.split()

    lent = Sandbox(User(server.uid, server.gid, (server.gid, 44), server.name), sandbox.manager)
    assert "44" in run(lent, str(program)).stdout.split()

    os.chown(program, server.uid, server.gid, follow_symlinks=False)
    program.chmod(0o700)
    assert run(sandbox, str(program)).stdout.startswith(f"{server.uid}\n")
