"""Another version put in the place of one that measures and watches: the newer over 0.1, and the way back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import ROOTS, Machines
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.places import VARIABLE, Place, places
from tests.support.roots import (
    EARLIER_INSIDE,
    EARLIER_PIP,
    NOT_COMPILED,
    OFFLINE_PIP,
    SOURCES_INSIDE,
    Tunerd,
    with_earlier,
)

pytestmark = pytest.mark.timeout(2700)

# The last state that wrote version 3 of the store: 0.1, for whoever comes back to it.
EARLIER = "a1ad5a5b5fd54eed4d07bceee2fd7f3936ea367c"
SETTINGS = '[service]\nsettle_s = 0.3\ndrain_s = 0.0\n[models]\ndirs = ["/srv/models"]\n'
PROFILE = 'extends = "cpu-embedded-baseline"\nmodel.path = "/srv/models/tiny.gguf"\n'
_LIMIT_S = 180.0


@dataclass
class Box:
    """A machine on which root or a user installs versions."""

    machine: Machine
    user: str | None

    def sh(self, script: str) -> str:
        return self.machine.sh(script, user=self.user, limit_s=_LIMIT_S).stdout

    def tunerd(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        program = "tunerd" if self.user is None else f"/home/{self.user}/.local/bin/tunerd"
        return self.machine.run(program, *words, user=self.user, check=check, limit_s=_LIMIT_S)

    def json(self, *words: str) -> Any:
        return json.loads(self.tunerd(*words, "--json").stdout)

    def install(self, *words: str, earlier: bool = False) -> str:
        folder, pip = (EARLIER_INSIDE, EARLIER_PIP) if earlier else (SOURCES_INSIDE, OFFLINE_PIP)
        mode = "--system" if self.user is None else "--user"
        done = self.machine.run(
            folder / "install.sh",
            mode,
            *words,
            user=self.user,
            env=pip | NOT_COMPILED,
            limit_s=400.0,
        )
        return done.stderr

    def deploys(self, context: int) -> None:
        """A new server, on probation."""
        self.tunerd("apply", "plain", "--set", f"serving.ctx_size={context}", "--yes")

    def has_a_night(self) -> None:
        """A night as 0.1 began it, by its own unit, has a candidate in production's place; its owner has a timer for it."""
        folder = "/etc/systemd/" + ("system" if self.user is None else "user")
        self.machine.write(f"{folder}/tunerd-sweep.timer", "[Timer]\nOnCalendar=yearly\n")
        self.machine.systemctl("daemon-reload", user=self.user)
        for unit in ("tunerd-sweep.timer", "tunerd-sweep.service"):
            self.machine.systemctl("start", unit, user=self.user)
        self._until_a_candidate()

    def is_busy(self) -> subprocess.Popen[bytes]:
        """A new server is on probation, and a sweep has a candidate in production's place."""
        program = "tunerd" if self.user is None else f"/home/{self.user}/.local/bin/tunerd"
        words = (program, "sweep", "run", "--budget", "10m", "--yes")
        sweep = self.machine.start(*words, user=self.user)
        self._until_a_candidate()
        return sweep

    def _until_a_candidate(self) -> None:
        manager = "systemctl" if self.user is None else "systemctl --user"
        self.sh(f"until {manager} is-active -q 'tunerd-candidate-*'; do sleep 0.2; done")

    def serves(self, context: int) -> None:
        """Production and daemon are well, nothing of a measurement is left, and this is what serves."""
        self.sh("until curl -sf http://127.0.0.1:8080/health; do sleep 0.2; done")
        asked = "curl -sf http://127.0.0.1:8080/props"
        props = json.loads(self.sh(asked))
        assert props["default_generation_settings"]["n_ctx"] == context
        for unit in ("llama-server.service", "tunerd.service"):
            assert self.machine.systemctl("is-active", unit, user=self.user) == "active"
        words = ("list-units", "--plain", "--no-legend", "tunerd-candidate-*", "tunerd-lease-*")
        assert self.machine.systemctl(*words, user=self.user) == ""
        assert self.json("status")["healthy"] is True


@pytest.fixture(params=places(), ids=str)
def box(request: pytest.FixtureRequest, machines: Machines, build_root: Callable[..., Root]) -> Box:
    """0.1 is installed and has deployed two servers."""
    place: Place = request.param
    bare = build_root(ROOTS[place.root], tunerd=Tunerd.BARE)
    found = Box(machines(build_root(with_earlier, bare=bare, revision=EARLIER)), place.user)
    config = "/etc/tunerd" if place.user is None else f"/home/{place.user}/.config/tunerd"
    found.install(earlier=True)
    found.machine.write(f"{config}/tunerd.toml", SETTINGS)
    found.machine.write(f"{config}/profiles/plain.toml", PROFILE)
    found.deploys(1024)
    found.deploys(512)
    return found


def test_versions_replace_each_other_while_something_is_measured_and_watched(box: Box) -> None:
    box.has_a_night()
    assert "tunerd-sweep.timer starts tunerd-sweep.service, which is gone" in box.install()
    box.serves(512)
    assert box.machine.show("tunerd-sweep.service", "LoadState", user=box.user) == "not-found"
    sweep = box.is_busy()
    assert "tunerd-sweep" not in box.install()
    sweep.wait(timeout=240)
    box.serves(512)
    assert len(box.json("history")["generations"]) == 2
    assert len(box.json("sweep", "list")["sweeps"]) == 2
    box.tunerd("rollback", "--yes")
    box.serves(1024)
    if VARIABLE not in os.environ:
        return  # CI has no time for the way back

    box.deploys(768)
    sweep = box.is_busy()
    box.install(
        earlier=True
    )  # whose install.sh knows no sweeps: this one goes on until somebody ends it
    box.sh("pkill -INT --full '[t]unerd sweep run' || true")
    sweep.wait(timeout=240)
    box.serves(768)
    refused = box.tunerd("results", "list", check=False)
    assert refused.returncode != 0
    assert "newer" in refused.stderr
    box.tunerd("rollback", "--yes")
    box.serves(1024)


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"of a campaign: {VARIABLE}=host,trixie")
def test_a_version_that_is_uninstalled_while_busy_leaves_the_one_before_its_place(box: Box) -> None:
    box.install()
    box.deploys(768)
    sweep = box.is_busy()
    box.install("--uninstall")
    assert sweep.wait(timeout=240) != 0
    box.sh("until curl -sf http://127.0.0.1:8080/health; do sleep 0.2; done")
    box.install(earlier=True)
    box.serves(768)
    box.tunerd("rollback", "--yes")
    box.serves(512)
