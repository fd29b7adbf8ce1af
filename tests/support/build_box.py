"""tunerd in local mode with one real engine: profiles on designed models, deployed by its command."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.deployment import profile
from tests.support.folders import open_folder
from tests.support.local_box import Box
from tests.support.ports import free_port
from tests.support.server_process import CLIENT
from tunerd.paths import Paths
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.tryout.local import PID_NAME


@dataclass(frozen=True)
class BuildBox:
    """One machine with one engine; `port` is where its server listens."""

    box: Box
    engine: str
    port: int

    @property
    def model(self) -> Path:
        """The designed model, which this engine can load."""
        return self.box.model

    @property
    def environment(self) -> dict[str, str]:
        """Of every call."""
        return self.box.environment

    @property
    def paths(self) -> Paths:
        """Where everything is."""
        return self.box.context.paths

    def profile(self, name: str, **values: object) -> None:
        """A site profile as `serving__ctx_size=512`; without speculation unless a value says so."""
        usual: dict[str, Any] = {
            "model__path": str(self.model),
            "serving__alias": name,
            "serving__port": self.port,
            "serving__ctx_size": 1024,
            "serving__threads_http": 2,  # each may take address space, else one for each core
        }
        self.box.configure(profile(self.engine, **usual | values), f"profiles/{name}.toml")

    def json(self, *words: str, expect: int = 0) -> Any:
        """What `tunerd WORDS --json` prints; the exit code must be `expect`."""
        return self.box.json(*words, code=expect)

    def apply(self, name: str, *words: str, expect: int = 0) -> Any:
        """What `tunerd apply NAME --yes --json` prints."""
        return self.json("apply", name, "--yes", *words, expect=expect)

    def ask(self, prompt: str, n_predict: int) -> Any:
        """The server's answer on the one route on which every build counts drafts."""
        body = {"prompt": prompt, "max_tokens": n_predict, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        reply = CLIENT.post(url, json=body, timeout=300)
        assert reply.status_code == httpx.codes.OK, reply.text
        return reply.json()

    def limit_address_space(self, spare_kib: int) -> None:
        """No server from now on gets more than that above what the one that runs now has had."""
        pid = self.json("status")["pid"]
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        peak_kib = next(int(row.split()[1]) for row in rows if row.startswith("VmPeak:"))
        limit = (peak_kib + spare_kib) * 1024
        supervisor = int((self.box.folder / "run" / PID_NAME).read_text())
        resource.prlimit(supervisor, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@contextlib.contextmanager
def build_box(program: Path | None, *, shape: str) -> Iterator[BuildBox]:
    """A machine with this engine, the embedded one for None; nothing of it runs afterwards.

    Its folder is one that the account of probes may enter.
    """
    with open_folder() as folder:
        waits = {"TUNERD_SERVICE__SETTLE_S": "0.2", "TUNERD_SERVICE__DRAIN_S": "0"}
        box = Box(folder, waits)
        box.configure(
            "" if program is None else f"[engines.build]\npath = {json.dumps(str(program))}\n"
        )
        write(design(SHAPES[shape]), box.model)
        with box.until_all_ended():
            yield BuildBox(box, "embedded" if program is None else "build", free_port())
