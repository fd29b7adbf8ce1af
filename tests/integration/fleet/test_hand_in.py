"""Evidence of boxes in one database: all of it, once each, whatever is in the way."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.fault.campaign import TIMEOUT_S
from tests.integration.measure.test_store import ARM, RUN, SAMPLE
from tests.integration.measure.test_store_rows_damaged import damage
from tests.support import nvml_stub
from tests.support.bench_samples import sweep_event
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.fakes import AheadClock
from tests.support.forked import Forked
from tests.support.local_box import Box
from tests.support.made_sweep import N_SAMPLES, put_small_nights
from tests.support.postgres import Postgres, name_of, password_file, postgres_server
from tests.support.stores import filled, open_store
from tests.support.synthetic_runs import made_runs
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import until
from tunerd.cli.fleet import render_boxes
from tunerd.errors import Busy, HostError, UsageError
from tunerd.fleet.rollout import boxes_of
from tunerd.fleet.shared import box_id, fleet_status, hand_in
from tunerd.machine.files import Files
from tunerd.measure.evidence import RunOutcome
from tunerd.measure.store import EvidenceStore
from tunerd.sweep.record import KEPT_SWEEPS, drop_old_requests

pytestmark = pytest.mark.timeout(TIMEOUT_S)
ROWS = "select count(*), count(distinct body::text) from entry where kind = 'sample'"


@pytest.fixture
def box(tmp_path: Path, url: str) -> Box:
    return a_box(tmp_path / "gpu1", url)


def a_box(folder: Path, url: str, **more: str) -> Box:
    """A box that hands in to this database."""
    folder.mkdir()
    return Box(folder, {"TUNERD_STORE__URL": url, "TUNERD_STORE__BOX": folder.name, **more})


def measure(box: Box, n: int, *, first: int = 0) -> int:
    """A run of so many samples, no two of them alike; its number."""
    with EvidenceStore(box.context.paths.evidence) as store:
        run = store.add_run(replace(RUN, target=box.folder.name))
        for at in range(first, first + n, 40):
            names = range(at, min(at + 40, first + n))
            store.add_samples(
                run,
                [replace(SAMPLE, prompt_id=f"{box.folder.name}-{name}") for name in names],
                arm="live",
            )
        store.end_run(run, RunOutcome.DONE, ended_s=RUN.started_s + 1)
    return run


def samples_in(postgres: Postgres, url: str) -> tuple[int, int]:
    """How many samples a database has, and how many different ones."""
    (row,) = postgres.query(ROWS, name_of(url))
    total, different = row.split("|")
    return int(total), int(different)


def test_the_boxes_of_a_rollout_may_be_those_of_the_store(
    box: Box, tmp_path: Path, postgres: Postgres, url: str
) -> None:
    for one in (a_box(tmp_path / "gpu2", url), box):
        hand_in(one.context)
    assert boxes_of(box.context, (), None) == ("gpu1", "gpu2")
    named = "update box set name = '-oProxyCommand=id' where name = 'gpu2' returning name"
    postgres.query(named, name_of(url))
    with pytest.raises(UsageError, match="cannot be a box"):
        boxes_of(box.context, (), None)
    postgres.query("update box set name = 'gpu1'", name_of(url))
    assert boxes_of(box.context, (), None) == ("gpu1",), "it was set up anew"
    with pytest.raises(UsageError, match="named twice"):
        boxes_of(box.context, ("gpu1",), tmp_path / "hosts.ini")


def test_whatever_the_row_of_a_box_holds_the_others_are_shown(
    box: Box, tmp_path: Path, postgres: Postgres, url: str
) -> None:
    for one in (a_box(tmp_path / "gpu2", url), box):
        hand_in(one.context)
    postgres.query("update origin set handed_in_at = 'infinity'", name_of(url))
    for wrong in (
        """status = '{"up_s": 1e300}'""",
        """status = '{"up_s": -1e300, "drift": ["x"]}'""",
        """status = '{"up_s": "nan"}'""",
        "seen_at = '250000-01-01'",
        "seen_at = 'infinity'",
        "seen_at = '-infinity', vram_mib = -9223372036854775808",
    ):
        postgres.query(f"update box set {wrong} where name = 'gpu1'", name_of(url))  # noqa: S608  of tests
        payload = fleet_status(box.context).payload
        first, second = payload["boxes"]
        assert second["name"] == "gpu2"
        assert 0 <= first["seen_age_s"] < 1e11
        assert first["serving_since_s"] is None or 0 <= first["serving_since_s"] <= first["seen_s"]
        json.dumps(dict(payload), allow_nan=False)
        assert len(list(render_boxes(payload))) == 3


def test_a_box_is_shown_with_its_card_also_one_that_does_not_tell_its_memory(
    tmp_path: Path, url: str, nvml_library: Path
) -> None:
    shutil.copytree(nvml_library.parent, tmp_path / "nvml")
    nvml_stub.NvmlWorld(tmp_path / "nvml").show(rtx_4070_super())
    with_card = a_box(tmp_path / "gpu1", url, LD_LIBRARY_PATH=str(tmp_path / "nvml"))
    assert with_card.call("fleet", "hand-in").returncode == 0
    shown = with_card.call("fleet", "status").stdout
    assert "NVIDIA GeForce RTX 4070 SUPER, 12282 MiB (12.0 GiB)" in shown
    other = a_box(tmp_path / "gpu2", url).context
    (told,) = fleet_status(other).payload["boxes"]
    assert told["vram_mib"] == rtx_4070_super().total_mib

    silent = replace(rtx_4070_super(), total_mib=None)
    hand_in(replace(other, gpu=FakeGpuReader(silent)))
    payload = fleet_status(other).payload
    assert (payload["boxes"][1]["card"], payload["boxes"][1]["vram_mib"]) == (silent.name, None)
    assert f"{silent.name}, unknown" in "\n".join(render_boxes(payload))


def test_two_first_uses_of_the_store_at_once_make_one_box(tmp_path: Path) -> None:
    """A sweep and what hands in each made an id; the runs handed in under the one that was lost came again under the other."""
    other = Box(tmp_path).context
    other.files.make_folder(other.paths.state_dir)

    def meanwhile(step: str) -> None:
        if step == "create temporary for box.json":
            with pytest.raises(Busy):
                box_id(other)

    made = box_id(replace(other, files=Files(before=meanwhile)))
    assert made == box_id(other)


def test_two_boxes_of_which_one_is_a_copy_are_told_of(box: Box, tmp_path: Path, url: str) -> None:
    """`fleet status` showed one box, by the name of whoever had told last: a server that is down was not missed."""
    for _ in range(2):
        hand_in(box.context)
    copy = a_box(tmp_path / "gpu2", url)
    shutil.copytree(box.context.paths.state_dir, copy.context.paths.state_dir)
    hand_in(copy.context)
    assert fleet_status(box.context).messages == (), "as where a box got another name"

    hand_in(box.context)

    (told,) = fleet_status(box.context).messages
    assert told.code == "same-box"
    assert "gpu1 and gpu2 tell as one box" in told.text
    copy.context.paths.box.unlink()
    hand_in(copy.context)
    hand_in(box.context)
    found = fleet_status(box.context)
    assert [one["name"] for one in found.payload["boxes"]] == ["gpu1", "gpu2"]
    assert found.messages == ()


def test_a_mark_that_was_told_before_a_kill_is_ones_own(box: Box) -> None:
    context = box.context
    hand_in(context)

    def dies(step: str) -> None:
        if step == "create temporary for box.json":
            steps.append(step)
            if len(steps) == 2:  # after the database has it
                raise HostError("killed")

    steps: list[str] = []
    with pytest.raises(HostError, match="killed"):
        hand_in(replace(context, files=Files(before=dies)))

    hand_in(context)
    hand_in(context)
    assert fleet_status(context).messages == ()


def test_a_run_in_the_shared_store_is_the_one_that_was_measured(box: Box, url: str) -> None:
    with EvidenceStore(box.context.paths.evidence) as store:
        for made in made_runs():
            made.put(store)
        store.add_sweep_event(1, sweep_event("p1", (1, 1)))
        here = {run.record.started_s: store.evidence(run) for run in store.runs()}
        events = store.sweep_events(1)

    counts = hand_in(box.context).payload

    assert counts["runs"] == len(here)
    with open_store(url, writable=False) as store:
        there = {run.record.started_s: store.evidence(run) for run in store.runs()}
        for started_s, evidence in here.items():
            found, number = there[started_s], evidence.run.number
            assert replace(found, run=replace(found.run, number=number)) == evidence
            assert store.sweep_events(found.run.number) == (events if number == 1 else ())


def test_what_was_handed_in_is_not_handed_in_again_and_what_came_since_is(
    box: Box, postgres: Postgres, url: str
) -> None:
    run = measure(box, 1100)
    assert hand_in(box.context).payload["entries"] == 1101
    assert hand_in(box.context).payload["entries"] == 0

    with EvidenceStore(box.context.paths.evidence) as store:
        store.reopen_run(run)
        store.add_samples(run, [replace(SAMPLE, prompt_id="later")], arm="live")

    again = hand_in(box.context).payload
    assert (again["runs"], again["entries"]) == (1, 1)
    assert samples_in(postgres, url) == (1101, 1101)
    with open_store(url, writable=False) as store:
        assert [one.outcome for one in store.runs()] == [None]


def test_old_requests_are_dropped_when_they_were_handed_in_and_then_are_not_missed(
    box: Box, postgres: Postgres, url: str
) -> None:
    ctx = box.context
    with EvidenceStore(ctx.paths.evidence) as store:
        put_small_nights(store, KEPT_SWEEPS + 3)

        def n_dropped() -> int:
            drop_old_requests(ctx, store)
            return sum(one.record.dropped is not None for one in store.runs())

        assert n_dropped() == 0, "nobody has them"
        elsewhere = {**box.variables, "TUNERD_STORE__URL": f"{url}&connect_timeout=5"}
        hand_in(Box(box.folder, elsewhere).context)
        assert n_dropped() == 0, "another database has them, as far as is known"
        hand_in(ctx)
        assert n_dropped() == 3
    assert (hand_in(ctx).payload["runs"], hand_in(ctx).payload["entries"]) == (0, 0)
    assert samples_in(postgres, url)[0] == (KEPT_SWEEPS + 3) * N_SAMPLES


def test_a_file_that_is_begun_anew_is_not_taken_for_the_one_before(
    box: Box, postgres: Postgres, url: str
) -> None:
    measure(box, 10)
    hand_in(box.context)
    box.context.paths.evidence.unlink()
    with EvidenceStore(box.context.paths.evidence) as store:
        run = store.add_run(replace(RUN, started_s=RUN.started_s + 0.5, arms=(ARM,)))
        store.add_samples(run, [replace(SAMPLE, prompt_id="new")], arm="live")
    hand_in(box.context)
    assert samples_in(postgres, url) == (11, 11)


def test_who_reads_a_store_of_an_older_tunerd_is_told_what_brings_it_up_to_date(
    box: Box, postgres: Postgres, url: str
) -> None:
    hand_in(box.context)
    postgres.query("delete from schema_versions where version > 1", name_of(url))
    with pytest.raises(HostError, match="by an older tunerd") as told:
        fleet_status(box.context)
    assert "tunerd fleet hand-in" in str(told.value.hint)
    hand_in(box.context)
    assert len(fleet_status(box.context).payload["boxes"]) == 1


def begin_hand_in(box: Box) -> Forked:
    """In a process of its own, which tells how much it has handed in."""
    return Forked(lambda tell: tell(hand_in(box.context).payload["entries"]))


def test_two_boxes_hand_in_at_the_same_moment_into_a_new_database(
    tmp_path: Path, postgres: Postgres, url: str
) -> None:
    boxes = [a_box(tmp_path / name, url) for name in ("gpu1", "gpu2", "gpu3")]
    for box in boxes:
        measure(box, 1200)
    ends = [one.end() for one in [begin_hand_in(box) for box in boxes]]
    assert ends == [(0, "1201\n")] * 3
    assert samples_in(postgres, url) == (3600, 3600)
    found = fleet_status(boxes[0].context).payload["boxes"]
    assert [(one["name"], one["runs"], one["samples"]) for one in found] == [
        ("gpu1", 1, 1200), ("gpu2", 1, 1200), ("gpu3", 1, 1200)]  # fmt: skip


@contextlib.contextmanager
def held_up(box: Box, server: Postgres, url: str, first: int = 0) -> Iterator[Forked]:
    """Handing in 1,500 which wait for a lock: in the middle of it, on any machine."""
    measure(box, 1500, first=first)
    with sa.create_engine(url).connect() as connection:
        connection.execute(sa.text("lock table entry in share mode"))
        child = begin_hand_in(box)
        waits = "select 1 from pg_locks where not granted"
        until(lambda: server.query(waits, name_of(url)) != [], "it waits")
        yield child
        connection.invalidate()


def test_samples_are_handed_in_once_each_though_the_server_crashes_or_the_command_is_killed(
    tmp_path: Path,
) -> None:
    with postgres_server() as server:
        url = server.database()
        box = a_box(tmp_path / "gpu1", url)
        hand_in(box.context)
        with held_up(box, server, url) as child:
            server.stop("immediate")
        assert child.end()[0] != 0, "it did not meet the crash"
        with pytest.raises(HostError, match="it cannot be reached"):
            hand_in(box.context)
        server.start()
        hand_in(box.context)  # its last half second was not on the disk, and may have been all
        with held_up(box, server, url, 1500) as child:
            child.kill()
        hand_in(box.context)
        assert samples_in(server, url) == (3000, 3000)


@pytest.mark.parametrize(
    "lost", [1, 2, *(pytest.param(n, marks=pytest.mark.whole) for n in (3, 4, 5))]
)
def test_nothing_comes_twice_where_the_answer_to_a_commit_was_lost(
    tmp_path: Path, postgres: Postgres, lost: int
) -> None:
    name = name_of(postgres.database())
    passfile = password_file(tmp_path)
    with Proxy(postgres.port, drop_answer_to=b"COMMIT", at=lost) as proxy:
        more = f"?passfile={passfile}&sslmode=disable"
        box = a_box(tmp_path / "gpu1", postgres.tcp_url(name, port=proxy.port, more=more))
        measure(box, 1200)
        with pytest.raises(HostError, match="shared store"):
            hand_in(box.context)
        assert proxy.n_dropped == 1
        before = samples_in(postgres, name)[0] if lost > 1 else 0
        assert hand_in(box.context).payload["entries"] <= 1201 - before
    assert samples_in(postgres, name) == (1200, 1200)
    with contextlib.suppress(FileNotFoundError):
        assert json.loads(box.context.paths.handed_in.read_text())["problem"] is None


def test_only_the_clock_of_the_database_counts(box: Box, postgres: Postgres, url: str) -> None:
    measure(box, 10)
    far = replace(box.context, clock=AheadClock(10 * 365 * 86400.0))
    hand_in(far)
    (one,) = fleet_status(replace(far, clock=AheadClock(-1e9))).payload["boxes"]
    assert 0 <= one["seen_age_s"] < 300
    assert 0 <= one["evidence_age_s"] < 300
    assert not one["is_silent"]
    postgres.query("update box set seen_at = seen_at - interval '31 minutes'", name_of(url))
    result = fleet_status(far)
    assert [one["is_silent"] for one in result.payload["boxes"]] == [True]
    assert [one.code for one in result.messages] == ["silent"]


def test_whatever_a_column_holds_the_rest_is_handed_in(box: Box, tmp_path: Path) -> None:
    sound = filled(tmp_path / "sound.db", made_runs(repeats=1))
    context = box.context
    context.paths.state_dir.mkdir(parents=True, exist_ok=True)
    with EvidenceStore(sound) as store:
        n_runs = store.count_runs()
    for column, value in (
        ("runs.kind", "a\0b"), ("runs.kind", b"\xff\xfe"), ("runs.started_s", "abc"), ("runs.head", "{bad"),
        ("samples.is_usable", "x"), ("arms.body", "[1]"),
    ):  # fmt: skip
        context.paths.box.unlink(missing_ok=True)  # another box each time
        damage(sound, context.paths.evidence, column, value, first_only=True)
        result = hand_in(context).payload
        assert result["runs"] + result["left_out"] == n_runs, (column, value)
        assert result["left_out"] <= 1
