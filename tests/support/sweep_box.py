"""A box with a stand-in engine on which sweeps run as a user starts them, in local mode."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.folders import open_folder
from tests.support.local_box import Box
from tests.support.ports import free_port
from tests.support.server_process import CLIENT
from tests.support.stand_in import StandIn, install
from tests.support.waiting import LIMIT_S, until
from tunerd.app import Context
from tunerd.engine.builds import find_engines
from tunerd.engine.capabilities import Effect, Proof
from tunerd.engine.probe import remember_proofs
from tunerd.machine.files import is_locked
from tunerd.production.probation import daemon_lock
from tunerd.tryout.designed import SHAPES, design, write

# Slow enough to be told apart by a client's clock, fast enough for a test.
SPEED: dict[str, Any] = {"time_scale": 1.0, "pp_tok_s": 20_000.0, "tg_tok_s": 400.0,
                         "prefill_tax": 0.0, "acceptance": 0.0, "draft_cost": 0.5}  # fmt: skip
RANGES = """
[sweep]
"engine.prefer" = ["fake"]
"speculation.n_max" = [2, 4]
"speculation.p_min" = [0.0]
"serving.threads" = [1]
"serving.n_ubatch" = [512]
"""
PROFILE = (
    """
extends = "cpu-embedded"
workload = "small"
[model]
path = "{model}"
[engine]
prefer = ["fake"]
[serving]
port = {port}
ctx_size = 1024
metrics = true
[speculation]
type = "mtp"
n_max = 4
p_min = 0.0
"""
    + RANGES
)
WORKLOAD = """
[[classes]]
name = "ask"
kind = "code"
prompt_tokens = 100
answer_tokens = 40
"""


@dataclass
class SweepBox:
    """Profile `night` serves on the stand-in."""

    box: Box
    engine: StandIn
    port: int

    def call(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = self.box.call(*words)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def gets_a_card(self) -> None:
        """One that a test says is there: with a profile for machines without, the server would be kept off it."""
        path = self.box.context.paths.site_profiles / "night.toml"
        path.write_text(path.read_text() + '\n[match]\ngpu = "default"\n')

    def json(self, *words: str, code: int | None = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.box.json(*words, code=code)
        return found

    def sweep(self, *words: str, budget: str = "40s") -> dict[str, Any]:
        return self.json("sweep", "run", "--yes", "--budget", budget, "--seed", "3", *words)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """A sweep in the background."""
        return self.box.begin("sweep", *words, "--yes", "--json")

    def newest(self) -> dict[str, Any]:
        return self.json("sweep", "show")

    def probation(self) -> dict[str, Any]:
        """The newest."""
        rows: list[dict[str, Any]] = self.json("probation", "show")["probations"]
        return rows[0] if rows else {"generation": 0, "state": ""}

    @contextlib.contextmanager
    def daemon(self) -> Iterator[None]:
        """A daemon that looks once a second; it is killed in the end."""
        environment = {**self.box.environment, "TUNERD_DAEMON__EVERY_S": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tunerd", "daemon"], env=environment, cwd=self.box.folder
        )
        try:
            until(lambda: is_locked(daemon_lock(self.box.context)), "the daemon runs")
            yield
        finally:
            process.kill()
            process.wait(timeout=LIMIT_S)

    @property
    def serves(self) -> bool:
        """Whether whoever listens answers a completion."""
        return self.ask() == 200

    def ask(self, n_predict: int = 4) -> int:
        """The status of one completion; 0 where nobody answers."""
        body = {"prompt": "somebody else", "n_predict": n_predict}
        try:
            url = f"http://127.0.0.1:{self.port}/completion"
            return CLIENT.post(url, json=body, timeout=30).status_code
        except httpx.HTTPError:
            return 0

    def leftovers(self) -> list[str]:
        folder = self.box.folder / "run"
        return [path.name for path in folder.rglob("tunerd-candidate-*")]


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Send a signal and wait for the end."""
    os.kill(process.pid, number)
    process.communicate(timeout=LIMIT_S)


def prove(ctx: Context) -> None:
    """What trials on a designed model would show: the stand-in plays no model."""
    engine = next(one for one in find_engines(ctx) if one.name == "fake")
    assert engine.identity is not None, engine.problem
    names = ("mtp", "n-max", "p-min")
    proofs = tuple(Proof(name, Effect.PROVED, "as the test says") for name in names)
    remember_proofs(ctx.paths.cache_dir, ctx.files, engine.identity, proofs)


@contextlib.contextmanager
def swept(**behaviour: Any) -> Iterator[SweepBox]:
    """The box, its unit deployed; nothing of it runs or is left afterwards."""
    with open_folder() as folder:
        box = SweepBox(
            Box(folder), install(folder / "engine", **{**SPEED, **behaviour}), free_port()
        )
        model = write(design(SHAPES["tiny"]), box.box.model)
        box.box.configure(WORKLOAD, "profiles/workloads/small.toml")
        box.box.configure(PROFILE.format(model=model, port=box.port), "profiles/night.toml")
        box.box.configure(
            f'[engines.fake]\npath = "{box.engine.program}"\nallow_writable = true\n'
            '[sweep]\ntimezone = "UTC"\npatience_s = 1.0\nquiet_s = 1.0\n'
            "[service]\nsettle_s = 0.1\ndrain_s = 0.0\nstop_timeout_s = 3\n[probation]\nevery_s = 5.0\n"
        )
        with box.box.until_all_ended():
            prove(box.box.context)
            box.call("apply", "night", "--yes")
            yield box


def upgrade(box: SweepBox) -> None:
    """Another program takes the engine's place, half as fast."""
    other = install(box.box.folder / "other", **{**SPEED, "tg_tok_s": 200.0})
    shutil.copy2(other.program, box.engine.program)
    prove(box.box.context)
