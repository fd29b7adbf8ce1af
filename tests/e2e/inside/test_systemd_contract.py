"""Runs inside a machine: systemd itself keeps the contract, through `systemctl`.

TUNERD_TEST_MANAGER says which manager: `system` (as root) or `user`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.lease import LeaseContract, Take
from tests.contracts.service_manager import UNIT, RealProcessesContract, SystemdContract
from tunerd.app import build_context
from tunerd.errors import ServiceError
from tunerd.machine.clock import SystemClock
from tunerd.paths import paths_for
from tunerd.units.manager import MAX_LINE_CHARS, LeaseSpec, lease_of
from tunerd.units.systemd import Systemd, has_system_manager, has_user_manager, lingers
from tunerd.words import Mode

TOY = Path(__file__).parents[2] / "support/toy_service.sh"
MODE = Mode(os.environ.get("TUNERD_TEST_MANAGER", "system"))


@pytest.fixture
def manager() -> Iterator[Systemd]:
    manager = Systemd(MODE, paths_for(MODE, os.environ))
    yield manager
    path = manager.unit_dir / UNIT
    for unit in manager.service_units():
        if lease_of(unit) is not None:
            manager.stop(unit)
            (manager.runtime_unit_dir / unit).unlink(missing_ok=True)
            manager.reset_failed(unit)
    manager.stop(UNIT)
    if path.exists():
        if any(manager.unit_dir.glob(f"*.wants/{UNIT}")):
            manager.disable(UNIT)
        path.unlink()
        manager.reload()
    manager.reset_failed(UNIT)


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def toy() -> str:
    return str(TOY)


def test_a_folder_that_the_manager_does_not_read_is_told_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """XDG_CONFIG_HOME of a shell alone: the unit was written, and the swap undone at the reload."""
    paths = paths_for(MODE, {**os.environ, "TUNERD_UNIT_DIR": str(tmp_path / "user")})
    with pytest.raises(ServiceError, match="does not read the units in"):
        Systemd(MODE, paths).check_ready()


class TestSystemd(RealProcessesContract, SystemdContract):
    tells_of_good_ends = MODE is Mode.SYSTEM
    wanted_by = "multi-user.target" if MODE is Mode.SYSTEM else "default.target"
    usual_slice = "system.slice" if MODE is Mode.SYSTEM else "app.slice"
    other_bad = (  # directives that it does not know
        ("Type=exec", "Tipe=exec"), ("Type=exec", "LimitNOFILE=many"), ("[Unit]", "[Unyt]"),
    )  # fmt: skip

    def test_the_log_since_a_moment_begins_at_it_and_not_at_a_whole_second(self) -> None:
        self.eventually_logs("early-start", self.start("--print early-start").invocation_id)
        first_s = self.units.log_since(UNIT, self.time.now_s() - 3600, max_lines=1000).begins_s
        assert first_s is not None

        assert self.units.log_since(UNIT, first_s, max_lines=1000).begins_s == first_s
        after_s = self.units.log_since(UNIT, first_s + 0.000_01, max_lines=1000).begins_s
        assert after_s is None or after_s > first_s


class TestLeasesOfSystemd(LeaseContract):
    def test_a_unit_whose_name_is_escaped_is_stopped_and_comes_back(self, take: Take) -> None:
        unit = r"toy\x2done.service"
        text = f"[Service]\nType=exec\nExecStart={self.program} --print up\n"
        self.put(self.units.unit_dir, unit, text)
        self.units.reload()
        self.units.start(unit)
        lease = take(LeaseSpec(uuid.uuid4().hex[:12], unit, True, 60.0, "contract"))
        try:
            assert self.units.state(unit).active_state == "inactive"
            lease.end()
            self.until(lambda: self.units.state(unit).is_active, "it is not back")
        finally:
            self.units.stop(unit)
            (self.units.unit_dir / unit).unlink()
            self.units.reload()


def test_the_managers_that_are_there_are_found() -> None:
    assert has_system_manager()
    assert has_user_manager(os.environ) is (MODE is Mode.USER)
    # cron and su leave these variables out
    assert has_user_manager({}) is (MODE is Mode.USER)
    assert lingers(os.environ) is (MODE is Mode.USER)


OF_ANOTHER = {"XDG_RUNTIME_DIR": "/proc", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/proc/bus"}


@pytest.mark.parametrize("left", [{}, OF_ANOTHER, {"XDG_RUNTIME_DIR": "/gone"}])
def test_whatever_cron_and_su_leave_a_user_has_one_runtime_folder(left: dict[str, str]) -> None:
    """From cron a sweep wrote where the daemon and `apply` did not look; after `su` no unit could be checked."""
    home = {"HOME": os.environ["HOME"]}

    found = build_context(mode=MODE, environment={**home, **left})

    assert has_user_manager(left) is (MODE is Mode.USER)
    assert found.paths == build_context(mode=MODE, environment=dict(os.environ)).paths
    assert found.services.verify("x.service", "[Service]\nExecStart=/bin/true\n") == ()
    assert isinstance(found.services, Systemd)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            found.services.start_scope(f"tunerd-{process.pid}.scope", process.pid, "contract")
        finally:
            process.kill()


def test_a_unit_is_checked_where_no_folder_in_memory_can_be_written(tmp_path: Path) -> None:
    """It ended before anything was done; what may be written by its rights may be full."""
    (tmp_path / "full").touch()
    paths = replace(
        paths_for(MODE, os.environ), runtime_unit_dir=tmp_path / "full" / "systemd" / "system"
    )

    found = Systemd(MODE, paths).verify("x.service", "[Service]\nExecStart=/x\n")

    assert "/x is not executable" in " ".join(found)


def test_a_manager_that_begins_anew_amid_its_work_does_it_all_the_same(
    manager: Systemd, clock: SystemClock
) -> None:
    """An upgrade of systemd or libc at that moment failed a swap and its way back, which ended with exit code 4."""
    text = "[Service]\nExecStartPre=/bin/sleep 0.2\nExecStart=/bin/sleep infinity\n"
    manager.unit_dir.mkdir(parents=True, exist_ok=True)
    (manager.unit_dir / UNIT).write_text(text)
    again = f"while :; do {MODE.systemctl} daemon-reexec; sleep 1.5; done"
    with subprocess.Popen(["/bin/sh", "-c", again], start_new_session=True) as upgrades:
        try:
            end_s = clock.monotonic_s() + 4.0
            while clock.monotonic_s() < end_s:
                manager.reload()
                manager.restart(UNIT)
                assert manager.state(UNIT).is_active
                manager.stop(UNIT)
                assert not manager.state(UNIT).is_active
        finally:
            os.killpg(upgrades.pid, signal.SIGKILL)


def test_a_unit_is_checked_whatever_the_umask_of_whoever_asks(manager: Systemd) -> None:
    """With 000 every unit was refused, since systemd complains of a file that all may write."""
    before = os.umask(0)
    try:
        assert manager.verify(UNIT, "[Service]\nExecStart=/bin/sleep infinity\n") == ()
    finally:
        os.umask(before)


def test_an_interrupted_manager_is_an_error_with_its_words(manager: Systemd) -> None:
    with pytest.raises(ServiceError) as caught:
        manager.start("no-such-unit-here.service")

    assert caught.value.cause is not None
    assert "no-such-unit-here.service" in caught.value.cause


def test_log_lines_that_are_long_binary_or_many_are_read(
    manager: Systemd, clock: SystemClock, tmp_path: Path
) -> None:
    script = tmp_path / "prints"
    # All by the shell itself: what another process wrote that ended at once, journald may no longer
    # be able to tell the unit of.
    script.write_text(
        "printf 'raw \\377 byte\\n'; printf '%06000d\\n' 7\n"
        "i=0; while [ $i -lt 3000 ]; do i=$((i + 1)); echo $i; done\n"
        "echo last; exec sleep 60\n"
    )
    manager.unit_dir.mkdir(parents=True, exist_ok=True)
    (manager.unit_dir / UNIT).write_text(f"[Service]\nType=exec\nExecStart=/bin/sh {script}\n")
    manager.reload()
    manager.start(UNIT)
    invocation_id = manager.state(UNIT).invocation_id

    deadline_s = clock.monotonic_s() + 20
    while "last" not in (lines := manager.log(UNIT, invocation_id=invocation_id, max_lines=5000)):
        assert clock.monotonic_s() < deadline_s, lines[-5:]
        clock.sleep(0.05)

    assert "raw \ufffd byte" in lines
    assert f"{7:06000d}"[:MAX_LINE_CHARS] in lines
    numbers = [line for line in lines if line.isdecimal() and len(line) < 5]
    assert numbers == [str(number) for number in range(1, 3001)]
    for _ in range(100):  # what systemd says of the start may come meanwhile
        before = manager.log(UNIT, invocation_id=invocation_id)
        newest = manager.log(UNIT, invocation_id=invocation_id, max_lines=2)
        if manager.log(UNIT, invocation_id=invocation_id) == before:
            break
    assert newest == before[-2:]
    assert "last" in newest
