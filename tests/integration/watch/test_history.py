"""The history of what was watched, in a real file: a year of it, damage, and disks that refuse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes import FakeClock
from tests.support.local_box import Box
from tests.support.readings import a_reading, served
from tests.support.stores import queried
from tunerd.app import Context
from tunerd.watch.figures import MINUTE_S, Event, GpuPoint, Point, summarise
from tunerd.watch.history import (
    COARSE_S,
    KEEP_MINUTES_S,
    DamagedError,
    History,
    HistoryKeeper,
    TelemetryStore,
    history,
    put_aside,
)

BEGIN_S = 1_790_000_400  # a whole ten minutes
YEAR_S = 365 * 86400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TelemetryStore]:
    made = TelemetryStore(tmp_path / "telemetry.db", writable=True)
    yield made
    made.close()


def fill(store: TelemetryStore, begin_s: float, *minutes: int) -> None:
    """Minutes after a moment, in each of which 100 tokens were generated."""
    for n in minutes:
        at_s = int(begin_s) + n * MINUTE_S
        work = a_reading(at_s, served=served(100))
        store.add(*summarise([work], begin_s=at_s, seconds=MINUTE_S))


def test_minutes_are_kept_and_told_in_longer_steps(store: TelemetryStore) -> None:
    for n in range(20):
        begin_s = BEGIN_S + n * MINUTE_S
        work = served(n_predicted=600, tok_s=50.0, n_drafted=100, n_accepted=70 + n)
        store.add(*summarise([a_reading(begin_s, served=work, rss_mib=900 + n)], begin_s=begin_s,
                             seconds=MINUTE_S))  # fmt: skip

    minutes = store.rows(Point, BEGIN_S, BEGIN_S + 1200)
    assert [one.begin_s for one in minutes] == [BEGIN_S + 60 * n for n in range(20)]
    assert minutes[3].decode_tok_s == pytest.approx(50.0)
    assert minutes[3].acceptance_ratio == pytest.approx(0.73)
    coarse = store.rows(Point, BEGIN_S, BEGIN_S + 1200, COARSE_S)
    assert [(one.begin_s, one.n, one.n_predicted, one.rss_mib) for one in coarse] == [
        (BEGIN_S, 10, 6000, 909),
        (BEGIN_S + 600, 10, 6000, 919),
    ]
    (gpu, _) = store.rows(GpuPoint, BEGIN_S, BEGIN_S + 1200, COARSE_S)
    assert (gpu.index, gpu.n, gpu.used_mib, gpu.temperature_c) == (0, 10, 8000, 38.0)


def test_what_nobody_knows_stays_unknown(store: TelemetryStore) -> None:
    blind = replace(a_reading(BEGIN_S), gpus=None)
    store.add(*summarise([blind], begin_s=BEGIN_S, seconds=MINUTE_S))
    store.tidy(BEGIN_S + 3 * COARSE_S)

    for step_s in (MINUTE_S, COARSE_S):
        (point,) = store.rows(Point, BEGIN_S, BEGIN_S + 1, step_s)
        assert (point.n_predicted, point.predicted_s, point.decode_tok_s) == (None,) * 3
        assert store.rows(GpuPoint, BEGIN_S, BEGIN_S + 1, step_s) == ()


def test_a_minute_that_was_cut_by_a_restart_is_one_minute(store: TelemetryStore) -> None:
    for at_s in (BEGIN_S, BEGIN_S + 30):
        store.add(*summarise([a_reading(at_s, served=served(100))], begin_s=BEGIN_S, seconds=60))
    (point,) = store.rows(Point, BEGIN_S, BEGIN_S + 60)
    assert (point.n, point.n_predicted) == (2, 200)


def test_old_minutes_become_rows_of_ten_and_the_year_before_goes(store: TelemetryStore) -> None:
    fill(store, BEGIN_S, *range(20))
    store.tidy(BEGIN_S + 1320)
    store.tidy(BEGIN_S + 1380)  # nothing is folded twice
    assert len(store.rows(Point, BEGIN_S, BEGIN_S + 1200)) == 20
    later_s = BEGIN_S + KEEP_MINUTES_S + 1200
    store.tidy(later_s)
    rows = store.rows(Point, BEGIN_S, BEGIN_S + 1200)
    assert [(one.begin_s, one.seconds, one.n, one.n_predicted) for one in rows] == [
        (BEGIN_S, 600, 10, 1000),
        (BEGIN_S + 600, 600, 10, 1000),
    ]
    store.tidy(later_s + 400 * 86400)
    assert store.rows(Point, 0, later_s * 2) == ()


def test_what_an_earlier_version_folded_already_counts_once(store: TelemetryStore) -> None:
    fill(store, BEGIN_S, *range(10))
    (point,) = store.rows(Point, BEGIN_S, BEGIN_S + COARSE_S, COARSE_S)
    store.add(point, store.rows(GpuPoint, BEGIN_S, BEGIN_S + COARSE_S, COARSE_S))
    assert len(store.rows(Point, BEGIN_S, BEGIN_S + COARSE_S)) == 10
    store.tidy(BEGIN_S + KEEP_MINUTES_S + 2 * COARSE_S)
    (row,) = store.rows(Point, BEGIN_S, BEGIN_S + COARSE_S)
    assert (row.seconds, row.n_predicted) == (COARSE_S, 1000)


def test_a_clock_that_was_years_ahead_for_a_while_costs_no_history_after_it(
    store: TelemetryStore,
) -> None:
    for begin_s in (BEGIN_S + 20 * YEAR_S, BEGIN_S):
        fill(store, begin_s, *range(10))
        store.tidy(begin_s + 2 * COARSE_S)
    store.tidy(BEGIN_S + KEEP_MINUTES_S + 2 * COARSE_S)
    (row,) = store.rows(Point, BEGIN_S, BEGIN_S + COARSE_S)
    assert (row.seconds, row.n_predicted) == (COARSE_S, 1000)


def test_a_file_that_is_no_history_is_named_and_begun_anew_once_it_is_put_aside(
    tmp_path: Path,
) -> None:
    path = tmp_path / "telemetry.db"
    path.touch()
    TelemetryStore(path, writable=True).close()  # an empty one is begun
    for day, content in enumerate(
        (b"no database at all" * 100, b"SQLite format 3\0" + b"x" * 5000)
    ):
        path.write_bytes(content)
        with pytest.raises(DamagedError):
            TelemetryStore(path, writable=True)
        put_aside(path, f"2026112{day}T000000Z")
        assert [one.name for one in tmp_path.iterdir()] == [
            f"telemetry.db.damaged-2026112{day}T000000Z"
        ], "the newest stays"
        TelemetryStore(path, writable=True).close()
    path.unlink()
    queried(path, "CREATE TABLE points (a)")  # of another program or version
    with pytest.raises(DamagedError, match="schema"):
        TelemetryStore(path, writable=True)


def test_a_page_that_rotted_is_found_and_room_that_became_free_is_given_back(
    store: TelemetryStore,
) -> None:
    fill(store, BEGIN_S, *range(400))
    store.tidy(BEGIN_S)
    whole = store.path.read_bytes()
    store.tidy(BEGIN_S + 4 * YEAR_S)
    assert store.path.stat().st_size < len(whole) / 2
    store.close()
    store.path.write_bytes(whole[:8192] + b"\xa5" * 4096 + whole[12288:])
    with pytest.raises(DamagedError):
        TelemetryStore(store.path, writable=True).check()


def test_readings_of_a_minute_become_one_row_when_the_next_begins(tmp_path: Path) -> None:
    ctx = Box(tmp_path).context
    keeper = begun(ctx)

    def kept() -> History:
        return history(ctx, BEGIN_S, BEGIN_S + 600)

    for n, restarts in enumerate((0, 0, 2)):
        keeper.add(a_reading(BEGIN_S + 20 * n, n_restarts=restarts))
    assert kept().points == ()
    keeper.add(a_reading(BEGIN_S + 61, n_restarts=3))
    (point,), (gpu,) = kept().points, kept().gpus
    assert (point.begin_s, point.n, point.n_ready, point.restarts) == (BEGIN_S, 3, 3, 2)
    assert (gpu.n, gpu.n_throttled) == (3, 0)
    keeper.close()
    keeper.close()
    first, second = kept().points
    assert second.restarts == 1, "told from the last reading of the minute before"
    assert first == point


def test_half_of_a_character_that_a_server_said_is_kept_as_it_is_written(
    store: TelemetryStore,
) -> None:
    store.add_event(Event(BEGIN_S, "hang", "warning", "it says \ud83d"))
    assert [one.text for one in store.events()] == ["it says \\ud83d"]


def test_nobody_else_can_hold_a_lock_on_the_history(store: TelemetryStore) -> None:
    store.add_event(Event(BEGIN_S, "hang", "warning", "text"))
    found = {path.name: path.stat().st_mode & 0o777 for path in store.path.parent.iterdir()}
    assert set(found) == {"telemetry.db", "telemetry.db-wal", "telemetry.db-shm"}
    assert set(found.values()) == {0o600}


def begun(ctx: Context) -> HistoryKeeper:
    keeper = HistoryKeeper(ctx, lambda _event: None)
    keeper.begin()
    return keeper


def test_minutes_of_a_machine_that_is_on_for_an_hour_a_week_are_folded_as_well(
    tmp_path: Path,
) -> None:
    clock = FakeClock(BEGIN_S)
    ctx = replace(Box(tmp_path).context, clock=clock)
    for week in range(1, 6):
        keeper = begun(ctx)
        for _ in range(60):
            keeper.add(a_reading(clock.now_s()))
            clock.advance(MINUTE_S)
        keeper.tidy()
        keeper.close()
        clock.set_wall(BEGIN_S + week * 7 * 86400)
    first, *_, last = history(ctx, BEGIN_S, clock.now_s()).points
    assert (first.seconds, last.seconds) == (COARSE_S, MINUTE_S)


def test_a_clock_that_is_set_years_ahead_drops_nothing_until_it_held_for_a_day(
    tmp_path: Path,
) -> None:
    clock = FakeClock(BEGIN_S)
    ctx = replace(Box(tmp_path).context, clock=clock)
    keeper = begun(ctx)
    for _ in range(30):
        keeper.add(a_reading(clock.now_s(), served=served(100)))
        clock.advance(MINUTE_S)
    clock.set_wall(clock.now_s() + 3 * YEAR_S)
    keeper.tidy()
    keeper.add(a_reading(clock.now_s()))
    keeper.close()

    keeper = begun(ctx)
    keeper.tidy()
    assert len(history(ctx, BEGIN_S, BEGIN_S + 1800).points) == 30
    clock.advance(86400)
    keeper.tidy()
    assert history(ctx, BEGIN_S, BEGIN_S + 1800).points == ()
    keeper.close()


def test_a_clock_that_is_years_ahead_at_each_boot_drops_nothing(tmp_path: Path) -> None:
    """From the second boot on the newest row was of a time to come, and what lay between two boots a day of minutes."""
    clock = FakeClock(BEGIN_S)
    ctx = replace(Box(tmp_path).context, clock=clock)
    for day in range(3):
        clock.set_wall(BEGIN_S + 10 * YEAR_S + day * 86400)
        keeper = begun(ctx)
        for is_right in (False, True):
            if is_right:
                clock.set_wall(BEGIN_S + day * 86400 + 300)
            for _ in range(5):
                keeper.add(a_reading(clock.now_s()))
                clock.advance(MINUTE_S)
            keeper.add_event(Event(clock.now_s(), "swap", "note", "it serves", None))
            keeper.tidy()
        keeper.close()
    kept = history(ctx, BEGIN_S, clock.now_s())
    assert len(kept.points) == 3 * 5
    assert len(kept.events) == 3 * 2


def test_a_history_that_was_removed_or_replaced_under_the_daemon_is_gone_on_with_where_it_stands(
    tmp_path: Path,
) -> None:
    """As where STATE is restored or its disk mounted late: all that was seen until the daemon's end went into no file."""
    ctx = replace(Box(tmp_path).context, clock=FakeClock(BEGIN_S))
    keeper = begun(ctx)

    def tell(text: str) -> list[str]:
        keeper.add_event(Event(ctx.clock.now_s(), "swap", "note", text, None))
        return [one.text for one in history(ctx, 0.0, 0.0).events]

    assert tell("one") == ["one"]
    ctx.paths.state_dir.rename(tmp_path / "before")
    assert tell("two") == ["two"]
    shutil.rmtree(ctx.paths.state_dir)
    (tmp_path / "before").rename(ctx.paths.state_dir)
    assert tell("three") == ["three", "one"]
    keeper.close()
