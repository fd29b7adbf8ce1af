"""What the supervisor takes from a unit, and what an end means."""

from __future__ import annotations

import signal

import pytest

from tests.support.folders import ROOT
from tunerd.calendar import parse_time_span
from tunerd.errors import ConfigError
from tunerd.tryout.local_service import (
    Ending,
    StartLimit,
    complaints_about,
    read_service,
    result_of,
)
from tunerd.units.manager import log_lines, mark
from tunerd.units.text import UnitSpec, parse_unit, render_unit, transient_text
from tunerd.words import Mode

UNIT = "llama-server.service"


def service(text: str) -> str:
    return f"[Service]\nExecStart=/bin/true\n{text}\n"


def test_a_unit_without_settings_has_systemds_defaults() -> None:
    spec = read_service(UNIT, parse_unit(service("")))

    assert (spec.program, spec.argv, spec.work_dir) == ("/bin/true", ("/bin/true",), "/")
    assert (spec.restart, spec.restart_s, spec.timeout_stop_s) == ("no", 0.1, 90)
    assert (spec.start_limit_interval_s, spec.start_limit_burst) == (10, 5)
    assert (spec.limits, spec.umask) == ({}, 0o022)
    assert not spec.no_new_privileges
    assert not spec.can_be_enabled
    assert spec.bound_to is None


def test_a_number_that_no_kernel_takes_is_systemds_default() -> None:
    text = service(f"LimitNOFILE={'9' * 20}\n[Unit]\nStartLimitBurst={'9' * 5000}")
    spec = read_service(UNIT, parse_unit(text))
    assert (spec.limits, spec.start_limit_burst) == ({}, 5)


def test_what_tunerd_writes_is_what_is_run() -> None:
    argv = [
        "/opt/a b/llama-server",
        "-m",
        "/m/100% $HOME.gguf",
        "--api-key-file",
        "/etc/a key",
        "-x",
    ]
    template = (ROOT / "units/llama-server.service.in").read_text()
    text = render_unit(
        template,
        UnitSpec(
            UNIT, Mode.LOCAL, "night", "main", argv, {"A": 'b "c" 5%'}, user="llama",
            api_key_file="/etc/a key", work_dir="/var/log/5%", wants_mlock=True, stop_timeout_s=40,
            unit_directives=[("BindsTo", "lease.service")], wanted_by="default.target",
        ),
    )  # fmt: skip

    spec = read_service(UNIT, parse_unit(text))

    assert complaints_about(UNIT, text) == ()
    assert (spec.program, spec.argv) == (argv[0], tuple(argv))
    assert spec.environment == {"GGML_NO_BACKTRACE": "1", "A": 'b "c" 5%'}
    assert (spec.work_dir, spec.user, spec.bound_to) == ("/var/log/5%", "llama", "lease.service")
    assert (spec.start_limit_interval_s, spec.start_limit_burst) == (900, 16)
    assert (spec.restart, spec.restart_s, spec.timeout_stop_s) == ("on-failure", 5, 40)
    assert (spec.limits, spec.umask) == ({"NOFILE": 65536, "MEMLOCK": -1}, 0o077)
    assert spec.no_new_privileges
    assert spec.can_be_enabled


def test_a_command_of_tunerds_own_is_what_is_run() -> None:
    text = transient_text(["/bin/py", "-m", "50% $A"], [("TimeoutStopSec", "1900")], {"A": "b c"})

    spec = read_service(UNIT, parse_unit(text))

    assert spec.argv == ("/bin/py", "-m", "50% $A")
    assert (spec.environment, spec.timeout_stop_s) == ({"A": "b c"}, 1900)


def test_a_unit_of_version_0_1_reads_its_key_where_the_key_is() -> None:
    text = service("LoadCredential=api-key:/etc/5%%/key").replace("true", "true --k %d/api-key")

    assert read_service(UNIT, parse_unit(text)).argv == ("/bin/true", "--k", "/etc/5%/key")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[Service]\nType=exec\n",
        "[Service]\nExecStart=/bin/a\nExecStart=/bin/b\n",
        "[Service]\nExecStart=./a\n",
        '[Service]\nExecStart=/bin/a "b\n',
        "[Service\nExecStart=/bin/a\n",
    ],
)
def test_a_unit_that_systemd_does_not_load_is_not_loaded(text: str) -> None:
    with pytest.raises(ConfigError):
        read_service(UNIT, parse_unit(text))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("1min 30s", 90), ("1min30s", 90), ("250ms", 0.25), ("1.5h", 5400), ("0", 0),
        ("infinity", float("inf")), ("", None), ("soon", None), ("5 parsecs", None), ("-1", None),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_time_span(text) == seconds


def test_an_end_by_sigterm_is_clean_and_one_that_nobody_saw_is_a_failure() -> None:
    """The other ends are those of the contract of a service manager."""
    assert result_of(Ending(signal=signal.SIGTERM), timed_out=False) == "success"
    assert result_of(Ending(), timed_out=False) == "exit-code"


def test_the_start_limit_refuses_what_is_too_much_in_its_window() -> None:
    limit = StartLimit()
    allowed = []
    for now_s in (0.0, 1.0, 2.0, 3.0, 10.0, 10.5):
        limit, is_allowed = limit.after_start(now_s, interval_s=10, burst=3)
        allowed.append(is_allowed)

    assert allowed == [True, True, True, False, False, True]


def test_a_log_is_told_apart_by_start() -> None:
    one, two = "1" * 32, "2" * 32
    text = (
        "cut off\n"
        + mark("t", one, "Starting, pid 1")
        + "hello\n"
        + mark("t", two, "Starting,\npid 2")
        + "again\nlast"
    )

    assert log_lines(text, unit="u", invocation_id=one) == ("u: Starting, pid 1", "hello")
    assert log_lines(text, unit="u", invocation_id=two) == ("u: Starting, pid 2", "again", "last")
    assert len(log_lines(text, unit="u")) == 6
    assert log_lines("", unit="u") == ()


def test_what_is_left_of_a_start_whose_mark_was_cut_off_is_its_own() -> None:
    """After `> FILE`, or 8 MiB, nobody knew what a server died of."""
    one, two = "1" * 32, "2" * 32
    left = "out of memory\n"
    ended, next_start = mark("t", one, "Main process ended"), mark("t", two, "Starting, pid 2")
    assert log_lines(left, unit="u", invocation_id=one) == ("out of memory",)
    for text in (left + ended, left + ended + next_start):
        told = log_lines(text, unit="u", invocation_id=one)
        assert told == ("out of memory", "u: Main process ended")
    assert log_lines(left + next_start, unit="u", invocation_id=two) == ("u: Starting, pid 2",)
