"""When nights begin: the window's openings, what is remembered of them, and what the daemon starts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.fault.fuse import Fuse, Kind, Step, fused_services
from tests.support.bench_samples import sweep_event
from tests.support.faked import set_to
from tests.support.fakes import FakeClock, FakeServiceManager, Invocation, Life
from tests.support.local_box import Box, codes
from tests.support.stores import queried
from tunerd.app import Context
from tunerd.calendar import Memory, Missed, Opening, Window, openings, parse_window
from tunerd.errors import Busy, Interrupted, ServiceError, UsageError
from tunerd.jobs import END, Tell, begin_measuring, folder_of, running_jobs
from tunerd.machine.clock import local_zone
from tunerd.machine.files import Files, lock
from tunerd.measure.evidence import RunRecord
from tunerd.measure.store import EvidenceStore
from tunerd.operations import JobRequest, Lane
from tunerd.production.probation import daemon_lock
from tunerd.result import error_json
from tunerd.sweep.run import sweep_status, watch_sweep
from tunerd.sweep.schedule import ask_tonight, read_memory, show_schedule, skip_tonight
from tunerd.units.manager import LeaseRecord, LeaseSpec
from tunerd.watch.daemon import LONGEST_WAIT_S, Nights
from tunerd.watch.figures import Event
from tunerd.watch.history import HistoryKeeper, history
from tunerd.words import Mode

BERLIN = ZoneInfo("Europe/Berlin")
WINDOW = parse_window("01:00-06:30", "daily", "Europe/Berlin")
STAYS = {"command": "sweep night", "sentence": "It stays."}


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def begins(*found: Opening) -> list[str]:
    return [
        datetime.fromtimestamp(one.span.begin_s, BERLIN).strftime("%d %H:%M")
        + (" skipped" if one.is_skipped else "")
        for one in found
    ]


def upcoming(now: str, memory: Memory = Memory(), *, window: Window = WINDOW,  # noqa: B008
             missed: Missed = Missed.LATE) -> list[str]:  # fmt: skip
    return begins(*openings(window, memory, at(now), missed=missed, least_s=900, most=2))


def test_each_opening_has_one_night() -> None:
    assert upcoming("2026-11-22 12:00") == ["23 01:00", "24 01:00"]
    assert upcoming("2026-11-23 02:00") == ["23 01:00", "24 01:00"]
    had = Memory(last_begin_s=at("2026-11-23 01:00"))
    assert upcoming("2026-11-23 02:00", had) == ["24 01:00", "25 01:00"]


def test_a_night_that_was_missed_begins_late_or_is_skipped() -> None:
    assert upcoming("2026-11-23 01:05", missed=Missed.SKIP)[0] == "23 01:00"
    assert upcoming("2026-11-23 03:00", missed=Missed.SKIP)[0] == "24 01:00"
    assert upcoming("2026-11-23 03:00", missed=Missed.LATE)[0] == "23 01:00"
    assert upcoming("2026-11-23 06:20", missed=Missed.LATE)[0] == "24 01:00", (
        "too late for anything"
    )


def test_a_skipped_night_is_shown_and_not_due() -> None:
    skip = Memory(skip_begin_s=at("2026-11-23 01:00"))
    assert upcoming("2026-11-22 12:00", skip) == ["23 01:00 skipped", "24 01:00"]
    (found,) = openings(WINDOW, skip, at("2026-11-23 02:00"), missed=Missed.LATE, least_s=900)
    assert not found.is_due(at("2026-11-23 02:00"))


def test_a_night_that_is_asked_for_is_tonight_whatever_the_days(tmp_path: Path) -> None:
    sundays = parse_window("01:00-06:30", "sun", "Europe/Berlin")
    asked = Memory(asked_s=at("2026-11-24 12:00"))
    assert upcoming("2026-11-24 12:00", window=sundays) == ["29 01:00", "06 01:00"]
    assert upcoming("2026-11-24 12:00", asked, window=sundays) == ["25 01:00", "29 01:00"]
    skipped = replace(asked, skip_begin_s=at("2026-11-25 01:00"))
    assert upcoming("2026-11-24 12:00", skipped, window=sundays)[0] == "25 01:00 skipped"
    assert upcoming("2026-11-24 12:00", asked) == ["25 01:00", "26 01:00"]
    ctx = box(tmp_path, "2026-11-23 12:00")
    assert ask_tonight(ctx)
    assert read_memory(ctx).asked_s == ctx.clock.now_s()
    assert starts(ctx, looks=90)[0] == ["night"]
    assert read_memory(ctx).asked_s is None, "it was had"


def test_the_tz_of_a_shell_moves_no_window_that_a_daemon_elsewhere_keeps(tmp_path: Path) -> None:
    """Its daemon has the machine's clock; one without a service manager has what its container sets."""
    elsewhere = "Asia/Kolkata" if local_zone({}) != "Asia/Kolkata" else "Asia/Tokyo"
    ctx = box(tmp_path, "2026-11-23 12:00")
    ctx = set_to(ctx, sweep__timezone=None)
    ctx = replace(ctx, environment={**ctx.environment, "TZ": elsewhere})
    told = [show_schedule(replace(ctx, mode=mode)).payload["timezone"] for mode in Mode]
    assert dict(zip(Mode, told, strict=True)) == {
        Mode.SYSTEM: local_zone({}),
        Mode.USER: local_zone({}),
        Mode.LOCAL: elsewhere,
    }


# The daemon


class Jobs:
    """What the processes of jobs do: each is alive for an hour, then tells what it came to."""

    def __init__(self) -> None:
        self.ctx: Context | None = None
        self.result: Mapping[str, Any] | None = STAYS
        self.exit_code = 0
        self._alive = contextlib.ExitStack()
        self._tell: Tell | None = None
        self._end_s = 0.0

    def __call__(self, start: Invocation) -> Life:
        assert self.ctx is not None
        self._tell = self._alive.enter_context(folder_of(self.ctx).writing(int(start.argv[-1])))
        self._end_s = self.ctx.clock.now_s() + 3600.0
        return Life()

    def end(self) -> None:
        if self._tell is not None and self.result is not None:
            self._tell({"event": END, "exit_code": self.exit_code, "result": self.result})
        self._tell = None
        self._alive.close()

    def sleep(self, seconds: float) -> None:
        assert self.ctx is not None
        self.ctx.clock.sleep(seconds)
        if self.ctx.clock.now_s() >= self._end_s:
            self.end()


def jobs_of(ctx: Context) -> Jobs:
    manager = ctx.services
    assert isinstance(manager, FakeServiceManager)
    found = manager.programs[sys.executable]
    assert isinstance(found, Jobs)
    return found


def box(tmp_path: Path, now: str, *, enabled: bool = True) -> Context:
    clock, jobs = FakeClock(now_s=at(now)), Jobs()
    manager = FakeServiceManager(tmp_path, clock, {sys.executable: jobs})
    ctx = set_to(Box(tmp_path).context, sweep__window="01:00-06:30",
                 sweep__timezone="Europe/Berlin", schedule__enabled=enabled)  # fmt: skip
    jobs.ctx = replace(ctx, clock=clock, services=manager, mode=Mode.USER)
    return jobs.ctx


def sweep(ctx: Context) -> int:
    return begin_measuring(ctx, "sweep night", ["sweep", "night", "--yes", "--at-once"])


def faked(tmp_path: Path) -> tuple[Context, FakeServiceManager, FakeClock]:
    """When a window opens, with the fakes as what they are."""
    ctx = box(tmp_path, "2026-11-23 01:00")
    assert isinstance(ctx.services, FakeServiceManager)
    assert isinstance(ctx.clock, FakeClock)
    return ctx, ctx.services, ctx.clock


def starts(ctx: Context, looks: int = 1) -> tuple[list[str], list[float]]:
    """What was told, and how long each look wanted to wait, over several looks."""
    told: list[Event] = []
    nights = Nights(ctx, told.append)
    waits = []
    for _ in range(looks):
        waits.append(nights.look())
        jobs_of(ctx).sleep(waits[-1])
    return [event.kind for event in told], waits


def test_the_daemon_begins_a_night_when_the_window_opens_and_only_once(tmp_path: Path) -> None:
    ctx = box(tmp_path, "2026-11-23 00:50")
    told, waits = starts(ctx, looks=90)
    assert waits[0] == 600.0
    assert told == ["night", "sweep-over"]
    assert datetime.fromtimestamp(ctx.clock.now_s(), BERLIN).hour >= 7
    assert json.loads((ctx.paths.state_dir / "schedule.json").read_text())["last_begin_s"] == at(
        "2026-11-23 01:00"
    )


@pytest.mark.parametrize("of", ["lock", "measure_lock"])
def test_a_night_that_is_due_amid_a_swap_or_a_measurement_that_is_no_sweep_begins_after_it_and_once(
    tmp_path: Path, of: str
) -> None:
    """It began, found a unit that was not the deployed one, or a bench, and failed for that at night."""
    ctx = box(tmp_path, "2026-11-23 01:00")
    with lock(getattr(ctx.paths, of), purpose="apply x", since="now"):
        assert starts(ctx, looks=2) == ([], [60.0, 60.0])
    assert starts(ctx)[0] == ["night"]
    assert starts(ctx, looks=3)[0] == [], "by another daemon"


def test_a_night_that_began_on_a_clock_that_was_set_back_since_is_had_again(tmp_path: Path) -> None:
    ctx, _, clock = faked(tmp_path)
    assert starts(ctx)[0] == ["night"]
    clock.set_wall(at("2026-11-22 22:00"))
    assert starts(ctx)[0] == []
    jobs_of(ctx).end()  # by itself, seeing the same clock
    clock.set_wall(at("2026-11-23 01:00"))
    assert starts(ctx)[0] == ["night"]
    clock.set_wall(at("2026-11-23 00:59"))
    assert starts(ctx, looks=3)[0] == []


def test_a_machine_that_has_just_booted_begins_a_night_once_its_clock_was_set(
    tmp_path: Path,
) -> None:
    """A board that keeps local time, or has no battery, stopped production at each boot whose hour lay in the window."""
    ctx = box(tmp_path, "2026-11-23 01:00")
    clock = FakeClock(now_s=at("2026-11-23 01:30"), monotonic_s=20.0)
    ctx = jobs_of(ctx).ctx = replace(ctx, clock=clock)
    assert starts(ctx) == ([], [280.0])
    clock.set_wall(at("2026-11-22 23:30"))
    assert starts(ctx)[0] == []
    assert not running_jobs(ctx)
    clock.set_wall(at("2026-11-23 01:30"))
    assert starts(ctx)[0] == ["night"]


@pytest.mark.parametrize("since_boot_s", [20.0, 5000.0])
def test_the_shortest_window_has_its_night_though_the_look_comes_late(
    tmp_path: Path, since_boot_s: float
) -> None:
    """One of a quarter of an hour was set and shown, and each night was over when it was looked at."""
    ctx = set_to(box(tmp_path, "2026-11-23 01:00"), sweep__window="01:00-01:15")
    clock = FakeClock(now_s=at("2026-11-23 01:00") + 0.5, monotonic_s=since_boot_s)
    ctx = jobs_of(ctx).ctx = replace(ctx, clock=clock)
    assert starts(ctx, looks=2)[0] == ["night"]


def test_a_boot_with_a_clock_that_is_years_behind_begins_no_second_night(tmp_path: Path) -> None:
    ctx = box(tmp_path, "2026-11-23 01:00")
    assert starts(ctx)[0] == ["night"]
    jobs_of(ctx).end()
    clock = FakeClock(now_s=at("1970-01-01 02:00"), monotonic_s=20.0)
    ctx = jobs_of(ctx).ctx = replace(ctx, clock=clock)
    assert starts(ctx)[0] == []
    clock.set_wall(at("2026-11-23 01:30"))
    assert starts(ctx, looks=3)[0] == []
    assert not running_jobs(ctx)


def test_no_night_begins_where_nobody_wanted_them(tmp_path: Path) -> None:
    ctx = box(tmp_path, "2026-11-23 01:00", enabled=False)
    assert starts(ctx, looks=3) == ([], [LONGEST_WAIT_S] * 3)
    assert not running_jobs(ctx)


def test_a_night_that_cannot_begin_is_told_once_and_begins_when_it_can(tmp_path: Path) -> None:
    ctx, manager, _ = faked(tmp_path)
    manager.errors["start"] = [ServiceError("it does not start")] * 3
    told, waits = starts(ctx, looks=6)
    assert told == ["night-failed", "night"]
    assert sum(waits[:3]) < 600, "before the opening counts as missed"
    assert [one.request.argv for one in running_jobs(ctx)] == [("sweep", "night", "--yes")]


def test_a_night_that_cannot_be_noted_is_not_begun_and_told_once(tmp_path: Path) -> None:
    ctx = box(tmp_path, "2026-11-23 01:00")
    (ctx.paths.state_dir / "schedule.json").mkdir(parents=True)
    assert starts(ctx, looks=20)[0] == ["night-failed"]
    assert not running_jobs(ctx)


FAILED = UsageError("llama-server.service is not enabled")


@pytest.mark.parametrize(
    ("result", "exit_code", "event"),
    [
        (STAYS, 0, ("sweep-over", "note", "the sweep is over: It stays.")),
        ({"command": "compare"}, 0,
         ("sweep-over", "note", "the night compared the build before with the one after an upgrade")),
        (error_json(Interrupted("interrupted"), "sweep night"), 143,
         ("sweep-over", "note", "the sweep is over: it was stopped")),
        (error_json(FAILED, "sweep night"), 2,
         ("sweep-failed", "error", f"the sweep failed ({FAILED.message})")),
        (STAYS, 1, ("sweep-failed", "error", "the sweep failed (It stays.)")),
        (None, 0, ("sweep-failed", "error", "the sweep failed (its process was killed)")),
    ],
)  # fmt: skip
def test_how_a_night_ended_is_told_once(
    tmp_path: Path, result: Mapping[str, Any] | None, exit_code: int, event: tuple[str, str, str]
) -> None:
    ctx = box(tmp_path, "2026-11-23 01:00")
    jobs = jobs_of(ctx)
    jobs.result, jobs.exit_code = result, exit_code
    told: list[Event] = []
    nights = Nights(ctx, told.append)
    for _ in range(120):
        jobs.sleep(nights.look())
    assert [(one.kind, one.level, one.text) for one in told[1:]] == [event]


@pytest.mark.parametrize(
    ("boots_s", "said"),
    [(-9e9, "the sweep is over: It stays."), (1800.0, "how the sweep ended is not known")],
)
def test_a_night_that_ended_while_no_daemon_looked_is_told_by_the_next_one(
    tmp_path: Path, boots_s: float, said: str
) -> None:
    ctx, _, clock = faked(tmp_path)
    keeper = HistoryKeeper(ctx, lambda _event: None)
    Nights(ctx, keeper.add_event).look()
    jobs_of(ctx).sleep(3600.0)
    if boots_s > 0:
        ctx = replace(ctx, clock=FakeClock(now_s=clock.now_s(), monotonic_s=boots_s))
    for _ in range(2):
        nights = Nights(ctx, keeper.add_event)
        nights.look()
        nights.look()
    texts = [one.text for one in history(ctx, 0.0, 0.0).events]
    assert len(texts) == 2
    assert texts[0].startswith(said)


def test_a_night_that_an_upgrade_ended_as_an_earlier_version_began_it_is_told(
    tmp_path: Path,
) -> None:
    ctx = box(tmp_path, "2026-11-23 12:00")
    keeper = HistoryKeeper(ctx, lambda _event: None)
    text = "the window is open: tunerd-sweep.service began"
    keeper.add_event(Event(ctx.clock.now_s(), "night", "note", text))
    for _ in range(2):
        Nights(ctx, keeper.add_event).look()
    texts = [one.text for one in history(ctx, 0.0, 0.0).events]
    assert [text.startswith("how the sweep ended is not known") for text in texts] == [True, False]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_sweep_that_a_person_began_as_a_job_is_that_night_and_its_end_is_told(
    tmp_path: Path, is_seen: bool
) -> None:
    """Of `schedule run-now` nobody was told how it ended."""
    ctx = box(tmp_path, "2026-11-22 22:00" if is_seen else "2026-11-23 01:00")
    sweep(ctx)
    told: list[Event] = []
    nights = Nights(ctx, told.append)
    for _ in range(70):
        jobs_of(ctx).sleep(nights.look())
    over = "the sweep is over: It stays."
    runs = "the window is open, and tunerd-job-1.service already runs: no other night begins"
    expected = [over] if is_seen else [runs, over]
    assert [event.text for event in told][: len(expected)] == expected


def test_a_night_that_waited_from_its_beginning_on_was_not_missed(tmp_path: Path) -> None:
    """Nights that are skipped where the machine slept were lost, without a word, to a bench of eleven minutes."""
    ctx, told = set_to(box(tmp_path, "2026-11-23 01:00"), schedule__missed="skip"), list[Event]()
    nights = Nights(ctx, told.append)
    with lock(ctx.paths.measure_lock, purpose="bench x", since="now"):
        for _ in range(11):
            ctx.clock.sleep(nights.look())
    nights.look()
    assert [one.kind for one in told] == ["night"]


def test_a_sweep_in_a_terminal_is_the_sweep_of_that_night(
    tmp_path: Path,
) -> None:
    """`schedule run-now` in the evening: the night began beside it, and failed."""
    ctx, told = box(tmp_path, "2026-11-23 01:00"), list[Event]()
    keeper = HistoryKeeper(ctx, lambda _event: None)

    def tell(event: Event) -> None:
        told.append(event)
        keeper.add_event(event)

    with (
        lock(ctx.paths.sweep_lock, purpose="sweep", since="now"),
        lock(ctx.paths.measure_lock, purpose="sweep 3 of x", since="now"),
    ):
        nights = Nights(ctx, tell)
        nights.look()
        nights.look()
    Nights(ctx, tell).look()
    assert [one.text for one in told] == [
        "the window is open, and somebody already sweeps: no other night begins"
    ]
    assert not running_jobs(ctx)


def test_a_night_that_is_getting_ready_is_not_taken_for_the_sweep_that_a_power_cut_ended(
    tmp_path: Path,
) -> None:
    """That one was said to wait for the card; and `sweep watch` said after two minutes that no sweep is under way."""
    ctx = box(tmp_path, "2026-11-23 01:00")
    began_s = ctx.clock.now_s()
    record = RunRecord(kind="sweep", suites=("workload",), started_s=began_s, target="a box")
    with EvidenceStore(ctx.paths.evidence) as store:
        number = store.add_run(record)
        store.add_sweep_event(number, sweep_event("p"))
    request = JobRequest("sweep night", (), Lane.MEASURE, "root", began_s)
    folder_of(ctx).create(request)  # whose process does not begin
    assert sweep_status(ctx).payload["waits"] is None
    with lock(ctx.paths.sweep_lock, purpose="sweep", since="now"):
        assert sweep_status(ctx).payload["waits"] == number
    with pytest.raises(UsageError, match="no sweep is under way"):
        list(watch_sweep(ctx))
    assert ctx.clock.now_s() >= began_s + 120


def test_a_damaged_event_does_not_keep_anybody_from_watching_the_sweep(tmp_path: Path) -> None:
    ctx = box(tmp_path, "2026-11-23 01:00")
    run = RunRecord(kind="sweep", suites=("workload",), started_s=1.0, target="a box")
    with EvidenceStore(ctx.paths.evidence) as store:
        number = store.add_run(run)
        for process in ("damaged", "whole"):
            store.add_sweep_event(number, sweep_event(process))
    spoil = "UPDATE entry SET body = '{bad' WHERE run_id = ? AND body LIKE '%damaged%'"
    queried(ctx.paths.evidence, spoil, number)
    spec = LeaseSpec("1234abcd", ctx.unit, restores=False, limit_s=9.0, why=f"sweep {number} of x")
    record = LeaseRecord(spec.id, spec.production, spec.why, 1, 0.0, 9e9, restores=False)
    ctx.files.keep(ctx.paths.measurement, record)
    lease = ctx.services.lease(spec)
    lines = watch_sweep(ctx)
    assert next(lines).startswith("start")
    lease.end()
    assert list(lines) == []


def test_what_is_skipped_while_a_night_does_not_begin_stays_skipped(tmp_path: Path) -> None:
    """The daemon put back what it had known of nights before."""
    ctx, manager, _ = faked(tmp_path)

    def skip_and_refuse(step: Step) -> None:
        if step.text.startswith("run_transient"):
            skip_tonight(ctx, undo=False)
            raise ServiceError("it does not start")

    fuse = Fuse(0, skip_and_refuse, until=9, of=Kind.UNITS)
    refusing = replace(ctx, services=fused_services(manager, fuse))
    told: list[Event] = []
    Nights(refusing, told.append).look()
    assert [event.kind for event in told] == ["night-failed"]
    assert read_memory(ctx) == Memory(skip_begin_s=at("2026-11-24 01:00"))


def test_two_who_change_what_is_remembered_of_nights_lose_nothing(tmp_path: Path) -> None:
    ctx = box(tmp_path, "2026-11-22 12:00")
    seen = list[str]()

    def meanwhile(step: str) -> None:
        if not seen:
            seen.append(step)
            with pytest.raises(Busy, match="another change is under way"):
                skip_tonight(ctx, undo=False)

    assert ask_tonight(replace(ctx, files=Files(meanwhile)))
    skip_tonight(ctx, undo=False)
    assert seen
    assert None not in (read_memory(ctx).asked_s, read_memory(ctx).skip_begin_s)


# The command


def test_the_address_of_a_webhook_is_for_the_owner_of_the_settings_alone(tmp_path: Path) -> None:
    """Whoever knows it may read what is posted there, and post as well."""
    made = Box(tmp_path)
    file = made.configure("# mine\n")
    file.chmod(0o644)
    made.json("settings", "set", "sweep.budget_s", "3600")
    assert file.stat().st_mode & 0o777 == 0o644
    for word in ("notify.webhook", "https://ntfy.sh/my-own-topic"), ("sweep.budget_s", "1800"):
        file.chmod(0o644)  # as earlier versions left it
        made.json("settings", "set", *word)
        assert file.stat().st_mode & 0o777 == 0o600


def test_files_that_an_editor_of_windows_wrote_are_read_and_changed(tmp_path: Path) -> None:
    """A mark of UTF-8 that nobody sees stands first: they were `not valid TOML`, at line 1, column 1."""
    made = Box(tmp_path)
    (made.context.paths.site_profiles).mkdir(parents=True)
    made.context.paths.settings_file.write_text("[sweep]\r\nmin_gain = 0.02\r\n", "utf-8-sig")
    mine = made.context.paths.site_profiles / "mine.toml"
    mine.write_text('extends = "cpu-embedded"\r\n', "utf-8-sig")

    made.json("settings", "set", "sweep.budget_s", "3600")

    sweep = made.context.settings.sweep
    assert (sweep.min_gain, sweep.budget_s) == (0.02, 3600)
    assert made.json("profiles", "check", "mine")["ok"]


def test_the_schedule_is_set_shown_and_skipped_from_the_command_line(tmp_path: Path) -> None:
    made = Box(tmp_path)
    file = made.configure("# mine\n[sweep]\nbudget_s = 3600.0  # an hour\n")

    made.json("schedule", "set", "--window", "23:00-05:00", "--timezone", "Europe/Berlin", "--on")

    text = file.read_text()
    assert "# mine" in text
    assert "# an hour" in text
    shown = made.json("schedule", "show")
    told = (shown["window"], shown["timezone"], shown["enabled"])
    assert told == ("23:00-05:00", "Europe/Berlin", True)
    assert len(shown["nights"]) == 3
    assert codes(shown) == ["no-daemon"], "nobody would begin them"
    assert shown["messages"][0]["hint"] == "`tunerd daemon` in a terminal", "there is no systemd"
    with lock(daemon_lock(made.context), purpose="daemon", since="now"):
        assert codes(made.json("schedule", "show")) == []
    made.json("schedule", "skip-tonight")
    assert made.json("schedule", "show")["nights"][0]["skipped"] is True
    made.json("schedule", "skip-tonight", "--undo")
    assert made.json("schedule", "show")["nights"][0]["skipped"] is False
    before = file.read_text()
    made.json("schedule", "set", "--window", "25:00-05:00", code=2)
    made.json("schedule", "set", "--window", "01:00-01:14", code=2)
    assert file.read_text() == before
    file.write_text(before.replace("23:00-05:00", "01:00-01:14"))
    assert codes(made.json("schedule", "show")) == ["too-short"], "the daemon would begin none"
