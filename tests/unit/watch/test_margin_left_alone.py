"""A margin that must not be touched is told of, once, and not raised."""

from __future__ import annotations

from tunerd.engine.health import FailureKind
from tunerd.watch.guards import Act, Death, Margin, OomRules, OomState, Policy, look_at_oom


def test_a_unit_that_a_person_edited_is_told_of_and_left_alone() -> None:
    margin = Margin(1664, 0, is_pinned=False, left_alone="its unit was edited by hand")
    state, found = OomState(), []
    for at_s in (0.0, 60.0, 120.0):
        death = Death(at_s, FailureKind.OUT_OF_VRAM, "out of memory", has_given_up=False)
        state, decision = look_at_oom(state, death, margin, OomRules(Policy.ACT, 2))
        found += [] if decision is None else [decision]
    (told,) = found
    assert told.act is Act.NOTHING
    assert told.text.endswith("which is left alone: its unit was edited by hand")
    assert "memory.fit_mib=1792" in (told.hint or "")
