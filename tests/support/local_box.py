"""tunerd's own command on folders of a test, in local mode: as a user calls it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.folders import ROOT
from tests.support.preloaded import tunerd
from tests.support.supervised import end_supervisor, processes_with, wait_until_gone
from tunerd.app import Context, build_context
from tunerd.engine.builds import find_engines
from tunerd.measure.store import open_to_read
from tunerd.tryout.designed import SHAPES, design, write


@dataclass
class Box:
    """Folders of one machine, and the command in them."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        names = {"CONFIG": "config", "STATE": "state", "RUNTIME": "run", "UNIT": "state/units"}
        folders = {f"TUNERD_{name}_DIR": str(self.folder / where) for name, where in names.items()}
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "TUNERD_MODE": "local",
            **folders,
            **self.variables,
        }

    @property
    def context(self) -> Context:
        return build_context(environment=self.environment)

    @property
    def unit(self) -> Path:
        return self.folder / "state/units/llama-server.service"

    @property
    def model(self) -> Path:
        """Where the designed model is, once something was deployed."""
        return self.folder / "tiny.gguf"

    def configure(self, text: str, name: str = "tunerd.toml") -> Path:
        """Write the settings, or `profiles/mine.toml`, over what stands there."""
        path = self.folder / "config" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def put_unit(self, text: str) -> None:
        """A unit that somebody wrote; not started."""
        self.unit.parent.mkdir(parents=True, exist_ok=True)
        self.unit.write_text(text)

    @contextlib.contextmanager
    def until_all_ended(self) -> Iterator[None]:
        """It knows the embedded engine from calls before, and nothing of it runs after the body."""
        shutil.copytree(_probed(), self.context.paths.cache_dir, dirs_exist_ok=True)
        try:
            yield
        finally:
            paths = self.context.paths
            started = processes_with(str(self.folder))
            end_supervisor(paths)
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            wait_until_gone(*started)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*tunerd(self.environment), *words], capture_output=True, text=True,
            timeout=600, check=False, env=self.environment, cwd=self.folder,
        )  # fmt: skip

    def json(self, *words: str, code: int | None = 0) -> Any:
        """What `tunerd WORDS --json` prints; the exit code must be `code`, unless that is None."""
        done = self.call(*words, "--json")
        assert code in {None, done.returncode}, (
            f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return json.loads(done.stdout)

    def begin(self, *words: str, stdin: int | None = None) -> subprocess.Popen[str]:
        """Call `tunerd WORDS` and go on."""
        return subprocess.Popen(
            [sys.executable, "-m", "tunerd", *words],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment, cwd=self.folder, start_new_session=True,
        )  # fmt: skip

    def has_samples(self) -> bool:
        """Whether a run under way has stored some."""
        store = open_to_read(self.context.paths.evidence)
        if store is None:
            return False
        with store:
            newest = store.runs(limit=1)
        return bool(newest) and newest[0].outcome is None and newest[0].n_samples > 0


@functools.cache
def _probed() -> Path:
    """What is kept of a look at the embedded engine, which takes 0.6 s."""
    box = Box(Path(tempfile.mkdtemp(prefix="tunerd-probed-")))
    atexit.register(shutil.rmtree, box.folder, ignore_errors=True)
    assert find_engines(box.context), "there is no embedded engine"
    return box.context.paths.cache_dir


def codes(said: Mapping[str, Any]) -> list[str]:
    """Those of its messages."""
    return [one["code"] for one in said["messages"]]


def settings(box: Box, **changes: object) -> list[str]:
    """`--set` options for the embedded engine with the designed model, as `serving__ctx_size=512`."""
    keys: dict[str, object] = {
        "model.path": box.model,
        "serving.threads": 1,
        "serving.threads_batch": 1,
        "serving.ctx_size": 1024,
        "speculation.type": "mtp",
        "speculation.n_max": 3,
        "speculation.p_min": 0.0,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


@contextlib.contextmanager
def deployed(folder: Path, port: int) -> Iterator[Box]:
    """A box on which tunerd has deployed the embedded server; nothing of it runs afterwards."""
    box = Box(folder, {"TUNERD_SERVICE__SETTLE_S": "0.2"})
    write(design(SHAPES["tiny"]), box.model)
    with box.until_all_ended():
        done = box.call("apply", "cpu-embedded", "--yes", *settings(box, serving__port=port))
        assert done.returncode == 0, done.stderr
        yield box
