"""Whom a program runs as, and how much it may use."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass

from tunerd.errors import HostError

UNLIMITED = -1
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class User:
    """An account with the groups that a process of it has."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str | None = None
    home: str | None = None

    @classmethod
    def named(cls, name: str, *, group: str | None = None) -> User:
        """The account of this name or number; `group` takes the place of its own first group.

        Raises:
            HostError: There is no such account or group.
        """
        try:
            entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
            gid = entry.pw_gid if group is None else _gid(group)
        except KeyError as error:
            wanted = name if group is None else f"{name}, group {group}"
            raise HostError(
                f"no such account: {wanted}",
                hint=f"`getent passwd {name}` prints nothing where it is missing",
            ) from error
        groups = tuple(os.getgrouplist(entry.pw_name, gid))
        return cls(entry.pw_uid, gid, groups, entry.pw_name, entry.pw_dir)


def _gid(group: str) -> int:
    return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use; None leaves a limit as it is, UNLIMITED lifts it as far as allowed.

    `data_mib` is RLIMIT_DATA: private writable memory. RLIMIT_AS would also count the address space
    that CUDA reserves (hundreds of GiB) and never uses, so it is set where a unit asks for it alone
    (`address_space_bytes`). `file_mib` bounds each file that is written,
    `n_procs` counts all threads of the account, not only the program's own. Core dumps are off.
    """

    cpu_s: int | None = None
    data_mib: int | None = None
    file_mib: int | None = None
    n_files: int | None = None
    n_procs: int | None = None
    memlock_bytes: int | None = None
    core_bytes: int = 0
    address_space_bytes: int | None = None

    def to_rlimits(self) -> dict[str, int]:
        """Values by the name behind `RLIMIT_`."""
        values = {
            "CPU": self.cpu_s,
            "DATA": _to_bytes(self.data_mib),
            "FSIZE": _to_bytes(self.file_mib),
            "NOFILE": self.n_files,
            "NPROC": self.n_procs,
            "MEMLOCK": self.memlock_bytes,
            "CORE": self.core_bytes,
            "AS": self.address_space_bytes,
        }
        return {name: value for name, value in values.items() if value is not None}


def _to_bytes(mib: int | None) -> int | None:
    return mib if mib is None or mib == UNLIMITED else mib * _MIB
