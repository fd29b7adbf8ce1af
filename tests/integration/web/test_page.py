"""The page in a real browser, over a real server: looked at on any screen, and used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.support.api_box import ApiBox, serving
from tests.support.browser import Chromium
from tests.support.local_box import deployed
from tests.support.made_sweep import put_sweep
from tests.support.ports import free_port
from tests.support.readings import a_reading, served, watched_hours
from tunerd.jobs import folder_of
from tunerd.machine.files import lock
from tunerd.measure.evidence import RunOutcome
from tunerd.measure.store import EvidenceStore
from tunerd.operations import JobRequest, Lane
from tunerd.result import Progress

pytestmark = pytest.mark.llama

HOSTILE = "</title><script>window.broken=1</script><img src=x onerror='window.broken=2'>\"'&lt;"
PLAIN = """
extends = "cpu-embedded-baseline"
description = '''{description}'''
model.path = "{model}"
serving.port = {port}
serving.threads = 1
serving.threads_batch = 1
serving.ctx_size = 512
"""
PLACES = ("/", "/generations", "/generations/1", "/deploy", "/deploy/plain", "/sweeps", "/sweeps/1",
          "/workloads/coding-agent", "/doctor", "/jobs")  # fmt: skip
WIDE_PLACES = ("/", "/sweeps/1")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiBox]:
    """A page over a server that was watched for some hours, with a night behind it."""
    port = free_port()
    with deployed(tmp_path_factory.mktemp("page"), port) as box:
        text = PLAIN.format(description=HOSTILE, model=box.model, port=port)
        box.configure(text, "profiles/plain.toml")
        assert put_sweep(box) == 1
        watched_hours(box.context)
        with serving(box=box) as api:
            work = served(600, 51.5, n_drafted=900, n_accepted=700)
            api.telemetry.add(a_reading(box.context.clock.now_s(), served=work))
            yield api


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(375, True), (1440, False)], ids=["phone", "desk"])
def test_every_place_is_readable_on_any_screen(
    chromium: Chromium, page: ApiBox, width: int, dark: bool
) -> None:
    found: dict[str, list[str]] = {}
    shown = chromium.open(page.url, width=width, dark=dark, touch=width < 1000, allow=page.url)
    for place in PLACES if width < 1000 else WIDE_PLACES:
        shown.inner.goto(page.url + place)
        if shown.inner.locator("#pause").count():
            shown.inner.click("#pause")  # what is looked at stays as it is
        wrong = [*shown.overflowing(), *shown.accessibility_problems()]
        wrong += ["a script of others ran"] if shown.js("window.broken") else []
        found |= {place: wrong} if wrong else {}

    assert found == {}
    assert [text for text in shown.complaints() if "404" not in text] == []
    shown.close()


@pytest.mark.browser
def test_one_deploys_and_goes_back_without_scripts_and_sees_what_is_asked_first(
    chromium: Chromium, page: ApiBox
) -> None:
    shown = chromium.open(f"{page.url}/deploy", javascript=False, allow=page.url)
    shown.follow("text=plain")
    assert "ctx-size 512" in " ".join(shown.texts(".diff .add"))
    shown.follow("button:has-text('Deploy plain')")
    shown.inner.wait_for_selector("h1:has-text('serves `plain`')", timeout=300_000)

    shown.inner.goto(page.url)
    assert shown.texts("h1") == ["Your server is well."]
    assert "plain" in " ".join(shown.texts(".facts"))
    shown.follow("text=Go back")
    assert "ctx-size 1024" in " ".join(shown.texts(".diff .add"))
    shown.follow("button:has-text('Go back')")
    shown.inner.wait_for_selector("h1:has-text('as generation')", timeout=300_000)
    assert shown.complaints() == []
    shown.close()


@pytest.mark.browser
def test_with_scripts_a_job_is_followed_until_its_end(chromium: Chromium, page: ApiBox) -> None:
    shown = chromium.open(f"{page.url}/sweeps/1/decline", allow=page.url)
    shown.inner.fill("#why", "KV types stay")
    shown.follow("button:has-text('Decline it')")

    shown.inner.wait_for_selector("h1:has-text('KV types stay')", timeout=300_000)
    assert shown.complaints() == []
    shown.inner.goto(f"{page.url}/sweeps/1")
    assert "declined" in " ".join(shown.texts(".facts"))
    assert shown.inner.locator("text=Promote it").count() == 0
    again = page.ask("/sweeps/1/decline", tcp=True)
    assert (again.status, "already decided" in again.text) == (409, True)
    shown.close()


@pytest.mark.browser
def test_the_overview_renews_itself_around_its_reader_until_it_is_paused_or_nobody_answers(
    chromium: Chromium, page: ApiBox
) -> None:
    shown = chromium.open(page.url, allow=page.url)
    shown.inner.clock.install()
    shown.inner.goto(f"{page.url}/?hours=1")
    titles = "[...document.querySelectorAll('[data-chart=speed] title')].map((e) => e.textContent)"
    n_points = len(shown.js(titles))
    shown.inner.click(".data summary")
    shown.js("document.activeElement.blur()")

    see(page, 77.7)
    shown.inner.clock.fast_forward(10_000)
    shown.inner.wait_for_selector("dd:has-text('77.7')")
    shown.until(f"{titles}.at(-1).endsWith(': 77.7 tok/s')")
    assert len(shown.js(titles)) == n_points + 1
    assert shown.js("document.querySelector('details.data').open"), "an open table stays open"
    assert shown.js("document.querySelector('.data td').textContent").strip() == "77.7"

    number = a_job(page, "promote")
    with folder_of(page.box.context).writing(number) as tell:
        shown.inner.clock.fast_forward(10_000)
        shown.inner.wait_for_selector(f"text=Job {number}, promote, is running", timeout=30_000)
        tell({"event": "end", "exit_code": 0, "result": {"messages": []}})
    shown.inner.clock.fast_forward(10_000)
    shown.until("!document.querySelector('.running')")

    shown.inner.click("#pause")
    asked: list[str] = []
    shown.inner.on("request", lambda request: asked.append(request.url))
    see(page, 88.8)
    shown.inner.clock.fast_forward(60_000)
    assert asked == []
    assert "It waits" in shown.texts("#renewed")[0]
    shown.inner.click("#pause")
    shown.inner.wait_for_selector("dd:has-text('88.8')")
    assert shown.complaints() == []

    shown.inner.route("**/live*", lambda route: route.abort())
    shown.inner.clock.fast_forward(10_000)
    shown.inner.wait_for_selector("#renewed:has-text('tunerd does not answer')")
    shown.inner.unroute("**/live*")
    shown.inner.clock.fast_forward(10_000)
    shown.inner.wait_for_selector("#renewed:has-text('Updated at')")
    shown.close()


def a_job(page: ApiBox, kind: str, lane: Lane = Lane.CHANGE) -> int:
    ctx = page.box.context
    return folder_of(ctx).create(JobRequest(kind, (), lane, "alice", ctx.clock.now_s()))


def test_a_sweep_can_be_ended_where_one_is_under_way_and_begun_where_none_is(page: ApiBox) -> None:
    idle = page.ask("/sweeps", tcp=True).text
    number = a_job(page, "sweep run", Lane.MEASURE)
    with folder_of(page.box.context).writing(number) as tell:
        busy = page.ask("/sweeps", tcp=True).text
        tell({"event": "end", "exit_code": 0, "result": {"messages": []}})

    assert ("Begin a sweep" in idle, "End the sweep" in idle) == (True, False)
    assert ("Begin a sweep" in busy, "End the sweep" in busy) == (False, True)

    ctx = page.box.context  # and one of a terminal is not offered to be ended
    with (
        EvidenceStore(ctx.paths.evidence) as store,
        lock(ctx.paths.sweep_lock, purpose="sweep", since="now"),
    ):
        store.reopen_run(1)
        text = page.ask("/sweeps", tcp=True).text
        store.end_run(1, RunOutcome.DONE, ended_s=ctx.clock.now_s())
    assert "gave the card back" in text
    assert ("End the sweep" in text, "Ctrl-C there ends it" in text) == (False, True)


@pytest.mark.browser
def test_a_job_is_followed_on_where_the_daemon_was_away(chromium: Chromium, page: ApiBox) -> None:
    asked = page.path.with_name("daemon.sock")
    away = asked.with_name("away.sock")
    number = a_job(page, "apply")
    with folder_of(page.box.context).writing(number) as tell:
        tell({"event": "progress", **asdict(Progress("loading the model"))})
        shown = chromium.open(f"{page.url}/jobs/{number}", allow=page.url)
        shown.inner.wait_for_selector("#progress:has-text('loading the model')")
        asked.rename(away)
        shown.inner.wait_for_selector(
            "#progress:has-text('tunerd does not answer')", timeout=60_000
        )
        shown.inner.wait_for_timeout(5000)  # by when a browser was refused once
        away.rename(asked)
        told_again = "#progress:has-text('loading the model')"
        shown.inner.wait_for_selector(told_again, timeout=60_000)
        tell({"event": "progress", **asdict(Progress("commit"))})
        shown.inner.wait_for_selector("#progress:has-text('commit')", timeout=60_000)
        done = {"messages": [], "summary": "generation 9 serves"}
        tell({"event": "end", "exit_code": 0, "result": done})
        shown.inner.wait_for_selector("h1:has-text('generation 9 serves')", timeout=60_000)
    shown.close()


def see(page: ApiBox, tok_s: float) -> None:
    """One more look of the daemon, at a server that generates."""
    now_s = page.box.context.clock.now_s()
    page.telemetry.add(a_reading(now_s, served=served(777, tok_s)))


@pytest.mark.browser
def test_the_keyboard_reaches_everything_and_the_chosen_theme_stays(
    chromium: Chromium, page: ApiBox
) -> None:
    shown = chromium.open(page.url, allow=page.url)
    reached = []
    for _ in range(18):
        shown.inner.keyboard.press("Tab")
        reached.append(shown.js("document.activeElement.textContent.trim()"))
        assert shown.js("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached[:3] == ["Skip to the content", "Dark", "Overview"]
    assert {"Jobs", "Deploy another profile", "Go back"} <= set(reached)

    ground = "getComputedStyle(document.body).backgroundColor"
    light = shown.js(ground)
    shown.inner.click("#theme")
    shown.inner.goto(f"{page.url}/jobs")
    assert shown.js(ground) != light
    shown.close()


def test_a_form_of_somebody_else_changes_nothing(page: ApiBox) -> None:
    before = page.ask("/api/jobs").json
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    mine = page.ask("/rollback", tcp=True).text.partition('name="token" value="')[2][:64]
    for token, headers in (
        ("", {}),
        ("0" * 64, {}),
        (mine, {"Origin": "http://evil.example"}),
        (mine, {"Sec-Fetch-Site": "cross-site"}),
    ):
        said = page.post("/do/rollback", f"token={token}&shown=", tcp=True, headers=form | headers)
        assert said.status == 403

    stale = page.post("/do/rollback", f"token={mine}&shown={'0' * 64}", tcp=True, headers=form)
    assert stale.status == 303
    number = int(stale.headers["location"].rpartition("/")[2])
    assert page.events(number)[-1]["result"]["error"]["message"] == (
        "what would change is no longer what was shown"
    )
    assert len(page.ask("/api/jobs").json["jobs"]) == len(before["jobs"]) + 1
