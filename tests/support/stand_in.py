"""Installs the stand-in engine as a program, and reads back what arrived at it."""

from __future__ import annotations

import compileall
import functools
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.builders import HELP, HELP_OF, capabilities_of
from tunerd.engine.capabilities import IK_HIDDEN_FLAGS

_PROGRAM = Path(__file__).with_name("fake_llama_server.py")
# ik's help shows these without the value that they take, and leaves out the placeholder of some others.
_IK_UNSHOWN_VALUE = {"-rea", "--reasoning", "-cuda", "--cuda-params", "-draft", "--draft-params",
                     "--reasoning-budget-message"}  # fmt: skip
_NO_SWITCH = re.compile(r"\(default: (?!enabled|disabled|true|false)")
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
        """What happened, oldest first: `load` (with `argv`), `completion` (with `body`), `wake`, `exit`.

        Only a run that was meant to serve, with a model that exists, has a `load`.
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
    _compile()
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    made = StandIn(program, folder / f"{name}.json", folder / f"{name}.record")
    made.settings.unlink(missing_ok=True)
    defaults = {"help_file": str(HELP / f"{HELP_OF[dialect]}.txt"), "record": str(made.record)}
    made.configure(dialect=dialect, flags=flags_of(dialect), **defaults | behaviour)
    words = [_python(), "-B", "-S", "-E", str(_PROGRAM), "--stand-in", str(made.settings)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return made


def _python() -> str:
    """One that all may run: engines are probed as `nobody`, who may neither enter a home nor an environment in one."""
    here, of_system = Path(sys.executable).resolve(), Path("/usr/bin/python3")
    is_closed = os.geteuid() == 0 and here.is_relative_to(Path.home())
    return str(of_system if is_closed and of_system.exists() else here)


@functools.cache
def _compile() -> None:
    """Bytecode that all may read: `nobody` can keep none, and what a server compiles that has a umask is its own."""
    compileall.compile_dir(_PROGRAM.with_name("fake_llama"), quiet=2)


@functools.cache
def flags_of(dialect: str) -> dict[str, bool | None]:
    """What a build takes, as `Behaviour.flags` has it."""
    is_ik = dialect.startswith("ik-")
    found: dict[str, bool | None] = dict.fromkeys(IK_HIDDEN_FLAGS if is_ik else ())
    for option in capabilities_of(dialect).help.options:
        if option.is_removed:
            continue
        takes_value: bool | None = bool(option.argument)
        if is_ik and not _IK_UNSHOWN_VALUE.isdisjoint(option.spellings):
            takes_value = True
        elif is_ik and not takes_value and _NO_SWITCH.search(option.description):
            takes_value = None
        for spelling in option.spellings:
            found.setdefault(spelling, takes_value)
    return found
