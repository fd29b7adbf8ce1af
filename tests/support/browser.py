"""A real browser for pages: Debian's chromium, driven by Playwright, with no network at all.

    with browser() as chromium:
        page = chromium.open(path, width=375, dark=True)
        page.screenshot(path / "phone.png")
        assert page.complaints() == []

What a page asks of any other host, and what it writes to the console, is collected. A page that is
given as a file is opened as a file.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import needs

if TYPE_CHECKING:
    from playwright.sync_api import Browser as PlaywrightBrowser
    from playwright.sync_api import Page as PlaywrightPage
    from playwright.sync_api import Request

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_MS = 300_000
# Elements whose content is wider than the window, but for those that scroll by themselves.
_OVERFLOW = """() => {
  const wide = document.documentElement.clientWidth + 1;
  const scrolls = (e) => {
    for (let p = e.parentElement; p; p = p.parentElement)
      if (/auto|scroll|hidden/.test(getComputedStyle(p).overflowX)) return true;
    return false;
  };
  return [...document.body.querySelectorAll('*')]
    .filter((e) => e.getBoundingClientRect().right > wide && e.offsetParent && !scrolls(e))
    .map((e) => `${e.tagName.toLowerCase()}.${e.className} ${Math.round(e.getBoundingClientRect().right)}`);
}"""


def needs_browser() -> None:
    """Skip where there is no browser, or nothing to drive it with."""
    if _program() is None:
        needs.missing("browser", "no chromium", "`apt-get install chromium` brings it")
    for package in ("playwright", "axe_playwright_python"):
        if find_spec(package) is None:
            needs.missing("browser", f"no {package}", "pip install 'tunerd[browser]' brings it")


@dataclass
class Page:
    """One open page, and what it did that it should not."""

    inner: PlaywrightPage
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def screenshot(self, path: Path) -> Path:
        """A picture of the page."""
        self.inner.screenshot(path=str(path), full_page=True)
        return path

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.inner.evaluate(expression)

    def until(self, expression: str, limit_s: float = _TIMEOUT_MS / 1000) -> None:
        """Wait until a JavaScript expression is true.

        Playwright's own `wait_for_function` asks a second time by `eval`, which the page's policy
        (CSP) refuses: it waits for nothing that is not there at once.
        """
        end_s = time.monotonic() + limit_s
        while not self.js(expression):
            assert time.monotonic() < end_s, f"never came true: {expression}"
            self.inner.wait_for_timeout(50)

    def follow(self, selector: str) -> None:
        """Click what leads to another page, and be there once it is whole.

        A click alone ends when the other page begins: what is read then may not have come yet.
        """
        with self.inner.expect_navigation():
            self.inner.click(selector)

    def texts(self, selector: str) -> list[str]:
        """The visible text of every element, at once."""
        return self.inner.locator(selector).all_inner_texts()

    def overflowing(self) -> list[str]:
        """Elements that stick out of the window to the right, where nothing scrolls them."""
        found: list[str] = self.js(_OVERFLOW)
        return found

    def complaints(self) -> list[str]:
        """What the page asked of the network, and errors and warnings of its scripts."""
        return [*(f"asked for {url}" for url in self.requests), *self.messages]

    def accessibility_problems(self) -> list[str]:
        """What axe-core finds against WCAG 2.2 A and AA, and its best practices."""
        from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415  may be missing

        found = Axe().run(self.inner).response["violations"]
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found
            for node in one["nodes"]
        ]

    def close(self) -> None:
        """Close it."""
        self.inner.context.close()


class Chromium:
    """A running browser."""

    def __init__(self, inner: PlaywrightBrowser) -> None:
        self._inner = inner

    def open(
        self,
        target: Path | str,
        *,
        width: int = 1440,
        dark: bool = False,
        javascript: bool = True,
        touch: bool = False,
        allow: str | None = None,
    ) -> Page:
        """A page in a fresh profile.

        Args:
            target: A file, or an address.
            width: Of the window [CSS px].
            dark: Whether the reader's system prefers dark.
            javascript: Whether scripts run.
            touch: Whether it is a phone.
            allow: Beginning of addresses that the page may ask for; None for no network at all.
        """
        context = self._inner.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=javascript,
            has_touch=touch,
            is_mobile=touch,
            reduced_motion="reduce",
        )
        context.set_default_timeout(_TIMEOUT_MS)
        page = Page(context.new_page())
        url = target.resolve().as_uri() if isinstance(target, Path) else target

        def asked(request: Request) -> None:
            is_own = request.url == url or request.url.startswith(("data:", "blob:"))
            if not is_own and not (allow is not None and request.url.startswith(allow)):
                page.requests.append(request.url)

        page.inner.on("request", asked)
        page.inner.on("pageerror", lambda error: page.messages.append(str(error)))
        page.inner.on(
            "console",
            lambda said: (
                page.messages.append(said.text) if said.type in {"error", "warning"} else None
            ),
        )
        page.inner.goto(url, wait_until="load")
        return page


@contextmanager
def browser() -> Iterator[Chromium]:
    """A running chromium; it ends with the body."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  may be missing

    program = _program()
    arguments = ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # chromium's own sandbox refuses root
    with sync_playwright() as playwright:
        inner = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield Chromium(inner)
        finally:
            inner.close()


def _program() -> str | None:
    named = os.environ.get("TUNERD_TEST_CHROMIUM")
    return named or next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
