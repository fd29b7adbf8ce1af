"""What may befall a night."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from enum import StrEnum

import pytest

from tests.e2e.conftest import Machines
from tests.fault.campaign import IS_CAMPAIGN, TIMEOUT_S, chance, faults
from tests.fault.victim import kill_each, kill_main
from tests.support.deployment import UNIT, place_units
from tests.support.night import JOBS, Night, begin_night, candidates, is_night, newest_job
from tests.support.overlay import Root
from tests.support.sweep_box import SPEED

DAEMON = "tunerd.service"
# From the lease on, candidate after candidate; or, now and then, from right after the unit's start.
_SPAN_S = (0.0, 5.0)
_EARLY = 0.2
_GOES_ON_S = 3.0
_PATIENCE_S = 90.0


class SweepFault(StrEnum):
    """What happens in the middle."""

    SWEEP = "SIGKILL of the sweep"
    LEASE = "SIGKILL of the lease"
    CANDIDATE = "SIGKILL of the candidate"
    DAEMON = "SIGKILL of the daemon"
    STOP = "tunerd sweep stop"
    START = "somebody starts production"
    POWEROFF = "orderly power off"
    CUT = "power cut"
    DEAF = "candidates that ignore SIGTERM"
    CHILDREN = "candidates that leave children"


# What must be there for it to befall.
_CANDIDATE, _BETWEEN = "with a candidate", "between candidates"
_BEFORE, _OVER = "before the lease", "over"
_NEEDS = {
    SweepFault.LEASE: {_CANDIDATE, _BETWEEN},
    SweepFault.START: {_CANDIDATE, _BETWEEN},
    SweepFault.CANDIDATE: {_CANDIDATE},
    SweepFault.DEAF: {_CANDIDATE},
    SweepFault.CHILDREN: {_CANDIDATE},
}
GOES_ON = (SweepFault.CANDIDATE, SweepFault.DAEMON)
_SCRIPTS = {
    SweepFault.SWEEP: kill_each(JOBS),
    SweepFault.LEASE: kill_each("tunerd-lease-*"),
    SweepFault.CANDIDATE: kill_each("tunerd-candidate-*"),
    SweepFault.DAEMON: kill_main(DAEMON),
    SweepFault.START: f"systemctl start {UNIT}",
}
_BEHAVIOURS = {
    SweepFault.DEAF: {"ignore_sigterm": True},
    SweepFault.CHILDREN: {"leave_child": True},
}


@dataclass
class SweepVictim:
    """The night of `tests.support.night`, with the daemon beside it."""

    night: Night

    def __post_init__(self) -> None:
        place_units(self.night.machine, DAEMON)
        self.night.machine.systemctl("enable", "--now", DAEMON)
        self._last = SweepFault.SWEEP

    def befall(self, fault: SweepFault, rng: random.Random) -> tuple[str, float]:
        """Sweep, let it happen at a random moment; how far it was, and how long production was awaited [s]."""
        night, machine = self.night, self.night.machine
        self._behave(fault)
        # One that knows what earlier ones measured would be over before anything could befall it.
        machine.sh(f"rm -f {night.box.state}/evidence.db*")
        begin_night(night.box)
        if rng.random() >= _EARLY:
            night.until(lambda: self._phase() != _BEFORE, "there is a lease")
        time.sleep(rng.uniform(*_SPAN_S))
        if fault in _NEEDS:
            wanted = {_OVER, *_NEEDS[fault]}
            night.until(lambda: self._phase() in wanted, "there is what it befalls")
        phase = self._phase()
        if fault in {SweepFault.CUT, SweepFault.POWEROFF}:
            if fault is SweepFault.CUT:
                machine.power_cut()
            else:
                machine.poweroff()
            machine.boot()
        elif fault in _SCRIPTS:
            machine.sh(_SCRIPTS[fault])
            if fault in GOES_ON:
                self._see_it_go_on(phase)
                self._stop()
        else:
            self._stop()
        awaited_s = night.until(lambda: night.serves, "production serves", _PATIENCE_S)
        return phase, awaited_s

    def _servers(self) -> str:
        count = "pgrep -fc '[f]ake_llama_server'"
        return self.night.machine.sh(count, check=False).stdout.strip()

    def _behave(self, fault: SweepFault) -> None:
        if fault is self._last:
            return
        # Of the arms that differ from what serves, so that production ends as it should.
        more = _BEHAVIOURS.get(fault, {})
        rules = [
            {"when": when, "set": more} for when in ({"speculative": "off"}, {"n_max": "2"}) if more
        ]
        self.night.box.behave("fake", **SPEED, rules=rules)
        self._last = fault

    def _phase(self) -> str:
        if not is_night(self.night.box):
            return _OVER
        found = candidates(self.night.box)
        if "tunerd-candidate" in found:
            return _CANDIDATE
        return _BETWEEN if "tunerd-lease" in found else _BEFORE

    def _see_it_go_on(self, phase: str) -> None:
        """The sweep's own process goes on, whatever else died."""
        if phase == _OVER:
            return
        end_s = time.monotonic() + _GOES_ON_S
        while time.monotonic() < end_s and is_night(self.night.box):
            time.sleep(0.2)
        assert newest_job(self.night.box)["state"] in {"running", "done"}, "the sweep died with it"

    def _stop(self) -> None:
        """End the sweep as a person does; when that returns, production is back."""
        done = self.night.box("sweep", "stop", expect=None)
        assert done.code in {0, 2}, done
        if done.code == 0:
            assert not candidates(self.night.box), "stop returned before its candidates were gone"

    def check(self) -> None:
        """Production serves a real generation, as deployed; nothing of the sweep is left."""
        night, machine = self.night, self.night.machine
        night.until(lambda: not is_night(night.box), "the sweep's unit is down")

        def is_recovered() -> bool:  # the daemon may be at it, and then this call is refused
            said = night.box("recover", expect=None)
            assert said.code in {0, 75}, said
            return said.code == 0

        night.until(is_recovered, "recovery")
        night.box.generate()
        night.box("verify")
        left = machine.sh(
            "ls -d /run/systemd/system/tunerd-candidate* /run/systemd/system/tunerd-lease*"
            " /run/tunerd/measurement.json", check=False,
        )  # fmt: skip
        assert left.stdout == "", f"left over: {left.stdout}"
        assert candidates(night.box) == ""
        # The daemon may ask a build for its help at this moment.
        night.until(lambda: self._servers() == "1", "production alone runs", limit_s=90.0)
        assert machine.sh("pgrep -f '[s]leep infinity'", check=False).stdout == ""
        night.until(lambda: night.box.show("ActiveState", DAEMON) == "active", "the daemon is up")


@pytest.mark.timeout(TIMEOUT_S)
def test_production_serves_whole_again_whatever_befalls_a_night(
    machines: Machines, any_root: Root
) -> None:
    machine = machines(any_root, disk_mib=768 if IS_CAMPAIGN else None)
    victim = SweepVictim(Night(machine, sweep="budget_s = 300.0"))
    machine.sh("sync")
    rng = chance(11)
    for fault in faults([SweepFault.LEASE], SweepFault):
        print(fault, victim.befall(fault, rng))
        victim.check()
