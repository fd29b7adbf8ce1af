"""Who is at the other end of a connection: from the kernel, never from what the client says."""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import os
import pwd
import socket
import struct
from pathlib import Path

from tunerd.core.access import Peer, Via
from tunerd.system.proc import read_text

# Linux's number; Python has no name for it before 3.13, and reads at most 1024 bytes.
_SO_PEERGROUPS = 59
_MOST_BYTES = 1024
_CREDENTIALS = struct.Struct("3i")
_MAX_TABLE_BYTES = 16 * 1024 * 1024
_N_FIELDS = 10


def peer_of(connection: socket.socket) -> Peer:
    """The peer of an accepted connection."""
    if connection.family == socket.AF_UNIX:
        return _unix_peer(connection)
    return _tcp_peer(connection)


def group_number(name: str) -> int | None:
    """The number of a group; None if there is none."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def account_name(uid: int) -> str | None:
    """The name of an account; None if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _unix_peer(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    groups = {gid}
    with contextlib.suppress(OSError):  # more groups than fit: the first one counts
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
        groups |= set(struct.unpack(f"{len(found) // 4}I", found))
    return Peer(Via.UNIX, uid, frozenset(groups), pid or None, account_name(uid))


def _tcp_peer(connection: socket.socket) -> Peer:
    """Loopback connections end in a socket of this machine, which has an owner in `/proc`."""
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
    except OSError:
        return Peer(Via.TCP, None, is_local=False)
    address = _address(theirs[0])
    if not address.is_loopback:
        return Peer(Via.TCP, None, address=str(address), is_local=False)
    uid = _owner((address, theirs[1]), (_address(ours[0]), ours[1]))
    if uid is None:
        return Peer(Via.TCP, None, address=str(address))
    return Peer(Via.TCP, uid, _groups_of(uid), None, account_name(uid), str(address))


def _groups_of(uid: int) -> frozenset[int]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


_End = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def _owner(local: _End, remote: _End) -> int | None:
    """The account of the socket with these two ends."""
    for name in ("tcp", "tcp6"):
        text = read_text(Path("/proc/self/net") / name, max_bytes=_MAX_TABLE_BYTES) or ""
        for line in text.split("\n")[1:]:
            fields = line.split()
            if len(fields) < _N_FIELDS:
                continue
            # A socket whose owner has closed it belongs to uid 0 in the table: its inode is 0.
            if fields[9] != "0" and _end(fields[1]) == local and _end(fields[2]) == remote:
                return int(fields[7])
    return None


def _end(text: str) -> _End:
    """The kernel prints 32-bit words in the machine's byte order."""
    address, _, port = text.rpartition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return _plain(ipaddress.ip_address(text.partition("%")[0]))


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
