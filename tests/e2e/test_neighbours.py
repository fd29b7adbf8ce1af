"""What `tunerd emit` writes means the same to podman's own generator and to compose itself."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Machines
from tests.support import roots
from tests.support.emitted import HOSTILE, LINES, same, server_of, words_of
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import Tunerd
from tunerd.engine.emit import Server, Target, emit
from tunerd.units.text import parse_exec, parse_unit

IMAGE = "ghcr.io/ggml-org/llama.cpp:server-cuda"
ADDRESS = ["--host", "0.0.0.0", "--port", "8080"]  # noqa: S104 -- of the container
MODEL = "/srv/it's 100% $m/m.gguf"
GENERATOR = "/usr/libexec/podman/quadlet"


def hostile_server() -> Server:
    return server_of(
        *filter(None, HOSTILE), *LINES, MODEL,
        folders={MODEL: ("/srv/it's 100% $m", "m.gguf")},
        environment={"GGML_X": "a 'b' \"c\" 100% $HOME \\"},
        api_key_file="/etc/keys/k",
        locks_memory=True,
    )  # fmt: skip


def expected(server: Server) -> list[str]:
    return [*(word.replace(MODEL, "/mnt/0/m.gguf") for word in words_of(server)), *ADDRESS]


@pytest.fixture
def neighbour(machines: Machines, build_root: Callable[..., Root]) -> Machine:
    root = build_root(roots.sid_root, tunerd=Tunerd.BARE, packages=("podman", "docker-compose"))
    return machines(root)


def test_podman_and_compose_read_what_was_written(neighbour: Machine) -> None:
    server = hostile_server()
    neighbour.write("/srv/units/designed.container", emit(Target.QUADLET, [server]).text)
    made = neighbour.run(
        GENERATOR, "-dryrun", "-no-kmsg-log", env={"QUADLET_UNIT_DIRS": "/srv/units"}
    )
    unit = parse_unit(made.stdout[made.stdout.index("[Unit]") :])
    argv = parse_exec(unit.value("Service", "ExecStart") or "", {}, {}).argv
    at = argv.index(IMAGE)
    assert same(argv[at + 1 :], expected(server))
    options = " ".join(argv[:at])
    assert "-v /srv/it's 100% $m:/mnt/0:ro -v /etc/keys/k:/run/secrets/api-key:ro" in options
    assert "--publish 127.0.0.1:8080:8080" in options
    assert "--device nvidia.com/gpu=all" in options
    assert "--ulimit=memlock=-1" in options
    assert "--env GGML_X=a 'b' \"c\" 100% $HOME \\ " in options

    neighbour.write("/srv/compose.yaml", emit(Target.COMPOSE, [server]).text)
    shown = neighbour.run("docker-compose", "-f", "/srv/compose.yaml", "config", "--format", "json")
    (service,) = json.loads(shown.stdout)["services"].values()
    assert same([word.replace("$$", "$") for word in service["command"]], expected(server))
    assert service["environment"] == {"GGML_X": "a 'b' \"c\" 100% $$HOME \\"}
    assert [one["source"] for one in service["volumes"]] == ["/srv/it's 100% $$m", "/etc/keys/k"]
    assert all(one["read_only"] for one in service["volumes"])
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"capabilities": ["gpu"], "driver": "nvidia", "count": -1}
    assert service["ulimits"] == {"memlock": -1}
