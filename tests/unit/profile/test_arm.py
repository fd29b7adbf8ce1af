"""Arms and samples of a sweep: what is equal, and what goes to the store and comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from tunerd.measure.answer import Timings
from tunerd.profile.arm import Arm, Request, Sample, read, simplicity
from tunerd.records import Unreadable, plain
from tunerd.records import read as read_record

ARM = Arm("mainline", "mtp", 3, 0.75, 512, "q8_0", 512, 2048, 8, frozenset({("cpu_moe", 4)}))
REQUEST = Request("code", "p1", cached_tokens=0, new_tokens=300, n_predict=64)
SAMPLE = Sample(
    event="request", process="n/0", arm=ARM, purpose="block", at_s=12.5, seconds=2.0,
    request=REQUEST, n_max=3, p_min=0.75, block="n-s0", pair=(1, 4),
    answer={
        "prompt_n": 300, "prompt_ms": 600.0, "predicted_n": 64, "predicted_ms": 1000.0,
        "draft_n": 60, "draft_n_accepted": 40, "cache_n": 0, "wall_ms": 1650.0,
    },
)  # fmt: skip


def test_a_sample_comes_back_from_json_as_it_was() -> None:
    assert read_record(Sample, json.loads(json.dumps(plain(SAMPLE)))) == SAMPLE


def test_what_a_driver_counts_with_numpy_is_kept_as_plain_numbers() -> None:
    told = {"cache_n": np.int64(3), "draft_n": np.zeros(2, dtype=int)}
    assert (
        json.dumps(plain(replace(SAMPLE, answer=told))["answer"])
        == '{"cache_n": 3, "draft_n": [0, 0]}'
    )


def test_an_arm_has_one_record_in_whatever_order_its_keys_come() -> None:
    keys = [f"k{i}" for i in range(20)]
    kept = plain(replace(SAMPLE, arm=replace(ARM, extra=frozenset((key, 1) for key in keys))))
    assert kept["arm"]["extra"] == [[key, 1] for key in sorted(keys)]


def test_a_record_with_a_key_that_is_not_known_is_taken_for_no_arm() -> None:
    """Without the key it would be another arm, and lend that its figures."""
    with pytest.raises(Unreadable, match="defrag"):
        read_record(Arm, plain(ARM) | {"defrag": 1})


def test_a_reading_tells_what_was_drafted_from_what_was_not_said() -> None:
    reading = SAMPLE.reading
    assert reading is not None
    assert (reading.n_drafted, reading.n_accepted, reading.n_steps) == (60, 40, 23)
    assert reading.turn_ms == 1650.0
    assert reading.vram_free_min_mib is None
    bare = replace(SAMPLE, answer={"prompt_n": 3, "prompt_ms": 6.0}).reading
    assert bare is not None
    assert bare.turn_ms is None


def test_arms_that_do_the_same_are_equal_without_what_means_nothing() -> None:
    off = replace(ARM, spec="off")
    assert off.canonical() == replace(off, n_max=9, p_min=0.1).canonical()
    assert ARM.canonical() != replace(ARM, n_max=4).canonical()


def test_the_simpler_arm_is_speculation_off_then_fewer_drafts_then_a_larger_margin() -> None:
    off = replace(ARM, spec="off")
    arms = [replace(ARM, n_max=5), ARM, replace(ARM, fit_mib=1024), off]
    assert sorted(arms, key=simplicity) == [off, replace(ARM, fit_mib=1024), ARM, arms[0]]


@pytest.mark.parametrize(
    ("known", "passes"),
    [
        (Timings(predicted_n=64, predicted_ms=700.0, draft_n=40, draft_n_accepted=28), (35, 20.0)),
        # It ended within its draft: one pass of 900 ms with 64 drafts went into the time of a pass.
        (Timings(predicted_n=48, predicted_ms=900.0, draft_n=64, draft_n_accepted=60), (None, None)),
    ],
)  # fmt: skip
def test_a_search_counts_verification_passes_as_every_other_part_does(
    known: Timings, passes: tuple[int | None, float | None]
) -> None:
    found = read(asdict(known))
    assert (found.n_steps, found.step_ms) == (known.steps, known.step_ms) == passes
