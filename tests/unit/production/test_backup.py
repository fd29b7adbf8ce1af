"""Backups: names that sort and that systemd ignores, and which of them may go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunerd.production.records import (
    REASONS,
    Backup,
    backup_name,
    newest_first,
    parse_backup_name,
    to_prune,
)

UNIT = "llama-server.service"
AT_S = 1_778_932_800.9  # 2026-05-16 12:00:00 UTC


def backup(number: int | None, name: str | None = None, changed_s: float = 0.0) -> Backup:
    made = name or f"{UNIT}.pre-20260516T{number or 0:06d}Z-apply"
    return Backup(made, changed_s, 100, number)


def test_a_name_says_unit_moment_and_reason() -> None:
    name = backup_name(UNIT, AT_S, "apply", ())
    assert name == "llama-server.service.pre-20260516T120000Z-apply"
    found = parse_backup_name(name)
    assert found is not None
    assert (found.unit, found.stamp, found.nth, found.reason) == (
        UNIT, "20260516T120000Z", 0, "apply",
    )  # fmt: skip


def test_names_of_one_second_are_counted() -> None:
    taken: list[str] = []
    for _ in range(3):
        taken.append(backup_name(UNIT, AT_S, "rollback", taken))
    assert [name.removeprefix(f"{UNIT}.pre-20260516T120000Z") for name in taken] == [
        "-rollback", ".1-rollback", ".2-rollback",
    ]  # fmt: skip
    assert [found.nth for name in taken if (found := parse_backup_name(name))] == [0, 1, 2]


@pytest.mark.parametrize("reason", REASONS)
def test_no_name_is_one_that_systemd_loads(reason: str) -> None:
    """systemd reads files that end in a unit's suffix, and folders that end in .d and the like."""
    suffixes = (".service", ".timer", ".socket", ".d", ".wants", ".requires", ".target")
    assert not backup_name(UNIT, AT_S, reason, ()).endswith(suffixes)


@pytest.mark.parametrize(
    "name",
    [
        f"{UNIT}.pre-dflash",
        f"{UNIT}.pre-20260516",
        f"{UNIT}.pre-20260516T120000Z",
        f"{UNIT}.pre-20260516T120000Z-nonsense",
        f"{UNIT}.pre-20260516T120000Z-apply\n",
        f"{UNIT}.pre-20260516T120000Z-apply.bak",
        f"{UNIT}.pre-\uff120260516T120000Z-apply",
        f".pre-20260516T120000Z.{'9' * 5000}-apply",
        UNIT,
        "",
    ],
)
def test_a_name_that_tunerd_did_not_give_is_not_ours(name: str) -> None:
    assert parse_backup_name(name) is None


def test_ours_come_by_generation_and_then_those_made_by_hand_by_time() -> None:
    mine = [backup(None, "x.pre-mtp", 50.0), backup(None, "x.pre-old", 10.0)]
    ordered = newest_first([backup(2), mine[1], backup(10), mine[0], backup(9)])
    assert [entry.generation for entry in ordered[:3]] == [10, 9, 2]
    assert ordered[3:] == tuple(mine)


def test_retention_removes_the_oldest_of_ours_alone() -> None:
    backups = [backup(number) for number in range(1, 6)]
    by_hand = backup(None, f"{UNIT}.pre-mtp")
    assert to_prune([*backups, by_hand], keep=3, protected=()) == (
        backups[1].name, backups[0].name,
    )  # fmt: skip
    assert to_prune(backups, keep=0, protected=()) == ()
    assert to_prune(backups, keep=5, protected=()) == ()


def test_what_is_protected_stays() -> None:
    backups = [backup(number) for number in range(1, 6)]
    gone = to_prune(backups, keep=1, protected={backups[0].name, backups[2].name})
    assert gone == (backups[3].name, backups[1].name)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.integers(1, 999)), max_size=20, unique_by=lambda n: n or object()
    ),
    st.integers(0, 10),
    st.sets(st.integers(1, 999)),
)
def test_retention_never_takes_what_it_should_keep(
    numbers: list[int | None], keep: int, protected: set[int]
) -> None:
    backups = [backup(n, None if n else f"{UNIT}.pre-hand{i}") for i, n in enumerate(numbers)]
    safe = {entry.name for entry in backups if entry.generation in protected}
    gone = set(to_prune(backups, keep=keep, protected=safe))
    kept = [entry for entry in backups if entry.name not in gone]
    assert not gone & safe
    assert not [entry for entry in backups if entry.generation is None and entry.name in gone]
    if keep:
        ours = sorted((n for n in numbers if n), reverse=True)
        assert set(ours[:keep]) <= {entry.generation for entry in kept}
    else:
        assert gone == set()
