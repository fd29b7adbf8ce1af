"""What the page says of a server, from what the API says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_gpu import a_card
from tests.support.readings import a_reading, served
from tunerd.watch.figures import gpu_now
from tunerd.web.charts import draw, in_words
from tunerd.web.page import cards_table, diff_lines, health_of, overview
from tunerd.web.view import Chart, Lines, sweep_section


def drawn(chart: Chart) -> list[list[float | None]]:
    assert isinstance(chart.plot, Lines)
    return [[point.y for point in line.points] for line in chart.plot.lines]


WELL: dict[str, Any] = {
    "unit": "llama-server.service", "exists": True, "active": "active", "sub_state": "running",
    "since_s": 1.0, "restarts": 0, "enabled": True, "health": "ready", "healthy": True,
    "asleep": False, "router": False,
    "address": "http://127.0.0.1:8080", "alias": "qwen", "generation": 3, "profile": "mine",
    "engine": "ik", "last_swap": None, "change_under_way": False, "measurement": None, "vram": [],
    "drift": [], "messages": [], "mode": "system", "outcome": "serving",
}  # fmt: skip
DRIFT = {"code": "unit-changed", "text": "the unit was edited", "hint": "tunerd verify"}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "good", "Your server is well."),
        ({"drift": [DRIFT]}, "warn", "is not what was deployed"),
        ({"asleep": True}, "good", "asleep until somebody asks it"),
        ({"healthy": False, "health": "loading"}, "bad", "does not answer"),
        ({"healthy": None, "health": None}, "warn", "is not known"),
        ({"active": "failed", "sub_state": "failed"}, "bad", "does not run"),
        ({"exists": False, "active": "inactive"}, "warn", "Nothing is deployed"),
        ({"change_under_way": True, "active": "activating"}, "warn", "A change is under way"),
        (
            {"active": "inactive", "measurement": {"purpose": "sweep 3"}},
            "warn",
            "`sweep 3` measures",
        ),
    ],
)
def test_whether_the_server_is_well_is_said_in_one_sentence(
    changed: dict[str, Any], level: str, words: str
) -> None:
    health = health_of(WELL | changed)

    assert health.level == level
    assert words in health.sentence


def test_what_is_not_known_is_never_shown_as_zero() -> None:
    card = {"index": 0, "name": "RTX 3090", "used_mib": None, "total_mib": 24576}
    made = overview(WELL | {"vram": [card], "since_s": None}, {"readings": []}, {"points": []})

    assert [figure.value for figure in made.figures] == ["not seen", "not seen", "unknown"]
    assert "since" not in (dict(made.facts)["unit"] or "")
    assert made.charts == ()


def test_a_speed_that_was_seen_long_ago_is_not_shown_as_now() -> None:
    def reading(at_s: float, tok_s: float | None) -> dict[str, Any]:
        served = None if tok_s is None else {"decode_tok_s": tok_s, "acceptance_ratio": None}
        return {"at_s": at_s, "engine": {"served": served}}

    def shown(*rows: dict[str, Any]) -> str:
        return overview(WELL, {"readings": list(rows)}, {}).figures[0].value

    assert shown(reading(0, 50.0), reading(60, None)) == "50.0"
    assert shown(reading(0, 50.0), reading(3000, None)) == "not seen"


def test_idle_stretches_are_gaps_in_a_chart_and_said_so() -> None:
    def point(at_s: int, n: int | None) -> dict[str, Any]:
        seconds = None if n is None else n / 50
        return {"begin_s": at_s, "n": 6, "n_ready": 6, "n_predicted": n, "predicted_s": seconds,
                "n_drafted": None, "n_accepted": None}  # fmt: skip

    points = [point(0, 600), point(60, None), point(120, 300)]
    made = overview(WELL, {"readings": []}, {"points": points, "gpus": [], "events": []})

    chart = made.charts[0]
    assert drawn(chart) == [[50.0, None, 50.0]]
    assert chart.note == "Gaps: the server was idle or away."
    assert "Generation 50.0 tok/s" in in_words(chart.plot, chart.title)
    assert [one.name for one in made.charts] == ["speed"]


def a_point(begin_s: int, tok_s: float | None) -> dict[str, Any]:
    """A minute of the history, in half of which the server served."""
    n = None if tok_s is None else 600
    return {"begin_s": begin_s, "seconds": 60, "n": 6, "n_ready": 3, "n_predicted": n,
            "predicted_s": None if tok_s is None else 600 / tok_s, "n_drafted": None,
            "n_accepted": None}  # fmt: skip


def test_the_last_hour_is_shown_look_by_look_behind_the_minutes_that_were_kept() -> None:
    begin_s = 1_790_000_040.0
    looks = [a_reading(begin_s + 130 + 10 * n, served=served(500, 25.0)) for n in range(3)]
    readings = {"readings": [one.to_brief_json() for one in looks], "latest": looks[-1].to_json()}
    points = [a_point(int(begin_s) + 60 * n, 50.0) for n in range(4)]
    cards = [{"begin_s": begin_s, "index": 0, "used_mib": 1024, "others_mib": None}]
    telemetry = {"points": points, "gpus": cards, "events": []}

    (speed,) = drawn(overview(WELL, readings, telemetry, 1.0).charts[0])
    assert speed == [50.0, 50.0, 25.0, 25.0, 25.0], "a minute that looks cover is not shown twice"
    vram = overview(WELL, readings, telemetry, 1.0).charts[-1]
    assert drawn(vram)[0] == [1.0, None, 7.8125, 7.8125, 7.8125]
    assert vram.note is not None

    assert drawn(overview(WELL, readings, telemetry, 24.0).charts[0]) == [[50.0] * 4]


def test_a_table_of_many_stretches_says_that_it_leaves_some_out() -> None:
    points = [a_point(60 * n, float(n + 1)) for n in range(100)]
    (table,) = overview(WELL, {"readings": []}, {"points": points}).tables

    assert table.caption == "What was watched, newest first; one of every 3 stretches"
    assert [row[1] for row in table.rows[:3]] == ["100.0", "97.0", "94.0"]
    assert {row[3] for row in table.rows} == {"50\xa0%"}


def test_a_card_that_says_nothing_of_itself_has_no_figures_and_none_are_made_up() -> None:
    blank = replace(a_card(), total_mib=None, used_mib=None, free_mib=None, reserved_mib=None,
                    processes=None, power_w=None, power_limit_w=None, utilisation_percent=None,
                    temperature_c=None, throttle_reasons=None, is_mig=None)  # fmt: skip
    blind = replace(a_reading(), gpus=(gpu_now(blank, []),))

    table = cards_table({"latest": blind.to_json()})
    assert table is not None
    assert table.rows[0][1:] == (None,) * 8
    for latest in (None, replace(blind, gpus=None).to_json(), replace(blind, gpus=()).to_json()):
        assert cards_table({"latest": latest}) is None


def test_a_difference_is_shown_line_by_line_with_what_each_is() -> None:
    diff = "--- a\n+++ b\n@@ -1 +1 @@\n same\n-old\n+new\n"

    assert [kind for kind, _ in diff_lines(diff)] == ["head", "head", "head", "same", "del", "add"]


def test_the_margin_at_which_memory_ran_out_is_marked_and_said() -> None:
    page: dict[str, Any] = {
        "n_starts": 3, "n_requests": 9, "heat": [], "arms": [], "pairs": [], "classes": [],
        "failures": [],
        "margins": [{"fit_mib": 1536, "free_mib": None, "oom": True},
                    {"fit_mib": 1664, "free_mib": 90, "oom": False}],
    }  # fmt: skip
    (chart,) = sweep_section(7, page, {}).charts

    assert isinstance(chart.plot, Lines)
    left, out = ([(point.x, point.y) for point in line.points] for line in chart.plot.lines)
    assert (left, out) == ([(1664, 90)], [(1536, 0)])
    assert "out of memory, 1,536: 0.0 MiB left" in draw(chart.plot, chart.title)
