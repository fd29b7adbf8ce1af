"""Which space a profile gives a sweep, what an arm changes of the profile, and why the rest is out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from tunerd.profile.arm import Arm, Family, Policy, Space
from tunerd.sweep.space import (
    Base,
    EngineFacts,
    SpacePlan,
    Wishes,
    base_arm,
    build_grid,
    changed,
    changes,
    plan_space,
    spec_of,
    variant_of,
)

VALUES: dict[str, Any] = {
    "speculation.type": "mtp",
    "speculation.n_max": 3,
    "speculation.p_min": 0.75,
    "memory.fit_mib": 1024,
    "serving.n_ubatch": 512,
    "serving.n_batch": 2048,
    "serving.threads": 4,
    "serving.cache_type_k": "q8_0",
    "serving.cache_type_v": "q8_0",
}
KINDS: dict[str, str | None] = {"mtp": None, "off": None}


def base(has_gpu: bool = True, searched: Collection[str] = (), **changed: Any) -> Base:
    values = {**VALUES, **{name.replace("__", "."): value for name, value in changed.items()}}
    values = {key: value for key, value in values.items() if value is not None}
    arm = base_arm(
        "a", values, has_gpu=has_gpu, physical_cores=6, default_n_max=16, default_p_min=0.75,
        searched=searched,
    )  # fmt: skip
    kind = values.get("speculation.type") or "off"
    return Base(arm, values, {spec_of(kind): kind})


def planned(
    *engines: EngineFacts,
    ranges: dict[str, tuple[Any, ...]] | None = None,
    pins: dict[str, str] | None = None,
    frozen: dict[str, str] | None = None,
    consent: bool = False,
    start: Base | None = None,
    drafters: dict[str, str] | None = None,
) -> SpacePlan:
    wishes = Wishes(ranges or {}, pins or {}, frozen or {}, consent, drafters or {})
    return plan_space(start or base(), engines or (EngineFacts("a", KINDS),), wishes)


def reasons(plan: SpacePlan) -> dict[str, str]:
    return {one.what: one.reason for one in plan.left_out}


def test_the_incumbent_and_speculation_off_are_always_in_the_space() -> None:
    plan = planned(ranges={"speculation.n_max": (1, 2), "speculation.p_min": (0.0,)})
    grid = build_grid(plan.space, plan.base.arm, Policy())
    assert grid.contains(plan.base.arm)
    assert ("a", "off") in plan.space.families
    assert plan.space.families["a", "mtp"].n_max == (1, 2, 3)


def test_a_list_of_kinds_cannot_take_away_what_serves_nor_off() -> None:
    plan = planned(
        EngineFacts("a", {**KINDS, "dflash": None}), ranges={"speculation.type": ("dflash",)}
    )
    assert set(plan.space.families) == {("a", "mtp"), ("a", "off"), ("a", "dflash")}


def test_a_pinned_key_has_one_value_and_its_reason() -> None:
    plan = planned(ranges={"speculation.n_max": (1, 2, 8)}, pins={"speculation.n_max": "--set"})
    assert plan.space.families["a", "mtp"].n_max == (3,)
    assert reasons(plan)["speculation.n_max"] == "pinned to 3 by --set"


def test_a_pinned_kind_leaves_nothing_else_even_off() -> None:
    plan = planned(pins={"speculation.type": "night.toml [pin]"})
    assert set(plan.space.families) == {("a", "mtp")}
    assert "pinned to mtp" in reasons(plan)["a, off"]


def test_builds_are_arms_too_and_those_that_cannot_serve_say_why() -> None:
    plan = planned(
        EngineFacts("a", KINDS), EngineFacts("b", KINDS), EngineFacts("c", problem="no MTP")
    )
    assert {engine for engine, _ in plan.space.families} == {"a", "b"}
    assert reasons(plan)["c"] == "no MTP"


def test_a_pinned_engine_is_the_only_one() -> None:
    plan = planned(
        EngineFacts("a", KINDS), EngineFacts("b", KINDS), pins={"engine.prefer": "--set"}
    )
    assert {engine for engine, _ in plan.space.families} == {"a"}
    assert "pinned" in reasons(plan)["b"]


def test_what_a_build_ignores_is_not_searched() -> None:
    facts = EngineFacts(
        "a", KINDS, ignored={"speculation.p_min": "p-min has no effect on this build"}
    )
    plan = planned(facts, ranges={"speculation.p_min": (0.0, 0.5, 0.75)})
    assert plan.space.families["a", "mtp"].p_min == (0.75,)
    assert "no effect" in reasons(plan)["a, speculation.p_min"]


def test_values_that_would_not_be_deployed_are_out_but_never_the_present_one() -> None:
    refused = {("serving.n_ubatch", 2048): "it does not fit", ("serving.n_ubatch", 512): "nor this"}
    plan = planned(
        EngineFacts("a", KINDS, refused=refused), ranges={"serving.n_ubatch": (256, 512, 2048)}
    )
    assert plan.space.families["a", "mtp"].ubatch == (256, 512)
    assert reasons(plan)["a, serving.n_ubatch = 2048"] == "it does not fit"


def test_what_can_change_the_output_needs_consent() -> None:
    ranges = {"serving.cache_type_k": ("q4_0", "f16"), "serving.reasoning_budget": (0, 512)}
    without = planned(ranges=ranges)
    assert without.space.families["a", "mtp"].kv == ("q8_0",)
    assert without.space.families["a", "mtp"].extra == (frozenset(),)
    assert "may_change_output" in reasons(without)["serving.cache_type_k"]
    with_consent = planned(ranges=ranges, consent=True).space.families["a", "mtp"]
    assert with_consent.kv == ("q8_0", "q4_0", "f16")
    assert frozenset({("serving.reasoning_budget", 512)}) in with_consent.extra


# Placement

FROZEN = frozenset({("memory.n_gpu_layers", 41), ("memory.n_cpu_moe", 6)})


@pytest.mark.parametrize(
    ("present", "near"),
    [
        ("q8_0", {"q4_0", "iq4_nl", "f16", "bf16"}),
        ("q4_0", {"iq4_nl", "q8_0"}),
        ("q5_1", {"q4_0", "iq4_nl", "q8_0"}),
    ],
)
def test_a_cache_type_is_left_for_the_next_size_up_or_down(present: str, near: set[str]) -> None:
    types = ("q8_0", "f16", "q4_0", "bf16", "iq4_nl")
    family = Family((3,), (0.0,), (0, 1024), types, (512,), (2048,), (4,))
    incumbent = Arm("a", "mtp", 3, 0.0, 0, present, 512, 2048, 4)
    grid = build_grid(Space({("a", "mtp"): family}), incumbent, Policy())
    found = grid.families["a", "mtp"].variants_near(variant_of(incumbent))
    assert {variant.kv for variant in found} == {present, *near}


@pytest.mark.parametrize(("present", "near"), [(8, {7, 16}), (4, {6}), (5, {4, 6})])
def test_threads_are_left_for_the_next_number_up_or_down(present: int, near: set[int]) -> None:
    """Half of them, once seen to be 30 % slower, made one less look slower too, which was the best."""
    family = Family((3,), (0.0,), (0, 1024), ("q8_0",), (512,), (2048,), (4, 6, 7, 8, 16))
    incumbent = Arm("a", "mtp", 3, 0.0, 0, "q8_0", 512, 2048, present)
    grid = build_grid(Space({("a", "mtp"): family}), incumbent, Policy())
    centre = variant_of(incumbent)
    found = {variant.threads for variant in grid.families["a", "mtp"].variants_near(centre)}
    assert found == {present, *near}


@pytest.mark.parametrize(("serves", "kept"), [(0.75, (0.75,)), (0.3, (0.0,))])
def test_drafts_that_are_looked_up_have_no_confidence_to_search(
    serves: float, kept: tuple[float, ...]
) -> None:
    family = Family((3,), (0.0, 0.5, 0.75), (0,), ("q8_0",), (512,), (2048,), (4,))
    incumbent = Arm("a", "mtp", 3, serves, 0, "q8_0", 512, 2048, 4)
    space = Space({("a", "mtp"): family, ("a", "ngram"): family})
    grid = build_grid(space, incumbent, Policy())
    assert grid.families["a", "ngram"].p_min == kept
    assert grid.families["a", "mtp"].p_min == (0.0, 0.5, 0.75)


def test_experts_in_ram_are_a_dimension_that_needs_no_consent() -> None:
    ranges = {"memory.n_cpu_moe": (0, 4, 8)}
    facts = EngineFacts("a", KINDS, refused={("memory.n_cpu_moe", 0): "it needs 20 GiB of VRAM"})
    plan = planned(facts, ranges=ranges)
    for family in plan.space.families.values():
        counts = [dict(one).get("memory.n_cpu_moe") for one in family.extra]
        assert counts == [None, 4, 8]
    assert reasons(plan)["a, memory.n_cpu_moe = 0"] == "it needs 20 GiB of VRAM"
    assert "memory.n_cpu_moe" not in reasons(plan)
    grid = build_grid(plan.space, plan.base.arm, Policy(may_change_output=False))
    assert len(grid.families["a", "off"].extra) == 3


def test_an_expert_cache_is_tried_without_consent_where_the_build_has_one() -> None:
    key = "memory.moe_cache_mib"
    refused = {(key, 1024): "no --moe-cache-mib", (key, 2048): "no --moe-cache-mib"}
    plan = planned(
        EngineFacts("a", KINDS),
        EngineFacts("b", KINDS, refused=refused),
        ranges={key: (1024, 2048)},
    )
    sizes = [dict(one).get(key) for one in plan.space.families["a", "mtp"].extra]
    assert sizes == [None, 1024, 2048]
    assert plan.space.families["b", "off"].extra == (frozenset(),)
    assert reasons(plan)[f"b, {key} = 1024"] == "no --moe-cache-mib"


def test_what_serves_by_hand_is_one_of_the_counts() -> None:
    start = base(searched=("memory.n_cpu_moe",), memory__n_cpu_moe=6)
    plan = planned(start=start, ranges={"memory.n_cpu_moe": (4, 6, 8)})
    extras = plan.space.families["a", "mtp"].extra
    assert [dict(one)["memory.n_cpu_moe"] for one in extras] == [6, 4, 8]
    assert changes(start.arm, start) == {}
    more = replace(start.arm, extra=extras[2])
    assert changes(more, start) == {"memory.n_cpu_moe": 8}


def test_a_frozen_placement_is_offered_with_every_kind_of_its_own_build() -> None:
    other = EngineFacts("b", KINDS)
    plan = planned(EngineFacts("a", KINDS, placements=(FROZEN,)), other)
    assert plan.space.families["a", "mtp"].extra == (frozenset(), FROZEN)
    assert plan.space.families["a", "off"].extra == (frozenset(), FROZEN)
    assert plan.space.families["b", "off"].extra == (frozenset(),)


def test_what_is_placed_by_hand_says_nothing_of_a_margin() -> None:
    start = base()
    frozen = replace(start.arm, extra=FROZEN, spec="off")
    assert changes(frozen, start) == {
        "speculation.type": "off",
        "memory.n_gpu_layers": 41,
        "memory.n_cpu_moe": 6,
    }
    assert frozen.canonical() == replace(frozen, fit_mib=64).canonical()
    assert "margin" not in str(frozen)
    assert changed(frozen, start.arm) == (
        "spec mtp -> off, memory.n_cpu_moe = 6, memory.n_gpu_layers = 41"
    )


def test_fit_is_an_alternative_to_what_a_promotion_placed() -> None:
    keys = ("memory.n_gpu_layers", "memory.n_cpu_moe")
    start = base(searched=keys, memory__n_gpu_layers=41, memory__n_cpu_moe=6)
    assert start.arm.is_placed
    fit = frozenset((key, "default") for key in keys)
    plan = planned(EngineFacts("a", KINDS, placements=(fit,)), start=start)
    assert plan.space.families["a", "mtp"].extra == (FROZEN, fit)
    arm = replace(start.arm, extra=fit, fit_mib=512)
    assert not arm.is_placed
    assert changes(arm, start) == {**dict(fit), "memory.fit_mib": 512}


# Draft models


def test_the_draft_model_is_named_where_it_drafts_and_nowhere_else() -> None:
    facts = EngineFacts("a", {**KINDS, "draft": None})
    plan = planned(facts, drafters={"draft": "small.gguf"})
    assert plan.space.families["a", "mtp"].extra == (frozenset(),)
    (extra,) = plan.space.families["a", "draft"].extra
    arm = replace(plan.base.arm, spec="draft", n_max=4, extra=extra)
    assert changes(arm, plan.base) == {
        "speculation.type": "draft",
        "speculation.draft_model": "small.gguf",
        "speculation.n_max": 4,
        "speculation.p_min": 0.75,
    }
    grid = build_grid(plan.space, plan.base.arm, Policy(may_change_output=False))
    assert grid.contains(arm)


def test_a_kind_that_needs_another_draft_model_than_the_pinned_one_is_left_out() -> None:
    drafters, pins = {"mtp": "a.gguf", "draft": "b.gguf"}, {"speculation.draft_model": "a pin"}
    facts = EngineFacts("a", {**KINDS, "draft": None})
    start = base(speculation__type="off", speculation__draft_model="a.gguf")
    plan = planned(facts, start=start, drafters=drafters, pins=pins)
    assert {spec for _, spec in plan.space.families} == {"off", "mtp"}
    assert "is pinned to another file" in " ".join(one.reason for one in plan.left_out)


def test_what_drafts_now_is_not_named_again() -> None:
    start = base(speculation__type="draft", speculation__draft_model="small.gguf")
    plan = planned(EngineFacts("a", {"draft": None, "off": None}), start=start)
    assert plan.space.families["a", "draft"].extra == (frozenset(),)


def test_without_a_gpu_there_is_no_margin_to_search() -> None:
    plan = planned(start=base(has_gpu=False), frozen={"memory.fit_mib": "there is no GPU"})
    assert plan.space.families["a", "mtp"].fit_mib == (0,)


# What an arm changes


def test_the_base_changes_nothing_whatever_it_leaves_to_the_engine() -> None:
    bare = base(serving__n_ubatch=None, serving__threads=None, memory__fit_mib=None)
    assert changes(bare.arm, bare) == {}


DRAFTS = {"speculation.n_max": 3, "speculation.p_min": 0.75}


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ({}, {}),
        ({"n_max": 2}, {"speculation.n_max": 2}),
        ({"threads": 2, "ubatch": 256}, {"serving.threads": 2, "serving.n_ubatch": 256}),
        ({"spec": "off"}, {"speculation.type": "off"}),
        ({"spec": "ngram"}, {"speculation.type": "ngram-mod", **DRAFTS}),
        # Tables of another engine may differ.
        ({"engine": "b"}, {"engine.prefer": ["b"], "speculation.type": "mtp", **DRAFTS}),
    ],
)
def test_an_arm_names_what_differs_and_another_kind_or_engine_all_of_its_drafts(
    differs: dict[str, Any], named: dict[str, Any]
) -> None:
    start = replace(base(), spec_types={"mtp": "mtp", "ngram": "ngram-mod"})
    assert changes(replace(start.arm, **differs), start) == named


def test_the_drafts_cache_follows_only_where_the_profile_speaks_of_it() -> None:
    start = base()
    assert set(changes(replace(start.arm, kv="q4_0"), start)) == {
        "serving.cache_type_k",
        "serving.cache_type_v",
    }
    own = base(speculation__cache_type_k="q8_0")
    assert changes(replace(own.arm, kv="q4_0"), own)["speculation.cache_type_k"] == "q4_0"
