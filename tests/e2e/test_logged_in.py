"""A user whose units end with the last session: what is said then, and what a shell of its own changes."""

from __future__ import annotations

import re

import pytest

from tests.support.deployment import MODEL, Deployment, profile
from tests.support.machine import Machine

BY_HAND = f"""\
[Service]
ExecStart=/usr/bin/llama-server -m {MODEL} --alias mine -c 1024 -np 1 -t 1 --port 8080
[Install]
WantedBy=default.target
"""
USER = "bob"


@pytest.fixture
def tunerd(sid_machine: Machine) -> Deployment:
    """bob has a session, serves by a unit of his own, and does not linger."""
    sid_machine.start("su", "--login", USER, "--command", "exec sleep 86399")
    sid_machine.sh(f"until [ -S /run/user/$(id -u {USER})/systemd/private ]; do sleep 0.1; done")
    profiles = {"plain": profile("/usr/bin/llama-server", serving__alias="plain")}
    made = Deployment(sid_machine, user=USER, profiles=profiles)
    made.write_unit(BY_HAND)
    made.systemctl("enable", "--now", "llama-server")
    made.until(lambda: made.alias() == "mine", "it serves")
    return made


def test_what_ends_with_a_session_is_said_with_commands_for_the_users_manager(
    tunerd: Deployment,
) -> None:
    said = f"{tunerd('status')} {tunerd('plan', 'plain')}"
    assert "starts when you log in" in said
    assert "systemctl --user edit llama-server.service" in said
    assert not re.search(r"(systemctl|journalctl) (?!--user)", said)
    assert (
        "your units end when you log out"
        in tunerd("schedule", "set", "--window", "01:00-06:30", "--on").err
    )
    assert "no-linger" in {one["code"] for one in tunerd.json("doctor", expect=6)["findings"]}


@pytest.mark.parametrize(
    ("variable", "why", "written"),
    [
        # Its swap was in a state of its own, under another lock, and the daemon neither watched nor mended it.
        ("XDG_STATE_HOME", f"`/home/{USER}/.local/state/tunerd`", "tunerd/generations"),
        ("XDG_CONFIG_HOME", "does not read the units in", "systemd/user"),
    ],
)
def test_a_shell_whose_folders_are_others_than_those_of_the_manager_and_the_daemon_deploys_nothing(
    tunerd: Deployment, variable: str, why: str, written: str
) -> None:
    own = f"/home/{USER}/own"
    tunerd("apply", "plain", "--yes")
    tunerd.machine.sh(f"mkdir {own}; cp -r ~{USER}/.config/tunerd {own}; chown -R {USER}: {own}")
    before = tunerd.show("InvocationID", "llama-server.service")

    refused = tunerd(
        "apply", "plain", "--yes", "--set", "serving.ctx_size=2048", expect=1, env={variable: own}
    )

    assert why in refused.err
    assert variable in refused.err
    assert tunerd.machine.files(f"{own}/{written}") == []
    assert tunerd.show("InvocationID", "llama-server.service") == before
