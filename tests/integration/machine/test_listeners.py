"""What the kernel tells of listening sockets when asked for them alone."""

from __future__ import annotations

import os
import socket

import pytest

from tunerd.machine.net import _asked_for, tcp_sockets


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "::"])
def test_it_is_what_its_table_of_all_sockets_shows(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        inode = str(os.fstat(listener.fileno()).st_ino)
        told, shown = (  # the table, which is read in pieces, may show one twice
            {one for one in found if one.inode == inode}
            for found in (_asked_for(family), tcp_sockets())
        )

        assert told == shown
        assert len(told) == 1
