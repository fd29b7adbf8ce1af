"""What a member of the group does through the socket: the commands' own results, and nothing beside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fault.world import a_world
from tests.support.api_box import ApiBox
from tests.support.forked import Forked
from tests.support.local_box import Box
from tunerd.cli.terminal import Remote
from tunerd.errors import Busy, ConfigError, HostError, UsageError
from tunerd.jobs import JobFolder, folder_of, run_job, running_jobs, start_job, watch_job
from tunerd.machine.peers import Peer, Via, account_text, unix_socket
from tunerd.operations import JobRequest, Lane
from tunerd.result import ActionResult, Progress
from tunerd.web.app import Facts, Front, Gate
from tunerd.web.part import Answering
from tunerd.web.routes import Answer

REQUEST = JobRequest("apply", (), Lane.CHANGE, "alice", 1.0)


def remote(api: ApiBox, told: list[Progress] | None = None) -> Remote:
    seen = [] if told is None else told
    return Remote(api.path, seen.append)


def test_a_member_is_told_what_the_command_says(api: ApiBox) -> None:
    for words in ("verify", "profiles show cpu-embedded --set serving.ctx_size=512", "history show 7"):  # fmt: skip
        called = api.box.call(*words.split(), "--json")
        said = api.post("/api/run", {"argv": words.split()})
        assert {**said.json, "command": ""} == {**json.loads(called.stdout), "command": ""}
        assert said.headers["x-tunerd-exit-code"] == str(called.returncode)


def test_an_error_of_a_job_is_the_error_of_the_command(api: ApiBox) -> None:
    called = api.box.call("compare", "live", "--yes", "--json")

    with pytest.raises(UsageError) as refused:
        remote(api).run(["compare", "live", "--yes"])

    told = json.loads(called.stdout)["error"]
    assert (refused.value.message, refused.value.hint) == (told["message"], told["hint"])
    assert refused.value.exit_code == called.returncode == 2


def test_a_switch_that_cannot_be_writes_nothing(api: ApiBox) -> None:
    for wrong in ("schedule set --timezone No/Where", "schedule set", "guard set hang sometimes"):
        with pytest.raises(UsageError):
            remote(api).run(wrong.split())
        assert not api.box.context.paths.settings_file.exists(), wrong


def test_what_a_job_is_handed_is_checked_again_where_it_is_done(api: ApiBox) -> None:
    ctx = api.box.context
    argv = ("compare", "--yes", "/home/alice/evil")
    request = JobRequest("compare", argv, Lane.MEASURE, "alice", ctx.clock.now_s())
    number = folder_of(ctx).create(request)

    done = api.box.call("job", str(number))

    assert done.returncode == 2
    with pytest.raises(UsageError, match="cannot be the name"):
        watch_job(ctx, number)


def test_a_measurement_keeps_out_another_one_but_no_swap_and_no_switch(api: ApiBox) -> None:
    ctx = api.box.context
    request = JobRequest("compare", (), Lane.MEASURE, "alice", ctx.clock.now_s())
    number = folder_of(ctx).create(request)
    with folder_of(ctx).writing(number):
        for _ in range(25):  # what only looks does not hide it
            looked = JobRequest("plan", (), Lane.LOOK, "bob", ctx.clock.now_s() - 1000.0)
            folder_of(ctx).create(looked)
        with pytest.raises(Busy) as busy:
            remote(api).run(["bench"])
        assert busy.value.cause == f"job {number}, compare, asked for by alice"
        assert f"tunerd jobs watch {number}" in str(busy.value.hint)
        swap = api.post("/api/rollback", {})
        assert swap.status == 202, "a person goes back whatever is measured"
        api.events(swap.json["job"]["job"])
        asked = api.post("/api/sweep/run", {"ask": True})
        assert asked.status == 202, "asking is looking"
        api.events(asked.json["job"]["job"])
        assert number in [one.number for one in running_jobs(ctx)]


def test_one_account_does_not_fill_the_machine_with_jobs_that_look(api: ApiBox) -> None:
    ctx, folder = api.box.context, folder_of(api.box.context)
    by = account_text(os.geteuid())
    with contextlib.ExitStack() as running:
        for who in (*[by] * 6, *["bob"] * 6):
            number = folder.create(JobRequest("plan", (), Lane.LOOK, who, ctx.clock.now_s()))
            running.enter_context(folder.writing(number))
        asked = api.post("/api/run", {"argv": ["detect"]})
        assert asked.status == 409
        assert "another job is under way" in asked.json["error"]["message"]
        swap = api.post("/api/rollback", {})
        assert swap.status == 202, "a person goes back whatever is looked at"
        api.events(swap.json["job"]["job"])
    again = api.post("/api/run", {"argv": ["detect"]})
    assert again.status == 202
    api.events(again.json["job"]["job"])


def test_a_swap_is_not_ended_half_way(api: ApiBox) -> None:
    ctx = api.box.context
    number = folder_of(ctx).create(JobRequest("apply", (), Lane.CHANGE, "alice", ctx.clock.now_s()))
    with folder_of(ctx).writing(number), pytest.raises(UsageError, match="half-way"):
        remote(api).run(["jobs", "stop", str(number)])


def test_a_job_is_followed_from_its_beginning_by_whoever_comes_later(api: ApiBox) -> None:
    begun = api.post("/api/workload/learn", {"dry_run": True}).json["job"]["job"]
    api.events(begun)
    by_socket: list[Progress] = []

    for told in (by_socket, []):
        with pytest.raises(ConfigError, match="requests"):
            remote(api, told).follow(begun)

    assert any("reading the log" in one.text for one in by_socket)
    with pytest.raises(ConfigError, match="requests"):
        watch_job(api.box.context, begun)
    shown = api.box.json("jobs")["jobs"]
    assert shown[0]["kind"] in {"workload learn", "apply", "plan"}


class LateSignal(UserDict[str, Any]):
    """What a job came to; it is told to end just as that is being kept."""

    def keys(self) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().keys()


def test_a_job_that_is_told_to_end_when_its_result_is_there_has_that_result(tmp_path: Path) -> None:
    """It was killed by the signal, and had "ended without a result"."""
    ctx = Box(tmp_path).context
    number = folder_of(ctx).create(replace(REQUEST, asked_s=ctx.clock.now_s()))
    done = ActionResult("apply", LateSignal(profile="x"))

    Forked(lambda _tell: run_job(lambda _sink: ctx, number, lambda _ctx, _request: done)).end()

    assert watch_job(ctx, number).payload == {"profile": "x"}


def test_looks_take_no_room_from_what_changed_something(api: ApiBox) -> None:
    ctx = api.box.context
    folder = folder_of(ctx)

    def done(kind: str, lane: Lane) -> int:
        number = folder.create(JobRequest(kind, (), lane, "alice", ctx.clock.now_s()))
        with folder.writing(number) as tell:
            tell({"event": "end", "exit_code": 0, "result": {"summary": "done"}})
        return number

    change = done("apply", Lane.CHANGE)
    looks = [done("plan", Lane.LOOK) for _ in range(60)]
    begun = api.post("/api/decline", {"why": "no"}).json["job"]["job"]
    api.events(begun)

    listed = [one["job"] for one in api.ask("/api/jobs").json["jobs"]]
    assert listed[:2] == [begun, change]
    assert f"/jobs/{change}" in api.ask("/jobs").text
    assert folder.request(looks[-1]) is not None, "whoever asked may still read it"
    assert folder.request(looks[0]) is None


def test_what_a_job_told_is_read_once(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "jobs")
    number = folder.create(REQUEST)
    path = tmp_path / "jobs" / str(number) / "events.jsonl"
    path.write_text('{"event": "begun"}\n{"event": "pro')
    first, offset = folder.events(number)
    path.write_text(path.read_text().replace("begun", "gone!") + 'gress"}\n')
    rest, end = folder.events(number, offset)

    assert ([one["event"] for one in first], offset) == (["begun"], 19)
    assert [one["event"] for one in rest] == ["progress"]
    assert folder.events(number, end) == ((), end)
    (tmp_path / "none").touch()
    with pytest.raises(HostError, match="cannot read"):  # and is not told as one without jobs
        JobFolder(tmp_path / "none").numbers()


def test_a_job_that_never_began_keeps_none_away_until_a_clock_that_was_ahead_is_there_again(
    tmp_path: Path,
) -> None:
    ctx = Box(tmp_path).context
    folder_of(ctx).create(replace(REQUEST, asked_s=ctx.clock.now_s() + 86400.0))
    assert running_jobs(ctx) == []


def test_a_job_that_could_not_be_started_keeps_none_away(tmp_path: Path) -> None:
    """Whoever asked again within two minutes was told that it was under way."""
    with a_world(tmp_path) as world:
        ctx = replace(
            world.context(), data_dir=tmp_path
        )  # its unit is confined like one that lies there
        with pytest.raises(HostError):
            start_job(ctx, replace(REQUEST, asked_s=ctx.clock.now_s()))
        assert running_jobs(ctx) == []


def test_of_a_job_that_told_very_much_it_is_known_how_it_began_and_ended(tmp_path: Path) -> None:
    """It counted as died: 16 MiB of progress were read, and its end stood behind them."""
    folder = JobFolder(tmp_path / "jobs")
    number = folder.create(REQUEST)
    path = tmp_path / "jobs" / str(number) / "events.jsonl"
    progress = json.dumps({"event": "progress", "text": "x" * 2**20})
    path.write_text("\n".join(['{"event": "begun"}', *[progress] * 17, '{"event": "end"}', ""]))
    told, offset = folder.events(number)

    assert [one["event"] for one in told] == ["begun", *["progress"] * 15, "end"]
    assert folder.events(number, offset) == ((), path.stat().st_size)


def test_one_accounts_flood_does_not_hold_up_what_another_asks_for(tmp_path: Path) -> None:
    path, free, said = tmp_path / "daemon.sock", threading.Event(), Answer({"ok": True})

    def answer(line: bytes) -> bytes:
        assert json.loads(line)["uid"] != 1000 or free.wait(60)
        return said.to_line()

    gate = Gate(own_uid=0, group=lambda: None)
    front = Front(path, gate, Facts("llama-server.service", 10.0, None, ()))
    bob, alice = (Peer(Via.UNIX, uid) for uid in (1000, 1001))

    async def ask() -> list[Answer]:
        flood = [asyncio.create_task(front.begin("rollback", {}, bob)) for _ in range(60)]
        assert await asyncio.wait_for(front.begin("rollback", {}, alice), 30) == said
        free.set()
        return list(await asyncio.gather(*flood))

    answering = Answering(unix_socket(path, group=None), os.geteuid(), answer)
    answering.start()
    try:
        told = asyncio.run(ask())
    finally:
        answering.stop()
    refused = [one.envelope["error"]["message"] for one in told if one.is_error]
    assert refused == ["too many of your requests are waiting"] * 26
