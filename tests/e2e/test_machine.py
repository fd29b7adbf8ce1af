"""The machines themselves: what every other end-to-end test takes for granted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Machines
from tests.support import cgroup, run_folder
from tests.support.machine import Machine, MachineError
from tests.support.overlay import Root
from tests.support.roots import OFFLINE_PIP, SOURCES, cache_folder, sid_root


def test_it_boots_with_all_of_its_services(machine: Machine) -> None:
    assert machine.boot_state == "running"
    assert machine.read("/proc/1/comm").strip() == "systemd"
    assert machine.systemctl("is-active", "dbus.service", "systemd-logind.service") == (
        "active\nactive"
    )


def test_nothing_that_the_host_enabled_runs_in_it(host_machine: Machine) -> None:
    assert host_machine.files("/home") == ["alice", "bob"]
    assert host_machine.files("/root") in ([], [".ssh"])  # systemd-tmpfiles makes that one
    running = host_machine.systemctl(
        *("list-units", "--type=service", "--state=running", "--plain", "--no-legend")
    )
    names = {line.split()[0].partition("@")[0] for line in running.splitlines()}
    assert names <= {
        "dbus.service",
        "polkit.service",
        "systemd-journald.service",
        "systemd-logind.service",
        "user",
    }


def test_tunerd_is_installed(machine: Machine) -> None:
    said = machine.run("tunerd-llama-server", "--version")

    assert "version" in said.stdout + said.stderr
    imported = machine.run("/opt/tunerd/bin/python", "-c", "import tunerd; print(tunerd.__file__)")
    assert imported.stdout.startswith("/opt/tunerd/lib/")


def test_a_user_who_lingers_has_a_service_manager(machine: Machine) -> None:
    # It lives on: of a process that has ended journald may not learn in time whose it was.
    script = "echo hello from $(id -un); exec sleep infinity"
    unit = f"[Service]\nExecStart=/bin/sh -c '{script}'\n"
    machine.write("/home/alice/.config/systemd/user/hello.service", unit, owner="alice")

    machine.systemctl("daemon-reload", user="alice")
    machine.systemctl("start", "hello", user="alice")

    assert machine.systemctl("is-active", "hello", user="alice") == "active"
    machine.sh(
        "until journalctl --user --quiet --unit=hello | grep 'hello from alice'; do sleep 0.1; done",
        user="alice",
        limit_s=20,
    )
    assert machine.run("id", "-un", user="bob").stdout == "bob\n"


def test_a_failed_command_says_what_it_printed(host_machine: Machine) -> None:
    with pytest.raises(MachineError, match=r"(?s)ended with 3.*words on stderr"):
        host_machine.sh("echo words on stderr >&2; exit 3")
    with pytest.raises(MachineError, match="took over 1 s"):
        host_machine.run("sleep", "30", limit_s=1)
    assert host_machine.sh("exit 3", check=False).returncode == 3


def test_a_file_is_written_where_the_machine_sees_it(host_machine: Machine) -> None:
    for path in ("/run/a/file", "/etc/file"):
        host_machine.write(path, b"\x00\xff\n", mode=0o640, owner="alice")
        seen = host_machine.sh(f"stat -c '%a %U %G' {path}; od -An -tx1 {path}").stdout
        assert seen == "640 alice alice\n 00 ff 0a\n"
        assert not Path(path).exists()


def test_a_service_has_a_cgroup_of_its_own(machine: Machine) -> None:
    done = machine.service("cat", "/proc/self/cgroup", properties={"User": "alice"})

    assert "0::/system.slice/run-" in done.stdout


def test_two_machines_may_listen_on_the_same_port(machines: Machines, host_root: Root) -> None:
    for _ in range(2):
        machine = machines(host_root)
        machine.systemctl("daemon-reload")
        machine.run(
            *("systemd-run", "--unit=web", "python3", "-m", "http.server", "8080"),
            *("--bind", "127.0.0.1", "--directory", "/srv"),
        )
        machine.sh("until curl -sf http://127.0.0.1:8080/; do sleep 0.05; done", limit_s=20)


def test_a_poweroff_is_told_to_services_and_a_power_cut_is_not(machine: Machine) -> None:
    unit = (
        "[Service]\nExecStart=sleep infinity\nExecStop=sh -c 'echo told >> /var/told'\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    machine.write("/etc/systemd/system/witness.service", unit)
    machine.systemctl("enable", "--now", "witness")

    machine.power_cut()
    assert not machine.exists("/var/told")

    machine.boot()
    assert machine.systemctl("is-active", "witness") == "active"
    machine.poweroff()
    assert machine.read("/var/told") == "told\n"


@pytest.mark.parametrize("strict", [False, True])
def test_a_power_cut_loses_what_was_not_synced(
    machines: Machines, any_root: Root, strict: bool
) -> None:
    machine = machines(any_root, disk_mib=256, strict_disk=strict)
    machine.sh("mkdir /kept; cd /kept; for file in whole torn lost; do printf old > $file; done")
    machine.sh("journalctl --sync; sync --file-system /")

    replace = "cd /kept; printf new > {0}.tmp; {1}; mv {0}.tmp {0}; {2}"
    machine.sh(replace.format("torn", ":", "sync ."))
    machine.sh(replace.format("whole", "sync whole.tmp", "sync ."))
    machine.sh(replace.format("lost", ":", ":"))
    machine.sh("printf new > /kept/extra")
    assert machine.sh("cd /kept; cat whole torn lost extra").stdout == "newnewnewnew"

    machine.power_cut()

    assert machine.read("/kept/whole") == "new"
    assert machine.read("/kept/lost") == "old"
    assert not machine.exists("/kept/extra")
    if strict:
        assert machine.read("/kept/torn") not in {"new", "old"}, "a synced name, unsynced content"
    machine.boot()
    assert machine.boot_state == "running"
    assert machine.read("/kept/lost") == "old"


def test_closing_leaves_nothing_behind(machines: Machines, host_root: Root) -> None:
    machine = machines(host_root, disk_mib=64)

    machine.close()

    assert machine.name not in Path("/proc/self/mountinfo").read_text()
    assert not cgroup.group_of(machine.name).exists()
    assert not (cache_folder() / "run" / machine.name).exists()
    assert machine.name not in subprocess.check_output(["/sbin/losetup", "--list"], text=True)


@pytest.mark.usefixtures("host_root")
def test_what_a_killed_test_run_left_is_swept_away() -> None:
    script = (
        "from tests.support import roots; from tests.support.machine import Machine\n"
        "machine = Machine(roots.host_root(), disk_mib=64).boot()\n"
        "print(machine.name, flush=True); input()"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", script], cwd=SOURCES, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    name = killed.stdout.readline().decode().strip()
    assert name not in run_folder.sweep(cache_folder()), "its owner lives"

    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    swept = run_folder.sweep(cache_folder())

    assert name in swept
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert not cgroup.group_of(name).exists()
    commands = [
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(path)
    ]
    assert not any(f"--machine\0{name}\0".encode() in command for command in commands)


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK)


def test_tests_run_inside(machine: Machine) -> None:
    done = machine.pytest("tests/e2e/inside/test_inside.py", "-q")
    assert "1 passed" in done.stdout

    with pytest.raises(MachineError, match="1 failed"):
        machine.pytest("tests/e2e/inside/test_inside.py", env={"TUNERD_TEST_FAIL": "1"})


def test_pip_needs_no_network_in_it(machine: Machine) -> None:
    machine.run(
        *("/opt/tunerd/bin/python", "-m", "pip", "download", "-q", "-d", "/root/x", "xllamacpp"),
        env=OFFLINE_PIP,
    )

    assert any(name.startswith("xllamacpp") for name in machine.files("/root/x"))


def test_debians_llama_server_generates(sid_machine: Machine) -> None:
    sid_machine.run(
        *("systemd-run", "--unit=server", "--property=User=bob", "llama-server"),
        *("--model", "/srv/models/tiny.gguf", "--port", "8080", "--threads", "1"),
    )
    curl = "curl --silent --fail --show-error http://127.0.0.1:8080"
    sid_machine.sh(f"until {curl}/health; do sleep 0.1; systemctl is-active -q server; done")

    body = json.dumps({"prompt": "0123", "n_predict": 4})
    done = sid_machine.sh(f"{curl}/completion --data '{body}'")

    assert json.loads(done.stdout)["timings"]["predicted_n"] == 4


def test_the_packaged_unit_of_debian_can_be_there(
    machines: Machines, build_root: Callable[..., Root]
) -> None:
    machine = machines(build_root(sid_root, packages=("llama.cpp-services",)))

    assert machine.systemctl("is-enabled", "llama-server", check=False) == "disabled"
    fragment = machine.show("llama-server", "FragmentPath")
    assert fragment == "/usr/lib/systemd/system/llama-server.service"
    assert machine.run("id", "-un", "_llama-server").stdout == "_llama-server\n"
    assert machine.run("id", "-un", "alice").stdout == "alice\n"


def test_the_software_gpu_is_seen_where_it_is_asked_for(sid_machine: Machine) -> None:
    asked = sid_machine.run("llama-server", "--list-devices", env={"GGML_VK_VISIBLE_DEVICES": "0"})
    unasked = sid_machine.run("llama-server", "--list-devices")

    assert "Vulkan0: llvmpipe" in asked.stdout
    assert "Vulkan0" not in unasked.stdout
