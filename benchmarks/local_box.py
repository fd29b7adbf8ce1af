"""tunerd in local mode, in a folder of its own, with the embedded engine and a designed model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.supervised import end_supervisor
from tunerd.machine.net import free_port
from tunerd.paths import Paths, paths_for
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.words import Mode

TUNERD = str(Path(sys.executable).with_name("tunerd"))
UNIT = "llama-server.service"


@dataclass(frozen=True)
class LocalBox:
    """Its folder, the environment of every call, and the port of its server."""

    folder: Path
    environment: dict[str, str]
    port: int

    @property
    def paths(self) -> Paths:
        return paths_for(Mode.LOCAL, self.environment)

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def tunerd(self, *words: str) -> str:
        """What `tunerd WORDS` prints; it must not fail."""
        done = subprocess.run(
            [TUNERD, *words], capture_output=True, text=True, env=self.environment, check=False
        )
        if done.returncode:
            raise SystemExit(f"tunerd {' '.join(words)}: {done.returncode}\n{done.stderr}")
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.tunerd(*words, "--json"))

    def profile(self, name: str, **values: object) -> None:
        """A site profile of the embedded engine on this box's port; `serving__alias="x"`."""
        keys: dict[str, object] = {
            "engine.prefer": ["embedded"],
            "model.path": str(self.models / "model.gguf"),
            "serving.port": self.port,
            "speculation.type": "off",
            **{key.replace("__", "."): value for key, value in values.items()},
        }
        lines = ['extends = "cpu-embedded"', *(f"{k} = {json.dumps(v)}" for k, v in keys.items())]
        path = self.paths.site_profiles / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")


@contextmanager
def local_box(shape: str = "tiny") -> Iterator[LocalBox]:
    """A box with a designed model; whatever runs in it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="tunerd-benchmark-") as name:
        folder = Path(name)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": name,
            "PYTHONPATH": str(Path(__file__).parents[1]),  # this checkout, whatever is installed
            "TUNERD_MODE": "local",
            **{f"TUNERD_{part}_DIR": str(folder / part.lower()) for part in ("CONFIG", "STATE")},
        }
        box = LocalBox(folder, environment, free_port())
        box.models.mkdir()
        write(design(SHAPES[shape]), box.models / "model.gguf")
        box.paths.config_dir.mkdir()
        box.paths.settings_file.write_text(f'[models]\ndirs = ["{box.models}"]\n')
        try:
            yield box
        finally:
            end_supervisor(box.paths)
