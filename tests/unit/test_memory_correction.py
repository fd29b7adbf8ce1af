"""What a load showed, taken over into the next estimate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.core.memory_correction import (
    MemoryCorrection,
    Observation,
    PartGroup,
    corrected,
    observe,
)
from tunerd.core.memory_parts import GROWING, Device, Part, PartKind
from tunerd.core.memory_report import parse_report

MIB = 1024 * 1024
PARTS = (
    Part(PartKind.WEIGHTS, Device.GPU, 9000 * MIB, "tensors"),
    Part(PartKind.WEIGHTS, Device.HOST, 400 * MIB, "embedding"),
    Part(PartKind.KV, Device.GPU, 1200 * MIB, "cells"),
    Part(PartKind.MTP_KV, Device.GPU, 75 * MIB, "cells"),
    Part(PartKind.COMPUTE, Device.GPU, 500 * MIB, "upper bound"),
    Part(PartKind.MTP_COMPUTE, Device.GPU, 100 * MIB, "upper bound"),
    Part(PartKind.CHECKPOINTS, Device.HOST, 4800 * MIB, "64 times 75 MiB"),
)
LOG = [
    "load_tensors:   CPU_Mapped model buffer size =   400.00 MiB",
    "load_tensors:        CUDA0 model buffer size =  9000.25 MiB",
    "llama_kv_cache:      CUDA0 KV buffer size =  1280.00 MiB",
    "llama_context:      CUDA0 compute buffer size =   480.50 MiB",
]

KINDS = st.sampled_from([kind for kind in PartKind if kind not in GROWING])
PARTS_AT_RANDOM = st.lists(
    st.builds(
        Part,
        KINDS,
        st.sampled_from(Device),
        st.none() | st.integers(0, 20_000 * MIB),
        st.just("a formula"),
    ),
    max_size=8,
)
OBSERVATIONS = st.lists(
    st.builds(
        Observation,
        st.sampled_from(Device),
        st.sampled_from(PartGroup),
        st.none() | st.floats(0, 20_000),
        st.floats(0, 20_000),
    ),
    max_size=6,
    unique_by=lambda one: (one.device, one.group),
).map(tuple)


def seen(*observations: Observation) -> MemoryCorrection:
    return MemoryCorrection(observations, n_loads=1, observed_s=0.0)


def mib(parts: tuple[Part, ...], device: Device, *kinds: PartKind) -> float:
    mine = [p for p in parts if p.device is device and (not kinds or p.kind in kinds)]
    return sum(part.n_bytes or 0 for part in mine) / MIB


def test_estimate_and_report_stand_side_by_side() -> None:
    found = {(o.device, o.group): o for o in observe(PARTS, parse_report(LOG))}
    assert {key: (o.estimated_mib, o.reported_mib) for key, o in found.items()} == {
        (Device.GPU, PartGroup.WEIGHTS): (9000.0, 9000.25),
        (Device.HOST, PartGroup.WEIGHTS): (400.0, 400.0),
        (Device.GPU, PartGroup.KV): (1275.0, 1280.0),
        (Device.GPU, PartGroup.COMPUTE): (600.0, 480.5),
    }
    assert found[Device.GPU, PartGroup.COMPUTE].difference_mib == pytest.approx(-119.5)


def test_a_log_without_buffers_shows_nothing() -> None:
    assert observe(PARTS, parse_report(["llama_context: n_ctx = 4096"])) == ()


def test_after_a_load_the_estimate_is_what_the_engine_reported() -> None:
    parts = corrected(PARTS, seen(*observe(PARTS, parse_report(LOG))))
    assert mib(parts, Device.GPU) == pytest.approx(9000.25 + 1280 + 480.5, abs=0.01)
    kv = {part.kind: part for part in parts if part.device is Device.GPU}
    assert kv[PartKind.KV].n_bytes == 1205 * MIB
    assert kv[PartKind.MTP_KV].n_bytes == 75 * MIB
    assert kv[PartKind.KV].formula == "cells; +5 MiB as the last load showed"


def test_what_no_load_showed_stays_as_it_was() -> None:
    parts = corrected(PARTS, seen(Observation(Device.GPU, PartGroup.KV, 1275.0, 1300.0)))
    assert mib(parts, Device.HOST) == mib(PARTS, Device.HOST)
    assert mib(parts, Device.GPU, PartKind.WEIGHTS) == 9000
    assert corrected(PARTS, None) == PARTS


def test_what_was_not_known_is_what_the_known_parts_leave() -> None:
    unknown = (
        Part(PartKind.COMPUTE, Device.GPU, None, "no such law"),
        Part(PartKind.MTP_COMPUTE, Device.GPU, 100 * MIB, "upper bound"),
    )
    parts = corrected(unknown, seen(Observation(Device.GPU, PartGroup.COMPUTE, None, 480.0)))
    assert {part.kind: part.n_bytes for part in parts} == {
        PartKind.COMPUTE: 380 * MIB,
        PartKind.MTP_COMPUTE: 100 * MIB,
    }
    assert parts[0].formula == "no such law; as the last load showed"


def test_memory_that_nobody_expected_becomes_a_part() -> None:
    (part,) = corrected((), seen(Observation(Device.GPU, PartGroup.STATE, 0.0, 12.0)))
    assert (part.kind, part.device, part.n_bytes) == (PartKind.STATE, Device.GPU, 12 * MIB)
    assert part.formula == "reported by the engine after a load: 12 MiB"


def test_a_report_of_nothing_takes_every_part_of_its_purpose_away() -> None:
    parts = corrected(PARTS, seen(Observation(Device.GPU, PartGroup.KV, 1275.0, 0.0)))
    assert mib(parts, Device.GPU, PartKind.KV, PartKind.MTP_KV) == 0


@given(PARTS_AT_RANDOM, OBSERVATIONS)
def test_corrected_parts_add_up_to_what_was_reported(
    parts: list[Part], observations: tuple[Observation, ...]
) -> None:
    after = corrected(parts, seen(*observations))
    assert all(part.n_bytes is None or part.n_bytes > 0 for part in after)
    again = {(o.device, o.group): o for o in observations}
    kinds = {
        PartGroup.WEIGHTS: {PartKind.WEIGHTS, PartKind.MTP_WEIGHTS, PartKind.DRAFT_WEIGHTS},
        PartGroup.KV: {PartKind.KV, PartKind.MTP_KV, PartKind.DRAFT_KV},
        PartGroup.STATE: {PartKind.STATE, PartKind.DRAFT_STATE},
        PartGroup.COMPUTE: {PartKind.COMPUTE, PartKind.MTP_COMPUTE, PartKind.DRAFT_COMPUTE,
                            PartKind.OUTPUT},
    }  # fmt: skip
    for (device, group), observation in again.items():
        assert mib(after, device, *kinds[group]) == pytest.approx(
            observation.reported_mib, abs=0.001
        )
    covered = {kind for group in kinds.values() for kind in group}
    assert covered | GROWING == set(PartKind)
