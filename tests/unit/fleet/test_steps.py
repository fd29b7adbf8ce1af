"""What a rollout does next, by its journal and by what a box said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tunerd import errors
from tunerd.fleet.steps import (
    Change,
    Preview,
    Rollout,
    State,
    Status,
    Step,
    Told,
    Watched,
    deployed,
    exit_code,
    failed,
    judged,
    name_of_hosts,
    not_returned,
    planned,
    settled,
    to_return,
)
from tunerd.records import plain, read

DIFF = "--- a\n+++ b\n@@\n same\n-    --n-max 4 \\\n+    --n-max 2 \\\n"
GPU1 = Step("gpu1")
NEW, SAME = Preview(messages=[], diff=DIFF), Preview(messages=[], diff="")
TOLD = Step("gpu1", State.APPLYING, newest=4)


def a_status(
    newest: int | None = 4,
    *,
    serving: int | None = None,
    reason: str = "apply",
    outcome: str = "serving",
    drift: tuple[str, ...] = (),
    healthy: bool | None = True,
    back_to: int | None = None,
) -> Status:
    swap: Any = newest and {
        "number": newest, "reason": reason, "outcome": outcome, "detail": "out of VRAM",
        "replaced": "llama-server.service.pre-apply-1", "from_generation": back_to,
    }  # fmt: skip
    return Status.model_validate(
        {"messages": [], "generation": newest if serving is None else serving, "healthy": healthy,
         "change_under_way": False, "last_swap": swap, "drift": [{"code": one} for one in drift]}
    )  # fmt: skip


def a_rollout(*steps: Step) -> Rollout:
    return Rollout(1, "apply", ("--", "night"), 0.0, steps)


def plan(
    preview: Preview = SAME, shown: str = "", *, of: Step = GPU1, status: Status | None = None
) -> Step:
    return planned(of, status or a_status(), preview, shown)


def of_lines(*lines: str) -> Preview:
    return Preview(messages=[], diff="\n".join(("--- a", "+++ b", "@@", *lines)))


def test_what_serves_there_already_is_passed_over() -> None:
    assert plan().state is State.SKIPPED
    none = Preview(messages=[], diff="", nothing="sweep 3 proved no winner")
    assert plan(none).text == "sweep 3 proved no winner"
    found = plan(NEW, "hash")
    assert (found.state, found.newest, found.shown) == (State.WAITING, 4, "hash")
    assert found.text == "- --n-max 4; + --n-max 2"
    assert "--shown=hash" in a_rollout().change(found)


def test_a_box_that_is_measured_is_passed_over_where_its_server_comes_back() -> None:
    serves_nothing = a_status(healthy=None)

    def measured(*, restores: bool, is_owed: bool) -> Status:
        lease = {"restores": restores, "is_owed": is_owed, "id": "x"}
        return Status.model_validate(serves_nothing.model_dump() | {"measurement": lease})

    assert plan(status=measured(restores=True, is_owed=False)).state is State.SKIPPED
    for status in (serves_nothing, measured(restores=False, is_owed=False), measured(restores=True, is_owed=True)):  # fmt: skip
        with pytest.raises(errors.HostError, match="it is not well"):
            plan(status=status)


def test_what_a_journal_keeps_of_a_unit_has_none_of_its_secrets() -> None:
    unit = of_lines("-Environment=HF_TOKEN=hush1", "-    --jinja --api-key hush2 \\", "-    --api-key \\",
                    "-    hush3 \\", "+    --hf-token=hush4")  # fmt: skip
    assert plan(unit, "hash").text == (
        "- Environment=HF_TOKEN=...; - --jinja --api-key ...; - --api-key; - ...; + --hf-token=..."
    )


def test_what_is_planned_otherwise_than_before_says_so() -> None:
    before = plan(NEW, "hash")
    assert plan(NEW, "hash", of=before).text == before.text
    after = plan(NEW, "another", of=before)
    assert after.text == f"not what was planned before: {before.text}"


def test_a_difference_that_is_too_long_to_be_shown_says_so() -> None:
    text = plan(of_lines(*(f"+    --flag-{n:02} value \\" for n in range(41))), "hash").text
    assert text.startswith("41 lines: + --flag-00 value; ")
    assert text.endswith("...")
    assert GPU1.at(State.DONE, "x" * 600).text.endswith("x...")


SETTLED = [
    (a_status(4), NEW, State.REFUSED),
    (a_status(5), SAME, State.WATCHED),
    (a_status(5, serving=4, outcome="rolled back"), NEW, State.WENT_BACK),
    (a_status(5, serving=4, outcome="running"), NEW, State.APPLYING),
    (a_status(5, serving=4, outcome="stranded", healthy=False), NEW, State.STRANDED),
    (a_status(5, serving=4, outcome="stranded", healthy=None), NEW, State.STRANDED),
    (a_status(5, serving=4, outcome="stranded"), NEW, State.WENT_BACK),
    (a_status(5), NEW, State.LEFT),
    (a_status(6, reason="guard", back_to=4), NEW, State.WENT_BACK),
    (a_status(7, reason="guard", back_to=5), SAME, State.LEFT),
    (a_status(6, reason="guard"), NEW, State.LEFT),
    (a_status(5, reason="guard", back_to=3), NEW, State.LEFT),
    (a_status(5, reason="rollback"), SAME, State.LEFT),
    (a_status(5, drift=("unit-edited",)), SAME, State.LEFT),
]


def test_what_came_of_a_box_that_gave_no_answer_is_seen_from_what_serves() -> None:
    for status, preview, state in SETTLED:
        found = settled(a_rollout(TOLD), TOLD, status, preview)
        assert found.state is state, status
        assert found.generation == (5 if state is State.WATCHED else None)
    fresh = Step("gpu1", State.APPLYING)
    assert settled(a_rollout(fresh), fresh, a_status(None), NEW).state is State.REFUSED
    assert settled(a_rollout(fresh), fresh, a_status(1), SAME).state is State.WATCHED


@pytest.mark.parametrize(
    ("error", "on_the_way", "code", "on_the_way_back"),
    [
        (errors.RolledBack("out of VRAM"), State.WENT_BACK, 3, State.WATCHED),
        (errors.Busy("another change"), State.REFUSED, 1, State.WATCHED),
        (errors.DeployError("masked"), State.REFUSED, 1, State.WATCHED),
        (errors.Stranded("nothing serves"), State.STRANDED, 4, State.RETURNING),
        (errors.Interrupted("by a signal"), State.APPLYING, 4, State.RETURNING),
        (errors.HostError("it cannot be asked"), State.REFUSED, 1, State.RETURNING),
    ],
)
def test_a_boxes_own_error_says_how_it_is(
    error: errors.TunerdError, on_the_way: State, code: int, on_the_way_back: State
) -> None:
    """Where it says that it did not go back, it serves what was deployed."""
    found = failed(TOLD, error)
    assert (found.state, exit_code(found)) == (on_the_way, code)
    deployed_to, told = Step("gpu1", State.DONE), Step("gpu1", State.RETURNING)
    assert not_returned(deployed_to, error, is_told=True).state is on_the_way_back
    assert not_returned(deployed_to, error, is_told=False).state is State.WATCHED
    for is_told in (True, False):
        again = not_returned(told, error, is_told=is_told)
        assert again.state is State.RETURNING, "it may still be at it"


def a_change(code: int = 0, *told: str, backup: str | None = "before") -> Change:
    messages = [Told(level=level, code="no-probation", text="no probation") for level in told]
    return Change(messages=messages, exit_code=code, generation=5, backup=backup, summary="done")


def test_a_promotion_that_the_box_took_back_itself_is_no_deployment() -> None:
    states = {0: State.WATCHED, 3: State.WENT_BACK, 1: State.LEFT, 255: State.APPLYING, -1: State.APPLYING}  # fmt: skip
    found = {code: deployed(a_rollout(), TOLD, a_change(code)).state for code in states}
    assert found == states


def test_a_box_is_done_without_a_probation_only_where_none_is_wanted() -> None:
    rollout, unwatched = a_rollout(), replace(a_rollout(), probation=False)
    assert deployed(unwatched, TOLD, a_change()).state is State.DONE
    assert deployed(rollout, TOLD, a_change(backup=None)).state is State.DONE
    assert deployed(rollout, TOLD, a_change(0, "note")).state is State.DONE
    watched = deployed(rollout, TOLD, a_change(0, "warning"))
    assert watched.state is State.WATCHED, "its record could not be written"
    assert judged(watched, None).state is State.LEFT
    assert settled(unwatched, TOLD, a_status(5), SAME).state is State.DONE


def test_a_probation_decides_about_its_box() -> None:
    step = Step("gpu1", State.WATCHED, generation=5)
    states = {
        "passed": State.DONE,
        **dict.fromkeys(("running", "paused", "cut", "something new"), State.WATCHED),
        "taken back": State.WENT_BACK,
        "worse": State.STRANDED,
        "ended": State.LEFT,
    }
    for told, state in states.items():
        watched = Watched(generation=5, state=told, reason="", left_s=1.0)
        assert judged(step, watched).state is state, told


def test_only_what_the_rollout_deployed_is_returned() -> None:
    done = Step("gpu1", State.DONE, generation=5)
    assert to_return(done, a_status(5)) is done
    assert to_return(done, a_status(6)).state is State.LEFT
    assert to_return(done, a_status(5, drift=("unit-edited",))).state is State.LEFT
    assert to_return(done, a_status(6, reason="rollback")).state is State.LEFT, "somebody else did"
    told = Step("gpu1", State.RETURNING, generation=5)
    assert to_return(told, a_status(6, reason="rollback")).state is State.RETURNED
    assert to_return(told, a_status(5)) is told
    failed_since = a_status(7, serving=6, reason="rollback", outcome="rolled back")
    assert to_return(told, failed_since).state is State.LEFT, "what another deployed serves there"


def test_the_order_of_return_is_the_other_way_round() -> None:
    rollout = a_rollout(
        Step("a", State.DONE), Step("b", State.SKIPPED), Step("c", State.WATCHED),
        Step("d", State.WENT_BACK), Step("e"),
    )  # fmt: skip
    assert [one.box for one in rollout.to_return()] == ["c", "a"]
    assert [one.box for one in rollout.to_do()] == ["e"]
    assert rollout.exit_code == 3
    assert read(Rollout, plain(rollout, schema=1), schema=1) == rollout


def test_a_way_back_ends_well_where_all_that_was_deployed_is_returned() -> None:
    rollout = a_rollout(
        Step("a", State.DONE, generation=5), Step("b", State.LEFT, generation=6),
        Step("c", State.LEFT), Step("d", State.WENT_BACK), Step("e", State.REFUSED), Step("f"),
    )  # fmt: skip
    assert rollout.exit_code == 3
    back = rollout.going_back()
    assert back.going_back() == back
    assert [one.box for one in back.to_return()] == ["b", "a"], (
        "its person's change is looked at there"
    )
    for step in back.to_return():
        back = back.with_step(step.at(State.RETURNED))
    assert back.exit_code == 1, "one was left alone"
    assert back.with_step(Step("c", State.RETURNED)).exit_code == 0
    assert back.with_step(Step("a", State.STRANDED)).exit_code == 4


def test_what_a_box_says_is_taken_in_its_sizes_alone() -> None:
    whole = a_status().model_dump()
    Status.model_validate(whole)
    swap = {"number": 1, "reason": "a", "outcome": "b", "detail": None}
    wrong: list[dict[str, Any]] = [
        {"generation": -1}, {"generation": 10**13}, {"generation": "x"}, {"drift": [{}] * 1001},
        {"drift": [{"code": "x" * 10_001}]}, {"healthy": "perhaps"},
        {"last_swap": {**swap, "replaced": "--to=x"}}, {"last_swap": {**swap, "replaced": "a/b;c"}},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ValidationError):
            Status.model_validate(whole | change)


def test_the_boxes_of_ansible_come_in_its_order() -> None:
    def named(**of_a: object) -> list[str]:
        of_b = {"ansible_host": "10.0.0.2", "ansible_user": "root"}
        return list(name_of_hosts({
            "_meta": {"hostvars": {"b": of_b, "a": of_a}},
            "all": {"children": ["gpus", "ungrouped"]},
            "gpus": {"hosts": ["b", "a"], "children": ["all"]},
        }))  # fmt: skip

    assert named() == ["root@10.0.0.2", "a"]
    found = named(ansible_ssh_host="10.0.0.1", ansible_ssh_user="gpu", ansible_port="22")
    assert found == ["root@10.0.0.2", "gpu@10.0.0.1"]
    for name in ("ansible_port", "ansible_ssh_port"):
        with pytest.raises(ValueError, match=r"a has a port"):
            named(**{name: 2222})


def test_a_unit_whose_name_systemd_escaped_is_understood() -> None:
    told = {"messages": [], "generation": 5, "summary": "done"}
    name = r"llama\x2dserver.service.pre-apply-1"
    assert Change.model_validate({**told, "backup": name}).backup == name
    with pytest.raises(ValidationError):
        Change.model_validate({**told, "backup": "../x"})


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["all", "hosts", "children", "_meta", "hostvars", "x"]), inner)))  # fmt: skip
def test_no_inventory_makes_it_fail_otherwise(listed: Any) -> None:
    try:
        list(name_of_hosts(listed))
    except (ValueError, TypeError, AttributeError):
        return
