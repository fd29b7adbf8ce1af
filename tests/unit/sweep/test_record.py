"""What is kept of a sweep: what its page says, and what follows a rollback by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.fault.scenarios import ARM, TUNED, deploy
from tests.fault.world import World
from tunerd.app import Context
from tunerd.measure.evidence import Dropped, RunRecord, StoredRun, VerdictRecord
from tunerd.measure.store import EvidenceStore
from tunerd.production.rollback import rollback
from tunerd.profile.arm import Arm
from tunerd.profile.files import (
    failed_arms,
    failure_of,
    remember_failure,
    take_back_tuned,
    write_tuned,
)
from tunerd.records import plain
from tunerd.sweep.record import KEPT_SWEEPS, beyond_keeping, find_sweep, keep_decision, page_of
from tunerd.web.view import sweep_section


def _promoted(world: World, sweep: int = 1) -> Context:
    """What a sweep found serves, in the place of another."""
    ctx = world.context()
    deploy(ctx, world, "old", "tuned", profile="night")
    write_tuned(ctx, replace(TUNED, sweep=sweep, generation=2))
    return ctx


def test_a_rollback_is_done_though_nothing_can_be_kept_of_it(world: World) -> None:
    ctx = _promoted(world)
    (ctx.paths.tuned_dir / "night.failed.json").write_bytes(b"damaged" * 1000)

    done = rollback(ctx, to=None, drain=False)

    assert world.serving_alias() == "old"
    assert ctx.deployed() is not None
    (told,) = (one.text for one in done.messages if one.code == "tuned")
    assert "may still be in force" in told


def test_what_became_of_a_proposal_is_known_though_nobody_lived_to_keep_it(world: World) -> None:
    """One that serves was offered again, and could be declined; one that was rolled back could not be promoted again."""
    world.paths.evidence.parent.mkdir(parents=True, exist_ok=True)
    with EvidenceStore(world.paths.evidence) as store:
        number = store.add_run(replace(_sweep(1).record, profile="night"))
        verdict = VerdictRecord(
            outcome="promote", sentence="", arm_a="", details={"arm": plain(ARM)}
        )
        store.add_verdict(number, verdict)

    ctx = _promoted(world, number)
    assert _decided(ctx) == ("promoted", 2)
    keep_decision(ctx, number, {"what": "promoted", "generation": 2, "text": ""})

    rollback(ctx, to=None, drain=False)
    assert _decided(ctx) == ("rolled back", None)
    rollback(ctx, to=None, drain=False)
    assert _decided(ctx) == ("promoted", 2)
    take_back_tuned(ctx, "night", number, ARM, None, "it died")
    assert _decided(ctx) == ("taken back", None)


def _decided(ctx: Context) -> tuple[str, int | None]:
    with EvidenceStore(ctx.paths.evidence) as store:
        decision = find_sweep(ctx, store, None).decision or {}
    return decision["what"], decision.get("generation")


def test_a_fill_whose_length_was_found_by_asking_is_no_failure_of_its_arm() -> None:
    told = [
        {"event": "request", "arm": plain(ARM), "purpose": purpose, "failure": failure}
        for purpose, failure in (("fill", "refused"), ("fill", "oom"), ("block", "refused"))
    ]
    page = page_of(told, {})
    assert {(one["failure"], one["n"]) for one in page["failures"]} == {("oom", 1), ("refused", 1)}


def test_what_a_token_took_is_told_of_each_configuration_by_whole_answers_of_the_workload() -> None:
    """`what serves took` was over all that it was asked, tool calls and long prompts too, and beside other limits no like."""

    def asked(purpose: str, energy_j: float | None, n: int, **told: Any) -> dict[str, Any]:
        answer = {"energy_j": energy_j, "predicted_n": n, **told}
        return {"event": "request", "arm": plain(ARM), "purpose": purpose, "answer": answer}

    told = [
        asked("block", 50.0, 100), asked("block", 30.0, 100), asked("block", None, 100),
        asked("block", 90.0, 100, decode_left_ms=10.0), asked("tool", 90.0, 1), asked("prefix", 90.0, 1),
        {"event": "request", "arm": plain(ARM), "purpose": "block", "failure": "refused"},
    ]  # fmt: skip
    named = {
        "arms": [{"arm": plain(one)} for one in (ARM.canonical(), replace(ARM, engine="other"))]
    }
    page = page_of(told, named)
    assert [one["joules_per_token"] for one in page["arms"]] == [0.4, None]

    rows = [
        {
            "case": "x",
            "limit_w": 150.0,
            "rounds": 3,
            "turn_s": 1.0,
            "tok_s": 50.0,
            "joules_per_token": 0.256,
        }
    ]
    power = {"rows": rows, "text": "no limit takes less", "reasons": ["the driver refused 180 W"]}
    section = sweep_section(7, {**page, "arms": []}, {"power": power})
    assert section.text.endswith("Power limits: no limit takes less; the driver refused 180 W.")
    assert section.tables[0].rows == (("x", "150", "3", "1.00", "50.0", "0.26"),)


def test_what_a_token_took_is_of_the_drafts_in_force_and_of_answers_as_long_as_those_of_others() -> (
    None
):
    """Without drafts a night asks for 128 tokens, among which the same prompt weighs four times as much."""
    off, many = ARM, replace(ARM, spec="mtp", n_max=4, p_min=0.0)
    few = replace(many, n_max=1, p_min=0.5)

    def asked(arm: Arm, energy_j: float, n: int, **told: Any) -> dict[str, Any]:
        answer = {"energy_j": energy_j, "predicted_n": n}
        usual = {"event": "request", "arm": plain(arm), "purpose": "block", "answer": answer}
        return {**usual, "n_max": arm.n_max, "p_min": arm.p_min, **told}

    events = [
        asked(many, 50.0, 100),
        asked(many, 90.0, 100, n_max=1, p_min=0.5),
        asked(off, 90.0, 30),
    ]
    named = {"arms": [{"arm": plain(one.canonical())} for one in (many, few, off)]}

    def told(events: list[dict[str, Any]]) -> list[float | None]:
        return [one["joules_per_token"] for one in page_of(events, named)["arms"]]

    assert told(events) == [0.5, 0.9, None]
    assert told([*events, asked(off, 60.0, 100, pair=[1, 1])]) == [0.5, 0.9, 0.6]
    assert told(events[-1:]) == [None, None, 3.0]


_DAY_S = 86400.0


def _sweep(number: int, **changes: Any) -> StoredRun:
    """A sweep a day, by its number; it took a minute."""
    record = RunRecord(kind="sweep", suites=(), started_s=number * _DAY_S, target="a box")
    made = StoredRun(number, record, None, number * _DAY_S + 60.0, None, 9, 0)
    return replace(made, **changes)


def _gone(
    runs: list[StoredRun], *, days: int = 100, handed_in_s: float | None = None, sends: bool = False
) -> list[int]:
    found = beyond_keeping(runs[::-1], days, handed_in_s=handed_in_s, sends=sends)
    return [one.number for one in found]


def test_requests_of_a_sweep_go_when_it_is_old_by_the_newest_and_many_came_since() -> None:
    nights = [_sweep(number) for number in range(200)]
    assert _gone(nights) == list(range(74, -1, -1)), (
        "75 was begun 100 days before the middle one of the newest"
    )
    assert _gone(nights, days=10) == list(range(200 - KEPT_SWEEPS - 1, -1, -1))
    assert _gone(nights, days=0) == [], "0 keeps all"
    assert _gone([_sweep(10 * number) for number in range(KEPT_SWEEPS)]) == []


@pytest.mark.parametrize("started_s", [0.0, 4e9])
def test_a_clock_that_was_wrong_for_some_nights_drops_and_keeps_no_others(started_s: float) -> None:
    """One that was years ahead for one sweep dropped the requests of all but the newest 50."""
    nights = [_sweep(number) for number in range(200)]
    right = _gone(nights)
    for number in (180, 198, 199):
        record = replace(nights[number].record, started_s=started_s)
        nights[number] = replace(nights[number], record=record)
    assert set(right) ^ set(_gone(nights)) <= {72, 73, 74}


def test_requests_go_once() -> None:
    nights = [_sweep(number) for number in range(200)]
    nights[3] = replace(nights[3], record=replace(nights[3].record, dropped=Dropped(9, 0)))
    assert 3 not in _gone(nights)


@pytest.mark.parametrize(
    ("handed_in_s", "ended_s", "goes"),
    [(None, 60.0, False), (59.0, 60.0, False), (61.0, 60.0, True), (1e12, None, False)],
    ids=["never handed in", "before its end", "after its end", "cut short"],
)
def test_requests_that_others_wait_for_stay_until_they_were_handed_in(
    handed_in_s: float | None, ended_s: float | None, *, goes: bool
) -> None:
    nights = [_sweep(0, ended_s=ended_s), *(_sweep(number) for number in range(150, 210))]
    assert (0 in _gone(nights, handed_in_s=handed_in_s, sends=True)) is goes
    assert 0 in _gone(nights)


def test_what_cannot_be_read_of_arms_that_failed_is_passed_over_and_said(world: World) -> None:
    """It ended the next sweep, and the probation that found another such arm, in a traceback."""
    said: list[str] = []
    ctx = replace(world.context(), progress=lambda told: said.append(told.text))
    remember_failure(ctx, "night", ARM, None, "it died")
    path = ctx.paths.tuned_dir / "night.failed.json"
    (row,) = json.loads(path.read_text())["failed"]
    for rows in ([5, {**row, "failed_s": "soon"}, {**row, "arm": {"of": "tomorrow"}}, row], [row]):
        path.write_text(json.dumps({"failed": rows}))
        assert [arm for arm, _ in failed_arms(ctx, "night", {ARM.engine: None})] == [ARM]
    assert said == [f"3 rows of `{path}` cannot be read, and count for nothing"]
    path.write_text('{"failed": 7}')
    remember_failure(ctx, "night", ARM, None, "it died")
    assert failure_of(ctx, "night", ARM) is not None
