"""What every service manager must do: systemd, tunerd's own supervisor, and the fake; and systemd alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tunerd.errors import JobCanceled, ServiceError
from tunerd.machine.clock import Clock
from tunerd.units.manager import MAX_LINE_CHARS, ServiceManager, UnitState

UNIT = "tunerd-contract.service"
T = TypeVar("T")
_PATIENCE_S = 100.0
_POLL_S = 0.15  # a look at systemd takes 30 ms of processor time
_MODE_BITS = 0o644
_BROKEN = ("[Service]\nType=exec\n", "[Service\n", "")


def _is_waiting(state: UnitState) -> bool:
    """Whether it waits to be restarted; just before, systemd collects what the program left."""
    return state.active_state == "activating"


def _is_down(state: UnitState) -> bool:
    return state.active_state in {"inactive", "failed"}


def _shown(state: UnitState) -> str:
    return f"{state.active_state} ({state.sub_state}), {state.result}"


class Contract:
    """What the tests of a contract are given by a subclass or its module."""

    @pytest.fixture(autouse=True)
    def parts(self, manager: ServiceManager, clock: Clock, toy: str) -> None:
        self.units, self.time, self.program = manager, clock, toy

    def until(self, holds: Callable[[], T], what: str) -> T:
        """Wait until it holds, and return what it was."""
        deadline_s = self.time.monotonic_s() + _PATIENCE_S
        while not (found := holds()):
            assert self.time.monotonic_s() < deadline_s, what
            self.time.sleep(_POLL_S)
        return found


class ServiceManagerContract(Contract):
    """Tests of any service manager.

    A subclass gives the fixtures `manager`, `clock`, `toy` (the path of the toy service, see
    tests/support/toy_service.sh) and `kill_main` (sends a signal to the main process of UNIT), and
    sees to it that UNIT is gone after each test.
    """

    wanted_by = "multi-user.target"
    says_of_broken = ("bad-setting", "bad-setting", "bad-setting")
    other_bad: tuple[tuple[str, str], ...] = ()

    # Helpers

    def text(
        self, options: str = "", *, unit: str = "", service: str = "", install: str = ""
    ) -> str:
        return (
            f"[Unit]\nDescription=contract\n{unit}\n[Service]\nType=exec\n"
            f"ExecStart={self.program} {options}\n{service}\n{install}"
        )

    @property
    def install(self) -> str:
        return f"[Install]\nWantedBy={self.wanted_by}\n"

    def start(self, options: str = "", **text: str) -> UnitState:
        """The toy as a unit that was started."""
        self.put(self.text(options, **text))
        self.units.start(UNIT)
        return self.units.state(UNIT)

    @property
    def path(self) -> Path:
        return self.units.unit_dir / UNIT

    def put(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text)
        self.path.chmod(_MODE_BITS)
        self.units.reload()

    def eventually(self, holds: Callable[[UnitState], bool]) -> UnitState:

        def look() -> UnitState | None:
            state = self.units.state(UNIT)
            return state if holds(state) else None

        found = self.until(look, "the unit is never like that")
        assert found is not None
        return found

    def eventually_logs(self, line: str, invocation_id: str | None = None) -> tuple[str, ...]:
        """By this life of the unit, or another. Logs are collected beside the program that writes them, and may come late."""
        life = invocation_id or self.units.state(UNIT).invocation_id

        def look() -> tuple[str, ...]:
            lines = self.units.log(UNIT, invocation_id=life)
            return lines if line in lines else ()

        return self.until(look, f"not printed: {line}")

    # A unit that is not there

    def test_it_is_ready_for_a_change_and_being_asked_changes_nothing(self) -> None:
        before = self.units.service_units()

        self.units.check_ready()

        assert self.units.service_units() == before

    def test_a_missing_unit_is_not_found_and_not_started(self) -> None:
        state = self.units.state(UNIT)

        assert state.load_state == "not-found"
        assert not state.exists
        assert (state.active_state, state.main_pid) == ("inactive", None)
        assert state.fragment_path is None
        assert not state.needs_reload
        with pytest.raises(ServiceError):
            self.units.start(UNIT)
        with pytest.raises(ServiceError):
            self.units.restart(UNIT)
        with pytest.raises(ServiceError):
            self.units.enable(UNIT)

    def test_stopping_disabling_and_resetting_a_missing_unit_is_no_error(self) -> None:
        self.units.stop(UNIT)
        self.units.disable(UNIT)
        self.units.reset_failed(UNIT)

    # Starting and stopping

    def test_a_started_unit_runs_and_is_described(self) -> None:
        began_s = self.time.now_s()

        state = self.start()

        assert (state.load_state, _shown(state)) == ("loaded", "active (running), success")
        assert state.is_active
        assert not state.has_failed
        assert state.main_pid is not None
        assert state.main_pid > 1
        assert (state.exit_kind, state.exit_status, state.n_restarts) == (None, None, 0)
        assert state.invocation_id is not None
        assert re.fullmatch(r"[0-9a-f]{32}", state.invocation_id)
        assert state.fragment_path == self.path
        assert state.active_since_s is not None
        assert began_s - 2 < state.active_since_s < self.time.now_s() + 2
        assert UNIT in self.units.service_units()

    def test_starting_a_running_unit_changes_nothing_and_a_restart_is_a_new_invocation(
        self,
    ) -> None:
        before = self.start()

        self.units.start(UNIT)

        after = self.units.state(UNIT)
        assert (after.main_pid, after.invocation_id) == (before.main_pid, before.invocation_id)

        self.units.restart(UNIT)

        after = self.units.state(UNIT)
        assert after.is_active
        assert after.main_pid != before.main_pid
        assert after.invocation_id != before.invocation_id
        assert after.n_restarts == 0

    def test_a_stopped_unit_is_inactive_and_stopping_it_again_is_no_error(self) -> None:
        self.start(service="Restart=always")

        self.units.stop(UNIT)

        state = self.units.state(UNIT)
        assert _shown(state) == "inactive (dead), success"
        assert state.main_pid is None
        self.units.stop(UNIT)

    def test_a_program_that_ignores_the_signal_is_killed_in_time(self) -> None:
        before = self.start("--print up --ignore-term", service="TimeoutStopSec=1")
        self.eventually_logs("up")  # by then it has set what it does about signals
        began_s = self.time.monotonic_s()

        self.units.stop(UNIT)

        took_s = self.time.monotonic_s() - began_s
        state = self.units.state(UNIT)
        assert 0.9 < took_s < 60
        assert (state.active_state, state.result) == ("failed", "timeout")
        assert self.units.was_stopped(UNIT, before.invocation_id or "")
        assert (state.exit_kind, state.exit_status) == ("killed", signal.SIGKILL)
        assert state.main_pid is None

    def test_a_stop_that_takes_longer_than_the_caller_waits_is_an_error_and_goes_on(self) -> None:
        self.start("--print up --slow-term 2")
        self.eventually_logs("up")  # by then it has set what it does about signals

        def begins() -> bool:
            """A busy machine may not come to ask for it in that time."""
            with pytest.raises(ServiceError):
                self.units.stop(UNIT, timeout_s=0.5)
            return self.units.state(UNIT).active_state == "deactivating"

        self.until(begins, "it is not asked to stop")
        self.eventually(lambda state: state.active_state == "inactive")

    # Ends that nobody asked for

    def test_a_program_that_ends_well_leaves_the_unit_inactive(self) -> None:
        self.start("--end-after 0.2", service="Restart=on-failure")

        state = self.eventually(_is_down)
        assert (state.active_state, state.result) == ("inactive", "success")

    def test_a_program_that_fails_is_described_until_reset(self) -> None:
        self.start("--end-after 0.2 --status 7")

        state = self.eventually(lambda state: state.has_failed)
        assert _shown(state) == "failed (failed), exit-code"
        assert (state.exit_kind, state.exit_status) == ("exited", 7)
        assert state.main_pid is None
        self.units.reset_failed(UNIT)
        state = self.units.state(UNIT)
        assert (state.active_state, state.result) == ("inactive", "success")

    def test_a_killed_program_is_told_from_one_that_ended(
        self, kill_main: Callable[[int], None]
    ) -> None:
        self.start()

        kill_main(signal.SIGKILL)

        state = self.eventually(lambda state: state.has_failed)
        assert state.result == "signal"
        assert (state.exit_kind, state.exit_status) == ("killed", signal.SIGKILL)

    def test_a_failed_program_is_started_again_after_a_while(
        self, kill_main: Callable[[int], None]
    ) -> None:
        before = self.start(service="Restart=on-failure\nRestartSec=3")

        kill_main(signal.SIGKILL)

        waiting = self.eventually(_is_waiting)
        assert waiting.has_failed
        assert waiting.main_pid is None
        after = self.eventually(lambda state: state.is_active)
        assert after.n_restarts == 1
        assert after.main_pid != before.main_pid
        assert after.invocation_id != before.invocation_id

    def test_a_unit_that_waits_for_its_restart_can_be_stopped_for_good(
        self, kill_main: Callable[[int], None]
    ) -> None:
        self.start(service="Restart=always\nRestartSec=3")
        kill_main(signal.SIGKILL)
        self.eventually(_is_waiting)

        self.units.stop(UNIT)

        self.time.sleep(4)
        assert self.units.state(UNIT).active_state in {"inactive", "failed"}

    def test_a_crash_loop_ends_at_the_start_limit_until_reset(self) -> None:
        limit = "StartLimitIntervalSec=60\nStartLimitBurst=3"
        restart = "Restart=on-failure\nRestartSec=0.1"

        self.start("--end-after 0.1 --status 7", unit=limit, service=restart)

        state = self.eventually(lambda state: state.active_state == "failed")
        # systemd 252 keeps the reason of the last end, later ones name the limit.
        assert state.result in {"start-limit-hit", "exit-code"}
        assert state.n_restarts == 3
        assert state.exit_status == 7
        with pytest.raises(ServiceError):
            self.units.start(UNIT)
        self.units.reset_failed(UNIT)
        self.units.start(UNIT)
        assert self.units.state(UNIT).n_restarts == 0

    def test_starting_by_hand_counts_towards_the_start_limit(self) -> None:
        self.start(unit="StartLimitIntervalSec=60\nStartLimitBurst=2")
        self.units.restart(UNIT)

        with pytest.raises(ServiceError):
            self.units.restart(UNIT)

        assert self.units.state(UNIT).active_state == "failed"
        self.units.reset_failed(UNIT)
        self.units.restart(UNIT)
        assert self.units.state(UNIT).is_active

    def test_a_program_that_cannot_be_executed_fails_the_start(self) -> None:
        self.put(self.text().replace(self.program, "/nonexistent/program"))

        with pytest.raises(ServiceError):
            self.units.start(UNIT)

        state = self.units.state(UNIT)
        assert (_shown(state), state.exit_status) == ("failed (failed), exit-code", 203)

    # Unit files that change

    def test_a_removed_file_leaves_the_process_running(self) -> None:
        before = self.start()

        self.path.unlink()
        self.units.reload()

        state = self.units.state(UNIT)
        assert state.load_state == "not-found"
        assert state.is_active
        assert state.main_pid == before.main_pid
        with pytest.raises(ServiceError):
            self.units.restart(UNIT)
        assert self.units.state(UNIT).main_pid == before.main_pid
        self.units.stop(UNIT)
        assert not self.units.state(UNIT).is_active

    def test_a_broken_file_leaves_the_process_running_and_is_not_restarted(self) -> None:
        before = self.start()

        for broken, said in zip(_BROKEN, self.says_of_broken, strict=True):
            self.put(broken)

            state = self.units.state(UNIT)
            assert (state.load_state, state.is_active) == (said, True)
            with pytest.raises(ServiceError):
                self.units.restart(UNIT)
            after = self.units.state(UNIT)
            assert (after.main_pid, after.is_active) == (before.main_pid, True)

    # Starting at boot

    def test_a_unit_that_says_when_is_enabled_and_disabled_without_being_started(self) -> None:
        self.put(self.text())
        with pytest.raises(ServiceError):
            self.units.enable(UNIT)
        assert not self.units.state(UNIT).is_enabled
        self.put(self.text(install=self.install))
        assert self.units.state(UNIT).is_enabled is False

        self.units.enable(UNIT)
        self.units.enable(UNIT)

        state = self.units.state(UNIT)
        assert state.is_enabled is True
        assert not state.is_active
        self.units.disable(UNIT)
        self.units.disable(UNIT)
        assert self.units.state(UNIT).is_enabled is False
        self.units.enable(UNIT)
        self.put(self.text())
        self.units.disable(UNIT)
        assert not self.units.state(UNIT).is_enabled, "also by a file that does not say when"

    # Checks before

    def test_a_good_unit_has_no_complaints(self) -> None:
        text = self.text(
            '--print "a %% b"',
            unit="StartLimitIntervalSec=300\nStartLimitBurst=6",
            service="Restart=on-failure\nRestartSec=2\nTimeoutStopSec=30\nLimitNOFILE=65536\n"
            "LimitCORE=0\nUMask=0077\nNoNewPrivileges=yes\nLockPersonality=yes\n"
            'Environment=A=b "C=d e"\nEnvironmentFile=-/etc/default/nothing\nOOMPolicy=stop',
            install=self.install,
        )

        assert self.units.verify(UNIT, text) == ()
        assert not (self.units.unit_dir / UNIT).exists()

    def test_a_bad_unit_is_complained_about(self) -> None:
        for change in (
            ("[Service]", "[Service"),
            ("[Service]\n", ""),
            ("ExecStart=", "ExecStart=relative/"),
            ("ExecStart=", 'ExecStart="'),
            ("ExecStart=", "ExecStop="),
            ("ExecStart=", "ExecStart=/bin/true\nExecStart="),
            ("ExecStart=", "ExecStart=/nonexistent"),
            ("Description=contract", "Description=\udcff"),
            *self.other_bad,
        ):
            assert self.units.verify(UNIT, self.text().replace(*change)), change

    # Who ended it

    def test_a_stop_is_what_the_manager_was_asked_for_and_not_what_a_program_prints(self) -> None:
        self.put(self.text("--print 'Stopping server...' --end-after 0.5", install=self.install))
        self.units.enable(UNIT)  # else it is forgotten once it is down
        self.units.start(UNIT)
        prints = self.units.state(UNIT).invocation_id or ""
        self.eventually(_is_down)
        self.time.sleep(0.3)
        assert not self.units.was_stopped(UNIT, prints)

        stopped = self.start(install=self.install).invocation_id or ""
        assert not self.units.was_stopped(UNIT, stopped)
        self.units.stop(UNIT)

        self.until(lambda: self.units.was_stopped(UNIT, stopped), "it is not said to be stopped")
        assert not self.units.was_stopped(UNIT, prints)
        assert self.units.state(UNIT).invocation_id == stopped

    # Units without a file of ours

    def test_a_command_is_a_unit_and_its_name_is_free_again_when_it_has_ended(self) -> None:
        described = [("Description", "one of tunerd's own"), ("Restart", "no")]
        for said in ("first-own", 'second  $HOME ${HOME} $$ %n %% "q" ; ü'):
            self.units.run_transient(
                UNIT, [self.program, "--print", said], described, environment={"A": "b c"}
            )
            state = self.units.state(UNIT)
            assert state.is_active
            self.eventually_logs(said, state.invocation_id)
            self.units.stop(UNIT)
            self.eventually(_is_down)

    def test_a_command_that_failed_is_known_until_that_is_reset(self) -> None:
        argv = [self.program, "--end-after", "0.2", "--status", "3"]
        for _ in range(2):
            self.units.reset_failed(UNIT)
            self.units.run_transient(UNIT, argv, [("Restart", "no")])
            failed = self.eventually(lambda state: state.has_failed)
            assert failed.result == "exit-code"

    # The log

    def test_the_log_is_told_apart_by_invocation_and_by_a_moment_and_how_far_back_it_reaches(
        self,
    ) -> None:
        first = self.start("--print early-start").invocation_id
        self.eventually_logs("early-start", first)
        self.time.sleep(0.1)
        since_s = self.time.now_s()
        self.put(self.text("--print late-start"))
        self.units.restart(UNIT)

        lines = self.eventually_logs("late-start", self.units.state(UNIT).invocation_id)

        assert "early-start" not in lines
        assert "late-start" not in self.units.log(UNIT, invocation_id=first)
        both = [line for line in self.units.log(UNIT, max_lines=500) if line.endswith("-start")]
        assert both[-2:] == ["early-start", "late-start"]
        whole = self.units.log_since(UNIT, since_s - 3600, max_lines=1000)
        late = self.units.log_since(UNIT, since_s, max_lines=1000)
        last = self.units.log_since(UNIT, since_s - 3600, max_lines=1)

        assert {"early-start", "late-start"} <= set(whole.lines)
        assert whole.begins_s is not None
        assert since_s - 3600 < whole.begins_s < since_s
        assert not whole.is_cut
        assert "late-start" in late.lines
        assert late.begins_s is not None
        assert late.begins_s >= whole.begins_s
        assert (len(last.lines), last.is_cut) == (1, True)

    def test_no_line_of_the_log_is_longer_than_is_looked_at(self) -> None:
        began_s = self.time.now_s()
        life = self.start(f"--print {'x' * 3000}").invocation_id
        shown = "x" * MAX_LINE_CHARS

        self.eventually_logs(shown, life)

        assert shown in self.units.log(UNIT)
        assert shown in self.units.log_since(UNIT, began_s - 60, max_lines=100).lines


class SystemdContract(ServiceManagerContract):
    """What only systemd does, and its fake: it keeps what it has read until the next reload."""

    usual_slice = "system.slice"
    says_of_broken = ("bad-setting", "error", "masked")
    tells_of_good_ends = True

    def test_a_good_end_is_told_from_a_bad_one_also_once_the_next_life_has_begun(
        self, kill_main: Callable[[int], None]
    ) -> None:
        self.start("--print up", service="Restart=always\nRestartSec=100ms")
        lives = [self.units.state(UNIT).invocation_id or ""]
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.eventually_logs("up")  # by then it has set what it does about signals
            kill_main(number)
            again = self.eventually(
                lambda state: state.is_active and state.invocation_id not in lives
            )
            lives.append(again.invocation_id or "")
        well, badly, _ = lives

        if self.tells_of_good_ends:
            self.until(lambda: self.units.ended_well(UNIT, well), "it is not said to have ended")
        assert self.units.ended_well(UNIT, well) is self.tells_of_good_ends
        assert not self.units.ended_well(UNIT, badly)
        assert not self.units.was_stopped(UNIT, well)

    def test_limits_on_memory_are_those_of_its_files_and_each_slice_tells_its_own(self) -> None:
        gib, slice_ = 1024**3, "tunerd-contract.slice"
        self.put(self.text(service=f"MemoryMax={2 * gib}"))
        before = self.units.state(UNIT)
        folder = self.path.with_name(f"{UNIT}.d")
        folder.mkdir()
        drop_in, of_slice = folder / "limit.conf", self.path.with_name(slice_)
        try:
            drop_in.write_text(f"[Service]\nMemoryMax={gib}\nSlice={slice_}\n")
            of_slice.write_text(f"[Slice]\nMemoryHigh={4 * gib}\n")
            self.units.reload()
            state, around = self.units.state(UNIT), self.units.state(slice_)
        finally:
            shutil.rmtree(folder)
            of_slice.unlink()
            self.units.reload()

        assert (before.slice, before.memory_max_bytes) == (self.usual_slice, 2 * gib)
        assert (state.slice, state.drop_ins) == (slice_, (drop_in,))
        assert (state.memory_max_bytes, state.memory_high_bytes) == (gib, None)
        assert (around.slice, around.fragment_path) == ("tunerd.slice", of_slice)
        assert (around.memory_max_bytes, around.memory_high_bytes) == (None, 4 * gib)
        outer = self.units.state("tunerd.slice")
        assert (outer.slice, outer.memory_max_bytes) == ("-.slice", None)
        assert not self.units.state("tunerd-none.service").slice

    def test_a_changed_file_counts_from_the_reload_on(self) -> None:
        assert not self.start("--print old").needs_reload
        self.time.sleep(0.05)  # file systems count time in ticks
        self.path.write_text(self.text("--print new-and-longer"))

        assert self.units.state(UNIT).needs_reload
        self.units.restart(UNIT)
        invocation_id = self.units.state(UNIT).invocation_id
        assert "old" in self.eventually_logs("old", invocation_id)

        self.units.reload()
        assert not self.units.state(UNIT).needs_reload
        self.units.restart(UNIT)
        invocation_id = self.units.state(UNIT).invocation_id
        lines = self.eventually_logs("new-and-longer", invocation_id)
        assert "old" not in lines


class RealProcessesContract(ServiceManagerContract):
    """For managers that run processes and that other processes use too: two callers at once."""

    @pytest.fixture
    def kill_main(self) -> Callable[[int], None]:
        def kill(number: int) -> None:
            pid = self.units.state(UNIT).main_pid
            assert pid is not None
            os.kill(pid, number)

        return kill

    def test_a_job_that_another_takes_the_place_of_is_cancelled(self) -> None:
        self.start("--print up --slow-term 2")
        self.eventually_logs("up")  # by then it has set what it does about signals

        def stop() -> None:
            self.eventually(lambda state: state.active_state == "deactivating")
            self.units.stop(UNIT)

        stopper = threading.Thread(target=stop)
        stopper.start()

        try:
            with pytest.raises(JobCanceled):
                self.units.restart(UNIT)
        finally:
            stopper.join()

        state = self.eventually(lambda state: state.active_state != "deactivating")
        assert state.active_state == "inactive"
