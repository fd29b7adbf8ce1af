"""What a load showed, taken over into the next estimate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.model.memory import GROWING, Device, Part, PartKind
from tunerd.model.report import MemoryCorrection, Taken, corrected, parse_report, taken

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
TAKEN = st.lists(
    st.builds(
        Taken,
        st.sampled_from(Device),
        st.sampled_from([PartKind.WEIGHTS, PartKind.KV, PartKind.STATE, PartKind.COMPUTE]),
        st.floats(0, 20_000),
    ),
    max_size=6,
    unique_by=lambda one: (one.device, one.purpose),
).map(tuple)


def seen(*found: Taken) -> MemoryCorrection:
    return MemoryCorrection(found, n_loads=1, observed_s=0.0)


def mib(parts: tuple[Part, ...], device: Device, *kinds: PartKind) -> float:
    mine = [p for p in parts if p.device is device and (not kinds or p.kind in kinds)]
    return sum(part.n_bytes or 0 for part in mine) / MIB


def test_what_a_load_took_is_summed_by_device_and_purpose() -> None:
    found = {(one.device, one.purpose): one.mib for one in taken(parse_report(LOG)) if one.mib}
    assert found == {
        (Device.GPU, PartKind.WEIGHTS): 9000.25,
        (Device.HOST, PartKind.WEIGHTS): 400.0,
        (Device.GPU, PartKind.KV): 1280.0,
        (Device.GPU, PartKind.COMPUTE): 480.5,
    }


def test_after_a_load_the_estimate_is_what_the_engine_reported() -> None:
    parts = corrected(PARTS, seen(*taken(parse_report(LOG))))
    assert mib(parts, Device.GPU) == pytest.approx(9000.25 + 1280 + 480.5, abs=0.01)
    kv = {part.kind: part for part in parts if part.device is Device.GPU}
    assert kv[PartKind.KV].n_bytes == round(1200 * 1280 / 1275 * MIB)
    assert kv[PartKind.MTP_KV].formula == "cells; +0 MiB as the last load showed"
    assert kv[PartKind.KV].formula == "cells; +5 MiB as the last load showed"


def test_where_a_part_was_not_known_what_was_reported_is_one_part() -> None:
    unknown = (
        Part(PartKind.COMPUTE, Device.GPU, None, "no such law"),
        Part(PartKind.MTP_COMPUTE, Device.GPU, 100 * MIB, "upper bound"),
    )
    (part,) = corrected(unknown, seen(Taken(Device.GPU, PartKind.COMPUTE, 480.0)))
    assert (part.kind, part.n_bytes) == (PartKind.COMPUTE, 480 * MIB)
    assert part.formula == "reported after a load: 480 MiB"


@given(PARTS_AT_RANDOM, TAKEN)
def test_corrected_parts_add_up_to_what_was_reported(
    parts: list[Part], found: tuple[Taken, ...]
) -> None:
    after = corrected(parts, seen(*found))
    assert all(part.n_bytes is None or part.n_bytes > 0 for part in after)
    kinds = {
        PartKind.WEIGHTS: {PartKind.WEIGHTS, PartKind.MTP_WEIGHTS, PartKind.DRAFT_WEIGHTS},
        PartKind.KV: {PartKind.KV, PartKind.MTP_KV, PartKind.DRAFT_KV},
        PartKind.STATE: {PartKind.STATE, PartKind.DRAFT_STATE},
        PartKind.EXPERT_CACHE: {PartKind.EXPERT_CACHE},
        PartKind.COMPUTE: {PartKind.COMPUTE, PartKind.MTP_COMPUTE, PartKind.DRAFT_COMPUTE,
                           PartKind.OUTPUT},
    }  # fmt: skip
    for one in found:
        assert mib(after, one.device, *kinds[one.purpose]) == pytest.approx(one.mib, abs=0.001)
    covered = {kind for purpose in kinds.values() for kind in purpose}
    assert covered | GROWING == set(PartKind)
