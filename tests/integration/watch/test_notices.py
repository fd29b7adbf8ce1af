"""What the daemon hands on: notices to a real receiver, and evidence to a shared store; what is tried again, and what is said where it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.faked import FakedBox, set_to
from tests.support.fakes import FakeClock, Life
from tests.support.local_box import Box
from tests.support.receiver import PIECE, Receiver, receiving
from tunerd.app import Context
from tunerd.errors import HostError, UsageError
from tunerd.machine.files import lock
from tunerd.production.status import HandedIn, status
from tunerd.records import plain
from tunerd.watch.daemon import HandIns
from tunerd.watch.figures import Event
from tunerd.watch.notices import (
    forget_old_notices,
    leave_notice,
    send_left_notices,
    send_notice,
    try_notice,
)

EVENT = Event(1_790_000_000.0, "hang", "warning", "the server hangs, and is restarted", "a hint")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(200) as made:
        yield made


def context(tmp_path: Path, url: str | None, **changed: Any) -> Context:
    ctx = FakedBox(tmp_path, lambda _start: Life()).ctx
    return set_to(
        ctx, notify__webhook=url, **{f"notify__{key}": value for key, value in changed.items()}
    )


def left(ctx: Context, event: Event = EVENT) -> str:
    """A notice that waits, without anything that sends it."""
    folder = ctx.paths.state_dir / "notices"
    folder.mkdir(parents=True, exist_ok=True)
    name = "17900000-1"
    to = ctx.settings.notify.model_dump(mode="json")
    notice = {"event": asdict(event), "unit": "llama-server.service", "to": to}
    (folder / f"{name}.json").write_text(json.dumps(notice))
    return name


def test_a_test_that_does_not_arrive_is_not_said_to_be_kept(tmp_path: Path) -> None:
    with receiving(503) as down, pytest.raises(HostError) as told:
        try_notice(context(tmp_path, down.url))
    assert told.value.state == "nothing of the test is kept"
    assert not (tmp_path / "state/notices").exists()


def test_a_member_who_tries_a_notice_is_not_told_where_it_went(
    tmp_path: Path, receiver: Receiver
) -> None:
    said = try_notice(context(tmp_path, receiver.url)).to_json()
    assert len(receiver.got) == 1
    assert receiver.url not in json.dumps(said)


def test_a_file_of_several_tokens_is_refused_without_a_word_of_them(
    tmp_path: Path, receiver: Receiver
) -> None:
    token = tmp_path / "token"
    token.write_text("tk_old\ntk_new\n")
    with pytest.raises(HostError) as refused:
        try_notice(context(tmp_path, receiver.url, token_file=token))
    assert "tk_" not in refused.value.words
    assert receiver.got == []


def test_a_notice_arrives_as_json_and_is_gone(tmp_path: Path, receiver: Receiver) -> None:
    ctx = context(tmp_path, receiver.url)
    send_notice(ctx, left(ctx))
    ((headers, body),) = receiver.got
    said = json.loads(body)
    assert headers["Content-Type"] == "application/json"
    assert (said["source"], said["kind"], said["level"]) == ("tunerd", "hang", "warning")
    assert said["text"] == EVENT.text
    assert said["unit"] == "llama-server.service"
    for gone in ("17900000-1", "../guards"):
        with pytest.raises(UsageError, match="no notice"):
            send_notice(ctx, gone)
    assert len(receiver.got) == 1


def test_ntfy_gets_text_a_title_and_a_priority(tmp_path: Path, receiver: Receiver) -> None:
    token = tmp_path / "token"
    token.write_text("tk_secret\n")
    ctx = context(tmp_path, receiver.url, format="ntfy", token_file=token)
    send_notice(ctx, left(ctx, replace(EVENT, level="error", text="größer")))
    ((headers, body),) = receiver.got
    assert body.decode() == "größer\n\na hint"
    assert headers["Priority"] == "4"
    assert headers["Title"].endswith("llama-server.service: hang")
    assert headers["Authorization"] == "Bearer tk_secret"


def test_a_receiver_that_is_down_is_asked_again(tmp_path: Path, receiver: Receiver) -> None:
    receiver.statuses = [503, 429, 200]
    ctx = context(tmp_path, receiver.url)
    began_s = ctx.clock.monotonic_s()
    send_notice(ctx, left(ctx))
    assert len(receiver.got) == 3
    assert ctx.clock.monotonic_s() - began_s == 25.0


@pytest.mark.parametrize("status", [500, 302])  # no redirect is followed
def test_one_that_stays_down_leaves_the_notice_for_the_next_try(
    tmp_path: Path, receiver: Receiver, status: int
) -> None:
    receiver.statuses = [status]
    ctx = context(tmp_path, receiver.url)
    name = left(ctx)
    with pytest.raises(HostError, match="did not arrive"):
        send_notice(ctx, name)
    receiver.statuses = [200]
    send_notice(ctx, name)


def test_one_that_refuses_is_asked_once(tmp_path: Path, receiver: Receiver) -> None:
    receiver.statuses = [403]
    ctx = context(tmp_path, receiver.url)
    name = left(ctx)
    with pytest.raises(UsageError, match="refuses"):
        send_notice(ctx, name)
    assert len(receiver.got) == 1
    with pytest.raises(UsageError, match="no notice"):
        send_notice(ctx, name)
    assert send_left_notices(ctx) == ()


def test_of_an_answer_only_the_status_is_read(tmp_path: Path, receiver: Receiver) -> None:
    receiver.says_bytes = 64 * PIECE
    ctx = context(tmp_path, receiver.url)
    send_notice(ctx, left(ctx))
    assert receiver.was_cut.wait(20)


def test_a_notice_is_left_for_a_unit_of_its_own(tmp_path: Path) -> None:
    ctx = context(tmp_path, "http://127.0.0.1:9/hook")
    assert leave_notice(ctx, replace(EVENT, level="note")) is None, "not grave enough"
    assert leave_notice(context(tmp_path, None), EVENT) is None, "nobody wants it"

    name = leave_notice(ctx, EVENT)

    assert name is not None
    path = ctx.paths.state_dir / "notices" / f"{name}.json"
    assert json.loads(path.read_text())["event"]["text"] == EVENT.text
    assert path.stat().st_mode & 0o077 == 0
    unit = f"tunerd-notify-{name}.service"
    assert ctx.services.state(unit).is_active
    text = (ctx.services.runtime_unit_dir / unit).read_text()
    assert f'"notify" "send" "{name}"' in text


def test_notices_that_nobody_took_are_forgotten_after_a_day(tmp_path: Path) -> None:
    clock, seen_s = FakeClock(), dict[str, float]()
    ctx = replace(context(tmp_path, "http://127.0.0.1:9/hook"), clock=clock)
    name = left(ctx)
    path = ctx.paths.state_dir / "notices" / f"{name}.json"
    forget_old_notices(ctx, seen_s)
    clock.set_wall(clock.now_s() + 90_000_000)
    clock.advance(3600)
    forget_old_notices(ctx, seen_s)
    assert path.exists(), "a clock that was set is no day"
    clock.advance(86_400)
    forget_old_notices(ctx, seen_s)
    assert not path.exists()


def test_a_notice_that_nobody_is_at_is_sent_anew_and_one_under_way_is_not(tmp_path: Path) -> None:
    ctx = context(tmp_path, "http://127.0.0.1:9/hook")
    name = left(ctx)
    other = leave_notice(ctx, EVENT)
    unit = f"tunerd-notify-{name}.service"
    assert not ctx.services.state(unit).is_active
    half = ctx.paths.state_dir / "notices" / f".{name}.json.1a2b3c4d.tmp"
    half.write_text("{")

    assert send_left_notices(ctx) == (name,)

    assert ctx.services.state(unit).is_active
    assert not half.exists()
    assert other is not None
    assert send_left_notices(ctx) == ()
    assert send_left_notices(context(tmp_path, None)) == (), "nobody wants it any more"


def test_that_settings_are_wrong_arrives_though_they_are_wrong(
    tmp_path: Path, receiver: Receiver
) -> None:
    box = Box(tmp_path)
    name = left(context(tmp_path, receiver.url))
    box.configure("[guards]\nhang = 'sometimes'\n")
    assert box.call("plan", "x").returncode == 1, "whoever goes by settings stops"

    done = box.call("notify", "send", name)

    assert done.returncode == 0, done.stderr
    assert len(receiver.got) == 1


URL = "postgresql+psycopg://tunerd@db.lan/tunerd"
AWAY = "it cannot be reached"


class World(FakedBox):
    """A box whose hand-ins come to what is said beforehand."""

    def __init__(self, folder: Path, url: str | None = URL, ends: HandedIn | None = None) -> None:
        super().__init__(folder, self._begin)
        self.ends, self.begun_s, self.told = ends, list[float](), list[Event]()
        self.ctx = set_to(self.ctx, store__url=url)
        self.hand_ins = HandIns(self.ctx, self.told.append)

    def _begin(self, _start: object) -> Life:
        self.begun_s.append(self.clock.now_s())
        if self.ends is not None:
            self.ctx.files.write_json(self.ctx.paths.handed_in, plain(self.ends))
        return Life(ends_after_s=3)

    def look(self, n: int = 1, before: Callable[[int], None] = lambda _at: None) -> None:
        for at in range(n):
            before(at)
            self.clock.sleep(self.hand_ins.look())


def test_it_is_done_when_a_measurement_has_ended_and_not_before(tmp_path: Path) -> None:
    world = World(tmp_path, ends=HandedIn(at_s=1.0))
    evidence = world.ctx.paths.evidence
    world.look(3)
    with lock(world.ctx.paths.measure_lock, purpose="sweep", since="now"):
        evidence.write_text("a start")
        world.look(3)
    assert len(world.begun_s) == 1
    world.look(3)
    assert len(world.begun_s) == 2

    # A bench of what serves holds no lock: it is over when nothing comes any more.
    world.look(3, before=lambda at: void(evidence.write_text("a sample" * (at + 2))))
    assert len(world.begun_s) == 2
    world.look(3)
    assert len(world.begun_s) == 3


def void(_value: object) -> None:
    """For what gives back something that nobody wants."""


def test_whoever_shares_no_store_has_nothing_started(tmp_path: Path) -> None:
    world = World(tmp_path, url=None)
    world.look(5)
    assert (world.begun_s, world.told) == ([], [])


def test_a_failure_is_told_once_and_again_after_it_was_mended(tmp_path: Path) -> None:
    world = World(tmp_path, ends=HandedIn(problem=AWAY))
    world.look(100)
    assert len(world.begun_s) == 3
    assert [event.kind for event in world.told] == ["hand-in-failed"]
    assert AWAY in world.told[0].text
    assert [one.code for one in status(world.ctx).messages if one.code == "not-handed-in"]

    world.ends = HandedIn(at_s=2.0)
    world.look(50)
    world.ends = HandedIn(problem=AWAY)
    world.look(50)
    assert len(world.told) == 2


def test_a_command_that_dies_is_told_of(tmp_path: Path) -> None:
    world = World(tmp_path, ends=None)
    world.look(3)
    assert ["without a message" in event.text for event in world.told] == [True]


def test_one_that_meets_somebody_who_does_it_by_hand_is_no_failure(tmp_path: Path) -> None:
    """It was refused for that, and told of as evidence that nobody gets."""
    world = World(tmp_path, ends=None)
    path = world.ctx.paths.handed_in
    world.look()
    with lock(path.with_suffix(".lock"), purpose="fleet hand-in", since="now"):
        world.look(3)
        world.ctx.files.write_json(path, plain(HandedIn(at_s=1.0)))
    world.look(3)
    assert (len(world.begun_s), world.told) == (1, [])
