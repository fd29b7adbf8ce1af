"""What befalls a measurement on a machine without systemd, where tunerd's supervisor holds the lease."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.support.local_box import Box, deployed
from tests.support.supervised import processes_with, supervisor_pid
from tunerd.machine.net import free_port
from tunerd.tryout.local import Local
from tunerd.units.manager import is_candidate

# From right before the lease until the second or third candidate.
_SPAN_S = (0.0, 4.0)
_PATIENCE_S = 60.0
_PROFILE = """extends = "cpu-embedded"
model.path = "{model}"
serving.port = {port}
serving.alias = "measured"
serving.threads = 1
serving.threads_batch = 1
serving.ctx_size = 512
speculation.type = "off"
"""


class LocalFault(StrEnum):
    """Who is killed."""

    COMMAND = "SIGKILL of the command"
    SUPERVISOR = "SIGKILL of the supervisor"
    BOTH = "SIGKILL of command and supervisor"
    CANDIDATE = "SIGKILL of the candidate"
    TIME_OUT = "time out"


@dataclass
class LocalVictim:
    """A box on which `measured` is measured in the place of what was deployed."""

    box: Box

    def befall(self, fault: LocalFault, rng: random.Random) -> str:
        """Measure, let it happen at a random moment, and wait for the end; how far it had come."""
        budget_s = rng.uniform(1.0, 4.0) if fault is LocalFault.TIME_OUT else 600.0
        rounds = 2 if fault is LocalFault.CANDIDATE else 1000
        words = ["measured", "--rounds", str(rounds), "--budget", f"{budget_s:.2f}"]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.fault.measure", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.box.environment,
        ) as command:
            assert command.stdout is not None
            assert command.stdout.readline() == b"planned\n"
            if fault is not LocalFault.TIME_OUT:
                time.sleep(rng.uniform(*_SPAN_S))
            self._strike(fault, command)
            return self._rest(command)

    def _strike(self, fault: LocalFault, command: subprocess.Popen[bytes]) -> None:
        supervisor = supervisor_pid(self.box.context.paths)
        assert supervisor is not None
        if fault in {LocalFault.SUPERVISOR, LocalFault.BOTH}:
            os.kill(supervisor, signal.SIGKILL)
        if fault in {LocalFault.COMMAND, LocalFault.BOTH}:
            command.kill()
        if fault is LocalFault.CANDIDATE:
            for pid in self._candidates():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _candidates(self) -> set[int]:
        """Servers of this box with the measured name."""
        return processes_with("--alias\0measured") & processes_with(str(self.box.folder))

    def _rest(self, command: subprocess.Popen[bytes]) -> str:
        """What came before there was a lease changed nothing: then Ctrl-C ends the command."""
        try:
            out, err = command.communicate(timeout=15.0)
        except subprocess.TimeoutExpired:
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=_PATIENCE_S)
        assert b"Traceback" not in err, err.decode()
        words = out.decode().split()
        if "held" not in words:
            return "before it began"
        if "back" in words:
            return "a candidate fell" if "fault" in words else "after its end"
        return "while it ran"

    def check(self) -> None:
        """Production serves as deployed, alone; the next call of tunerd has seen to the rest."""
        done = self.box.call("recover")
        assert done.returncode == 0, done.stderr
        end_s = time.monotonic() + _PATIENCE_S
        while '"healthy": true' not in self.box.call("status", "--json").stdout:
            assert time.monotonic() < end_s, "production is not back"
        verified = self.box.call("verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert "measured" not in self.box.call("status").stdout
        stray = self._candidates()
        told = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in stray]
        assert stray == set(), f"stray candidates: {told}"
        paths = self.box.context.paths
        left = [unit for unit in Local(paths).service_units() if is_candidate(unit)]
        assert left == [], left
        assert not paths.measurement.exists()


@contextlib.contextmanager
def a_local_victim(folder: Path) -> Iterator[LocalVictim]:
    """A box with the embedded server deployed; nothing of it runs afterwards."""
    port = free_port()
    with deployed(folder, port) as box:
        profiles = folder / "config/profiles"
        profiles.mkdir(parents=True, exist_ok=True)
        (profiles / "measured.toml").write_text(_PROFILE.format(model=box.model, port=port))
        yield LocalVictim(box)
