"""What `tunerd emit` writes means the same to podman's own generator and to compose itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.e2e.conftest import Machines
from tests.support import roots
from tests.support.emitted import HOSTILE, LINES, same, server_of, words_of
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import Tunerd
from tunerd.engine.emit import Flag, Server, Target, emit
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
    root = build_root(
        roots.sid_root, tunerd=Tunerd.BARE, packages=("podman", "nftables", "docker-compose")
    )
    # crun asks the kernel to keep devices from a container by a program (bpf).
    return machines(root, options=("--capability=CAP_BPF", "--system-call-filter=bpf"))


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


@pytest.mark.parametrize("target", [Target.QUADLET, Target.COMPOSE])
def test_a_container_that_was_written_serves(neighbour: Machine, target: Target) -> None:
    program, folder = "/usr/bin/llama-server", "/srv/it's 100% $m"
    neighbour.write(
        "/etc/containers/containers.conf", "[containers]\nkeyring = false\npids_limit = 0\n"
    )
    neighbour.write("/etc/keys/k", "designed-key\n")
    neighbour.sh(
        f"""mount --types tmpfs tmpfs /var/lib/containers  # overlayfs does not stand on itself
        mkdir {shlex.quote(folder)}; cp /srv/models/tiny.gguf {shlex.quote(folder)}/m.gguf
        tar --create --dereference /tmp $(ldd {program} | grep --only-matching '/[^ ]*') \\
            {program} /usr/lib/x86_64-linux-gnu/ggml | podman import \\
            --change 'ENTRYPOINT ["{program}"]' - localhost/engine:designed"""
    )
    model = f"{folder}/m.gguf"
    words = {
        "--model": model,
        "--threads": "1",
        "--ctx-size": "256",
        "--api-key-file": "/etc/keys/k",
        "--slot-save-path": folder,
    }
    server = replace(
        server_of(
            folders={model: (folder, "m.gguf"), folder: (folder, ".")},
            environment={"LLAMA_ARG_ALIAS": "it's 100% $m"},
            api_key_file="/etc/keys/k",
        ),
        flags=tuple(map(Flag, words.items())), has_gpu=False, port=8093, stop_timeout_s=47,
    )  # fmt: skip
    text = emit(target, [server], image="localhost/engine:designed").text
    if target is Target.QUADLET:
        neighbour.write("/etc/containers/systemd/designed.container", text)
        neighbour.systemctl("daemon-reload")
        neighbour.systemctl("start", "designed.service")
    else:
        neighbour.write("/srv/compose.yaml", text)
        neighbour.systemctl("start", "podman.socket")
        neighbour.run(
            "docker-compose", "--file", "/srv/compose.yaml", "up", "--detach",
            env={"DOCKER_HOST": "unix:///run/podman/podman.sock"},
        )  # fmt: skip
    ask = ("curl", "--silent", "--header", "Authorization: Bearer designed-key", "--retry", "60",
           "--retry-all-errors", "--retry-delay", "1", "--fail", "--request")  # fmt: skip
    asked = neighbour.run(*ask, "GET", "http://127.0.0.1:8093/v1/models")
    assert [one["id"] for one in json.loads(asked.stdout)["data"]] == ["it's 100% $m"]
    body = json.dumps({"prompt": "a b c", "n_predict": 4, "id_slot": 0})
    neighbour.run(*ask, "POST", "--data", body, "http://127.0.0.1:8093/completion")
    saved = json.dumps({"filename": "slot.bin"})
    neighbour.run(*ask, "POST", "--data", saved, "http://127.0.0.1:8093/slots/0?action=save")
    assert neighbour.exists(f"{folder}/slot.bin")
    without = neighbour.run("curl", "--silent", "http://127.0.0.1:8093/completion", "--data", body)
    assert json.loads(without.stdout)["error"]["code"] == 401
    (container,) = json.loads(neighbour.run("podman", "container", "inspect", "--latest").stdout)
    assert container["Config"]["StopTimeout"] == server.stop_timeout_s
