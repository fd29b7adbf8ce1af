"""Reports in a real browser: on a phone and on a desk, in light and in dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import Chromium
from tests.support.reports import page_of, with_text
from tests.support.synthetic_runs import made_runs

pytestmark = pytest.mark.browser

HOSTILE = (
    "</script></style><script>window.broken=1</script>"
    "<img src=x onerror='window.broken=2'>\"'><svg onload='window.broken=3'></svg>"
    "<a href='javascript:window.broken=4' id='bad'>click</a>{{ 7 * 7 }}<b>bold</b>&lt;\u2028@ink"
)
# What each chart draws, and which of its texts stand on each other or out of their box.
_CHARTS = """[...document.querySelectorAll('[data-chart]')].map((box) => {
  const inside = box.getBoundingClientRect();
  const texts = [...box.querySelectorAll('text')].filter((e) => e.getClientRects().length)
    .map((e) => [e.textContent, e.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
  const out = texts.filter(([, a]) => a.left < inside.left - 1 || a.right > inside.right + 1);
  const both = texts.flatMap(([one, a], at) =>
    texts.slice(at + 1).filter(([, b]) => meet(a, b)).map(([other]) => `${one} / ${other}`));
  return { marks: box.querySelectorAll('polyline, circle, rect').length,
           touching: [...both, ...out.map(([text]) => text)] };
})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("report"), made_runs())


@pytest.mark.parametrize(("width", "dark"), [(375, True), (1440, False)], ids=["phone", "desk"])
def test_a_report_is_readable_on_any_screen_and_asks_for_nothing(
    chromium: Chromium, report: Path, width: int, dark: bool
) -> None:
    page = chromium.open(report, width=width, dark=dark, touch=width < 1000)

    shown = page.js(_CHARTS)
    assert len(shown) == 6
    assert all(chart["marks"] for chart in shown), f"an empty chart: {shown}"
    assert [chart["touching"] for chart in shown] == [[]] * 6
    assert page.complaints() == []
    assert page.overflowing() == []
    assert page.accessibility_problems() == []
    page.close()


def test_nothing_that_a_name_holds_becomes_part_of_the_page(
    chromium: Chromium, tmp_path: Path
) -> None:
    page = chromium.open(page_of(tmp_path, [with_text(run, HOSTILE) for run in made_runs()]))

    assert page.js("window.broken") is None
    assert page.complaints() == []
    elements = "#bad, img, main a, main b:not(.names b), .chart [href]"
    assert page.js(f"document.querySelectorAll('{elements}').length") == 0
    assert page.js("document.querySelectorAll('script').length") == 2
    assert page.js("document.querySelectorAll('.chart rect').length") > 0
    title = page.texts("h1")[0]
    for part in ("</script></style><script>window.broken=1", "{{ 7 * 7 }}", "&lt;", "@ink"):
        assert part in title
    names = page.js("[...document.querySelectorAll('text.name')].map((e) => e.textContent)")
    assert any(text.startswith("code cpp </script>") for text in names), names
    assert page.overflowing() == []
    page.close()
