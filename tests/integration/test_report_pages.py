"""Reports in a real browser: on a phone and on a desk, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Chromium, browser
from tests.support.reports import page_of, with_text
from tests.support.synthetic_runs import made_runs

pytestmark = pytest.mark.browser

HOSTILE = (
    "</script></style><script>window.broken=1</script>"
    "<img src=x onerror='window.broken=2'>\"'><svg onload='window.broken=3'></svg>"
    "<a href='javascript:window.broken=4' id='bad'>click</a>{{ 7 * 7 }}<b>bold</b>&lt;\u2028@ink"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("report"), made_runs())


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1440])
def test_a_report_is_readable_on_any_screen_and_asks_for_nothing(
    chromium: Chromium, report: Path, width: int, dark: bool
) -> None:
    page = chromium.open(report, width=width, dark=dark, touch=width < 1000)

    drawn = page.js(
        "[...document.querySelectorAll('[data-figure]')].map((e) => e.querySelectorAll('svg path').length)"
    )
    assert len(drawn) == 6
    assert all(drawn), f"an empty chart: {drawn}"
    assert page.complaints() == []
    assert page.overflowing() == []
    assert page.accessibility_problems() == []
    page.close()


def test_the_theme_follows_the_system_until_the_reader_chooses(
    chromium: Chromium, report: Path
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    grid = "document.querySelector('.chart .gridlayer path').style.stroke"
    light, dark = chromium.open(report), chromium.open(report, dark=True)
    colours = (light.js(ground), light.js(grid))
    assert colours != (dark.js(ground), dark.js(grid))

    dark.inner.click("#theme")

    assert (dark.js(ground), dark.js(grid)) == colours
    assert dark.accessibility_problems() == []
    light.close()
    dark.close()


def test_tables_behind_charts_open_and_everything_is_there_without_scripts(
    chromium: Chromium, report: Path
) -> None:
    page = chromium.open(report)
    assert "tokens of the answer" not in " ".join(page.texts("details.data table"))
    for summary in page.inner.locator("details.data > summary").all():
        summary.click()
    opened = page.texts("details.data table")
    page.close()
    assert all(text.strip() for text in opened)

    plain = chromium.open(report, javascript=False)

    assert plain.inner.locator("details.data table").all_inner_texts() == opened
    assert not plain.inner.locator(".chart-box").first.is_visible()
    plain.close()


def test_nothing_that_a_name_holds_becomes_part_of_the_page(
    chromium: Chromium, tmp_path: Path
) -> None:
    page = chromium.open(page_of(tmp_path, [with_text(run, HOSTILE) for run in made_runs()]))

    assert page.js("window.broken") is None
    assert page.complaints() == []
    elements = "#bad, img, main a, main b:not(.names b), .chart [href]"
    assert page.js(f"document.querySelectorAll('{elements}').length") == 0
    assert page.js("document.querySelectorAll('script').length") == 4
    assert page.js("document.querySelectorAll('.chart svg path').length") > 0
    title = page.texts("h1")[0]
    for part in ("</script></style><script>window.broken=1", "{{ 7 * 7 }}", "&lt;", "@ink"):
        assert part in title
    ticks = page.js("[...document.querySelectorAll('.ytick text')].map((e) => e.textContent)")
    assert any(text.startswith("code cpp </script>") for text in ticks), ticks
    assert page.overflowing() == []
    page.close()
