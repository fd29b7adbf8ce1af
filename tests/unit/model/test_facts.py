"""Facts of a model from its headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.gguf_bytes import MemorySource, gguf, number, pair, tensor, text
from tests.support.model_headers import (
    QWEN36_27B,
    QWEN36_35B_A3B,
    HollowSource,
    facts_of_bytes,
    facts_of_shape,
    small,
)
from tests.support.shapes import PlainShape, hollow_bytes
from tunerd.errors import ModelFileError
from tunerd.model.facts import why_apart
from tunerd.model.gguf import ValueType, read_header

MTP = "blk.2.nextn.eh_proj.weight"


def part(no: int, count: int, *blocks: int, tensors: int | None = None) -> bytes:
    """A part of a split model with a tensor of each of these blocks; `tensors` of the whole."""
    said = {"no": no, "count": count} | ({} if tensors is None else {"tensors.count": tensors})
    names = [(f"blk.{index}.attn_norm.weight", (8,)) for index in blocks]
    extra = [number(f"split.{key}", value) for key, value in said.items()]
    return small(keys={"block_count": 4}, tensors=names, extra=extra)


def test_a_hybrid_model_says_which_layers_attend_and_which_draft() -> None:
    facts = facts_of_shape(QWEN36_27B)

    assert (len(facts.blocks), facts.n_nextn, len(facts.trunk)) == (65, 1, 64)
    assert sum(block.is_recurrent for block in facts.blocks) == 48
    attending = [block.index for block in facts.trunk if block.has_attention]
    assert attending == list(range(3, 64, 4))
    assert facts.blocks[3].k_values == facts.blocks[3].v_values == 4 * 256
    assert facts.blocks[64].is_mtp
    assert facts.blocks[64].has_attention
    assert facts.has_mtp
    assert facts.is_gated_attention
    assert (facts.n_vocab, facts.mtp_types[0][0]) == (248320, "q8_0")


def test_experts_are_counted_apart_and_every_byte_has_one_place() -> None:
    facts = facts_of_shape(QWEN36_35B_A3B)

    experts = 3 * 256 * 512 * 2048 // 32 * 34
    assert [block.expert_bytes for block in facts.blocks] == [experts] * 41
    assert facts.blocks[0].largest_expert_bytes == experts // 3
    assert (facts.n_expert, facts.n_expert_used, facts.n_ff_expert) == (256, 8, 512)
    blocks = sum(block.n_bytes for block in facts.blocks)
    placed = blocks + facts.input_bytes + facts.output_bytes + facts.other_bytes
    header = read_header(HollowSource(*hollow_bytes(QWEN36_35B_A3B)))
    assert placed == sum(one.n_bytes for one in header.tensors) <= facts.file_bytes


def test_a_head_of_its_own_is_no_tie() -> None:
    heads = [
        (facts.is_tied, facts.head_bytes, facts.head_type)
        for facts in (facts_of_shape(PlainShape(architecture=one)) for one in ("llama", "gemma3"))
    ]
    n_bytes = 1024 * 32768 // 32 * 34
    assert heads == [(False, n_bytes, "q8_0"), (True, n_bytes, "q8_0")]


def test_an_mtp_block_may_be_missing_or_alone_in_its_file() -> None:
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    claimed, alone, whole = (
        facts_of_bytes(small("qwen35", keys, [(name, (8, 4)) for name in names]))
        for names in (["blk.0.attn_q.weight"], [MTP], ["blk.0.attn_q.weight", MTP])
    )

    assert (claimed.has_mtp, claimed.n_nextn, claimed.no_model) == (False, 1, None)
    assert MTP in (claimed.mtp_problem or "")
    assert (alone.has_mtp, alone.no_model) == (True, "it only drafts for another model")
    assert (whole.has_mtp, whole.no_model) == (True, None)


def test_all_blocks_of_gemmas_drafter_draft_and_none_of_them_has_a_cache() -> None:
    """It was refused, as a model without a trunk is."""
    keys = {"block_count": 4, "nextn_predict_layers": 4, "attention.shared_kv_layers": 4}
    projection = ("nextn.pre_projection.weight", (8, 4))
    blocks = [(f"blk.{block}.attn_q.weight", (8, 4)) for block in range(4)]
    found = facts_of_bytes(small("gemma4-assistant", keys, [*blocks, projection]))

    assert (found.has_mtp, found.no_model) == (True, "it only drafts for another model")
    assert (len(found.mtp_blocks), [one.has_attention for one in found.blocks]) == (4, [False] * 4)


@pytest.mark.parametrize(
    ("pairs", "has_tensors", "why"),
    [
        ([text("general.architecture", "clip")], True, "it is a multimodal projector"),
        ([text("general.type", "adapter")], True, "it is an adapter"),
        ([text("general.type", "imatrix")], True, "it is a table for quantising"),
        ([text("general.architecture", "llama")], False, "it has no tensors"),
        ([text("general.architecture", "bert"), pair("bert.attention.causal", ValueType.BOOL, False)], True,
         "it is not causal, like models for embeddings"),
        ([text("general.architecture", "qwen9"), text("general.type", "model")], True, None),
    ],
)  # fmt: skip
def test_files_that_models_are_served_with_are_no_models(
    pairs: list[bytes], has_tensors: bool, why: str | None
) -> None:
    """A server was stopped for each of them, and came back when none of them would load."""
    table = [tensor("blk.0.attn_q.weight", (32, 1), 0, 0)] if has_tensors else []
    assert facts_of_bytes(gguf(pairs, table, data=128)).no_model == why


def test_an_unknown_architecture_still_has_facts() -> None:
    tensors = [("token_embd.weight", (8, 50)), ("blk.1.thing", (8,)), ("odd", (3,))]
    facts = facts_of_bytes(small("martian", {"context_length": 100}, tensors))

    assert (facts.architecture, facts.context_length, facts.n_vocab) == ("martian", 100, 50)
    assert facts.n_embd is None
    assert [(block.k_values, block.dense_bytes) for block in facts.blocks] == [
        (None, 0),
        (None, 32),
    ]
    assert facts.other_bytes == 12


def test_kv_heads_may_differ_by_layer() -> None:
    keys: dict[str, int | list[int]] = {
        "block_count": 4, "embedding_length": 64, "attention.head_count": 4,
        "attention.head_count_kv": [0, 2, 0, 1], "ssm.conv_kernel": 4, "ssm.inner_size": 32,
        "ssm.state_size": 16, "ssm.group_count": 2,
    }  # fmt: skip
    facts = facts_of_bytes(small("nemotron_h", keys))

    assert [block.is_recurrent for block in facts.blocks] == [True, False, True, False]
    assert [block.k_values for block in facts.blocks] == [0, 32, 0, 16]
    assert facts.recurrent is not None
    assert (facts.recurrent.n_conv, facts.recurrent.n_state) == (3 * (32 + 2 * 2 * 16), 16 * 32)


def windowed(architecture: str, n_blocks: int, pattern: Sequence[bool] = ()) -> list[int]:
    keys: dict[str, int | Sequence[bool]] = {
        "block_count": n_blocks,
        "attention.sliding_window": 512,
    }
    if pattern:
        keys["attention.sliding_window_pattern"] = pattern
    facts = facts_of_bytes(small(architecture, keys))
    found = [block.index for block in facts.blocks if block.is_windowed]
    assert facts.sliding_window == (512 if found else None)
    return found


def test_windowed_layers_follow_the_pattern_of_the_architecture() -> None:
    """As ggml-org/llama.cpp converts them; without one each layer was taken for one that attends to all."""
    gemma = facts_of_shape(PlainShape(architecture="gemma3", n_layer=12, sliding_window=512))

    assert [block.index for block in gemma.blocks if not block.is_windowed] == [5, 11]
    assert windowed("olmo2", 8) == [0, 1, 2, 4, 5, 6]
    assert windowed("gemma4", 3, [True, False, True]) == [0, 2]
    assert windowed("qwen2", 4) == []
    for architecture in ("afmoe", "exaone-moe", "laguna", "smallthinker"):
        assert len(windowed(architecture, 8)) == 6


def test_a_hybrid_that_leaves_its_interval_out_attends_in_each_fourth_layer() -> None:
    keys = {"block_count": 8, "ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 16}
    facts = facts_of_bytes(small("qwen4exp", keys))
    assert [block.index for block in facts.blocks if not block.is_recurrent] == [3, 7]


def test_latent_attention_keeps_no_values() -> None:
    keys = {
        "block_count": 2, "attention.head_count": 16, "attention.head_count_kv": 1,
        "attention.key_length": 576, "attention.value_length": 512, "attention.key_length_mla": 192,
    }  # fmt: skip
    facts = facts_of_bytes(small("deepseek2", keys))

    assert (facts.blocks[0].k_values, facts.blocks[0].v_values) == (576, 0)


def test_facts_cover_all_parts_of_a_split_model() -> None:
    facts = facts_of_bytes(part(0, 2, 0, 1, tensors=3), part(1, 2, 2, tensors=3))

    assert [block.dense_bytes for block in facts.blocks] == [32, 32, 32, 0]
    sizes = [file.size_bytes for file in facts.identity.files]
    assert (len(sizes), sum(sizes)) == (2, facts.file_bytes)


def test_parts_and_counts_that_cannot_be_are_refused() -> None:
    refused = [
        ([part(0, 2, 0)], "model has 2 parts, 1 were given"),
        ([part(1, 2, 0), part(0, 2, 1)], "not part 1 of 2 of its model"),
        ([part(0, 2, 0), part(1, 3, 1)], "not part 2 of 2 of its model"),
        ([part(0, 2, 0, tensors=9), part(1, 2, 1)], "parts hold 2 tensors, the model has 9"),
        ([part(0, 2, 0), part(1, 2, 0)], "a tensor is in two parts"),
        ([small(keys={"block_count": 2**31})], "model claims 2147483648 blocks"),
        ([small(tensors=[("blk.999999.x", (1,))])], "model claims 1000000 blocks"),
        ([small(keys={"block_count": 2, "nextn_predict_layers": 2})], "claims 2 MTP blocks of 2"),
    ]
    for shards, problem in refused:
        with pytest.raises(ModelFileError, match=problem):
            facts_of_bytes(*shards)


def test_identity_changes_with_size_time_and_header() -> None:
    one = facts_of_bytes(small()).identity
    file = one.files[0]
    others = [
        replace(one, files=(replace(file, **change),))
        for change in ({"size_bytes": 9}, {"mtime_ns": 9}, {"header_sha256": "11" * 32})
    ]
    moved = replace(one, files=(replace(file, path=file.path.with_name("b.gguf"), inode=9),))

    assert len({one.sha256, *(other.sha256 for other in others)}) == 4
    assert moved.sha256 == one.sha256
    size, time, header = (other.same_sha256 == one.same_sha256 for other in others)
    assert (size, time, header) == (False, True, False)


# Which models speak the same tokens.

WORDS = [f"word{n}" for n in range(200)]


def vocabulary(
    words: Sequence[str] = WORDS, *, kind: str = "gpt2", bos: int = 1, adds: bool | None = None
) -> MemorySource:
    keys = [
        text("tokenizer.ggml.model", kind),
        pair("tokenizer.ggml.tokens", ValueType.ARRAY, (ValueType.STRING, list(words))),
        number("tokenizer.ggml.bos_token_id", bos),
    ]
    if adds is not None:
        keys.append(pair("tokenizer.ggml.add_bos_token", ValueType.BOOL, adds))
    return MemorySource(gguf(keys))


def test_what_keeps_two_apart_is_said() -> None:
    reasons = [
        (vocabulary(), None),
        # Some more tokens and the first five do not matter.
        (vocabulary([*WORDS, *(f"more{n}" for n in range(128))]), None),
        (vocabulary([*"abcde", *WORDS[5:]]), None),
        (vocabulary(kind="llama"), "its tokenizer is llama, the model's is gpt2"),
        (vocabulary([*WORDS, *map(str, range(129))]), "it has 329 tokens, the model 200"),
        (vocabulary([*WORDS[:7], "other", *WORDS[8:]]), "token 7 differs"),
        (MemorySource(gguf([number("n", 1)])), "one of the two files has no vocabulary"),
    ]
    for draft, reason in reasons:
        assert why_apart(vocabulary(), draft) == reason


def test_the_first_token_matters_where_it_is_added() -> None:
    assert why_apart(vocabulary(adds=True), vocabulary(adds=True, bos=2)) == (
        "its first token is 2, the model's is 1"
    )
    assert why_apart(vocabulary(adds=False), vocabulary(adds=False, bos=2)) is None
    assert why_apart(vocabulary(adds=True), vocabulary(adds=False)) == (
        "only one of the two adds a first token"
    )
