"""The evidence store when the world is against it: kills, full disks, damage, other owners."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.measure.test_store import RUN
from tests.integration.measure.test_store import SAMPLE as PLAIN
from tests.support.folders import DATA
from tests.support.forked import Forked
from tests.support.lossy_disk import LossyDisk, tiny_disk
from tests.support.needs import needs_root
from tests.support.programs import ProgramFailed, program
from tests.support.stores import filled, open_store, queried, written
from tests.support.synthetic_runs import made_runs
from tunerd.errors import HostError
from tunerd.measure.store import STEPS, EvidenceStore, open_to_read

OLD_STORE = DATA / "state-0.1/evidence.sql"
KILLS = 6
SAMPLE = replace(PLAIN, details={"filler": list(range(300))})


def _start_writer(place: str | Path) -> Forked:
    """It tells `N 0` when run N is stored, and `N K` when it holds K samples."""

    def write(tell: Callable[[object], None]) -> None:
        store = open_store(str(place))
        while True:
            run, n = store.add_run(RUN), 0
            tell(f"{run} {n}")
            for batch in (1, 7, 1, 40):
                store.add_samples(run, [SAMPLE] * batch, arm="live")
                n += batch
                tell(f"{run} {n}")

    return Forked(write)


def _acknowledged(said: str) -> dict[int, int]:
    """How many samples of each run the writer was told to be stored; the last line may be cut."""
    found: dict[int, int] = {}
    for line in said.splitlines()[: -1 if not said.endswith("\n") else None]:
        run, n = line.split()
        found[int(run)] = int(n)
    return found


def test_nothing_that_was_acknowledged_is_lost_by_kills(place: str) -> None:
    chance = random.Random(3)
    expected: dict[int, int] = {}
    for _ in range(KILLS):
        writer = _start_writer(place)
        first = writer.told.readline()
        time.sleep(chance.uniform(0, 0.15))
        expected |= _acknowledged(first + writer.kill())
        with open_store(place) as store:  # the quick check of a file finds damage
            stored = {run.number: run.n_samples for run in store.runs()}
        for run, n in expected.items():
            # What was under way may be there or not, but only as a whole.
            assert stored[run] in {n, n + 1, n + 7, n + 40}, run
    assert len(expected) >= KILLS


@needs_root
def test_a_full_disk_is_said_and_what_was_stored_can_still_be_read(tmp_path: Path) -> None:
    path, n = tmp_path / "tiny/evidence.db", 0
    with tiny_disk(path.parent, "1m"), EvidenceStore(path) as store:
        run = store.add_run(RUN)
        with pytest.raises(HostError) as caught:  # noqa: PT012  which call it is, is open
            for _ in range(100):
                store.add_samples(run, [SAMPLE] * 40, arm="live")
                n += 40
        assert "the disk is full" in caught.value.message
        assert caught.value.hint is not None
        assert str(path.parent) in caught.value.hint
        assert 0 < n < 4000
        assert len(store.samples(run)) == n
        with EvidenceStore(path, writable=False) as reader:
            assert len(reader.samples(run)) == n


@needs_root
def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path) -> None:
    disk = LossyDisk(tmp_path, size_mib=64)
    try:
        disk.create()
    except ProgramFailed as error:
        pytest.skip(f"cannot mount a disk here: {error}")
    try:
        path = disk.mount_point / "evidence.db"
        with EvidenceStore(path):
            program("sync", "--file-system", disk.mount_point)  # the file itself is made once
        writer = _start_writer(path)
        said = "".join(writer.told.readline() for _ in range(12))
        said += writer.kill()
        disk.cut()
        with EvidenceStore(path) as store:
            stored = {run.number: run.n_samples for run in store.runs()}
        for run, n in _acknowledged(said).items():
            assert stored[run] in {n, n + 1, n + 7, n + 40}, run
    finally:
        disk.remove()


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "no database": lambda _whole: b"This is no database, " * 1000,
    "no text": lambda whole: whole.replace(b"CREATE TABLE entry", b"CREATE \xc3\xc3BLE entry"),
    "overwritten pages": lambda whole: whole[:8192] + os.urandom(16384) + whole[24576:],
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "cut within its last page": lambda whole: whole[:-100],
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_store_is_refused_with_a_way_out_that_works(tmp_path: Path, kind: str) -> None:
    path = filled(tmp_path / "evidence.db", made_runs(repeats=1))
    path.write_bytes(DAMAGED[kind](path.read_bytes()))
    for writable in (True, False):
        with pytest.raises(HostError) as caught:
            EvidenceStore(path, writable=writable)
        assert caught.value.message == f"the evidence store is damaged: `{path}`"
    command = (caught.value.hint or "").splitlines()[-1]
    subprocess.run(["sh", "-euc", command], check=True)  # noqa: S607  what a person would type
    with EvidenceStore(path) as store:
        assert store.count_runs() == 0
    assert (tmp_path / "damaged-evidence.db" / "evidence.db").exists()


def test_a_reader_is_not_kept_from_what_is_whole_and_is_told_of_what_is_not(tmp_path: Path) -> None:
    path = filled(tmp_path / "evidence.db", made_runs(repeats=1))
    whole = path.read_bytes()
    middle = len(whole) // 8192 * 4096
    path.write_bytes(whole[:middle] + os.urandom(8192) + whole[middle + 8192 :])
    store = open_to_read(path)
    assert store is not None
    with store:
        assert store.count_runs()
        with pytest.raises(HostError, match="the evidence store is damaged"):
            [store.evidence(run) for run in store.runs()]


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "evidence.db"
    queried(path, "create table bookmarks (url text)")
    before = path.read_bytes()
    with pytest.raises(HostError, match="of another program"):
        EvidenceStore(path)
    assert queried(path, "select name from sqlite_master") == [("bookmarks",)]
    assert len(path.read_bytes()) == len(before)


def test_a_store_of_a_newer_tunerd_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "evidence.db", made_runs(repeats=1))
    queried(path, "insert into schema_versions values (?, 'tunerd 9.9')", max(STEPS) + 1)
    for writable in (True, False):
        with pytest.raises(HostError, match="written by a newer tunerd"):
            EvidenceStore(path, writable=writable)


def test_an_older_store_is_migrated_once_when_several_open_it(tmp_path: Path) -> None:
    path = written(tmp_path / "old.db", OLD_STORE)
    with pytest.raises(HostError, match="by an older tunerd"):
        EvidenceStore(path, writable=False)
    openers = [_start_writer(path) for _ in range(3)]
    for opener in openers:
        assert opener.told.readline()
        opener.kill()
    versions = queried(path, "select version from schema_versions order by 1")
    assert versions == [(3,), (max(STEPS),)]
