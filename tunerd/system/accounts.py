"""Accounts of this machine: who runs the server, who probes, whose homes may hold builds."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

from tunerd.errors import HostError
from tunerd.system.confine import User

SERVICE_ACCOUNT = "llama-server"
_FALLBACK = "nobody"
_FIRST_PERSON_UID = 1000
_LAST_PERSON_UID = 60000


def account(name: str) -> User | None:
    """The ids of an account; None if there is no such account."""
    try:
        return User.named(name)
    except HostError:
        return None


def probe_account(service_user: str | None) -> User | None:
    """Who probes: the service's user where we are root, `nobody` before that account exists.

    None where we are not root: then a probe runs as we are.
    """
    if os.geteuid() != 0:
        return None
    for name in (service_user, SERVICE_ACCOUNT, _FALLBACK):
        found = account(name) if name is not None else None
        if found is not None and found.uid != 0:
            return found
    return None


def account_homes() -> tuple[Path, ...]:
    """Homes of people on this machine."""
    return tuple(
        Path(entry.pw_dir)
        for entry in pwd.getpwall()
        if _FIRST_PERSON_UID <= entry.pw_uid < _LAST_PERSON_UID and entry.pw_dir.startswith("/")
    )


def group_exists(name: str) -> bool:
    """Whether there is such a group."""
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def may_read(who: User, path: Path) -> bool:
    """Whether an account may read a file, by the permission bits of it and the folders above.

    Access control lists are not looked at, so a file that only they open counts as unreadable.
    """
    try:
        real = path.resolve(strict=True)
        parts = [real, *real.parents]
        return all(_allows(part, who, 0o4 if part is real else 0o1) for part in parts)
    except OSError:
        return False


def _allows(path: Path, who: User, wanted: int) -> bool:
    if who.uid == 0:
        return True
    status = path.stat()
    if status.st_uid == who.uid:
        return bool(status.st_mode >> 6 & wanted)
    if status.st_gid in who.groups:
        return bool(status.st_mode >> 3 & wanted)
    return bool(status.st_mode & wanted)
