"""Ansible on machines of a test: what it takes for ssh enters the machine instead."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.folders import ROOT
from tests.support.machine import Machine
from tests.support.needs import missing
from tests.support.roots import NOT_COMPILED, OFFLINE_PIP

ROLES = ROOT / "deploy/ansible/roles"
_RECAP = re.compile(r"^(\w+) +: (.+)$", re.MULTILINE)
_LIMIT_S = 300.0


def program(name: str) -> str:
    """A program of Ansible, of this environment or of the machine."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        missing("ansible", f"no {name}", "pip install tunerd[ansible]")
    return found


def environment(folder: Path) -> dict[str, str]:
    """Ansible keeps everything in a folder of the test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        "PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_NOCOLOR": "1", "ANSIBLE_ROLES_PATH": str(ROLES), "ANSIBLE_NOCOWS": "1",
        "ANSIBLE_PIPELINING": "1",
    }  # fmt: skip


@dataclass(frozen=True)
class Played:
    """A playbook that ran: what it printed, and its counts by machine."""

    status: int
    text: str

    def count(self, name: str) -> dict[str, int]:
        """A count of the recap, by machine."""
        rows = {
            host: dict(word.split("=") for word in row.split())
            for host, row in _RECAP.findall(self.text)
        }
        assert rows, self.text
        return {host: int(row[name]) for host, row in rows.items()}

    def changed(self, host: str) -> set[str]:
        """Tasks and handlers that changed something there, or would."""
        parts = re.split(r"^(?:TASK|RUNNING HANDLER) \[tunerd : ", self.text, flags=re.MULTILINE)
        told = (part.partition("]") for part in parts[1:])
        return {name for name, _, said in told if f"\nchanged: [{host}]" in said}


@dataclass(frozen=True)
class Ansible:
    """The role on these machines, by their names."""

    folder: Path
    machines: Mapping[str, Machine]

    def play(
        self, *words: str, own: Mapping[str, Mapping[str, Any]] | None = None, **variables: Any
    ) -> Played:
        """Run the role with these variables, and those that a machine has of its own."""
        enter = self.folder / "enter"
        ways = "".join(
            f'{name}) exec {shlex.join(machine.command("/bin/sh", "-c"))} "$word" ;;\n'
            for name, machine in self.machines.items()
        )
        enter.write_text(
            f"#!/bin/sh\nfor next; do host=$word word=$next; done\ncase $host in\n{ways}esac\n"
        )
        enter.chmod(0o755)
        common = {"ansible_user": "root", "ansible_ssh_executable": str(enter),
                  "ansible_python_interpreter": "/usr/bin/python3",
                  "ansible_ssh_transfer_method": "piped", **variables}  # fmt: skip
        inventory = self.folder / "inventory.json"
        boxes = {name: {**(own or {}).get(name, {})} for name in self.machines}
        inventory.write_text(json.dumps({"gpus": {"hosts": boxes, "vars": common}}))
        book = self.folder / "play.json"
        book.write_text(json.dumps([{"hosts": "gpus", "become": True, "roles": ["tunerd"], "gather_facts": False,
                                     "environment": OFFLINE_PIP | NOT_COMPILED}]))  # fmt: skip
        done = subprocess.run(
            [program("ansible-playbook"), "--inventory", str(inventory), str(book), *words],
            capture_output=True, text=True, timeout=_LIMIT_S, check=False,
            env=environment(self.folder), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Played(done.returncode, done.stdout + done.stderr)
