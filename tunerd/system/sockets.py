"""Who listens on a TCP port, read from `/proc`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tunerd.system.proc import read_text
from tunerd.system.process_tree import all_processes, descends_from

_PROC = Path("/proc")
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"
_MAX_TABLE_BYTES = 16 * 1024 * 1024
_N_FIELDS = 10
_IPV4 = 4


@dataclass(frozen=True, slots=True)
class _Listener:
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    inode: str


def listening_pid(port: int, host: str = "127.0.0.1", *, likely: int | None = None) -> int | None:
    """The process that would answer a connection to this address.

    A socket bound to that very address wins over one bound to all. Where several processes share
    the socket it is the lowest pid, or `likely` if it is one of them or has started one of them.

    Returns:
        None where nobody listens, or the listener belongs to somebody whose processes cannot be
        looked into from here.
    """
    wanted = _address(host)
    matches = [
        listener
        for listener in _listeners("self")
        if listener.port == port and _takes(listener.address, wanted)
    ]
    exact = [listener for listener in matches if listener.address == wanted]
    inodes = {f"socket:[{listener.inode}]" for listener in exact or matches}
    if not inodes:
        return None
    if likely is not None and inodes & _sockets(likely):
        return likely
    pids = _owners(inodes)
    # A script that starts the server and waits for it is the unit's process as well.
    if likely is not None and any(descends_from(pid, likely) for pid in pids):
        return likely
    return next(iter(pids), None)


def is_listened_on(port: int, host: str = "127.0.0.1") -> bool:
    """Whether anybody listens there, one whose processes cannot be looked into included."""
    wanted = _address(host)
    return any(
        listener.port == port and _takes(listener.address, wanted)
        for listener in _listeners("self")
    )


def other_listeners(port: int, host: str, own: int) -> tuple[int, ...]:
    """Processes beside `own` and those that it started that connections to this address may reach.

    ik_llama.cpp shares its port (SO_REUSEPORT): two of its servers listen at once, and the kernel
    spreads clients over both. Processes that cannot be looked into from here are not seen.
    """
    wanted = _address(host)
    inodes = {
        f"socket:[{listener.inode}]"
        for listener in _listeners("self")
        if listener.port == port and _takes(listener.address, wanted)
    } - _sockets(own)
    return tuple(pid for pid in _owners(inodes) if not descends_from(pid, own))


def table_pattern(host: str, port: int) -> str:
    """An extended regular expression for lines of `TABLES` that take this address from a listener.

    Sockets of any state match: listening ones, connections, and those that the kernel remembers. A
    host that is no address, or that means all, stands for every address of this machine.
    """
    addresses = "[0-9A-F]+"
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(host.strip("[]"))
        if not wanted.is_unspecified:
            forms = [wanted, ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)]
            if wanted.version == _IPV4:
                forms.append(ipaddress.IPv6Address(f"::ffff:{wanted}"))
            addresses = f"({'|'.join(_to_kernel(form) for form in forms)})"
    return f"^ *[0-9]+: {addresses}:{port:04X} "


def listening_ports(pid: int) -> frozenset[int] | None:
    """The TCP ports on which this process listens; None where that cannot be seen.

    Where it listens on none they are those of the processes that it started: a script that starts
    the server and waits for it.
    """
    sockets = _sockets(pid)
    if not sockets and not os.access(_PROC / str(pid) / "fd", os.R_OK):
        return None
    listeners = tuple(_listeners(str(pid)))
    own = _ports(listeners, sockets)
    if own or not listeners:
        return own
    started = (stat.pid for stat in all_processes() if descends_from(stat.pid, pid))
    return _ports(listeners, {socket for child in started for socket in _sockets(child)})


def _ports(listeners: Iterable[_Listener], sockets: set[str]) -> frozenset[int]:
    return frozenset(one.port for one in listeners if f"socket:[{one.inode}]" in sockets)


def _listeners(process: str) -> Iterator[_Listener]:
    """Listening sockets of the network that this process sees."""
    for name in ("tcp", "tcp6"):
        text = read_text(_PROC / process / "net" / name, max_bytes=_MAX_TABLE_BYTES) or ""
        for line in text.split("\n")[1:]:
            fields = line.split()
            if len(fields) >= _N_FIELDS and fields[3] == _LISTEN:
                address, _, port = fields[1].rpartition(":")
                yield _Listener(_from_kernel(address), int(port, 16), fields[9])


def _from_kernel(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _to_kernel(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """As `_from_kernel` reads it."""
    raw = address.packed
    words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
    return b"".join(words).hex().upper()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ipaddress.ip_address("127.0.0.1")


def _takes(
    bound: ipaddress.IPv4Address | ipaddress.IPv6Address,
    wanted: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> bool:
    """Whether a socket bound to `bound` gets connections to `wanted`."""
    if bound == wanted or wanted.is_unspecified:
        return True
    return bound.is_unspecified and bound.version in {6, wanted.version}


def _owners(inodes: set[str]) -> tuple[int, ...]:
    """Processes that have one of these sockets open, lowest pid first."""
    if not inodes:
        return ()
    pids = sorted(int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal())
    return tuple(pid for pid in pids if inodes & _sockets(pid))


def _sockets(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(link.readlink()))
    return {target for target in found if target.startswith("socket:")}
