"""The intent record of a swap, and what recovery makes of one that was cut short."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunerd.production.records import (
    SCHEMA,
    Recovery,
    SwapRecord,
    decide_recovery,
    record_from_json,
)
from tunerd.records import Unreadable, plain
from tunerd.words import sha256

RECORD = SwapRecord(
    unit="llama-server.service",
    unit_path="/etc/systemd/system/llama-server.service",
    generation=7,
    reason="apply",
    old_sha256="old",
    new_sha256="new",
    backup="llama-server.service.pre-20260516T120000Z-apply",
    boot_id="boot",
    started_s=1_790_000_000.5,
    was_active=True,
    was_healthy=True,
    was_enabled=None,
    old_invocation="abc",
    link_to="/opt/units/llama-server.service",
)


def test_a_record_survives_the_disk() -> None:
    assert record_from_json(json.loads(json.dumps(plain(RECORD, schema=SCHEMA)))) == RECORD


def test_a_first_deployment_has_no_backup() -> None:
    first = replace(RECORD, old_sha256=None, backup=None)
    assert record_from_json(plain(first, schema=SCHEMA)) == first


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"generation": "seven"},
        {"unit": None},
        {"was_active": 3},
        {"started_s": "now"},
        {"old_sha256": 5},
        {"backup": None},
    ],
)
def test_a_record_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        record_from_json({**plain(RECORD, schema=SCHEMA), **change})


@pytest.mark.parametrize("field", sorted({*plain(RECORD, schema=SCHEMA)} - {"schema", "link_to"}))
def test_a_record_without_a_field_is_refused(field: str) -> None:
    data = plain(RECORD, schema=SCHEMA)
    del data[field]
    with pytest.raises(Unreadable, match=field):
        record_from_json(data)


@pytest.mark.parametrize("data", [None, [], "x", 5, {}, {"schema": 1}])
def test_any_other_json_is_refused(data: object) -> None:
    with pytest.raises(Unreadable):
        record_from_json(data)


def test_a_record_of_an_earlier_version_says_nothing_of_a_link() -> None:
    data = plain(RECORD, schema=SCHEMA)
    del data["link_to"]
    assert record_from_json(data) == replace(RECORD, link_to=None)


def test_a_field_of_a_later_version_is_no_obstacle() -> None:
    assert record_from_json({**plain(RECORD, schema=SCHEMA), "more": 1}) == RECORD


@pytest.mark.parametrize(
    ("unit", "boot", "committed", "expected"),
    [
        ("old", "boot", False, Recovery.UNTOUCHED),
        ("old", "other", False, Recovery.UNTOUCHED),
        ("new", "boot", False, Recovery.JUDGE),
        ("new", "other", False, Recovery.UNDO),
        ("hand", "boot", False, Recovery.FOREIGN),
        (None, "boot", False, Recovery.FOREIGN),
        ("new", "other", True, Recovery.COMMITTED),
        ("hand", "other", True, Recovery.COMMITTED),
        ("old", "boot", True, Recovery.UNTOUCHED),
    ],
)
def test_what_stands_decides_what_is_done(
    unit: str | None, boot: str, committed: bool, expected: Recovery
) -> None:
    found = decide_recovery(RECORD, unit_sha256=unit, boot_id=boot, is_committed=committed)
    assert found is expected


def test_a_removal_and_a_first_deployment_are_told_apart_by_absence() -> None:
    first = replace(RECORD, old_sha256=None, backup=None)
    removal = replace(RECORD, new_sha256=None)

    def decide(record: SwapRecord, unit: str | None) -> Recovery:
        return decide_recovery(record, unit_sha256=unit, boot_id="boot", is_committed=False)

    assert decide(first, None) is Recovery.UNTOUCHED
    assert decide(first, "new") is Recovery.JUDGE
    assert decide(removal, None) is Recovery.JUDGE
    assert decide(removal, "old") is Recovery.UNTOUCHED


def test_the_same_text_again_is_untouched_until_it_is_committed() -> None:
    same = replace(RECORD, new_sha256="old")
    assert (
        decide_recovery(same, unit_sha256="old", boot_id="boot", is_committed=False)
        is Recovery.UNTOUCHED
    )
    assert (
        decide_recovery(same, unit_sha256="old", boot_id="boot", is_committed=True)
        is Recovery.COMMITTED
    )


def test_an_absent_file_has_no_hash() -> None:
    assert sha256(None) is None
    assert sha256(b"") != sha256(b"x")


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
