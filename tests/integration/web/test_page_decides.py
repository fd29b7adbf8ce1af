"""What a sweep proposes, decided in a real browser: shown, agreed to, deployed or turned down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.api_box import ApiBox, serving
from tests.support.browser import Chromium
from tests.support.made_sweep import put_proposal
from tests.support.sweep_box import SweepBox, swept

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


@pytest.fixture
def page(box: SweepBox) -> Iterator[ApiBox]:
    with serving(box=box.box) as api:
        yield api


def test_a_proposal_is_shown_then_deployed_with_one_click_and_taken_back_with_another(
    chromium: Chromium, box: SweepBox, page: ApiBox
) -> None:
    number = put_proposal(box.box.context)
    shown = chromium.open(f"{page.url}/sweeps/{number}", allow=page.url)
    shown.follow("text=Promote it")
    shown.inner.wait_for_selector(f"h1:has-text('Promote what sweep {number} proved?')")
    assert "spec-draft-n-max 4" in " ".join(shown.texts(".diff .del"))
    assert shown.accessibility_problems() == []
    assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1]), "nothing was touched yet"
    shown.inner.uncheck("#probation")
    shown.follow("button:has-text('Promote it')")
    shown.inner.wait_for_selector("h1:has-text('serves `night`')")
    assert "--spec" not in " ".join(box.engine.served()[-1])
    assert box.serves

    shown.inner.goto(f"{page.url}/sweeps/{number}")
    assert "promoted" in " ".join(shown.texts(".facts"))
    shown.inner.goto(f"{page.url}/rollback")
    assert "spec-draft-n-max 4" in " ".join(shown.texts(".diff .add"))
    shown.follow("button:has-text('Go back')")
    shown.inner.wait_for_selector("h1:has-text('as generation')")
    assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])
    shown.inner.goto(f"{page.url}/sweeps/{number}")
    assert "rolled back" in " ".join(shown.texts(".facts"))
    assert shown.complaints() == []
    shown.close()
