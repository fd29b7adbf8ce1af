"""Installs the stand-in engine as a program, and reads back what arrived at it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
_PROGRAM = Path(__file__).with_name("fake_llama_server.py")
_HELP = _TESTS / "data/help"
_HELP_OF_DIALECT = {
    "main-old": "mainline-2026-04-26.txt",
    "main-pr": "synthetic-main-pr.txt",
    "main-mid": "mainline-2026-05-16.txt",
    "main-lm": "mainline-2026-08-18.txt",
    "main-0x": "mainline-0.7.0.txt",
    "ik-may": "ik-2026-06-02.txt",
    "ik-now": "ik-2026-08.txt",
    "bee-01": "bee-2026-05-21.txt",
    "bee-03": "synthetic-bee-03.txt",
    "bee-04": "synthetic-bee-04.txt",
}
# A card as an engine's log tells of it, with what a model takes there.
RTX_4070_SUPER: dict[str, Any] = {
    "name": "CUDA0",
    "description": "NVIDIA GeForce RTX 4070 SUPER",
    "total_mib": 12282,
    "free_mib": 11902,
    "model_mib": 8053,
    "context_mib": 1075,
    "compute_mib": 497,
}


@dataclass(frozen=True)
class StandIn:
    """An installed stand-in: `program` takes llama-server's flags and nothing else."""

    program: Path
    settings: Path
    record: Path

    def configure(self, **behaviour: Any) -> None:
        """Change fields of `Behaviour` from the next start on; the others stay."""
        text = self.settings.read_text(encoding="utf-8") if self.settings.exists() else "{}"
        changed = json.loads(text) | behaviour
        fresh = self.settings.with_suffix(".new")
        fresh.write_text(json.dumps(changed, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self.settings)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What happened, oldest first: `start`, `load`, `ready`, `completion`, `child` or `exit`.

        Every run has a `start` with `argv`, `pid` and `environment`; only one that was meant to
        serve, with a model that exists, has a `load` with `argv` and `pid`. A completion has
        `body` and `n_predicted`.
        """
        if not self.record.exists():
            return []
        rows = self.record.read_text(encoding="utf-8").splitlines()
        events: list[dict[str, Any]] = [json.loads(row) for row in rows]
        return [event for event in events if event["event"] == kind]

    def served(self) -> list[list[str]]:
        """The arguments of every start that loaded the model, oldest first."""
        return [event["argv"] for event in self.events("load")]


def install(
    folder: Path, *, name: str = "llama-server", dialect: str = "main-0x", **behaviour: Any
) -> StandIn:
    """A stand-in as `folder/name`, of a dialect with its captured help, behaving as told.

    Its settings and record stand beside it as `name.json` and `name.record`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    made = StandIn(program, folder / f"{name}.json", folder / f"{name}.record")
    made.settings.unlink(missing_ok=True)
    defaults = {"help_file": str(_HELP / _HELP_OF_DIALECT[dialect]), "record": str(made.record)}
    made.configure(dialect=dialect, **defaults | behaviour)
    words = [sys.executable, "-S", "-E", str(_PROGRAM), "--stand-in", str(made.settings)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return made
