"""What `install.sh` would install, as its dry run says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.folders import ROOT


def install(folder: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Called in a folder, for which it would stage what it installs."""
    return subprocess.run(
        ["/bin/sh", ROOT / "install.sh", *options],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DESTDIR": str(folder)},  # as of a service
        cwd=folder, capture_output=True, text=True, timeout=400, check=check,
    )  # fmt: skip


def planned(folder: Path, *options: str) -> str:
    said = install(folder, "--system", "--dry-run", *options).stdout
    assert not (folder / "opt/tunerd/bin").exists()
    (line,) = [one for one in said.splitlines() if "and its packages into" in one]
    return line.split()[2]


def test_options_say_which_extras_come_and_an_upgrade_keeps_what_a_shared_store_needs(
    tmp_path: Path,
) -> None:
    for options, what in (
        ((), "tunerd[embedded]"),
        (("--without-embedded",), "tunerd"),
        (("--without-embedded", "--with-fleet"), "tunerd[fleet]"),
    ):
        assert planned(tmp_path, *options) == what
    (tmp_path / "opt/tunerd/lib/python3.99/site-packages/psycopg").mkdir(parents=True)
    assert planned(tmp_path) == "tunerd[embedded,fleet]", "though the Python was replaced"


@pytest.mark.parametrize(("name", "code"), [("Jack's", 1), ("a b%ü", 0)])
def test_a_try_out_begins_in_no_folder_of_which_no_program_can_serve(
    tmp_path: Path, name: str, code: int
) -> None:
    """It ended after everything was installed: systemd refuses such a program, and so does the supervisor."""
    done = install(tmp_path, "--try", name, "--dry-run", check=False)
    assert done.returncode == code, done.stderr
    assert ("it has a quote" in done.stderr) == bool(code)
    assert not (tmp_path / name).exists()


def test_settings_behind_a_link_that_leads_nowhere_are_kept(tmp_path: Path) -> None:
    """The link was replaced by the shipped settings, so that tunerd went by those, of another unit."""
    settings = tmp_path / "etc/tunerd/tunerd.toml"
    settings.parent.mkdir(parents=True)
    settings.symlink_to("/nowhere/tunerd.toml")
    done = install(tmp_path, "--system", "--dry-run")
    assert f"would write {settings}\n" not in done.stdout
    assert f"kept {settings}, a link to what is not there" in done.stderr


def uninstall(folder: Path) -> str:
    return install(folder, "--system", "--uninstall", "--dry-run").stdout


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("mine.service", "/opt/tunerd/bin/tunerd-llama-server"),
        ("mine.service", "/usr/local/bin/tunerd-llama-server"),
        ("mine.service.d/program.conf", "/opt/tunerd/bin/tunerd-llama-server"),
        ("mine.service.pre-20260101T000000Z-apply", "/usr/local/bin/tunerd-llama-server"),
    ],
)
def test_uninstalling_leaves_a_unit_its_server_wherever_it_names_it(
    tmp_path: Path, name: str, program: str
) -> None:
    unit, link = tmp_path / "etc/systemd/system" / name, "usr/local/bin/tunerd-llama-server"
    unit.parent.mkdir(parents=True)
    (tmp_path / link).parent.mkdir(parents=True)
    (tmp_path / link).symlink_to("/opt/tunerd/bin/tunerd-llama-server")
    unit.write_text("[Service]\nExecStart=/usr/bin/other\n")
    own = tmp_path / "opt/tunerd"
    gone = f"would run: rm -rf -- {own} {own}.old\n", f"would run: rm -f -- {tmp_path / link}"
    assert all(line in uninstall(tmp_path) for line in gone)

    unit.write_text(f"[Service]\nExecStart={program}\n")

    said = uninstall(tmp_path)
    assert f"  {unit}\n" in said
    assert not any(line in said for line in gone)


def test_a_record_that_recovery_set_aside_keeps_nobody_from_uninstalling(tmp_path: Path) -> None:
    journal = tmp_path / "var/lib/tunerd/journal"
    journal.mkdir(parents=True)
    (journal / "llama-server.service.json.damaged").write_text("{")
    assert "nothing was done" in uninstall(tmp_path)


def test_no_file_of_the_folder_that_it_is_called_in_is_taken_for_a_module(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for module in ("ctypes", "ensurepip", "venv"):
        (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    install(tmp_path, "--python", "--without-embedded")
    assert not ran.exists()


def test_a_call_that_means_two_things_or_none_installs_nothing(tmp_path: Path) -> None:
    for options, told in (
        (("--user", "--system"), "error: --user and --system exclude each other"),
        (("--system", "--try"), "error: --system and --try exclude each other"),
        (("--nosuch",), "error: no such option: --nosuch"),
    ):
        done = install(tmp_path, "--dry-run", *options, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr.splitlines()
