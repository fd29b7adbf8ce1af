from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tunerd.core.designed import (
    REGION_MIX,
    SHAPES,
    Design,
    Fill,
    Quant,
    Shape,
    design,
    metadata,
    region_counts,
    shape_named,
    vocabulary,
)
from tunerd.core.designed_code import codewords
from tunerd.core.designed_quant import decode, encode
from tunerd.errors import ConfigError, UsageError

TIERS = np.array([0.475, 0.675, 0.875, 0.925, 1.0])


@pytest.fixture(scope="module")
def tiny() -> Design:
    return design(SHAPES["tiny"])


def test_q8_0_is_stored_and_read_as_ggml_does() -> None:
    values = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    values[3, 32:64] = 0
    values[4, :32] = np.arange(32) - 15.5  # halves of a step: ggml rounds them away from zero
    values[4, 31] = 127

    stored = encode(values, Quant.Q8_0)

    assert np.array_equal(stored, quantize(values, GGMLQuantizationType.Q8_0))
    assert np.array_equal(
        decode(stored, Quant.Q8_0, 96), dequantize(stored, GGMLQuantizationType.Q8_0)
    )


@pytest.mark.parametrize("quant", Quant)
def test_every_tensor_has_as_many_bytes_as_its_spec_says(quant: Quant) -> None:
    made = design(replace(SHAPES["tiny-moe"], quant=quant))

    for spec in made.tensors:
        assert made.stored(spec).nbytes == spec.n_bytes, spec.name


def test_codewords_of_256_signs_overlap_by_a_sixteenth_at_most() -> None:
    words = codewords(1291, 256, np.random.default_rng(0))
    overlap = np.abs(words @ words.T) / 256

    assert np.array_equal(np.abs(words), np.ones_like(words))
    assert np.allclose(np.diag(overlap), 1)
    assert overlap[~np.eye(len(words), dtype=bool)].max() <= 1 / 16


@pytest.mark.parametrize("name", SHAPES)
def test_text_goes_round_every_word_of_a_region_and_never_leaves_it(name: str) -> None:
    truth = design(SHAPES[name]).truth()

    for region in vocabulary().regions:
        once = truth.generate(region.first, len(region.tokens))
        assert sorted(once) == list(region.tokens)
        assert once[-1] == region.first


def test_any_token_leads_into_the_region_that_it_selects(tiny: Design) -> None:
    truth = tiny.truth()

    for token in range(vocabulary().n_tokens):
        assert int(truth.successor[token]) in vocabulary().region_of(token)


@pytest.mark.parametrize(
    ("quant", "seed"), [(Quant.Q8_0, 0), (Quant.Q8_0, 1), (Quant.F16, 0), (Quant.F32, 0)]
)
def test_confidences_are_those_of_the_plan_after_rounding(quant: Quant, seed: int) -> None:
    """Tokens near a p-min that people use would make counts depend on an engine's rounding."""
    truth = design(replace(SHAPES["tiny"], quant=quant), seed).truth()
    assert truth.confidence is not None
    assert truth.confidence_of_all is not None
    words = truth.confidence[vocabulary().regions[0].first :]

    assert np.abs(words[:, None] - TIERS).min(axis=1).max() < 0.012
    assert np.abs(words[:, None] - np.arange(0.05, 0.99, 0.05)).min() > 0.01
    assert np.abs(truth.confidence - truth.confidence_of_all).max() < 0.005


def test_each_region_has_the_mistakes_and_doubts_of_its_mix(tiny: Design) -> None:
    truth = tiny.truth()
    assert truth.guess is not None
    assert truth.confidence is not None

    for region in vocabulary().regions:
        likely, fair, faint, bold_wrong, fair_wrong, faint_wrong = REGION_MIX[region.name]
        tokens = np.array(region.tokens)
        is_right = truth.guess[tokens] == truth.successor[tokens]
        tier = np.abs(truth.confidence[tokens][:, None] - TIERS).argmin(axis=1)

        certain = 128 - sum(REGION_MIX[region.name])
        assert np.bincount(tier[is_right], minlength=5).tolist() == [
            faint,
            fair,
            0,
            likely,
            certain,
        ]
        assert np.bincount(tier[~is_right], minlength=5).tolist() == [
            faint_wrong,
            fair_wrong,
            bold_wrong,
            0,
            0,
        ]


@pytest.mark.parametrize("n_max", [1, 2, 3, 6])
def test_speculation_finds_code_easiest_and_creative_text_hardest(tiny: Design, n_max: int) -> None:
    truth = tiny.truth()
    yields = {
        region.name: region_counts(truth, region, n_max, 0.0).tokens_per_step
        for region in vocabulary().regions
    }

    known = {name: tokens for name, tokens in yields.items() if tokens is not None}
    assert len(known) == len(REGION_MIX)
    assert max(known, key=lambda name: known[name]) == "code"
    assert min(known, key=lambda name: known[name]) == "creative"


def test_a_p_min_gives_fewer_and_better_drafts(tiny: Design) -> None:
    truth = tiny.truth()

    for region in vocabulary().regions:
        free = region_counts(truth, region, 3, 0.0)
        gated = region_counts(truth, region, 3, 0.75)
        assert gated.drafted < free.drafted
        assert (gated.acceptance_ratio or 0) > (free.acceptance_ratio or 1)


def test_the_same_seed_gives_the_same_bytes_and_another_one_another_text(tiny: Design) -> None:
    again, other = design(SHAPES["tiny"]), design(SHAPES["tiny"], seed=1)

    for spec in tiny.tensors:
        assert np.array_equal(tiny.stored(spec), again.stored(spec)), spec.name
    assert again.truth().generate(300, 50) != other.truth().generate(300, 50)


def test_blocks_read_something_and_add_almost_nothing(tiny: Design) -> None:
    for spec in tiny.tensors:
        values = decode(tiny.stored(spec), spec.quant, spec.dims[-1])
        if spec.fill is Fill.SILENT:
            assert 0 < np.sqrt(np.mean(values**2)) * spec.dims[-1] ** 0.5 < 2e-3, spec.name
        if spec.fill is Fill.INPUT:
            assert 0.8 < np.sqrt(np.mean(values**2)) * spec.dims[-1] ** 0.5 < 1.2, spec.name


def test_a_hollow_model_is_zeros_but_for_what_decides_and_behaves_the_same(tiny: Design) -> None:
    hollow = design(replace(SHAPES["tiny"], is_hollow=True))

    for spec in hollow.tensors:
        if spec.fill in {Fill.INPUT, Fill.SILENT}:
            assert not hollow.stored(spec).any()
    assert hollow.truth().generate(300, 200) == tiny.truth().generate(300, 200)
    assert hollow.n_bytes == tiny.n_bytes


def test_the_drafts_do_not_change_the_text(tiny: Design) -> None:
    bare = design(SHAPES["tiny-nomtp"]).truth()

    assert bare.guess is None
    assert bare.generate(300, 300) == tiny.truth().generate(300, 300)


def test_a_shape_with_other_sizes_keeps_the_behaviour() -> None:
    shape = Shape(n_embd=768, n_layer=2, full_attention_interval=2, n_vocab=4096, is_moe=True)
    truth = design(shape).truth()

    region = vocabulary().region("code")
    assert sorted(truth.generate(region.first, 128)) == list(region.tokens)


def test_a_narrow_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_embd 128 is too narrow"):
        design(Shape(n_embd=128))


def test_all_problems_of_a_shape_are_named_at_once() -> None:
    shape = Shape(n_embd=500, n_head=3, n_head_kv=2, n_expert_used=9, n_vocab=10, n_layer=0)

    with pytest.raises(ConfigError) as caught:
        design(shape)

    for part in ("n_layer", "n_embd is 500", "n_head 3", "n_expert_used 9", "n_vocab is 10"):
        assert part in caught.value.message


def test_a_misspelt_shape_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no shape is called `tiny-mo`") as caught:
        shape_named("tiny-mo")

    assert caught.value.hint == "the nearest is `tiny-moe`"
    assert shape_named("medium") is SHAPES["medium"]


def test_metadata_names_the_mtp_block_only_where_there_is_one() -> None:
    assert metadata(SHAPES["tiny"])["nextn_predict_layers"] == 1
    assert metadata(SHAPES["tiny"])["block_count"] == 5
    assert "nextn_predict_layers" not in metadata(SHAPES["tiny-nomtp"])
    assert metadata(SHAPES["tiny-moe"])["expert_count"] == 8
