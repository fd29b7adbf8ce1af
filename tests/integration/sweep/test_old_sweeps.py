"""What is dropped of old sweeps, what stays, and what befalls it on the way."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.support.forked import Forked
from tests.support.local_box import Box
from tests.support.lossy_disk import tiny_disk
from tests.support.made_sweep import N_SAMPLES, put_night, put_small_nights
from tests.support.needs import needs_root
from tests.support.stores import queried
from tunerd.measure.store import EvidenceStore
from tunerd.sweep.record import KEPT_SWEEPS, drop_old_requests, history_of

OLD = 60
KILLS = 4


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nights") / "evidence.db"
    with EvidenceStore(path) as store:
        put_small_nights(store, OLD + KEPT_SWEEPS)
    return path


def with_nights(box: Box, nights: Path) -> Box:
    box.context.paths.state_dir.mkdir(exist_ok=True)
    shutil.copy(nights, box.context.paths.evidence)
    return box


@pytest.fixture
def box(tmp_path: Path, nights: Path) -> Box:
    return with_nights(Box(tmp_path), nights)


def tidied(box: Box) -> None:
    with EvidenceStore(box.context.paths.evidence) as store:
        drop_old_requests(box.context, store)


def test_of_an_old_sweep_stay_its_verdict_its_figures_its_counts_and_what_its_pairs_spent(
    box: Box,
) -> None:
    with EvidenceStore(box.context.paths.evidence) as store:
        spent = history_of(store, "other", 0)
        before = store.runs()
        drop_old_requests(box.context, store)

        assert history_of(store, "other", 0) == spent
        assert [(one.n_samples, one.n_unusable) for one in store.runs()] == [(N_SAMPLES, 0)] * len(
            before
        )
        first = store.runs()[-1].record
        assert first.dropped is not None
        assert store.samples(1) == ()
        assert [event["pair"] for event in store.sweep_events(1)] == [[1, 1]]
        assert [one.sentence for one in store.verdicts(2)] == ["what serves stays"]
        assert [one.name for one in store.summaries(1)] == ["sweep plan"]
        (kept,) = (one for one in store.runs() if one.number == OLD + 1)
        assert kept.record.dropped is None
        assert len(store.samples(kept.number)) == N_SAMPLES
        assert len(store.sweep_events(kept.number)) == 3
    shown = box.json("results", "show", "1")
    assert [one["code"] for one in shown["messages"]] == ["requests-dropped"]
    assert shown["run"]["samples"] == N_SAMPLES


def test_a_real_night_without_its_requests_is_shown_as_before(box: Box) -> None:
    """By what its end had stored, but for the samples."""
    with EvidenceStore(box.context.paths.evidence) as store:
        number = put_night(box.context, store, 0.0)
    before = box.json("sweep", "show", str(number))
    size = sum(queried(box.context.paths.evidence, _SIZES, number)[0])
    with EvidenceStore(box.context.paths.evidence) as store:
        store.drop_requests(next(one for one in store.runs() if one.number == number))
    after = box.json("sweep", "show", str(number))
    assert [one["code"] for one in after["messages"]] == ["requests-dropped"]
    assert {**after, "messages": []} == {**before, "messages": []}
    assert sum(queried(box.context.paths.evidence, _SIZES, number)[0]) < size / 4
    box.call("report", str(number), "-o", str(box.folder / "o.html"))
    assert (box.folder / "o.html").exists()


_SIZES = "SELECT sum(length(body)) FROM entry WHERE run_id = ?"


@needs_root
def test_a_disk_that_is_nearly_full_is_not_filled_to_make_the_file_smaller(
    tmp_path: Path, nights: Path
) -> None:
    box = Box(tmp_path)
    with tiny_disk(box.context.paths.state_dir, "20m"):
        tidied(with_nights(box, nights))
        assert queried(box.context.paths.evidence, "PRAGMA freelist_count") > [(500,)]


def test_nothing_is_dropped_where_all_is_to_be_kept_and_few_pages_wait_for_what_comes_next(
    box: Box,
) -> None:
    path = box.context.paths.evidence
    before = path.stat().st_size
    box.configure("[sweep]\nkeep_days = 0\n")
    tidied(box)
    assert (queried(path, "PRAGMA freelist_count"), path.stat().st_size) == ([(0,)], before)
    box.configure(f"[sweep]\nkeep_days = {(OLD + KEPT_SWEEPS // 2 - 2) * 30}\n")
    tidied(box)
    with EvidenceStore(path) as store:
        assert [one.number for one in store.runs() if one.record.dropped is not None] == [2, 1]
    assert queried(path, "PRAGMA freelist_count")[0][0] > 0
    box.configure("")
    tidied(box)
    assert queried(path, "PRAGMA freelist_count") == [(0,)]
    assert path.stat().st_size < 0.6 * before, "space is given back to the disk"


def test_a_kill_at_any_moment_leaves_each_sweep_whole_or_without_its_requests(box: Box) -> None:
    chance = Random(3)
    path, dropped = box.context.paths.evidence, set[int]()
    for _ in range(KILLS):
        process = Forked(lambda _: tidied(box))
        time.sleep(chance.uniform(0.0, 0.8))
        process.kill()
        with EvidenceStore(path) as store:  # whose check finds damage
            gone = {one.number for one in store.runs() if one.record.dropped is not None}
            assert dropped <= gone
            dropped = gone
            for run in store.runs():
                is_gone = run.number in gone
                n_kept = len(store.samples(run.number)), len(store.sweep_events(run.number))
                assert n_kept == ((0, 1) if is_gone else (N_SAMPLES, 3))
                assert run.n_samples == N_SAMPLES
    tidied(box)
    with EvidenceStore(path) as store:
        assert sum(one.record.dropped is not None for one in store.runs()) == OLD


@needs_root
def test_a_full_disk_costs_no_sweep_and_nothing_that_is_stored(
    tmp_path: Path, nights: Path
) -> None:
    box = Box(tmp_path)
    state = box.context.paths.state_dir
    with tiny_disk(state, "32m"):
        with_nights(box, nights)
        with EvidenceStore(box.context.paths.evidence) as store:
            store.runs()
            with contextlib.suppress(OSError), (state / "filler").open("wb", 0) as filler:
                while True:
                    filler.write(bytes(4096))
            told = list[str]()
            ctx = replace(box.context, progress=lambda one: told.append(one.text))
            drop_old_requests(ctx, store)
            assert "the disk is full" in told[-1]
            for run in store.runs():
                n = 0 if run.record.dropped is not None else N_SAMPLES
                assert len(store.samples(run.number)) == n
            (state / "filler").unlink()
            drop_old_requests(ctx, store)
            assert sum(one.record.dropped is not None for one in store.runs()) == OLD
