"""Boxes that are reached by a real sshd: each key leads to the folders and the tunerd of one of them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.local_box import Box
from tests.support.needs import missing
from tests.support.ports import free_port
from tests.support.preloaded import tunerd
from tests.support.supervised import processes_with
from tests.support.sweep_box import SweepBox, swept
from tests.support.waiting import until
from tunerd.production.status import history

# What a box does with a command; `fault` holds one of the words before the colon.
_SESSION = """#!/bin/sh
fault=$(cat {folder}/fault 2>/dev/null)
echo "$SSH_ORIGINAL_COMMAND" >>{folder}/asked
case "$fault:$SSH_ORIGINAL_COMMAND" in
hang:*apply*--yes*) sleep 600 ;;
hang-after:*apply*--yes*) sh -c "$SSH_ORIGINAL_COMMAND" >/dev/null; sleep 600 ;;
away:*) exit 255 ;;
cut:*apply*--yes*) setsid sh -c "$SSH_ORIGINAL_COMMAND" >/dev/null 2>&1 </dev/null & exit 255 ;;
liar:*) cat {folder}/lie; exit 0 ;;
closed:*) echo "This account is currently not available."; exit 1 ;;
esac
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
_SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_HOST = """
Host {name}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/{name}
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking yes
    KexAlgorithms curve25519-sha256
"""


@dataclass
class SshBox:
    """A box behind a name."""

    name: str
    made: SweepBox

    @property
    def folder(self) -> Path:
        return self.made.box.folder

    def breaks(self, fault: str) -> None:
        """From now on it does this, until it is told something else."""
        (self.folder / "fault").write_text(fault)

    def lies(self, text: bytes) -> None:
        """It answers with just this."""
        (self.folder / "lie").write_bytes(text)
        self.breaks("liar")

    def asked(self, word: str) -> int:
        """How often it was told something with this word."""
        lines = (self.folder / "asked").read_text().splitlines()
        return sum(word in line for line in lines)

    @property
    def swaps(self) -> list[tuple[str, str]]:
        """Reason and outcome of every swap, oldest first."""
        rows = history(self.made.box.context, limit=None).payload["generations"]
        return [(row["reason"], row["outcome"]) for row in reversed(rows)]


@dataclass
class Operator:
    """Who tells the boxes."""

    box: Box

    def fleet(self, *words: str, code: int | None = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.box.json("fleet", *words, code=code)
        return found

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """A rollout in the background."""
        return self.box.begin("fleet", *words)


def states(found: dict[str, Any]) -> list[str]:
    """How far each box is."""
    return [one["state"] for one in found["boxes"]]


@dataclass
class Fleet:
    """Boxes, and the way to them."""

    folder: Path
    boxes: Sequence[SshBox]

    def operator(self, name: str = "operator", **settings: str) -> Operator:
        """Somebody with a state folder of its own, who knows the boxes by their settings."""
        folder = self.folder / name
        (folder / "config").mkdir(parents=True, exist_ok=True)
        names = json.dumps([one.name for one in self.boxes])
        (folder / "config/tunerd.toml").write_text(f"[fleet]\nboxes = {names}\nevery_s = 1\n")
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {f"TUNERD_FLEET__{key.upper()}": value for key, value in settings.items()}
        return Operator(Box(folder, {"PATH": path, **more}))


def _session(box: SweepBox) -> Path:
    """What sshd runs for the key of a box."""
    folder = box.box.folder
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    program = bin_folder / "tunerd"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(tunerd(box.box.environment))} "$@"\n')
    program.chmod(0o755)
    here = {**box.box.environment, "PATH": f"{bin_folder}:{box.box.environment['PATH']}"}
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in here.items())
    (folder / "asked").touch()
    session = folder / "session"
    head, rest = _SESSION.format(folder=folder).split("\n", 1)
    session.write_text(f"{head}\n{exports}cd {folder}\n{rest}")
    session.chmod(0o755)
    return session


def new_key(path: Path) -> str:
    """The public part of it."""
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
    subprocess.run(words, check=True, timeout=300)
    return path.with_suffix(".pub").read_text().strip()


def put_ssh(folder: Path, config: str) -> None:
    """The ssh of operators below this folder: else it looks for its settings in the home of the account."""
    (folder / "ssh_config").write_text(config)
    (folder / "bin").mkdir()
    wrapper = folder / "bin/ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)


@contextlib.contextmanager
def fleet(folder: Path, count: int = 2) -> Iterator[Fleet]:
    """So many boxes behind an sshd on loopback, `gpu1` first, each serving profile `night`."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None:
        missing("ssh", "no sshd", "apt-get install openssh-server")
    port = free_port()
    user = pwd.getpwuid(os.getuid()).pw_name
    (folder / "known").write_text(f"[127.0.0.1]:{port} {new_key(folder / 'host')}\n")
    (folder / "sshd_config").write_text(_SSHD.format(port=port, folder=folder))
    with contextlib.ExitStack() as stack:
        boxes = [SshBox(f"gpu{at}", stack.enter_context(swept())) for at in range(1, count + 1)]
        keys, hosts = [], []
        for one in boxes:
            session = _session(one.made)
            keys.append(f'restrict,command="{session}" {new_key(folder / one.name)}')
            hosts.append(_HOST.format(name=one.name, port=port, user=user, folder=folder))
        (folder / "authorized").write_text("\n".join(keys) + "\n")
        put_ssh(folder, "".join(hosts))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        words = [sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
        log = stack.enter_context((folder / "sshd.log").open("wb"))
        process = subprocess.Popen(words, stderr=log)
        stack.callback(process.wait, timeout=30)
        stack.callback(process.kill)
        until(lambda: b"listening" in (folder / "sshd.log").read_bytes(), "sshd listens")
        stack.callback(_end_sessions, [str(one.folder / "session") for one in boxes])
        yield Fleet(folder, boxes)


def _end_sessions(sessions: Sequence[str]) -> None:
    """End what hangs: ssh that is gone leaves it running."""
    for session in sessions:
        for pid in processes_with(session):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
