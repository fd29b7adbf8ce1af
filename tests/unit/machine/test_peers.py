"""Who may use the local API, and which names and pages are its own."""

from __future__ import annotations

from tunerd.machine.peers import Peer, Via
from tunerd.web.app import Gate, host_is_ours, origin_is_ours

GROUP = 900


MAY_ACT = {
    Peer(Via.UNIX, 0): True,
    Peer(Via.UNIX, 1000, frozenset({1000, GROUP})): True,
    Peer(Via.TCP, 1000, frozenset({1000, GROUP})): True,
    Peer(Via.UNIX, 1001, frozenset({1001, 27})): False,
    Peer(Via.UNIX, 1001): False,
    Peer(Via.TCP, None): False,
    Peer(Via.TCP, 0): False,  # a forwarder or a container of root's: nobody knows who speaks
    Peer(Via.TCP, 0, frozenset({0, GROUP})): False,
}


def test_root_and_the_group_may_act_and_nobody_else() -> None:
    of_group = Gate(own_uid=0, group=lambda: GROUP)
    assert {peer: of_group.knows(peer) for peer in MAY_ACT} == MAY_ACT


def test_without_a_group_only_root_and_the_owner_may_act() -> None:
    member = Peer(Via.UNIX, 1000, frozenset({1000}))

    assert not Gate(own_uid=0, group=lambda: None).knows(member)
    assert Gate(own_uid=1000, group=lambda: None).knows(member)


HOSTS = {
    "localhost": True,
    "LOCALHOST:8765": True,
    "127.0.0.1:1": True,
    "[::1]:8765": True,
    "box.lan:8765": True,
    "evil.example": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example:8765": False,
    "localhost:80:80": False,
    "localhost:evil": False,
    "localhost:" + "1" * 5000: False,
    "[::1].evil": False,
    "[::1]@evil": False,
    "": False,
    None: False,
}


def test_a_foreign_name_for_this_machine_is_told_from_its_own() -> None:
    assert {host: host_is_ours(host, ["box.lan"]) for host in HOSTS} == HOSTS


ORIGINS = {
    None: True,
    "http://localhost:8765": True,
    "https://localhost:8765": True,
    "http://localhost:9000": False,
    "http://evil.example": False,
    "null": False,
    "file://": False,
    "localhost:8765": False,
}


def test_only_its_own_page_may_send_changes() -> None:
    assert {origin: origin_is_ours(origin, "localhost:8765") for origin in ORIGINS} == ORIGINS
