"""Ports: who listens on one, and a free one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunerd.machine.process import descends_from, family_of, read_fields, read_text
from tunerd.words import PortOption

_PROC = Path("/proc")
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"
_MAX_TABLE_BYTES = 16 * 1024 * 1024
_N_FIELDS = 10
_IPV4 = 4
_SOCK_DIAG, _BY_FAMILY, _DUMP, _END_OF_DUMP = 4, 20, 0x301, 3
_DESTROY, _ACKNOWLEDGED = 21, 5  # with the flags of a request that is answered
_STATES = {"FIN_WAIT2": 5, "TIME_WAIT": 6, "LISTEN": int(_LISTEN, 16)}
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_WANTED = struct.Struct("=BBBBI48s")  # inet_diag_req_v2
_ROW = struct.Struct("=4x48s12xII")  # inet_diag_msg: inet_diag_sockid, uid, inode
_SOCKET_ID = struct.Struct("=2s2s16s16s12x")  # ports, addresses, device, cookie
_PROBLEM = struct.Struct("=i")  # nlmsgerr
_ANSWER_BYTES = 1 << 16
_LOOPBACK = {4: "127.0.0.1", 6: "::1"}


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[IpAddress, int]


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A row of the kernel's table; `inode` is `0` for one that its owner has closed.

    `kernel_id` is what the kernel calls it alone, of its `family`; a table does not show it.
    """

    local: End
    remote: End
    is_listening: bool
    inode: str
    uid: int
    family: int = field(default=socket.AF_UNSPEC, compare=False)
    kernel_id: bytes = field(default=b"", compare=False)

    @property
    def name(self) -> str:
        """As a process that has it open shows it."""
        return f"socket:[{self.inode}]"

    @property
    def address(self) -> IpAddress:
        """Its own."""
        return self.local[0]

    @property
    def port(self) -> int:
        """Its own."""
        return self.local[1]


def who_listens(port: int, host: str = "127.0.0.1", own: int | None = None) -> int | None:
    """The process that would answer a connection to this address; somebody else's where it shares the port with `own`.

    A socket bound to that very address wins over one bound to all. Where several processes share
    the socket it is the lowest pid, or `own` if it is one of them or has started one of them: a script that
    starts the server and waits for it is the unit's process as well.

    ik_llama.cpp shares its port (SO_REUSEPORT): two of its servers listen at once, and the kernel
    spreads clients over both.

    Returns:
        None where nobody listens, or the listener belongs to somebody whose processes cannot be
        looked into from here.
    """
    takers, wanted = _takers(port, host), _address(host)
    exact = [listener for listener in takers if listener.address == wanted]
    answering = {listener.name for listener in exact or takers}
    if own is None:
        return next(iter(_owners(answering)), None)
    mine = _sockets(own)
    others = _owners({listener.name for listener in takers} - mine)
    stranger = next((pid for pid in others if not descends_from(pid, own)), None)
    is_own = answering & mine or _owners(answering)  # of which there are no strangers then
    return stranger or (own if is_own else None)


def who_shares(port: int, host: str, own: int) -> int | None:
    """Who may get a connection to this address in the place of `own`, which listens there itself; None for nobody."""
    takers, mine = _takers(port, host), _sockets(own)
    if not any(one.name in mine for one in takers):
        return None
    wanted = _address(host)
    exact = [one for one in takers if one.address == wanted]
    # One for all addresses of IPv6 gets what none for IPv4 takes.
    nearest = exact or [one for one in takers if one.address.version == wanted.version] or takers
    others = {one.name for one in nearest} - mine
    return next((pid for pid in _owners(others) if not descends_from(pid, own)), None)


def is_listened_on(port: int, host: str = "127.0.0.1") -> bool:
    """Whether anybody listens there, one whose processes cannot be looked into included."""
    return bool(_takers(port, host))


def n_connections(port: int, host: str = "127.0.0.1") -> int:
    """Connections to this address, open ones and ended ones that the kernel remembers.

    A host that is no address stands for every address of this machine.
    """
    host = "::" if address_in(host) is None else host
    return sum(not one.is_listening for one in _bound(tcp_sockets(), port, host))


def table_pattern(host: str, port: int) -> str:
    """An extended regular expression for lines of `TABLES` that take this address from a listener.

    Sockets of any state match: listening ones, connections, and those that the kernel remembers. A
    host that is no address, or that means all, stands for every address of this machine.
    """
    addresses, wanted = "[0-9A-F]+", address_in(host)
    if wanted is not None and not wanted.is_unspecified:
        forms = [wanted, ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)]
        if wanted.version == _IPV4:
            forms.append(ipaddress.IPv6Address(f"::ffff:{wanted}"))
        addresses = f"({'|'.join(_to_kernel(form) for form in forms)})"
    return f"^ *[0-9]+: {addresses}:{port:04X} "


def listening_ports(pid: int) -> frozenset[int] | None:
    """The TCP ports on which this process listens; None where that cannot be seen.

    Where it listens on none they are those of the processes that it started: a script that starts
    the server and waits for it. Of a process that cannot be looked into it is the only port of its
    account; where that one has several, nobody can say which.
    """
    sockets = _sockets(pid)
    listeners = tuple(_listeners(str(pid)))
    if not sockets and not _can_be_looked_into(pid):
        with contextlib.suppress(LookupError):
            ports = frozenset(one.port for one in _of_account(pid, listeners))
            return ports if len(ports) == 1 else None
        return None
    own = _ports(listeners, sockets)
    if own or not listeners:
        return own
    return _ports(listeners, {socket for one in family_of(pid) for socket in _sockets(one)})


def listens(pid: int) -> bool:
    """Whether this very process has a listening socket; False also where that cannot be seen."""
    sockets = _sockets(pid)
    return bool(sockets) and bool(_ports(_listeners(str(pid)), sockets))


def own_host(pid: int, port: int) -> str | None:
    """The address by which this process is asked on this port, as a number; None where it listens on none.

    A name may lead to somebody else, and so may an address that the process has not bound, or no longer.
    What counts is whose account the listening socket belongs to, which can be seen without any right:
    that of the process or of one that it started, or root, who is no stranger.

    Raises:
        LookupError: whose the process is cannot be seen from here (`hidepid=`).
    """
    listeners = [one for one in _listeners(str(pid)) if one.port == port]
    found = _of_account(pid, listeners, 0)
    sockets = _sockets(pid)
    own = [one.address for one in found if one.name in sockets]
    hosts = own or [one.address for one in found]
    if not hosts:
        return None
    host = next((one for one in hosts if one.is_unspecified or one.is_loopback), hosts[0])
    return str(host) if not host.is_unspecified else _LOOPBACK[host.version]


def _of_account(pid: int, listeners: Sequence[TcpSocket], *others: int) -> list[TcpSocket]:
    """Those of the process's account or of these others, or else of what it started."""
    account = _account(pid)
    if account is None:
        return []
    accounts: set[int | None] = {account, *others}
    found = [one for one in listeners if one.uid in accounts]
    if found or not listeners:
        return found
    accounts |= {_account(one) for one in family_of(pid)}
    return [one for one in listeners if one.uid in accounts]


def _account(pid: int) -> int | None:
    """Whose a process is; None where it has ended."""
    status = read_fields(_PROC / str(pid) / "status") or {}
    if "Uid" in status:
        return int(status["Uid"].split()[0])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    raise LookupError(pid)


def _ports(listeners: Iterable[TcpSocket], sockets: set[str]) -> frozenset[int]:
    return frozenset(one.port for one in listeners if one.name in sockets)


def _listeners(process: str) -> list[TcpSocket]:
    """Listening sockets of the network that this process sees.

    Where it is our own the kernel is asked for them alone: the table of all sockets takes it 10 ms to
    print, and longer the more memory a machine has. A sandbox may refuse the question.
    """
    with contextlib.suppress(OSError):
        if (_PROC / process / "ns/net").stat().st_ino == (_PROC / "self/ns/net").stat().st_ino:
            return [*_asked_for("LISTEN")]
    return [one for one in tcp_sockets(process) if one.is_listening]


def _asked_for(*states: str) -> Iterator[TcpSocket]:
    """The sockets in these states, by sock_diag(7)."""
    yield from _of_family(socket.AF_INET, states)
    yield from _of_family(socket.AF_INET6, states)


@contextlib.contextmanager
def _kernel() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.connect((0, 0))  # from then on nobody but the kernel is heard
        yield kernel


def _message(kind: int, flags: int, family: int, states: int, socket_id: bytes = b"") -> bytes:
    wanted = _WANTED.pack(family, socket.IPPROTO_TCP, 0, 0, states, socket_id)
    return _HEADER.pack(_HEADER.size + len(wanted), kind, flags, 0, 0) + wanted


def _of_family(family: int, states: Sequence[str]) -> Iterator[TcpSocket]:
    size = 4 if family == socket.AF_INET else 16
    with _kernel() as kernel:
        kernel.send(_message(_BY_FAMILY, _DUMP, family, sum(1 << _STATES[one] for one in states)))
        while True:
            answer = kernel.recv(_ANSWER_BYTES)
            while answer:
                length, kind, *_ = _HEADER.unpack_from(answer)
                if kind == _END_OF_DUMP:
                    return
                if kind != _BY_FAMILY:
                    raise OSError(errno.EOPNOTSUPP, "the kernel does not tell of its sockets")
                name, uid, inode = _ROW.unpack_from(answer, _HEADER.size)
                port, other, own, peer = _SOCKET_ID.unpack(name)
                ends = ((own, port), (peer, other))
                local, remote = (
                    (plain_address(ipaddress.ip_address(raw[:size])), int.from_bytes(number))
                    for raw, number in ends
                )
                is_listening = "LISTEN" in states
                yield TcpSocket(local, remote, is_listening, str(inode), uid, family, name)
                answer = answer[(length + 3) & ~3 :]


def tcp_sockets(process: str = "self") -> Iterator[TcpSocket]:
    """All of the network that this process sees."""
    for name in ("tcp", "tcp6"):
        text = read_text(_PROC / process / "net" / name, max_bytes=_MAX_TABLE_BYTES) or ""
        for line in text.split("\n")[1:]:
            fields = line.split()
            if len(fields) >= _N_FIELDS:
                local, remote = _end(fields[1]), _end(fields[2])
                yield TcpSocket(local, remote, fields[3] == _LISTEN, fields[9], int(fields[7]))


def _end(text: str) -> End:
    """The kernel prints 32-bit words in the machine's byte order."""
    address, _, port = text.rpartition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    return plain_address(ipaddress.ip_address(b"".join(words))), int(port, 16)


def plain_address(address: IpAddress) -> IpAddress:
    """An IPv4 address also where it is written as one of IPv6."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _to_kernel(address: IpAddress) -> str:
    """As `_end` reads it."""
    raw = address.packed
    words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
    return b"".join(words).hex().upper()


def address_in(host: str) -> IpAddress | None:
    """The address that a host is named by; None for any other name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _address(host: str) -> IpAddress:
    return address_in(host) or ipaddress.ip_address("127.0.0.1")


def _takers(port: int, host: str) -> list[TcpSocket]:
    """Who gets connections to this address."""
    return list(_bound(_listeners("self"), port, host))


def _bound(sockets: Iterable[TcpSocket], port: int, host: str) -> Iterator[TcpSocket]:
    """Those that take connections to this address, or have one."""
    wanted = _address(host)
    for one in sockets:
        is_any = one.address.is_unspecified and one.address.version in {6, wanted.version}
        if one.port == port and (wanted.is_unspecified or is_any or one.address == wanted):
            yield one


def _owners(inodes: set[str]) -> tuple[int, ...]:
    """Processes that have one of these sockets open, lowest pid first."""
    if not inodes:
        return ()
    pids = sorted(int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal())
    return tuple(pid for pid in pids if inodes & _sockets(pid))


def _can_be_looked_into(pid: int) -> bool:
    """Not by the right to read its folder, which root has where it may not follow what is in it."""
    try:
        (_PROC / str(pid) / "cwd").readlink()
    except OSError:
        return False
    return True


def _sockets(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(link.readlink()))
    return {target for target in found if target.startswith("socket:")}


_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_N_BELOW = 12_000
_N_TRIES = 50


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now; somebody else may take it before it is used.

    If possible it is one that the kernel gives to no outgoing connection: such a connection of any
    program would keep a server from binding.
    """
    lowest = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        lowest = int(_OUTGOING.read_text().split()[0])
    below = range(max(1024, lowest - _N_BELOW), lowest)
    for port in random.sample(below, min(_N_TRIES, len(below))):
        if can_bind("127.0.0.1", port):
            return port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given: int = listener.getsockname()[1]
        return given


def can_bind(host: str, port: int, option: PortOption | None = None) -> bool:
    """Whether a program whose socket has this option could listen there now; for None, whichever it has.

    The kernel remembers connections that a server there closed (TIME_WAIT, a minute on Linux, which ik
    leaves after every stream, and mainline where it is asked while it loads): a server with the same
    option as the one before it may bind then, another one may not.
    """
    return _why_not_bound(host, port, option) is None


def ended(host: str, port: int) -> list[TcpSocket]:
    """Connections of this address that ended, and that the kernel remembers; not those whose server may still have something to send.

    Raises:
        OSError: the kernel does not tell.
    """
    found = _bound(_asked_for("TIME_WAIT", "FIN_WAIT2"), port, host)
    return [one for one in found if one.inode == "0"]


def forget(connections: Iterable[TcpSocket]) -> None:
    """Have the kernel forget connections that ended, which it would do after a minute. Nothing is sent.

    Each is named as itself: by its addresses alone the kernel would find, in the place of one that it has
    forgotten by now, the server that listens there.

    Raises:
        OSError: it may not be done (it takes CAP_NET_ADMIN, and Linux 6.0 or newer).
    """
    with _kernel() as kernel:
        for one in connections:
            kernel.send(_message(_DESTROY, _ACKNOWLEDGED, one.family, 0, one.kernel_id))
            (problem,) = _PROBLEM.unpack_from(kernel.recv(_ANSWER_BYTES), _HEADER.size)
            if problem not in {0, -errno.ENOENT}:
                raise OSError(-problem, os.strerror(-problem))


def is_in_use(host: str, port: int, option: PortOption) -> bool:
    """Whether others keep such a program from listening there: with a living socket, or with connections of the past.

    An address that is not one of this machine is not in use.
    """
    return _why_not_bound(host, port, option) == errno.EADDRINUSE


def _why_not_bound(host: str, port: int, option: PortOption | None) -> int | None:
    """The error's number where no socket can be bound there; None where one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if option is not None:
                probe.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            probe.bind((host, port))
    except OSError as error:
        return error.errno or errno.EINVAL
    except (OverflowError, ValueError):  # no port and no name that there could be
        return errno.EINVAL
    return None


def why_no_listener(host: str) -> str | None:
    """Why nothing can listen on this host, on whatever port; None where something can.

    One address of a name is enough, as it is for llama-server. What this process alone may not do says
    nothing about a server.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:  # no such name, and none that there could be
        return getattr(error, "strerror", None) or str(error)
    problem = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except PermissionError:
            return None
        except OSError as error:
            problem = error.strerror
        else:
            return None
    return problem
