"""On which port of the past a real build can be started, which is asked of the kernel before it is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.server_process import ServerEndedError, start
from tests.support.sockets import server_that_closed_first
from tunerd.engine.capabilities import parse_help, read_capabilities
from tunerd.machine.net import can_bind
from tunerd.machine.process import run
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.words import PortOption

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("left", PortOption)
@pytest.mark.parametrize("program", needs.engines(), ids=lambda program: program.name)
def test_a_build_starts_on_a_port_of_the_past_exactly_where_a_socket_of_its_kind_can_bind(
    program: Path, left: PortOption, tmp_path: Path
) -> None:
    model = write(design(SHAPES["tiny-nomtp"]), tmp_path / "tiny.gguf")
    said = run([str(program), "--help"], timeout_s=30)
    option = read_capabilities(parse_help(said.stdout + said.stderr)).port_option
    port = server_that_closed_first(left)

    may = can_bind("127.0.0.1", port, option)
    words = [str(program), "-m", str(model), "-c", "512", "-t", "1", "-np", "1"]
    starts = contextlib.nullcontext() if may else pytest.raises(ServerEndedError)
    with starts, start(words, tmp_path / "log", port=port) as server:
        server.wait_ready()

    assert option is not None
    assert may is (option is left)
