"""What the tests of a module share: a browser, and an API that answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.api_box import ApiBox, serving
from tests.support.browser import Chromium, browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def api() -> Iterator[ApiBox]:
    with serving() as running:
        yield running
