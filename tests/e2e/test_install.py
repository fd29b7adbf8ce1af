"""install.sh on a machine that has never seen tunerd: in, again, and out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Machines
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import NOT_COMPILED, OFFLINE_PIP, SOURCES_INSIDE, Tunerd, host_root

INSTALL = SOURCES_INSIDE / "install.sh"
SETTINGS = "/etc/tunerd/tunerd.toml"
PROFILE = 'extends = "cpu-embedded-baseline"\nmodel.path = "/srv/models/tiny.gguf"\n'
BEFORE_AND_AFTER = r"before [0-9]+ tok/s, after [0-9]+ tok/s; promoted: .*type = .ngram-mod"
PIP = " ".join(f"{name}={value}" for name, value in (OFFLINE_PIP | NOT_COMPILED).items())
# Kept on a machine for other reasons, and changing all the time.
NOT_LOOKED_AT = (
    "-path /proc -o -path /sys -o -path /dev -o -path /run -o -path /var/log -o -path /tmp"
)


def install(
    machine: Machine, *arguments: str, user: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    return machine.run(INSTALL, *arguments, user=user, env=OFFLINE_PIP | NOT_COMPILED, check=check)


def files_of(machine: Machine, *without: str) -> list[str]:
    """Every file with its mode, owner and time, but for those in the folders `without`."""
    pruned = " -o ".join(f"-path '{folder}'" for folder in (*NOT_LOOKED_AT, *without))
    script = rf"find / -xdev \( {pruned} \) -prune -o -type f -printf '%p %m %u %T@\n'"
    return sorted(machine.sh(script).stdout.splitlines())


def completed(machine: Machine, script: str, user: str | None = None) -> set[str]:
    """What bash offers behind `tunerd st`, with this completion script."""
    typed = "PATH=~/.local/bin:$PATH COMP_WORDS=(tunerd st) COMP_CWORD=1; _tunerd_completion tunerd"
    offered = machine.sh(f"bash -c '. {script}; {typed}; echo ${{COMPREPLY[*]}}'", user=user)
    return set(offered.stdout.split())


def serve(machine: Machine, program: str) -> None:
    """A unit llama-server.service that starts this program, with a backup beside it."""
    unit = (
        f"[Service]\nExecStart={program} --model /srv/models/tiny.gguf --port 8080 --threads 1\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    folder = "/etc/systemd/system"
    machine.write(f"{folder}/llama-server.service", unit)
    machine.write(f"{folder}/llama-server.service.pre-20260101T000000Z-apply", unit)
    machine.systemctl("daemon-reload")
    machine.systemctl("enable", "--now", "llama-server")


def test_root_installs_for_the_machine(bare_machine: Machine) -> None:
    said = install(bare_machine).stdout

    assert "tunerd is installed" in said
    assert bare_machine.run("tunerd", "--version").stdout.startswith("tunerd ")
    assert bare_machine.systemctl("is-active", "tunerd.service") == "active"
    assert bare_machine.systemctl("is-enabled", "tunerd.service") == "enabled"
    assert bare_machine.systemctl("is-active", "llama-server", check=False) == "inactive"
    assert ".SH COMMANDS" in bare_machine.read("/usr/local/share/man/man1/tunerd.1")
    script = "/usr/local/share/bash-completion/completions/tunerd"
    assert completed(bare_machine, script) == {"status"}


def test_installing_again_waits_for_a_change_and_keeps_all_of_the_users_its_webhook_to_its_owner(
    installed_machine: Machine,
) -> None:
    settings = '[backups]\nkeep = 7\n[notify]\nwebhook = "https://ntfy.sh/my-own-topic"\n'
    installed_machine.write(SETTINGS, settings)
    installed_machine.sh(
        f"chmod 0644 {SETTINGS}; : >/opt/tunerd/mine; : >/opt/tunerd/source.sha256"
    )
    waits = "a change is under way; waiting for it to end"
    change = f"until grep -q '{waits}' /run/said; do sleep 0.1; done"
    installed_machine.start("flock", "/var/lib/tunerd/lock", "sh", "-c", change)
    installed_machine.sh("while flock -n /var/lib/tunerd/lock true; do sleep 0.1; done")
    before = files_of(installed_machine, "/opt/tunerd", "/var/lib/tunerd")
    installed_machine.start("flock", "--shared", "/opt", "sleep", "infinity", user="bob")
    installed_machine.sh("while flock -n /opt true; do sleep 0.1; done")

    installed_machine.sh(f"{PIP} {INSTALL} >/run/said")

    said = installed_machine.read("/run/said")
    assert waits in said
    assert "installation is under way" not in said, "of an account that locks what it can read"
    assert "kept your /etc/tunerd/tunerd.toml" in said
    assert "wrote" not in said
    assert installed_machine.read(SETTINGS) == settings
    after = files_of(installed_machine, "/opt/tunerd", "/var/lib/tunerd")
    assert {*after} - {*before} == {row.replace(" 644 ", " 600 ") for row in {*before} - {*after}}
    assert installed_machine.sh(f"stat -c %a {SETTINGS}").stdout == "600\n"
    assert installed_machine.exists("/opt/tunerd/mine")
    assert not installed_machine.exists("/opt/tunerd/source.sha256"), "Ansible installs over this"
    assert installed_machine.systemctl("is-active", "tunerd.service") == "active"


def test_an_upgrade_ends_what_measures_and_watches_once_all_is_there_to_replace_it(
    installed_machine: Machine,
) -> None:
    machine = installed_machine
    machine.write(SETTINGS, '[service]\nsettle_s = 0.3\n[models]\ndirs = ["/srv/models"]\n')
    machine.write("/etc/tunerd/profiles/plain.toml", PROFILE)
    machine.run("tunerd", "apply", "plain", "--yes", limit_s=180)
    machine.run("tunerd", "apply", "plain", "--set", "serving.ctx_size=512", "--yes", limit_s=180)
    words = ("compare", "--set", "serving.n_batch=256", "--budget", "10m", "--yes")
    compare = machine.start("tunerd", *words)
    machine.sh("until systemctl is-active -q 'tunerd-candidate-*'; do sleep 0.2; done")
    old = "/run/systemd/system/tunerd-guard-check.service"  # as earlier versions left it
    machine.write(old, "[Service]\nExecStart=/bin/true\n")
    machine.run("systemd-run", "--unit=tunerd-hand-in", "sleep", "infinity")

    said = install(machine).stdout

    for unit in ("tunerd.service", "tunerd-hand-in.service", "tunerd-lease-"):
        assert said.index(f"stopping {unit}") > said.index("installing Python packages"), said
    assert "What serves now was not touched" not in said
    assert "A measurement was ended for it, and your server started again in its place" in said
    going_on = "until grep -q running /var/lib/tunerd/probation/2.json; do sleep 0.2; done"
    machine.sh(going_on)
    compare.communicate(timeout=240)
    assert compare.returncode not in {0, None}
    machine.sh("curl --silent --fail http://127.0.0.1:8080/health")
    assert machine.systemctl("is-active", "llama-server") == "active"
    assert machine.systemctl("is-active", "tunerd.service") == "active"
    assert not machine.exists(old)


def test_an_upgrade_that_fails_or_is_cut_short_leaves_all_as_it_was(
    installed_machine: Machine,
) -> None:
    """pip that was interrupted while it replaced tunerd left none, and the server in it could not start again."""
    machine = installed_machine
    daemon = machine.show("tunerd.service", "MainPID")
    failed = machine.run(INSTALL, env={"PIP_NO_INDEX": "1"}, check=False)
    assert "error: pip could not install the packages" in failed.stderr
    for signal_name in ("HUP", "KILL"):
        machine.sh(
            f"rm -f /root/said; {PIP} setsid {INSTALL} >/root/said 2>&1 & pid=$!; "
            "until grep -q installing /root/said; do sleep 0.1; done; "
            f"kill -s {signal_name} -- -$pid; wait $pid || true"
        )
        assert machine.show("tunerd.service", "MainPID") == daemon
        assert machine.run("tunerd", "status").returncode == 0

    # As one left it that put packages where they were used; between its moves a Python that ends writes
    # bytecode, and a signal comes.
    machine.sh("rm /opt/tunerd/lib/python3*/site-packages/tunerd-*.dist-info/RECORD")
    between = 'mkdir -p /opt/tunerd/lib; kill -s TERM "$PPID"'
    moves = f'#!/bin/sh\n/bin/mv "$@" && case "$*" in *.old) {between};; esac\n'
    machine.write("/root/bin/mv", moves, mode=0o755)
    machine.sh(f"export PATH=/root/bin:$PATH; {PIP} {INSTALL}")

    assert machine.show("tunerd.service", "MainPID") != daemon
    assert machine.systemctl("is-active", "tunerd.service", "tunerd.socket") == "active\nactive"
    assert {*machine.files("/opt")} & {"tunerd", "tunerd.new", "tunerd.old"} == {"tunerd"}


def test_an_upgrade_whose_second_move_fails_takes_back_the_first(
    installed_machine: Machine,
) -> None:
    """Folders that a Python made anew while they were removed left none, and then lost what its owner had put there."""
    machine = installed_machine
    fails_late = '#!/bin/sh\n/bin/rm "$@" && [ "$*" != "-rf -- /opt/tunerd" ]\n'
    machine.write("/root/bin/rm", fails_late, mode=0o755)
    # As one left it that was killed there.
    killed = "mv /opt/tunerd /opt/tunerd.old && mkdir -p /opt/tunerd/lib && : >/opt/tunerd.old/mine"
    machine.sh(killed)
    moves = '#!/bin/sh\ncase "$*" in *.new\\ /opt/tunerd) exit 1;; esac\n/bin/mv "$@"\n'
    machine.write("/root/bin/mv", moves, mode=0o755)

    done = machine.sh(f"export PATH=/root/bin:$PATH; {PIP} {INSTALL}", check=False)

    assert done.returncode == 1
    assert "could not move the new /opt/tunerd into its place" in done.stderr
    assert machine.exists("/opt/tunerd/mine")
    assert machine.systemctl("is-active", "tunerd.service") == "active"
    assert machine.run("tunerd", "status").returncode == 0
    assert {*machine.files("/opt")} & {"tunerd", "tunerd.new", "tunerd.old"} == {"tunerd"}


def test_the_servers_account_cannot_write_what_tunerd_knows(installed_machine: Machine) -> None:
    machine = installed_machine
    stat = machine.run("stat", "-c", "%a %U %G", "/var/lib/tunerd", "/var/lib/llama-server")
    assert stat.stdout.splitlines() == ["755 root root", "750 llama-server llama-server"]
    machine.run("getent", "group", "tunerd")
    assert machine.run("getent", "passwd", "llama-server").stdout.strip().endswith("nologin")
    for path in ("/var/lib/tunerd/x", "/etc/tunerd/x", "/opt/tunerd/x", "/run/tunerd/x"):
        assert machine.run("touch", path, user="llama-server", check=False).returncode
    program = "/opt/tunerd/bin/tunerd-llama-server"
    said = machine.run(program, "--version", user="llama-server")
    assert "version" in said.stdout + said.stderr


def test_settings_that_nobody_changed_follow_the_shipped_ones(installed_machine: Machine) -> None:
    machine = installed_machine
    old, writes = "# settings as an earlier version shipped them\n", f"would write {SETTINGS}\n"
    machine.write("/opt/tunerd/share/tunerd/tunerd.toml", old)
    machine.write(SETTINGS, old)
    assert writes in install(machine, "--dry-run").stdout
    machine.write(SETTINGS, f"{old}[backups]\nkeep = 7\n")
    assert writes not in install(machine, "--dry-run").stdout


def test_uninstalling_waits_for_a_swap_and_keeps_the_server_its_engine_its_backups_and_history(
    installed_machine: Machine,
) -> None:
    machine, record = installed_machine, "/var/lib/tunerd/journal/llama-server.service.json"
    serve(machine, "/opt/tunerd/bin/tunerd-llama-server")
    machine.write("/var/lib/tunerd/generations/000001/unit", "x")
    machine.systemctl("stop", "tunerd")
    machine.write(record, "{}")
    refused = install(machine, "--uninstall", check=False)
    assert (refused.returncode, "tunerd recover" in refused.stderr) == (1, True)
    assert machine.exists("/opt/tunerd/bin/tunerd")
    machine.run("rm", record)

    said = install(machine, "--uninstall").stdout

    assert "/etc/systemd/system/llama-server.service\n" in said
    assert not machine.exists("/usr/local/bin/tunerd")
    machine.systemctl("restart", "llama-server")
    curl = "curl --silent --fail http://127.0.0.1:8080/health"
    machine.sh(f"until {curl}; do sleep 0.1; systemctl is-active -q llama-server; done")

    serve(machine, "/bin/sh -c 'sleep infinity' ")
    machine.systemctl("restart", "llama-server")
    pid = machine.show("llama-server", "MainPID")
    assert "tunerd is removed" in install(machine, "--uninstall").stdout
    assert machine.show("llama-server", "MainPID") == pid
    assert machine.systemctl("is-active", "llama-server") == "active"
    backups = [name for name in machine.files("/etc/systemd/system") if ".pre-" in name]
    assert backups == ["llama-server.service.pre-20260101T000000Z-apply"]
    assert machine.read("/var/lib/tunerd/generations/000001/unit") == "x"
    assert machine.exists(SETTINGS)
    find = "find /usr/local /opt/tunerd /etc/systemd -name '*tunerd*' -not -path '/usr/local/src/*'"
    assert machine.sh(find, check=False).stdout == ""
    assert machine.show("tunerd.service", "LoadState") == "not-found"
    install(machine, "--uninstall")


def test_files_staged_below_destdir_work_where_they_belong(
    machines: Machines, build_root: Callable[..., Root]
) -> None:
    machine = machines(build_root(host_root, tunerd=Tunerd.BARE))
    before = files_of(machine)
    env = {**OFFLINE_PIP, **NOT_COMPILED, "DESTDIR": "/run/staged"}
    machine.run(INSTALL, env=env)
    assert files_of(machine) == before, "nothing but the staged files"
    assert machine.sh("ls /run/staged/opt").stdout == "tunerd\n"
    assert machine.systemctl("is-enabled", "tunerd.service", check=False) != "enabled"

    machine.sh("cp -a /run/staged/. / && rm -r /run/staged")

    machine.sh("systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload")
    machine.systemctl("enable", "--now", "tunerd.service")
    assert machine.run("tunerd", "--version").stdout.startswith("tunerd ")


def test_a_user_installs_and_uninstalls_without_root_where_the_manager_looks_for_units(
    bare_machine: Machine,
) -> None:
    before = files_of(bare_machine, "/home/alice")
    own = {"XDG_DATA_HOME": "/home/alice/data"}
    refused = bare_machine.run(INSTALL, "--user", user="alice", env=own, check=False)
    assert refused.returncode == 1
    assert "does not look for units in /home/alice/data/systemd/user" in refused.stderr
    assert "XDG_DATA_HOME" in refused.stderr
    assert not bare_machine.exists("/home/alice/data")

    install(bare_machine, "--user", user="alice")

    assert bare_machine.systemctl("is-active", "tunerd.service", user="alice") == "active"
    assert bare_machine.systemctl("is-enabled", "tunerd.service", user="alice") == "enabled"
    assert files_of(bare_machine, "/home/alice") == before
    assert ".SH COMMANDS" in bare_machine.read("/home/alice/.local/share/man/man1/tunerd.1")
    script = "~/.local/share/bash-completion/completions/tunerd"
    assert completed(bare_machine, script, user="alice") == {"status"}
    bare_machine.power_cut()
    bare_machine.boot()
    bare_machine.systemctl("is-system-running", "--wait", user="alice")
    assert bare_machine.systemctl("is-active", "tunerd.service", user="alice") == "active"

    bare_machine.sh(f"mv {SOURCES_INSIDE} {SOURCES_INSIDE}.away")
    kept = "/home/alice/.local/share/tunerd/venv/share/tunerd/install.sh"
    bare_machine.run(kept, "--user", "--uninstall", user="alice")

    assert bare_machine.show("tunerd.service", "LoadState", user="alice") == "not-found"
    left = bare_machine.sh("cd ~ && find . -name '*tunerd*' | sort", user="alice")
    kept_files = ["./.config/tunerd", "./.config/tunerd/tunerd.toml", "./.local/state/tunerd"]
    assert left.stdout.split() == kept_files, "and nothing else, as it says"


def test_what_is_missing_is_told_with_how_to_get_it_before_anything_is_downloaded(
    bare_machine: Machine,
) -> None:
    for files, what, package in (
        ("/usr/lib/x86_64-linux-gnu/libgomp.so.1*", "libgomp.so.1 is missing", "libgomp1"),
        ("/usr/lib/python3*/ensurepip", "venv module is missing", "python3-venv"),
    ):
        bare_machine.sh(f"rm -r {files}")
        refused = install(bare_machine, "--try", "/home/bob/try", user="bob", check=False)
        assert refused.returncode == 1
        assert what in refused.stderr
        assert f"apt-get install --yes --no-install-recommends {package}" in refused.stderr
        assert not bare_machine.exists("/home/bob/try")

    offline = install(bare_machine, check=False)
    assert offline.returncode == 1
    assert "Python's venv module is missing, running: apt-get install" in offline.stderr
    assert "error: Python's venv module is missing\n" in offline.stderr


@pytest.mark.timeout(1800)  # so it begins early: its sweep alone takes a while
@pytest.mark.parametrize("budget_s", [60, pytest.param(210, marks=pytest.mark.alone)])
def test_the_try_out_does_the_main_job_and_stays_in_its_folder(
    bare_machine: Machine, budget_s: int
) -> None:
    """Beside other tests nothing is proved however long it sweeps, and by itself it is."""
    bare_machine.run("sed", "-i", f"s/--budget 210s/--budget {budget_s}s/", INSTALL)
    before = files_of(bare_machine)
    # One that was killed left its number, which is somebody else's by now.
    bare_machine.start("sleep", "1234", user="bob")
    bare_machine.sh("until pgrep -u bob -x sleep; do sleep 0.1; done")
    bare_machine.sh(
        "cd /home/bob && mkdir -p 'try out/run' && touch 'try out/.made-by-tunerd-try' && "
        "pgrep -u bob -x sleep >'try out/run/supervise.pid' && chown -R bob: 'try out'"
    )

    said = install(bare_machine, "--try", "/home/bob/try out", user="bob").stdout

    for step in ("detect", "plan", "apply", "rollback", "sweep run", "history", "report"):
        assert f"$ tunerd {step}" in said
    last = said[said.index("That was the main job") :]
    # What a busy machine says of itself is no proof, and nothing is promoted.
    assert ("$ tunerd promote" in said) == bool(re.search(BEFORE_AND_AFTER, last)), said
    nothing = "|nothing was promoted, .* still [0-9]+ tok/s" if budget_s < 210 else ""
    assert re.search(BEFORE_AND_AFTER + nothing, last), said
    assert bare_machine.read("/home/bob/try out/report.html").startswith("<!doctype html>")
    assert "remove it    rm -r '/home/bob/try out'" in last
    bare_machine.sh("ln -s '/home/bob/try out/tunerd' /run/again")
    again = bare_machine.run("/run/again", "apply", "mine", "--yes", user="bob").stdout
    assert "generation 4" in again or "generation 5" in again, "where one can go on"
    (ends,) = re.findall(r"end that +(kill .*)", last)
    bare_machine.sh(f"{ends}; while pgrep -u bob -f '[s]upervisor'; do sleep 0.1; done")
    assert files_of(bare_machine, "/home/bob/try out") == before
    left = bare_machine.run("pgrep", "-u", "bob", "--list-full", check=False).stdout.splitlines()
    assert [line.split()[1:] for line in left] == [["sleep", "1234"]], "all of its own has ended"
