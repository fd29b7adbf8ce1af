"""Workloads on disk: whose file counts, and what `learn` makes of the log of a supervised server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.bench_samples import sample
from tests.support.builders import resolved as shipped
from tests.support.fakes import FakeClock
from tests.support.folders import DATA
from tests.support.local_box import Box, deployed
from tests.support.ports import free_port
from tests.support.server_process import CLIENT
from tunerd.app import Context
from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.log import read_requests
from tunerd.errors import ConfigError
from tunerd.measure.answer import Timings
from tunerd.measure.evidence import ArmRecord, RunOutcome, RunRecord
from tunerd.measure.learn import (
    find_workload,
    learn_workload,
    served_requests,
    show_workload,
    workload_for,
)
from tunerd.measure.store import EvidenceStore
from tunerd.tryout.local import UnitLog

LOGS = DATA / "requests"
OWN = "[[classes]]\nprompt_tokens = 77\nanswer_tokens = 7\n"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Box(tmp_path).context


def served(context: Context, name: str, times: int) -> None:
    """The log of a server that answered the requests of a captured log so many times."""
    log = context.paths.log_dir / f"{context.unit}.log"
    log.parent.mkdir(parents=True)
    log.write_text((LOGS / f"{name}.log").read_text() * times)


def write(folder: Path, name: str, text: str = OWN) -> None:
    (folder / "workloads").mkdir(parents=True, exist_ok=True)
    (folder / "workloads" / f"{name}.toml").write_text(text)


@pytest.mark.parametrize("name", ["mainline-2026-08-18", "ik-2026-08"])
def test_a_workload_is_learned_from_the_servers_own_log_of_which_no_text_is_kept(
    context: Context, name: str
) -> None:
    served(context, name, times=20)
    result = learn_workload(context)
    (only,) = result.payload["classes"]
    learned = result.payload["learned"]
    assert learned["requests"] == 60
    assert learned["lives"] == 20
    assert only["cached_share"] == pytest.approx(116 / 330, abs=0.01)
    assert find_workload(context, "learned").shape.classes[0].prompt_tokens.at(0.5) == 120
    assert workload_for(context, None, None)[0].name == "learned"
    kept = (context.paths.state_dir / "workloads" / "learned.toml").read_text()
    if name == "ik-2026-08":
        assert "photo birthday hey go sell" in (LOGS / f"{name}.log").read_text(), "of a prompt"
    assert not re.search(r"photo|birthday|JJJJ", kept)


@pytest.mark.llama
def test_that_the_log_lacks_what_the_server_answered_is_said_where_too_little_is_left(
    tmp_path: Path,
) -> None:
    """It said to let the server serve for some days, whose lines never reached a log, and never would."""
    port = free_port()
    with deployed(tmp_path, port) as box:
        for _ in range(3):
            asked = {"prompt": "go on", "n_predict": 32, "ignore_eos": True}
            CLIENT.post(f"http://127.0.0.1:{port}/completion", json=asked, timeout=60)
        log = box.context.paths.log_dir / f"{box.context.unit}.log"
        log.write_text("")

        done = box.call("workload", "learn")

    assert "its log shows only 0 of them" in done.stderr
    assert "RateLimitBurst=" in done.stderr
    assert "for some days" not in done.stderr


def test_where_too_few_requests_count_it_is_their_number_that_is_told(context: Context) -> None:
    """Of 27 that count among 30 it was said that there are 30, and that 30 are needed."""
    served(context, "mainline-2026-08-18", times=9)
    log = context.paths.log_dir / f"{context.unit}.log"
    short = re.sub(
        r"/ +\d+ tokens", "/     1 tokens", (LOGS / "mainline-2026-08-18.log").read_text()
    )
    log.write_text(log.read_text() + short)

    with pytest.raises(ConfigError, match="shows 27 requests that count; at least 30") as refused:
        learn_workload(context)

    assert "3 more were too short" in (refused.value.cause or "")


def told(context: Context) -> list[Timings]:
    """What a server would have told of each request in its log, which has two decimals."""
    logged = read_requests(context.services.log(context.unit, max_lines=10_000)).requests
    return [
        Timings(prompt_n=one.prompt_n, prompt_ms=one.prompt_ms + 0.004,
                predicted_n=one.predicted_n, predicted_ms=one.predicted_ms - 0.004)
        for one in logged
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["mainline-2026-08-18", "ik-2026-08"])
def test_what_was_measured_is_left_out_and_said(context: Context, name: str) -> None:
    served(context, name, times=20)
    keep(context, [*told(context)[:15], None])

    result = learn_workload(context)

    assert result.payload["learned"]["requests"] == 45
    assert result.payload["learned"]["own"] == 15
    said = {message.code: message.text for message in result.messages}
    assert said["own-requests"] == "left out: 15 requests of tunerd's own"
    assert said["own-requests-unknown"].startswith("1 request of tunerd's own cannot be recognised")


def keep(
    context: Context, measured: Sequence[Timings | None], ended_s: float | None = None
) -> None:
    """A run of these requests, stored."""
    with EvidenceStore(context.paths.evidence) as store:
        arm = ArmRecord(name="live", fingerprint=Fingerprint())
        run = store.add_run(
            RunRecord(kind="bench", suites=("mtp",), started_s=1.0, target="live", arms=(arm,))
        )
        store.add_samples(run, [sample(timings=one) for one in measured], arm="live")
        if ended_s is not None:
            store.end_run(run, RunOutcome.DONE, ended_s=ended_s)


def test_the_site_wins_over_what_was_learned_and_that_over_what_is_shipped(
    context: Context,
) -> None:
    write(context.paths.state_dir, "rag")
    assert find_workload(context, "rag").layer == "learned"
    write(context.paths.site_profiles, "rag", OWN.replace("77", "78"))
    file = find_workload(context, "rag")
    assert (file.layer, file.shape.classes[0].prompt_tokens.at(0.5)) == ("site", 78)


def test_turn_times_are_shown_at_the_speed_of_the_log_and_unknown_without_one(
    context: Context,
) -> None:
    assert show_workload(context, "chat").payload["turn"] is None
    served(context, "mainline-2026-08-18", times=1)
    shown = show_workload(context, "chat").payload
    assert shown["rates"]["prompt_tok_s"] == pytest.approx(214 / 80.71 * 1000, rel=1e-3)
    assert shown["turn"]["total_s"] > 0


DAY_S = 86400


def lived(context: Context, *days_ago: float) -> None:
    """The log of servers that were started so many days ago, twenty requests-logs each."""
    log = UnitLog(context.paths, context.unit)
    for number, days in enumerate(days_ago):
        clock = FakeClock(now_s=context.clock.now_s() - days * DAY_S)
        log.note(clock, f"{number:032x}", "Started")
        with log.path.open("a") as file:
            file.write((LOGS / "mainline-2026-08-18.log").read_text() * 20)


def test_so_many_days_are_read_and_no_more(context: Context) -> None:
    lived(context, 20, 8, 2)
    week = learn_workload(context, days=7)
    assert week.payload["learned"]["requests"] == 120, "what ran a week ago counts whole"
    assert week.payload["learned"]["asked_days"] == 7
    assert "of the last 7 days" in week.payload["description"]
    assert learn_workload(context, days=1).payload["learned"]["requests"] == 60
    assert learn_workload(context, days=15).payload["learned"]["requests"] == 180
    assert "fewer-days" not in {message.code for message in week.messages}


def test_what_was_measured_says_nothing_of_the_speed_that_people_had(context: Context) -> None:
    served(context, "mainline-2026-08-18", times=1)
    own, *theirs = told(context)
    keep(context, [own])

    shown = show_workload(context, "chat")

    prompts = sum(one.prompt_n or 0 for one in theirs)
    prompt_ms = sum(one.prompt_ms or 0 for one in theirs)
    assert shown.payload["rates"]["prompt_tok_s"] == pytest.approx(
        prompts / prompt_ms * 1000, rel=1e-3
    )
    assert {message.code for message in shown.messages} == {"own-requests"}
    keep(context, theirs)
    assert show_workload(context, "chat").payload["turn"] is None, "nobody else asked"


@pytest.mark.parametrize(("ended_days_ago", "n_theirs"), [(1.5, 45), (4.0, 60)])
def test_what_was_measured_long_before_the_log_begins_is_not_looked_for_in_it(
    context: Context, ended_days_ago: float, n_theirs: int
) -> None:
    lived(context, 2)
    keep(context, told(context)[:15], ended_s=context.clock.now_s() - ended_days_ago * DAY_S)

    assert len(served_requests(context, 0.0)) == n_theirs


def test_a_card_is_tuned_for_what_its_write_up_served_until_something_was_learned(
    context: Context,
) -> None:
    resolved = shipped("rtx-3090-ti-24gb")
    shape, told = workload_for(context, None, resolved)
    assert shape.name == "coding-agent"
    assert told.text == "workload `coding-agent`, as the profile says"
    write(context.paths.state_dir, "learned")
    shape, told = workload_for(context, None, resolved)
    assert shape.name == "learned"
    assert told.text == "workload `learned`, not the shipped profile's `coding-agent`"
