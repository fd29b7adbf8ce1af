"""What every service manager must do: systemd, tunerd's own supervisor, and the fake; and systemd alone."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tunerd.errors import JobCanceled, ServiceError
from tunerd.machine.clock import Clock
from tunerd.units.manager import MAX_LINE_CHARS, ServiceManager, UnitState

UNIT = "tunerd-contract.service"
_PATIENCE_S = 20.0
_POLL_S = 0.05
_MODE_BITS = 0o644


def _is_waiting(state: UnitState) -> bool:
    """Whether it waits to be restarted; just before, systemd collects what the program left."""
    return state.active_state == "activating"


def _is_down(state: UnitState) -> bool:
    return state.active_state in {"inactive", "failed"}


class ServiceManagerContract:
    """Tests of any service manager.

    A subclass gives the fixtures `manager`, `clock`, `toy` (the path of the toy service, see
    tests/support/toy_service.sh) and `kill_main` (sends a signal to the main process of UNIT), and
    sees to it that UNIT is gone after each test.
    """

    wanted_by = "multi-user.target"

    # Helpers

    def text(
        self, toy: str, options: str = "", *, unit: str = "", service: str = "", install: str = ""
    ) -> str:
        return (
            f"[Unit]\nDescription=contract\n{unit}\n[Service]\nType=exec\n"
            f"ExecStart={toy} {options}\n{service}\n{install}"
        )

    @property
    def install(self) -> str:
        return f"[Install]\nWantedBy={self.wanted_by}\n"

    def put(self, manager: ServiceManager, text: str) -> Path:
        manager.unit_dir.mkdir(parents=True, exist_ok=True)
        path = manager.unit_dir / UNIT
        path.write_text(text)
        path.chmod(_MODE_BITS)
        manager.reload()
        return path

    def eventually(
        self, manager: ServiceManager, clock: Clock, holds: Callable[[UnitState], bool]
    ) -> UnitState:
        deadline_s = clock.monotonic_s() + _PATIENCE_S
        while True:
            state = manager.state(UNIT)
            if holds(state):
                return state
            assert clock.monotonic_s() < deadline_s, state
            clock.sleep(_POLL_S)

    def eventually_logs(
        self, manager: ServiceManager, clock: Clock, line: str, invocation_id: str | None
    ) -> tuple[str, ...]:
        """Logs are collected beside the program that writes them, and may come late."""
        deadline_s = clock.monotonic_s() + _PATIENCE_S
        while True:
            lines = manager.log(UNIT, invocation_id=invocation_id)
            if line in lines:
                return lines
            assert clock.monotonic_s() < deadline_s, lines
            clock.sleep(_POLL_S)

    # A unit that is not there

    def test_it_is_ready_for_a_change_and_being_asked_changes_nothing(
        self, manager: ServiceManager
    ) -> None:
        before = manager.service_units()

        manager.check_ready()

        assert manager.service_units() == before

    def test_a_missing_unit_is_not_found_and_not_started(self, manager: ServiceManager) -> None:
        state = manager.state(UNIT)

        assert state.load_state == "not-found"
        assert not state.exists
        assert (state.active_state, state.main_pid) == ("inactive", None)
        assert state.fragment_path is None
        assert not state.needs_reload
        with pytest.raises(ServiceError):
            manager.start(UNIT)
        with pytest.raises(ServiceError):
            manager.restart(UNIT)
        with pytest.raises(ServiceError):
            manager.enable(UNIT)

    def test_stopping_disabling_and_resetting_a_missing_unit_is_no_error(
        self, manager: ServiceManager
    ) -> None:
        manager.stop(UNIT)
        manager.disable(UNIT)
        manager.reset_failed(UNIT)

    # Starting and stopping

    def test_a_started_unit_runs_and_is_described(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        path = self.put(manager, self.text(toy))
        began_s = clock.now_s()

        manager.start(UNIT)

        state = manager.state(UNIT)
        assert (state.load_state, state.active_state, state.sub_state) == (
            "loaded",
            "active",
            "running",
        )
        assert state.is_active
        assert not state.has_failed
        assert state.main_pid is not None
        assert state.main_pid > 1
        assert state.result == "success"
        assert (state.exit_kind, state.exit_status, state.n_restarts) == (None, None, 0)
        assert state.invocation_id is not None
        assert re.fullmatch(r"[0-9a-f]{32}", state.invocation_id)
        assert state.fragment_path == path
        assert state.active_since_s is not None
        assert began_s - 2 < state.active_since_s < clock.now_s() + 2
        assert UNIT in manager.service_units()

    def test_starting_a_running_unit_changes_nothing(
        self, manager: ServiceManager, toy: str
    ) -> None:
        self.put(manager, self.text(toy))
        manager.start(UNIT)
        before = manager.state(UNIT)

        manager.start(UNIT)

        after = manager.state(UNIT)
        assert (after.main_pid, after.invocation_id) == (before.main_pid, before.invocation_id)

    def test_a_restart_is_a_new_process_and_a_new_invocation(
        self, manager: ServiceManager, toy: str
    ) -> None:
        self.put(manager, self.text(toy))
        manager.start(UNIT)
        before = manager.state(UNIT)

        manager.restart(UNIT)

        after = manager.state(UNIT)
        assert after.is_active
        assert after.main_pid != before.main_pid
        assert after.invocation_id != before.invocation_id
        assert after.n_restarts == 0

    def test_a_stopped_unit_is_inactive_and_stopping_it_again_is_no_error(
        self, manager: ServiceManager, toy: str
    ) -> None:
        self.put(manager, self.text(toy, service="Restart=always"))
        manager.start(UNIT)

        manager.stop(UNIT)

        state = manager.state(UNIT)
        assert (state.active_state, state.sub_state, state.result) == (
            "inactive",
            "dead",
            "success",
        )
        assert state.main_pid is None
        manager.stop(UNIT)

    def test_a_program_that_ignores_the_signal_is_killed_in_time(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--print up --ignore-term", service="TimeoutStopSec=1"))
        manager.start(UNIT)
        self._let_it_print(manager, "up")
        began_s = clock.monotonic_s()

        manager.stop(UNIT)

        took_s = clock.monotonic_s() - began_s
        state = manager.state(UNIT)
        assert 0.9 < took_s < 10
        assert (state.active_state, state.result) == ("failed", "timeout")
        assert (state.exit_kind, state.exit_status) == ("killed", signal.SIGKILL)
        assert state.main_pid is None

    def test_a_stop_that_takes_longer_than_the_caller_waits_is_an_error_and_goes_on(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--print up --slow-term 2"))
        manager.start(UNIT)
        self._let_it_print(manager, "up")

        with pytest.raises(ServiceError):
            manager.stop(UNIT, timeout_s=0.5)

        assert manager.state(UNIT).active_state == "deactivating"
        self.eventually(manager, clock, lambda state: state.active_state == "inactive")

    # Ends that nobody asked for

    def test_a_program_that_ends_well_leaves_the_unit_inactive(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--end-after 0.2", service="Restart=on-failure"))

        manager.start(UNIT)

        state = self.eventually(manager, clock, _is_down)
        assert (state.active_state, state.result) == ("inactive", "success")

    def test_a_program_that_fails_is_described_until_reset(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--end-after 0.2 --status 7"))

        manager.start(UNIT)

        state = self.eventually(manager, clock, lambda state: state.has_failed)
        assert (state.active_state, state.sub_state, state.result) == (
            "failed",
            "failed",
            "exit-code",
        )
        assert (state.exit_kind, state.exit_status) == ("exited", 7)
        assert state.main_pid is None
        manager.reset_failed(UNIT)
        state = manager.state(UNIT)
        assert (state.active_state, state.result) == ("inactive", "success")

    def test_a_killed_program_is_told_from_one_that_ended(
        self,
        manager: ServiceManager,
        clock: Clock,
        toy: str,
        kill_main: Callable[[int], None],
    ) -> None:
        self.put(manager, self.text(toy))
        manager.start(UNIT)

        kill_main(signal.SIGKILL)

        state = self.eventually(manager, clock, lambda state: state.has_failed)
        assert state.result == "signal"
        assert (state.exit_kind, state.exit_status) == ("killed", signal.SIGKILL)

    def test_a_failed_program_is_started_again_after_a_while(
        self,
        manager: ServiceManager,
        clock: Clock,
        toy: str,
        kill_main: Callable[[int], None],
    ) -> None:
        self.put(manager, self.text(toy, service="Restart=on-failure\nRestartSec=1"))
        manager.start(UNIT)
        before = manager.state(UNIT)

        kill_main(signal.SIGKILL)

        waiting = self.eventually(manager, clock, _is_waiting)
        assert waiting.has_failed
        assert waiting.main_pid is None
        after = self.eventually(manager, clock, lambda state: state.is_active)
        assert after.n_restarts == 1
        assert after.main_pid != before.main_pid
        assert after.invocation_id != before.invocation_id

    def test_a_unit_that_waits_for_its_restart_can_be_stopped_for_good(
        self,
        manager: ServiceManager,
        clock: Clock,
        toy: str,
        kill_main: Callable[[int], None],
    ) -> None:
        self.put(manager, self.text(toy, service="Restart=always\nRestartSec=1"))
        manager.start(UNIT)
        kill_main(signal.SIGKILL)
        self.eventually(manager, clock, _is_waiting)

        manager.stop(UNIT)

        clock.sleep(2)
        assert manager.state(UNIT).active_state in {"inactive", "failed"}

    def test_a_crash_loop_ends_at_the_start_limit_until_reset(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(
            manager,
            self.text(
                toy,
                "--end-after 0.1 --status 7",
                unit="StartLimitIntervalSec=60\nStartLimitBurst=3",
                service="Restart=on-failure\nRestartSec=0.1",
            ),
        )

        manager.start(UNIT)

        state = self.eventually(manager, clock, lambda state: state.active_state == "failed")
        # systemd 252 keeps the reason of the last end, later ones name the limit.
        assert state.result in {"start-limit-hit", "exit-code"}
        assert state.n_restarts == 3
        assert state.exit_status == 7
        with pytest.raises(ServiceError):
            manager.start(UNIT)
        manager.reset_failed(UNIT)
        manager.start(UNIT)
        assert manager.state(UNIT).n_restarts == 0

    def test_starting_by_hand_counts_towards_the_start_limit(
        self, manager: ServiceManager, toy: str
    ) -> None:
        self.put(manager, self.text(toy, unit="StartLimitIntervalSec=60\nStartLimitBurst=2"))
        manager.start(UNIT)
        manager.restart(UNIT)

        with pytest.raises(ServiceError):
            manager.restart(UNIT)

        assert manager.state(UNIT).active_state == "failed"
        manager.reset_failed(UNIT)
        manager.restart(UNIT)
        assert manager.state(UNIT).is_active

    def test_a_program_that_cannot_be_executed_fails_the_start(
        self, manager: ServiceManager
    ) -> None:
        self.put(manager, self.text("/nonexistent/program"))

        with pytest.raises(ServiceError):
            manager.start(UNIT)

        state = manager.state(UNIT)
        assert (state.active_state, state.result, state.exit_status) == (
            "failed",
            "exit-code",
            203,
        )

    # Unit files that change

    def test_a_removed_file_leaves_the_process_running(
        self, manager: ServiceManager, toy: str
    ) -> None:
        path = self.put(manager, self.text(toy))
        manager.start(UNIT)
        before = manager.state(UNIT)

        path.unlink()
        manager.reload()

        state = manager.state(UNIT)
        assert state.load_state == "not-found"
        assert state.is_active
        assert state.main_pid == before.main_pid
        with pytest.raises(ServiceError):
            manager.restart(UNIT)
        assert manager.state(UNIT).main_pid == before.main_pid
        manager.stop(UNIT)
        assert not manager.state(UNIT).is_active

    @pytest.mark.parametrize("broken", ["[Service]\nType=exec\n", "[Service\n", ""])
    def test_a_broken_file_leaves_the_process_running_and_is_not_restarted(
        self, manager: ServiceManager, toy: str, broken: str
    ) -> None:
        path = self.put(manager, self.text(toy))
        manager.start(UNIT)
        before = manager.state(UNIT)

        path.write_text(broken)
        manager.reload()

        state = manager.state(UNIT)
        assert state.load_state != "loaded"
        assert state.is_active
        with pytest.raises(ServiceError):
            manager.restart(UNIT)
        after = manager.state(UNIT)
        assert (after.main_pid, after.is_active) == (before.main_pid, True)

    # Starting at boot

    def test_a_unit_is_enabled_and_disabled_without_being_started(
        self, manager: ServiceManager, toy: str
    ) -> None:
        self.put(manager, self.text(toy, install=self.install))
        assert manager.state(UNIT).is_enabled is False

        manager.enable(UNIT)
        manager.enable(UNIT)

        state = manager.state(UNIT)
        assert state.is_enabled is True
        assert not state.is_active
        manager.disable(UNIT)
        manager.disable(UNIT)
        assert manager.state(UNIT).is_enabled is False

    def test_a_unit_that_does_not_say_when_cannot_be_enabled(
        self, manager: ServiceManager, toy: str
    ) -> None:
        self.put(manager, self.text(toy))

        with pytest.raises(ServiceError):
            manager.enable(UNIT)

        assert not manager.state(UNIT).is_enabled

    # Checks before

    def test_a_good_unit_has_no_complaints(self, manager: ServiceManager, toy: str) -> None:
        text = self.text(
            toy,
            '--print "a %% b"',
            unit="StartLimitIntervalSec=300\nStartLimitBurst=6",
            service="Restart=on-failure\nRestartSec=2\nTimeoutStopSec=30\nLimitNOFILE=65536\n"
            "LimitCORE=0\nUMask=0077\nNoNewPrivileges=yes\nLockPersonality=yes\n"
            'Environment=A=b "C=d e"\nEnvironmentFile=-/etc/default/nothing\nOOMPolicy=stop',
            install=self.install,
        )

        assert manager.verify(UNIT, text) == ()
        assert not (manager.unit_dir / UNIT).exists()

    @pytest.mark.parametrize(
        "change",
        [
            ("[Service]", "[Service"),
            ("[Service]\n", ""),
            ("ExecStart=", "ExecStart=relative/"),
            ("ExecStart=", 'ExecStart="'),
            ("ExecStart=", "ExecStop="),
            ("ExecStart=", "ExecStart=/bin/true\nExecStart="),
            ("ExecStart=", "ExecStart=/nonexistent"),
            ("Description=contract", "Description=\udcff"),
        ],
        ids=str,
    )
    def test_a_bad_unit_is_complained_about(
        self, manager: ServiceManager, toy: str, change: tuple[str, str]
    ) -> None:
        text = self.text(toy).replace(*change)

        assert manager.verify(UNIT, text)

    # Who ended it

    @pytest.mark.parametrize("words", ["Stopping server...", "Stopping"])
    def test_a_stop_is_what_the_manager_was_asked_for_and_not_what_a_program_prints(
        self, manager: ServiceManager, clock: Clock, toy: str, words: str
    ) -> None:
        self.put(
            manager, self.text(toy, f"--print '{words}' --end-after 0.5", install=self.install)
        )
        manager.enable(UNIT)  # what the manager has no reason to know is forgotten once it is down
        manager.start(UNIT)
        prints = manager.state(UNIT).invocation_id or ""
        self.eventually(manager, clock, _is_down)
        clock.sleep(0.3)
        assert not manager.was_stopped(UNIT, prints)

        self.put(manager, self.text(toy, install=self.install))
        manager.start(UNIT)
        stopped = manager.state(UNIT).invocation_id or ""
        assert not manager.was_stopped(UNIT, stopped)
        manager.stop(UNIT)

        deadline_s = clock.monotonic_s() + _PATIENCE_S
        while not manager.was_stopped(UNIT, stopped):
            assert clock.monotonic_s() < deadline_s
            clock.sleep(_POLL_S)
        assert not manager.was_stopped(UNIT, prints)
        assert manager.state(UNIT).invocation_id == stopped

    # Units without a file of ours

    def test_a_command_is_a_unit_and_its_name_is_free_again_when_it_has_ended(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        described = [("Description", "one of tunerd's own"), ("Restart", "no")]
        for said in ("first-own", "second $HOME %n"):
            manager.run_transient(UNIT, [toy, "--print", said], described, environment={"A": "b c"})
            state = manager.state(UNIT)
            assert state.is_active
            self.eventually_logs(manager, clock, said, state.invocation_id)
            manager.stop(UNIT)
            self.eventually(manager, clock, _is_down)

    def test_a_command_that_failed_is_known_until_that_is_reset(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        argv = [toy, "--end-after", "0.2", "--status", "3"]
        for _ in range(2):
            manager.reset_failed(UNIT)
            manager.run_transient(UNIT, argv, [("Restart", "no")])
            failed = self.eventually(manager, clock, lambda state: state.has_failed)
            assert failed.result == "exit-code"

    # The log

    def test_the_log_is_told_apart_by_invocation(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--print first-start"))
        manager.start(UNIT)
        first = manager.state(UNIT).invocation_id
        self.eventually_logs(manager, clock, "first-start", first)
        self.put(manager, self.text(toy, "--print second-start"))
        manager.restart(UNIT)
        second = manager.state(UNIT).invocation_id

        lines = self.eventually_logs(manager, clock, "second-start", second)

        assert "first-start" not in lines
        assert "second-start" not in manager.log(UNIT, invocation_id=first)
        both = [line for line in manager.log(UNIT, max_lines=500) if line.endswith("-start")]
        assert both[-2:] == ["first-start", "second-start"]

    def test_the_log_since_a_moment_says_how_far_back_it_reaches(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--print early-start"))
        manager.start(UNIT)
        first = manager.state(UNIT).invocation_id
        self.eventually_logs(manager, clock, "early-start", first)
        clock.sleep(2.1)  # since when is told in whole seconds
        since_s = clock.now_s()
        clock.sleep(1.1)
        self.put(manager, self.text(toy, "--print late-start"))
        manager.restart(UNIT)
        self.eventually_logs(manager, clock, "late-start", manager.state(UNIT).invocation_id)

        whole = manager.log_since(UNIT, since_s - 3600, max_lines=1000)
        late = manager.log_since(UNIT, since_s, max_lines=1000)
        last = manager.log_since(UNIT, since_s - 3600, max_lines=1)

        assert {"early-start", "late-start"} <= set(whole.lines)
        assert whole.begins_s is not None
        assert since_s - 3600 < whole.begins_s < since_s
        assert not whole.is_cut
        assert "late-start" in late.lines
        assert late.begins_s is not None
        assert late.begins_s >= whole.begins_s
        assert (len(last.lines), last.is_cut) == (1, True)

    def test_no_line_of_the_log_is_longer_than_is_looked_at(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        began_s = clock.now_s()
        self.put(manager, self.text(toy, f"--print {'x' * 3000}"))
        manager.start(UNIT)
        shown = "x" * MAX_LINE_CHARS

        self.eventually_logs(manager, clock, shown, manager.state(UNIT).invocation_id)

        assert shown in manager.log(UNIT)
        assert shown in manager.log_since(UNIT, began_s - 60, max_lines=100).lines

    # The rest

    def _let_it_print(self, manager: ServiceManager, line: str) -> None:
        """Wait until the toy has set what it does about signals."""
        for _ in range(400):
            if line in manager.log(UNIT):
                return
            time.sleep(0.02)
        raise AssertionError(f"not printed: {line}")


class SystemdContract(ServiceManagerContract):
    """What only systemd does, and its fake: it keeps what it has read until the next reload."""

    def test_a_changed_file_counts_from_the_reload_on(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        path = self.put(manager, self.text(toy, "--print old"))
        manager.start(UNIT)
        assert not manager.state(UNIT).needs_reload
        clock.sleep(0.05)  # file systems count time in ticks
        path.write_text(self.text(toy, "--print new-and-longer"))

        assert manager.state(UNIT).needs_reload
        manager.restart(UNIT)
        invocation_id = manager.state(UNIT).invocation_id
        assert "old" in self.eventually_logs(manager, clock, "old", invocation_id)

        manager.reload()
        assert not manager.state(UNIT).needs_reload
        manager.restart(UNIT)
        invocation_id = manager.state(UNIT).invocation_id
        lines = self.eventually_logs(manager, clock, "new-and-longer", invocation_id)
        assert "old" not in lines

    @pytest.mark.parametrize(
        ("broken", "load_state"),
        [("[Service]\nType=exec\n", "bad-setting"), ("[Service\n", "error"), ("", "masked")],
    )
    def test_it_says_what_is_wrong_with_a_file(
        self, manager: ServiceManager, broken: str, load_state: str
    ) -> None:
        self.put(manager, broken)

        assert manager.state(UNIT).load_state == load_state


class RealProcessesContract(ServiceManagerContract):
    """For managers that run processes and that other processes use too: two callers at once."""

    @pytest.fixture
    def kill_main(self, manager: ServiceManager) -> Callable[[int], None]:
        def kill(number: int) -> None:
            pid = manager.state(UNIT).main_pid
            assert pid is not None
            os.kill(pid, number)

        return kill

    def test_a_job_that_another_takes_the_place_of_is_cancelled(
        self, manager: ServiceManager, clock: Clock, toy: str
    ) -> None:
        self.put(manager, self.text(toy, "--print up --slow-term 2"))
        manager.start(UNIT)
        self._let_it_print(manager, "up")
        stopper = threading.Timer(0.5, manager.stop, [UNIT])
        stopper.start()

        try:
            with pytest.raises(JobCanceled):
                manager.restart(UNIT)
        finally:
            stopper.join()

        state = self.eventually(manager, clock, lambda state: state.active_state != "deactivating")
        assert state.active_state == "inactive"
