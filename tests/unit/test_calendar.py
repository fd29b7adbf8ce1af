"""When a sweep may run: days, midnight, time zones, and the nights in which clocks change."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from itertools import islice
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import ROOT
from tunerd.calendar import Deadline, open_span, parse_window, spans
from tunerd.machine.clock import local_zone

BERLIN = ZoneInfo("Europe/Berlin")
HOUR = 3600.0


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def opened(times: str, days: str, after: str, n: int = 1) -> str:
    window = parse_window(times, days, "Europe/Berlin")
    ends = [(one.begin_s, one.end_s) for one in islice(spans(window, at(after)), n)]
    return ", ".join("-".join(_shown(moment) for moment in one) for one in ends)


def _shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, BERLIN).strftime("%a %d %H:%M")


def test_a_window_opens_on_its_days() -> None:
    found = opened("01:00-06:30", "mon-fri", "2026-11-20 12:00", 2)
    assert found == "Mon 23 01:00-Mon 23 06:30, Tue 24 01:00-Tue 24 06:30"
    # An end before the begin is on the next day, and the day is that of the begin.
    found = opened("23:00-05:00", "sat", "2026-11-22 02:00", 2)
    assert found == "Sat 21 23:00-Sun 22 05:00, Sat 28 23:00-Sun 29 05:00"
    # A begin that clocks leave out is as much later, and of a time that occurs twice the first counts.
    assert opened("02:30-05:00", "daily", "2026-03-29 00:00") == "Sun 29 03:30-Sun 29 05:00"
    twice = parse_window("01:00-02:30", "daily", "Europe/Berlin")
    assert next(iter(spans(twice, at("2026-10-25 00:30")))).seconds == 1.5 * HOUR
    old, new = (parse_window(f"{hour}:30-06:00", "daily", "UTC") for hour in ("24", "00"))
    assert old == new, "as files of before may say it"


def test_what_is_no_window_says_what_is() -> None:
    times = ("1-2", "01:00-01:00", "25:00-26:00", "24:30-00:30", "01:75-05:00", "01:00-24:60")
    others = (("monday", "UTC"), ("mon-", "Mars/Base"), ("mon", "Mars/Base"))
    for words in (
        *((one, "daily", "UTC") for one in times),
        *(("01:00-02:00", *one) for one in others),
    ):
        with pytest.raises(ValueError, match=r"such as|for example"):
            parse_window(*words)


# Within a window


def test_what_may_be_measured_ends_early_enough_also_when_clocks_change() -> None:
    """From half past two at night, or where clocks jumped to: 06:00 less an hour for the return."""
    for day, minutes in (("2026-03-29", 150), ("2026-10-25", 270), ("2026-11-22", 210)):
        now_s = at(f"{day} 00:30") + 1.5 * HOUR
        span = open_span(parse_window("01:00-06:00", "daily", "Europe/Berlin"), now_s)
        assert span is not None
        assert Deadline(span.end_s, 0.0, "").measuring_s(now_s) == (minutes + 30) * 60
        kept = Deadline(span.end_s, 1800.0, "")
        over_s = now_s + minutes * 60
        assert (kept.is_over(over_s - 1), kept.is_over(over_s)) == (False, True)
        assert kept.measuring_s(over_s) == 0.0


def test_a_window_is_open_from_its_begin_until_its_end() -> None:
    window = parse_window("01:00-06:00", "daily", "Europe/Berlin")
    moments = {"00:59:59": False, "01:00": True, "05:59:59": True, "06:00": False, "12:00": False}
    found = {moment: open_span(window, at(f"2026-11-22 {moment}")) for moment in moments}
    assert {moment: span is not None for moment, span in found.items()} == moments


ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca"]
)  # fmt: skip


@given(
    st.floats(0, 4_000_000_000), st.integers(0, 23), st.integers(0, 59), st.integers(1, 23), ZONES,
    st.floats(0, 7200),
)  # fmt: skip
def test_production_is_on_its_way_back_before_any_window_ends(
    now: float, hour: int, minute: int, hours: int, zone: str, kept_s: float
) -> None:
    times = f"{hour:02d}:{minute:02d}-{(hour + hours) % 24:02d}:{minute:02d}"
    window = parse_window(times, "daily", zone)
    span = open_span(window, now)
    if span is None:
        return
    assert span.begin_s <= now < span.end_s
    left_s = Deadline(span.end_s, kept_s, times).measuring_s(now)
    assert now + left_s + kept_s <= max(span.end_s, now + kept_s) + 1e-3
    assert (hours - 1.01) * HOUR <= span.seconds <= (hours + 1.01) * HOUR


# From the machine


def test_the_machines_zone_is_that_of_its_clock(tmp_path: Path) -> None:
    assert local_zone({}, root=tmp_path) == "UTC"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/timezone").write_text("Asia/Kolkata\n")
    assert local_zone({}, root=tmp_path) == "Asia/Kolkata"
    (tmp_path / "etc/localtime").symlink_to("../usr/share/zoneinfo/Europe/Berlin")
    assert local_zone({}, root=tmp_path) == "Europe/Berlin"
    assert local_zone({"TZ": ":America/New_York"}, root=tmp_path) == "America/New_York"
    assert local_zone({"TZ": ":/etc/localtime"}, root=tmp_path) == "Europe/Berlin"
    assert local_zone({"TZ": "/usr/share/zoneinfo/Asia/Kolkata"}) == "Asia/Kolkata"


def test_a_machine_without_tzdata_has_windows_by_utc_and_is_told_what_others_need() -> None:
    """Containers of Ubuntu have none: each command that reads settings refused a window for its time zone."""
    script = """
from tunerd.calendar import open_span, parse_window
print(open_span(parse_window("23:00-01:00", "daily", "Etc/UTC"), 86400.0))
parse_window("23:00-01:00", "daily", "Europe/Berlin")"""
    variables = {"PYTHONPATH": str(ROOT), "PYTHONTZPATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout == "Span(begin_s=82800.0, end_s=90000.0)\n", done.stderr
    assert "not `Europe/Berlin` (without the package tzdata" in done.stderr
