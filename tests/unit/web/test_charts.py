"""Charts as SVG: whole whatever the figures are, and no text of theirs is markup."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

from markupsafe import Markup

from tunerd.web.charts import draw, in_words
from tunerd.web.html import environment
from tunerd.web.view import Bar, Bars, Line, Lines, Part, Plot, Point

HOSTILE = "</title><script>alert(1)</script>\"'&"
NOON_S = 1_795_003_200.0


def line(*values: float | None, step: float = 1.0, begin: float = 0.0) -> Line:
    points = tuple(Point(begin + at * step, value) for at, value in enumerate(values))
    return Line("on", "mainline", points)


def parts(plot: Plot, title: str = "words") -> ET.Element:
    return ET.fromstring(str(draw(plot, title)))  # noqa: S314 -- our own text


def texts(plot: Plot) -> list[str]:
    return [element.text or "" for element in parts(plot).iter("text")]


PLOTS: tuple[Plot, ...] = (
    Lines((), "tok/s"),
    Lines((line(None, None),), "tok/s"),
    Bars((), "tok/s"),
    Lines((line(5.0),), "tok/s"),
    Lines((line(5.0, begin=NOON_S),), "tok/s", is_time=True),
    Lines((line(0.0, 0.0),), "tok/s", x_title="tokens"),
    Lines((line(1.0, None, 0.5),), "", is_ratio=True, crossing=Point(1.0, None, None, 4.0)),
    Bars((("code", (Bar("on", (Part("on", "ik", None),), None),)),), "tok/s"),
)


def test_no_figures_one_figure_and_gaps_make_a_whole_chart() -> None:
    for plot in PLOTS:
        assert (parts(plot).get("aria-label") or "").startswith("words: ")
        assert not re.search(r"nan|inf|None", draw(plot, "words"))


def test_names_are_text_and_never_markup() -> None:
    bar = Bar(HOSTILE, (Part(HOSTILE, "ik", 1.0),), 1.0)
    plots: tuple[Plot, ...] = (
        Lines((Line(HOSTILE, "ik", (Point(1, 2),)),), HOSTILE, HOSTILE),
        Bars(((HOSTILE, (bar,)),), HOSTILE, is_stacked=True),
    )
    for plot in plots:
        assert not [one for one in parts(plot, HOSTILE).iter() if one.tag == "script"]
        assert any(text.startswith("</title>") for text in texts(plot))


def test_no_name_turns_around_what_stands_behind_it() -> None:
    """`\u202e` in a model's name had the rest of its line read from the right."""
    turned = "a\u202eb\u2066"
    bars = Bars(((turned, (Bar("on", (Part("on", "ik", 1.0),), 1.0),)),), "tok/s")
    page = environment().from_string("{{ name }}\n{{ plot | drawn(name) }}{{ lines }}")

    shown = page.render(name=turned, plot=bars, lines=Markup("<b>\n</b>"))

    assert not {"\u202e", "\u2066"} & {*shown}
    assert shown.count(r"a\u202eb\u2066") >= 2
    assert "<svg" in shown
    assert "<b>\n</b>" in shown


def test_a_gap_parts_a_line_and_each_figure_is_told_by_its_dot() -> None:
    svg = parts(Lines((line(1.0, 2.0, None, 3.0),), "tok/s"))

    (joined,) = svg.iter("polyline")
    assert len((joined.get("points") or "").split()) == 2
    assert [one.text for one in svg.iter("title")] == [
        "on, 0: 1.0 tok/s", "on, 1: 2.0 tok/s", "on, 3: 3.0 tok/s",
    ]  # fmt: skip


def test_ends_that_print_alike_are_said_once_whatever_their_unit() -> None:
    for plot, words in (
        (Lines((line(50.0, 50.01),), "tok/s"), "on 50.0 tok/s;"),
        (Lines((line(0.5, 0.5),), "", is_ratio=True), "on 50.0\u00a0%;"),
        (Lines((line(0.5, 0.75),), "", is_ratio=True), "on 50.0 to 75.0\u00a0%;"),
    ):
        assert words in in_words(plot, "words")


def test_ticks_are_round_and_times_are_those_of_a_clock() -> None:
    assert texts(Lines((line(0, 81.0),), "tok/s"))[:5] == ["0", "20", "40", "60", "80"]
    hours = texts(Lines((line(1, 2, step=7200, begin=NOON_S),), "tok/s", is_time=True))
    assert {"12:00", "13:00", "14:00"} <= set(hours)
    days = texts(Lines((line(1, 2, step=5 * 86400, begin=NOON_S),), "tok/s", is_time=True))
    assert "19 Nov" in days


_TICKS = """
from tunerd.web.charts import _Axis, _time_ticks
from tunerd.words import local_time, when
print(when(1790000000))
for begin_s, end_s in (1790000000, 1790086400), (1792580400, 1793185200), (1774432800, 1775037600):
    print(*(f"{tick.text}, {local_time(tick.value, '%-d %b %H:%M')}" for tick in _time_ticks(_Axis(begin_s, end_s))), sep="; ")
"""


def ticks_in(zone: str) -> list[list[str]]:
    """The time of now there, and the ticks of a day and of two weeks in which clocks change, with their times."""
    variables = {"TZ": zone, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _TICKS], env=variables, capture_output=True, text=True, check=True)  # fmt: skip
    return [told.split("; ") for told in done.stdout.splitlines()]


def test_times_are_the_machines_own_and_its_round_hours_and_midnights_are_marked() -> None:
    now, day, *_ = ticks_in("IST-5:30")
    assert now == ["2026-09-21 19:43:20 IST"]
    assert "22 Sep, 22 Sep 00:00" in day
    assert all(text.partition(",")[0].endswith(":00") for text in day if ":" in text[:5])
    for week in ticks_in("Europe/Berlin")[2:]:
        assert all(text.partition(", ")[2] == f"{text.partition(', ')[0]} 00:00" for text in week)
