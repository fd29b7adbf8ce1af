"""What the supervisor takes from a unit, and what an end means."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tunerd.core.local_outcome import Ending, StartLimit, result_of, should_restart
from tunerd.core.local_service import Restart, complaints_about, left_out, parse_size, read_service
from tunerd.core.time_span import parse_time_span
from tunerd.core.unit_file import parse_unit
from tunerd.core.unit_log import log_lines, mark
from tunerd.errors import ConfigError

UNIT = "llama-server.service"


def service(text: str) -> str:
    return f"[Service]\nExecStart=/bin/true\n{text}\n"


def test_a_unit_without_settings_has_systemds_defaults() -> None:
    spec = read_service(UNIT, parse_unit(service("")))

    assert spec.restart is Restart.NO
    assert spec.restart_s == 0.1
    assert spec.timeout_stop_s == 90
    assert (spec.start_limit_interval_s, spec.start_limit_burst) == (10, 5)
    assert spec.kill_signal == signal.SIGTERM
    assert spec.memlock_bytes is None
    assert spec.left_out == ()


def test_settings_are_read_in_their_units() -> None:
    spec = read_service(
        UNIT,
        parse_unit(
            "[Unit]\nStartLimitIntervalSec=5min\nStartLimitBurst=6\n[Service]\nType=exec\n"
            "ExecStart=/bin/a b\nRestart=on-failure\nRestartSec=250ms\nTimeoutStopSec=1min 30s\n"
            "KillSignal=SIGINT\nLimitMEMLOCK=infinity\nLimitNOFILE=1024:65536\nLimitCORE=0\n"
            "LimitAS=2G\n"
            "UMask=0077\nLoadCredential=api-key:/etc/key\nUser=llama\nNoNewPrivileges=yes\n"
            "[Install]\nWantedBy=multi-user.target\n"
        ),
    )

    assert (spec.start_limit_interval_s, spec.start_limit_burst) == (300, 6)
    assert (spec.restart_s, spec.timeout_stop_s) == (0.25, 90)
    assert spec.kill_signal == signal.SIGINT
    assert (spec.memlock_bytes, spec.n_files, spec.core_bytes) == (-1, 65536, 0)
    assert spec.address_space_bytes == 2 * 1024**3
    assert spec.umask == 0o77
    assert spec.credentials == (("api-key", "/etc/key"),)
    assert spec.no_new_privileges
    assert spec.can_be_enabled
    assert spec.waits_for_exec
    assert spec.left_out == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[Service]\nType=exec\n",
        "[Service]\nExecStart=/bin/a\nExecStart=/bin/b\n",
        "[Service]\nExecStart=./a\n",
        '[Service]\nExecStart=/bin/a "b\n',
        "[Service\nExecStart=/bin/a\n",
        "[Service]\nExecStart=/bin/a\nWorkingDirectory=here\n",
    ],
)
def test_a_unit_that_systemd_does_not_load_is_not_loaded(text: str) -> None:
    with pytest.raises(ConfigError):
        read_service(UNIT, parse_unit(text))


def test_what_is_not_honoured_is_named_once() -> None:
    unit = parse_unit(
        "[Unit]\nAfter=a\nConflicts=b.service\n[Service]\nType=notify\nExecStart=-/bin/true\n"
        "PrivateTmp=yes\nSystemCallFilter=@a\nSystemCallFilter=@b\n[X-Mine]\nA=b\n"
    )

    assert left_out(unit) == (
        "ExecStart=-",
        "Conflicts=",
        "Type=notify",
        "PrivateTmp=",
        "SystemCallFilter=",
    )


def test_the_units_that_tunerd_renders_have_no_complaints() -> None:
    template = (Path(__file__).parents[2] / "units/llama-server.service.in").read_text()
    lines = [line for line in template.split("\n") if "@" not in line or "@system" in line]
    text = "\n".join(lines).replace("[Service]", "[Service]\nExecStart=/bin/true")

    assert complaints_about(UNIT, text) == ()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "masked"),
        (service("Restrat=always"), "Restrat"),
        (service("Restart=sometimes"), "Restart=sometimes"),
        (service("TimeoutStopSec=soon"), "TimeoutStopSec=soon"),
        (service("LimitNOFILE=many"), "LimitNOFILE"),
        (service("UMask=99"), "UMask"),
        (service("Type=fast"), "Type=fast"),
        (service("KillMode=gently"), "KillMode"),
        (service("LoadCredential=key"), "LoadCredential"),
        (service("Environment=1A=b"), "Environment"),
        (service("User=a b"), "User"),
        (service("[Servise]\nA=b"), "Servise"),
        ("ExecStart=/bin/true\n", "outside of a section"),
        ("[Service]\nType=exec\n", "no ExecStart="),
        ('[Service]\nExecStart=/bin/true "a\n', "unbalanced quotes"),
        (service("User=\udcff"), "UTF-8"),
    ],
)
def test_a_bad_unit_is_complained_about(text: str, word: str) -> None:
    assert any(word in complaint for complaint in complaints_about(UNIT, text))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1min 30s", 90),
        ("1min30s", 90),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("0", 0),
        ("infinity", float("inf")),
        ("", None),
        ("soon", None),
        ("5 parsecs", None),
        ("-1", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_time_span(text) == seconds


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("65536", 65536),
        ("8M", 8 << 20),
        ("infinity", -1),
        ("1:2K", 2048),
        ("x", None),
        (None, None),
    ],
)
def test_sizes_of_limits(text: str | None, number: int | None) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    ("ending", "timed_out", "result"),
    [
        (Ending(code=0), False, "success"),
        (Ending(code=1), False, "exit-code"),
        (Ending(signal=signal.SIGTERM), False, "success"),
        (Ending(signal=signal.SIGKILL), False, "signal"),
        (Ending(signal=signal.SIGKILL), True, "timeout"),
        (Ending(signal=signal.SIGSEGV, dumped=True), False, "core-dump"),
        (Ending(), False, "exit-code"),
    ],
)
def test_the_result_of_an_end(ending: Ending, timed_out: bool, result: str) -> None:
    assert result_of(ending, timed_out=timed_out) == result


@pytest.mark.parametrize(
    ("restart", "restarted"),
    [
        (Restart.NO, set()),
        (Restart.ALWAYS, {"success", "exit-code", "signal", "timeout"}),
        (Restart.ON_SUCCESS, {"success"}),
        (Restart.ON_FAILURE, {"exit-code", "signal", "timeout"}),
        (Restart.ON_ABNORMAL, {"signal", "timeout"}),
        (Restart.ON_ABORT, {"signal"}),
    ],
)
def test_which_ends_lead_to_a_restart(restart: Restart, restarted: set[str]) -> None:
    results = {"success", "exit-code", "signal", "timeout"}

    assert {result for result in results if should_restart(restart, result)} == restarted


def test_the_start_limit_refuses_what_is_too_much_in_its_window() -> None:
    limit = StartLimit()
    allowed = []
    for now_s in (0.0, 1.0, 2.0, 3.0, 10.0, 10.5):
        limit, is_allowed = limit.after_start(now_s, interval_s=10, burst=3)
        allowed.append(is_allowed)

    assert allowed == [True, True, True, False, False, True]


def test_a_start_limit_of_zero_is_none() -> None:
    limit = StartLimit()
    for now_s in range(20):
        limit, is_allowed = limit.after_start(now_s, interval_s=0, burst=3)
        assert is_allowed


def test_a_log_is_told_apart_by_start() -> None:
    one, two = "1" * 32, "2" * 32
    text = (
        "cut off\n"
        + mark("t", one, "Started, pid 1")
        + "hello\n"
        + mark("t", two, "Started,\npid 2")
        + "again\nlast"
    )

    assert log_lines(text, unit="u", invocation_id=one) == ("u: Started, pid 1", "hello")
    assert log_lines(text, unit="u", invocation_id=two) == ("u: Started, pid 2", "again", "last")
    assert len(log_lines(text, unit="u")) == 6
    assert log_lines("", unit="u") == ()
