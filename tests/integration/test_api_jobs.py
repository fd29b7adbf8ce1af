"""What a member of the group does through the socket: the commands' own results, and nothing beside."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.api_box import ApiBox, serving
from tunerd.actions.jobs import folder_of, running_jobs, stop_job, watch_job
from tunerd.actions.remote import Remote
from tunerd.core.job import JobKind, JobRequest
from tunerd.core.progress import Progress
from tunerd.errors import Busy, ConfigError, UsageError

pytestmark = pytest.mark.xdist_group("api-jobs")


@pytest.fixture(scope="module")
def api() -> Iterator[ApiBox]:
    with serving() as running:
        yield running


def remote(api: ApiBox, told: list[Progress] | None = None) -> Remote:
    seen = [] if told is None else told
    return Remote(api.path, seen.append)


@pytest.mark.parametrize(
    ("words", "parts", "query"),
    [
        (("schedule", "show"), ("schedule",), {}),
        (("guard", "show"), ("guards",), {}),
        (("verify",), ("verify",), {}),
        (("probation", "show"), ("probations",), {}),
        (("results", "list", "--all"), ("results",), {"all": True}),
        (("profiles", "show", "cpu-embedded", "--set", "serving.ctx_size=512"),
         ("profiles", "cpu-embedded"), {"set": '{"serving.ctx_size": 512}'}),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)  # fmt: skip
def test_a_member_is_told_what_the_command_says(
    api: ApiBox, words: tuple[str, ...], parts: tuple[str, ...], query: dict[str, Any]
) -> None:
    called = api.box.call(*words, "--json")

    found = remote(api).read(*parts, **query)

    assert found.to_json() == json.loads(called.stdout)
    assert found.exit_code == called.returncode


def test_an_error_of_a_job_is_the_error_of_the_command(api: ApiBox) -> None:
    called = api.box.call("compare", "live", "--yes", "--json")

    with pytest.raises(UsageError) as refused:
        remote(api).do("compare", {"sides": ["live"]})

    told = json.loads(called.stdout)["error"]
    assert (refused.value.message, refused.value.hint) == (told["message"], told["hint"])
    assert refused.value.exit_code == called.returncode == 2


def test_the_schedule_and_the_guards_are_switched_and_nothing_else_is_written(api: ApiBox) -> None:
    path = api.box.context.paths.settings_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# by hand\n[service]\ndrain_s = 1.0\n[sweep]\nbudget_s = 600.0 # short\n")

    remote(api).do("schedule/set", {"window": "01:00-06:30", "days": "mon-fri", "enabled": True})
    remote(api).do("guard/set", {"guard": "hang", "policy": "advise"})

    text = path.read_text()
    assert text.startswith("# by hand\n")
    assert "# short" in text
    assert tomllib.loads(text) == {
        "service": {"drain_s": 1.0},
        "sweep": {"budget_s": 600.0, "window": "01:00-06:30", "days": "mon-fri"},
        "schedule": {"enabled": True},
        "guards": {"hang": "advise"},
    }
    for route, wrong in (
        ("schedule/set", {"timezone": "No/Where"}),
        ("schedule/set", {}),
        ("guard/set", {"guard": "hang", "policy": "sometimes"}),
    ):
        with pytest.raises(UsageError):
            remote(api).do(route, wrong)
        assert path.read_text() == text, (route, wrong)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/api/sweep/run", {"space": ["engine.prefer=/home/alice/evil"]}),
        ("/api/sweep/start", {"space": ["model.path=/etc/shadow"]}),
        ("/api/bench", {"profile": "cpu-embedded", "set": {"model.path": "x"}}),
        ("/api/bench", {"url": "http://127.0.0.1:1"}),
        ("/api/compare", {"sides": ["cpu-embedded", "engine.prefer=evil"]}),
        ("/api/compare", {"base": "../x"}),
        ("/api/workload/learn", {"unit": "sshd.service"}),
        ("/api/workload/learn", {"name": "../x"}),
        ("/api/schedule/set", {"timezone": "../../../etc/passwd"}),
        ("/api/guard/set", {"guard": "service", "policy": "user"}),
        ("/api/jobs/stop", {"job": "1; reboot"}),
    ],
)
def test_a_hostile_body_begins_nothing(api: ApiBox, url: str, body: object) -> None:
    before = api.ask("/api/jobs").json

    said = api.post(url, body)

    assert said.status in {400, 404}, said
    assert said.headers["x-tunerd-exit-code"] == "2"
    assert api.ask("/api/jobs").json == before


def test_what_a_job_is_handed_is_checked_again_where_it_is_done(api: ApiBox) -> None:
    ctx = api.box.context
    request = JobRequest(JobKind.COMPARE, "alice", ctx.clock.now_s(), {
        "sides": ["/home/alice/evil"], "budget_s": 60.0, "max_pairs": 3, "tolerance": 0.1,
    })  # fmt: skip
    number = folder_of(ctx).create(request.to_json())

    done = api.box.call("job", str(number))

    assert done.returncode == 2
    with pytest.raises(UsageError, match="cannot be the name"):
        watch_job(ctx, number)


def test_a_measurement_keeps_out_another_one_but_no_swap_and_no_switch(api: ApiBox) -> None:
    ctx = api.box.context
    request = JobRequest(JobKind.COMPARE, "alice", ctx.clock.now_s())
    number = folder_of(ctx).create(request.to_json())
    with folder_of(ctx).writing(number) as events:
        events.add({"event": "begun", "pid": 1})
        for _ in range(25):  # what only looks does not hide it
            looked = JobRequest(JobKind.PLAN, "bob", ctx.clock.now_s() - 1000.0)
            folder_of(ctx).create(looked.to_json())
        with pytest.raises(Busy) as busy:
            remote(api).do("bench", {})
        assert busy.value.cause == f"job {number}, compare, asked for by alice"
        assert f"tunerd jobs watch {number}" in str(busy.value.hint)
        swap = api.post("/api/rollback", {})
        assert swap.status == 202, "a person goes back whatever is measured"
        api.events(swap.json["job"]["job"])
        asked = api.post("/api/sweep/run", {"ask": True})
        assert asked.status == 202, "asking is looking"
        api.events(asked.json["job"]["job"])
        assert number in [one.number for one in running_jobs(ctx)]
        with pytest.raises(UsageError, match="without a service manager"):
            stop_job(ctx, number)


def test_a_swap_is_not_ended_half_way(api: ApiBox) -> None:
    ctx = api.box.context
    number = folder_of(ctx).create(JobRequest(JobKind.APPLY, "alice", ctx.clock.now_s()).to_json())
    with folder_of(ctx).writing(number), pytest.raises(UsageError, match="half-way"):
        remote(api).do("jobs/stop", {"job": number})


def test_a_job_is_followed_from_its_beginning_by_whoever_comes_later(api: ApiBox) -> None:
    begun = api.post("/api/workload/learn", {"write": False}).json["job"]["job"]
    api.events(begun)
    by_socket: list[Progress] = []

    for told in (by_socket, []):
        with pytest.raises(ConfigError, match="requests"):
            remote(api, told).follow(begun)

    assert any("reading the log" in one.text for one in by_socket)
    with pytest.raises(ConfigError, match="requests"):
        watch_job(api.box.context, begun)
    shown = json.loads(api.box.call("jobs", "--json").stdout)["jobs"]
    assert shown[0]["kind"] in {"workload learn", "apply", "plan"}
