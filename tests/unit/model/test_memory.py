"""The memory estimate: published values, what differs between builds, and what must always hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import capabilities_of
from tests.support.model_headers import (
    QWEN36_27B,
    QWEN36_35B_A3B,
    facts_of_bytes,
    facts_of_shape,
    small,
)
from tests.support.shapes import PlainShape
from tunerd.engine.capabilities import laws_of, parse_help, read_capabilities
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import (
    COMPUTE,
    IK,
    MAINLINE_JUNE_2026,
    MAINLINE_NOW,
    MAINLINE_SPRING_2026,
    MAINLINE_SUMMER_2026,
    WEIGHTS,
    Device,
    EngineLaws,
    Estimate,
    MemorySettings,
    PartKind,
    Server,
    checkpoint_bytes,
    estimate,
    place,
    row_bytes,
)
from tunerd.tryout.designed import Shape
from tunerd.words import MiB

MIB = 1024 * 1024
GPU, HOST = Device.GPU, Device.HOST
CTX = 131072

LARGE = facts_of_shape(QWEN36_27B)
MOE = facts_of_shape(QWEN36_35B_A3B)
SMALL = facts_of_shape(Shape(n_layer=8, n_embd=512, n_vocab=2048))
SMALL_MOE = facts_of_shape(Shape(n_layer=8, n_embd=512, is_moe=True, n_vocab=2048))
PLAIN = facts_of_shape(PlainShape(architecture="llama", n_layer=6, n_vocab=2048))
TIED = facts_of_shape(PlainShape(architecture="gemma3", n_layer=6, n_vocab=2048))
WINDOWED = facts_of_shape(
    PlainShape(architecture="gemma3", n_layer=12, sliding_window=1024, n_vocab=2048)
)


def weights_of(facts: ModelFacts) -> int:
    blocks = sum(block.n_bytes for block in facts.blocks)
    return blocks + facts.input_bytes + facts.output_bytes + facts.other_bytes


def part(need: Estimate, kind: PartKind, device: Device = GPU) -> int:
    """Bytes of one kind on one device."""
    return need.bytes_of(device, (kind,), at_start=False)


def mtp(n_max: int, **changes: object) -> MemorySettings:
    values = {"ctx_size": CTX, "speculation": "mtp", "n_max": n_max, **changes}
    return MemorySettings(**values)  # type: ignore[arg-type] # a table


# Published models


def test_kv_caches_of_published_models() -> None:
    types = ("cache_type_k", "cache_type_v", "draft_cache_type_k", "draft_cache_type_v")

    def mib(facts: ModelFacts, kind: str) -> tuple[float, float]:
        need = estimate(facts, mtp(2, **dict.fromkeys(types, kind)))
        return part(need, PartKind.KV) / MIB, part(need, PartKind.MTP_KV) / MIB

    kinds = ("f16", "q8_0", "q4_0")
    assert [mib(MOE, kind) for kind in kinds] == [(2560, 256), (1360, 136), (720, 72)]
    assert [mib(LARGE, kind) for kind in kinds] == [(8192, 512), (4352, 272), (2304, 144)]


def test_recurrent_states_of_published_models() -> None:
    def mib(facts: ModelFacts, n_max: int) -> float:
        return part(estimate(facts, mtp(n_max)), PartKind.STATE) / MIB

    assert [mib(MOE, n) for n in (0, 4, 16)] == pytest.approx([62.8, 314, 1068], rel=0.003)
    assert [mib(LARGE, n) for n in (0, 16)] == pytest.approx([149.6, 2543], rel=0.003)


def test_what_does_not_draft_with_a_model_needs_no_copies() -> None:
    for kind in ("off", "ngram-mod"):
        asked = mtp(6, speculation=kind)
        assert estimate(MOE, asked).parts == estimate(MOE, replace(asked, n_max=0)).parts


def test_checkpoints_that_servers_logged() -> None:
    def mib(facts: ModelFacts, kind: str, n_tokens: int) -> float:
        types = {"draft_cache_type_k": kind, "draft_cache_type_v": kind}
        asked = mtp(2, ctx_size=n_tokens, laws=MAINLINE_SUMMER_2026, **types)
        return checkpoint_bytes(Server(facts, asked)) / MIB

    # The context is rounded up to 256 tokens, so the estimate is a little more than the prefix.
    assert [mib(MOE, "f16", n) for n in (9676, 11719)] == pytest.approx([81.9, 85.9], abs=0.6)
    assert [mib(LARGE, "q8_0", n) for n in (4803, 38584)] == pytest.approx([159.7, 230.4], abs=0.6)


def test_a_checkpoint_of_today_does_not_grow_with_the_context() -> None:
    sizes = {checkpoint_bytes(Server(MOE, mtp(2, ctx_size=ctx))) for ctx in (4096, CTX)}

    assert [size / MIB for size in sizes] == [pytest.approx(62.8, abs=0.05)]


def test_checkpoints_and_prompt_cache_are_the_worst_case_on_the_host() -> None:
    asked = mtp(2, draft_cache_type_k="q8_0", draft_cache_type_v="q8_0", laws=MAINLINE_SUMMER_2026)
    need = estimate(MOE, asked)

    assert part(need, PartKind.CHECKPOINTS, HOST) / 1024 / MIB == pytest.approx(6.2, abs=0.05)
    assert part(need, PartKind.PROMPT_CACHE, HOST) == 8192 * MIB
    grown = need.worst_mib(HOST) - need.start_mib(HOST)
    assert grown == pytest.approx(6.2 * 1024 + 8192, abs=60)


# What builds do differently


def test_ik_keeps_a_buffer_for_steps_and_a_layer_more_in_the_cache() -> None:
    asked = MemorySettings(ctx_size=16384, speculation="mtp", n_max=3)
    mainline, ik = estimate(SMALL, asked), estimate(SMALL, replace(asked, laws=IK))
    assert SMALL.recurrent is not None
    state, tail = 4 * SMALL.recurrent.n_state, 4 * SMALL.recurrent.n_conv

    assert part(mainline, PartKind.STATE) == 6 * 4 * (state + tail)
    assert part(ik, PartKind.STATE) == 6 * (state + tail + 3 * state + 5 * tail)
    assert part(ik, PartKind.KV) == part(mainline, PartKind.KV) * 3 // 2


@pytest.mark.parametrize(
    ("laws", "per_cell", "unused", "least_compute"),
    [
        (MAINLINE_NOW, 2 * 128 // 32 * 18, 0, 0),
        (MAINLINE_SPRING_2026, 2 * 128 // 32 * 34, SMALL.blocks[-1].n_bytes, 248320 * 512 * 4),
        (IK, 2 * 128 // 32 * 34, 0, 248320 * 512 * 4),
    ],
)
def test_builds_differ_in_draft_caches_unused_blocks_and_logits(
    laws: EngineLaws, per_cell: int, unused: int, least_compute: int
) -> None:
    """Older ones give drafts the target's cache types, load a block that is not used, keep all logits."""
    types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "draft_cache_type_k": "q4_0",
             "draft_cache_type_v": "q4_0"}  # fmt: skip
    drafting = estimate(SMALL, mtp(2, ctx_size=16384, laws=laws, **types))
    off = estimate(SMALL, MemorySettings(ctx_size=4096, laws=laws))
    large = estimate(LARGE, MemorySettings(ctx_size=4096, has_gpu=False, laws=laws))

    assert part(drafting, PartKind.MTP_KV) == 16384 * per_cell
    assert (part(off, PartKind.MTP_WEIGHTS), part(off, PartKind.MTP_KV)) == (unused, 0)
    compute = part(large, PartKind.COMPUTE, HOST)
    assert compute >= least_compute
    assert (compute < 200 * MIB) is (least_compute == 0)


def test_only_mainline_has_small_caches_for_windows() -> None:
    asked = MemorySettings(ctx_size=32768, n_ubatch=512)
    per_token = 2 * 4 * 64 * 2

    assert part(estimate(WINDOWED, asked), PartKind.KV) == per_token * (2 * 32768 + 10 * 1536)
    whole = estimate(WINDOWED, replace(asked, laws=IK))
    assert part(whole, PartKind.KV) == per_token * 12 * 32768


def test_without_flash_attention_scores_and_wide_masks_come_on_top() -> None:
    asked = MemorySettings(ctx_size=16384, n_ubatch=512)
    plain = estimate(PLAIN, asked)
    scores = estimate(PLAIN, replace(asked, flash_attn=False))

    more = part(scores, PartKind.COMPUTE) - part(plain, PartKind.COMPUTE)
    # The widest stage was the feed-forward network, so a little of the difference is hidden.
    assert more > 0.9 * 16 * 16384 * 512 * 4
    inputs = part(scores, PartKind.COMPUTE, HOST) - part(plain, PartKind.COMPUTE, HOST)
    assert inputs == 16384 * 512 * 2


def test_a_quantised_cache_is_converted_on_cuda_alone() -> None:
    def compute(kind: str, *, is_cuda: bool = True) -> int:
        asked = MemorySettings(ctx_size=CTX, cache_type_k=kind, cache_type_v=kind, is_cuda=is_cuda)
        return part(estimate(LARGE, asked), PartKind.COMPUTE)

    vulkan = compute("q8_0", is_cuda=False)
    assert (compute("q8_0") - vulkan) // MIB == 512
    assert vulkan == compute("f16")


LAWS = {
    "main-0x": MAINLINE_NOW, "main-lm": MAINLINE_SUMMER_2026, "main-mid": MAINLINE_SPRING_2026,
    "main-old": MAINLINE_SPRING_2026, "ik-may": IK, "ik-now": IK, "bee-01": MAINLINE_SPRING_2026,
    "bee-04": MAINLINE_SUMMER_2026,
}  # fmt: skip


def test_every_build_has_laws() -> None:
    assert {dialect: laws_of(capabilities_of(dialect)) for dialect in LAWS} == LAWS


def test_a_build_of_june_reserves_the_f16_copy_of_a_quantised_cache() -> None:
    """ggml-org/llama.cpp#23907, two months before `--load-mode`."""
    row = "--sse-ping-interval N                   server SSE ping interval in seconds\n"
    text = capabilities_of("main-mid").help.text
    laws = laws_of(read_capabilities(parse_help(f"{text}\n{row}")))
    asked = MemorySettings(ctx_size=CTX, cache_type_k="q8_0", cache_type_v="q8_0")
    before, june = (
        part(estimate(LARGE, replace(asked, laws=one)), PartKind.COMPUTE)
        for one in (replace(MAINLINE_JUNE_2026, reserves_converted_kv=False), laws)
    )

    assert laws is MAINLINE_JUNE_2026
    assert (june - before) // MIB == 512
    assert laws.loads_unused_mtp


# Where things are


def test_layers_are_taken_from_the_end_with_the_head_first() -> None:
    def on_gpu(n: int | None) -> tuple[list[int], bool]:
        placement = place(SMALL, MemorySettings(n_gpu_layers=n))
        return sorted(placement.on_gpu), placement.has_head

    assert on_gpu(0) == ([], False)
    assert on_gpu(1) == ([], True)
    assert on_gpu(3) == ([7, 8], True)
    assert on_gpu(10) == on_gpu(None) == on_gpu(99) == (list(range(9)), True)


def test_experts_stay_behind_from_the_front_in_mainline_and_from_the_back_in_ik() -> None:
    def behind(laws: EngineLaws, n_cpu_moe: int = 0, *, cpu_moe: bool = False) -> list[int]:
        asked = MemorySettings(laws=laws, n_cpu_moe=n_cpu_moe, cpu_moe=cpu_moe)
        return sorted(place(SMALL_MOE, asked).experts_on_cpu)

    assert behind(MAINLINE_NOW, n_cpu_moe=3) == [0, 1, 2]
    assert behind(IK, n_cpu_moe=3) == [5, 6, 7]
    assert behind(MAINLINE_NOW, cpu_moe=True) == list(range(9))
    assert behind(IK, cpu_moe=True) == list(range(8))
    assert behind(IK, n_cpu_moe=99) == list(range(8))
    assert behind(MAINLINE_NOW) == behind(IK) == []


def test_feed_forward_networks_may_stay_behind_too() -> None:
    need = estimate(PLAIN, MemorySettings(ctx_size=4096, n_cpu_ffn=2))
    whole = estimate(PLAIN, MemorySettings(ctx_size=4096))

    moved = part(need, PartKind.WEIGHTS, HOST) - part(whole, PartKind.WEIGHTS, HOST)
    assert moved == 2 * 3 * 1024 * 4096 // 32 * 34


def test_caches_are_where_their_layers_are() -> None:
    need = estimate(PLAIN, MemorySettings(ctx_size=4096, n_gpu_layers=3))
    kept = estimate(PLAIN, MemorySettings(ctx_size=4096, kv_offload=False))

    assert part(need, PartKind.KV, GPU) * 2 == part(need, PartKind.KV, HOST)
    assert part(kept, PartKind.KV, GPU) == 0


def test_a_tied_head_is_a_second_copy_on_the_gpu_and_where_it_is_repacked_for_the_cpu() -> None:
    packed, on_cpu = replace(TIED, head_type="q4_0"), MemorySettings(ctx_size=4096, has_gpu=False)
    gpu = estimate(TIED, MemorySettings(ctx_size=4096))
    cpu, mainline, ik = (
        estimate(facts, replace(on_cpu, laws=laws)).bytes_of(HOST, WEIGHTS)
        for facts, laws in ((TIED, MAINLINE_NOW), (packed, MAINLINE_NOW), (packed, IK))
    )

    both = gpu.bytes_of(GPU, WEIGHTS) + gpu.bytes_of(HOST, WEIGHTS)
    assert both == mainline == weights_of(TIED) + TIED.head_bytes
    assert cpu == ik == weights_of(TIED)


def test_experts_in_ram_are_borrowed_for_large_batches() -> None:
    one = MOE.blocks[0].largest_expert_bytes

    def compute(n_cpu_moe: int, n_ubatch: int = 128) -> int:
        asked = MemorySettings(ctx_size=16384, n_ubatch=n_ubatch, n_cpu_moe=n_cpu_moe)
        return part(estimate(MOE, asked), PartKind.COMPUTE)

    assert compute(20) - compute(0) > one / 2
    assert compute(40) - compute(20) == one
    assert compute(20, 16) == compute(0, 16)


def test_without_a_gpu_nothing_is_on_one() -> None:
    asked = mtp(2, ctx_size=16384, has_gpu=False, n_gpu_layers=99, n_cpu_moe=3)
    need = estimate(SMALL_MOE, asked)

    assert need.on(GPU) == ()
    assert need.bytes_of(HOST, WEIGHTS) == weights_of(SMALL_MOE)


def test_a_draft_model_is_a_second_model_on_the_gpu() -> None:
    asked = MemorySettings(ctx_size=16384, speculation="draft", n_max=4, draft=PLAIN)
    need = estimate(SMALL, asked)
    alone = estimate(PLAIN, MemorySettings(ctx_size=16384, n_max=0))

    drafts = (PartKind.DRAFT_WEIGHTS, PartKind.DRAFT_KV, PartKind.DRAFT_COMPUTE)
    own = (PartKind.WEIGHTS, PartKind.KV, PartKind.COMPUTE)
    assert [part(need, kind) for kind in drafts] == [part(alone, kind) for kind in own]
    assert part(need, PartKind.MTP_KV) == 0
    assert part(need, PartKind.PROMPT_CACHE, HOST) == 8192 * MIB


def test_an_mtp_block_in_a_file_of_its_own_is_a_draft_with_one_layer() -> None:
    keys = {
        "block_count": 3, "nextn_predict_layers": 1, "embedding_length": 64, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 32,
        "attention.value_length": 32, "context_length": 4096,
    }  # fmt: skip
    tensors = [("token_embd.weight", (64, 100)), ("blk.2.nextn.eh_proj.weight", (128, 64))]
    companion = facts_of_bytes(small("qwen35", keys, tensors))

    need = estimate(SMALL, mtp(2, ctx_size=4096, draft=companion))

    assert part(need, PartKind.DRAFT_KV) == 4096 * (32 + 32) * 2
    assert part(need, PartKind.DRAFT_WEIGHTS) > 128 * 64 * 4
    assert part(need, PartKind.MTP_KV) == 0
    # The target's own MTP block is loaded all the same.
    assert part(need, PartKind.MTP_WEIGHTS) == SMALL.blocks[-1].n_bytes


def test_of_a_whole_model_that_mtp_drafts_with_the_block_alone_has_a_cache() -> None:
    own, beside = (estimate(SMALL, mtp(2, ctx_size=4096, draft=draft)) for draft in (None, SMALL))

    assert part(beside, PartKind.DRAFT_KV) == part(own, PartKind.MTP_KV)
    assert part(beside, PartKind.DRAFT_COMPUTE) == part(own, PartKind.MTP_COMPUTE)
    assert beside.bytes_of(HOST, (PartKind.DRAFT_STATE,)) == 0


# What must always hold


def test_context_is_rounded_as_engines_round_it() -> None:
    def contexts(ctx: int, slots: int, *, unified: bool = False) -> tuple[int | None, int | None]:
        asked = MemorySettings(ctx_size=ctx, n_parallel=slots, kv_unified=unified)
        need = estimate(PLAIN, asked)
        return need.n_ctx, need.n_ctx_slot

    assert contexts(777, 1) == (1024, 1024)
    assert contexts(1000, 3) == (1536, 512)
    assert contexts(16384, 4) == (16384, 4096)
    assert contexts(16384, 4, unified=True) == (16384, 16384)
    assert contexts(0, 1) == (131072, 131072)


ROWS = {
    ("f16", 1024): 2048, ("q8_0", 1024): 1088, ("Q4_0", 1024): 576, ("q8_KV", 1024): 1032,
    ("turbo4", 1024): 528, ("q8_0", 33): 36, ("kvarn4", 1024): None,
}  # fmt: skip


def test_rows_of_cache_types() -> None:
    assert {(kind, values): row_bytes(kind, values) for kind, values in ROWS} == ROWS


def test_what_is_unknown_is_not_zero() -> None:
    odd_type = estimate(PLAIN, MemorySettings(ctx_size=4096, cache_type_k="kvarn4"))
    odd_model = estimate(facts_of_bytes(small("martian", {"block_count": 2})), MemorySettings())

    (cache,) = [one for one in odd_type.parts if one.mib is None]
    assert cache.kind is PartKind.KV
    assert "kvarn4" in cache.formula
    assert not odd_type.is_complete
    assert {one.kind for one in odd_model.parts if one.mib is None} >= {
        PartKind.KV,
        PartKind.COMPUTE,
    }


def test_an_index_of_what_to_attend_to_is_told_to_be_missing() -> None:
    """Its own cache and its scores counted as nothing."""
    keys = {"block_count": 1, "embedding_length": 64, "attention.head_count": 1, "context_length": 4096,
            "attention.key_length": 64, "attention.value_length": 64}  # fmt: skip
    plain, indexed = (
        estimate(facts_of_bytes(small("qwen4exp", {**keys, **more})), MemorySettings(has_gpu=False))
        for more in ({}, {"attention.indexer.key_length": 64})
    )

    assert (plain.is_complete, indexed.is_complete) == (True, False)


def test_locked_memory_is_the_weights_in_ram() -> None:
    locked = estimate(SMALL_MOE, MemorySettings(ctx_size=4096, n_cpu_moe=4, load_mode="mlock"))
    mapped = estimate(SMALL_MOE, MemorySettings(ctx_size=4096, n_cpu_moe=4))

    assert locked.locked_mib == -(-locked.bytes_of(HOST, WEIGHTS) // MIB)
    assert (locked.is_locked, locked.is_mapped) == (True, False)
    assert (mapped.locked_mib, mapped.is_locked, mapped.is_mapped) == (0, False, True)


def test_what_fit_has_to_move_and_can() -> None:
    need = estimate(SMALL, MemorySettings(ctx_size=4096))
    start = need.start_mib(GPU)

    assert need.fit_needed_mib(MiB(start + 100), 100) == 0
    assert need.fit_needed_mib(MiB(start), 100) == 100
    assert need.movable_mib <= start - need.bytes_of(GPU, COMPUTE) // MIB


_shapes = st.sampled_from([SMALL, SMALL_MOE, PLAIN, TIED, WINDOWED])
_settings = st.builds(
    MemorySettings,
    ctx_size=st.integers(1, 1 << 18),
    n_parallel=st.integers(1, 4),
    kv_unified=st.booleans(),
    cache_type_k=st.sampled_from(["f16", "q8_0", "q4_0"]),
    cache_type_v=st.sampled_from(["f16", "q8_0", "q4_0"]),
    n_ubatch=st.sampled_from([32, 128, 512, 2048]),
    flash_attn=st.booleans(),
    speculation=st.sampled_from(["off", "mtp"]),
    n_max=st.integers(0, 8),
    n_gpu_layers=st.none() | st.integers(0, 12),
    n_cpu_moe=st.integers(0, 12),
    cpu_moe=st.booleans(),
    has_gpu=st.booleans(),
    is_cuda=st.booleans(),
    laws=st.sampled_from([MAINLINE_NOW, MAINLINE_SUMMER_2026, MAINLINE_SPRING_2026, IK]),
)
_often = settings(max_examples=50, deadline=None)


def total(need: Estimate) -> int:
    return sum(need.bytes_of(device, at_start=False) for device in Device)


@_often
@given(_shapes, _settings)
def test_every_weight_is_in_one_place_and_every_part_has_a_number(
    facts: ModelFacts, asked: MemorySettings
) -> None:
    need = estimate(facts, asked)

    weights = sum(need.bytes_of(device, WEIGHTS) for device in Device)
    drafts = asked.speculation == "mtp" and asked.n_max > 0
    unused = sum(block.n_bytes for block in facts.mtp_blocks)
    loaded = weights_of(facts) - (0 if drafts or asked.laws.loads_unused_mtp else unused)
    has_head = asked.has_gpu and asked.n_gpu_layers != 0
    assert weights == loaded + (facts.head_bytes if facts.is_tied and has_head else 0)
    assert all(one.n_bytes is not None and one.n_bytes > 0 for one in need.parts)


@pytest.mark.parametrize(
    ("least", "more"),
    [
        ({}, lambda one: {"ctx_size": one.ctx_size + 77_777}),
        ({"speculation": "mtp"}, lambda one: {"n_max": one.n_max + 1}),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0", "is_cuda": False},
         lambda _: {"cache_type_k": "f16", "cache_type_v": "f16"}),
    ],
    ids=["a larger context", "a deeper draft", "a wider cache"],
)  # fmt: skip
@_often
@given(facts=_shapes, asked=_settings)
def test_more_of_something_never_needs_less(
    least: dict[str, Any], more: Callable[[MemorySettings], dict[str, Any]], facts: ModelFacts,
    asked: MemorySettings,
) -> None:  # fmt: skip
    plain = replace(asked, **least)

    assert total(estimate(facts, replace(plain, **more(plain)))) >= total(estimate(facts, plain))


def test_more_experts_than_their_tensors_have_bytes_need_no_room() -> None:
    """As a header may claim."""
    facts = replace(SMALL_MOE, n_expert=2**40)
    found = estimate(facts, MemorySettings(n_cpu_moe=2, moe_cache_mib=100))
    assert not any(part.kind is PartKind.EXPERT_CACHE for part in found.parts)
