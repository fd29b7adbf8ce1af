"""The intent record of a swap, what recovery makes of one that was cut short, and the order of backups."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fault.scenarios import deploy
from tests.fault.world import UNIT, World, a_record
from tunerd.production.journal import (
    SCHEMA,
    Recovery,
    backups,
    decide_recovery,
    new_backup_name,
    record_from_json,
)
from tunerd.records import Unreadable, plain

RECORD = a_record(
    old_sha256="old", new_sha256="new", boot_id="boot", link_to="/opt/units/llama-server.service"
)


@pytest.mark.parametrize(
    "change",
    [{"schema": 2}, {"generation": "seven"}, {"unit": None}, {"old_sha256": 5}, {"backup": None}],
)
def test_a_record_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        record_from_json({**plain(RECORD, schema=SCHEMA), **change})


def test_a_record_survives_the_disk_also_of_an_earlier_and_of_a_later_version() -> None:
    data = {**json.loads(json.dumps(plain(RECORD, schema=SCHEMA))), "more": 1}
    assert record_from_json(data) == RECORD
    del data["link_to"]
    assert record_from_json(data) == replace(RECORD, link_to=None)


FIRST, REMOVAL = {"old_sha256": None, "backup": None}, {"new_sha256": None}


@pytest.mark.parametrize(
    ("change", "unit", "boot", "committed", "expected"),
    [
        ({}, "old", "boot", False, Recovery.UNTOUCHED),
        ({}, "old", "other", False, Recovery.UNTOUCHED),
        ({}, "new", "boot", False, Recovery.JUDGE),
        ({}, "new", "other", False, Recovery.UNDO),
        ({}, "hand", "boot", False, Recovery.FOREIGN),
        ({}, None, "boot", False, Recovery.FOREIGN),
        ({}, "new", "other", True, Recovery.COMMITTED),
        ({}, "hand", "other", True, Recovery.COMMITTED),
        ({}, "old", "boot", True, Recovery.UNTOUCHED),
        (FIRST, None, "boot", False, Recovery.UNTOUCHED),
        (FIRST, "new", "boot", False, Recovery.JUDGE),
        (REMOVAL, None, "boot", False, Recovery.JUDGE),
        (REMOVAL, "old", "boot", False, Recovery.UNTOUCHED),
        ({"new_sha256": "old"}, "old", "boot", False, Recovery.UNTOUCHED),
    ],
)
def test_what_stands_decides_what_is_done(
    change: dict[str, Any], unit: str | None, boot: str, committed: bool, expected: Recovery
) -> None:
    record = replace(RECORD, **change)
    found = decide_recovery(record, unit_sha256=unit, boot_id=boot, is_committed=committed)
    assert found is expected


HASHES = st.sampled_from([None, "a", "b", "c"])


@settings(max_examples=100, deadline=None)
@given(HASHES, HASHES, HASHES, st.booleans(), st.booleans())
def test_a_person_s_edit_is_never_undone(
    old: str | None, new: str | None, now: str | None, same_boot: bool, committed: bool
) -> None:
    record = replace(RECORD, old_sha256=old, new_sha256=new)
    boot = "boot" if same_boot else "other"
    found = decide_recovery(record, unit_sha256=now, boot_id=boot, is_committed=committed)
    if now not in {old, new}:
        assert found in {Recovery.FOREIGN, Recovery.COMMITTED}
    if found is Recovery.UNDO:
        assert now == new
        assert not same_boot


def test_backups_come_newest_first_before_those_by_hand_and_are_counted_in_a_second(
    world: World,
) -> None:
    ctx, folder = world.context(), world.paths.unit_dir
    (folder / f"{UNIT}.pre-mtp").write_bytes(b"")
    deploy(ctx, world, "one", "two", "three")
    names = []
    for _ in range(3):
        names.append(new_backup_name(ctx, "rollback"))
        (folder / names[-1]).write_bytes(b"")

    found = backups(ctx)

    assert [one.generation for one in found] == [3, 2, None, None, None, None]
    assert {one.name for one in found[2:]} == {f"{UNIT}.pre-mtp", *names}
    stamp = names[0].removesuffix("-rollback")
    assert names[1:] == [f"{stamp}.1-rollback", f"{stamp}.2-rollback"]


def test_a_backup_that_goes_away_while_they_are_looked_at_is_none(world: World) -> None:
    ctx, over = world.context(), threading.Event()
    paths = [world.paths.unit_dir / f"{UNIT}.pre-{number}" for number in range(30)]

    def come_and_go() -> None:
        while not over.is_set():
            for path in paths:
                path.touch()
            for path in paths:
                path.unlink()

    coming = threading.Thread(target=come_and_go)
    coming.start()
    try:
        found = [len(backups(ctx)) for _ in range(2000)]
    finally:
        over.set()
        coming.join()
    assert max(found) <= len(paths)
